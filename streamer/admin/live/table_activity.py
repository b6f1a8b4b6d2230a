"""The activity of each table: the time of its last change, and changes per second. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

WINDOW_SECONDS: Final = 30.0
"""A rate covers at least this many seconds, except during the first seconds of the process."""

Counts = Mapping[tuple[str, str], tuple[int, datetime]]
"""The number of changes of each source and table since the process began, and the time of the last
durable change.
"""


@dataclass(frozen=True, slots=True)
class TableActivity:
    """The activity of a table since the process began."""

    last_change_at: datetime
    changes_per_second: float


class ChangeActivity:
    """Holds two earlier samples: once they are `WINDOW_SECONDS` apart, no rate covers less."""

    def __init__(self) -> None:
        self._older: tuple[datetime, dict[tuple[str, str], int]] | None = None
        self._newer: tuple[datetime, dict[tuple[str, str], int]] | None = None

    def remember(self, counts: Counts, now: datetime) -> None:
        """Store the counts of *now*, if the newest stored counts are old enough."""
        if self._newer is None or (now - self._newer[0]).total_seconds() >= WINDOW_SECONDS:
            numbers = {key: number for key, (number, _) in counts.items()}
            self._older, self._newer = self._newer or (now, numbers), (now, numbers)

    def find(self, counts: Counts, source: str, table: str, now: datetime) -> TableActivity | None:
        """Return the activity of a table; None without a change."""
        count = counts.get((source, table))
        if count is None:
            return None
        number, last_change_at = count
        if self._older is None:
            return TableActivity(last_change_at, 0.0)
        at, earlier = self._older
        seconds = max((now - at).total_seconds(), 1.0)
        changes = number - earlier.get((source, table), 0)
        return TableActivity(last_change_at, round(changes / seconds, 1))
