"""`streamer execute`: a script runs once, at its place among the changes of the stream."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from streamer.bookkeeping.scripts import ScriptSide, ScriptState
from streamer.commands import execute_script as execute_command
from streamer.commands.execute_script import Script
from streamer.errors.error_classes import MappingError, ScriptError, StreamerError
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark")

SECONDS = 60.0
NOTE = "2026-11-add-note"
ADD_NOTE = "alter table t add column note text default 'old';\ncreate index on t (note)"


async def execute(
    streamer: Streamer,
    name: str,
    text: str,
    side: ScriptSide = ScriptSide.BOTH,
    seconds: float = SECONDS,
) -> execute_command.ScriptResult:
    sources = execute_command.choose(streamer.mapping, None, None, side)
    (result,) = await execute_command.execute(
        TargetAddress.parse(streamer.settings.target.url),
        sources,
        Script(name, text, side),
        seconds=seconds,
        target_namespace="public",
    )
    return result


async def change(streamer: Streamer, name: str, text: str | None) -> None:
    address = TargetAddress.parse(streamer.settings.target.url)
    await execute_command.change(address, streamer.mapping.sources, name, text)


def set_up(source: Database, target: Database) -> None:
    for db in (source, target):
        db.execute(
            "create table t (id int primary key, v text); create table u (id int primary key);"
            "create table keyless (v int)"
        )


TABLES = """
    t: {initial: none}
    u: {initial: none}
    keyless: {initial: none, type: append}
"""


@pytest.mark.parametrize("is_killed", [False, True])
async def test_definitions_of_a_script_for_both_sides_are_made_once(
    source: Database, target: Database, stream: MakeStreamer, is_killed: bool
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, a text, b text)")
    swap = (
        "alter table t rename column a to c; alter table t rename column b to a;"
        " alter table t rename column c to b; alter table t add column n int default 4;"
        " alter table t drop column n; alter table t add column d int default 3"
    )
    group = "ddl: capture\non_ddl: {drop_column: apply}"
    async with stream("t: {initial: none}", group=group) as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 'a', 'b')")
        await streamer.caught_up()
        source.execute("insert into t values (2, 'a', 'b')")
        await execute(streamer, "swap", swap)
        if is_killed:
            await streamer.kill()
            streamer.start()
        source.execute("insert into t (id, a, b) values (3, 'x', 'y')")
        await streamer.caught_up()
        rows = "select id, a, b, d from t order by id"
        assert target.execute(rows) == source.execute(rows)
        source.execute("alter table t rename column a to z; insert into t (id, z) values (4, 'z')")
        await streamer.caught_up()
        rows = "select id, z, b, d from t order by id"
        assert target.execute(rows) == source.execute(rows)


async def test_rows_that_both_sides_insert_are_those_of_the_source(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, a text, b text); create table keys (k int)")
        db.execute("insert into t values (1, 'a', 'b'), (2, 'a', 'b'), (3, 'a', 'b')")
    source.execute("insert into keys values (10), (11)")  # the target has none
    target.execute("alter table t add column own int; update t set own = 1")
    text = """
        insert into t values (4, gen_random_uuid()::text, current_database());
        insert into t select k, 'x', 'y' from keys;
        insert into t values (5, 'a', 'b'); delete from t where id = 5;
        update t set a = gen_random_uuid()::text where id = 1;
        delete from t where id = 2; insert into t values (2, 'again', 'b');
        alter table t add column c int default 1; insert into t (id, c) values (6, 2);
    """
    async with stream("t: {initial: none}", group="ddl: capture") as streamer:
        await streamer.caught_up()
        await execute(streamer, "rows", text)
        source.execute("insert into t values (7, 'x', 'y')")
        await streamer.caught_up()
        rows = "select id, a, b, c from t order by id"
        assert target.execute(rows) == source.execute(rows)
        assert target.execute("select id from t where own = 1 order by id") == [(1,), (3,)]
        source.execute("insert into t values (8, 'x', 'y')")
        await streamer.caught_up()


async def test_a_script_of_both_sides_changes_keys(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    large = "repeat(md5(id::text), 300)"
    for db in (source, target):
        db.execute(
            "create table t (id int primary key, v text, w text);"
            "create table pair (a int, b text, primary key (a, b)); create table big (n text);"
            "alter table t alter w set storage external; alter table big add primary key (n);"
            "alter table big alter n set storage external, add v int;"
            f"insert into t select id, 'v' || id, {large} from generate_series(1, 9) id;"
            "insert into pair values (1, 'x'), (2, 'y');"
            f"insert into big select left({large}, 2600), id from generate_series(1, 2) id"
        )
    target.execute("alter table t add column own int; update t set own = id")
    text = """
        update t set id = id + 100 where id = 3;
        update t set id = 10, w = 'ten' where id = 9; update t set id = 9, w = 'nine' where id = 8;
        update t set id = 0, w = 'zero' where id = 1; update t set id = 1, w = 'one' where id = 2;
        update t set id = 2, v = gen_random_uuid()::text where id = 0;
        delete from t where id = 4; update t set id = 4, w = 'four' where id = 5;
        update pair set a = a + 10; update pair set b = 'z' where a = 12;
        update big set v = v + 1;
    """
    tables = ["t", "pair", "big"]
    async with stream("\n".join(f"{table}: {{initial: none}}" for table in tables)) as streamer:
        await streamer.caught_up()
        await execute(streamer, "keys", text)
        source.execute("update t set v = 'after' where id = 103")
        await streamer.caught_up()
        for table in tables:
            columns = "id, v, w" if table == "t" else "*"
            rows = f"select {columns} from {table} order by 1, 2"
            assert target.execute(rows) == source.execute(rows)
        assert target.execute("select own from t where id in (103, 6) order by 1") == [(3,), (6,)]


async def test_a_script_runs_once_between_the_changes_before_and_after_it(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    set_up(source, target)
    source.execute("create table counted (at text)")
    target.execute("create table counted (at text)")
    async with stream(TABLES, settings="workers: 4") as streamer:
        await streamer.caught_up()
        source.execute("insert into t select g, 'x' from generate_series(1, 500) g")
        source.execute("insert into u select generate_series(1, 500)")
        result = await execute(streamer, "add note", ADD_NOTE)
        assert (result.record.state, result.is_new) == (ScriptState.DONE, True)
        source.execute("insert into t values (501, 'x', 'new'); update t set note = 'y' where id=1")
        # Both sides count the rows that a script of the target sees at its place in the stream.
        count = "insert into counted select count(*) || ' ' || (select count(*) from u) from t"
        await execute(streamer, "count", count, ScriptSide.BOTH)
        source.execute("delete from u; delete from t where id > 10")
        await execute(streamer, "count again", count, ScriptSide.TARGET)
        again = await execute(streamer, "count", count, ScriptSide.BOTH)
        assert not again.is_new
        await streamer.caught_up()
        assert_same(source, target, "t")
        assert source.execute("select at from counted") == [("501 500",)]
        assert target.execute("select at from counted order by 1") == [("10 0",), ("501 500",)]

        # The stream carries the rows of a script at the source.
        backfill = "update t set note = id::text"
        result = await execute(streamer, "backfill", backfill, ScriptSide.SOURCE)
        assert (result.record.state, result.is_new) == (ScriptState.DONE, True)
        assert not (await execute(streamer, "backfill", backfill, ScriptSide.SOURCE)).is_new
        await streamer.caught_up()
        assert_same(source, target, "t")
        with pytest.raises(MappingError, match="was used for another script"):
            await execute(streamer, "backfill", "select 1", ScriptSide.SOURCE)


async def test_a_script_that_fails_at_the_source_leaves_nothing_and_may_be_corrected(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    set_up(source, target)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        for script, problem in {
            "create table made (id int);\nselect 1/0": "in line 2.*division by zero",
            "create table made (id int); commit; select 1": "transaction commands",
            "insert into keyless values (1)": "reach the target twice",
        }.items():
            with pytest.raises(ScriptError, match=problem):
                await execute(streamer, problem, script)
            assert source.value("select to_regclass('made')") is None
            assert target.value("select to_regclass('made')") is None
        # A script that never took effect can run again unchanged under the same id.
        source.execute("create table later (id int)")
        target.execute("create table later (id int)")
        await streamer.caught_up()
        assert source.value("select count(*) from keyless") == 0


@pytest.mark.follows("runtime.session.script_runner:Scripts._refused")
@pytest.mark.follows("runbooks:script-fails#1")
@pytest.mark.follows("runbooks:script-fails#2")
async def test_a_failure_at_the_target_stops_the_stream_there_until_it_is_settled(
    source: Database, target: Database, stream: MakeStreamer, short_backoffs: None
) -> None:
    set_up(source, target)
    target.execute("drop table u; create table other (id int primary key)")
    async with stream("t: {initial: none}\nu: {initial: none, target: other}") as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 'before')")
        result = await execute(streamer, "it's wide", "alter table u add column w int")
        assert result.record.state is ScriptState.ERROR
        error = str(result.record.error)
        assert 'relation "u" does not exist' in error
        source.execute("insert into t values (2, 'after')")

        async def has_stopped() -> bool:
            shown = await streamer.status()
            return shown["state"] == "error" and "--skip" in str(shown["error"])

        await streamer.eventually(has_stopped)
        assert target.execute("select id from t") == [(1,)]
        command = str((await streamer.status())["error"])
        assert "streamer execute --database shop --id 'it'\"'\"'s wide' --skip" in command
        operator = Operator(streamer.path, source, target)
        (streamer.path.parent / "FILE").write_text("alter table other add column w int")
        await operator.follow(await remedy_of(streamer, None, "failed at the target"), choose=0)
        await streamer.caught_up()
        assert target.execute("select id from t order by 1") == [(1,), (2,)]
        source.execute("insert into u values (1, 5)")
        await execute(streamer, "none", "select 1/(select count(*) - 1 from t)", ScriptSide.TARGET)
        await streamer.caught_up()
        assert target.execute("select id, w from other") == [(1, 5)]

        result = await execute(streamer, "wrong", "select no_function()", ScriptSide.TARGET)
        assert result.record.state is ScriptState.ERROR
        await operator.follow(await remedy_of(streamer, None, '"wrong" failed'), choose=1)
        source.execute("insert into t values (3, 'on')")
        await streamer.caught_up()
        with pytest.raises(ScriptError, match="waits"):
            await change(streamer, "wrong", None)
        acts = "select options ->> 'id', options ->> 'do', state from streamer.request order by id"
        assert target.execute(acts) == [
            ("it's wide", "run", "failed"),
            ("it's wide", "replace", "done"),
            ("none", "run", "done"),
            ("wrong", "run", "failed"),
            ("wrong", "skip", "done"),
            ("wrong", "skip", "failed"),
        ]

        # Two scripts that the runbook replaces and skips.
        (streamer.path.parent / "fixed.sql").write_text("alter table other add column note text")
        for script, text, place in (
            (NOTE, "alter table u add column note text", "script-fails#1"),
            ("index", "create index on u (note)", "script-fails#2"),
        ):
            result = await execute(streamer, script, text)
            assert result.record.state is ScriptState.ERROR
            await asyncio.to_thread(run_block, streamer.path, place, {NOTE: script})
            source.execute("insert into u (id, note) select max(id) + 1, 'after' from u")
            await streamer.caught_up()
        assert target.execute("select id from other where note = 'after' order by id") == [
            (2,),
            (3,),
        ]


async def test_a_message_of_another_role_never_becomes_sql_at_the_target(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    set_up(source, target)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        await execute(streamer, "known", "select 1", ScriptSide.TARGET)
        for content in (
            json.dumps({"id": "unknown", "script": "drop table t"}),
            json.dumps({"id": "known", "script": "drop table t"}),
            "[]",
            "no json",
            r'{"id": "\u0000"}',
            r'{"id": "\ud800"}',
            "[" * 200_000,
            '{"id":' * 100_000,
        ):
            for prefix in ("streamer.execute", "streamer.ddl"):
                emit = f"select pg_logical_emit_message(true, '{prefix}', '{content}')"
                source.execute(emit)
                # With the text of a script, a message needs a transaction of ours.
                await execute(streamer, str(hash((prefix, content))), emit, ScriptSide.SOURCE)
        source.execute("insert into t values (1, 'x')")
        await streamer.caught_up()
        assert_same(source, target, "t")


async def test_a_script_waits_for_a_table_that_is_paused_and_status_names_it(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    set_up(source, target)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        request(target, "public.u", "pause")
        await streamer.table_state("public.u", "paused")
        source.execute("insert into u values (1)")
        result = await execute(
            streamer, "count", "create table seen as select count(*) from u", ScriptSide.TARGET, 0
        )
        assert result.record.state is ScriptState.WAITING

        async def is_named() -> bool:
            return 'waits for table "public.u", which is paused' in str(
                (await streamer.status())["error"]
            )

        await streamer.eventually(is_named)
        request(target, "public.u", "resume")
        await streamer.caught_up()
        assert target.execute("select * from seen") == [(1,)]
        assert (await streamer.status())["error"] is None


@pytest.mark.follows("runtime.guards.missed_scripts:missed")
async def test_a_script_that_a_new_slot_leaves_out_stops_the_source_until_it_is_skipped(
    source: Database, target: Database, stream: MakeStreamer, short_backoffs: None
) -> None:
    """No table is copied, so the start makes a new slot in place of the existing slot."""
    set_up(source, target)
    tables = "t: {initial: none}"
    async with stream(tables) as streamer:
        await streamer.caught_up()
    result = await execute(streamer, "lost", "create table made (id int)", seconds=0)
    assert result.record.state is ScriptState.WAITING
    target.execute(
        # Number 2147483647 is in the future of this server, and a second server has assigned the
        # number.
        "insert into streamer.script"
        " (source_id, id, script, side, source_xid, system_identifier, timeline, requested_at)"
        " select id, name, 'select 1', 'both', 2147483647, system, 1, clock_timestamp()"
        " from streamer.source,"
        " lateral (values ('not committed', system_identifier), ('of another server', '1')) v (name, system)"
    )
    target.execute(
        "insert into streamer.request (relation_id, action) select id, 'resync' from streamer.relation"
    )
    async with stream(tables) as streamer:

        async def has_stopped() -> bool:
            shown = await streamer.status()
            return shown["state"] == "error" and "--id lost --skip" in str(shown["error"])

        await streamer.eventually(has_stopped)
        again = await execute(streamer, "lost", "create table made (id int)")
        assert again.record.state is ScriptState.MISSED
        assert target.execute("select id, state from streamer.script order by id") == [
            ("lost", "missed"),
            ("not committed", "waiting"),
            ("of another server", "missed"),
        ]
        with pytest.raises(ScriptError, match="begins after this script; check on both sides"):
            await change(streamer, "lost", "select 1")
        operator = Operator(streamer.path, source, target)
        for script in ("lost", "of another server"):
            await operator.follow(await remedy_of(streamer, None, f'script "{script}"'))

        async def goes_on() -> bool:
            return bool((await streamer.status())["state"] == "streaming")

        await streamer.eventually(goes_on)


def request(target: Database, table: str, action: str) -> None:
    target.execute(
        "insert into streamer.request (relation_id, action)"
        f" select id, '{action}' from streamer.relation where source = '{table}'; notify streamer"
    )


def test_the_target_runs_a_script_of_one_source_only(tmp_path: Path) -> None:
    mapping: Any = type("M", (), {})()
    mapping.sources = [
        type("S", (), {"database": "shop", "sid": sid, "label": f"shop:{sid}"})()
        for sid in ("eu", "us")
    ]
    assert len(execute_command.choose(mapping, "shop", None, ScriptSide.SOURCE)) == 2
    with pytest.raises(StreamerError, match="once for each of shop:eu, shop:us"):
        execute_command.choose(mapping, "shop", None, ScriptSide.BOTH)
    assert len(execute_command.choose(mapping, None, "us", ScriptSide.BOTH)) == 1
