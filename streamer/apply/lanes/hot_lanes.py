"""Dedicated connections for hot lanes: a few workers, called places, each of which serves a lane.

A hot lane (`streamer.apply.lanes.slow_lanes`) moves with all queued changes from its worker to a
place, between two windows. No commit then contains changes of the lane, so the position at the
target is certain. The place applies the changes in the same order, each window with the position in
a single transaction. So a restarted process begins at the target's position, as always.

Hot lanes never wait for each other. Without a free place, other hot lanes stay in their workers.

A lane keeps its place for at least a minute, until its writes are short. A place whose lane has
been idle for a minute is free for a new lane.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.slow_lanes import ASIDE_SECONDS

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import Lane, TransactionQueue

PLACES_MAX: Final = 4
"""Maximum number of places."""
IDLE_SECONDS: Final = 10.0
"""A place without work for this time closes its connection."""


def place_count(workers: int) -> int:
    """Return the number of places: with few workers an operator wants few connections."""
    return min(workers, PLACES_MAX)


@dataclass(slots=True)
class _Placement:
    lane: "Lane"
    home: "TransactionQueue"
    """The shared worker of the lane."""
    since: float
    worked_at: float
    """Time of the place's last commit of changes of the lane."""


class HotLanes:
    """The lanes at places. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._placements: dict[TransactionQueue, _Placement | None] = {}

    def add_place(self, place: "TransactionQueue") -> None:
        """Reserve *place* for hot lanes."""
        self._placements[place] = None

    def is_place(self, queue: "TransactionQueue") -> bool:
        return queue in self._placements

    def reserve(self, lane: "Lane", now: float) -> "TransactionQueue | None":
        """Reserve a place for *lane*; None if no place is free, or *lane* is at a place."""
        if self.is_place(lane.queue):
            return None
        for place, placement in self._placements.items():
            if placement is None or _free_if_idle(placement, now):
                self._placements[place] = _Placement(lane, lane.queue, now, now)
                return place
        return None

    def release(self, lane: "Lane", now: float, *, is_cool: bool) -> "TransactionQueue | None":
        """Return the worker to which *lane* must return after a commit at a place; None to stay.

        *is_cool*: `SlowLanes.is_cool` of *lane*.
        """
        placement = self._placements.get(lane.queue)
        if placement is None or placement.lane is not lane:
            return None
        placement.worked_at = now
        if now - placement.since < ASIDE_SECONDS or not is_cool:
            return None
        self._placements[lane.queue] = None
        return placement.home


def _free_if_idle(placement: _Placement, now: float) -> bool:
    """Return an idle lane to its worker; return whether the place is then free.

    An idle lane has no changes anywhere.
    """
    lane = placement.lane
    if lane.is_ending:
        return True
    if lane.queued_count or now - placement.worked_at < ASIDE_SECONDS:
        return False
    lane.queue = placement.home
    return True
