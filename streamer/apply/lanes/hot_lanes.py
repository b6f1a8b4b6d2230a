"""Hot workers: a few workers with their own connections, each of which serves a hot lane.

A hot lane (`streamer.apply.lanes.slow_lanes`) moves with all queued changes from its worker to a
hot worker, between two windows. At that moment no running commit contains changes of the lane, so
the position at the target is certain. The hot worker applies the changes in the same order, each
window with the position in a single transaction. So a restarted process begins at the target's
position, as always.

Hot lanes never wait for each other. Without a free hot worker, further hot lanes stay in their
workers.

A lane keeps its hot worker for at least a minute, and then until the writes of the lane are short.
A hot worker whose lane has been idle for a minute is free for a new lane.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.slow_lanes import ASIDE_SECONDS

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import Lane, TransactionQueue

IDLE_SECONDS: Final = 10.0
"""A hot worker without work for this time closes its connection."""


@dataclass(slots=True)
class _Placement:
    lane: "Lane"
    shared_worker: "TransactionQueue"
    since: float
    worked_at: float
    """Time of the last commit of changes of the lane."""


class HotLanes:
    """The lanes of the hot workers. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._placements: dict[TransactionQueue, _Placement | None] = {}

    def add_worker(self, worker: "TransactionQueue") -> None:
        """Reserve *worker* for hot lanes."""
        self._placements[worker] = None

    def is_hot_worker(self, queue: "TransactionQueue") -> bool:
        return queue in self._placements

    def reserve(self, lane: "Lane", now: float) -> "TransactionQueue | None":
        """Reserve a hot worker for *lane*; None without a free worker, and for a hot lane."""
        if self.is_hot_worker(lane.queue):
            return None
        for worker, placement in self._placements.items():
            if placement is None or _free_if_idle(placement, now):
                self._placements[worker] = _Placement(lane, lane.queue, now, now)
                return worker
        return None

    def release(self, lane: "Lane", now: float, *, is_cool: bool) -> "TransactionQueue | None":
        """Return the worker to which *lane* must return after a commit; None to stay.

        *is_cool*: `SlowLanes.is_cool` of *lane*.
        """
        placement = self._placements.get(lane.queue)
        if placement is None or placement.lane is not lane:
            return None
        placement.worked_at = now
        if now - placement.since < ASIDE_SECONDS or not is_cool:
            return None
        self._placements[lane.queue] = None
        return placement.shared_worker


def _free_if_idle(placement: _Placement, now: float) -> bool:
    """Return an idle lane to its shared worker; return whether the hot worker is then free.

    An idle lane has no queued or unfinished changes, so the move keeps the order of changes.
    """
    lane = placement.lane
    if lane.is_ending:
        return True
    if lane.queued_count or now - placement.worked_at < ASIDE_SECONDS:
        return False
    lane.queue = placement.shared_worker
    return True
