"""The pace of the periodic checks of a process with many sources, or with many tables.

Each source has checks of its own: of slot, publications, partitions and sequences. Their intervals
suit a few sources. With a thousand sources, the checks alone would take a core of this machine, and
several cores of the sources' servers. So the interval of an idle source grows with the number of
sources, and all idle sources together cost as much as `FULL_PACE_SOURCES`. A source with changes
keeps the short interval. The stream itself, keepalives and heartbeats keep their pace.

A check reads all tables of its source. So the interval also grows with that number of tables, and
no source costs more than a source with `FULL_PACE_TABLES`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FULL_PACE_SOURCES: Final = 100
"""Up to this number of sources, idle sources have the short intervals, too."""
FULL_PACE_TABLES: Final = 5000
"""Up to this number of tables, a source has the short intervals."""
BUSY_SECONDS: Final = 60.0
"""A source counts as busy for this time after a change."""
PAUSE_FACTOR: Final = 20
"""The minimum pause after a check, as a multiple of the duration of the check."""


def pause_after(seconds: float, interval: float) -> float:
    """Return the pause after a check that took *seconds*, for checks *interval* seconds apart."""
    return max(interval, PAUSE_FACTOR * seconds)


class CheckPace:
    """The pace of one process."""

    def __init__(self) -> None:
        self._sources = 0

    @contextmanager
    def source(self) -> Iterator[None]:
        """Count a source that starts or streams, for a block."""
        self._sources += 1
        try:
            yield
        finally:
            self._sources -= 1

    def seconds(self, interval: float, table_count: int, *, is_busy: bool) -> float:
        """Return the pause before the next check of a source with *table_count* tables, for checks
        that are *interval* seconds apart.
        """
        factor = max(1.0, table_count / FULL_PACE_TABLES)
        return interval * (factor if is_busy else max(factor, self._sources / FULL_PACE_SOURCES))
