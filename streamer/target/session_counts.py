"""The numbers of sessions that parts of a process open at the target at the same time. Pure."""

from typing import Final

DRAINERS_MAX: Final = 4
"""Sessions for held tables."""
FINISHING_MAX: Final = 4
"""Copies that finish at the same time. Each may build an index, for which PostgreSQL needs
memory.
"""
