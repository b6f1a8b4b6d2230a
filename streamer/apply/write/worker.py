"""An apply worker has a queue, a window that it fills, and a window that it commits.

While the server writes a window, the worker decodes and folds the next window.
`streamer.apply.write.commit_pace` decides when a window closes; a large window closes at once. A
window always ends at source commits.

If the target rejects a lane's changes, the worker gives the lane back. The lane is then held, and a
drainer (`streamer.drain`) finds the cause without delaying the remaining lanes. After a lost
connection, the worker retries the same window. A lane that delays the window leaves the worker
(`streamer.apply.lanes.slow_lanes`).
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from streamer.apply.lanes.hot_lanes import IDLE_SECONDS, HotLanes
from streamer.apply.lanes.lane import Lane, MappedRelation, TransactionQueue
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.lanes.queue_budget import Budget
from streamer.apply.lanes.slow_lanes import ASIDE_SECONDS, SLOW_SECONDS_MIN, Move, SlowLanes
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.write.commit_counts import count_window, skipped_truncates
from streamer.apply.write.commit_pace import CommitPace
from streamer.apply.write.conflicts import ConflictsFound
from streamer.apply.write.planner import Planner, existing_plans
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.writer import Writer, misses_rows
from streamer.errors.error_classes import (
    SpoolError,
    StreamerError,
    TargetConnectionError,
    TargetFencedError,
    TargetMovedError,
    TargetRejectedError,
)
from streamer.observability.metrics import Metrics
from streamer.observability.spans import Facts, Spans
from streamer.util.alarm import Alarm
from streamer.util.backoff import Backoff
from streamer.util.containment import contained
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

WINDOW_CHANGES_MAX: Final = 50_000
WINDOW_BYTES_MAX: Final = 8 * 1024 * 1024
WHOLE_BYTES_MAX: Final = 128 * 1024
"""A smaller window goes to the target in one message."""
APART_WINDOWS: Final = 100
"""After the target rejects a window in one message, a worker sends this many windows in parts."""
HOT_PART: Final = 0.75
"""A lane with this fraction of a window's changes is hot: the window stays open only for that
lane.
"""
LOCK_SECONDS: Final = 3.0
"""Time for which a worker waits for a lock before a drainer takes over the lane."""
SLOW_SECONDS: Final = 3.0
"""Time for which a worker writes a lane while other lanes wait, before a drainer takes over."""

_TURN_SECONDS: Final = 0.005


@dataclass(slots=True)
class Window:
    """The changes of one target transaction."""

    lanes: dict[Lane, LaneWindow] = field(default_factory=dict)
    opened_at: float = 0.0
    transaction_count: int = 0
    change_count: int = 0
    version_count: int = 0
    """The number of changes that end a version of a row and begin the next."""
    size: int = 0

    def add(
        self, lane: Lane, lane_transaction: LaneTransaction, plans: list[ApplyPlan | None]
    ) -> None:
        if not self.transaction_count:
            self.opened_at = time.monotonic()
        window = self.lanes.get(lane)
        if window is None:
            window = self.lanes[lane] = LaneWindow(lane)
        self.transaction_count += 1
        self.size += lane_transaction.size
        changes, versions = window.change_count, window.version_count
        try:
            window.add(lane_transaction, plans)
        finally:
            self.change_count += window.change_count - changes
            self.version_count += window.version_count - versions

    @property
    def is_full(self) -> bool:
        # A version writes two rows, which both need memory.
        row_count = self.change_count + self.version_count
        return row_count >= WINDOW_CHANGES_MAX or self.size >= WINDOW_BYTES_MAX

    @property
    def relation_count(self) -> int:
        return sum(len(lane.relations) for lane in self.lanes.values())

    @property
    def row_count(self) -> int:
        """The number of rows after folding. A change in exact order is a row."""
        relations = (
            relation for lane in self.lanes.values() for relation in lane.relations.values()
        )
        folds = (fold for relation in relations for fold in relation.folds)
        return self.change_count - sum(fold.counts.total - fold.row_count for fold in folds)


class Worker:
    """An apply worker. Readers call `put`, the owner calls `run`."""

    def __init__(
        self,
        number: int,
        transaction: TargetTransaction,
        planner: Planner,
        budget: Budget,
        metrics: Metrics,
        pace: CommitPace,
        hot_lanes: HotLanes | None = None,
    ) -> None:
        self.number = number
        self.queued_bytes = 0
        self._transaction = transaction
        self._writer = Writer(transaction)
        self._planner = planner
        self._budget = budget
        self._metrics = metrics
        self._pace = pace
        self._queue: deque[tuple[Lane, LaneTransaction]] = deque()
        self._arrived = asyncio.Event()
        self._filling = Window()
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()
        self._due = asyncio.Event()
        """Set to commit the filling window now, regardless of the pace."""
        self._committing: Window | None = None
        self._left = asyncio.Event()
        """Set when a lane leaves the committing window."""
        self._writing: tuple[Window, list[Lane]] = Window(), []
        """The write in progress: a window, and lanes of the window."""
        self._is_late = False
        """The current write has exceeded its time limit while other lanes wait."""
        self._alarm = Alarm(self._check_time)
        self._parts_left = 0
        """The number of windows that the worker must still send in parts."""
        self._slow_lanes = SlowLanes()
        self._hot_lanes = hot_lanes or HotLanes()
        self._write_seconds: dict[Lane, float] = {}
        """The write time of each lane of the window."""
        self._connects_ahead = True
        """Whether no transaction has arrived yet. The worker plans the first transaction while
        connecting.
        """

    @property
    def is_writing(self) -> bool:
        """Whether the worker writes or commits a window."""
        return self._committing is not None

    # ---- the queue -----------------------------------------------------------------------------

    def put(self, lane: Lane, *transactions: LaneTransaction) -> None:
        """Queue transactions; readers check the budget before."""
        is_first = not self._queue
        for lane_transaction in transactions:
            self._queue.append((lane, lane_transaction))
            self.queued_bytes += lane_transaction.size
            self._budget.add(lane, lane_transaction.size)
        if self._connects_ahead:
            self._filled.set()
        elif (
            is_first and len(transactions) == 1 and not self._filling.is_full and self._fold_first()
        ):
            return  # saves a turn of the task that fills windows
        self._arrived.set()

    def hurry(self) -> None:
        """Commit the queued transactions without a pause, because a task waits for the commit."""
        self._due.set()

    def _give_bytes(self, lane: Lane, size: int) -> None:
        self.queued_bytes -= size
        self._budget.subtract(lane, size)

    async def drop(self, lanes: set[Lane]) -> None:
        """Remove the changes of *lanes*, whose pipeline ends, and wait until no change is in
        flight.
        """
        for lane in lanes & {*self._filling.lanes, *(lane for lane, _ in self._queue)}:
            self._withdraw(lane)
        while self._committing is not None and not lanes.isdisjoint(self._committing.lanes):
            self._left.clear()
            await self._left.wait()

    def _withdraw(self, lane: Lane) -> list[LaneTransaction]:
        """Remove and return the transactions of *lane* outside the running COMMIT, oldest first."""
        window = self._filling.lanes.pop(lane, None)
        transactions = window.transactions if window else []
        self._filling.transaction_count -= len(transactions)
        if window:
            self._filling.change_count -= window.change_count
            self._filling.version_count -= window.version_count
            self._filling.size -= window.size
            self._taken.set()
        transactions = [
            *transactions,
            *(lane_transaction for owner, lane_transaction in self._queue if owner is lane),
        ]
        remaining = [item for item in self._queue if item[0] is not lane]
        self._queue.clear()
        self._queue.extend(remaining)
        self._give_bytes(lane, sum(lane_transaction.size for lane_transaction in transactions))
        return transactions

    # ---- filling -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Apply queued changes until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._fill(), name=f"apply-{self.number}-fill")
                tasks.create_task(self._commit_windows(), name=f"apply-{self.number}-commit")
        finally:
            await self._transaction.close()

    async def _fill(self) -> None:
        turn_began = time.monotonic()
        while True:
            while not self._queue:  # the owner may have taken queued changes back meanwhile
                self._arrived.clear()
                await self._arrived.wait()
                turn_began = time.monotonic()
            if self._filling.is_full:
                self._due.set()
                self._taken.clear()
                await self._taken.wait()
                continue
            if not self._fold_first():
                lane, lane_transaction = self._queue[0]
                await self._commit_earlier(lane)
                if not self._queue or self._queue[0][1] is not lane_transaction:
                    continue
                plans = await self._make_plans(lane, lane_transaction)
                if plans is None or not self._queue or self._queue[0][1] is not lane_transaction:
                    continue
                self._fold_first(plans)
            if time.monotonic() - turn_began > _TURN_SECONDS:
                await asyncio.sleep(0)
                turn_began = time.monotonic()

    def _fold_first(self, plans: list[ApplyPlan | None] | None = None) -> bool:
        """Add the queue's first transaction to the window; return False if it lacks a plan."""
        lane, lane_transaction = self._queue[0]
        if lane_transaction.is_partly_applied or lane_transaction.spans_definitions:
            self._queue.popleft()
            self._queue.extendleft(
                (lane, single) for single in reversed(lane.split(lane_transaction))
            )
            self._arrived.set()
            return True
        if plans is None and (plans := existing_plans(lane_transaction)) is None:
            return False
        self._queue.popleft()
        try:
            with contained(f'folding changes of "{lane.name}"'):
                self._filling.add(lane, lane_transaction, plans)
        except StreamerError:
            self._give_back(lane)
        else:
            self._filled.set()
        return True

    async def _commit_earlier(self, lane: Lane) -> None:
        """Wait until the target contains the changes of *lane* that have plans.

        A new plan may add a column to the target. Only rows that exist at the target by then get
        the value that ADD COLUMN gave to existing rows of the source.
        """
        while lane in self._filling.lanes:
            self._due.set()
            self._taken.clear()
            await self._taken.wait()
        while self._committing is not None and lane in self._committing.lanes:
            self._left.clear()
            await self._left.wait()

    async def _make_plans(
        self, lane: Lane, lane_transaction: LaneTransaction
    ) -> list[ApplyPlan | None] | None:
        backoff = Backoff()
        while not lane.is_ending:
            try:
                return await self._planner.plans(
                    lane_transaction, [queued for _, queued in self._queue]
                )
            except TargetMovedError as exc:
                lane.owner.source_failed(exc)
            except TargetConnectionError as exc:
                source = lane.owner.source
                self._metrics.count_error(exc, source.database, source.sid)
                await backoff.wait()
            except StreamerError:
                # A drainer raises and reports the same error after the commit in progress.
                break
        self._give_back(lane)
        return None

    def _give_back(self, lane: Lane, committing: LaneWindow | None = None) -> None:
        transactions = committing.transactions if committing else []
        transactions = [*transactions, *self._withdraw(lane)]
        try:
            lane.give_back(transactions)
        except SpoolError as exc:
            lane.owner.source_failed(exc)
            lane.give_back(transactions)  # discarded: the source sends the changes again

    # ---- committing ----------------------------------------------------------------------------

    async def _commit_windows(self) -> None:
        while True:
            window = await self._next_window()
            self._committing = window
            self._pace.began_at = time.monotonic()
            try:
                await self._commit(window)
            except Exception:
                # A defect: the sources begin again, and the lanes discard the window's
                # transactions.
                for lane in list(window.lanes):
                    self._give_bytes(lane, window.lanes.pop(lane).size)
                raise
            finally:
                self._committing = None
                self._left.set()
            self._pace.commit_seconds = time.monotonic() - self._pace.began_at

    async def _next_window(self) -> Window:
        while not self._filling.transaction_count:
            self._filled.clear()
            if self._connects_ahead and self._queue:
                await self._connect_ahead()
            else:
                await self._wait_for_changes()
        window, is_growing = self._filling, True
        while not (window.is_full or self._due.is_set()):
            seconds = self._pace.seconds_left(
                time.monotonic(),
                window.opened_at,
                window,
                is_growing=is_growing and not self._delays_others(window),
            )
            if not seconds:
                break
            size = window.size
            await wait_for_event(self._due, seconds)
            is_growing = window.size > size or bool(self._queue)
        self._filling = Window()
        self._due.clear()
        self._taken.set()
        return window

    async def _wait_for_changes(self) -> None:
        """Wait for the first change of a window; an idle hot worker closes its connection."""
        if not self._hot_lanes.is_hot_worker(self) or self._connects_ahead:
            await self._filled.wait()
        elif not await wait_for_event(self._filled, IDLE_SECONDS):
            await self._transaction.close()
            self._connects_ahead = True

    def _delays_others(self, window: Window) -> bool:
        """Whether a hot lane without a backlog would delay other lanes."""
        counts = [lane_window.change_count for lane_window in window.lanes.values()]
        return (
            len(counts) > 1
            and max(counts) >= HOT_PART * window.change_count
            and all(self._budget.has_room(lane.owner) for lane in window.lanes)
        )

    async def _connect_ahead(self) -> None:
        """Connect while the planner plans the first transactions. `_commit` handles errors."""
        self._connects_ahead = False
        with contextlib.suppress(StreamerError):
            await self._transaction.connect({lane.owner.fence for lane, _ in self._queue})

    async def _commit(self, window: Window) -> None:
        """Commit *window*; give back the lanes whose changes the target rejects."""
        backoff = Backoff()
        self._write_seconds.clear()
        while window.lanes:
            try:
                await self._transaction.connect({lane.owner.fence for lane in window.lanes})
                if await self._transaction.resolve_commit():
                    break
                if self._fits_message(window):
                    if await self._write_whole(window):
                        break
                elif await self._write(window):
                    await self._transaction.commit(_progress(window), _skipped(window))
                    break
            except TargetFencedError as exc:
                self._give_up(window, exc, _lanes_with(window, exc.relations))
            except TargetMovedError as exc:
                moved = [lane for lane in window.lanes if lane.owner.fence in exc.fences]
                self._give_up(window, exc, moved)
            except (TargetConnectionError, TargetRejectedError) as exc:
                self._transaction.disconnect()
                self._metrics.count_error(exc)
                self._abandon(window, [lane for lane in window.lanes if lane.is_ending])
                backoff.log(log, f"worker {self.number} waits for the target", exc)
                await backoff.wait()
            except StreamerError as exc:
                # The COMMIT failed, perhaps because of a deferred constraint: any lane may be the
                # cause.
                self._metrics.count_error(exc)
                await self._transaction.rollback()
                for lane in list(window.lanes):
                    self._fail(window, lane)
        self._finish(window)

    def _fits_message(self, window: Window) -> bool:
        """Whether to send *window* with its COMMIT in one message.

        Only a window in parts shows which lane is slow.
        """
        return (
            not self._parts_left
            and window.size <= WHOLE_BYTES_MAX
            and (len(window.lanes) == 1 or self._pace.commit_seconds < SLOW_SECONDS_MIN)
            and all(map(self._writer.fits_message, window.lanes.values()))
        )

    async def _write_whole(self, window: Window) -> bool:
        """Write and commit *window* in one message, in which each lane is a part.

        Return False after a rollback: a lane failed and has left *window*, or *window* must be
        written in parts.
        """
        lanes = list(window.lanes)
        try:
            with self._timing(window, lanes), contained("writing a window"):
                await self._transaction.begin()
                for lane_window in window.lanes.values():
                    self._writer.join(lane_window)
                    self._transaction.end_part()
                await self._transaction.commit(_progress(window), _skipped(window))
            return True
        except TargetFencedError:
            raise
        except TargetConnectionError:
            if not self._is_late:
                raise
            self._parts_left = APART_WINDOWS
        except StreamerError as exc:
            failed = self._transaction.failed_part
            if failed == len(lanes):
                raise
            await self._transaction.rollback()
            if failed < 0 or misses_rows(exc):
                self._parts_left = APART_WINDOWS
            else:
                log.debug("handed to a drainer", lane=lanes[failed].name, error=str(exc))
                self._fail(window, lanes[failed])
        return False

    async def _write(self, window: Window) -> bool:
        """Begin, and write all lanes. Return False after a rollback: a lane failed and has left
        *window*, or there were conflicts.
        """
        await self._transaction.begin()
        for lane, lane_window in window.lanes.items():
            try:
                with self._timing(window, [lane]), contained(f'writing changes of "{lane.name}"'):
                    is_written = await self._write_lane(lane_window)
            except TargetFencedError:
                raise
            except TargetConnectionError:
                if not self._is_late:
                    raise
                log.debug("lane handed to a drainer", lane=lane.name, error="its commits are slow")
                self._fail(window, lane)
                return False
            except StreamerError as exc:
                log.debug("lane handed to a drainer", lane=lane.name, error=str(exc))
                await self._transaction.rollback()
                self._fail(window, lane)
                return False
            if not is_written:
                await self._transaction.rollback()
                return False
        return True

    async def _write_lane(self, window: LaneWindow) -> bool:
        """Write the changes of a lane; return False if a second attempt must note conflicts."""
        try:
            await self._writer.write(window)
        except ConflictsFound:
            return False
        return True

    @contextlib.contextmanager
    def _timing(self, window: Window, lanes: list[Lane]) -> Iterator[None]:
        """Limit how long this block may write *lanes* while other lanes wait."""
        self._is_late, self._writing = False, (window, lanes)
        self._alarm.begin(SLOW_SECONDS)
        began = time.monotonic()
        try:
            yield
        finally:
            self._alarm.end()
            seconds = (time.monotonic() - began) / len(lanes)
            self._write_seconds.update(dict.fromkeys(lanes, seconds))

    def _check_time(self) -> None:
        window, lanes = self._writing
        if any(self._blocks_lanes(window, lane) for lane in lanes):
            self._alarm.end()
            self._is_late = True
            self._transaction.disconnect()

    def _blocks_lanes(self, window: Window, lane: Lane) -> bool:
        waiting = {*window.lanes, *self._filling.lanes, *(queued for queued, _ in self._queue)}
        if waiting - {lane}:
            return True
        return not self._budget.has_room(lane.owner) and lane.owner.has_other_lanes

    def _give_up(self, window: Window, error: StreamerError, lanes: Collection[Lane]) -> None:
        """End the attempts of the sources of *lanes*, and remove all lanes of those sources."""
        for owner in {lane.owner for lane in lanes}:
            owner.source_failed(error)
            self._abandon(window, [lane for lane in window.lanes if lane.owner is owner])

    def _abandon(self, window: Window, lanes: Collection[Lane]) -> None:
        """Leave the changes of *lanes* to the next attempts of the sources, which read the target's
        position.
        """
        for lane in lanes:
            self._transaction.forget(window.lanes[lane].relations)
            self._fail(window, lane)

    def _fail(self, window: Window, lane: Lane) -> None:
        lane_window = window.lanes.pop(lane)
        self._left.set()
        self._give_bytes(lane, lane_window.size)
        self._give_back(lane, lane_window)

    def _finish(self, window: Window) -> None:
        self._parts_left = max(0, self._parts_left - 1)
        if window.lanes:
            self._metrics.commits.labels(str(self.number)).inc()
        if self._metrics.spans is not None:
            self._add_span(self._metrics.spans, window)
        moves = self._find_moves(window)
        for lane in list(window.lanes):
            lane_window = window.lanes.pop(lane)
            self._give_bytes(lane, lane_window.size)
            lane.applied(lane_window.transactions)
            count_window(self._metrics, lane_window, self._write_seconds.get(lane, 0.0))
        now = time.monotonic()
        for lane, move in moves.items():
            if lane.is_held or lane.is_ending:
                continue
            if move is Move.TO_DISK:
                log.debug("lane handed to a drainer", lane=lane.name, error="each commit is slow")
                self._give_back(lane)
                lane.defer_to_drainer(now + ASIDE_SECONDS)
            elif move is Move.TO_OWN_CONNECTION and (
                hot_worker := self._hot_lanes.reserve(lane, now)
            ):
                log.debug("hot lane moved to a separate worker", lane=lane.name)
                self._move(lane, hot_worker)
            elif home := self._hot_lanes.release(lane, now, is_cool=self._slow_lanes.is_cool(lane)):
                log.debug("lane returned to its shared worker", lane=lane.name)
                self._move(lane, home)

    def _add_span(self, spans: Spans, window: Window) -> None:
        seconds = time.monotonic() - self._pace.began_at
        facts: Facts = {
            "sources": ",".join(sorted({lane.owner.source.label for lane in window.lanes})),
            "tables": window.relation_count,
            "transactions": window.transaction_count,
            "changes": window.change_count,
            "bytes": window.size,
        }
        spans.add_window(str(self.number), seconds, facts)

    def _find_moves(self, window: Window) -> dict[Lane, Move]:
        """Record the write times of *window*, and return the move of each lane."""
        return {
            lane: self._slow_lanes.wrote(
                lane,
                self._write_seconds[lane],
                lane_window.change_count,
                others_wait=self._blocks_lanes(window, lane),
            )
            for lane, lane_window in window.lanes.items()
            if lane in self._write_seconds
        }

    def _move(self, lane: Lane, to: TransactionQueue) -> None:
        """Move *lane* and its queued transactions to *to*.

        No commit in progress contains changes of *lane*.
        """
        transactions = self._withdraw(lane)
        lane.queue = to
        to.put(lane, *transactions)
        to.hurry()  # a task may wait for the lane, and has called `hurry` of this worker
        failpoint("apply.lane_moved")


def _lanes_with(window: Window, relations: Collection[object]) -> list[Lane]:
    """Return the lanes with changes of *relations*; all lanes, if no lane has such changes."""
    lanes = [
        lane
        for lane, lane_window in window.lanes.items()
        if not lane_window.relations.keys().isdisjoint(relations)
    ]
    return lanes or list(window.lanes)


def _progress(window: Window) -> dict[MappedRelation, Lsn]:
    reached: dict[MappedRelation, Lsn] = {}
    for lane_window in window.lanes.values():
        reached |= lane_window.progress()
    return reached


def _skipped(window: Window) -> dict[MappedRelation, int]:
    skipped: dict[MappedRelation, int] = {}
    for lane_window in window.lanes.values():
        skipped |= skipped_truncates(lane_window)
    return skipped
