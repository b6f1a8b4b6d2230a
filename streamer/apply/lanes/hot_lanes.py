"""Connections of their own for hot lanes: a few workers, each of which serves one lane.

A hot lane (`streamer.apply.lanes.slow_lanes`) leaves its worker with all changes that wait there,
between two windows. Then nothing of the lane is in a commit, and its position in the target is
known. The other worker applies its changes in the same way, in the same order, each window with the
position in one transaction. So a process that dies at any point begins where the target is, as
always.

A place serves one lane, so hot lanes never wait for each other. The target never has fewer sessions
at work than without places. Without a free place, further hot lanes stay in their workers.

A lane keeps its place for a minute. It then goes home once it no longer takes long. A place whose
lane has been idle for that time is free for another one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.slow_lanes import ASIDE_SECONDS

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import Lane, ShareQueue

PLACES_MAX: Final = 4
"""How many lanes have a connection of their own at most. A place connects while it has work."""
IDLE_SECONDS: Final = 10.0
"""After how long without work a place closes its connection."""


def place_count(workers: int) -> int:
    """Return how many lanes may have connections of their own beside *workers* of them.

    With few workers an operator wants few connections.
    """
    return min(workers, PLACES_MAX)


@dataclass(slots=True)
class _Guest:
    lane: "Lane"
    home: "ShareQueue"
    """The worker that serves the lane otherwise."""
    since: float
    worked_at: float
    """When the place last committed changes of the lane."""


class HotLanes:
    """The lanes at their places. Times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._guests: dict[ShareQueue, _Guest | None] = {}

    def add_place(self, place: "ShareQueue") -> None:
        """Let *place* serve hot lanes, and nothing else."""
        self._guests[place] = None

    def is_place(self, queue: "ShareQueue") -> bool:
        return queue in self._guests

    def take(self, lane: "Lane", now: float) -> "ShareQueue | None":
        """Return a place, where *lane* is to move now; None if all are taken, or it is at one."""
        if self.is_place(lane.queue):
            return None
        for place, guest in self._guests.items():
            if guest is None or _has_left(guest, now):
                self._guests[place] = _Guest(lane, lane.queue, now, now)
                return place
        return None

    def leave(self, lane: "Lane", now: float, *, is_cool: bool) -> "ShareQueue | None":
        """Return the worker to which *lane* is to go home now, if its time at a place is over.

        The place has just committed changes of it. *is_cool*: other lanes would not mind it.
        """
        guest = self._guests.get(lane.queue)
        if guest is None or guest.lane is not lane:
            return None
        guest.worked_at = now
        if now - guest.since < ASIDE_SECONDS or not is_cool:
            return None
        self._guests[lane.queue] = None
        return guest.home


def _has_left(guest: _Guest, now: float) -> bool:
    """Whether the place of *guest* is free, because its lane has ended or gone home.

    A lane that has been idle for long goes home: no worker has anything of it.
    """
    lane = guest.lane
    if lane.is_ending:
        return True
    if lane.queued_count or now - guest.worked_at < ASIDE_SECONDS:
        return False
    lane.queue = guest.home
    return True
