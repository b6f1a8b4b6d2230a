"""The numbers of sessions that parts of a process open at the target at the same time. Pure."""

from typing import Final

DRAINERS_MAX: Final = 4
"""Sessions for held tables."""
HOT_WORKERS_MAX: Final = 4
"""Maximum number of hot workers."""
BOOKKEEPING_MAX: Final = 4
"""Sessions for the bookkeeping of many sources."""
FINISHING_MAX: Final = 4
"""Copies that finish at the same time. Each may build an index, for which PostgreSQL needs
memory.
"""


def hot_worker_count(workers: int) -> int:
    """Return the number of hot workers, at most the number of shared *workers*.

    An operator who configures few workers wants few connections.
    """
    return min(workers, HOT_WORKERS_MAX)
