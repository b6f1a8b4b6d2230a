"""Temporary errors of the target: streamer retries without a tight loop, and loses no change."""

import asyncio
import time
from collections.abc import Callable

import psycopg
import pytest

from tests.support.postgres import Database, assert_same, waits_for_lock
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

DDL = "create table t (id int primary key, v text); create table other (id int primary key)"
TABLES = "t: {initial: none}\nother: {initial: none}"
Step = Callable[[Database], None]


def terminate(target: Database) -> None:
    target.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name like 'streamer%'"
    )


def read_only(target: Database) -> None:
    target.execute(f'alter database "{target.name}" set default_transaction_read_only = on')
    terminate(target)


def writable(target: Database) -> None:
    target.execute(
        "set transaction_read_only = off; set default_transaction_read_only = off;"
        f'alter database "{target.name}" reset default_transaction_read_only'
    )


def refuse_connections(target: Database) -> None:
    target.server.execute(f'alter database "{target.name}" allow_connections false')
    target.server.execute(
        f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{target.name}'"
    )


def accept_connections(target: Database) -> None:
    target.server.execute(f'alter database "{target.name}" allow_connections true')


def refusals(streamer: Streamer) -> float:
    (errors,) = streamer.engine.metrics.errors.collect()
    return sum(sample.value for sample in errors.samples if sample.name.endswith("_total"))


@pytest.mark.parametrize(
    ("begin", "end"), [(read_only, writable), (refuse_connections, accept_connections)]
)
@streams(TABLES, both=DDL)
async def test_a_target_that_refuses_for_a_while(shared: Shared, begin: Step, end: Step) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    before = refusals(shared)
    begin(target)
    source.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    await until(lambda: refusals(shared) > before, "the target's refusal is noticed")
    end(target)
    source.execute("insert into t values (200, 'after')")
    await shared.caught_up()
    assert_same(source, target, "t")


async def test_connections_that_are_cut_again_and_again(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table log (n int)")
    async with stream("log: {initial: none}", settings="commit_interval: 0.01") as streamer:
        await streamer.caught_up()
        with source.connect() as connection:
            for n in range(300):
                connection.execute("insert into log values (%s)", (n,))
                if n % 20 == 0:
                    await asyncio.to_thread(terminate, target)
                await asyncio.sleep(0)
        await streamer.caught_up()
        assert_same(source, target, "log")


@streams(TABLES, both=f"{DDL}; insert into t values (1, 'x'), (2, 'x')")
async def test_a_deadlock_with_a_user(shared: Shared) -> None:
    source, target = shared.source, shared.target
    for _ in range(3):
        # The user waits in the thread of the program, which must hold no row by then.
        await shared.caught_up()
        with target.connect() as user:
            user.autocommit = False
            user.execute("select from t where id = 2 for update")
            source.execute("update t set v = v || '1' where id = 1")
            source.execute("update t set v = v || '2' where id = 2")
            await until(lambda: waits_for_lock(target), "the program waits for the user")
            # PostgreSQL may choose either session; the stream continues afterwards.
            try:
                user.execute("set lock_timeout = '3s'; select from t where id = 1 for update")
            except (psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable):
                user.rollback()
    await shared.caught_up()
    assert_same(source, target, "t")


CODES = {
    "disk_full": "53100",
    "serialization_failure": "40001",
    "deadlock_detected": "40P01",
    "lock_not_available": "55P03",
    "query_canceled": "57014",
    "io_error": "58030",
}


def refuse(code: str, trigger: str, deferred: str = "") -> str:
    """Let *trigger* of table t refuse every row, and count that."""
    return f"""
        create sequence attempt;
        create function refuse() returns trigger language plpgsql set search_path from current as $$ begin
          perform nextval('attempt'); raise exception 'for a while' using errcode = '{code}';
        end $$;
        create {trigger} insert or update on t {deferred} for each row execute function refuse();
        alter table t enable always trigger refuse
        """


REFUSALS = {name: refuse(code, "trigger refuse before") for name, code in CODES.items()} | {
    f"{name} at commit": refuse(
        CODES[name], "constraint trigger refuse after", "deferrable initially deferred"
    )
    for name in ("disk_full", "serialization_failure")
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
@streams(TABLES, source=DDL, target=f"{DDL}; <refusal>", settings="workers: 1")
async def test_one_table_of_which_the_target_takes_nothing_for_a_while(
    shared: Shared, refusal: str
) -> None:
    """As with a full tablespace: at the statement, or at the COMMIT after all writes."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    began = time.monotonic()
    for n in range(6):
        source.execute(f"insert into other values ({n})")

        async def has_arrived(n: int = n) -> bool:
            return target.value("select count(*) from other") == n + 1

        await shared.eventually(has_arrived)
    attempts = "select last_value from attempt"
    await until(lambda: int(str(target.value(attempts))) > 2, "it is tried again")
    assert target.value("select count(*) from t") == 0
    waited = time.monotonic() - began
    # Each attempt tries a set, and then perhaps row by row; the first attempts come fast.
    assert int(str(target.value(attempts))) < 12 + 4 * waited
    assert (await shared.table("t"))["state"] == "ready", "it passes by itself"
    # An attempt under way holds the table, and ends in this thread.
    await asyncio.to_thread(target.execute, "drop trigger refuse on t")
    source.execute("update t set v = 'after' where id < 50")
    await shared.caught_up()
    assert_same(source, target, "t")


async def test_isolation_of_users_and_of_defaults_makes_no_serialization_failures(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
        db.execute("insert into t select g, 'x' from generate_series(1, 20) g")
        db.execute(f'alter database "{db.name}" set default_transaction_isolation = serializable')
    target.execute("alter table t add note text")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        for n in range(10):
            with target.connect() as user:
                noted = "begin isolation level read committed; update t set note = 'x' where id < 9"
                await asyncio.to_thread(user.execute, noted)
                source.execute(f"update t set v = v || {n} where id between 5 and 15")
                await until(lambda: waits_for_lock(target), "the program waits for the user")
                user.execute("commit")
        await streamer.caught_up()
        assert target.execute("select id, v from t order by 1") == source.execute(
            "select id, v from t order by 1"
        )
        (errors,) = streamer.engine.metrics.errors.collect()
        assert not [sample for sample in errors.samples if sample.value]
