"""Only the source whose work waits names the blocking sessions."""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import cast

import psycopg
import pytest

from streamer.errors.error_classes import SourceContentionError
from streamer.mapping.relation_names import RelationPattern
from streamer.mapping.rules import SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.source.catalog import SourceServer, read_server_by_query
from streamer.source.connection import Connection, connection
from streamer.source.server import wait_limits
from streamer.source.server.wait_limits import reporting_blockers, set_lock_timeout
from tests.support.postgres import Database
from tests.support.waiting import until

EVERY = RelationPattern("*", "*", namespace_is_pattern=True, name_is_pattern=True)


async def test_a_watcher_that_reached_another_server_names_no_session(
    source: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int)")
    mapping = SourceMapping("shop", None, Secret(source.url), (TableRule(EVERY, EVERY),))
    monkeypatch.setattr(wait_limits, "CHECK_SECONDS", 0.1)
    async with AsyncExitStack() as stack:
        holder = psycopg.connect(source.url)
        stack.callback(holder.close)
        holder.execute("lock table t in access exclusive mode")
        plain = await stack.enter_async_context(connection(mapping))
        here = await read_server_by_query(plain)
        await set_lock_timeout(plain, 3.0)

        async def wait_at(server: SourceServer) -> list[str]:
            """Return the reports about a wait for the table, as if the stream were at *server*."""
            told: list[str] = []

            async def tell(awaited: str) -> None:
                told.append(awaited)

            with pytest.raises(SourceContentionError):
                await reporting_blockers(mapping, server, plain, read(plain), tell)
            return told

        own = await wait_at(here)
        assert f"pid {holder.info.backend_pid} " in own[0]
        elsewhere = replace(here, system_identifier="1")
        assert await asyncio.wait_for(wait_at(elsewhere), 60) == []


async def test_a_watcher_opens_no_session_while_no_statement_runs(
    source: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While hundreds of sources start, their work waits for the target."""
    mapping = SourceMapping("shop", None, Secret(source.url), (TableRule(EVERY, EVERY),))
    monkeypatch.setattr(wait_limits, "CHECK_SECONDS", 0.01)
    opened: list[SourceMapping] = []

    def note(reached: SourceMapping) -> AbstractAsyncContextManager[Connection]:
        opened.append(reached)
        return connection(reached)

    monkeypatch.setattr(wait_limits, "connection", note)
    checks = 0

    class Watched:
        """The connection of the work, which counts the checks."""

        def __init__(self, plain: Connection) -> None:
            self._info = plain.info

        @property
        def info(self) -> psycopg.ConnectionInfo:
            nonlocal checks
            checks += 1
            return self._info

    async def report(awaited: str) -> None:
        raise AssertionError(awaited)

    async with connection(mapping) as plain:
        here = await read_server_by_query(plain)
        watched = cast("Connection", Watched(plain))
        work = until(lambda: checks > 3, what="the watcher looks at the connection")
        await reporting_blockers(mapping, here, watched, work, report)
        assert opened == []


async def read(plain: Connection) -> None:
    await plain.execute("select from public.t")
