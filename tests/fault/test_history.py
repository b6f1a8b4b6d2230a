"""streamer reports a slot that does not fit the target, and no change is lost silently."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.util.failpoints import VARIABLE
from tests.support.clusters import CopiedServer
from tests.support.postgres import Database, assert_same, database, running, versions
from tests.support.process import Process, caught_up, command, is_frozen, status
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import eventually, until

DDL = "create table t (id int primary key, v text); create table log (line text)"
TABLES = "t: {initial: none}\nlog: {initial: none}"
RESYNC = "streamer resync '*.*' --database shop"


def write(source: Database, first: int, last: int) -> None:
    source.execute(
        f"insert into t select g, 'x' from generate_series({first}, {last}) g;"
        f" insert into log select g::text from generate_series({first}, {last}) g"
    )


async def error_of(streamer: Streamer) -> str:
    """Wait until the source stops; return the error."""

    def failures() -> list[object]:
        return [supervisor.failure for supervisor in streamer.engine.supervisors]

    await until(lambda: any(failures()))
    return str(failures()[0])


def drop_slot(source: Database) -> None:
    source.execute("select pg_drop_replication_slot('streamer_shop')")


def make_slot_anew(source: Database) -> None:
    drop_slot(source)
    write(source, 1000, 1010)
    source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")


def advance_slot(source: Database) -> None:
    write(source, 1000, 1010)
    source.execute(
        "select pg_replication_slot_advance('streamer_shop', pg_current_wal_flush_lsn())"
    )


BREAKS = {"dropped": drop_slot, "made anew": make_slot_anew, "advanced": advance_slot}


@pytest.mark.parametrize("name", BREAKS)
async def test_a_broken_slot_is_said(
    name: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(DDL)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        write(source, 1, 10)
        await streamer.caught_up()
    write(source, 11, 20)
    BREAKS[name](source)
    async with stream(TABLES) as streamer:
        error = await error_of(streamer)
        assert RESYNC in error
        assert "public.t" in error
        source.execute("insert into t values (5000, 'after')")
        assert not target.execute("select id from t where id > 10")


def test_a_slot_that_moves_between_its_check_and_the_stream(
    source: Database, target: Database, tmp_path: Path
) -> None:
    """PostgreSQL begins a stream at the slot's position even if the client names an earlier
    position.
    """
    source.execute(DDL)
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES)
    with Process(config) as process:
        caught_up(process)
        write(source, 1, 10)
        caught_up(process)
        assert process.terminate() == 0
    with Process(config, environment={VARIABLE: "slot.checked=stop"}) as process:
        # GIVEN a process that has checked the slot and does not read yet
        eventually(lambda: is_frozen(process))
        # WHEN a second process moves the slot, as the journal of a replica does
        advance_slot(source)
        process.process.send_signal(signal.SIGCONT)
        # THEN the source stops because of the lost changes, and no table goes on
        eventually(lambda: status(config)[0]["state"] == "error")
        assert RESYNC in status(config)[0]["error"]
        assert "before this process read it" in process.output
        source.execute("insert into t values (5000, 'after')")
        assert target.value("select max(id) from t") == 10
        assert process.terminate() == 0


@pytest.mark.parametrize(
    ("major", "publication"),
    [("17", "streamer_shop"), ("17", "streamer_shop_ins"), ("18", "streamer_shop")],
)
async def test_a_dropped_publication(
    servers: Callable[[str], Server],
    target: Database,
    tmp_path: Path,
    without_spark: None,
    major: str,
    publication: str,
) -> None:
    """Servers before 18 refuse to decode without a publication, even without tables; later servers
    skip its tables.
    """
    with database(servers(major), "source") as source:
        source.execute(
            f"{DDL}; alter table log add id int generated always as identity primary key"
        )
        write(source, 1, 10)
        write_config(tmp_path / "config.yaml", source, target, "t:\nlog:")
        streamer = Streamer(tmp_path / "config.yaml")
        streamer.start()
        try:
            await streamer.caught_up()
            source.execute(f"drop publication {publication}")
            write(source, 11, 20)
            source.execute(f"create publication {publication} for table t, log")
            await until(partial(is_in_error, streamer, RESYNC))
            assert "publication" in await error_of(streamer)
            arguments = ("resync", "*.*", "--database", "shop")
            assert (await asyncio.to_thread(command, streamer.path, *arguments)).returncode == 0
            await streamer.caught_up()
            assert_same(source, target, "t")
            assert_same(source, target, "log")
        finally:
            await streamer.stop()


def is_in_error(streamer: Streamer, text: str) -> bool:
    return any(text in str(supervisor.failure) for supervisor in streamer.engine.supervisors)


# ---- a source that is restored to an earlier time ----------------------------------------------


class Restored:
    """A source on a separate server, which gets the files of an earlier time."""

    def __init__(self, server: CopiedServer, target: Database, path: Path) -> None:
        server.execute("create database shop")
        self.server = server
        self.source = Database(server, "shop")
        self.source.execute(DDL)
        self._target = target
        self._path = path

    @contextlib.asynccontextmanager
    async def streaming(self, group: str = "") -> AsyncIterator[Streamer]:
        write_config(self._path, self.source, self._target, TABLES, group=group)
        streamer = Streamer(self._path)
        streamer.start()
        try:
            yield streamer
        finally:
            await streamer.stop()


@pytest.fixture
def restored(target: Database, tmp_path: Path, server_directory: Path) -> Iterator[Restored]:
    with running(server_directory / tmp_path.name, versions()["18"]) as server:
        yield Restored(server, target, tmp_path / "config.yaml")


async def test_the_source_is_restored_to_an_earlier_time(restored: Restored) -> None:
    """The restored source is before the old position at first, and then writes past that position."""
    source = restored.source
    async with restored.streaming() as streamer:
        await streamer.caught_up()
        write(source, 1, 10)
        await streamer.caught_up()
    kept = await asyncio.to_thread(restored.server.keep)
    async with restored.streaming() as streamer:
        write(source, 11, 20)
        await streamer.caught_up()
    was_at = source.value("select pg_current_wal_flush_lsn()::text")
    await asyncio.to_thread(restored.server.restore, kept)
    for last, is_past in ((100, False), (20_100, True)):
        write(source, 100 + is_past, last)
        assert source.value(f"select pg_current_wal_flush_lsn() > '{was_at}'") is is_past
        async with restored.streaming() as streamer:
            error = await error_of(streamer)
            assert "restored" in error
            assert "streamer resync" in error


@pytest.mark.parametrize("what", ["script", "definition"])
async def test_a_source_is_restored_that_lacks_only_a_transaction_without_rows(
    what: str, restored: Restored, target: Database, tmp_path: Path
) -> None:
    """The target has the effect of the script, and the source has written past the old position
    since.
    """
    source = restored.source
    async with restored.streaming("ddl: capture") as streamer:
        await streamer.caught_up()
        write(source, 1, 10)
        await streamer.caught_up()
    kept = await asyncio.to_thread(restored.server.keep)
    async with restored.streaming("ddl: capture") as streamer:
        if what == "script":
            script = tmp_path / "script.sql"
            script.write_text("create table made (id int)")
            arguments = ("execute", str(script), "--id", "made")
            assert (await asyncio.to_thread(command, streamer.path, *arguments)).returncode == 0
        else:
            source.execute("alter table t add column more int")
            sql = "select count(*) from pg_attribute where attname = 'more'"
            await until(lambda: target.value(sql) == 1)
        await streamer.caught_up()
    await asyncio.to_thread(restored.server.restore, kept)
    write(source, 100, 20_100)
    async with restored.streaming("ddl: capture") as streamer:
        assert "different histor" in await error_of(streamer)
