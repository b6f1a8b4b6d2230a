"""Detects lanes that delay their worker in every window. Pure.

A worker writes the lanes of a window sequentially, in one transaction. So all tables and sources of
the worker wait for the slowest lane. Two kinds of lanes leave the worker:

- A *hot* lane has many changes, and works at a high rate. A dedicated connection serves the lane
  (`streamer.apply.lanes.hot_lanes`).
- A *slow* lane needs much time for few changes, because of a trigger for example. A source may
  send changes faster than the target applies changes of the lane. So a drainer applies the lane
  for a while, and keeps the changes on disk.
"""

import enum
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import Lane

LONG_SECONDS_MIN: Final = 0.01
"""A lane with shorter writes hardly delays its worker."""
LONG_TIMES: Final = 4
"""The write of a lane is long if it takes this multiple of the time of the worker's median lane.

On a busy machine all writes are long, and moving a lane would not help.
"""
WINDOWS: Final = 3
"""A lane leaves its worker after this many consecutive long writes that delay other lanes."""
SLOW_SECONDS_MIN: Final = 0.03
SLOW_CHANGES_PER_SECOND: Final = 2000
"""A lane with longer writes and a lower rate is slow."""
COOL_SECONDS: Final = 0.005
"""A lane with shorter writes needs no dedicated connection."""
ASIDE_SECONDS: Final = 60.0
"""Minimum time of a lane outside its worker."""


class Move(enum.Enum):
    """The destination of a lane that leaves its worker."""

    NONE = enum.auto()
    TO_OWN_CONNECTION = enum.auto()
    TO_DISK = enum.auto()


@dataclass(slots=True)
class _Usual:
    """Moving averages of a lane's write time and changes in a window."""

    seconds: float
    change_count: float
    long_windows: int = 0

    def add(self, seconds: float, change_count: int) -> None:
        self.seconds = (self.seconds + seconds) / 2
        self.change_count = (self.change_count + change_count) / 2

    @property
    def is_slow(self) -> bool:
        has_few = self.change_count < SLOW_CHANGES_PER_SECOND * self.seconds
        return has_few and self.seconds >= SLOW_SECONDS_MIN


class SlowLanes:
    """The write times of one worker's lanes."""

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[Lane, _Usual] = WeakKeyDictionary()

    def wrote(self, lane: "Lane", seconds: float, change_count: int, *, others_wait: bool) -> Move:
        """Record that a worker wrote *change_count* changes of *lane* in *seconds*; return the move
        of the lane.

        *others_wait*: other lanes have changes in this window or after it. A move resets the
        averages of the lane.
        """
        usual = self._usual.setdefault(lane, _Usual(seconds, change_count))
        usual.add(seconds, change_count)
        if not others_wait:
            return Move.NONE
        takes_long = usual.seconds >= max(LONG_SECONDS_MIN, LONG_TIMES * self._other_lanes(lane))
        usual.long_windows = usual.long_windows + 1 if takes_long else 0
        if usual.long_windows < WINDOWS:
            return Move.NONE
        del self._usual[lane]
        return Move.TO_DISK if usual.is_slow else Move.TO_OWN_CONNECTION

    def is_cool(self, lane: "Lane") -> bool:
        """Whether the writes of *lane* are too short to delay a worker."""
        usual = self._usual.get(lane)
        return usual is not None and usual.seconds < COOL_SECONDS

    def _other_lanes(self, lane: "Lane") -> float:
        times = [usual.seconds for owner, usual in self._usual.items() if owner is not lane]
        return median_low(times) if times else 0.0
