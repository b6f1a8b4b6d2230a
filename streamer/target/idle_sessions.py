"""Keeps sessions at the target open for a moment, for the next source that starts.

A new session costs the server more than the preparation of a source's tables: the server forks, and
loads catalogs and plans queries again. Hundreds of sources may start in a row.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from streamer.postgres.quoting import quote_literal
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.fencing_token import FencingToken
from streamer.target.persistent_connection import PersistentConnection

IDLE_SECONDS: Final = 2.0
_IDLE_SQL: Final = "set lock_timeout = 0"


class IdleSessions:
    """Sessions of several sources, one task at a time each."""

    def __init__(self, address: TargetAddress, seconds: float = IDLE_SECONDS) -> None:
        """*seconds*: the time after which an idle session closes."""
        self._address = address
        self._seconds = seconds
        self._idle: dict[PersistentConnection, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def session(self, fence: FencingToken, name: str) -> AsyncIterator[TargetConnection]:
        """Provide a session on the server of *fence* for a block, which may change lock_timeout
        only. *name*: the application_name during the block.

        Raises TargetConnectionError, TargetRejectedError, TargetMovedError.
        """
        connection = self._take() or PersistentConnection(self._address, name)
        try:
            session = await connection.get(fence)
            await session.execute(f"set application_name = {quote_literal(name)}")
            yield session
            await session.execute(_IDLE_SQL)
        except BaseException:
            connection.terminate()
            raise
        timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, connection)
        self._idle[connection] = timer

    def _take(self) -> PersistentConnection | None:
        if not self._idle:
            return None
        connection, timer = self._idle.popitem()
        timer.cancel()
        return connection

    def _expire(self, connection: PersistentConnection) -> None:
        del self._idle[connection]
        closing = asyncio.create_task(connection.close(), name="close idle session")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the idle sessions."""
        while (connection := self._take()) is not None:
            await connection.close()
        if self._closing:
            await asyncio.wait(self._closing)
