"""The last errors of sources and tables, for the page. Pure.

Each retry of an attempt can report its error again. Equal errors are one entry, with their number
and the time of the last.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

ERRORS_MAX: Final = 500


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
        """Whether *error* has the same place and text."""
        return (self.source, self.table, self.text) == (error.source, error.table, error.text)


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
