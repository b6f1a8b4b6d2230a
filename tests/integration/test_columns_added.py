"""A source table gets a column while streamer streams: stop, add, ignore."""

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamer.runtime.session import open_session
from tests.support.postgres import Database, assert_same, contents
from tests.support.remedies import remedy_of
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark")

DDL = "create table t (id int primary key, name text)"
KEYLESS = "create table t (id int, name text); alter table t replica identity full"
ADD = (
    'alter table t add column amount numeric(10,2), add column "we""ird" varchar(5)[],'
    " add column at timestamptz(3)"
)
ADDED = """id, name, amount, "we""ird", at"""
TYPES = (
    "select attname, format_type(atttypid, atttypmod), attnotnull from pg_attribute"
    " where attrelid = 't'::regclass and attname in ('amount', 'we\"ird', 'at', 'feeling')"
    " order by attname"
)
ALTER = (
    'alter table "public"."t" add column "amount" numeric(10,2),'
    ' add column "we""ird" character varying(5)[],'
    ' add column "at" timestamp(3) with time zone;'
)


def change(source: Database) -> None:
    """Change rows from before and after the columns were added."""
    source.execute(
        "insert into t values (3, 'c', 12.5, array['x', 'y'], '2020-01-01 00:00:00.1234+00');"
        "insert into t values (4, 'd', null, null, null)"
    )
    source.execute("update t set amount = -1 where id = 1; delete from t where id = 2")


OPEN = " where kvsz_end = '9999-01-01'"


def rows(db: Database, columns: str, where: str = "") -> list[tuple[object, ...]]:
    return contents(db, f"(select {columns} from t{where}) t", columns)


async def begin(source: Database, streamer: Streamer) -> None:
    await streamer.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'b')")
    await streamer.caught_up()
    source.execute(ADD)
    change(source)


@pytest.mark.parametrize("kind", ["clone", "history"])
@streams("t: {initial: none, type: <kind>}", source=DDL)
async def test_stop_names_the_exact_statement(shared: Shared, kind: str) -> None:
    source, target = shared.source, shared.target
    await begin(source, shared)
    await shared.table_state("t", "error")
    error = (await shared.table("t"))["error"]
    alter = ALTER.replace("public", target.schema)
    assert f"run at the target: {alter} or exclude" in error
    assert rows(target, "id") == [("1",), ("2",)]

    target.execute(alter)
    await shared.caught_up()
    assert rows(source, ADDED) == rows(target, ADDED, OPEN if kind == "history" else "")


@pytest.mark.parametrize("kind", ["clone", "history"])
@streams("t: {initial: none, type: <kind>, on_column_added: add}", source=DDL, sid="eu")
async def test_add_adds_it(shared: Shared, kind: str) -> None:
    source, target = shared.source, shared.target
    with capture_logs() as logs:
        await begin(source, shared)
        await shared.caught_up()
        assert source.execute(TYPES) == target.execute(TYPES)
        assert rows(source, ADDED) == rows(target, ADDED, OPEN if kind == "history" else "")
        if kind == "history":
            closed = rows(target, "id, amount", " where kvsz_end < '9999-01-01'")
            assert closed == [("(1,)",), ("(2,)",)]
    (said,) = [entry for entry in logs if entry["event"] == "columns added"]
    assert '"amount" numeric(10,2)' in said["sql"]


@pytest.mark.parametrize("ddl", [DDL, KEYLESS])
async def test_rows_that_wait_for_a_commit_get_the_default_of_a_new_column(
    stream: MakeStreamer, source: Database, target: Database, ddl: str
) -> None:
    for db in (source, target):
        db.execute(ddl)
    tables = "t: {initial: none, on_column_added: add}"
    async with stream(tables, settings="commit_interval_min: 3\ncommit_interval: 3") as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 'a')")
        await streamer.caught_up()
        source.execute("insert into t values (2, 'b'), (3, 'c')")
        source.execute("alter table t add column extra text default 'x'")
        source.execute("insert into t values (4, 'd'); update t set name = 'e' where id = 2")
        await streamer.caught_up()
        assert_same(source, target, "t")


@pytest.mark.parametrize("count", [2, 2000])
@pytest.mark.parametrize("ddl", [DDL, KEYLESS])
async def test_rows_before_a_new_column_in_its_transaction_get_the_default(
    stream: MakeStreamer,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
    ddl: str,
    count: int,
) -> None:
    """Without capture. The larger transaction goes through the spool of its lane. A table with a key
    gets the values from the source; another table stops.
    """
    monkeypatch.setattr(open_session, "PIECE_BYTES_MAX", 20_000)
    for db in (source, target):
        db.execute(ddl)
    async with stream("t: {initial: none, on_column_added: add}") as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (0, 'a')")
        await streamer.caught_up()
        source.execute(
            f"begin; insert into t select g, repeat('x', 100) from generate_series(1, {count}) g;"
            " alter table t add column extra text default 'x';"
            " insert into t values (-1, 'b'); insert into t values (-2, 'c', null);"
            " update t set name = 'd' where id = 1; commit"
        )

        async def is_same() -> bool:
            return contents(source, "t") == contents(target, "t")

        if ddl == KEYLESS:  # the values of rows without a key come with a copy of all rows
            await remedy_of(streamer, "public.t", "already holds rows")
            await streamer.ask("resync")
        await streamer.eventually(is_same)


@pytest.mark.parametrize("kind", ["clone", "history"])
@streams("t: {initial: none, type: <kind>, on_column_added: ignore}", source=DDL)
async def test_ignore_leaves_it_out(shared: Shared, kind: str) -> None:
    source, target = shared.source, shared.target
    await begin(source, shared)
    await shared.caught_up()
    assert target.execute(TYPES) == []
    where = OPEN if kind == "history" else ""
    assert rows(source, "id, name") == rows(target, "id, name", where)


@pytest.mark.follows("apply.rows.make_plan:missing_error")
@pytest.mark.parametrize("setting", ["stop", "add"])
@streams("t: {initial: none, on_column_added: <setting>}", source=DDL)
async def test_a_type_that_the_target_lacks_stops_the_table(shared: Shared, setting: str) -> None:
    source, target = shared.source, shared.target
    # A type that no session finds without the name of the schema.
    schema = f"feelings_{setting}"
    make_type = f"create schema {schema}; create type {schema}.mood as enum ('ok', 'bad')"
    await shared.caught_up()
    source.execute(make_type)
    source.execute(f"alter table t add column feeling {schema}.mood[]")
    source.execute(f"insert into t values (1, 'a', array['bad']::{schema}.mood[])")
    await shared.table_state("public.t", "error")
    error = (await shared.table("public.t"))["error"]
    assert f'"feeling" {schema}.mood[]' in error

    target.execute(make_type)
    if setting == "stop":
        (statement,) = re.findall(r"run at the target: ([^;]*);", error)
        target.execute(statement)
    await shared.caught_up()
    assert source.execute(TYPES) == target.execute(TYPES)
    assert rows(source, "id, feeling") == rows(target, "id, feeling")


@streams("t: {initial: none}", source=DDL)
async def test_a_column_that_comes_again_with_another_type_is_named_with_that(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("alter table t drop column name; alter table t add column name bytea")
    target.execute("alter table t drop column name")
    source.execute("insert into t values (1, 'x')")
    await shared.table_state("t", "error")
    assert 'add column "name" bytea;' in (await shared.table("t"))["error"]


async def test_a_role_that_may_not_add_it_stops_the_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    role = f"adder_{target.name}"
    source.execute(DDL)
    target.execute(
        f"drop schema streamer cascade; create role {role} login;"
        f"grant create on database {target.name} to {role}"
    )
    target.execute(f"{DDL}; grant all on t to {role}")
    target.url_user = role
    try:
        async with stream("t: {initial: none, on_column_added: add}") as streamer:
            await begin(source, streamer)
            await streamer.table_state("public.t", "error")
            error = (await streamer.table("public.t"))["error"]
            assert "must be owner of table t" in error
            assert (
                'run at the target: alter table "public"."t" add column if not exists "amount"'
                in error
            )
            target.execute(ALTER)
            await streamer.caught_up()
            assert rows(source, ADDED) == rows(target, ADDED)
    finally:
        target.execute(f"drop owned by {role} cascade; drop role {role}")


async def test_a_column_added_in_the_middle_of_a_large_transaction(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ALTER TABLE must not wait for the transaction that needs the column."""
    monkeypatch.setattr(open_session, "PIECE_BYTES_MAX", 20_000)
    source.execute(DDL)
    async with stream("t: {initial: none, on_column_added: add}") as streamer:
        await streamer.caught_up()
        source.execute(
            "begin; insert into t select g, repeat('x', 100) from generate_series(1, 2000) g;"
            "alter table t add column n int; alter table t add column m text;"
            "insert into t select g, 'y', g, 'm' from generate_series(2001, 4000) g;"
            "update t set n = -id where id <= 10; commit"
        )
        source.execute("insert into t values (0, 'after', 0, 'zero')")
        await streamer.caught_up(40)
        assert rows(source, "id, name, n, m") == rows(target, "id, name, n, m")


async def test_two_sources_of_a_group_add_it_at_once(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    both = {"eu": source, "us": second}
    for db in both.values():
        db.execute(DDL)
    path = tmp_path / "config.yaml"
    tables = "t: {initial: none, on_column_added: add}"
    write_config(path, source, target, tables, sid="eu", others={"us": second})
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        for number in range(5):
            for db in both.values():
                db.execute(
                    f"alter table t add column c{number} int;"
                    f"insert into t (id, c{number}) values ({number}, {number})"
                )
        await streamer.caught_up()
        columns = "id, c0, c1, c2, c3, c4"
        for sid, db in both.items():
            assert rows(db, columns) == rows(target, columns, f" where sid = '{sid}'")
    finally:
        await streamer.stop()


@streams(
    "t:",
    source="create table t (id int primary key, v text, n int); insert into t values (1, 'v', 1)",
)
async def test_a_copy_of_columns_brings_those_too_that_another_copy_failed_to_bring(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    own = f"streamer.relation where source = '{shared.own('t')}'"
    await shared.caught_up()
    target.execute(
        "update t set v = 'wrong', n = null;"
        f"update streamer.relation set unfilled = '{{n}}' where source = '{shared.own('t')}';"
        "insert into streamer.request (relation_id, action, options)"
        f""" select id, 'resync', '{{"mode": "diff", "columns": ["v"]}}' from {own};"""
        "notify streamer"
    )
    await shared.caught_up()
    assert_same(source, target, "t")
    assert target.value(f"select unfilled from {own}") == []
