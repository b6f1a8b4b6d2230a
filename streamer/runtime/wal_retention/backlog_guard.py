"""Watches the WAL that each source retains for streamer, and acts before the source's disk is full.

The guard measures only at the source, over its own connection, so the guard works during an outage
of the target. At half of the limit the guard warns, at 80 % it slows copies down. The policy acts
at the limit: warn; spool, which reads the slot into a journal
(`streamer.runtime.wal_retention.journaling`); or drop, which drops the slot. After a drop, the
tables need a resync.

The reason of the backlog does not matter: an outage of the target, or a table that waits.
`limit_of` of `streamer.runtime.wal_retention.backlog_level` decides in all cases.
"""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.sources import set_source
from streamer.errors.error_classes import SourceError, SourceTakenError, StreamerError
from streamer.errors.error_reports import ErrorReport, error_fields
from streamer.mapping.rule_options import OnMaxRetainedWal
from streamer.mapping.rules import SourceMapping
from streamer.report.problem_facts import ReportedBacklog
from streamer.runtime.slot_owner import SlotOwner
from streamer.runtime.wal_retention.backlog_level import Backlog, Level
from streamer.runtime.wal_retention.journaling import Journaling
from streamer.source.connection import Connection, connection
from streamer.source.slot_and_publications.retained_wal import RetainedWal, read_retained
from streamer.source.slot_and_publications.slot import drop_slot
from streamer.util.backoff import Backoff
from streamer.util.containment import enduring
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_for_event, wait_while_idle

if TYPE_CHECKING:
    from streamer.runtime.services import Health

log = structlog.get_logger()

MEASURE_SECONDS: Final = 2.0
FINISH_SECONDS: Final = 60.0
"""How long the pipeline may take to read the end of a journal before writing continues."""
FINISH_BYTES_MAX: Final = 64 * 1024 * 1024
FAILED_SECONDS: Final = 60.0
UNMEASURED_SECONDS: Final = 60.0
"""How long the guard waits for the first measurement of a source's pipeline."""


class Runner(Protocol):
    """The reader of the source: its supervisor."""

    @property
    def health(self) -> "Health":
        """What the pipeline has measured."""
        ...

    @property
    def is_streaming(self) -> bool:
        """Whether the pipeline runs, and so has exclusive use of the source."""
        ...

    @property
    def runs_elsewhere(self) -> bool:
        """Whether another process runs the source."""
        ...

    @property
    def is_copying(self) -> bool: ...

    @property
    def stored_lsn(self) -> Lsn:
        """The target contains all changes up to this LSN, and has stored the LSN."""
        ...

    def store_position(self) -> None:
        """Store the LSN as soon as the target contains more changes."""
        ...

    def begin_anew(self) -> None:
        """End the pipeline cleanly, and restart it."""
        ...

    def allow_streaming(self, may: bool) -> None:
        """Allow or forbid new attempts."""
        ...


class BacklogGuard:
    """Guards a source. The owner runs `run`, even during an outage of the target."""

    def __init__(
        self, source: SourceMapping, spools: Path, owner: SlotOwner, *, is_lasting: bool
    ) -> None:
        """*is_lasting*: the files of the directory *spools* survive a restart of the machine."""
        self.source = source
        self.owner = owner
        self.journaling = Journaling(source, spools, owner, is_lasting=is_lasting)
        self.runner: Runner | None = None
        self.backlog: Backlog | None = None
        """The last measurement; None without a journal and far from a limit."""
        self.given_up: str | None = None
        """The reason why the guard dropped the slot, while no slot exists."""
        self.obstacle: ErrorReport | None = None
        """The reason why the guard does not act at the limit, such as a foreign owner of the slot.
        """
        self._changed = asyncio.Event()
        self._stored: str | None = "nothing yet"
        self._was_active = True
        self._finish_by: float | None = None
        self._not_before = 0.0
        self._logged_open_transaction = False
        self._is_limited: bool | None = None
        """Whether the server limits the WAL that it keeps for a slot; None: not known yet."""
        self._began_at = time.monotonic()

    def change(self, source: SourceMapping) -> None:
        """Use new settings from now on."""
        self.source = source
        self.journaling.change(source)
        self._changed.set()

    @property
    def facts(self) -> ReportedBacklog:
        """The WAL that the source keeps, and why the guard does not bound the WAL."""
        backlog, journaling = self.backlog, self.journaling
        return ReportedBacklog(
            Level.OK.value if backlog is None else backlog.state.value,
            0 if backlog is None else backlog.retained_bytes,
            None if backlog is None else backlog.limit_bytes,
            self.obstacle,
            journaling.error if journaling.is_active else None,
        )

    @property
    def is_throttling(self) -> bool:
        """Whether to slow down copies."""
        return self.backlog is not None and self.backlog.state in (Level.THROTTLED, Level.OVER)

    async def run(self) -> None:
        """Guard until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, run in (("journaling", self.journaling.run), ("backlog", self._monitor)):
                work = f"{name} {self.source.label}"
                group.create_task(enduring(work, run), name=work)

    @property
    def _is_needed(self) -> bool:
        """Whether this process must enforce a limit, or has a journal."""
        if self.journaling.journal is not None:
            return True
        if self.runner is not None and self.runner.runs_elsewhere:
            return False
        return self.source.max_retained_wal_bytes is not None or self._may_lose_slot

    @property
    def _may_lose_slot(self) -> bool:
        """Whether the slot may retain half of the server's limit, so that a journal must begin.

        While the source streams, the pipeline measures the slot. So the guard connects only when
        the slot retains a quarter of the limit.
        """
        if self.source.on_max_retained_wal is not OnMaxRetainedWal.SPOOL:
            return False
        if self.runner is not None and self.runner.is_streaming:
            health = self.runner.health
            restart_lsn, safe_bytes = health.restart_lsn, health.safe_wal_bytes
            if restart_lsn is not None:
                self._is_limited = safe_bytes is not None
                retained_bytes = health.wal_end_lsn - restart_lsn
                return safe_bytes is not None and 3 * retained_bytes >= safe_bytes
        if self._is_limited is None:
            return time.monotonic() - self._began_at >= UNMEASURED_SECONDS
        return self._is_limited

    async def _monitor(self) -> None:
        backoff = Backoff(first=MEASURE_SECONDS)
        while True:
            self._changed.clear()
            if not self._is_needed:
                self.backlog = None
                await wait_while_idle(self._changed, MEASURE_SECONDS, lambda: not self._is_needed)
                continue
            try:
                async with connection(self.source) as plain:
                    while self._is_needed and not self._changed.is_set():
                        retained = await read_retained(plain, self.source)
                        await self._judge(plain, retained)
                        backoff = Backoff(first=MEASURE_SECONDS)
                        await self._pause(MEASURE_SECONDS)
            except SourceError as exc:
                backoff.log(log, f'the backlog of "{self.source.label}" cannot be measured', exc)
                await self._pause(backoff.next_seconds())

    async def _pause(self, seconds: float) -> None:
        await wait_for_event(self._changed, seconds)

    async def _judge(self, plain: Connection, retained: RetainedWal | None) -> None:
        former = self.backlog.state if self.backlog is not None else Level.OK
        self.backlog = backlog = Backlog.measured(
            self.source, retained, self.journaling.size_bytes, former
        )
        self._is_limited = retained is not None and retained.keep_size_bytes is not None
        size, limit, level = backlog.retained_bytes, backlog.limit_bytes, backlog.state
        if level is not former:
            tell = log.info if level is Level.OK else log.warning
            tell(
                "WAL kept by the source",
                source=self.source.label,
                state=level.value,
                retained_bytes=size,
                limit_bytes=limit,
            )
        if retained is None:
            return
        self.given_up = None
        if self.journaling.is_active or self.journaling.journal is not None:
            await self._finish_journal(retained.unconfirmed_bytes, limit)
        elif limit is not None and size >= limit:
            await self._act(plain, retained, limit)
        else:
            self.obstacle = None
        self._was_active = retained.is_active

    # ---- at the limit --------------------------------------------------------------------------

    def _may_take_over(self, retained: RetainedWal) -> bool:
        if self.runner is not None and self.runner.is_streaming:
            return True
        is_idle = not retained.is_active and not self._was_active
        return is_idle and not (self.runner is not None and self.runner.runs_elsewhere)

    async def _verify_ownership(self, plain: Connection) -> bool:
        """Return whether this installation owns the slot; store and log the obstacle once."""
        try:
            await self.owner.verify(plain, self.source)
        except SourceTakenError as exc:
            report = ErrorReport.of(exc)
            if self.obstacle != report:
                self.obstacle = report
                log.error(
                    "retained WAL is over its limit, and streamer may not act on the slot",
                    source=self.source.label,
                    error=report.text,
                    **report.log_fields,
                )
            return False
        self.obstacle = None
        return True

    async def _act(self, plain: Connection, retained: RetainedWal, limit: int) -> None:
        policy = self.source.on_max_retained_wal
        if policy is OnMaxRetainedWal.WARN or not self._may_take_over(retained):
            return
        if 2 * retained.unconfirmed_bytes < limit:
            # Neither a journal nor a new slot would allow the source to remove this WAL.
            if not self._logged_open_transaction:
                self._logged_open_transaction = True
                log.warning(
                    "the source retains most of its WAL for an open transaction or for a copy",
                    source=self.source.label,
                )
            return
        self._logged_open_transaction = False
        if not await self._verify_ownership(plain):
            return
        if policy is OnMaxRetainedWal.DROP:
            await self._give_up(retained, limit)
            return
        now = asyncio.get_running_loop().time()
        if now < self._not_before:
            return
        try:
            await self.journaling.prepare()
        except StreamerError as exc:
            self._not_before = now + FAILED_SECONDS
            log.error("streamer cannot write a journal", source=self.source.label, error=str(exc))
            return
        # A restart would end the copies.
        is_beside = self.runner is not None and self.runner.is_streaming and self.runner.is_copying
        self.journaling.begin(beside=is_beside)
        if self.runner is not None and not is_beside:
            self.runner.begin_anew()

    async def _give_up(self, retained: RetainedWal, limit: int) -> None:
        """Drop the slot; the pipeline then finds the loss."""
        self.given_up = (
            f'streamer gave up replication slot "{self.source.slot}": the source kept '
            f"{retained.retained_bytes} bytes of WAL for it, and max_retained_wal is {limit}"
        )
        log.error("streamer drops the slot", source=self.source.label, error=self.given_up)
        runner = self.runner
        if runner is not None:
            runner.allow_streaming(False)
            runner.begin_anew()
        try:
            async with connection(self.source) as plain:
                await drop_slot(plain, self.source.slot)
        except SourceError as exc:
            self.given_up = None
            log.error("the slot cannot be dropped", source=self.source.label, error=str(exc))
        finally:
            if runner is not None:
                runner.allow_streaming(True)

    # ---- when the target has caught up ---------------------------------------------------------

    async def _finish_journal(self, unconfirmed_bytes: int, limit: int | None) -> None:
        """Stop filling the journal once the target has almost caught up; switch back to the slot
        once the target contains all of the journal.
        """
        journal, runner = self.journaling.journal, self.runner
        if self.journaling.is_beside and (runner is None or not runner.is_streaming):
            self.journaling.begin()  # no pipeline moves the slot now
            return
        if self.journaling.is_beside and journal is None and self.journaling.error is not None:
            self.journaling.begin()  # the source has no room for a copy of the slot
            if runner is not None:
                runner.begin_anew()
            return
        if journal is None or runner is None or not runner.is_streaming or runner.is_copying:
            if self._finish_by is not None:
                self._resume_writing()
            return
        if self._finish_by is None:
            most = min(FINISH_BYTES_MAX, (limit or 1 << 40) // 4)
            if max(unconfirmed_bytes, journal.end_lsn - runner.stored_lsn) > most:
                return
            await self.journaling.stop_writing()
            self._finish_by = asyncio.get_running_loop().time() + FINISH_SECONDS
        while runner.stored_lsn < journal.end_lsn and runner.is_streaming:
            if asyncio.get_running_loop().time() > self._finish_by:
                self._resume_writing()
                return
            runner.store_position()
            await asyncio.sleep(0.1)
        self._finish_by = None
        failpoint("journal.finished")
        if self.journaling.is_beside:
            await self.journaling.discard()
        elif runner.is_streaming:
            runner.begin_anew()

    def _resume_writing(self) -> None:
        self._finish_by = None
        self.journaling.begin(beside=self.journaling.is_beside)

    # ---- reports to the target ------------------------------------------------------------------

    async def store(self, bookkeeping: Bookkeeping, source_id: int) -> None:
        """Store a changed backlog for operators and copies."""
        backlog, facts = self.backlog, self.facts
        text = None if backlog is None else repr((backlog, facts))
        if text != self._stored:
            shown = None
            if backlog is not None:
                shown = {
                    **backlog.to_json(),
                    "throttled": self.is_throttling,
                    "obstacle": error_fields(facts.obstacle),
                    "journal": error_fields(facts.journal),
                }
            await set_source(bookkeeping, source_id, backlog=shown)
            self._stored = text
