"""A row that the target refuses stops its table, and no other table."""

import asyncio

import psycopg
import pytest

from tests.support.postgres import Database, assert_same, contents
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer

DDL = "create table {0} (id int primary key, v int)"
T = DDL.format("t")
BOTH = f"{T}; {DDL.format('other')}"
AT_COMMIT = """
create function refuse() returns trigger language plpgsql as $$ begin if new.v < 0 then
  raise exception 'negative' using errcode = 'check_violation'; end if; return null; end $$;
create constraint trigger refuse after insert on t deferrable initially deferred
  for each row execute function refuse();
alter table t enable always trigger refuse
"""
K = "create table k (id int primary key, u int unique)"
TABLES = "t: {initial: none}\nother: {initial: none}"


def make(source: Database, target: Database) -> None:
    for db in (source, target):
        db.execute(DDL.format("t"))
        db.execute(DDL.format("other"))


async def test_a_refused_row_stops_its_table_and_nothing_else(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    make(source, target)
    target.execute("alter table t add constraint positive check (v > 0)")
    for table in ("t", "other"):
        target.execute(f"alter table {table} add column sid text")
    async with stream(TABLES, sid="eu") as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 1)")
        source.execute("insert into t values (2, 2), (3, -3)")
        source.execute("insert into t values (4, 4)")
        source.execute("insert into other values (1, 1)")
        await streamer.table_state("public.t", "error")

        # The table stops before the transaction that holds the row; other tables continue.
        assert target.execute("select id from t") == [(1,)]
        assert "positive" in (await streamer.table("public.t"))["error"]
        samples = {
            tuple(sample.labels.values())
            for metric in streamer.engine.metrics.errors.collect()
            for sample in metric.samples
            if sample.name == "streamer_errors_total"
        }
        assert ("shop", "eu", "conflict") in samples
        assert ("", "", "conflict") not in samples

        async def other_is_there() -> bool:
            return target.execute("select id from other") == [(1,)]

        await streamer.eventually(other_is_there)
        # The reader acknowledges only the changes that the target has.
        end = (await streamer.table("public.t"))["end_lsn"]

        async def is_acknowledged() -> bool:
            confirmed = (await streamer.status())["confirmed_flush_lsn"]
            assert source.value(f"select '{confirmed}'::pg_lsn < pg_current_wal_flush_lsn()")
            return bool(source.value(f"select '{confirmed}'::pg_lsn >= '{end}'"))

        await streamer.eventually(is_acknowledged)

        # Without the cause, the table goes on without a request.
        target.execute("alter table t drop constraint positive")
        await streamer.caught_up()
        assert contents(source, "t", "id, v") == contents(target, "t", "id, v")
        assert (await streamer.table("public.t"))["error"] is None


BREAKS = {
    "missing-table": ("drop table t", f"{T}; insert into t values (1, 1)", "does not exist"),
    "missing-column": (
        "alter table t drop column v",
        "alter table t add column v int",
        "alter table",
    ),
    "insert-exists": ("insert into t values (2, 0)", "delete from t where v = 0", "Key (id)=(2)"),
    "type": (
        "alter table t alter v type smallint",
        "alter table t alter v type int",
        "out of range",
    ),
}


@pytest.mark.parametrize(("break_it", "mend_it", "expected"), BREAKS.values(), ids=BREAKS)
@streams("t: {initial: none}", both=T)
async def test_refused_changes_are_applied_once_the_cause_is_removed(
    shared: Shared, break_it: str, mend_it: str, expected: str
) -> None:
    await refuse_and_mend(shared, shared.source, shared.target, break_it, mend_it, expected)


async def refuse_and_mend(
    streamer: Streamer,
    source: Database,
    target: Database,
    break_it: str,
    mend_it: str,
    expected: str,
) -> None:
    table = f"{target.schema}.t"
    await streamer.caught_up()
    source.execute("insert into t values (1, 1)")
    await streamer.caught_up()
    target.execute(break_it)
    source.execute("insert into t values (2, 70000)")
    await streamer.table_state(table, "error")
    assert expected in (await streamer.table(table))["error"]
    source.execute("update t set v = v + 1 where id = 1")
    target.execute(mend_it)
    await streamer.caught_up()
    assert_same(source, target, "t")


async def test_a_right_that_was_taken_away_and_given_back(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    make(source, target)
    role = target.name
    target.execute(
        f"drop schema streamer cascade; create role {role} login; create role other_{role};"
        f"alter table t owner to {role}; alter table other owner to {role};"
        f"grant create, temporary on database {target.name} to {role}"
    )
    target.url_user = role
    revoke = f"revoke all on t from {role}; alter table t owner to other_{role}"
    try:
        async with stream(TABLES) as streamer:
            await refuse_and_mend(
                streamer, source, target, revoke, f"grant all on t to {role}", "permission denied"
            )
    finally:
        target.execute(
            f"reassign owned by {role} to postgres; drop owned by {role};"
            f"reassign owned by other_{role} to postgres; drop role {role}; drop role other_{role}"
        )


@streams(TABLES, source=BOTH, target=f"{BOTH}; {AT_COMMIT}")
async def test_a_deferred_constraint_that_fails_at_commit_stops_its_table(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 1)")
    source.execute("insert into t values (2, -1)")
    source.execute("insert into other values (1, 1)")
    await shared.table_state("t", "error")

    async def others_are_there() -> bool:
        rows = target.execute("select id from t"), target.execute("select id from other")
        return rows == ([(1,)], [(1,)])

    await shared.eventually(others_are_there)
    target.execute("drop trigger refuse on t")
    await shared.caught_up()
    assert_same(source, target, "t")


async def test_a_locked_table_does_not_hold_up_the_others(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    make(source, target)
    async with stream(TABLES, settings="workers: 1") as streamer:
        await streamer.caught_up()
        with psycopg.connect(target.url) as locker:
            locker.execute("lock table t in access exclusive mode")
            source.execute("insert into t select g, g from generate_series(1, 100) g")
            before = source.value("select pg_current_wal_flush_lsn()")
            for number in range(5):
                source.execute(f"insert into other values ({number}, 0)")

                async def is_there(number: int = number) -> bool:
                    return target.execute(f"select id from other where id = {number}") != []

                await streamer.eventually(is_there)
            status = await streamer.status()
            assert source.value(f"select '{status['confirmed_flush_lsn']}'::pg_lsn <= '{before}'")
            assert (await streamer.table("public.t"))["state"] == "ready"
        await streamer.caught_up()
        assert_same(source, target, "t")


@streams("k: {initial: none}", both=K)
async def test_secondary_unique_keys_are_handed_from_row_to_row(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into k select g, g from generate_series(1, 50) g")
    source.execute(
        "update k set u = -u where id <= 10; update k set u = u - 10 where id between 11 and 20"
    )
    source.execute("begin; delete from k where id = 30; update k set u = 30 where id = 31; commit")
    await shared.caught_up()
    assert_same(source, target, "k")


@streams(
    TABLES,
    source=BOTH,
    target=f"{BOTH}; insert into t values (1, 0); insert into other values (1, 0)",
)
async def test_several_errors_at_once_and_resume(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 1); insert into other values (1, 1)")
    await shared.table_state("t", "error")
    await shared.table_state("other", "error")
    target.execute("delete from t; delete from other")
    await asyncio.gather(shared.caught_up())
    assert_same(source, target, "t")
    assert_same(source, target, "other")
