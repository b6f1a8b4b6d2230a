"""The last errors of sources and tables, for the page. Pure.

Each retry of an attempt can report its error again, with another position, age or pid. Errors that
differ only in such figures are one entry, with their number, and the text and time of the last.
"""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Final

ERRORS_MAX: Final = 500
_FIGURES: Final = re.compile(
    r"\b[0-9A-F]+/[0-9A-F]+\b|\b(?:transaction|pid|attempt) \d+|\b\d+(?:\.\d+)? (?:ms|s|min|h|d)\b"
)
"""Figures that differ between the occurrences of an error: positions, transactions, pids, ages."""


@dataclass(frozen=True, slots=True)
class PastError:
    """An error of a source, or of a table of the source.

    ``at``: the time of its last occurrence; ``count``: the number of occurrences.
    """

    at: datetime
    source: str
    table: str | None
    text: str
    count: int = 1

    def equals(self, error: "PastError") -> bool:
        """Whether *error* has this source, table and text, apart from figures such as positions."""
        place, other = (self.source, self.table), (error.source, error.table)
        return place == other and _words(self.text) == _words(error.text)


@lru_cache(maxsize=2 * ERRORS_MAX)
def _words(text: str) -> str:
    return _FIGURES.sub("#", text)


class PastErrors:
    """The errors, the oldest first, at most `ERRORS_MAX`."""

    def __init__(self) -> None:
        self._errors: deque[PastError] = deque(maxlen=ERRORS_MAX)

    def add(self, error: PastError) -> None:
        """Add an occurrence of *error*."""
        for earlier in self._errors:
            if earlier.equals(error):
                self._errors.remove(earlier)
                error = replace(error, count=earlier.count + 1)
                break
        self._errors.append(error)

    def of(self, source: str, table: str | None = None) -> Iterable[PastError]:
        """Yield the last errors of a source, or of its table *table*, the newest first."""
        for error in reversed(self._errors):
            if error.source == source and table in (None, error.table):
                yield error
