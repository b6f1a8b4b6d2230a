"""Applies the changes of held lanes, carefully and without delaying live lanes.

A drainer task runs for each held lane. A few drainers work at the same time, each on a separate
connection, in turns (`lane_turn`). A drainer tries a window as a set. If the target rejects the
window, the drainer writes in exact order (`exact_order`), up to the faulty transaction. With
quarantine, the drainer diverts the faulty changes and writes the rest. A lane with rows in
quarantine stays held, because later changes of these rows must follow. The drainer retries a
transient error (a lock, a deadlock, a full disk) with a back-off. After any other error the drainer
retries every few seconds, so the operator only has to remove the cause. Once the spool is empty,
the lane becomes live again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Final

import structlog

from streamer.apply.lanes.lane import STAYING, Hold, Lane, until_changed
from streamer.apply.lanes.spool import OpenTransactionDiscarded
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.apply.write.planner import Planner
from streamer.apply.write.target_transaction import CONFLICTS_KEPT
from streamer.drain.lane_turn import Turn
from streamer.errors.error_classes import (
    SOURCE_LOCK_LOST,
    Retry,
    StreamerError,
    TargetConnectionError,
    TargetContentionError,
    TransportError,
)
from streamer.observability.metrics import Metrics
from streamer.postgres.sqlstate import LOCK_NOT_AVAILABLE
from streamer.target.connection import TargetAddress
from streamer.target.session_counts import DRAINERS_MAX
from streamer.util.backoff import Backoff
from streamer.util.containment import contained, ending

log = structlog.get_logger()

LOCK_SECONDS: Final = 10.0
ERROR_RETRY_SECONDS: Final = 5.0
REPORTED_WAIT: Final = 2
"""From this attempt on, the status shows that the target does not accept changes."""
PLANNED_BYTES: Final = 64 * 1024
"""The number of bytes of held changes that a lane reads to plan its next turn."""
TURN_SECONDS: Final = 2.0
"""How long a lane may keep a connection for which another lane waits."""


class Drainer:
    """Drains held lanes. A pipeline calls `held` for each lane that becomes held; the owner calls
    `run`.
    """

    def __init__(
        self,
        address: TargetAddress,
        planner: Planner,
        metrics: Metrics,
        *,
        conflicts_kept: int = CONFLICTS_KEPT,
    ) -> None:
        self._conflicts_kept = conflicts_kept
        self._address = address
        self._planner = planner
        self._metrics = metrics
        self._slots = asyncio.Semaphore(DRAINERS_MAX)
        self._new: asyncio.Queue[Lane] = asyncio.Queue()
        self._idle: list[QuarantineWriter] = []
        self._tasks: dict[Lane, asyncio.Task[None]] = {}

    def held(self, lane: Lane) -> None:
        """Start to drain *lane*, which has become held."""
        self._new.put_nowait(lane)

    async def forget(self, lanes: set[Lane]) -> None:
        """End the drainers of *lanes*, whose pipeline ends. Returns when no change of *lanes* is in
        flight.
        """
        tasks = [self._tasks.pop(lane) for lane in lanes if lane in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            with ending("draining", tasks):
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

    async def _drain_until_live(self, lane: Lane) -> None:
        """Drain until *lane* is live, or the attempt ends."""
        structlog.contextvars.bind_contextvars(source=lane.owner.source.label)
        if lane.table is not None:
            structlog.contextvars.bind_contextvars(table=lane.table)
        backoff = Backoff()
        has_failed = False
        wait_count = 0
        plans_may_be_stale = True
        while await _may_drain(lane):
            try:
                with contained(f'applying changes of "{lane.name}"'):
                    if plans_may_be_stale:
                        await self._plan_again(lane)
                    async with self._slot_for(lane):
                        await self._drain_turn(lane)
            except (*SOURCE_LOCK_LOST, TransportError):
                raise
            except StreamerError as exc:
                source = lane.owner.source
                self._metrics.count_error(exc, source.database, source.sid)
                plans_may_be_stale = True
                if exc.retry is Retry.TIMED:
                    backoff.log(log, f'changes of "{lane.name}" wait', exc)
                    wait_count += 1
                    if wait_count >= REPORTED_WAIT and _needs_report(exc):
                        await lane.owner.lane_waits(lane, exc.message)
                    await backoff.wait()
                else:
                    has_failed = True
                    lane.add_hold(Hold.ERROR, str(exc))
                    await lane.owner.lane_failed(lane, exc)
                    await until_changed(lane, ERROR_RETRY_SECONDS)
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
            if lane.has_open_transaction:
                await until_changed(lane, None)
                continue
            await lane.owner.lane_drained(lane)
            slow_seconds = lane.slow_until - time.monotonic()
            if slow_seconds <= 0:
                lane.release(Hold.SLOW)
            if lane.go_live():
                del self._tasks[
                    lane
                ]  # at once: the lane may be held again before this task has ended
                return
            if lane.hold & STAYING and not lane.has_backlog:
                await until_changed(lane, slow_seconds if Hold.SLOW in lane.hold else None)

    @contextlib.asynccontextmanager
    async def _slot_for(self, lane: Lane) -> AsyncIterator[None]:
        """Wait for a connection; all held lanes of the process share the connections."""
        lane.queues_since = time.monotonic()
        try:
            await self._slots.acquire()
        finally:
            lane.queues_since = None
        try:
            yield
        finally:
            self._slots.release()

    async def _plan_again(self, lane: Lane) -> None:
        """Plan the next changes of *lane* before the lane needs a connection.

        A plan reads the source, which may be slow. Lanes that plan at the same time share the
        queries.
        """
        if lane.requests:
            return
        try:
            transactions = lane.read_held(PLANNED_BYTES)
        except OpenTransactionDiscarded:
            transactions = []
        lane.front.rewind()
        with _draining(lane):  # a plan may add columns, which a copy must not meet
            await self._planner.renew_plans(transactions)

    async def _drain_turn(self, lane: Lane) -> None:
        """Apply some of the changes that *lane* holds, on a connection of the pool."""
        writer = self._idle.pop() if self._idle else self._new_writer()
        try:
            with _draining(lane):
                await writer.transaction.connect([lane.owner.fence])
                lane.backend_pid = writer.target.backend_pid
                turn = Turn(lane, writer, self._planner, self._metrics)
                until = time.monotonic() + TURN_SECONDS
                while lane.may_drain and time.monotonic() < until and await turn.apply_next():
                    pass
        except BaseException as exc:
            # A StreamerError implies a rollback; an unexpected exception leaves the transaction
            # open.
            if not isinstance(exc, StreamerError) or isinstance(exc, TargetConnectionError):
                writer.disconnect()
            raise
        finally:
            self._idle.append(writer)

    def _new_writer(self) -> QuarantineWriter:
        return QuarantineWriter(
            self._address,
            "streamer drainer",
            self._metrics,
            lock_seconds=LOCK_SECONDS,
            conflicts_kept=self._conflicts_kept,
        )


@contextlib.contextmanager
def _draining(lane: Lane) -> Iterator[None]:
    """Show a drainer at work on *lane* during a block, so that copies and requests wait."""
    lane.is_draining = True
    try:
        yield
    finally:
        lane.is_draining, lane.backend_pid = False, None
        lane.wake()


def _needs_report(error: StreamerError) -> bool:
    """Whether the target is short of a resource, except of a lock: `write_status` names the
    sessions that hold a lock.
    """
    state = getattr(error.__cause__, "sqlstate", None)
    return isinstance(error, TargetContentionError) and state != LOCK_NOT_AVAILABLE


async def _may_drain(lane: Lane) -> bool:
    """Wait until *lane* may be drained; return False once the attempt ends."""
    while not (lane.may_drain or lane.is_ending):
        lane.changed.clear()
        await lane.changed.wait()
    return not lane.is_ending
