"""Transactions that the source sends in progress."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import until

TABLES = """
t: {initial: none}
hist: {initial: none, type: history}
small: {initial: none}
whole: {initial: none}
"""
DDL = """
create table t (id int primary key, v text);
create table small (id int primary key, v text);
create table whole (a int, b text); alter table whole replica identity full;
"""
HISTORY = """
create table hist (id int not null, v text, kvsz_start timestamptz not null, kvsz_end timestamptz not null,
                   kvsz_deleted boolean not null)
"""


# The walsender streams early: otherwise it keeps 64 MB in memory.
EARLY = """
do $$ begin
    execute format('alter database %I set %s', current_database(),
        case when current_setting('server_version_num')::int >= 160000
        then 'debug_logical_replication_streaming = immediate'
        else 'logical_decoding_work_mem = 64' end);
end $$
"""
SOURCE = f"{EARLY}; {DDL} create table hist (id int primary key, v text)"
TARGET = DDL + HISTORY
SHARED = streams(TABLES, source=SOURCE, target=TARGET)


def spooled(streamer: Streamer) -> list[Path]:
    return [p for p in (streamer.path.parent / "spool").glob("*/*") if p.name != "lock"]


@contextlib.contextmanager
def open_sessions(
    source: Database, count: int
) -> Iterator[list[psycopg.Connection[tuple[object, ...]]]]:
    connections = [source.connect() for _ in range(count)]
    try:
        for connection in connections:
            connection.autocommit = False
        yield connections
    finally:
        for connection in connections:
            connection.close()


@SHARED
async def test_interleaved_transactions_committed_rolled_back_and_killed(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with open_sessions(source, 3) as (commits, rolls_back, is_killed):
        for n in range(20):
            commits.execute("insert into t values (%s, repeat('c', 1900))", (n,))
            rolls_back.execute("insert into t values (%s, 'r')", (100 + n,))
            is_killed.execute("insert into t values (%s, 'k')", (200 + n,))
            commits.execute("insert into hist values (%s, 'h')", (n,))
        # Small transactions do not wait behind large ones.
        source.execute("insert into small values (1, 'at once')")

        async def small_is_there() -> bool:
            return bool(target.execute("select 1 from small"))

        await shared.eventually(small_is_there)
        is_immediate = int(str(source.value("show server_version_num"))) >= 160000
        if is_immediate and shared.mapping.sources[0].streaming:
            assert spooled(shared)
        assert not target.execute("select 1 from t")
        rolls_back.rollback()
        source.execute(f"select pg_terminate_backend({is_killed.info.backend_pid})")
        commits.execute("update t set v = v || '!' where id < 5")
        commits.execute("delete from t where id = 19")
        commits.commit()
    await shared.caught_up()
    assert_same(source, target, "t")
    assert target.value("select count(*) from hist") == 20

    async def spool_is_empty() -> bool:
        return not spooled(shared)

    await shared.eventually(spool_is_empty)


@SHARED
async def test_subtransaction_aborts_take_exactly_their_part(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        """
        begin;
        insert into t select g, 'kept' from generate_series(1, 50) g;
        savepoint a;
          update t set v = 'a';
          savepoint b;
            delete from t where id <= 25;
            insert into whole select g, 'b' from generate_series(1, 20) g;
          release b;
          savepoint c;
            insert into t select g, 'c' from generate_series(1001, 1050) g;
          rollback to c;
          insert into t values (2001, 'after c');
        rollback to a;
        insert into t values (3001, 'after a');
        savepoint d;
          update t set v = 'd' where id = 1;
          truncate small;
        release d;
        commit
        """
    )
    await shared.caught_up()
    assert_same(source, target, "t")
    assert_same(source, target, "whole")
    assert target.value("select v from t where id = 1") == "d"


@streams(TABLES, source=SOURCE, target=f"{TARGET}; alter table t add column extra int")
async def test_ddl_inside(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        """
        begin;
        insert into t values (1, 'old');
        alter table t add column extra int;
        insert into t values (2, 'new', 2);
        savepoint a;
        alter table t rename column v to w;
        insert into t values (3, 'gone', 3);
        rollback to a;
        insert into t values (4, 'last', 4);
        commit
        """
    )
    await shared.caught_up()
    assert_same(source, target, "t")


@SHARED
async def test_prepared_transactions_appear_once_at_commit(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "begin; insert into t select g, 'p' from generate_series(1, 30) g;"
        " prepare transaction 'one'"
    )
    source.execute("begin; insert into t values (99, 'p'); prepare transaction 'two'")
    source.execute("insert into small values (1, 'other')")

    async def small_is_there() -> bool:
        return bool(target.execute("select 1 from small"))

    # The source sent both earlier transactions before this transaction.
    await shared.eventually(small_is_there)
    assert not target.execute("select 1 from t")
    source.execute("commit prepared 'one'")
    source.execute("rollback prepared 'two'")
    await shared.caught_up()
    assert_same(source, target, "t")


async def test_a_transaction_that_is_open_over_a_kill(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(SOURCE)
    target.execute(TARGET)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, TABLES, group="streaming: true")
    with open_sessions(source, 1) as (session,):
        first = Streamer(path)
        first.start()
        await first.caught_up()
        session.execute("insert into t select g, 'before' from generate_series(1, 500) g")
        session.execute("insert into hist select g, 'before' from generate_series(1, 100) g")
        source.execute("insert into small values (1, 'meanwhile')")

        async def is_spooled() -> bool:
            return bool(spooled(first)) and bool(target.execute("select 1 from small"))

        await first.eventually(is_spooled)
        await first.kill()
        session.execute("update t set v = 'after' where id % 2 = 0")
        second = Streamer(path)
        second.start()
        reads = "select active from pg_replication_slots where database = current_database()"
        await until(lambda: source.value(reads), "the slot is read again")
        session.commit()
        await second.caught_up()
        await second.stop()
    assert_same(source, target, "t")
    assert target.value("select count(*) from hist") == 100
    assert not spooled(second)


@pytest.mark.parametrize("mode", ["set", "ordered"])
@SHARED
async def test_larger_than_memory(shared: Shared, mode: str) -> None:
    """Transactions larger than a worker's memory limit are written in pieces, still at once."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    body = "repeat('x', 1000)"
    table = "t" if mode == "set" else "whole"
    source.execute(
        f"begin; insert into {table} select g, {body} from generate_series(1, 40000) g;"
        f" update {table} set {'v' if mode == 'set' else 'b'} = 'short'"
        f" where {'id' if mode == 'set' else 'a'} % 100 = 0; commit"
    )
    seen: set[object] = set()

    async def is_there() -> bool:
        seen.add(target.value(f"select count(*) from {table}"))
        return 40000 in seen

    await shared.eventually(is_there, 180)
    await shared.caught_up()
    assert seen <= {0, 40000}
    assert_same(source, target, table)
