"""Applies the changes of held lanes, carefully and without delaying others.

A drainer task runs for each held lane. A few of them work at the same time, each on its own
connection. A drainer tries a window as a set. If the target rejects it, the drainer writes in exact
order, up to the transaction at fault, or around the changes at fault if these go into quarantine. A
lane with rows in quarantine stays held, because later changes of these rows must follow them. The
drainer retries a transient error (a lock, a deadlock, a full disk) with a back-off, and any other
error every few seconds, so an operator who fixes the cause need not report it. When nothing is left
the lane becomes live again.

A lane transaction larger than memory is written in pieces inside one target transaction, while the
rest of it may still arrive. A crash, or the loss of the source, rolls all of it back.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final

import structlog

from streamer.apply.advice import advise
from streamer.apply.counting import count_changes
from streamer.apply.fold import Counts
from streamer.apply.lane import Hold, Lane, LaneWindow, MappedRelation, ShareSpool
from streamer.apply.lane_transaction import LaneTransaction
from streamer.apply.planner import Planner, known_plans
from streamer.apply.quarantine.requests import fulfil
from streamer.apply.quarantine.writer import QuarantineWriter
from streamer.apply.spool import OpenShareDiscarded
from streamer.backoff import Backoff
from streamer.containment import contained
from streamer.decode.transactions import Changes, Transaction
from streamer.errors import (
    ConflictError,
    ProtocolError,
    Retry,
    StreamerError,
    TargetConnectionError,
    TargetContentionError,
    TargetFencedError,
    TargetMovedError,
    TransportError,
)
from streamer.failpoints import failpoint
from streamer.lsn import Lsn
from streamer.mapping.rules import OnError
from streamer.observability.metrics import Metrics
from streamer.target.connection import TargetAddress
from streamer.waiting import wait_for_event

log = structlog.get_logger()

CONCURRENT_MAX: Final = 4
READ_BYTES: Final = 4 * 1024 * 1024
LOCK_SECONDS: Final = 10.0
ERROR_RETRY_SECONDS: Final = 5.0
REPORTED_WAIT: Final = 2
"""The attempt from which on status shows that the target does not take changes now."""
AHEAD_ROWS: Final = 1000
TURN_SECONDS: Final = 2.0
"""How long one lane may keep a connection while others wait for it."""


class Drainer:
    """Drains held lanes. `held` is called when a lane begins to be held, `run` by the owner."""

    def __init__(self, address: TargetAddress, planner: Planner, metrics: Metrics) -> None:
        self._address = address
        self._planner = planner
        self._metrics = metrics
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._new: asyncio.Queue[Lane] = asyncio.Queue()
        self._idle: list[QuarantineWriter] = []
        self._tasks: dict[Lane, asyncio.Task[None]] = {}

    def held(self, lane: Lane) -> None:
        """A lane begins to be held."""
        self._new.put_nowait(lane)

    async def forget(self, lanes: set[Lane]) -> None:
        """The pipeline of *lanes* ends. Returns when nothing of them is being applied any more."""
        tasks = [self._tasks.pop(lane) for lane in lanes if lane in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def run(self) -> None:
        """Drain until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    lane = await self._new.get()
                    if lane in self._tasks or not lane.is_held or lane.is_ending:
                        continue
                    task = tasks.create_task(self._drain(lane), name=f"drain {lane.name}")
                    self._tasks[lane] = task
        finally:
            for writer in self._idle:
                await writer.transaction.close()

    async def _drain(self, lane: Lane) -> None:
        try:
            with contained(f'draining "{lane.name}"'):
                await self._drain_until_live(lane)
        except StreamerError as exc:
            lane.owner.source_failed(exc)
            await asyncio.Event().wait()  # until we are told to forget the lane

    async def _drain_until_live(self, lane: Lane) -> None:
        structlog.contextvars.bind_contextvars(source=lane.owner.source.label)
        if lane.table is not None:
            structlog.contextvars.bind_contextvars(table=lane.table)
        backoff = Backoff()
        has_failed = False
        wait_count = 0
        plans_may_be_stale = True
        while True:
            await _until_may_drain(lane)
            try:
                async with self._slot_for(lane):
                    with contained(f'applying changes of "{lane.name}"'):
                        await self._drain_turn(lane, plans_may_be_stale)
            except (TargetFencedError, TargetMovedError, TransportError):
                raise
            except StreamerError as exc:
                source = lane.owner.source
                self._metrics.count_error(exc, source.database, source.sid)
                plans_may_be_stale = True
                if exc.retry is Retry.TIMED:
                    backoff.log(log, f'changes of "{lane.name}" wait', exc)
                    wait_count += 1
                    if wait_count == REPORTED_WAIT and isinstance(exc, TargetContentionError):
                        await lane.owner.lane_waits(lane, exc.message)
                    await backoff.wait()
                else:
                    has_failed = True
                    lane.keep(Hold.ERROR, str(exc))
                    await lane.owner.lane_failed(lane, exc)
                    await _until_changed(lane, ERROR_RETRY_SECONDS)
                continue
            backoff = Backoff()
            plans_may_be_stale = False
            if wait_count >= REPORTED_WAIT:
                await lane.owner.lane_waits(lane, None)
            wait_count = 0
            if has_failed:
                has_failed = False
                lane.release(Hold.ERROR)
                await lane.owner.lane_recovered(lane)
            if not lane.may_drain or lane.has_backlog:
                continue
            if lane.has_open_share:
                await _until_changed(lane, None)
                continue
            await lane.owner.lane_drained(lane)
            if lane.go_live():
                del self._tasks[lane]  # at once: it may be held again before this task has ended
                return
            if Hold.QUARANTINE in lane.hold and not lane.has_backlog:
                await _until_changed(lane, None)

    @contextlib.asynccontextmanager
    async def _slot_for(self, lane: Lane) -> AsyncIterator[None]:
        """Wait for one of the connections, which all held lanes of the process share."""
        lane.queues_since = time.monotonic()
        try:
            await self._slots.acquire()
        finally:
            lane.queues_since = None
        try:
            yield
        finally:
            self._slots.release()

    async def _drain_turn(self, lane: Lane, plans_may_be_stale: bool) -> None:
        """Apply some of the changes that *lane* holds, on a connection of the pool."""
        writer = self._idle.pop() if self._idle else self._new_writer()
        lane.is_draining = True
        try:
            await writer.transaction.connect([lane.owner.claim])
            lane.backend_pid = writer.target.backend_pid
            turn = _Turn(lane, writer, self._planner, self._metrics, plans_may_be_stale)
            until = time.monotonic() + TURN_SECONDS
            while lane.may_drain and time.monotonic() < until and await turn.apply_next():
                pass
        except BaseException as exc:
            # An error of ours has been rolled back; of anything else the transaction is still open.
            if not isinstance(exc, StreamerError) or isinstance(exc, TargetConnectionError):
                writer.disconnect()
            raise
        finally:
            lane.is_draining, lane.backend_pid = False, None
            lane.changed.set()
            self._idle.append(writer)

    def _new_writer(self) -> QuarantineWriter:
        return QuarantineWriter(
            self._address, "streamer drainer", self._metrics, lock_seconds=LOCK_SECONDS
        )


class _Turn:
    """One lane's use of one connection."""

    def __init__(
        self,
        lane: Lane,
        writer: QuarantineWriter,
        planner: Planner,
        metrics: Metrics,
        plans_may_be_stale: bool,
    ) -> None:
        self._lane = lane
        self._writer = writer
        self._planner = planner
        self._metrics = metrics
        self._plans_may_be_stale = plans_may_be_stale

    async def apply_next(self) -> bool:
        """Fulfil a request, or apply the next shares; False if there is neither now."""
        if self._lane.requests:
            await self._fulfil()
            return True
        try:
            shares = self._lane.take(READ_BYTES)
        except OpenShareDiscarded:
            self._spool.rewind()
            return True
        if not shares:
            return False
        if self._plans_may_be_stale:
            self._plans_may_be_stale = False
            for share in shares:
                self._planner.forget(share)
        if shares[0].end_lsn is None:
            await self._apply_large(shares[0])
        else:
            await self._apply(shares)
        return True

    async def _fulfil(self) -> None:
        lane = self._lane
        request = lane.requests[0]
        if lane.owner.lane_of(request.mapped) is lane:
            await fulfil(request, lane, self._writer, self._planner)
            lane.owner.quarantine_changed(request.mapped)
        # Else it is being copied, on a lane of its own; the request is found again after that.
        if lane.requests:
            lane.requests.popleft()

    @property
    def _spool(self) -> ShareSpool:
        return self._lane.front

    async def _apply(self, shares: list[LaneTransaction]) -> None:
        """Apply finished shares, as many as the target takes; raise why it takes no more."""
        done = 0
        try:
            window, error = await self._window(shares)
            try:
                await self._writer.begin()
                await self._writer.write(window)
                await self._commit(window.progress())
                done = len(window.shares)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._writer.rollback()
                # With the present plans: an earlier definition may have caused the rejection.
                for share in shares:
                    self._planner.forget(share)
                window, error = await self._window(shares)
                done, refused = await self._apply_in_order(window)
                error = refused or error
            if error is not None:
                raise error
        except StreamerError:
            if not self._writer.transaction.is_broken:
                await self._writer.rollback()
            raise
        finally:
            # Also when cancelled: changes that are not durable stay in the lane.
            self._lane.drained(done)
            if done:
                self._durable(window, done)
            self._tell_of_quarantine()

    async def _window(
        self, shares: list[LaneTransaction]
    ) -> tuple[LaneWindow, StreamerError | None]:
        """Plan shares up to the first that cannot be planned or read, if it is not the very
        first.
        """
        window = LaneWindow(self._lane)
        self._writer.start_window()
        for number, share in enumerate(shares):
            try:
                plans = await self._planner.plans(share)
                kept = await self._writer.follow(share, plans)
                window.add(share, plans, kept)
            except ProtocolError as exc:
                _add_context(exc, share)
                if not number:
                    raise
                # The window has parts of this share by now.
                window, error = await self._window(shares[:number])
                return window, error or exc
            except StreamerError as exc:
                if not window.shares or exc.retry is Retry.TIMED:
                    raise
                return window, exc
        return window, None

    async def _apply_in_order(self, window: LaneWindow) -> tuple[int, StreamerError | None]:
        """Commit the shares in front of the one that the target refuses; return their number and
        why.
        """
        writer = self._writer
        count, error = len(window.shares), None
        await writer.begin()
        by_keys = writer.orders_by_keys(window)
        if by_keys:
            # One table after the other, several shares can violate a key that each of them keeps.
            count, error = await self._find_refused(window, count, by_keys=True)
        while count and not by_keys:
            await writer.savepoint()
            try:
                await writer.write_in_order(window, 0, count)
                await writer.transaction.check_constraints()
                break
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                error = exc
                await writer.rollback_to_savepoint()
                if exc.share_number is None or exc.share_number >= count:
                    count, error = await self._find_refused(window, count)
                    break
                count = exc.share_number
        if error is not None:
            _add_context(error, window.shares[count])
        if not count:
            await writer.rollback()
            return 0, error
        await self._commit(window.progress(count))
        return count, error

    async def _find_refused(
        self, window: LaneWindow, count: int, *, by_keys: bool = False
    ) -> tuple[int, StreamerError | None]:
        """Write shares one by one up to the one that the target refuses.

        Shares of one change each are written together, if refused changes go into quarantine: each
        constraint must hold behind each of them.
        """
        number = 0
        while number < count:
            stop = number + 1
            while not by_keys and stop < count and _is_one_change(window, number, stop + 1):
                stop += 1
            await self._writer.savepoint()
            try:
                if stop > number + 1:
                    try:
                        await self._write_singles(window, number, stop)
                    except StreamerError as exc:
                        if exc.retry is Retry.TIMED:
                            raise
                        stop = number + 1
                        await self._writer.rollback_to_savepoint()
                        await self._write_share(window, number)
                elif by_keys:
                    await self._write_share_by_keys(window, number)
                else:
                    await self._write_share(window, number)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._writer.rollback_to_savepoint()
                return number, exc
            await self._writer.transaction.release_savepoint()
            number = stop
        return count, None

    async def _write_singles(self, window: LaneWindow, start: int, stop: int) -> None:
        await self._writer.write_in_order(window, start, stop, immediate=True)
        await self._writer.transaction.check_constraints()

    async def _write_share_by_keys(self, window: LaneWindow, number: int) -> None:
        """Write one share of tables that foreign keys connect, in each order that may satisfy them.

        The order of changes across tables is not known here. As sets, rows are written and removed
        by the keys. In exact order, one table comes after the other.
        """
        writer = self._writer
        single = window.only(number)
        if not any(map(writer.is_followed, single.relations)):
            try:
                await writer.write(single)
                await writer.transaction.check_constraints()
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await writer.rollback_to_savepoint()
            else:
                return
        try:
            await self._write_share(window, number)
        except ConflictError as exc:
            if exc.kind != "foreign_key":
                raise
            await writer.rollback_to_savepoint()
            await writer.write_in_order(window, number, number + 1, reverse=True)
            await writer.transaction.check_constraints()

    async def _write_share(self, window: LaneWindow, number: int) -> None:
        """Write one share, by which every constraint must hold at its end."""
        writer = self._writer
        try:
            await writer.write_in_order(window, number, number + 1)
            await writer.transaction.check_constraints()
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or not _may_divert(window.shares[number]):
                raise
            # A deferred constraint does not say which row violates it.
            await writer.rollback_to_savepoint()
            await writer.write_in_order(window, number, number + 1, immediate=True)
            await writer.transaction.check_constraints()

    async def _apply_large(self, piece: LaneTransaction) -> None:
        """Apply a share piece by piece, in one target transaction, as it arrives."""
        try:
            await self._apply_pieces([piece], immediate=False)
        except _ConstraintAtEnd:
            await self._apply_pieces(await self._next_piece(), immediate=True)

    async def _apply_pieces(self, first: list[LaneTransaction], *, immediate: bool) -> None:
        writer, spool = self._writer, self._spool
        touched: dict[MappedRelation, Counts] = {}
        (piece, *_) = first
        transaction = piece.transaction
        window: LaneWindow | None = None
        try:
            await writer.begin()
            while True:
                async with self._looking_ahead(piece, touched) as ahead:
                    written = await self._write_piece(piece, window, immediate=immediate)
                    for mapped, changes in written:
                        touched.setdefault(mapped, Counts()).count(changes.payloads)
                    failpoint("drain.piece_written")
                    _check_still_wanted(touched, transaction)
                    if ahead is None:
                        break
                    (piece, *_), window = await ahead
            try:
                await writer.transaction.check_constraints()
            except StreamerError as exc:
                if exc.retry is Retry.TIMED or immediate or not any(map(_diverts, touched)):
                    raise
                raise _ConstraintAtEnd from exc
            assert piece.end_lsn is not None
            _check_still_wanted(touched, transaction)
            await self._commit(dict.fromkeys(touched, piece.end_lsn))
        except (OpenShareDiscarded, _NotWanted):
            await writer.rollback()
            spool.rewind()
            return
        except BaseException as exc:
            spool.rewind()
            if isinstance(exc, _ConstraintAtEnd):
                await writer.rollback()
            if isinstance(exc, StreamerError):
                _add_context(exc, piece)
                await writer.rollback()
            if isinstance(exc, TargetContentionError):
                # A column that a plan had to add waited for this very transaction. It no longer
                # stands in the way, and the next attempt finds the column there.
                await self._planner.plans(piece)
            raise
        self._lane.drained(1)
        self._tell_of_quarantine()
        self._lane.owner.lane_durable(self._lane, [piece])
        for mapped, counts in touched.items():
            count_changes(self._metrics, mapped, counts)

    @contextlib.asynccontextmanager
    async def _looking_ahead(
        self, piece: LaneTransaction, touched: dict[MappedRelation, Counts]
    ) -> AsyncIterator["asyncio.Task[tuple[list[LaneTransaction], LaneWindow | None]] | None"]:
        """Read the piece after *piece*, if it is not the last one, while *piece* is being written.

        So the target works while this process prepares, and the other way round.
        """
        if piece.end_lsn is not None:
            yield None
            return
        looking = self._look_ahead(piece.transaction, touched)
        task = asyncio.create_task(looking, name=f"next of {self._lane.name}")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _look_ahead(
        self, transaction: Transaction, touched: dict[MappedRelation, Counts]
    ) -> tuple[list[LaneTransaction], LaneWindow | None]:
        """Return the next shares, and the window of the first if it can be told in advance."""
        while not (shares := self._spool.read(READ_BYTES)):
            await _until_changed(self._lane, None)
            _check_still_wanted(touched, transaction)
        plans = known_plans(shares[0])
        if plans is None or _may_divert(shares[0]):
            return shares, None
        window = LaneWindow(self._lane)
        window.add(shares[0], plans, [[] for _ in plans])
        for mapped, changes, plan in window.parts[0]:
            for start in range(0, len(changes.payloads), AHEAD_ROWS):
                window.relations[mapped].add(plan, changes.payloads[start : start + AHEAD_ROWS])
                await asyncio.sleep(0)  # the write in progress goes first
        return shares, window

    async def _write_piece(
        self, piece: LaneTransaction, window: LaneWindow | None, *, immediate: bool
    ) -> list[tuple[MappedRelation, Changes]]:
        """Write a piece, of which *window* may be known; return its changes that were to be
        written.
        """
        writer = self._writer
        await writer.savepoint()
        if window is None or any(mapped.plan is not plan for mapped, _, plan in window.parts[0]):
            window = await self._piece_window(piece)
        try:
            if immediate:
                await writer.write_in_order(window, 0, 1, immediate=True)
            else:
                await writer.write(window)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or immediate:
                raise
            await writer.rollback_to_savepoint()
            self._planner.forget(piece)
            window = await self._piece_window(piece)
            await writer.write_in_order(window, 0, 1)
        await writer.transaction.release_savepoint()
        return [(mapped, changes) for mapped, changes, _ in window.parts[0]]

    async def _piece_window(self, piece: LaneTransaction) -> LaneWindow:
        plans = await self._planner.plans(piece)
        self._writer.start_window()
        window = LaneWindow(self._lane)
        window.add(piece, plans, await self._writer.follow(piece, plans))
        return window

    async def _next_piece(self) -> list[LaneTransaction]:
        while not (shares := self._spool.read(READ_BYTES)):
            await _until_changed(self._lane, None)
        return shares

    async def _commit(self, progress: dict[MappedRelation, Lsn]) -> None:
        """Commit, and find out whether that was done if the connection is lost meanwhile."""
        try:
            await self._writer.transaction.commit(progress)
        except TargetConnectionError:
            backoff = Backoff()
            while True:
                self._writer.disconnect()
                try:
                    await self._writer.transaction.connect()
                    if await self._writer.transaction.settle():
                        return
                    break
                except TargetMovedError:
                    raise
                except TargetConnectionError as exc:
                    backoff.log(log, "waiting to learn the outcome of a commit", exc)
                    await backoff.wait()
            raise

    def _durable(self, window: LaneWindow, done: int) -> None:
        self._lane.owner.lane_durable(self._lane, window.shares[:done])
        for parts in window.parts[:done]:
            for mapped, changes, _ in parts:
                count_changes(self._metrics, mapped, Counts().count(changes.payloads))

    def _tell_of_quarantine(self) -> None:
        for mapped in self._writer.take_changed():
            self._lane.owner.quarantine_changed(mapped)


class _NotWanted(Exception):  # not an error: a share of which a copy brings a part
    """A resync was asked for while a large share was being written."""


def _check_still_wanted(touched: Iterable[MappedRelation], transaction: Transaction) -> None:
    """Give up a large share if it has written to a relation that is going to be copied again.

    The rest of the relation's changes would be skipped, and readers would see the part.
    """
    if any(mapped.has(transaction) for mapped in touched):
        raise _NotWanted


class _ConstraintAtEnd(Exception):  # not an error: a large share that is to be written otherwise
    """A deferred constraint refuses a large share, and does not say which of its rows."""


def _diverts(mapped: MappedRelation) -> bool:
    return mapped.mapping.rule.on_error is OnError.QUARANTINE


def _may_divert(share: LaneTransaction) -> bool:
    return any(_diverts(mapped) for mapped, _ in share.changes)


def _is_one_change(window: LaneWindow, start: int, stop: int) -> bool:
    """Whether each of some shares has one change, of a table whose refused changes are diverted."""
    return all(
        len(share.changes) == 1
        and len(share.changes[0][1].payloads) == 1
        and _diverts(share.changes[0][0])
        for share in window.shares[start:stop]
    )


def _add_context(error: StreamerError, share: LaneTransaction) -> None:
    transaction = share.transaction
    error.lsn = str(transaction.final_lsn)
    error.add_note(
        f"while applying transaction {transaction.xid} finishing at {transaction.final_lsn}"
    )
    relations = {mapped for mapped, _ in share.changes}
    if len(relations) == 1:  # of several it is not known here which one is refused
        (mapped,) = relations
        advise(error, mapped, mapped.plan)


async def _until_may_drain(lane: Lane) -> None:
    while not lane.may_drain:
        lane.changed.clear()
        await lane.changed.wait()


async def _until_changed(lane: Lane, seconds: float | None) -> None:
    """Wait until something about *lane* changes, at most *seconds*."""
    lane.changed.clear()
    await wait_for_event(lane.changed, seconds)
