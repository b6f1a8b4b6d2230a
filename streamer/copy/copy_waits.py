"""Reports why a copy waits: for a turn, or for a session that holds a lock on either side.

A separate task polls the target for the length of a round, because the round may wait for a lock.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.copies import OwnSession, read_own_sessions
from streamer.bookkeeping.lagging_tables import read_blockers
from streamer.copy.automatic_waits import STARTING_SPARK, automatic_wait
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_queue import CopyQueue
from streamer.copy.prepare_copy import TableCopy
from streamer.copy.stalled_copies import CopyReports
from streamer.errors.error_classes import StreamerError
from streamer.errors.error_reports import TableWait
from streamer.postgres.blocking_sessions import Blockers

CHECK_SECONDS: Final = 1.0


@dataclass(slots=True)
class WaitFacts:
    """The copies of a round, and the sessions of these copies."""

    waiting: list[MappedRelation] = field(default_factory=list)
    """The relations that wait for the next round."""
    copies: list[TableCopy] = field(default_factory=list)
    """The copies of this round that are not done."""
    source_locks: dict[TableCopy, str] = field(default_factory=dict)
    """The sessions at the source that copies wait for."""
    target_locks: dict[MappedRelation, Blockers] = field(default_factory=dict)
    """The sessions at the target that copies wait for."""
    copying: set[tuple[str, str, str]] = field(default_factory=set)
    """The tables that tasks fill now: application name, schema and table."""
    task_name: str = ""
    jobs: int = 1
    preparing: list[MappedRelation] = field(default_factory=list)
    """The relations whose target tables the round prepares together."""
    is_starting: bool = False
    is_starving: bool = False


def find_reasons(facts: WaitFacts) -> dict[MappedRelation, TableWait]:
    """Return for each waiting copy the reason; a copy that makes progress is left out. Pure."""
    reasons: dict[MappedRelation, TableWait] = {}
    if facts.copies:
        count = len(facts.copies)
        verb = "ends" if count == 1 else "end"
        wait = automatic_wait(f"{_copies(count)} of this source {verb} first")
        reasons = dict.fromkeys(facts.waiting, wait)
    for copy in facts.copies:
        if sessions := facts.source_locks.get(copy):
            reasons[copy.mapped] = TableWait(sessions)
        elif (reason := _find_wait_for_task(facts, copy)) is not None:
            reasons[copy.mapped] = reason
    # The round prepares and plans tables one by one or in groups.
    unplanned = [*facts.preparing, *(copy.mapped for copy in facts.copies if not copy.parts)]
    if facts.target_locks:
        reasons |= dict.fromkeys(unplanned, automatic_wait("other tables are prepared first"))
    for mapped, blockers in facts.target_locks.items():
        reasons[mapped] = blockers.wait_for(mapped.mapping.target)
    return reasons


def _find_wait_for_task(facts: WaitFacts, copy: TableCopy) -> TableWait | None:
    """Return the reason why no task has begun with *copy*; None if a task has begun."""
    if not copy.parts or copy.has_copied_parts:
        return None
    if (facts.task_name, *copy.fills) in facts.copying:
        return None
    if facts.is_starting:
        return STARTING_SPARK
    if facts.is_starving:
        return TableWait("a free worker of Spark")
    if busy := len(facts.copying):
        use = "uses" if busy == 1 else "use"
        reason = f"{_copies(busy)} of other tables {use} Spark (sync.jobs: {facts.jobs})"
        return automatic_wait(reason)
    return None


def _copies(count: int) -> str:
    return "1 copy" if count == 1 else f"{count} copies"


class CopyWaits:
    """Polls both sides during a round, and reports waits."""

    def __init__(self, context: CopyContext, queue: CopyQueue, reports: CopyReports) -> None:
        self._context = context
        self._queue = queue
        self._reports = reports
        self.preparing: list[MappedRelation] = []
        """The relations whose target tables the round prepares."""
        self.copies: list[TableCopy] = []
        self.source_locks: dict[TableCopy, str] = {}
        self._reported: dict[MappedRelation, TableWait] = {}

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            with contextlib.suppress(StreamerError):  # the round gets the error, too
                reasons = find_reasons(await self._read())
                await self._report(self._keep(reasons))

    async def end(self, running: "asyncio.Task[None]") -> None:
        """End the polling and the reported waits at the end of the round."""
        running.cancel()
        await asyncio.wait([running])
        with contextlib.suppress(StreamerError):
            await self._report({})

    async def _read(self) -> WaitFacts:
        context = self._context
        async with context.bookkeeping.connection() as connection:
            sessions = await read_own_sessions(connection)
        blocked = {session.pid for session in sessions if session.is_blocked}
        blockers = await read_blockers(context.bookkeeping, blocked) if blocked else {}
        copies = [copy for copy in self.copies if not copy.is_done]
        tasks = [s for s in sessions if s.application_name.startswith("streamer copy ")]
        return WaitFacts(
            waiting=self._queue.waiting,
            copies=copies,
            source_locks=self.source_locks,
            target_locks=self._match(copies, sessions, blockers),
            copying={(s.application_name, s.namespace, s.table) for s in tasks if _is_user(s)},
            task_name=context.task_name,
            jobs=context.settings.jobs,
            preparing=self.preparing,
            is_starting=context.launcher.is_starting,
            is_starving=context.launcher.is_starving,
        )

    def _match(
        self, copies: list[TableCopy], sessions: list[OwnSession], blockers: dict[int, Blockers]
    ) -> dict[MappedRelation, Blockers]:
        """Return the sessions at the target for which relations wait, by relation."""
        tables: dict[tuple[str, str], MappedRelation] = {}
        for copy in copies:
            tables[copy.fills] = tables[copy.target_name] = copy.mapped
        for mapped in self.preparing:
            name = mapped.mapping.target
            tables[name.namespace, name.name] = mapped
        names = (self._context.application_name, self._context.task_name)
        return {
            tables[session.namespace, session.table]: blockers[session.pid]
            for session in sessions
            if session.application_name in names
            and session.pid in blockers
            and (session.namespace, session.table) in tables
        }

    def _keep(self, reasons: dict[MappedRelation, TableWait]) -> dict[MappedRelation, TableWait]:
        """Keep the reason of a failed swap that the round will soon try again."""
        now = time.monotonic()
        again = {copy.mapped for copy in self.copies if not copy.is_done and copy.not_before > now}
        return {m: reason for m, reason in self._reported.items() if m in again} | reasons

    async def _report(self, reasons: dict[MappedRelation, TableWait]) -> None:
        new: dict[TableWait, list[MappedRelation]] = {}
        for mapped, reason in reasons.items():
            if self._reported.get(mapped) != reason:
                new.setdefault(reason, []).append(mapped)
        for reason, waiting in new.items():
            await self._reports.show_wait(waiting, reason)
            self._reported |= dict.fromkeys(waiting, reason)
        if ended := [mapped for mapped in self._reported if mapped not in reasons]:
            await self._reports.show_wait(ended, None)
            for mapped in ended:
                del self._reported[mapped]


def _is_user(session: OwnSession) -> bool:
    """Whether the session uses a table of a user or a staging table, rather than the
    bookkeeping.
    """
    return session.namespace != "streamer" or session.table.startswith("copy_")
