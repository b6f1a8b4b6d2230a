"""Access to the bookkeeping tables in the target.

`bookkeeping_schema` creates the tables, and each table has a module that declares its columns and
writes its rows (`bookkeeping_table`). Workers move the progress of relations themselves
(`streamer.apply.write.target_transaction`), in the transactions that write the changes.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from streamer.errors.error_classes import TargetConnectionError, TargetPrivilegeError
from streamer.target.connection import TargetAddress, TargetConnection, transaction
from streamer.target.fencing_token import FencingToken
from streamer.target.missing_grants import advise_grants
from streamer.target.persistent_connection import PersistentConnection


class Bookkeeping:
    """The bookkeeping tables, over a connection that many tasks use in turn."""

    def __init__(self, address: TargetAddress, name: str = "streamer bookkeeping") -> None:
        self._kept = PersistentConnection(address, name)
        self._lock = asyncio.Lock()
        self._fence: FencingToken | None = None

    def under(self, fence: FencingToken) -> "Bookkeeping":
        """Return a copy of this object for the holder of *fence*, which uses only the server of
        *fence*.
        """
        bound = copy.copy(self)
        bound._fence = fence
        return bound

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[TargetConnection]:
        """Yield the connection; open a lost connection again.

        Raises TargetConnectionError, TargetRejectedError.
        """
        async with self._lock:
            connection = await self._kept.get(self._fence)
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
        async with self._lock:
            await self._kept.close()
