"""The way to the bookkeeping tables in the target, which survive this process.

`schema` creates the tables, and each table has a module that declares its columns and writes it
(`table`). Workers move the progress of relations themselves
(`streamer.apply.target_transaction`), in the transactions whose progress it is.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from streamer.errors import TargetConnectionError
from streamer.target.claim import Claim
from streamer.target.connection import TargetAddress, TargetConnection, transaction
from streamer.target.kept_connection import KeptConnection


class Bookkeeping:
    """The bookkeeping tables, over one connection that many tasks share, one at a time."""

    def __init__(self, address: TargetAddress, name: str = "streamer bookkeeping") -> None:
        self._kept = KeptConnection(address, name)
        self._lock = asyncio.Lock()
        self._claim: Claim | None = None

    def under(self, claim: Claim) -> "Bookkeeping":
        """Return the same for the holder of *claim*: it works only on the server of that claim."""
        other = copy.copy(self)
        other._claim = claim
        return other

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[TargetConnection]:
        """Have the connection for a block, made anew if it was lost.

        Raises TargetConnectionError, TargetRejectedError.
        """
        async with self._lock:
            connection = await self._kept.get(self._claim)
            try:
                yield connection
            except (TargetConnectionError, asyncio.CancelledError):
                connection.terminate()
                raise

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[TargetConnection]:
        """Have the connection for a block that is one transaction. Raises TargetError."""
        async with self.connection() as connection, transaction(connection):
            yield connection

    async def execute(self, sql: str, *parameters: Any) -> int:
        """Run one statement; return how many rows it touched. Raises TargetError."""
        async with self.connection() as connection:
            return await connection.execute(sql, *parameters)

    async def fetch(self, sql: str, *parameters: Any) -> Sequence[Any]:
        """Run one query and return its rows. Raises TargetError."""
        async with self.connection() as connection:
            return await connection.fetch(sql, *parameters)

    async def fetch_value(self, sql: str, *parameters: Any) -> Any:
        """Run one query and return the first column of its first row. Raises TargetError."""
        async with self.connection() as connection:
            return await connection.fetch_value(sql, *parameters)

    async def close(self) -> None:
        async with self._lock:
            await self._kept.close()
