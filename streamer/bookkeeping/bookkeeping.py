"""Access to the bookkeeping tables in the target.

`bookkeeping_schema` creates the tables, and each table has a module that declares its columns and
writes its rows (`bookkeeping_table`). Workers move the progress of relations themselves
(`streamer.apply.write.target_transaction`), in the transactions that write the changes.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from streamer.errors.error_classes import TargetConnectionError, TargetPrivilegeError
from streamer.target.connection import TargetAddress, TargetConnection, transaction
from streamer.target.fencing_token import FencingToken
from streamer.target.missing_grants import advise_grants
from streamer.target.persistent_connection import PersistentConnection
from streamer.target.session_counts import BOOKKEEPING_MAX


@dataclass(frozen=True, slots=True)
class _SharedSession:
    connection: PersistentConnection
    lock: asyncio.Lock


SINGLE_SESSION_SOURCES: Final = 50
"""The number of sources that share a session with all tasks without a source."""


class Bookkeeping:
    """The bookkeeping tables, over connections that many tasks use in turn.

    All statements of a source use a single session, and so stay in order. When hundreds of sources
    start, each waits mostly for round trips of others. So several sessions serve many sources.
    """

    def __init__(self, address: TargetAddress, name: str = "streamer bookkeeping") -> None:
        self._sessions = [
            _SharedSession(PersistentConnection(address, name), asyncio.Lock())
            for _ in range(BOOKKEEPING_MAX)
        ]
        self._session = self._sessions[0]
        self._fence: FencingToken | None = None

    def under(self, fence: FencingToken) -> "Bookkeeping":
        """Return a copy of this object for the holder of *fence*, which uses only the server of
        *fence*.
        """
        bound = copy.copy(self)
        bound._fence = fence
        if fence.source_id > SINGLE_SESSION_SOURCES:
            bound._session = self._sessions[fence.source_id % len(self._sessions)]
        return bound

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[TargetConnection]:
        """Yield the connection; open a lost connection again.

        Raises TargetConnectionError, TargetRejectedError.
        """
        async with self._session.lock:
            connection = await self._session.connection.get(self._fence)
            try:
                yield connection
            except (TargetConnectionError, asyncio.CancelledError):
                connection.terminate()
                raise
            except TargetPrivilegeError as exc:
                await advise_grants(exc, connection)
                raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[TargetConnection]:
        """Yield the connection within a transaction. Raises TargetError."""
        async with self.connection() as connection, transaction(connection):
            yield connection

    async def execute(self, sql: str, *parameters: Any) -> int:
        """Run a statement; return the number of affected rows. Raises TargetError."""
        async with self.connection() as connection:
            return await connection.execute(sql, *parameters)

    async def fetch(self, sql: str, *parameters: Any) -> Sequence[Any]:
        """Run a query and return its rows. Raises TargetError."""
        async with self.connection() as connection:
            return await connection.fetch(sql, *parameters)

    async def fetch_value(self, sql: str, *parameters: Any) -> Any:
        """Run a query and return the first column of its first row. Raises TargetError."""
        async with self.connection() as connection:
            return await connection.fetch_value(sql, *parameters)

    async def close(self) -> None:
        for session in self._sessions:
            async with session.lock:
                await session.connection.close()
