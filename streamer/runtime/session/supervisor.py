"""Keeps the pipeline of each source running: an error of a source does not disturb the rest.

The class of an error decides the reaction. After a transient error the supervisor retries with a
back-off. An error that an operator must fix leaves the source in state ``error``. The supervisor
retries every 15 s, and at once after an operator's request. An exception other than a StreamerError
is a defect, and ends the source's attempt like an error for the operator.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog

from streamer.bookkeeping.requests import end_restarts
from streamer.bookkeeping.sources import read_source_records, report_source_failure
from streamer.errors.error_classes import (
    Retry,
    SourceConfigurationError,
    SourceConnectionError,
    SourceRejectedError,
    StreamerError,
    TargetMovedError,
    TransportError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import SourceMapping, find_source
from streamer.mapping.shared_targets import NO_CLASHES, Clashes
from streamer.postgres.conninfo import reach_hint
from streamer.runtime.services import Health, Services
from streamer.runtime.session.pipeline import Pipeline
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.source.connection import connection, require_configured
from streamer.source.stream.feedback import SILENT_SECONDS
from streamer.util.backoff import Backoff
from streamer.util.containment import apart, contained
from streamer.util.lsn import INVALID_LSN, Lsn

log = structlog.get_logger()

MANUAL_RETRY_SECONDS: Final = 15.0
STEADY_SECONDS: Final = 30.0
"""An attempt that lasted this long was successful, so its error starts the back-off again."""
OUT_OF_REACH_ATTEMPTS: Final = 3
"""The number of consecutive attempts without a connection after which a peer replica tries."""
_UNREACHED: Final = (SourceConnectionError, SourceRejectedError, SourceConfigurationError)


class Supervisor:
    """Runs a source, attempt after attempt."""

    def __init__(self, source: SourceMapping, services: Services, guard: BacklogGuard) -> None:
        self.source = source
        self.guard = guard
        self.pipeline: Pipeline | None = None
        self.health = Health()
        self.stop = asyncio.Event()
        self.stop_lsn: Lsn | None = None
        self.failure: StreamerError | None = None
        """The error that an operator must fix; None without such an error."""
        self._services = services
        self._requested = asyncio.Event()
        self._unapplied: list[SourceMapping] = []
        """Rules that no attempt has applied, in the order of the changes."""
        self._binary_obstacle: str | None = None
        """The reason why the next attempt uses text: binary has just failed."""
        self._confirmed_at: float | None = None
        """The monotonic time at which an earlier attempt sent its last heartbeat that arrived."""
        self._unreached_attempts = 0
        self._attempt_ended = asyncio.Event()
        self._may_stream = asyncio.Event()
        self._may_stream.set()
        self._assigned = asyncio.Event()
        self._assigned.set()

    @property
    def retained_wal_bytes(self) -> int | None:
        """The WAL that the source retains for streamer's slot, by the last measurement of this
        process.
        """
        if self.pipeline is not None:
            if self.health.restart_lsn is None:
                return None
            return max(0, self.health.wal_end_lsn - self.health.restart_lsn)
        backlog = self.guard.backlog
        return None if backlog is None else backlog.retained_bytes

    @property
    def condition(self) -> tuple[str, ErrorReport | None]:
        """State and error for operators. A source without messages does not count as streaming."""
        health, pipeline = self.health, self.pipeline
        silent = pipeline.silent_seconds if pipeline is not None else 0.0
        if health.state != "streaming" or silent <= SILENT_SECONDS:
            return health.state, health.error
        last = datetime.now(UTC) - timedelta(seconds=round(silent))
        error = SourceConnectionError(
            f'source "{self.source.label}": no answer since {last:%H:%M:%S} UTC',
            hint=reach_hint(self.source.url.reveal()),
        )
        return "waiting", ErrorReport.of(error)

    @property
    def heartbeat_seconds(self) -> float | None:
        """How long a commit takes to become visible; the value grows between attempts to stream.

        None for a source of a peer replica, which measures the time.
        """
        if not self.is_assigned:
            return None
        heartbeat = self.pipeline.heartbeat if self.pipeline is not None else None
        if heartbeat is not None and heartbeat.arrived_seconds is not None:
            return heartbeat.seconds
        if self._confirmed_at is not None:
            return time.monotonic() - self._confirmed_at
        return None if heartbeat is None else heartbeat.seconds

    # ---- for the backlog guard (Runner) ---------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        return self.pipeline is not None and self.pipeline.is_streaming

    @property
    def runs_elsewhere(self) -> bool:
        return not self.is_assigned or self.health.holder is not None

    @property
    def is_copying(self) -> bool:
        return self.pipeline is not None and self.pipeline.is_copying

    @property
    def stored_lsn(self) -> Lsn:
        return self.pipeline.stored_lsn if self.pipeline is not None else INVALID_LSN

    def begin_anew(self) -> None:
        self._requested.set()
        if self.pipeline is not None:
            self.pipeline.begin_anew()

    def allow_streaming(self, may: bool) -> None:
        if may:
            self._may_stream.set()
        else:
            self._may_stream.clear()

    # ---- for the replica (Shared) ---------------------------------------------------------------

    @property
    def is_assigned(self) -> bool:
        """Whether this process is to run the source. Without replicas, always true."""
        return self._assigned.is_set()

    @property
    def is_draining(self) -> bool:
        """Whether the last attempt still runs, although a peer replica must run the source."""
        return not self.is_assigned and self.pipeline is not None

    @property
    def is_busy(self) -> bool:
        """Whether another replica would have to repeat work that is under way."""
        return self.is_copying or self.has_journal

    @property
    def has_journal(self) -> bool:
        """Whether files of this process contain changes that the source no longer retains."""
        journaling = self.guard.journaling
        return journaling.is_active or journaling.journal is not None

    @property
    def is_out_of_reach(self) -> bool:
        """Whether this process cannot reach the source, or the source refuses this process."""
        return self._unreached_attempts >= OUT_OF_REACH_ATTEMPTS and not self.is_streaming

    async def answers(self) -> bool:
        """Whether this process can connect to the source."""
        try:
            async with connection(self.source):
                return True
        except StreamerError:
            return False

    def assign(self) -> None:
        """Run the source from now on."""
        self.health = Health()
        self._unreached_attempts = 0
        self._confirmed_at = None
        self._assigned.set()

    def unassign(self) -> None:
        """End the present attempt cleanly, and begin no other attempt until `assign`."""
        self._assigned.clear()
        self.failure = None
        self.begin_anew()

    def show(
        self,
        state: str,
        error: ErrorReport | None,
        holder: str | None,
        tables: dict[str, tuple[str, ErrorReport | None]],
    ) -> None:
        """Show the stored state of a source that a peer replica runs.

        *tables*: the tables that are not ready.
        """
        if self.is_assigned or self.pipeline is not None:
            return
        self.health = Health(
            state,
            error,
            holder=holder,
            table_states={name: table_state for name, (table_state, _) in tables.items()},
            table_errors={
                name: report for name, (_, report) in tables.items() if report is not None
            },
            verifications=self.health.verifications,
        )

    # ---- for operators --------------------------------------------------------------------------

    async def change(self, source: SourceMapping, clashes: Clashes = NO_CLASHES) -> None:
        """Switch to a new url or new rules for this source. New tables in *clashes* do not join.

        If possible, unaffected relations continue meanwhile. Raises StreamerError; the source then
        continues as before.
        """
        former, self.source = self.source, source
        self.guard.change(source)
        self._binary_obstacle = None
        pipeline = self.pipeline
        if pipeline is None:
            self._unapplied += [source] if source != former else []
            self._requested.set()
            return
        is_same_stream = former == dataclasses.replace(
            source,
            rules=former.rules,
            exclude_tables=former.exclude_tables,
            max_retained_wal_bytes=former.max_retained_wal_bytes,
            on_max_retained_wal=former.on_max_retained_wal,
            priority=former.priority,
        )
        try:
            may_change = is_same_stream and not self._unapplied
            if may_change and await pipeline.change(source, clashes):
                return
        except StreamerError as exc:
            # the next attempt may have begun with the new rules
            if exc.retry is not Retry.TIMED and self.pipeline is pipeline:
                self.source = former
                self.guard.change(former)
                raise
        self._unapplied += [source] if source != former else []
        if self.pipeline is pipeline:
            self.begin_anew()

    def wake_for_requests(self, *, was_requested: bool) -> None:
        """Read operators' requests. *was_requested*: a request exists, for any source."""
        if was_requested:
            self._requested.set()
        if self.pipeline is not None:
            self.pipeline.requested.set()

    def store_position(self, *, of_tables: bool = False) -> None:
        """Store the acknowledged position as soon as it moves: an operator waits."""
        if self.pipeline is not None:
            self.pipeline.store_position(of_tables=of_tables)

    def request_stop(self) -> None:
        self.stop.set()
        if self.pipeline is not None:
            self.pipeline.stop.set()

    async def until_ended(self, pipeline: Pipeline) -> None:
        """Wait until the attempt that runs *pipeline* has ended."""
        while self.pipeline is pipeline:
            self._attempt_ended.clear()
            await self._attempt_ended.wait()

    async def run(self) -> None:
        """Stream until asked to stop."""
        structlog.contextvars.bind_contextvars(source=self.source.label)
        backoff = Backoff()
        while not self.stop.is_set():
            if not self.is_assigned:
                await self._wait([self._assigned, self.stop], None)
                continue
            # Cleared here and not before the sleep: a request may come after this attempt has read
            # the requests.
            self._requested.clear()
            try:
                began = time.monotonic()
                with contained(f'streaming "{self.source.label}"'):
                    begins_anew = await apart(self._attempt(), f"attempt {self.source.label}")
                if not begins_anew:
                    return
                self._binary_obstacle = None  # the operator may have removed the reason
            except TransportError as exc:
                self._binary_obstacle = str(exc)  # the next start of the stream logs the reason
            except StreamerError as exc:
                self._binary_obstacle = None  # as above; if not, binary fails once more
                if isinstance(exc, TargetMovedError):
                    self._services.locks.report_moved_server()
                await self._report(exc)
                if time.monotonic() - began > STEADY_SECONDS:
                    backoff = Backoff()
                    self._unreached_attempts = 0
                is_unreached = isinstance(exc, _UNREACHED)
                self._unreached_attempts = self._unreached_attempts + 1 if is_unreached else 0
                if exc.retry is Retry.TIMED:
                    failure = "cannot connect" if is_unreached else "the stream ended"
                    backoff.log(log, f'source "{self.source.label}": {failure}, retrying', exc)
                    await self._sleep(backoff.next_seconds())
                    continue
                if self.failure is None or str(self.failure) != str(exc):
                    log.error(
                        "source stopped",
                        source=self.source.label,
                        error=str(exc),
                        **exc.log_fields,
                    )
                self.failure = exc
                await self._sleep(MANUAL_RETRY_SECONDS if exc.retry is Retry.MANUAL else None)
            else:
                backoff = Backoff()
                self._unreached_attempts = 0

    async def _attempt(self) -> bool:
        """Stream once; return whether another attempt follows at once."""
        require_configured(self.source)
        await self._may_stream.wait()
        self.pipeline = pipeline = Pipeline(
            self.source,
            self._services,
            self.guard,
            self._binary_obstacle,
            self.stop_lsn,
            self._unapplied,
        )
        if self.failure is not None:  # the source shows its error until the source streams
            pipeline.health.state, pipeline.health.error = self.health.state, self.health.error
        self.health = pipeline.health
        if self.stop.is_set():
            return False
        try:
            await pipeline.run()
        except BaseExceptionGroup as group:
            raise _first_error(group) from group
        else:
            self.failure = None
            return pipeline.begins_anew
        finally:
            self._confirmed_at = pipeline.heartbeat.confirmed_at or self._confirmed_at
            self.pipeline = None
            self._attempt_ended.set()

    async def _report(self, error: StreamerError) -> None:
        self._services.metrics.count_error(error, self.source.database, self.source.sid)
        if isinstance(error, SourceConnectionError) and error.remedy is None:
            error.remedy = reach_hint(self.source.url.reveal())
        waits = error.retry is Retry.TIMED
        self.health.state = "waiting" if waits else "error"
        self.health.error = report = ErrorReport.of(error)
        with contextlib.suppress(StreamerError):
            records = await read_source_records(self._services.bookkeeping)
            record = find_source(records, self.source.database, self.source.sid)
            if record is not None:
                await report_source_failure(
                    self._services.bookkeeping,
                    record.source_id,
                    self.health.state,
                    report,
                    self._services.locks.holder,
                )
                await end_restarts(self._services.bookkeeping, record.source_id, report)

    async def _sleep(self, seconds: float | None) -> None:
        """Sleep until an operator's request, a stop, or the end of *seconds*."""
        if self.is_assigned:
            await self._wait([self._requested, self.stop], seconds)

    async def _wait(self, events: Sequence[asyncio.Event], seconds: float | None) -> None:
        """Wait until one of *events* is set, at most *seconds*."""
        name = f"waiting for {self.source.label}"
        waiting = [asyncio.create_task(event.wait(), name=name) for event in events]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the cause of a pipeline's end: a defect before an error before a cancellation."""
    leaves: list[BaseException] = []

    def collect(exc: BaseException) -> None:
        if isinstance(exc, BaseExceptionGroup):
            for inner in exc.exceptions:
                collect(inner)
        else:
            leaves.append(exc)

    collect(group)
    defects = [exc for exc in leaves if not isinstance(exc, StreamerError | asyncio.CancelledError)]
    errors = [exc for exc in leaves if isinstance(exc, StreamerError)]
    return [*defects, *errors, *leaves][0]
