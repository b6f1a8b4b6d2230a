"""Finds lanes that make the other lanes of their worker wait in every window. Pure.

A worker writes the lanes of a window one after the other, in one transaction. So all tables and
sources of the worker wait for the lane that takes longest. Two kinds of lanes move away:

- A *hot* lane has many changes, and works at a high rate. It gets a connection of its own
  (`streamer.apply.lanes.hot_lanes`).
- A *slow* lane takes long for few changes, because of a trigger for example. A source may bring
  more than its target can take. So a drainer applies it for a while, and keeps its changes on disk.
"""

import enum
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import Lane

LONG_SECONDS_MIN: Final = 0.01
"""A lane that takes less of a window delays the others little."""
LONG_TIMES: Final = 4
"""How many times as long as other lanes of the worker it takes. On a machine with much other work
all lanes take long, and moving one of them would not help.
"""
WINDOWS: Final = 3
"""In how many windows, one after the other among those for which others wait, it takes long."""
SLOW_SECONDS_MIN: Final = 0.03
SLOW_CHANGES_PER_SECOND: Final = 2000
"""A lane that takes so long at a lower rate is slow."""
COOL_SECONDS: Final = 0.005
"""A lane that takes less of its windows does without a connection of its own."""
ASIDE_SECONDS: Final = 60.0
"""How long a lane stays away at least."""


class Move(enum.Enum):
    """Where a lane is to go, so that others do not wait for it."""

    NONE = enum.auto()
    TO_OWN_CONNECTION = enum.auto()
    TO_DISK = enum.auto()


@dataclass(slots=True)
class _Usual:
    """Moving averages of what a lane takes of a window, and has in it."""

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
        """A window had *change_count* changes of *lane*, and writing them took *seconds*.

        *others_wait*: other lanes have changes in this window or behind it. A lane that is to move
        begins afresh.
        """
        usual = self._usual.setdefault(lane, _Usual(seconds, change_count))
        usual.add(seconds, change_count)
        if not others_wait:
            return Move.NONE
        takes_long = usual.seconds >= max(LONG_SECONDS_MIN, LONG_TIMES * self._others(lane))
        usual.long_windows = usual.long_windows + 1 if takes_long else 0
        if usual.long_windows < WINDOWS:
            return Move.NONE
        del self._usual[lane]
        return Move.TO_DISK if usual.is_slow else Move.TO_OWN_CONNECTION

    def is_cool(self, lane: "Lane") -> bool:
        """Whether *lane* takes so little of its windows that other lanes would not mind it."""
        usual = self._usual.get(lane)
        return usual is not None and usual.seconds < COOL_SECONDS

    def _others(self, lane: "Lane") -> float:
        others = [each.seconds for other, each in self._usual.items() if other is not lane]
        return median_low(others) if others else 0.0
