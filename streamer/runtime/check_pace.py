"""The pace of the periodic checks of a process with many sources.

Each source has checks of its own: of slot, publications, partitions and sequences. Their intervals
suit a few sources. With a thousand sources, the checks alone would take a core of this machine, and
several cores of the sources' servers. So the interval of an idle source grows with the number of
sources, and all idle sources together cost as much as `FULL_PACE_SOURCES`. A source with changes
keeps the short interval. The stream itself, keepalives and heartbeats keep their pace.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FULL_PACE_SOURCES: Final = 100
"""Up to this number of sources, idle sources have the short intervals, too."""
BUSY_SECONDS: Final = 60.0
"""A source counts as busy for this time after a change."""


class CheckPace:
    """The pace of one process."""

    def __init__(self) -> None:
        self._sources = 0

    @contextmanager
    def source(self) -> Iterator[None]:
        """Count a streaming source for a block."""
        self._sources += 1
        try:
            yield
        finally:
            self._sources -= 1

    def seconds(self, interval: float, *, is_busy: bool) -> float:
        """Return the pause before the next check, for checks that are *interval* seconds apart."""
        return interval if is_busy else interval * max(1.0, self._sources / FULL_PACE_SOURCES)
