"""Tables that wait do not cost the slot of a source with `max_slot_wal_keep_size`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.copy.spark.launcher import SparkLauncher
from streamer.runtime.guards import source_monitor
from streamer.runtime.wal_retention import backlog_guard
from tests.fault.test_backlog import journal_files
from tests.support.kills import Kills
from tests.support.postgres import (
    Database,
    assert_same,
    database,
    running,
    version_of_tests,
    versions,
)
from tests.support.process import caught_up
from tests.support.proxy import Proxy
from tests.support.streamer import MakeStreamer, Streamer, copy_in_threads
from tests.support.waiting import eventually, until

LIMIT = 64 * 1024 * 1024
SETTINGS = {
    "wal_level": "logical",
    "max_slot_wal_keep_size": "64MB",
    "min_wal_size": "32MB",
    "max_wal_size": "64MB",
}
DDL = """
create table held (id int primary key, v text);
create table live (id int primary key, v text);
"""
TABLES = "held: {initial: none}\nlive: {initial: none}"


@pytest.fixture(scope="module")
def limited(server_directory: Path) -> Iterator[Server]:
    """A source's server with `max_slot_wal_keep_size`."""
    binaries = versions()[version_of_tests()]
    with running(server_directory / "limited", binaries, SETTINGS) as server:
        yield server


@pytest.fixture
def source(limited: Server) -> Iterator[Database]:
    with database(limited, "source") as made:
        made.execute(f"{DDL} create table filler (a text)")
        yield made


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_guard, "MEASURE_SECONDS", 0.2)
    monkeypatch.setattr(source_monitor, "GUARD_SECONDS", 0.2)


_SLOT_SQL = """
    select coalesce(wal_status, 'none'), pg_current_wal_flush_lsn() - restart_lsn
    from pg_replication_slots where slot_name = 'streamer_shop'
"""


def fill(source: Database) -> None:
    """Write 12 MB of WAL of a table that is not mapped."""
    source.execute(
        "insert into filler select repeat('x', 1000) from generate_series(1, 10000);"
        " truncate filler"
    )


def is_small(source: Database, most: int = LIMIT // 2) -> bool:
    """Whether the slot keeps less than *most*.

    A checkpoint invalidates a lost slot, and writes a record where the slot can move.
    """
    source.execute("checkpoint")
    ((status, retained),) = source.execute(_SLOT_SQL)
    assert status != "lost"
    return int(str(retained)) < most


async def fill_beyond_the_limit(source: Database, most: int = LIMIT // 2) -> None:
    """Write three times the WAL that the server keeps for a slot, as fast as the slot moves."""
    for _ in range(16):
        await asyncio.to_thread(fill, source)
        await until(lambda: is_small(source, most), "the slot keeps little")


def write(source: Database, first: int) -> None:
    for n in range(first, first + 5):
        source.execute(f"insert into held values ({n}, 'x'); insert into live values ({n}, 'y')")
    source.execute(f"update held set v = v || '.'; delete from live where id = {first}")


Hold = Callable[[Streamer, Database, Database], contextlib.AbstractAsyncContextManager[None]]


@contextlib.asynccontextmanager
async def paused(streamer: Streamer, source: Database, target: Database) -> AsyncIterator[None]:
    await streamer.ask("pause", "public.held")
    await streamer.table_state("public.held", "paused")
    yield
    await streamer.ask("resume", "public.held")


@contextlib.asynccontextmanager
async def locked(streamer: Streamer, source: Database, target: Database) -> AsyncIterator[None]:
    with target.connect() as session:
        session.execute("begin; lock table held")
        yield
        session.execute("rollback")


@contextlib.asynccontextmanager
async def refused(streamer: Streamer, source: Database, target: Database) -> AsyncIterator[None]:
    target.execute("alter table held add constraint none check (v = '')")
    source.execute("insert into held values (0, 'x')")
    await streamer.table_state("public.held", "error")
    yield
    target.execute("alter table held drop constraint none")
    await streamer.ask("resume", "public.held")


@contextlib.asynccontextmanager
async def altered(streamer: Streamer, source: Database, target: Database) -> AsyncIterator[None]:
    source.execute("alter table held add w int; insert into held values (0, 'x', 1)")
    await streamer.table_state("public.held", "error")
    yield
    target.execute("alter table held add w int")
    await streamer.ask("resume", "public.held")


@pytest.mark.parametrize("hold", [paused, locked, refused, altered])
async def test_a_table_that_waits_does_not_cost_the_slot(
    hold: Hold,
    source: Database,
    target: Database,
    stream: MakeStreamer,
    tmp_path: Path,
    short_backoffs: None,
) -> None:
    target.execute(DDL)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        async with hold(streamer, source, target):
            await asyncio.to_thread(write, source, 10)
            await fill_beyond_the_limit(source)
            assert journal_files(tmp_path)
            await asyncio.to_thread(write, source, 20)
        await streamer.caught_up()
        await streamer.eventually(lambda: is_gone(tmp_path))
        await asyncio.to_thread(write, source, 30)
        await streamer.caught_up()
    assert_same(source, target, "held")
    assert_same(source, target, "live")


async def is_gone(tmp_path: Path) -> bool:
    return not journal_files(tmp_path)


class Gate:
    """Copies begin, and end once `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.begun = 0
        monkeypatch.setattr(SparkLauncher, "submit", lambda *job: self._submit(*job))

    async def _submit(self, launcher: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        self.begun += 1
        await self.open.wait()
        return await copy_in_threads(launcher, job)


@pytest.fixture
def gate(without_spark: None, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def test_a_copy_of_the_only_table_goes_on_and_does_not_cost_the_slot(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path, gate: Gate
) -> None:
    source.execute("insert into held select n, 'old' from generate_series(1000, 2000) n")
    async with stream("held:") as streamer:
        await until(lambda: gate.begun, "a copy has begun")
        source.execute("update held set v = 'new' where id = 2000")
        await fill_beyond_the_limit(source)
        assert journal_files(tmp_path)
        gate.open.set()
        await streamer.caught_up()
        await streamer.eventually(lambda: is_gone(tmp_path))
        source.execute("delete from held where id = 1000")
        await streamer.caught_up()
    assert gate.begun == 1
    assert_same(source, target, "held")


async def test_a_stream_that_breaks_during_a_copy_goes_on_from_the_journal(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path, gate: Gate
) -> None:
    source.execute("insert into held select n, 'old' from generate_series(1000, 2000) n")
    async with stream("held:") as streamer:
        await until(lambda: gate.begun, "a copy has begun")
        source.execute("update held set v = 'new' where id = 2000")
        await fill_beyond_the_limit(source)
        source.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots"
            " where slot_name = 'streamer_shop'"
        )
        await until(lambda: gate.begun == 2, "the next attempt copies")
        source.execute("update held set v = 'newer' where id = 2000")
        await fill_beyond_the_limit(source)
        gate.open.set()
        await streamer.caught_up()
        await streamer.eventually(lambda: is_gone(tmp_path))
    assert_same(source, target, "held")


async def test_a_target_that_is_away_during_a_copy_does_not_cost_the_slot(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
    gate: Gate,
    short_backoffs: None,
) -> None:
    source.execute("insert into held select n, 'old' from generate_series(1000, 2000) n")
    async with stream("held:") as streamer:
        await until(lambda: gate.begun, "a copy has begun")
        source.execute("update held set v = 'new' where id = 2000")
        await fill_beyond_the_limit(source)
        target_proxy.leave()
        source.execute("update held set v = 'newer' where id = 2000")
        await fill_beyond_the_limit(source)
        target_proxy.heal()
        gate.open.set()
        await streamer.caught_up()
        await streamer.eventually(lambda: is_gone(tmp_path))
    assert_same(source, target, "held")


async def test_a_source_without_a_free_slot_begins_the_copy_once_more(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    tmp_path: Path,
    gate: Gate,
    short_backoffs: None,
) -> None:
    source.execute("insert into held select n, 'old' from generate_series(1000, 2000) n")
    async with stream("held:") as streamer:
        await until(lambda: gate.begun, "a copy has begun")
        source.execute(
            "select pg_create_physical_replication_slot('other_' || n) from generate_series(1,"
            " current_setting('max_replication_slots')::int"
            " - (select count(*)::int from pg_replication_slots)) n"
        )
        source.execute("update held set v = 'new' where id = 2000")
        for _ in range(4):
            await asyncio.to_thread(fill, source)
        await until(lambda: journal_files(tmp_path), "a journal has begun")
        source.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
            " where slot_type = 'physical'"
        )
        await fill_beyond_the_limit(source)
        await until(lambda: gate.begun == 2, "the next attempt copies")
        gate.open.set()
        await streamer.caught_up()
        await streamer.eventually(lambda: is_gone(tmp_path))
    assert_same(source, target, "held")


async def test_a_resync_does_not_cost_the_slot(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path, gate: Gate
) -> None:
    target.execute(DDL)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        await asyncio.to_thread(write, source, 10)
        await streamer.ask("resync", "public.held")
        await until(lambda: gate.begun, "a copy has begun")
        await asyncio.to_thread(write, source, 20)
        await fill_beyond_the_limit(source)
        assert journal_files(tmp_path)
        gate.open.set()
        await streamer.caught_up()
        await streamer.eventually(lambda: is_gone(tmp_path))
    assert gate.begun == 1
    assert_same(source, target, "held")
    assert_same(source, target, "live")


async def test_rows_in_quarantine_hold_no_wal_and_need_no_journal(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    target.execute(f"{DDL} alter table held add constraint none check (v = '')")
    async with stream("held: {initial: none, on_error: quarantine}") as streamer:
        await streamer.caught_up()
        source.execute("insert into held values (1, 'x')")
        await streamer.caught_up()
        await fill_beyond_the_limit(source, LIMIT // 4)
        assert not journal_files(tmp_path)


async def test_a_policy_without_a_journal_leaves_the_limit_to_the_server(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    target.execute(DDL)
    async with stream(TABLES, group="on_max_retained_wal: warn") as streamer:
        await streamer.caught_up()
        async with paused(streamer, source, target):
            await asyncio.to_thread(write, source, 10)
            for _ in range(4):
                await asyncio.to_thread(fill, source)
            assert not journal_files(tmp_path)
            assert (await streamer.status())["backlog"] is None
        await streamer.caught_up()
    assert_same(source, target, "held")


def test_killed_with_changes_in_the_journal_and_a_target_that_starts_again(
    tmp_path: Path, source: Database, server_directory: Path
) -> None:
    """Two deaths: while the table waits, and while the next process applies the journal."""
    binaries = versions()[version_of_tests()]
    with running(server_directory / "target", binaries) as server:
        server.execute("create database dw")
        target = Database(server, "dw")
        target.execute(DDL)
        kills = Kills(tmp_path, source, target, TABLES, program="tests.support.small_journals")
        kills.begin()
        session = target.connect()
        session.execute("begin; lock table held")
        first = 0

        def write_until_journal() -> bool:
            nonlocal first
            if not is_small(source):
                return False
            first += 10
            write(source, first)
            fill(source)
            return bool(journal_files(tmp_path))

        kills.begin(write_until_journal)
        write(source, 1000)
        server.stop("immediate")  # the lock goes with the server
        session.close()
        server.start()
        kills.die("journal.read", lambda: None)
        write(source, 2000)
        with kills.process() as process:
            eventually(lambda: not journal_files(tmp_path), 60, process.output)
            write(source, 3000)
            caught_up(process)
            assert process.terminate() == 0
        assert_same(source, target, "held")
        assert_same(source, target, "live")


def test_killed_while_a_copy_goes_on_beside_the_journal(
    tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute("insert into held select n, 'old' from generate_series(1, 2000) n")
    kills = Kills(tmp_path, source, target, "held:", settings="sync: {rows_per_second: 20}")

    def change_and_fill() -> None:
        source.execute(f"update held set v = 'new' where id = {kills.acts + 1}")
        if is_small(source):
            fill(source)

    kills.die_of("journal.acknowledged@2", change_and_fill, repeats=True)
    kills.configure("held:")
    source.execute("delete from held where id = 2000")
    with kills.process() as process:
        eventually(lambda: not journal_files(tmp_path), 60, process.output)
        caught_up(process)
        assert process.terminate() == 0
    assert_same(source, target, "held")
