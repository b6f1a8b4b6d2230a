"""Only the source whose work waits names the blocking sessions."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

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


async def read(plain: Connection) -> None:
    await plain.execute("select from public.t")
