"""Guards the preconditions of a source: its slot, its publications, replica identities.

The guard uses its own connection, reads only catalogs, and waits for no lock on a user's table.
Checks that stop no stream (partitions, heartbeats) use a second connection and a second task, see
`streamer.runtime.session.source_checks`. So a locked table cannot hide a lost slot.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog

from streamer.bookkeeping.sources import set_source_state
from streamer.errors.error_reports import ErrorReport
from streamer.runtime.check_pace import pause_after
from streamer.runtime.guards.table_cases import TableCases
from streamer.runtime.services import Health, Services
from streamer.runtime.tables.table_events import TableEvents
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, connection, plan_once, translating
from streamer.source.server.timeline import check_same_server_by_query
from streamer.source.slot_and_publications.guard_query import GuardFacts, read_guard_facts
from streamer.source.slot_and_publications.slot import Slot, check_slot
from streamer.source.slot_and_publications.standbys import find_standby_wait

log = structlog.get_logger()

GUARD_SECONDS: Final = 2.0
_TIMEOUTS_SQL: Final = "set lock_timeout = '3s'; set statement_timeout = '60s'"


class SourceMonitor:
    """The guard of one attempt to stream a source."""

    def __init__(
        self,
        server: SourceServer,
        services: Services,
        tables: TableEvents,
        cases: TableCases,
        health: Health,
    ) -> None:
        """*cases*: the cases of the source's tables, which the guard creates and completes."""
        self.cases = cases
        self.digest: str | None = None
        """The digest of the catalogs at the last check, see `GuardFacts`."""
        self.changed = asyncio.Event()
        """Set when the digest changes; cleared by the task that searches for gaps."""
        self._server = server
        self._bookkeeping = services.bookkeeping
        self._tables = tables
        self._health = health
        self._condition: ErrorReport | None = None
        self._has_reported_slot = False

    def report_slot(self, slot: Slot) -> None:
        """Report the slot, which a task of this source has just read and checked."""
        self._has_reported_slot = True
        self._health.restart_lsn, self._health.safe_wal_bytes = (
            slot.restart_lsn,
            slot.safe_wal_bytes,
        )

    async def run(self, on_check: Callable[[], None]) -> None:
        """Check until cancelled; call *on_check* after each check.

        Raises SlotMissingError, SlotInvalidatedError, SourceDivergedError, UnpublishedError,
        SourceConnectionError.
        """
        source, relations, cases = self._tables.source, self._tables.relations, self.cases
        if self._has_reported_slot and not cases.are_open:
            await asyncio.sleep(GUARD_SECONDS)  # the start has just checked all facts
        async with connection(source) as plain:
            await plain.execute(_TIMEOUTS_SQL)
            await plan_once(plain)
            await check_same_server_by_query(plain, self._server)
            while True:
                began = time.monotonic()
                with translating(source.label):
                    names = [mapped.mapping.source for mapped in relations]
                    seen = await read_guard_facts(plain, source, names, self._server.version)
                    took = time.monotonic() - began  # omits the changes at the source below
                    self._check_slot(seen)
                    relations.clock.measured(seen.clock_seconds, began, time.monotonic())
                    self._tables.lag.record_end(seen.flush_lsn, began)
                    await self._show_condition(plain)
                    await cases.copy_replaced(plain)
                    cases.expect_missing()
                    if seen.digest != self.digest or cases.is_incomplete:
                        await cases.reconcile(plain)
                        self.digest = seen.digest  # the next check sees later changes
                        self.changed.set()
                    await cases.delete_dropped(plain)
                on_check()
                seconds = GUARD_SECONDS if cases.are_open else self._tables.pause(GUARD_SECONDS)
                await asyncio.sleep(pause_after(took, seconds))

    def _check_slot(self, seen: GuardFacts) -> None:
        self._health.wal_end_lsn = max(self._health.wal_end_lsn, seen.flush_lsn)
        check_slot(seen.slot, self._tables.source.slot, self._server.database)
        assert seen.slot is not None
        self.report_slot(seen.slot)

    async def _show_condition(self, plain: Connection) -> None:
        """Show that the source holds changes back until its standbys have them, or that a new table
        cannot join.
        """
        source, standby_wait = self._tables.source, None
        if self._tables.lag.is_stalled(time.monotonic()):
            standby_wait = await find_standby_wait(plain, source)
        error = standby_wait or self._tables.refused or self._tables.clash
        report = None if error is None else ErrorReport.of(error)
        if report == self._condition:
            return
        self._condition = report
        state = "streaming" if standby_wait is None else "waiting"
        self._health.state, self._health.error = state, report
        if error is not None:
            log.warning(str(error), source=source.label, **error.log_fields)
        await set_source_state(self._bookkeeping, self._tables.fence.source_id, state, report)
