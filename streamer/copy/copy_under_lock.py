"""Copies a table under one lock, if the application rewrites the table more often than a copy can
end.

An ordinary part locks the table only while it reads the table, so the application can truncate the
table between the snapshot and the part. A lock in a separate session does not help: the
application's TRUNCATE would wait for that lock, and the parts would queue behind the TRUNCATE. So
one session imports the snapshot, locks the table and reads all parts.

Meanwhile the application's TRUNCATE waits for the copy, and every later statement on the table
waits for the TRUNCATE. So a round copies a table this way only after several attempts
(`streamer.copy.copy_queue`).
"""

import asyncio
import contextlib
import os
import socket
from typing import Any, Final, Self

import psycopg

from streamer.copy.copy_snapshot import import_snapshot, lock_sql, open_copy_session
from streamer.copy.parts.ctid_ranges import CopyPart
from streamer.copy.parts.part_copier import CopyEnds, copy_over
from streamer.copy.prepare_copy import TableCopy
from streamer.mapping.rules import SourceMapping
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, translating

APPLICATION_NAME: Final = "streamer locked copy"


class LockedTable:
    """A session at the source that keeps a table locked, from the snapshot to the last part."""

    def __init__(self, source: SourceMapping, plain: Connection) -> None:
        self._source = source
        self.plain = plain
        self._copying: asyncio.Task[dict[str, Any] | None] | None = None
        self._targets: list[psycopg.Connection[Any]] = []

    @classmethod
    async def connect(cls, source: SourceMapping, server: SourceServer) -> Self:
        """Connect before the snapshot: the application can rewrite the table until `lock`."""
        return cls(source, await open_copy_session(source, server, APPLICATION_NAME))

    async def lock(self, snapshot_name: str, copy: TableCopy) -> None:
        """Import the snapshot and lock the table.

        Raises SnapshotExpiredError, SourceContentionError, SourceConnectionError.
        """
        with translating(self._source.label):
            await self.plain.execute("begin isolation level repeatable read read only")
            await import_snapshot(self.plain, snapshot_name)
            sql = lock_sql(copy.relation.name, is_partitioned=copy.relation.is_partitioned)
            with contextlib.suppress(psycopg.errors.UndefinedTable):  # reported by the planner
                await self.plain.execute(sql.encode())

    async def copy(self, parts: list[CopyPart], ends: CopyEnds) -> list[dict[str, Any]]:
        """Copy all parts and unlock the table; return the failures as a Spark job does."""
        # Only the thread uses the session until this task closes the session.
        session = psycopg.Connection(self.plain.pgconn)
        work = [part.to_json() for part in parts]
        self._copying = asyncio.create_task(
            asyncio.to_thread(copy_over, session, work, ends, self._targets.append)
        )
        try:
            failure = await asyncio.shield(self._copying)
        finally:
            await self.close()
        return [] if failure is None else [failure]

    async def close(self) -> None:
        """End the session, and with it the copy and the lock."""
        if self._copying is not None and not self._copying.done():
            for session in (self.plain, *self._targets):
                _cut_off(session)  # a thread cannot be interrupted
            await asyncio.wait([self._copying])
        await self.plain.close()


def _cut_off(session: "psycopg.BaseConnection[Any]") -> None:
    with (
        contextlib.suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(session.pgconn.socket)) as endpoint,
    ):
        endpoint.shutdown(socket.SHUT_RDWR)
