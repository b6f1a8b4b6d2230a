"""Keeps connections to sources open for a moment, for the next query.

A connection costs both sides several times as much as most queries. A new table needs three or four
queries in a row.
"""

import asyncio
import math
import select
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psycopg

from streamer.mapping.rules import SourceMapping
from streamer.postgres.credentials import password_generation
from streamer.postgres.secret import Secret
from streamer.source.connection import Connection, connect, translating
from streamer.source.server.wait_limits import set_lock_timeout


@dataclass(frozen=True, slots=True)
class _Idle:
    connection: Connection
    closes_at: float
    """The time at which the pool closes the connection, on the clock of `time.monotonic`."""
    password_generation: int

    def is_usable(self, source: SourceMapping) -> bool:
        """Whether the connection has time left and the present password of *source*, and the server
        has not ended the connection.
        """
        if self.connection.closed or time.monotonic() >= self.closes_at:
            return False
        if self.password_generation != password_generation(source.url):
            return False
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLIN)
        return not poll.poll(0)  # an idle server sends only the end of the session


async def _reset(connection: Connection) -> bool:
    """Reset the setting that users of a connection change; return whether that succeeded."""
    try:
        await set_lock_timeout(connection, 0)
    except psycopg.Error:
        return False
    except BaseException:
        await connection.close()
        raise
    return True


class IdleConnections:
    """Keeps at most one idle connection to each source, until *seconds* after the login.

    An address may lead to another server later, so no connection lives long. One task at a time
    uses a connection; concurrent tasks use separate connections.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._idle: dict[Secret, _Idle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def connection(self, source: SourceMapping) -> AsyncIterator[Connection]:
        """Provide a connection for a block, outside a transaction before and after.

        Raises the errors of `connect`, and translates errors inside the block.
        """
        entry = self._idle.pop(source.url, None)
        if entry is not None and not entry.is_usable(source):
            await entry.connection.close()
            entry = None
        if entry is None:
            generation = password_generation(source.url)
            connection = await connect(source)
            entry = _Idle(connection, time.monotonic() + self._seconds, generation)
        try:
            with translating(source.label):
                yield entry.connection
        except BaseException:
            await entry.connection.close()
            raise
        await self._park(source.url, entry)

    async def _park(self, url: Secret, entry: _Idle) -> None:
        is_reset = url not in self._idle and await _reset(entry.connection)
        seconds = entry.closes_at - time.monotonic()
        # A concurrent task may have stored a connection during the reset.
        if not is_reset or seconds <= 0 or url in self._idle:
            await entry.connection.close()
            return
        self._idle[url] = entry
        if seconds != math.inf:
            asyncio.get_running_loop().call_later(seconds, self._expire, url, entry)

    def _expire(self, url: Secret, entry: _Idle) -> None:
        if self._idle.get(url) is entry:
            del self._idle[url]
            closing = asyncio.create_task(entry.connection.close(), name="close idle connection")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            _, entry = self._idle.popitem()
            await entry.connection.close()
        if self._closing:
            await asyncio.wait(self._closing)
