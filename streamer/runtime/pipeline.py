"""One source's way to the target: start reading here.

    reader        source/stream.py        frames in, in bursts
      → assembler decode/transactions.py  transactions, or pieces of large ones
      → dispatch  runtime/dispatch.py     each lane gets its share, in commit order
      → worker    apply/worker.py         shares to windows, windows to target transactions
        or drainer apply/drainer.py       the same for lanes that are held
      → tracker   progress/tracker.py     what is durable before the first gap
      → feedback  here                    stored in the target, then acknowledged to the source

A pipeline begins by making sure that source, slot and target belong together, and runs until its
source is lost, an error needs a person, or it is asked to stop.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Final

import structlog

from streamer.apply.counting import count_shares
from streamer.apply.lane import Hold, Lane, MappedRelation
from streamer.apply.lane_transaction import LaneTransaction
from streamer.apply.spool import StreamedSpool
from streamer.backoff import Backoff
from streamer.decode.transactions import TransactionAssembler
from streamer.errors import SourceLimitError, StreamerError, TargetError
from streamer.failpoints import failpoint
from streamer.lsn import EVERYTHING, NOTHING, Lsn
from streamer.mapping.rules import Initial, RelationMapping, RelationName, SourceMapping
from streamer.progress.lock import SourceLock
from streamer.progress.relations import (
    forget_relation,
    register_relation,
    set_streaming_state,
    set_waiting,
)
from streamer.progress.requests import take_requests
from streamer.progress.schema import read_installation
from streamer.progress.sources import read_source_record, set_source_state
from streamer.progress.tracker import ProgressTracker
from streamer.runtime.acknowledgement import Acknowledgement
from streamer.runtime.dispatch import AnotherHistory, Dispatched, Dispatcher
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.lag import Lag
from streamer.runtime.published import Publishing
from streamer.runtime.relations import Relations, forget_unmapped, relation_source, resolve_at
from streamer.runtime.requests import Requests
from streamer.runtime.services import Health, Services
from streamer.runtime.shutdown import endless, finishes_before
from streamer.runtime.slot_check import SlotCheck
from streamer.runtime.source_guard import SourceWatch
from streamer.runtime.source_survey import look
from streamer.runtime.status_report import report_status
from streamer.runtime.transport import TEXT, choose_transport
from streamer.runtime.wal_retention.guard import BacklogGuard
from streamer.source.catalog import (
    SourceRelation,
    SourceServer,
    check_ready,
    flush_wal,
    read_server,
)
from streamer.source.connection import Connection, connection
from streamer.source.encoding import read_conversion
from streamer.source.feedback import Feedback
from streamer.source.history import HistoryCheck
from streamer.source.large_rows import name_large_row
from streamer.source.ownership import mark_publications
from streamer.source.slot import ExportedSnapshot
from streamer.source.stream import ReplicationStream
from streamer.source.timeline import check_same_server_plainly, read_history
from streamer.source.waits import set_lock_timeout, watched
from streamer.sync.context import CopyContext
from streamer.sync.coordinator import SyncCoordinator
from streamer.sync.states import State
from streamer.target.claim import Claim

if TYPE_CHECKING:
    from streamer.decode.text_conversion import TextConversion
    from streamer.progress.sources import SourceRecord
    from streamer.source.stream import ChangeStream

log = structlog.get_logger()

PIECE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A transaction larger than this goes through its lanes' spools."""
QUIET_SECONDS: Final = 1.0
"""How often a position that moves without changes for us is stored.

Storing it writes WAL: where source and target are one server, that moves the position again.
"""
GATHER_SECONDS: Final = 0.001
"""Under load, reading pauses this long: many messages per wake-up cost less than many wake-ups."""
IS_JOURNAL: Final = "changes come by a journal, which is in text"
DRAIN_SECONDS: Final = 7.0


class Pipeline:
    """Streams one source. Made anew for every attempt; `run` returns when asked to stop."""

    def __init__(
        self,
        source: SourceMapping,
        services: Services,
        lock: SourceLock,
        guard: BacklogGuard,
        binary_obstacle: str | None = None,
    ) -> None:
        self.source = source
        self._guard = guard
        self.health = Health()
        self.stop = asyncio.Event()
        self.requested = asyncio.Event()
        self.stop_lsn: Lsn | None = None
        """Stop by oneself once everything up to here is durable and every table is ready."""
        self._services = services
        self._record: SourceRecord
        self._server: SourceServer
        self._tracker = ProgressTracker(NOTHING)
        self.heartbeat = Heartbeat(source, services)
        self._relations = Relations(source.label, services, self, self.health)
        self._dispatcher: Dispatcher
        self._coordinator: SyncCoordinator
        self._stream: ChangeStream
        self.acknowledgement: Acknowledgement
        self._lock = lock
        self._lag = Lag(self._tracker)
        self._advanced = asyncio.Event()
        self._stored = asyncio.Event()
        self._binary_obstacle = binary_obstacle
        self._binary_types = TEXT
        self._conversion: TextConversion | None = None
        self._failure: StreamerError | None = None
        self._has_failed = asyncio.Event()
        self._snapshot: ExportedSnapshot | None = None
        """Of a slot that this attempt made."""
        self.is_streaming = False

    # ---- starting ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stream until `stop` is set. Raises StreamerError for what ends this attempt."""
        try:
            if not await self._wait_for_lock():
                return
            if not await finishes_before(self.stop, self._start()):
                await set_source_state(self._services.bookkeeping, self.claim.source_id, "stopped")
                return
            try:
                await self._run_tasks()
            finally:
                await self._close()
            await set_source_state(self._services.bookkeeping, self.claim.source_id, "stopped")
        finally:
            await self._lock.release()

    async def _wait_for_lock(self) -> bool:
        """Take the source's lock; return False if asked to stop before."""
        was_told = False
        while not self.stop.is_set():
            self.health.holder = holder = await self._lock.try_acquire()
            if holder is None:
                # From here on every connection to the target has to reach the server of the lock.
                self._services = self._services.under(self.claim)
                return True
            self.health.state, self.health.error = "waiting", _held_by(holder)
            if not was_told:
                was_told = True
                log.warning(
                    "another process runs this source", source=self.source.label, holder=holder
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stop.wait()
        return False

    async def _start(self) -> None:
        """Make sure that source, slot and target belong together; start the stream."""
        bookkeeping, source = self._services.bookkeeping, self.source
        self._record = await read_source_record(bookkeeping, self.claim.source_id)
        await set_source_state(bookkeeping, self._record.source_id, "starting")
        await take_requests(bookkeeping, self._record.source_id)
        async with connection(source, replication=True) as replication:
            self._server = server = await read_server(replication)
            history = await read_history(replication, server, self._record.timeline)
        check_ready(server, source)
        async with connection(source) as plain:
            await check_same_server_plainly(plain, server)
            await set_lock_timeout(plain)
            start_lsn, snapshot = await watched(
                source, plain, self._settle(plain, server, history), self._report_wait
            )
        await set_source_state(bookkeeping, self._record.source_id, "starting")
        try:
            self._record = await read_source_record(bookkeeping, self.claim.source_id)
            self._tracker = ProgressTracker(start_lsn)
            self._lag = Lag(self._tracker)
            history_check = HistoryCheck(
                self._record.last_transaction, start_lsn, with_origins=source.forward_origins
            )
            assembler = TransactionAssembler(
                lambda relation: self._relations.find(relation) is not None,
                lambda xid: StreamedSpool(self._services.spools),
                piece_bytes_max=PIECE_BYTES_MAX,
                forward_origins=source.forward_origins,
            )
            assembler.conversion = self._conversion
            self._dispatcher = Dispatcher(
                assembler,
                self._relations,
                self._tracker,
                history_check,
                replaced=self._watch.replaced,
                with_origins=source.forward_origins,
                stop_lsn=self.stop_lsn,
            )
            self.acknowledgement = Acknowledgement(
                self._lock, self._record, self._tracker, history_check, self.heartbeat
            )
            self._stream = await self._slot_check.open_stream(
                start_lsn, binary=self._binary_types != TEXT
            )
        except BaseException:
            if snapshot is not None:
                await snapshot.close()
            raise
        self._snapshot = snapshot

    async def _report_wait(self, awaited: str) -> None:
        """Store the sessions of the source for which the start waits."""
        reason = f"the start waits for {awaited}"
        await set_source_state(
            self._services.bookkeeping, self._record.source_id, "starting", reason
        )

    async def _settle(
        self, plain: Connection, server: SourceServer, history: str
    ) -> tuple[Lsn, ExportedSnapshot | None]:
        """Tie source and target together; return where to start, and the snapshot of a new slot."""
        bookkeeping, source = self._services.bookkeeping, self.source
        installation = await read_installation(bookkeeping)
        await self._guard.owner.claim(
            plain,
            source,
            installation,
            is_known=self._record.acknowledged_lsn != NOTHING,
            is_taken_over=source.label in self._services.take_over,
        )
        self._services.take_over.discard(source.label)
        acknowledged_lsn = self._record.acknowledged_lsn
        journal = await self._guard.journaling.settle(plain, server, acknowledged_lsn)
        mappings, relations = await resolve_at(plain, source, self._services.target_namespace)
        await forget_unmapped(bookkeeping, self._record.source_id, mappings)
        self._binary_types = await choose_transport(
            source,
            server,
            self._services.address,
            mappings,
            relations,
            known_obstacle=self._binary_obstacle if journal is None else IS_JOURNAL,
        )
        is_text = self._binary_types == TEXT
        self._conversion = await read_conversion(plain) if is_text else None
        self._publishing = Publishing(source, server, bookkeeping, self._relations)
        self._watch = SourceWatch(
            source, server, bookkeeping, self._relations, self._publishing, self.health
        )
        self._relations.set_groups(await self._relations.read_groups(mappings))
        await self._register(mappings, relations)
        self._slot_check = SlotCheck(
            source,
            server,
            bookkeeping,
            self._record,
            self._relations,
            self._guard,
            journal,
            history,
        )
        await self._slot_check.check()
        await self._watch.begin(plain)
        await mark_publications(plain, source, installation)
        return await self._slot_check.open_slot(plain)

    async def _register(
        self, mappings: list[RelationMapping], relations: dict[RelationName, SourceRelation]
    ) -> list[MappedRelation]:
        """Make the records, lanes and states of relations; return these."""
        bookkeeping, source = self._services.bookkeeping, self.source
        added = []
        for mapping in mappings:
            relation = relations.get(mapping.source)
            record = await register_relation(
                bookkeeping, self._record.source_id, mapping, may_resume=not self.is_streaming
            )
            facts = relation_source(
                source, relation, self._binary_types, self.claim, self._conversion
            )
            mapped = MappedRelation(
                record.relation_id,
                mapping,
                record.end_lsn,
                facts,
                is_to_declare=mapping.rule.initial is Initial.NONE and not record.declared,
                resync=record.resync,
            )
            self._relations.add(mapped, record)
            added.append(mapped)
            self._publishing.know(record)
        return added

    # ---- running -------------------------------------------------------------------------------

    async def _run_tasks(self) -> None:
        services = self._services
        self._coordinator = SyncCoordinator(
            CopyContext(
                self.source,
                self._record.source_id,
                self._server,
                services.address,
                services.bookkeeping,
                services.launcher,
                services.sync,
                self,
                services.metrics,
            )
        )
        self._watch.follow(self._coordinator, lambda: self._tracker.newest_lsn)
        requests = Requests(
            services.bookkeeping,
            self._record,
            self._relations,
            self._coordinator,
            self._tracker,
            self._watch.publish,
        )
        # A former process may have died while it waited.
        await set_waiting(services.bookkeeping, [m.relation_id for m in self._relations], None)
        self._begin_copies(self._relations)
        if self._snapshot is not None:
            if self._coordinator.is_copying:
                self._coordinator.use_snapshot(self._snapshot)
            else:  # open, it would keep the source from removing dead rows
                await self._snapshot.close()
        self.health.state, self.health.error = "streaming", None
        await set_source_state(services.bookkeeping, self._record.source_id, "streaming")
        self.is_streaming = True
        self.requested.set()  # what was asked for while nobody ran
        log.info(
            "streaming",
            source=self.source.label,
            lsn=str(self.acknowledgement.stored_lsn),
            transport="text" if self._binary_types == TEXT else "binary",
            reads="slot" if isinstance(self._stream, ReplicationStream) else "journal",
        )
        tasks: dict[str, Callable[[], Awaitable[None]]] = {
            "reader": self._read,
            "progress": self._follow_progress,
            "feedback": self._give_feedback,
            "sync": self._coordinator.run,
            "requests": lambda: requests.follow(self.requested),
            "status": lambda: report_status(
                services, self._record, self._relations, self._tracker, self.heartbeat
            ),
            "failure": self._await_failure,
            "lock": self._lock.guard,
            "watch": self._guard_source,
            "looking": lambda: look(
                self.source,
                self._server,
                self._record,
                services.bookkeeping,
                self._relations,
                self.heartbeat,
                self._tracker,
                self._guard,
            ),
        }
        async with asyncio.TaskGroup() as group:
            running = {
                name: group.create_task(endless(run, name), name=f"{name} {self.source.label}")
                for name, run in tasks.items()
            }
            await self.stop.wait()
            running["reader"].cancel()
            await asyncio.wait([running["reader"]])
            await self._stop_in_order(running["feedback"])
            for task in running.values():
                task.cancel()

    async def _stop_in_order(self, feedback: "asyncio.Task[None]") -> None:
        """Let what was dispatched become durable, and tell the source of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while any(lane.queued_count for lane in self._relations.lanes()):
                    await asyncio.sleep(0.02)
                feedback.cancel()
                await asyncio.wait([feedback])
                self.acknowledgement.is_wanted = True
                await self._store_progress()
                await self._stream.stop(self.acknowledgement.stored_lsn)

    async def _close(self) -> None:
        self.is_streaming = False
        await self._stream.close()  # first: while the target is away the rest takes long
        lanes = self._relations.lanes()
        for lane in lanes:
            lane.is_ending = True  # a worker that fails now must not hand it to a drainer
        for worker in self._services.workers:
            await worker.drop(lanes)
        await self._services.drainer.forget(lanes)
        for lane in lanes:
            lane.close()
        self._dispatcher.reset()

    # ---- reading and dispatching ---------------------------------------------------------------

    async def _read(self) -> None:
        stream, budget = self._stream, self._services.budget
        while True:
            try:
                burst = stream.read()
            except SourceLimitError as exc:
                mappings = [mapped.mapping for mapped in self._relations]
                raise await name_large_row(self.source, mappings, exc) from exc
            has_payloads = bool(burst.payloads)
            await self._dispatch(burst.payloads)
            burst.payloads.clear()  # while libpq delivers the next large message, none is kept
            failpoint("reader.dispatched")
            if self._dispatcher.has_passed_stop:
                self._advanced.set()
                break
            if burst.wal_end_lsn is not None:
                self._take_keepalive(burst.wal_end_lsn, burst.source_time)
                if burst.reply_requested:
                    self._send_status()
                    # Perhaps the server ends, as soon as we have it all.
                    self.acknowledgement.is_wanted = True
                    self._advanced.set()
            if not budget.has_room(self):
                await budget.wait_for_room(self)
            elif has_payloads:
                await asyncio.sleep(GATHER_SECONDS)
            else:
                await stream.wait_readable()
        await asyncio.Event().wait()  # until cancelled

    async def _dispatch(self, payloads: list[bytes]) -> None:
        """Give each lane its parts of the transactions that *payloads* complete."""
        try:
            for dispatched in self._dispatcher.feed(payloads):
                for lane, part in dispatched.parts.items():
                    lane.dispatch(part)
                if dispatched.end_lsn is None:
                    await asyncio.sleep(0)
                elif dispatched.is_new:
                    self._note_commit(dispatched, dispatched.end_lsn)
        except AnotherHistory:
            raise self._slot_check.another_history() from None

    def _note_commit(self, dispatched: Dispatched, end_lsn: Lsn) -> None:
        self._lag.received(dispatched.transaction.commit_time)
        if not dispatched.parts:
            self.heartbeat.look(self._tracker)
        if end_lsn > self.health.wal_end_lsn:
            self.health.wal_end_lsn = end_lsn

    def _take_keepalive(self, wal_end_lsn: Lsn, source_time: int) -> None:
        self.health.wal_end_lsn = max(self.health.wal_end_lsn, wal_end_lsn)
        try:
            if not self._dispatcher.keepalive(wal_end_lsn):
                return
        except AnotherHistory:
            raise self._slot_check.another_history() from None
        self.heartbeat.look(self._tracker)
        self._lag.received(source_time)
        is_due = time.monotonic() - self.acknowledgement.tried_at >= QUIET_SECONDS
        if is_due or self.acknowledgement.is_wanted:
            self._advanced.set()

    # ---- acknowledging -------------------------------------------------------------------------

    async def _follow_progress(self) -> None:
        """Store every durable advance, however long the target takes for it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._advanced.wait()
            self._advanced.clear()
            await self._store_progress()
            self._stored.set()

    async def _give_feedback(self) -> None:
        """Acknowledge what is stored, and often enough to show the source that we live."""
        feedback = Feedback.of(self.source.label, self._server.wal_sender_timeout_seconds)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(feedback.interval):
                    await self._stored.wait()
            self._stored.clear()
            has_room = self._services.budget.has_room(self)
            self._send_status(
                request_reply=feedback.should_request_reply(
                    self._stream.last_message_at, reader_is_running=has_room
                )
            )
            failpoint("acknowledge.after_send")
            self._check_reached_stop()

    def _send_status(self, *, request_reply: bool = False) -> None:
        self._stream.send_status(
            self.acknowledgement.stored_lsn, self._tracker.flush_lsn, request_reply=request_reply
        )

    async def _store_progress(self) -> None:
        if not isinstance(self._stream, ReplicationStream):  # the journal may go when it is done
            self.acknowledgement.is_wanted = True
        await self.acknowledgement.store(self._lag.visible_time)

    def store_position(self, *, of_tables: bool) -> None:
        """Store the position that is durable, and the next one at once if it moves."""
        if of_tables:
            self._relations.positions_wanted.set()
        if self.is_streaming:
            self.acknowledgement.is_wanted = True
            self._advanced.set()

    def _check_reached_stop(self) -> None:
        if self._dispatcher.stop_lsn is None:
            return
        self.acknowledgement.is_wanted = True
        has_reached = self._dispatcher.has_reached_stop(self.acknowledgement.stored_lsn)
        if has_reached and self._relations.are_ready:
            self.stop.set()

    @property
    def stored_lsn(self) -> Lsn:
        """Everything up to here is durable in the target, and stored there as such."""
        return self.acknowledgement.stored_lsn if self.is_streaming else NOTHING

    @property
    def silent_seconds(self) -> float:
        """Seconds since the source last sent anything; 0 while we do not listen."""
        if not self.is_streaming or not self._services.budget.has_room(self):
            return 0.0
        return time.monotonic() - self._stream.last_message_at

    @property
    def is_copying(self) -> bool:
        return self._coordinator.is_copying

    @property
    def lag_bytes(self) -> int:
        return max(0, self.health.wal_end_lsn - self._tracker.flush_lsn)

    def lag_seconds(self, now: datetime) -> float:
        return self._lag.seconds(now, self.lag_bytes)

    def table_lags(self, now: datetime) -> dict[str, float]:
        return self._relations.lags(now)

    async def _guard_source(self) -> None:
        if self._dispatcher.stop_lsn == EVERYTHING:
            async with connection(self.source) as plain:
                await check_same_server_plainly(plain, self._server)
                self._dispatcher.stop_lsn = await flush_wal(plain)
        await self._watch.run(self._check_reached_stop)

    # ---- lanes (LaneOwner) ---------------------------------------------------------------------

    @property
    def claim(self) -> Claim:
        return self._lock.claim

    @property
    def has_other_lanes(self) -> bool:
        return len(self._relations.lanes()) > 1

    def lane_held(self, lane: Lane) -> None:
        self._services.drainer.held(lane)

    def lane_live(self, lane: Lane) -> None:
        self._relations.go_home(lane)

    def lane_durable(self, lane: Lane, shares: list[LaneTransaction]) -> None:
        last = shares[-1]
        assert last.end_lsn is not None
        self._tracker.durable(lane.pending, last.end_lsn, last.transaction.commit_time)
        self.heartbeat.look(self._tracker)
        count_shares(self._services.metrics, self.source, shares)
        self._advanced.set()

    async def lane_failed(self, lane: Lane, error: StreamerError) -> None:
        for mapped in self._relations_of(lane, error):
            if self._relations.state(mapped) is not State.ERROR:
                log.error(
                    "table stopped",
                    source=self.source.label,
                    table=str(mapped.mapping.source),
                    error=str(error),
                    **error.log_fields,
                    **({} if error.lsn is None else {"lsn": error.lsn}),
                )
            await self._store_streaming_state(mapped, State.ERROR, error)

    async def lane_waits(self, lane: Lane, reason: str | None) -> None:
        waited = None if reason is None else f"the target to take changes again: {reason}"
        relations = [mapped.relation_id for mapped in self._relations.in_lane(lane)]
        with contextlib.suppress(TargetError):  # a full disk may refuse this, too
            await set_waiting(self._services.bookkeeping, relations, waited)

    async def lane_recovered(self, lane: Lane) -> None:
        for mapped in self._relations_of(lane):
            if self._relations.state(mapped) is State.ERROR:
                log.info(
                    "table recovered", source=self.source.label, table=str(mapped.mapping.source)
                )
                await self._store_streaming_state(mapped, State.CATCHING_UP)

    async def lane_drained(self, lane: Lane) -> None:
        for mapped in self._relations_of(lane):
            if self._relations.state(mapped) in (State.CATCHING_UP, State.ERROR):
                await self._store_streaming_state(mapped, State.READY)
                failpoint("sync.drained")
        self._relations.may_go_home(lane)
        self._advanced.set()

    def lane_of(self, mapped: MappedRelation) -> Lane | None:
        return self._relations.lane_now(mapped)

    def quarantine_changed(self, mapped: MappedRelation) -> None:
        self._relations.quarantine_changed(mapped)

    def source_failed(self, error: StreamerError) -> None:
        for lane in self._relations.lanes():
            lane.is_ending = True  # what it gets or gives back from now on comes again
        self._failure = self._failure or error
        self._has_failed.set()

    async def _await_failure(self) -> None:
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    def _relations_of(self, lane: Lane, error: StreamerError | None = None) -> list[MappedRelation]:
        if error is not None and isinstance(error.subject, MappedRelation):
            is_there = self._relations.get(error.subject.relation_id) is error.subject
            return [error.subject] if is_there else []
        return self._relations.in_lane(lane)

    async def _store_streaming_state(
        self, mapped: MappedRelation, state: State, failure: StreamerError | None = None
    ) -> None:
        """Tell how applying changes fares, unless a copy or an operator has the say by now."""
        if self._relations.state(mapped) in (State.INIT, State.COPYING, State.PAUSED):
            return
        if mapped.is_set_aside:
            return  # it may be idle, but it is not in step
        error, hint = (_with_notes(failure), failure.hint) if failure else (None, None)
        self._relations.set_state(mapped, state, error, hint)
        backoff = Backoff()
        while True:
            try:
                await set_streaming_state(
                    self._services.bookkeeping, mapped.relation_id, state, error
                )
                return
            except TargetError as exc:  # what cannot be said now is said when the target is back
                self._services.metrics.count_error(exc, self.source.database, self.source.sid)
                await backoff.wait()

    # ---- other rules ---------------------------------------------------------------------------

    async def change(self, source: SourceMapping) -> bool:
        """Go over to other rules while everything that stays goes on.

        False if that cannot be: a new attempt does it then. A table that is missing or cannot be
        published stops alone, as at a start. Raises StreamerError, and then nothing has changed.
        """
        if not self.is_streaming:
            return False
        async with connection(source) as plain:
            await check_same_server_plainly(plain, self._server)
            mappings, found = await resolve_at(plain, source, self._services.target_namespace)
            wanted = {mapping.source: mapping for mapping in mappings}
            gone = [m for m in self._relations if not m.fills_like(wanted.get(m.mapping.source))]
            groups = await self._relations.read_groups(mappings)
            may_change = self._relations.may_change(wanted, gone, self._coordinator.is_at)
            if not may_change or not self._relations.fits(groups):
                return False
            self._relations.set_groups(groups)
            present = {mapped.mapping.source for mapped in self._relations}
            added = await self._register([m for m in mappings if m.source not in present], found)
            try:
                self._publishing.change(source)
                await self._watch.begin(plain)
            except StreamerError:
                self._publishing.change(self.source)
                for mapped in added:
                    await self._remove(mapped)
                    await forget_relation(self._services.bookkeeping, mapped.relation_id)
                raise
            self.source = source
            for mapped in gone:
                await self._remove(mapped)
            for mapped in self._relations:
                self._relations.replace_mapping(mapped, wanted[mapped.mapping.source])
            await forget_unmapped(self._services.bookkeeping, self._record.source_id, mappings)
            refilled = [wanted[m.mapping.source] for m in gone if m.mapping.source in wanted]
            if refilled:
                added += await self._register(refilled, found)
            await self._watch.begin(plain)  # what is gone is published no more
        self._begin_copies(added)
        return True

    async def _remove(self, mapped: MappedRelation) -> None:
        """Forget a relation here. What was dispatched of it may still arrive, or be given up."""
        lane = self._relations.remove(mapped)
        while lane.queued_count:
            await asyncio.sleep(0.02)
        lane.is_ending = True
        await self._services.drainer.forget({lane})
        lane.close()
        self._dispatcher.forget(lane)
        self._advanced.set()

    # ---- copies (SyncEvents) -------------------------------------------------------------------

    def _begin_copies(self, relations: Iterable[MappedRelation]) -> None:
        """Copy, or declare to be in step, what needs it and is not paused."""
        for mapped in relations:
            if mapped.is_to_declare:
                mapped.end_lsn = self._tracker.newest_lsn
            may = self._relations.state(mapped) is not State.PAUSED
            if may and mapped.skip_through_lsn == EVERYTHING and self._watch.may_be_copied(mapped):
                self._coordinator.request(mapped)

    def copy_began(self, mapped: MappedRelation, consistent_point: Lsn) -> None:
        if self._relations.state(mapped) is not State.PAUSED:
            self._relations.set_state(mapped, State.COPYING)
        mapped.skip_through_lsn = consistent_point
        self._tracker.durable(self._relations.lane(mapped).pending, consistent_point)
        self._advanced.set()

    def copy_finished(self, mapped: MappedRelation, consistent_point: Lsn) -> None:
        mapped.handed_over(consistent_point)
        if self._relations.state(mapped) is not State.PAUSED:
            self._relations.set_state(mapped, State.CATCHING_UP)
        self._relations.quarantine_changed(mapped)
        self._relations.lane(mapped).release(Hold.SYNC)

    def copy_delayed(self, mapped: MappedRelation, error: str | None) -> None:
        if self._relations.state(mapped) is State.COPYING:
            self._relations.set_state(mapped, State.COPYING, error)

    def copy_waits(self, mapped: MappedRelation, reason: str | None) -> None:
        self._relations.show_wait(mapped, reason)

    def copy_failed(self, mapped: MappedRelation, error: str) -> None:
        self._relations.set_state(mapped, State.ERROR, error)
        table = str(mapped.mapping.source)
        log.error("table cannot be copied", source=self.source.label, table=table, error=error)


def _held_by(holder: str) -> str:
    """Say which process has the lock of a source; *holder* is its host and pid."""
    host, _, pid = holder.rpartition(":")
    if not pid.isdecimal():
        return f"held by {holder}, which runs this source; this process waits to take over"
    return (
        f"held by {holder}: that process runs this source, and this one waits to take over; "
        f"to end it, run on {host}: kill {pid}"
    )


def _with_notes(error: StreamerError) -> str:
    notes = getattr(error, "__notes__", [])
    return "; ".join([str(error), *notes])
