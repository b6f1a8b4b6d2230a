"""Kept connections, without a server."""

import asyncio
from typing import Any

import pytest

from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.server import idle_connections
from streamer.source.server.idle_connections import IdleConnections

SOURCE = SourceMapping("shop", None, Secret("postgresql://shop"), ())


class _Connection:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


async def test_of_two_connections_that_become_idle_at_once_one_is_kept_and_one_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[_Connection] = []

    async def connect(source: SourceMapping) -> Any:
        made.append(_Connection())
        return made[-1]

    async def reset(connection: object, seconds: float) -> None:
        await asyncio.sleep(0)  # lets the second task run

    monkeypatch.setattr(idle_connections, "connect", connect)
    monkeypatch.setattr(idle_connections, "set_lock_timeout", reset)
    connections = IdleConnections(60)
    both_use_one = asyncio.Barrier(2)

    async def use() -> None:
        async with connections.connection(SOURCE):
            await both_use_one.wait()

    await asyncio.gather(use(), use())
    assert sorted(connection.closed for connection in made) == [False, True]
    await connections.close()
    assert all(connection.closed for connection in made)
