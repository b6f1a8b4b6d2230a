"""The target fails over to a standby that lacks commits: the commits come again, or the source
stops.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.check.check import examine
from streamer.commands.demo.embedded_servers import Server
from streamer.config import static_mapping
from streamer.errors.remedies import Remedy
from streamer.runtime.session.stored_position import StoredPosition
from tests.support.postgres import Database, running, versions
from tests.support.proxy import Proxy
from tests.support.remedies import Operator
from tests.support.standby import OnEither, Standby, standby
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import eventually

DDL = "create table t (id int primary key); create table u (id int primary key)"
SECONDS = 60.0


@dataclass
class Servers:
    """A source, and a target with a standby."""

    source: Database
    first: Server
    second: Standby
    target: Database

    def rows(self, server: Server, table: str = "t") -> list[Any]:
        return [row[0] for row in server.execute(f"select id from {table} order by 1", "dw")]


@pytest.fixture
def servers(source: Database, tmp_path: Path, server_directory: Path) -> Iterator[Servers]:
    own = server_directory / tmp_path.name
    with running(own / "first", versions()["18"]) as first:
        first.execute("create database dw")
        first.execute(DDL, "dw")
        source.execute(DDL)
        with standby(first, own / "second") as second:
            yield Servers(source, first, second, OnEither(first, second, "dw"))


@contextlib.asynccontextmanager
async def streaming(servers: Servers, directory: Path) -> AsyncIterator[Streamer]:
    path = directory / "config.yaml"
    tables = "t: {initial: none}\nu: {initial: none}"
    write_config(path, servers.source, servers.target, tables)
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up(SECONDS)
        yield streamer
    finally:
        await streamer.stop()


async def until(condition: Any, what: str) -> None:
    await asyncio.to_thread(eventually, condition, SECONDS, what)


@pytest.fixture
def may_store(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Clear the event, and the source gets no position that the standby lacks.

    A keepalive brings a position at any time, also without a change.
    """
    may_store = asyncio.Event()
    may_store.set()
    store = StoredPosition.store

    async def store_if_possible(self: StoredPosition, visible_at: float | None) -> None:
        if may_store.is_set():
            await store(self, visible_at)

    monkeypatch.setattr(StoredPosition, "store", store_if_possible)
    return may_store


async def test_streamer_repeats_a_commit_that_the_standby_lacks(
    servers: Servers, tmp_path: Path, may_store: asyncio.Event
) -> None:
    """streamer had not acknowledged the change at the failover, so the source still has it."""
    async with streaming(servers, tmp_path) as streamer:
        servers.source.execute("insert into t values (1); insert into u values (1)")
        await streamer.caught_up(SECONDS)
        may_store.clear()
        await asyncio.to_thread(servers.second.cut)
        servers.source.execute("insert into t values (2)")
        await until(lambda: servers.rows(servers.first) == [1, 2], "the commit")
        servers.first.kill()
        await asyncio.to_thread(servers.second.promote)
        assert servers.rows(servers.second) == [1]
        may_store.set()
        servers.source.execute("insert into u values (2)")
        await streamer.caught_up(SECONDS)
        assert servers.rows(servers.second) == [1, 2]
        assert servers.rows(servers.second, "u") == [1, 2]


async def test_acknowledged_rows_that_the_standby_lacks_stop_the_source(
    servers: Servers, tmp_path: Path
) -> None:
    async with streaming(servers, tmp_path) as streamer:
        servers.source.execute("insert into t values (1)")
        await streamer.caught_up(SECONDS)
        await asyncio.to_thread(servers.second.cut)
        servers.source.execute("insert into t values (2)")
        await streamer.caught_up(SECONDS)
        servers.first.kill()
        await asyncio.to_thread(servers.second.promote)

        async def is_told() -> bool:
            status = await streamer.status()
            return str(status["state"]) == "error"

        await streamer.eventually(is_told, SECONDS)
        error = (await streamer.status())["error"]
        assert "ahead of" in error
        assert "public.t, public.u" in error
        assert "streamer resync '*.*' --database shop" in error
        servers.source.execute("insert into t values (3)")
        assert servers.rows(servers.second) == [1]


@pytest.mark.follows("target.standby_target:standby_error")
async def test_a_target_whose_url_leads_to_the_standby_goes_on_by_its_remedy(
    servers: Servers, tmp_path: Path, may_store: asyncio.Event
) -> None:
    with Proxy(servers.first) as proxy:
        servers.target = Database(servers.first, "dw")
        servers.target.port = proxy.port
        async with streaming(servers, tmp_path) as streamer:
            may_store.clear()
            await asyncio.to_thread(servers.second.wait)
            servers.first.kill()
            proxy.move(servers.second)
            may_store.set()
            servers.source.execute("insert into t values (1)")
            found = list[Remedy]()

            async def is_told() -> bool:
                health = streamer.engine.target
                found[:] = [health.remedy] if health.is_read_only and health.remedy else []
                return bool(found)

            await streamer.eventually(is_told, SECONDS)
            target = Database(servers.second, "dw")
            await Operator(streamer.path, servers.source, target).follow(found[0])
            await streamer.connect_again()
            await streamer.caught_up(SECONDS)
            assert servers.rows(servers.second) == [1]


@pytest.mark.parametrize("moved", ["streamer lock%", "streamer worker%", "streamer bookkeeping%"])
async def test_connections_to_two_servers_never_count_as_one_server(
    moved: str, servers: Servers, tmp_path: Path, may_store: asyncio.Event
) -> None:
    """The old primary lives on, and some connections come back on the promoted standby."""
    with Proxy(servers.first) as proxy:
        servers.target = Database(servers.first, "dw")
        servers.target.port = proxy.port
        async with streaming(servers, tmp_path) as streamer:
            servers.source.execute("insert into t values (1)")
            await streamer.caught_up(SECONDS)
            may_store.clear()
            await asyncio.to_thread(servers.second.cut)
            await asyncio.to_thread(servers.second.promote)
            proxy.move(servers.second)
            await streamer.connect_again()
            servers.first.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                f" where application_name like '{moved}'"
            )
            servers.source.execute("insert into t values (2)")
            if moved == "streamer bookkeeping%":  # the lock and the rest stay on the same server
                await until(lambda: servers.rows(servers.first) == [1, 2], "the change")
                assert servers.rows(servers.second) == [1]
                return
            lock = "select 1 from pg_stat_activity where application_name like 'streamer lock%'"
            await until(lambda: servers.second.execute(lock), "the lock on the new primary")
            may_store.set()
            await streamer.caught_up(SECONDS)
            assert servers.rows(servers.second) == [1, 2]


async def test_check_takes_a_promoted_standby_for_another_server_than_its_origin(
    servers: Servers, tmp_path: Path
) -> None:
    """The copy has the system identifier, database and tables of the origin."""
    origin = Database(servers.first, "dw")

    async def own_targets(server: Server) -> int:
        path = tmp_path / "check.yaml"
        write_config(path, origin, Database(server, "dw"), "t: {truncate_target: true}")
        findings = (await examine(*static_mapping.load(path))).report.findings
        return sum("is its own target" in finding.problem for finding in findings)

    assert await own_targets(servers.first) == 1
    await asyncio.to_thread(servers.second.cut)
    await asyncio.to_thread(servers.second.promote)
    assert await own_targets(servers.second) == 0
