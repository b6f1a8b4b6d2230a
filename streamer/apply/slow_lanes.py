"""Finds lanes that make the other lanes of their worker wait in every window. Pure.

A worker writes the lanes of a window one after the other, in one transaction. A trigger can make
each batch of a table slow. Then all tables and sources of the worker wait for it every time. Such a
lane moves aside for a while: a drainer applies it on another connection.

A lane with many changes takes its time, too, but works at a high rate: it stays.
"""

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from streamer.apply.lane import Lane

SLOW_SECONDS_MIN: Final = 0.03
"""A lane that takes less of a window delays the others little."""
SLOW_TIMES: Final = 4
"""How many times as long as other lanes of the worker a slow lane takes. On a machine with much
other work all lanes take long, and moving one of them would not help.
"""
CHANGES_PER_SECOND_MAX: Final = 2000
"""A lane that works faster than this is not slow, but busy."""
WINDOWS: Final = 3
"""In how many windows, one after the other, a lane has to be slow."""
ASIDE_SECONDS: Final = 60.0
"""How long a lane stays aside before the worker tries it again."""


@dataclass(slots=True)
class _Usual:
    seconds: float
    """What the lane takes of a window, as a moving average."""
    slow_windows: int = 0


class SlowLanes:
    """The write times of one worker's lanes."""

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[Lane, _Usual] = WeakKeyDictionary()

    def wrote(self, lane: "Lane", seconds: float, change_count: int, *, others_wait: bool) -> bool:
        """A window had *change_count* changes of *lane*, and writing them took *seconds*.

        *others_wait*: other lanes have changes in this window or behind it. Return whether the lane
        is to move aside; it then begins afresh.
        """
        usual = self._usual.setdefault(lane, _Usual(seconds))
        usual.seconds = (usual.seconds + seconds) / 2
        is_slow = (
            others_wait
            and usual.seconds >= SLOW_SECONDS_MIN
            and change_count < CHANGES_PER_SECOND_MAX * seconds
            and usual.seconds >= SLOW_TIMES * self._others(lane)
        )
        usual.slow_windows = usual.slow_windows + 1 if is_slow else 0
        if usual.slow_windows < WINDOWS:
            return False
        del self._usual[lane]
        return True

    def _others(self, lane: "Lane") -> float:
        others = [each.seconds for other, each in self._usual.items() if other is not lane]
        return median(others) if others else 0.0
