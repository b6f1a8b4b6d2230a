"""The primary of a source that is a standby.

Publications, comments, logical messages and event triggers reach a standby only by replication, so
a session at the primary must create them. streamer finds the primary among the hosts of the url:
``host=standby,primary target_session_attrs=standby`` leads to the standby, and the same hosts with
``target_session_attrs=primary`` lead to the primary.

PostgreSQL documentation, "Connection Strings" (Specifying Multiple Hosts) and "Hot Standby".
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import psycopg

from streamer.errors.error_classes import SourceConnectionError, SourceError
from streamer.errors.remedies import Remedy, at_source
from streamer.mapping.rules import SourceMapping
from streamer.postgres.blocking_sessions import session_sql
from streamer.source.catalog import SourceServer, flush_wal, read_flush_lsn
from streamer.source.connection import (
    AT_PRIMARY,
    Connection,
    connect,
    fetch_all,
    fetch_one,
    is_standby,
    names_several_hosts,
    translate,
    translating,
)
from streamer.util.lsn import Lsn

REPLAY_SECONDS: Final = 60.0
"""The maximum time in which a standby must replay a change that streamer makes at its primary."""
_POLL_SECONDS: Final = 0.1

LOG_SNAPSHOT_SQL: Final = "select pg_catalog.pg_log_standby_snapshot()"

_SYSTEM_SQL: Final = "select system_identifier::text as id from pg_catalog.pg_control_system()"

_WRITERS_SQL: Final = f"""
select {session_sql()} as session from pg_catalog.pg_stat_activity a
where a.backend_xid is not null and a.pid <> pg_catalog.pg_backend_pid()
order by a.xact_start nulls last limit 3
"""


def primary_hint(source: SourceMapping, *sql: str) -> Remedy:
    """Return the remedy with *sql*, which only the primary of a standby can run. Pure."""
    words = Remedy.of("run on its primary: ", at_source(*sql))
    if names_several_hosts(source):
        return words
    return Remedy.of(
        words, "; or list the primary in the url as well, with target_session_attrs=standby"
    )


@asynccontextmanager
async def connection_to_primary(
    source: SourceMapping, plain: Connection
) -> AsyncIterator[Connection]:
    """Connect to the primary of the standby behind *plain*, during a block.

    Does not translate the driver's errors inside the block. Raises SourceConnectionError, also if a
    host of the url belongs to a different cluster.
    """
    primary = await connect(source, at=AT_PRIMARY)
    try:
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            ids = [(await fetch_one(c, _SYSTEM_SQL))["id"] for c in (primary, plain)]
            if ids[0] != ids[1]:
                raise SourceConnectionError(
                    f'source "{source.label}": the hosts of its url belong to different servers: '
                    f"the primary has system identifier {ids[0]}, the standby {ids[1]}",
                    hint="list in the url only a standby and its own primary",
                )
        yield primary
    finally:
        await primary.close()


@asynccontextmanager
async def writable(source: SourceMapping, plain: Connection) -> AsyncIterator[Connection]:
    """Return a session that may write at the source: *plain*, or a session at a standby's primary.

    At the end of the block, the standby has replayed these writes. If the url does not name the
    primary, the server refuses them with ``ReadOnlySqlTransaction``. Raises SourceConnectionError.
    """
    if not is_standby(plain) or not names_several_hosts(source):
        yield plain
        return
    async with connection_to_primary(source, plain) as primary:
        yield primary
        await _await_replay(source, plain, await read_flush_lsn(primary))


async def _await_replay(source: SourceMapping, plain: Connection, lsn: Lsn) -> None:
    sql = "select pg_catalog.pg_last_wal_replay_lsn() >= %s::pg_catalog.pg_lsn as has_replayed"
    try:
        async with asyncio.timeout(REPLAY_SECONDS):
            while is_standby(plain):
                if (await fetch_one(plain, sql, str(lsn)))["has_replayed"]:
                    return
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise SourceConnectionError(
            f'source "{source.label}": the standby has not replayed {lsn} of its primary in '
            f"{REPLAY_SECONDS:g} s",
            hint="see pg_stat_wal_receiver and recovery_min_apply_delay at the standby",
        ) from None


async def flush_source(source: SourceMapping, plain: Connection) -> Lsn:
    """Flush the WAL at the source, or at a standby's primary; return the end of the WAL.

    If the url does not name the primary, return the end of the standby's WAL.
    """
    if is_standby(plain) and names_several_hosts(source):
        with translating(source.label):
            async with connection_to_primary(source, plain) as primary:
                return await flush_wal(primary)
    return await flush_wal(plain)


class RunningTransactions:
    """Requests the records of running transactions for which a new slot on a standby waits.

    Only the primary writes such records: every 15 seconds after a change, or when a session calls
    ``pg_log_standby_snapshot()``. See the PostgreSQL documentation, "Logical Decoding Concepts".
    """

    def __init__(self, source: SourceMapping, server: SourceServer) -> None:
        self._source = source
        self._is_needed = server.in_recovery
        self._primary: Connection | None = None
        self._obstacle = ""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "RunningTransactions":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def trigger(self, plain: Connection) -> str:
        """Make the primary write such a record; return what the new slot waits for, or an empty
        text.

        *plain*: a session at the standby.
        """
        if not self._is_needed:
            return ""
        awaited = "a record of running transactions from the primary"
        if not names_several_hosts(self._source):
            return f"{awaited}, which pg_log_standby_snapshot() writes there"
        try:
            if self._primary is None:
                entering = connection_to_primary(self._source, plain)
                self._primary = await self._stack.enter_async_context(entering)
            await self._primary.execute(LOG_SNAPSHOT_SQL)
            writers = [row["session"] for row in await fetch_all(self._primary, _WRITERS_SQL)]
        except psycopg.errors.InsufficientPrivilege:
            return f"{awaited}, where the role may not execute pg_log_standby_snapshot()"
        except (psycopg.Error, SourceError) as exc:
            await self._stack.aclose()
            self._primary = None
            error = translate(exc, self._source.label) if isinstance(exc, psycopg.Error) else exc
            return f"{awaited}, which streamer cannot reach: {error.message}"
        if not writers:
            return awaited
        return f"{awaited}, written after these transactions end: {', '.join(writers)}"
