"""Failovers that lose something, or lead to a server that they should not lead to.

Each ends in one of two ways. Streaming goes on without a hole, or the source stops and says what to
do.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.commands.embedded import Server
from streamer.runtime.wal_retention import guard as backlog
from tests.support.postgres import Database, running, versions
from tests.support.proxy import Proxy
from tests.support.standby import OnEither, Standby, standby
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import until

SECONDS = 60.0
DDL = "create table t (id int primary key); create table log (id int)"
TABLES = "t: {initial: none}\nlog: {initial: none, type: append}"
KEYS = "select string_agg(id::text, ' ' order by id) from t"


@pytest.fixture
def pair(
    target: Database, tmp_path: Path, server_directory: Path
) -> Iterator[tuple[OnEither, Standby]]:
    own = server_directory / tmp_path.name
    settings = {"logical_decoding_work_mem": "64kB"}
    with running(own / "first", versions()["18"], settings) as first:
        # The server of the target has a database with this name, too.
        first.execute(f"create database {target.name}")
        first.execute(DDL, target.name)
        with standby(first, own / "second") as second:
            yield OnEither(first, second, target.name), second


def configured(
    directory: Path,
    source: Database,
    target: Database,
    group: str = "failover: true",
    tables: str = TABLES,
) -> Streamer:
    path = directory / "config.yaml"
    write_config(path, source, target, tables, group=group)
    return Streamer(path)


async def synchronized(streamer: Streamer, source: Database, second: Standby) -> None:
    """Wait until the standby keeps the slot for a failover."""
    async with asyncio.timeout(SECONDS):
        while not await asyncio.to_thread(second.has_slot, "streamer_shop"):
            source.execute("select pg_log_standby_snapshot()")
            await streamer.caught_up(SECONDS)


async def test_a_journal_goes_on_at_the_new_primary(
    pair: tuple[OnEither, Standby],
    target: Database,
    target_proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target is away meanwhile, so its timeline is the former one."""
    monkeypatch.setattr(backlog, "MEASURE_SECONDS", 0.2)
    source, second = pair
    target.execute(DDL)
    source.execute("create table filler (a text)")
    fill = "insert into filler select repeat('x', 1000) from generate_series(1, 1000)"
    spool = "failover: true\nmax_retained_wal: 2MB\non_max_retained_wal: spool"
    streamer = configured(tmp_path, source, target, spool)
    streamer.start()
    try:
        await streamer.caught_up(SECONDS)
        source.execute("insert into t values (1)")
        await streamer.caught_up(SECONDS)
        await synchronized(streamer, source, second)
        target_proxy.leave()
        source.execute("insert into t values (2)")
        journaling = next(iter(streamer.engine.supervisors)).guard.journaling

        async def has_journal() -> bool:
            source.execute(fill)
            return journaling.journal is not None

        await until(has_journal, "a journal is begun", seconds=SECONDS)

        async def holds_all(server: Server) -> bool:
            (row,) = server.execute("select pg_current_wal_flush_lsn()::text")
            end = str(journaling.journal and journaling.journal.end_lsn)
            return bool(server.execute(f"select '{end}'::pg_lsn >= '{row[0]}'")[0][0])

        await until(lambda: holds_all(source.server), "the journal has it", seconds=SECONDS)
        await asyncio.to_thread(second.wait)
        source.server.kill()
        await asyncio.to_thread(second.promote)
        second.execute("insert into t values (3)", target.name)
        await until(lambda: holds_all(second), "the journal goes on", seconds=SECONDS)
        target_proxy.heal()
        await streamer.caught_up(SECONDS)
        assert target.value(KEYS) == "1 2 3"
        assert target.value("select timeline from streamer.source") == 2
    finally:
        await streamer.stop()
