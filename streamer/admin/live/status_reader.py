"""The status for every page and for `GET /api/sources`, read once at a time and cached."""

import asyncio
from typing import Any, Final

from streamer.admin.live.events import Events, ShownState
from streamer.admin.live.fleet_overview import FleetOverview, fleet_overview_of
from streamer.admin.live.status_view import with_own_state
from streamer.admin.mapping.admin_threads import in_admin_thread
from streamer.admin.service.admin_service import AdminService
from streamer.errors.error_classes import StreamerError
from streamer.errors.error_reports import ErrorReport, error_fields
from streamer.mapping.rules import SourceLabel
from streamer.runtime.target_health import TargetState

Row = dict[str, Any]

KEEP_SECONDS: Final = 2.0
"""The maximum age of a status: many pages may be open, and each status queries every source."""
KEEP_SECONDS_MAX: Final = 10.0
KEEP_TIMES: Final = 3
"""The process caches a status for this multiple of the reading time, so that pages of a large fleet
leave time for the streams.
"""
WAIT_SECONDS: Final = 3.0
"""The limit of a page's wait for the status, because an unreachable source takes much longer."""
_WITHOUT_STATUS: Final = (
    TargetState.UNREACHABLE,
    TargetState.REFUSED,
    TargetState.ERROR,
)
"""States of the target without readable bookkeeping."""


class StatusReader:
    """Reads the status for every page, once at a time."""

    def __init__(self, service: AdminService, events: Events) -> None:
        self._service = service
        self._events = events
        self._task: asyncio.Task[Row] | None = None
        self._began_at = 0.0
        self._keep_seconds = 0.0
        self._summarizing = asyncio.Lock()
        self._summarized: list[Row] | None = None
        self._states: dict[tuple[str, str | None], ShownState] = {}
        self._error_of_target: str | None = None
        self._fleet = FleetOverview([], "", None, [])
        self._read_at = float("-inf")
        self._last: Row | None = None

    async def read(self) -> tuple[list[Row], str | None]:
        """Return the sources, and why they may be out of date."""
        keep_seconds = self._keep_seconds or KEEP_SECONDS
        if self._task is None and self._now() - self._read_at > keep_seconds:
            self._began_at = self._now()
            self._task = asyncio.create_task(self._service.status(), name="status")
        reason = None
        if (task := self._task) is not None:
            await asyncio.wait([task], timeout=WAIT_SECONDS)
            if not task.done():
                reason = "a server is slow to answer"
            else:
                if self._task is task:
                    self._task, self._read_at = None, self._now()
                    took = self._read_at - self._began_at
                    self._keep_seconds = (
                        min(KEEP_SECONDS_MAX, took * KEEP_TIMES) if took > 1 else 0.0
                    )
                try:
                    self._last = task.result()
                except StreamerError as exc:
                    self._last, self._read_at = None, float("-inf")
                    return self._facts_of_process(), str(exc)
        if self._last is not None and self._last["target"]["state"] in _WITHOUT_STATUS:
            return self._facts_of_process(), str(self._last["target"]["error"])
        if self._last is None or not self._is_current(self._last):
            return self._facts_of_process(), reason
        sources: list[Row] = self._last["sources"]
        return sources, reason

    async def fleet(self) -> tuple[FleetOverview, str | None]:
        """Return a survey of the sources, and why they may be out of date."""
        sources, reason = await self.read()
        async with self._summarizing:
            states, target = self._events.source_states(), self._events.target
            facts = (states, target["error"])
            if self._summarized is not sources or facts != (self._states, self._error_of_target):
                merged = with_own_state(sources, states)
                # Thousands of tables take a moment, and the event loop also streams.
                self._fleet = await in_admin_thread(fleet_overview_of, merged, target)
                self._summarized = sources
                self._states, self._error_of_target = facts
        return self._fleet, reason

    def forget(self) -> None:
        """Discard the status, so that the next page reads the changed status."""
        self._read_at = float("-inf")
        self._service.reads.forget()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _is_current(self, status: Row) -> bool:
        """Whether the status is about the running mapping."""
        read = [SourceLabel(row["database"], row["sid"]) for row in status["sources"]]
        return read == self._service.labels()

    def _facts_of_process(self) -> list[Row]:
        """Return the facts that this process holds in memory, without a query."""
        states = self._events.known_states()
        rows = []
        tables: dict[str, list[Row]] = {}
        for (label, name), condition in states.items():
            if name is not None:
                tables.setdefault(label, []).append(_known_table(name, *condition))
        for source in self._service.mapping.sources:
            state, error = states.get((source.label, None), ("not started", None))
            rows.append(
                {
                    "database": source.database,
                    "sid": source.sid,
                    "state": state,
                    "slot": source.slot,
                    **error_fields(error),
                    "hint": None,
                    "lag_bytes": None,
                    "lag_seconds": None,
                    "retained_wal_bytes": None,
                    "confirmed_flush_lsn": None,
                    "process": None,
                    "role": None,
                    "tables": sorted(
                        tables.get(source.label, []), key=lambda table: str(table["source"])
                    ),
                }
            )
        return rows


def _known_table(table: str, state: str, error: ErrorReport | None) -> Row:
    return {
        "source": table,
        "target": None,
        "type": None,
        "state": state,
        **error_fields(error),
        "end_lsn": None,
        "rows_copied": None,
        "rows_total": None,
        "quarantined": 0,
    }
