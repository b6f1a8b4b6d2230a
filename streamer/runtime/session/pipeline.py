"""The path of a source's changes to the target: start reading here.

    reader        source/stream/replication_stream.py  frames in, in bursts
      → assembler decode/transactions.py               transactions, or pieces of large ones
      → dispatch  runtime/session/dispatcher.py        each lane gets its changes, in commit order
      → worker    apply/write/worker.py                windows, and target transactions
        or drainer drain/drainer.py                    the same for lanes that are held
      → events    runtime/tables/table_events.py       a lane reports what it has committed
      → tracker   control/progress_tracker.py          the durable LSN before the first gap
      → position  runtime/session/stored_position.py   stored in the target
      → feedback  source/stream/feedback.py            and then acknowledged to the source

A pipeline waits for the lock of its source, opens a session by `open_session`, and runs the tasks
that stream. The pipeline ends when the source is lost, after an error for an
operator, or on request. A clean stop ends the reader first, waits until dispatched changes are
durable, and then tells the source how far the target is.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from streamer.apply.lanes.lane import until_idle
from streamer.bookkeeping.source_lock import purging_process
from streamer.bookkeeping.sources import set_source_state
from streamer.errors.error_classes import (
    DefectError,
    SlotInUseError,
    SlotMissingError,
    SourceLimitError,
    StreamerError,
    UnpublishedError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.mapping.shared_targets import Clashes
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.services import Health, Services
from streamer.runtime.session.attempt import Attempt
from streamer.runtime.session.dispatcher import Dispatched, HistoryMismatch, ScriptsReached
from streamer.runtime.session.open_session import open_session
from streamer.runtime.session.operator_requests import Requests
from streamer.runtime.session.reload_mapping import change_rules
from streamer.runtime.session.session import Session
from streamer.runtime.session.source_checks import check_source
from streamer.runtime.session.write_status import report_status
from streamer.runtime.shutdown import endless, finishes_before
from streamer.runtime.start_limit import START_TURN
from streamer.runtime.tables.lag import Undelivered
from streamer.runtime.tables.table_events import TableEvents
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.source.catalog import flush_wal
from streamer.source.connection import connection
from streamer.source.server.timeline import check_same_server_by_query
from streamer.source.stream.large_rows import name_large_row
from streamer.target.fencing_token import FencingToken
from streamer.util.containment import END_SECONDS, ending
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn
from streamer.util.waiting import block_event_loop, wait_for_event

log = structlog.get_logger()

IDLE_SECONDS: Final = 5.0
"""How often the pipeline checks a position that does not move: for many sources, each check costs a
wake-up and a status update.
"""
STOPPING_SECONDS: Final = 1.0
"""`IDLE_SECONDS` for a pipeline that stops at a position."""
PAUSE_SECONDS_MAX: Final = 0.004
"""The longest pause between two reads of a stream with few messages."""
FAST_STREAM_RATE: Final = 20_000
FAST_STREAM_PAUSE_SECONDS: Final = 0.03
"""The pause of a stream with at least `FAST_STREAM_RATE` messages a second.

The walsender sends each message separately. While TCP's window is closed, the kernel joins messages
to large segments, and each message costs the walsender less. Larger bursts make fewer and larger
target transactions, too, and each transaction has a fixed cost.
"""
PAUSE_FACTOR: Final = 9
"""After a burst, reading pauses for this multiple of the processor time since the last burst. So a
light load takes at most a tenth of a core, and the reader receives a transaction after a silence at
once.
"""
DRAIN_SECONDS: Final = 7.0
CLOSE_SECONDS: Final = 2 * END_SECONDS
LOCK_RETRY_SECONDS: Final = 1.0


class Pipeline:
    """Streams one source, for one attempt; `run` returns when asked to stop."""

    def __init__(
        self,
        source: SourceMapping,
        services: Services,
        guard: BacklogGuard,
        binary_obstacle: str | None = None,
        stop_lsn: Lsn | None = None,
        unapplied: list[SourceMapping] | None = None,
    ) -> None:
        """*stop_lsn*: stop once all changes up to this LSN are durable and every table is ready.

        *unapplied*: see `Attempt`.
        """
        self.health = Health()
        self.heartbeat = Heartbeat(source, services)
        self.stop = asyncio.Event()
        self.begins_anew = False
        """Whether another attempt follows at once."""
        self.requested = asyncio.Event()
        self._source = source
        self._services = services
        self._guard = guard
        self._binary_obstacle = binary_obstacle
        self._stop_lsn = stop_lsn
        self._unapplied = [] if unapplied is None else unapplied
        self._stored = asyncio.Event()
        self._failure: StreamerError | None = None
        self._has_failed = asyncio.Event()
        self._session: Session | None = None
        """The open session while the source streams."""
        self._ended = asyncio.Event()
        """Set when the session closes."""

    async def run(self) -> None:
        """Stream until `stop` is set. Raises StreamerError for an error that ends this attempt."""
        if (fence := await self._wait_for_lock()) is None:
            return
        try:
            # From here on every connection to the target must reach the server that holds the lock.
            services = self._services.under(fence)
            with services.pace.source():  # also while it starts: the checks of others cost less
                session = await finishes_before(self.stop, self._open(services, fence))
                if session is not None:
                    try:
                        await self._stream(session)
                    finally:
                        await self._close(session)
            await set_source_state(services.bookkeeping, fence.source_id, "stopped")
        finally:
            await self._services.locks.release(fence)

    def begin_anew(self) -> None:
        """End this attempt cleanly; another attempt follows at once."""
        self.begins_anew = True
        self.stop.set()

    async def _open(self, services: Services, fence: FencingToken) -> Session:
        """Open a session when this source's turn to start has come."""
        tables = TableEvents(self._source, fence, services, self.health, self.heartbeat, self._fail)
        self.health.waiting_for = START_TURN
        async with services.starts.permit() as release:
            self.health.waiting_for = None
            attempt = Attempt(
                self._source,
                services,
                fence,
                self._guard,
                self.health,
                self.heartbeat,
                self._binary_obstacle,
                self._stop_lsn,
                self._unapplied,
                release,
            )
            return await open_session(attempt, tables)

    async def _wait_for_lock(self) -> FencingToken | None:
        """Acquire the source's lock; return None if asked to stop before."""
        is_logged = False
        while not self.stop.is_set():
            holder = await self._services.locks.acquire(self._source)
            self.health.holder = None if isinstance(holder, FencingToken) else holder
            if isinstance(holder, FencingToken):
                return holder
            waits = ErrorReport(_held_by(holder), SlotInUseError.code)
            self.health.state, self.health.error = "waiting", waits
            if not is_logged:
                is_logged = True
                log.warning(
                    "another process runs this source", source=self._source.label, holder=holder
                )
            await wait_for_event(self.stop, LOCK_RETRY_SECONDS)
        return None

    # ---- running -------------------------------------------------------------------------------

    async def _stream(self, session: Session) -> None:
        """Run the tasks of *session* until `stop` is set, or a task fails.

        The stream is open, and the source ends a silent stream. So no slow step may come before the
        tasks.
        """
        source, bookkeeping = self._source, session.services.bookkeeping
        session.begin_copies(session.relations, is_start=True)
        await session.use_snapshot()
        self.health.state, self.health.error = "streaming", None
        self._session = session
        self.requested.set()  # requests may be older than this session
        session.position.store_soon()
        log.info(
            "streaming",
            source=source.label,
            lsn=str(session.position.stored_lsn),
            transport="binary" if session.registrar.transport.is_binary else "text",
            reads="slot" if session.reads_slot else "journal",
        )
        with contextlib.ExitStack() as end:
            async with asyncio.TaskGroup() as group:
                running = {
                    name: group.create_task(endless(run, name), name=f"{name} {source.label}")
                    for name, run in self._tasks(session).items()
                }
                try:
                    await set_source_state(bookkeeping, session.record.source_id, "streaming")
                    await self.stop.wait()
                    running["reader"].cancel()
                    await asyncio.wait([running["reader"]])
                    await self._stop_in_order(session, running["feedback"])
                finally:
                    end.enter_context(ending(f"streaming {source.label}", running.values()))
                for task in running.values():
                    task.cancel()

    def _tasks(self, session: Session) -> dict[str, Callable[[], Awaitable[None]]]:
        services, timeline_monitor = session.services, session.timeline_monitor
        requests = Requests(
            services.bookkeeping,
            session.record,
            session.relations,
            session.coordinator,
            session.monitor.cases.publish,
            self.begin_anew,
        )
        return {
            "reader": lambda: self._read(session),
            "progress": lambda: self._follow_progress(session),
            "feedback": lambda: self._give_feedback(session),
            "sync": session.coordinator.run,
            "requests": lambda: requests.follow(self.requested),
            "status": lambda: report_status(session, self.heartbeat),
            "failure": self._await_failure,
            "lock": lambda: services.locks.guard(session.fence),
            "watch": lambda: self._guard_source(session),
            "source checks": lambda: check_source(session, self.heartbeat, self._guard),
            **({} if timeline_monitor is None else {"timeline": timeline_monitor.run}),
        }

    async def _stop_in_order(self, session: Session, feedback: "asyncio.Task[None]") -> None:
        """Wait until dispatched changes are durable, and tell the source."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                for lane in session.relations.lanes():
                    await until_idle(lane)
                feedback.cancel()
                await asyncio.wait([feedback])
                session.position.is_requested = True
                await _store_progress(session)
                await session.stream.stop(session.feedback.durable_lsn)

    async def _close(self, session: Session) -> None:
        """Close *session*. Raises DefectError if that takes too long.

        Tasks that still run can do no harm, because they no longer hold the lock of the source.
        """
        self._session = None
        self._ended.set()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                # This step comes first: during an outage of the target, the next steps take long.
                await session.stream.close()
                if session.timeline_monitor is not None:
                    await session.timeline_monitor.close()
                await session.coordinator.close()
                await session.tables.close()
        except TimeoutError:
            log.error("closing an attempt takes too long", source=self._source.label)
            raise DefectError("the former attempt did not end in time") from None
        finally:
            session.dispatcher.reset()

    def source_failed(self, error: StreamerError) -> None:
        """End this attempt: no lane can continue before the next attempt."""
        if self._session is None:
            self._fail(error)
        else:
            self._session.tables.source_failed(error)

    def _fail(self, error: StreamerError) -> None:
        self._failure = self._failure or error
        self._has_failed.set()

    async def _await_failure(self) -> None:
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    # ---- reading and dispatching ---------------------------------------------------------------

    async def _read(self, session: Session) -> None:
        stream, dispatcher, tables = session.stream, session.dispatcher, session.tables
        budget = session.services.budget
        used, paused_at, is_first = time.thread_time(), time.monotonic(), True
        while True:
            try:
                burst = stream.read()
            except SourceLimitError as exc:
                mappings = [mapped.mapping for mapped in tables.relations]
                raise await name_large_row(self._source, mappings, exc) from exc
            except SlotMissingError as exc:
                await session.monitor.cases.publish(())  # names the lost publications
                raise session.slot_check.undecodable(exc) from exc
            except UnpublishedError as exc:
                raise session.slot_check.undecodable(exc) from exc
            count = len(burst.payloads)
            if session.timeline_monitor is not None and (count or burst.wal_end_lsn is not None):
                await (
                    session.timeline_monitor.check()
                )  # before streamer uses a position past a fork
            try:
                await self._dispatch(session, burst.payloads)
                # frees the burst while libpq receives the next large message
                burst.payloads.clear()
                failpoint("reader.dispatched")
                if dispatcher.has_passed_stop:
                    tables.advanced.set()
                    break
                if burst.wal_end_lsn is not None:
                    self._handle_keepalive(session, burst.wal_end_lsn)
            except HistoryMismatch:
                raise session.slot_check.history_mismatch() from None
            if session.feedback.answer(burst):
                # The source may be shutting down, and waits until the target contains all changes.
                session.position.store_soon()
                tables.advanced.set()
            if not budget.has_room(tables):
                await budget.wait_for_room(tables)
            elif burst.has_more:
                await asyncio.sleep(0)
            elif count and not (
                session.position.is_awaited
                # the remaining rows come at once
                or (is_first and not dispatcher.is_between_transactions)
            ):
                before, used = used, time.thread_time()
                rate = count / (time.monotonic() - paused_at)
                paused_at = time.monotonic()
                seconds = PAUSE_FACTOR * (used - before)
                if seconds < PAUSE_SECONDS_MAX:
                    await block_event_loop(seconds)
                else:
                    is_fast = rate >= FAST_STREAM_RATE
                    await asyncio.sleep(FAST_STREAM_PAUSE_SECONDS if is_fast else PAUSE_SECONDS_MAX)
            else:
                is_first = not count
                await stream.wait_readable()
        await asyncio.Event().wait()  # until cancelled

    async def _dispatch(self, session: Session, payloads: list[bytes]) -> None:
        """Pass each lane its parts of the transactions that *payloads* complete."""
        for dispatched in session.dispatcher.feed(payloads):
            if isinstance(dispatched, ScriptsReached):
                await session.scripts.run(dispatched)
                continue
            for lane, part in dispatched.parts.items():
                lane.dispatch(part)
            if dispatched.end_lsn is None:
                await asyncio.sleep(0)
            elif dispatched.is_new:
                self._record_commit(session, dispatched, dispatched.end_lsn)
                if not dispatched.parts:
                    session.position.moved()

    def _record_commit(self, session: Session, dispatched: Dispatched, end_lsn: Lsn) -> None:
        session.lag.received(dispatched.commit_time)
        self.heartbeat.check_arrival(session.tracker)
        if end_lsn > self.health.wal_end_lsn:
            self.health.wal_end_lsn = end_lsn

    def _handle_keepalive(self, session: Session, wal_end_lsn: Lsn) -> None:
        self.health.wal_end_lsn = max(self.health.wal_end_lsn, wal_end_lsn)
        if not session.dispatcher.keepalive(wal_end_lsn):
            return
        self.heartbeat.check_arrival(session.tracker)
        session.position.moved()

    # ---- acknowledging -------------------------------------------------------------------------

    async def _follow_progress(self, session: Session) -> None:
        """Store every durable advance, however long the target takes to store the position."""
        advanced, dispatcher = session.tables.advanced, session.dispatcher
        while True:
            await wait_for_event(
                advanced, IDLE_SECONDS if dispatcher.stop_lsn is None else STOPPING_SECONDS
            )
            advanced.clear()
            await _store_progress(session)
            self._stored.set()
            await session.position.pause()

    async def _give_feedback(self, session: Session) -> None:
        """Acknowledge stored positions, often enough to keep the source's connection alive."""

        def sent() -> None:
            failpoint("acknowledge.after_send")
            self._check_reached_stop(session)

        self._guard.journaling.flushed = self._stored
        await session.feedback.run(self._stored, sent)

    def _check_reached_stop(self, session: Session) -> None:
        if session.dispatcher.stop_lsn is None:
            return
        session.position.is_requested = True
        has_reached = session.dispatcher.has_reached_stop(session.position.stored_lsn)
        if has_reached and session.relations.are_ready:
            self.stop.set()

    async def _guard_source(self, session: Session) -> None:
        if session.dispatcher.stop_lsn == LSN_MAX:
            async with connection(self._source) as plain:
                await check_same_server_by_query(plain, session.server)
                session.dispatcher.stop_lsn = await flush_wal(plain)
        await session.monitor.run(lambda: self._check_reached_stop(session))

    # ---- for the supervisor --------------------------------------------------------------------

    async def change(self, source: SourceMapping, clashes: Clashes) -> bool:
        """Apply changed rules except to *clashes*; return False if the rules need a new attempt.

        Raises StreamerError, in which case no rule has changed. The change ends with the session,
        so that no lane of an ended attempt delays a later reload.
        """
        if self._session is None:
            return False
        change = change_rules(self._session, source, clashes)
        return bool(await finishes_before(self._ended, change))

    def store_position(self, *, of_tables: bool) -> None:
        """Store the durable position, and the next positions as soon as they move."""
        if (session := self._session) is None:
            return
        if of_tables:
            session.relations.positions_requested.set()
        session.position.store_soon()
        session.tables.advanced.set()

    @property
    def session(self) -> Session | None:
        """The open session; None unless the source streams."""
        return self._session

    @property
    def is_streaming(self) -> bool:
        return self._session is not None

    @property
    def is_copying(self) -> bool:
        return self._session is not None and self._session.coordinator.is_copying

    @property
    def stored_lsn(self) -> Lsn:
        """The stored LSN up to which all changes are durable in the target."""
        return INVALID_LSN if self._session is None else self._session.position.stored_lsn

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last message of the source; 0 while reading is paused."""
        session = self._session
        if session is None or not session.services.budget.has_room(session.tables):
            return 0.0
        return time.monotonic() - session.stream.last_message_at

    @property
    def lag_bytes(self) -> int:
        if self._session is None:
            return 0
        return max(0, self.health.wal_end_lsn - self._session.tracker.flush_lsn)

    def lag_seconds(self) -> float:
        return 0.0 if self._session is None else self._session.lag.seconds(time.monotonic())

    @property
    def undelivered(self) -> Undelivered:
        """The WAL that the source has not sent."""
        session = self._session
        if session is None:
            return Undelivered(0, 0.0, is_full=False)
        since = session.lag.undelivered_since
        return Undelivered(
            max(0, self.health.wal_end_lsn - session.tracker.newest_lsn),
            0.0 if since is None else max(0.0, time.monotonic() - since),
            is_full=not session.services.budget.has_room(session.tables),
        )

    def table_figures(self, name: RelationName) -> tuple[float, int] | None:
        """Return `Relations.figures` of a table; None before the stream begins."""
        return None if self._session is None else self._session.relations.figures(name)

    def table_lags(self) -> dict[str, float]:
        return {} if self._session is None else self._session.relations.lags()


async def _store_progress(session: Session) -> None:
    # A journal can be deleted as soon as the target contains all of its changes.
    if session.tables.has_progress or not session.reads_slot:
        session.tables.has_progress = False
        session.position.is_requested = True
    await session.position.store(session.lag.visible_at)


def _held_by(holder: str) -> str:
    """Return the reason why this process waits: *holder*, host and pid of a process, has the lock
    of the source.
    """
    if (purging := purging_process(holder)) is not None:
        return f"a purge by process {purging} deletes rows of this source; this process waits"
    host, _, pid = holder.rpartition(":")
    if not pid.isdecimal():
        return f"process {holder} runs this source; this process waits to take over"
    return (
        f"process {pid} on {host} runs this source, and this process waits to take over; "
        f"to end process {pid}, run on {host}: kill {pid}"
    )
