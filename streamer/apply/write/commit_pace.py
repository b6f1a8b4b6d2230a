"""When a worker commits its window. Pure.

Every commit has a fixed price: statements, progress, a flush of the target's WAL. So a worker does
not commit more often than every ``interval_min``. Otherwise it commits as soon as the commit before
has ended and something is there. Under load a commit takes longer, and the next window grows.

If changes arrive so fast that they must be a backlog, delay does not matter. A larger window is
then cheaper while its relations have few rows each, or while many of its changes fall on the same
rows. Such a window stays open for ``interval_max``, or until it stops growing. Another one is
committed at once, so that the target works while the process reads.
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
GROWTH_SECONDS_MAX: Final = 0.02
"""A window that does not grow for this long has everything that was on its way."""
WORTH_CHANGES: Final = 8000
WORTH_BYTES: Final = 1536 * 1024
"""A window of one relation that is worth a commit of its own."""
WORTH_CHANGES_EACH: Final = 1000
WORTH_BYTES_EACH: Final = 128 * 1024
"""So much more a window needs for every relation, whose statements have a fixed price."""
FOLDED_MIN: Final = 0.25
"""From this part of the changes on that folding has saved, more may be saved in a larger window."""


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """What a window holds. ``size``: bytes. ``row_count``: rows left after folding."""

    change_count: int
    size: int
    relation_count: int
    row_count: int

    @property
    def gains_by_waiting(self) -> bool:
        """Whether the target has less work if the window grows further."""
        others = self.relation_count
        is_small = (
            self.change_count < WORTH_CHANGES + others * WORTH_CHANGES_EACH
            and self.size < WORTH_BYTES + others * WORTH_BYTES_EACH
        )
        return is_small or self.row_count < (1 - FOLDED_MIN) * self.change_count


@dataclass(slots=True)
class CommitPace:
    """When one worker commits. Times are those of one monotonic clock, in seconds."""

    interval_min: float
    interval_max: float
    began_at: float = -math.inf
    """When the last commit began."""
    ended_at: float = -math.inf

    def seconds_left(
        self, now: float, opened_at: float, window: WindowFacts, *, is_growing: bool
    ) -> float:
        """Return how long a window that is not full waits before it is looked at again; 0 if it is
        to be committed.

        *opened_at*: when the window got its first change. *is_growing*: it has grown since it was
        looked at last.
        """
        latest = opened_at + self.interval_max
        if is_growing and _is_backlog(now - opened_at, window.change_count, window.size):
            if not window.gains_by_waiting:
                return 0.0
            # In proportion to a commit's time, which is longer where all processes are slow.
            pause = min(max(GROWTH_SECONDS_MIN, self.ended_at - self.began_at), GROWTH_SECONDS_MAX)
            return max(0.0, min(pause, latest - now))
        return max(0.0, min(self.began_at + self.interval_min, latest) - now)


def _is_backlog(seconds: float, change_count: int, size: int) -> bool:
    seconds = max(seconds, MEASURED_SECONDS_MIN)
    return change_count > BACKLOG_CHANGES * seconds or size > BACKLOG_BYTES * seconds
