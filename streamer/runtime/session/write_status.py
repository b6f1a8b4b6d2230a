"""Writes the facts that only this process knows to the target, for `streamer status`.

The facts: how many changes each table holds, when its lag began, which sessions it waits for, and
whether a heartbeat is overdue. A round every two seconds writes only the values that changed.
The first round writes all values, because the rows of a process that died are stale.
"""

import time
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.lane import Hold, MappedRelation
from streamer.bookkeeping.held_changes import HeldRecord, set_held
from streamer.bookkeeping.lagging_tables import read_blockers
from streamer.bookkeeping.positions import set_visible
from streamer.bookkeeping.relation_states import set_lags
from streamer.bookkeeping.sources import set_heartbeat_overdue
from streamer.control.progress_tracker import ProgressTracker
from streamer.errors.error_classes import SOURCE_LOCK_LOST, TargetError
from streamer.report.problem_facts import DRAINER_QUEUE
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.session.session import Session
from streamer.runtime.tables.relations import Relations
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_while_idle

if TYPE_CHECKING:
    from streamer.errors.error_reports import TableWait

REPORT_SECONDS: Final = 2.0
LAG_SECONDS_MIN: Final = 2.0
"""The report leaves out a smaller lag, because every busy table would otherwise cause constant
writes.
"""


async def report_status(session: Session, heartbeat: Heartbeat) -> None:
    """Write a source's status every `REPORT_SECONDS` until cancelled.

    Whenever an operator waits for the positions of tables, the process writes these positions.
    """
    services, source, relations = session.services, session.record, session.relations
    requested = relations.positions_requested
    report = _StatusReport(session, heartbeat)
    visible: dict[int, Lsn | None] = {mapped.relation_id: None for mapped in relations}
    while True:
        try:
            await set_visible(
                services.bookkeeping, visible
            )  # the first write clears the positions of an earlier attempt
            await report.write()
        except SOURCE_LOCK_LOST:
            raise
        except TargetError as exc:  # the next round writes the values: a stream need not stop
            services.metrics.count_error(exc, source.database, source.sid)
        visible = {}
        if await wait_while_idle(requested, REPORT_SECONDS, report.is_idle):
            requested.clear()
            visible = _visible(relations, session.tracker)


class _StatusReport:
    """Keeps the last written values of a source in memory."""

    def __init__(self, session: Session, heartbeat: Heartbeat) -> None:
        self._bookkeeping = session.services.bookkeeping
        self._source_id = session.record.source_id
        self._relations = relations = session.relations
        self._tracker = session.tracker
        self._heartbeat = heartbeat
        self._held: list[HeldRecord] | None = None
        self._was_overdue: bool | None = None
        self._was_quiet = False
        """At the last write, no table had unapplied changes and no lane was held."""
        self._lag_from: dict[int, int | None] = {}
        """The oldest commit times of relations that lag; None for relations without lag."""
        self._unblocked: set[MappedRelation] = set()
        """The relations whose drainer waited for no session at the last write."""
        self._waiting = {  # a process that died may have stored waits of these tables
            mapped for mapped in relations if Hold.SYNC not in relations.lane(mapped).hold
        }

    @property
    def _is_quiet(self) -> bool:
        return self._tracker.is_idle and not self._relations.have_held_lanes

    def is_idle(self) -> bool:
        """Whether no value has changed since the last write."""
        is_overdue = self._heartbeat.overdue_seconds is not None
        return self._was_quiet and self._is_quiet and self._was_overdue is is_overdue

    async def write(self) -> None:
        """Write the values that changed."""
        overdue = self._heartbeat.overdue_seconds
        if self._was_overdue is not (overdue is not None):
            await set_heartbeat_overdue(self._bookkeeping, self._source_id, overdue)
            self._was_overdue = overdue is not None
        is_quiet = self._is_quiet
        held = _held(self._relations)
        if held != self._held:
            await set_held(self._bookkeeping, self._source_id, held)
            self._held = held
        await self._write_lag()
        await self._write_waiting()
        self._was_quiet = is_quiet

    async def _write_lag(self) -> None:
        lag_from = {m.relation_id: _lag_from(self._relations, m) for m in self._relations}
        missing = object()
        changed = {
            m.relation_id: None
            if lag_from[m.relation_id] is None
            else self._relations.lag_seconds(m)
            for m in self._relations
            if self._lag_from.get(m.relation_id, missing) != lag_from[m.relation_id]
        }
        if changed:
            await set_lags(self._bookkeeping, changed)
        self._lag_from = lag_from

    async def _write_waiting(self) -> None:
        """Store why tables wait: for sessions at the target that block a drainer, or in its queue.

        Between two attempts and as an attempt begins, a drainer waits for no session, and the last
        report stays.
        """
        busy: dict[int, MappedRelation] = {}
        waits: dict[MappedRelation, TableWait | None] = {}
        now = time.monotonic()
        for mapped in self._relations:
            lane = self._relations.lane(mapped)
            if lane.backend_pid is not None:
                busy[lane.backend_pid] = mapped
            elif lane.queues_since is not None and now - lane.queues_since > REPORT_SECONDS:
                waits[mapped] = DRAINER_QUEUE
            elif not _may_wait(lane.hold):
                waits[mapped] = None
        blockers = await read_blockers(self._bookkeeping, list(busy)) if busy else {}
        for pid, mapped in busy.items():
            if pid in blockers:
                waits[mapped] = blockers[pid].wait_for(mapped.mapping.target)
            elif mapped in self._unblocked:
                waits[mapped] = None
        self._unblocked = {mapped for pid, mapped in busy.items() if pid not in blockers}
        for wait in dict.fromkeys(waits.values()):
            waiting = {mapped for mapped, reason in waits.items() if reason == wait}
            if wait is not None:
                self._waiting |= waiting
            elif waiting := waiting & self._waiting:
                self._waiting -= waiting
            if waiting:
                await self._relations.show_wait(waiting, wait)


def _visible(relations: Relations, tracker: ProgressTracker) -> dict[int, Lsn | None]:
    visible: dict[int, Lsn | None] = {}
    for mapped in relations:
        behind = relations.lane(mapped).pending.flush_lsn_max
        visible[mapped.relation_id] = tracker.newest_lsn if behind is None else behind
    return visible


def _may_wait(hold: Hold) -> bool:
    return bool(hold & (Hold.BUSY | Hold.LARGE | Hold.ERROR | Hold.QUARANTINE))


def _lag_from(relations: Relations, mapped: MappedRelation) -> int | None:
    if relations.lag_seconds(mapped) < LAG_SECONDS_MIN:
        return None
    return relations.lane(mapped).pending.oldest_time


def _held(relations: Relations) -> list[HeldRecord]:
    records = []
    for mapped in relations:
        lane = relations.lane(mapped)
        changes, size = lane.held(mapped)
        if changes:
            behind = lane.pending.flush_lsn_max
            records.append(HeldRecord(mapped.relation_id, changes, size, behind))
    return records
