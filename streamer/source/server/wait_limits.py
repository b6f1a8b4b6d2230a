"""Waits at a source: their time limit and the blocking sessions.

Any statement of streamer can wait for a lock that an application holds, or for a transaction to
end. ``lock_timeout`` limits every such wait. An operator sees the blocking sessions and can decide
about them.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from psycopg.pq import TransactionStatus

from streamer.errors.error_classes import SourceContentionError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.blocking_sessions import BACKENDS, blockers_sql
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, connection, fetch_all, translating
from streamer.source.server.timeline import check_same_server_by_query

T = TypeVar("T")

CHECK_SECONDS: Final = 1.0
LOCK_SECONDS: Final = 10
"""The time for which a statement waits for a lock before the server cancels it; streamer tries
again later.
"""

Report = Callable[[str], Awaitable[None]]

_CLEAR_SQL: Final = "select pg_catalog.pg_stat_clear_snapshot()"
"""Without this call, pg_stat_activity would repeat its first answer within a transaction."""

_BLOCKERS_SQL: Final = blockers_sql(BACKENDS.format("%s"))
_LOCKED_SQL: Final = blockers_sql("""
select w.pid, l.relation::int8 as subject
from pg_catalog.pg_stat_activity w
join pg_catalog.pg_locks l on l.pid = w.pid and not l.granted and l.relation is not null
where w.application_name = %s and w.datname = pg_catalog.current_database()
  and w.wait_event_type = 'Lock' and w.usename = current_user""")


class Reported:
    """Suppresses repeated log lines about a wait of which only the age has changed."""

    def __init__(self) -> None:
        self._pids: dict[tuple[str, ...], list[str]] = {}

    def is_new(self, awaited: str, *subject: str) -> bool:
        """Whether *awaited* names different sessions than the last report of *subject*."""
        former, now = self._pids.get(subject), re.findall(r"pid \d+", awaited)
        self._pids[subject] = now
        return now != former


async def set_lock_timeout(plain: Connection, seconds: float = LOCK_SECONDS) -> None:
    """Limit the wait of statements of *plain* for a lock to *seconds*."""
    await plain.execute(f"set lock_timeout = {round(seconds * 1000)}".encode())


async def read_blockers(plain: Connection, pid: int) -> str:
    """Name the sessions that the backend *pid* waits for, or return an empty text."""
    await plain.execute(_CLEAR_SQL)
    return "".join(row["sessions"] for row in await fetch_all(plain, _BLOCKERS_SQL, [pid]))


async def read_locked(plain: Connection, application_name: str) -> dict[int, str]:
    """Name the sessions that backends of *application_name* wait for, by the OID of the table."""
    await plain.execute(_CLEAR_SQL)
    rows = await fetch_all(plain, _LOCKED_SQL, application_name)
    return {row["subject"]: row["sessions"] for row in rows}


async def _report_blockers(
    source: SourceMapping, server: SourceServer, watched: Connection, report: Report
) -> None:
    """Report the sessions that the backend of *watched* waits for, until cancelled.

    The check opens a separate connection, but only while a statement of *watched* runs, because
    most work waits for no session. With hundreds of sources that start, the work mostly waits for
    the target, and a check reads all sessions of the server.
    """
    await _until_executing(watched)
    pid = watched.info.backend_pid
    async with connection(source) as plain:
        await check_same_server_by_query(
            plain, server
        )  # on a different server the pid belongs to a different session
        while True:
            if awaited := await read_blockers(plain, pid):
                await report(awaited)
            await _until_executing(watched)


async def _until_executing(watched: Connection) -> None:
    """Return at the first check that finds a running statement."""
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        if watched.info.transaction_status is TransactionStatus.ACTIVE:
            return


async def reporting_blockers(
    source: SourceMapping,
    server: SourceServer,
    plain: Connection,
    work: Awaitable[T],
    report: Report,
) -> T:
    """Do *work*, which uses *plain* at *server*, and report the sessions that block it meanwhile.

    Raises SourceContentionError with the blocking sessions.
    """
    reported: list[str] = []

    async def remember(awaited: str) -> None:
        reported[:] = [awaited]
        await report(awaited)

    watching = asyncio.ensure_future(_report_blockers(source, server, plain, remember))
    try:
        with translating(source.label):
            return await work
    except SourceContentionError as exc:
        if reported:
            exc.message = f"{exc.message}; it waited for {reported[0]}"
        raise
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        if not watching.cancelled():
            watching.exception()  # a failed check must not end the work
