"""Changes of definitions around copies: a copy that drops the messages in front of its consistent
point makes their changes itself.
"""

import asyncio
import json
from typing import Any

import pytest

from streamer.commands import ddl_decisions
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import TargetConnectionError
from streamer.schema_changes import table_change
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer, copy_in_threads

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes", "short_backoffs")

ALL = "ddl: capture\non_ddl: {drop_column: apply, change_type: apply}"
T = "t: {truncate_target: true}"
DDL = "create table t (id int primary key, name varchar(10))"
DEFINITION = """
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as not_null,
       pg_get_expr(d.adbin, d.adrelid) as default_value
from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = '{}'::regclass and a.attnum > 0 and not a.attisdropped order by 1
"""


def contents(db: Database, table: str) -> tuple[list[Any], list[Any]]:
    """Return the definition of *table*, and its rows with the columns in order of name."""
    columns = db.execute(DEFINITION.format(table))
    # One statement: the table may change between two.
    return columns, db.execute(f"select to_jsonb(t)::text from {table} t order by id")


async def is_equal(
    streamer: Streamer, source: Database, target: Database, table: str = "t"
) -> None:
    async def equal() -> bool:
        if (await streamer.table(f"public.{table}"))["state"] != "ready":
            return False
        here, there = [await asyncio.to_thread(contents, db, table) for db in (source, target)]
        return here == there

    await streamer.eventually(equal)
    assert (await streamer.table(f"public.{table}"))["error"] is None


COMMANDS = [
    "add column five int not null default 5",
    "add column token uuid default gen_random_uuid(), add column k int generated always as (id) stored",
    "rename column five to six",
    "alter column six type bigint, alter column six set default 7, alter column name type text",
    "alter column six drop not null, alter column name set default 'x'",
    "alter column six type text using 'six ' || six",
    "drop column token, add column token int default 3",
]
MODES: dict[str, dict[str, Any]] = {
    "reload": {},
    "diff": {"mode": "diff"},
    "where": {"mode": "diff", "scope": {"where": ["id > 1"]}},
    "columns": {"mode": "diff", "columns": ["name"]},
}


async def test_copies_of_each_mode_take_in_the_changes_in_front_of_them(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    tables = {mode: f"t_{mode}" for mode in MODES}
    for table in tables.values():
        source.execute(DDL.replace("table t", f"table {table}"))
        source.execute(f"insert into {table} values (1, 'a'), (2, 'b')")
    rules = "\n".join(T.replace("t:", f"{table}:", 1) for table in tables.values())
    async with stream(rules, group=ALL) as streamer:
        await streamer.caught_up()
        for number, command in enumerate(COMMANDS):
            if number % 2 == 0:  # the lane has the message, and the copy drops it
                for table in tables.values():
                    await streamer.ask("pause", f"public.{table}")
                for table in tables.values():
                    await streamer.table_state(f"public.{table}", "paused")
            for mode, table in tables.items():
                await asyncio.to_thread(
                    source.execute,
                    f"insert into {table} (id) select max(id) + 1 from {table};"
                    f"alter table {table} {command};"
                    f"insert into {table} (id) select max(id) + 1 from {table};"
                    f"update {table} set name = id where id = 2",
                )
                await streamer.ask("resync", f"public.{table}", **MODES[mode])
            for table in tables.values():
                await is_equal(streamer, source, target, table)


async def test_a_copy_waits_for_a_decision_as_the_stream_does(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'a')")
    async with stream(T, group="ddl: capture") as streamer:
        await streamer.caught_up()
        address = TargetAddress.parse(streamer.settings.target.url)

        async def stops(command: str) -> None:
            await streamer.ask("pause")
            await streamer.table_state("public.t", "paused")
            source.execute(f"alter table t {command}; insert into t select max(id) + 1 from t")
            await streamer.ask("resync")
            await streamer.table_state("public.t", "error")
            error = str((await streamer.table("public.t"))["error"])
            assert "on_ddl is stop for drop_column" in error
            assert "streamer ddl apply public.t --database shop" in error
            (waiting,) = await ddl_decisions.read_records(address, None, None, with_done=False)
            assert waiting.state == "waiting"

        await stops("drop column name, add column note text")
        await streamer.decide("apply")
        await is_equal(streamer, source, target)

        await stops("drop column note, add column other int default 2")
        await streamer.decide("skip")
        await streamer.table_state("public.t", "ready")
        await streamer.caught_up()
        assert target.execute("select id, note, other from t order by id") == [
            (1, None, 2),
            (2, None, 2),
            (3, None, 2),
        ]
        done = await ddl_decisions.read_records(address, None, None, with_done=True)
        assert [record.state for record in done] == ["applied", "skipped"]


async def test_a_first_copy_that_begins_again_takes_in_changes(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute(f"{DDL}; create index on t (name); insert into t values (1, 'a'), (2, 'b')")
    gate = asyncio.Event()

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        await gate.wait()
        return await copy_in_threads(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    async with stream("t: {create: all}", group=ALL) as streamer:
        await streamer.table_state("public.t", "copying")
        # The engine runs in this thread, and may hold a lock that the command waits for.
        changes = "alter table t rename column name to title; alter table t add column n int"
        await asyncio.to_thread(source.execute, changes)
        await streamer.kill()
        source.execute("alter table t alter column n type bigint; insert into t values (3, 'c', 3)")
        gate.set()
        streamer.start()
        await is_equal(streamer, source, target)


async def test_columns_that_are_still_to_be_copied_follow_renames_and_drops(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'a'), (2, 'b')")
    gate = asyncio.Event()
    gate.set()

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        await gate.wait()
        return await copy_in_threads(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    unfilled = "select to_jsonb(unfilled)::text from streamer.relation"
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()

        async def lacks(*names: str) -> None:
            async def does() -> bool:
                return bool(json.loads(str(target.value(unfilled))) == list(names))

            await streamer.eventually(does)

        gate.clear()
        source.execute(
            "alter table t add column a uuid default gen_random_uuid(),"
            " add column b uuid default gen_random_uuid()"
        )
        await lacks("a", "b")
        source.execute(
            "alter table t rename column a to c; alter table t drop column b;"
            "insert into t (id) values (3)"
        )
        gate.set()
        await is_equal(streamer, source, target)
        await lacks()
        # A pause keeps the columns; the rename comes before the request of `resume`.
        await streamer.ask("pause")
        await streamer.table_state("public.t", "paused")
        source.execute("alter table t add column d uuid default gen_random_uuid()")
        source.execute("alter table t rename column d to e; insert into t (id) values (4)")
        await streamer.ask("resume")
        await is_equal(streamer, source, target)
        await lacks()


async def test_a_copy_that_ends_in_the_middle_of_a_change_makes_it_once(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute(f"{DDL}; insert into t values (1, 'a')")
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        await streamer.ask("pause")
        await streamer.table_state("public.t", "paused")
        command = "add column n int default 4, alter column name type text"
        source.execute(f"alter table t {command}; alter table t rename column n to m")
        met: list[str] = []
        ended = asyncio.Event()

        def end(name: str) -> None:
            if not met:
                ended.set()
                met.append(name)
                raise TargetConnectionError("the target is gone")

        monkeypatch.setattr(table_change, "failpoint", end)
        await streamer.ask("resync")
        await asyncio.wait_for(ended.wait(), 60)
        await streamer.kill()
        assert not target.value("select count(*) from streamer.ddl"), "all of it or nothing"
        streamer.start()
        await is_equal(streamer, source, target)
        (done,) = await ddl_decisions.read_records(
            TargetAddress.parse(streamer.settings.target.url), None, None, with_done=True
        )
        assert done.state == "applied"
        assert sorted(done.changes) == [
            'add_column "m"',
            'widen_type "name" to text',
        ]
