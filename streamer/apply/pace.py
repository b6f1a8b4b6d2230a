"""When a worker commits its window. Pure.

Every commit has a fixed price: statements, progress, a flush of the target's WAL. So a worker does
not commit more often than every ``interval_min``. Otherwise it commits as soon as the commit before
has ended and something is there. Under load a commit takes longer, and the next window grows.

If changes arrive so fast that they must be a backlog, delay does not matter. Larger windows are
then cheaper, because more changes of one row become one. Such a window stays open for
``interval_max``, or until it stops growing.
"""

import math
from dataclasses import dataclass
from typing import Final

BACKLOG_CHANGES: Final = 20_000
"""Changes a second that mean a backlog."""
BACKLOG_BYTES: Final = 4 * 1024 * 1024
"""Bytes a second that mean a backlog: rows may be wide."""
MEASURED_SECONDS_MIN: Final = 0.015
"""Changes of a shorter time do not make a rate: a transaction arrives in one burst."""
GROWTH_SECONDS_MIN: Final = 0.002
"""A window that does not grow for this long has everything that was on its way."""


@dataclass(slots=True)
class CommitPace:
    """When one worker commits. Times are those of one monotonic clock, in seconds."""

    interval_min: float
    interval_max: float
    began_at: float = -math.inf
    """When the last commit began."""
    ended_at: float = -math.inf

    def seconds_left(
        self, now: float, opened_at: float, change_count: int, size: int, *, is_growing: bool
    ) -> float:
        """Return how long a window that is not full waits before it is looked at again; 0 if it is
        to be committed.

        *opened_at*: when the window got its first change. *is_growing*: it has grown since it was
        looked at last.
        """
        latest = opened_at + self.interval_max
        if is_growing and _is_backlog(now - opened_at, change_count, size):
            # A commit's time again: the target has nothing to do meanwhile, but fewer statements.
            pause = max(GROWTH_SECONDS_MIN, self.ended_at - self.began_at)
            return max(0.0, min(pause, latest - now))
        return max(0.0, min(self.began_at + self.interval_min, latest) - now)


def _is_backlog(seconds: float, change_count: int, size: int) -> bool:
    seconds = max(seconds, MEASURED_SECONDS_MIN)
    return change_count > BACKLOG_CHANGES * seconds or size > BACKLOG_BYTES * seconds
