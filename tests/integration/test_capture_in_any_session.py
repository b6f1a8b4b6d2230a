"""The capture tells the same whatever settings and snapshots the application's sessions have."""

import asyncio
import contextlib

import psycopg
import pytest

from tests.support.definitions import everything
from tests.support.hostile_sessions import SESSIONS, hostile
from tests.support.postgres import Database
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

ALL = (
    "ddl: capture\ncreate: all\n"
    "on_ddl: {drop_column: apply, change_type: apply, detach_partition: apply}"
)
T = "t: {initial: none}"
DDL = "create table t (id int primary key, name text)"

PARTITIONED = """
create table m (id int, at timestamptz, d date, primary key (id, at)) partition by range (at);
create table m_1 partition of m for values from ('2024-01-01 00:00+00') to ('2024-02-01 00:00+00');
create table m_2 partition of m for values from ('2024-02-01 00:00+00') to ('2024-03-01 00:00+00');
insert into m select g, '2024-01-01 12:00+00'::timestamptz + g * interval '1 hour'
  from generate_series(1, 900) g
"""


async def equal(streamer: Streamer, source: Database, target: Database, *tables: str) -> None:
    """Wait until both sides have the same definitions; the last read shows the differences."""
    names = list(tables)

    async def is_equal() -> bool:
        # The engine of this event loop may hold a lock of the table.
        there = await asyncio.to_thread(everything, target, names)
        return there == everything(source, names)

    with contextlib.suppress(AssertionError):
        await streamer.eventually(is_equal, seconds=20)
    assert await asyncio.to_thread(everything, target, names) == everything(source, names)


@pytest.mark.parametrize("name", ["german", "sql"])
@streams("m:", source=PARTITIONED, group=ALL)
async def test_a_partition_stays_however_a_session_prints_its_bound(
    shared: Shared, name: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with hostile(SESSIONS[name], source):
        source.execute("alter table m add column w int")
        await shared.caught_up()
    count = "select count(*), count(distinct id) from m"
    assert target.execute(count) == source.execute(count) == [(900, 900)]
    assert shared.captured() == [(['add_column "w"'],)]


CONSTANTS = [
    "alter table t add column i interval default '-1 day -2 hours'",
    "alter table t add column p float8 default pi()",
    "alter table t add column f float8 default 0.1::float8 + 0.2::float8",
    "alter table t add column b bytea default E'\\\\x00ff'::bytea",
    "alter table t add column at timestamptz default '2024-07-01 12:00+00'::timestamptz",
    "alter table t add column d date default '2024-02-03'::date",
    "alter table t add column m money default 12.5::numeric::money",
    "alter table t add constraint c check (i <> '-3 days -4 hours'::interval and d > '2000-01-02')",
    "create index t_part on t (name) where at > '2024-01-01 00:00+00'::timestamptz",
    "create domain span as interval default '-5 days -6 hours' check (value < '7 days'::interval)",
    "alter table t add column s span",
    "alter table t add column q text default E'back\\\\slash'",
]


@pytest.mark.parametrize("name", list(SESSIONS))
@streams(T, both=DDL, group=ALL)
async def test_constants_keep_their_values_in_every_session(shared: Shared, name: str) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a')")
    with hostile(SESSIONS[name], source):
        for statement in CONSTANTS:
            source.execute(statement)
        source.execute("insert into t (id) values (2)")
        source.execute("alter table t alter name type text using upper(name)")
        await shared.caught_up()
    await equal(shared, source, target, "t")
    rows = "select * from t order by id"
    assert source.execute(rows) == target.execute(rows)


@streams(T, both=DDL, group=ALL)
async def test_no_warning_comes_and_computed_values_are_seen_with_old_strings(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a')")
    told: list[str] = []
    with source.connect() as session:
        session.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        session.execute("set standard_conforming_strings = off")
        session.execute("alter table t alter column name type text using upper(name)")
        session.execute("drop table if exists nothing")
    assert told == ['table "nothing" does not exist, skipping']
    await shared.caught_up()
    assert target.execute("select * from t") == [(1, "A")]


def old_snapshot(db: Database, level: str) -> psycopg.Connection[tuple[object, ...]]:
    session = db.connect()
    session.execute(f"begin isolation level {level}; select 1 from pg_class limit 1".encode())
    return session


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@streams(
    f"{T}\nu: {{initial: none}}\nm:",
    both=f"{DDL}; create type mood as enum ('a'); create table u (id int primary key)",
    source=PARTITIONED,
    group=ALL,
)
async def test_an_old_snapshot_takes_nothing_back_that_others_have_committed(
    shared: Shared, level: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with old_snapshot(source, level) as session:
        source.execute("insert into t values (1, 'a')")
        source.execute("alter table t add column other int default 7")
        source.execute("alter table t rename column name to title")
        source.execute("create index t_other on t (other)")
        source.execute("alter table u add column m mood; alter type mood add value 'b'")
        source.execute(
            "create table m_3 partition of m for values"
            " from ('2024-03-01 00:00+00') to ('2024-04-01 00:00+00');"
            "insert into m select g, '2024-03-02 00:00+00' from generate_series(5000, 5049) g"
        )
        session.execute("alter table t add column mine int default 5")
        session.execute("create index t_mine on t (mine)")
        session.execute("alter table m add column w int")
        session.execute("commit")
    source.execute("insert into t values (2, 'b', 3, 4); insert into u values (1, 'b')")
    await shared.caught_up()
    await equal(shared, source, target, "t", "u")
    rows = "select id, title, other, mine from t order by id"
    assert source.execute(rows) == target.execute(rows) == [(1, "a", 7, 5), (2, "b", 3, 4)]
    count = "select count(*), count(distinct id) from m"
    assert source.execute(count) == target.execute(count) == [(950, 950)]
    kinds = str(shared.captured())
    assert "drop" not in kinds
    assert "detach" not in kinds


@streams(T, both=DDL, group=ALL)
async def test_two_indexes_in_overlapping_transactions_both_stay(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as first, source.connect() as second:
        first.execute("begin; create index t_first on t (name)")
        second.execute("begin; create index t_second on t (name, id)")
        first.execute("commit")
        second.execute("commit")
    await shared.caught_up()
    await equal(shared, source, target, "t")
    assert "drop" not in str(shared.captured())
    source.execute("drop index t_first")
    await shared.caught_up()
    await equal(shared, source, target, "t")


@streams(T, both=f"{DDL}; create index t_gone on t (name)", group=ALL)
async def test_a_lost_message_is_made_up_for(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    changed, cut = (f"alter event trigger {shared.capture}_{kind}" for kind in ("changed", "cut"))
    source.execute(
        f"{changed} disable; {cut} disable;"
        "alter table t alter name set default 'lost'; drop index t_gone;"
        f"{changed} enable always; {cut} enable always; alter table t add column told int"
    )
    await shared.caught_up()
    await equal(shared, source, target, "t")


async def test_nothing_of_the_capture_is_published(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute("create publication everything for all tables")
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        source.execute("alter table t add column a int; drop table if exists t_none")
        await streamer.caught_up()
        published = "select tablename from pg_publication_tables where pubname = 'everything'"
        assert source.execute(published) == [("t",)]
        assert source.value("select count(*) from streamer_shop.place") == 1
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        assert source.value("select count(*) from streamer_shop.place") == 0


@streams(
    T,
    source=DDL,
    target=f"{DDL}; alter table t add column a int, add column b int default 9",
    group=ALL,
)
async def test_a_column_that_the_target_had_before_gets_the_values_of_the_source(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'b')")
    await shared.caught_up()
    target.execute("update t set a = 77")
    source.execute("alter table t add column a int, add column b int default 5")

    async def is_filled() -> bool:
        found = await asyncio.to_thread(target.execute, "select a, b from t order by id")
        return found == [(None, 5), (None, 5)]

    await shared.eventually(is_filled)


@streams(T, both=DDL, group=ALL)
async def test_each_row_gets_the_value_that_a_domain_gave_it_at_the_source(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'b')")
    source.execute("create domain ref as uuid default gen_random_uuid()")
    source.execute("create domain inner_ref as ref not null")
    source.execute("alter table t add column r ref, add column s inner_ref")
    rows = "select id, r, s from t order by id"

    async def is_equal() -> bool:
        return await asyncio.to_thread(target.execute, rows) == source.execute(rows)

    await shared.caught_up()
    await shared.eventually(is_equal)


RULES = '"*": {on_table_dropped: keep}\nh: {type: history, on_table_dropped: keep}'


async def test_columns_of_a_table_that_was_made_anew_are_found_by_their_names(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for table in ("t", "h"):
        source.execute(
            f"create table {table} (id int primary key, name text, at date, gone int);"
            f"insert into {table} values (1, 'a', '2024-01-01', 5)"
        )
    async with stream(RULES, group=ALL) as streamer:
        await streamer.caught_up()
        for table in ("t", "h"):
            source.execute(
                f"drop table {table};"
                f"create table {table} (name text, at date, id int primary key, more int);"
                f"insert into {table} values ('b', '2025-01-01', 2, 7)"
            )

        rows = "select id, name, at, more from {} {} order by id"
        still = "where kvsz_end > now()"

        async def is_equal() -> bool:
            with contextlib.suppress(psycopg.errors.UndefinedColumn):
                found = [
                    await asyncio.to_thread(target.execute, rows.format(*each))
                    for each in (("t", ""), ("h", still))
                ]
                return found == [source.execute(rows.format(table, "")) for table in ("t", "h")]
            return False

        await streamer.eventually(is_equal)
        former = "select id, name, at, gone from h where id = 1 order by kvsz_start limit 1"
        assert str(target.execute(former)) == "[(1, 'a', datetime.date(2024, 1, 1), 5)]"
