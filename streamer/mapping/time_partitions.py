"""`partition_by`: the time partitions of a target table, and the rows that retention keeps.

Intervals are numbered, and begin and end at midnight in UTC; a week begins on Monday. PostgreSQL
compares a bound with a date, a timestamp without time zone, which counts as UTC, or a timestamp
with time zone. A row that no interval partition takes goes to the default partition.

A history has partitions by the ends of its versions. So versions expire with their ends, and open
versions share a partition that stays. Pure.
"""

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Final

from streamer.mapping.expressions import Expression, parse_expression
from streamer.mapping.relation_names import NAME_BYTES_MAX, RelationName
from streamer.mapping.rule_options import Interval, OnExpired
from streamer.postgres.quoting import quote_identifier

INTERVALS_AHEAD: Final = 3
"""The number of partitions that exist for the intervals after the present interval."""
OPEN_VERSIONS: Final = datetime(9999, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""The bounds of the partition that contains the open versions of a history, see `HISTORY_OPEN`."""
_TYPES: Final = re.compile(r"date|timestamp(\(\d\))? with(out)? time zone")
_SUFFIX: Final = "_p{:%Y%m%d}"
_SUFFIX_BYTES: Final = len("_p20240101")
_DAYS_OF_WEEK: Final = 7
_MONTHS: Final = 12


@dataclass(frozen=True, slots=True)
class PartitionBy:
    """The rule's `partition_by`. ``column``: a column of the target. ``keep``: the number of
    intervals before the present interval whose rows stay; None if all rows stay.
    ``is_of_versions``: whether the column is the end of a history's versions. ``since``: a date in
    the oldest interval that needs a partition, if all rows stay.
    """

    column: str
    interval: Interval
    keep: int | None
    on_expired: OnExpired = OnExpired.DROP
    is_of_versions: bool = False
    since: date | None = None

    @property
    def key(self) -> str:
        """The partition key, in the form of ``pg_get_partkeydef``."""
        return f"RANGE ({quote_identifier(self.column)})"

    def number_at(self, moment: datetime) -> int:
        """Return the number of the interval that contains *moment*."""
        return self._number_of(moment.astimezone(UTC).date())

    def _number_of(self, day: date) -> int:
        match self.interval:
            case Interval.DAY:
                return day.toordinal()
            case Interval.WEEK:
                return (day.toordinal() - 1) // _DAYS_OF_WEEK
            case Interval.MONTH:
                return day.year * _MONTHS + day.month - 1
            case Interval.YEAR:
                return day.year

    def start_of(self, number: int) -> datetime:
        """Return the beginning of an interval."""
        match self.interval:
            case Interval.DAY:
                day = date.fromordinal(number)
            case Interval.WEEK:
                day = date.fromordinal(number * _DAYS_OF_WEEK + 1)
            case Interval.MONTH:
                day = date(number // _MONTHS, number % _MONTHS + 1, 1)
            case Interval.YEAR:
                day = date(number, 1, 1)
        return datetime(day.year, day.month, day.day, tzinfo=UTC)

    def kept_since(self, now: datetime) -> datetime | None:
        """Return the beginning of the oldest interval whose rows stay at *now*; None if all rows
        stay.
        """
        return None if self.keep is None else self.start_of(self.number_at(now) - self.keep)

    def bounds(self, now: datetime) -> list[tuple[datetime, datetime]]:
        """Return the bounds of the partitions at *now*, except the default, the oldest first."""
        present = self.number_at(now)
        first = present if self.since is None else min(present, self._number_of(self.since))
        first = first if self.keep is None else present - self.keep
        numbers = range(first, present + INTERVALS_AHEAD + 1)
        bounds = [(self.start_of(number), self.start_of(number + 1)) for number in numbers]
        return [*bounds, OPEN_VERSIONS] if self.is_of_versions else bounds

    def keeps(self, column: str, now: datetime) -> Expression | None:
        """Return the condition for the rows that stay at *now*, over a source's *column*; None if
        all rows stay.

        A row without a time stays.
        """
        since = self.kept_since(now)
        if since is None:
            return None
        older = f"{quote_identifier(column)} < {format_bound(since)}"
        return parse_expression(f"({older}) is not true")


def format_bound(moment: datetime) -> str:
    """Return *moment* as a literal without a type, so that the type of the column applies."""
    return f"'{moment:%Y-%m-%d} 00:00:00+00'"


def is_time(type_name: str) -> bool:
    """Whether a column of the type, by PostgreSQL's name, can have bounds."""
    return _TYPES.fullmatch(type_name) is not None


def interval_partition(table: RelationName, start: datetime) -> RelationName:
    """Return the name of the partition for the interval that begins at *start*."""
    return RelationName(table.namespace, _base(table, _SUFFIX_BYTES) + _SUFFIX.format(start))


def default_partition(table: RelationName) -> RelationName:
    """Return the name of the default partition."""
    return RelationName(table.namespace, _base(table, _SUFFIX_BYTES) + "_default")


def named_beginning(name: str) -> datetime | None:
    """Return the beginning that the *name* of a partition contains, if streamer gives such names.

    The rest of the name does not matter, because the table may have been renamed since.
    """
    try:
        return datetime.strptime(name[-_SUFFIX_BYTES:], "_p%Y%m%d").replace(tzinfo=UTC)
    except ValueError:
        return None


def _base(table: RelationName, room: int) -> str:
    name = table.name
    if len(name.encode()) <= NAME_BYTES_MAX - room:
        return name
    mark = "_" + hashlib.sha256(str(table).encode()).hexdigest()[:8]
    return name.encode()[: NAME_BYTES_MAX - room - len(mark)].decode(errors="ignore") + mark
