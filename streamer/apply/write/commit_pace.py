"""Decides when a worker commits its window. Pure.

Every commit costs statements, a progress update and a flush of the target's WAL. So a worker
commits at most once every ``interval_min``. Otherwise it commits as soon as the preceding commit
ends and changes are queued. Under load a commit takes longer, so the next window grows.

At the rate of a backlog, delay does not matter. A larger window is then cheaper if its relations
have few rows, or if many changes concern the same rows. Such a window stays open for
``interval_max``, or until it stops growing. The worker commits any other window at once, so that
the target works while the process reads.
"""

from dataclasses import dataclass
from typing import Final, Protocol

BACKLOG_CHANGES: Final = 20_000
"""Changes a second that mean a backlog."""
BACKLOG_BYTES: Final = 4 * 1024 * 1024
"""Bytes a second that mean a backlog: rows may be wide."""
MEASURED_SECONDS_MIN: Final = 0.015
"""Minimum time to measure a rate, because a transaction arrives in a burst."""
GROWTH_SECONDS_MIN: Final = 0.002
GROWTH_SECONDS_MAX: Final = 0.02
"""A window that does not grow for this time contains all changes in flight."""
WORTH_CHANGES: Final = 8000
WORTH_BYTES: Final = 1536 * 1024
"""Above this size, a larger window makes a change no cheaper."""
WORTH_CHANGES_EACH: Final = 1000
WORTH_BYTES_EACH: Final = 128 * 1024
"""Increases the size for each relation, because its statements have a fixed cost."""
FOLDED_MIN: Final = 0.25
"""If folding has saved this fraction of the changes, a larger window may save more."""


class WindowFacts(Protocol):
    """The content of a window. ``size``: the bytes of the changes. ``row_count``: the number of
    rows to write after folding.
    """

    @property
    def change_count(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def relation_count(self) -> int: ...
    @property
    def row_count(self) -> int: ...


def gains_by_waiting(window: WindowFacts) -> bool:
    """Return whether the target would have less work if *window* grew further."""
    count = window.relation_count
    is_small = (
        window.change_count < WORTH_CHANGES + count * WORTH_CHANGES_EACH
        and window.size < WORTH_BYTES + count * WORTH_BYTES_EACH
    )
    return is_small or window.row_count < (1 - FOLDED_MIN) * window.change_count


@dataclass(slots=True)
class CommitPace:
    """The commit times of a worker, in seconds of a monotonic clock."""

    interval_min: float
    interval_max: float
    began_at: float = 0.0
    """When the last commit began."""
    commit_seconds: float = 0.0
    """How long the last commit took."""

    def seconds_left(
        self, now: float, opened_at: float, window: WindowFacts, *, is_growing: bool
    ) -> float:
        """Return the time until the next check of a window that is not full; 0 to commit now.

        *opened_at*: time of the first change. *is_growing*: whether the window has grown since the
        last check.
        """
        latest = opened_at + self.interval_max
        if is_growing and _is_backlog(now - opened_at, window.change_count, window.size):
            if not gains_by_waiting(window):
                return 0.0
            # The pause is proportional to a commit's time: a slow machine needs a longer pause.
            pause = min(max(GROWTH_SECONDS_MIN, self.commit_seconds), GROWTH_SECONDS_MAX)
            return max(0.0, min(pause, latest - now))
        return max(0.0, min(self.began_at + self.interval_min, latest) - now)


def _is_backlog(seconds: float, change_count: int, size: int) -> bool:
    seconds = max(seconds, MEASURED_SECONDS_MIN)
    return change_count > BACKLOG_CHANGES * seconds or size > BACKLOG_BYTES * seconds
