"""How many sessions parts of a process open at the target at the same time. Pure."""

from typing import Final

DRAINERS_MAX: Final = 4
"""Sessions for held tables."""
FINISHING_MAX: Final = 4
"""Copies that end. Each may build an index, with the memory that PostgreSQL takes for that."""
