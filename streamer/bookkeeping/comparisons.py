"""The rows of streamer.comparison and streamer.compared_range: comparisons that have not ended."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import (
    ELSEWHERE,
    BookkeepingTable,
    Codec,
    Executor,
    fields_of,
)
from streamer.util.lsn import Lsn

RESUME_HOURS: Final = 24
"""An older comparison begins again, because its result would span too long a time."""

Bound = tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """A range of a comparison. The numbers of rows are None until the range is found equal.

    ``cuts``: see `streamer.compare.readings.Unit`. A comparison that continues has none.
    """

    relation_id: int
    number: int
    lower: Bound
    upper: Bound
    source_rows: int | None = None
    target_rows: int | None = None
    cuts: Annotated[tuple[tuple[str, ...], ...], ELSEWHERE] = ()

    @property
    def is_done(self) -> bool:
        return self.source_rows is not None


def _lsns(stored: str) -> dict[int, Lsn]:
    return {int(source_id): Lsn.parse(lsn) for source_id, lsn in json.loads(stored).items()}


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """A comparison in progress. ``lsns``: the position of each source at the start, by source
    id.
    """

    comparison_id: Annotated[int, Codec("c.id")]
    began_at: datetime
    lsns: Annotated[dict[int, Lsn], Codec(decode=_lsns)]
    ranges: Annotated[tuple[RangeRecord, ...], ELSEWHERE] = ()


COMPARISONS: Final = BookkeepingTable("comparison", "c", ComparisonRecord)
RANGES: Final = BookkeepingTable("compared_range", "r", RangeRecord)


async def find_comparison(bookkeeping: Bookkeeping, fingerprint: str) -> ComparisonRecord | None:
    """Return the comparison with *fingerprint* that has not ended."""
    async with bookkeeping.connection() as connection:
        record = await COMPARISONS.find(
            connection,
            "where fingerprint = $1 and began_at > now() - make_interval(hours => $2)",
            fingerprint,
            RESUME_HOURS,
        )
        if record is None:
            return None
        ranges = await RANGES.read(
            connection,
            "where comparison_id = $1 order by relation_id, number",
            record.comparison_id,
        )
    return replace(record, ranges=tuple(ranges))


async def begin_comparison(
    bookkeeping: Bookkeeping,
    fingerprint: str,
    lsns: dict[int, Lsn],
    ranges: Iterable[RangeRecord],
) -> ComparisonRecord:
    """Store a new comparison; remove old comparisons, and a former comparison with
    *fingerprint*.
    """
    planned = tuple(ranges)
    stored = {"fingerprint": fingerprint, "lsns": {key: str(lsn) for key, lsn in lsns.items()}}
    async with bookkeeping.transaction() as connection:
        await COMPARISONS.delete(
            connection,
            "where fingerprint = $1 or began_at < now() - make_interval(hours => $2)",
            fingerprint,
            RESUME_HOURS,
        )
        await COMPARISONS.insert(connection, [stored])
        (comparison,) = await COMPARISONS.read(connection, "where fingerprint = $1", fingerprint)
        key = {"comparison_id": comparison.comparison_id}
        await RANGES.insert(
            connection, [key | fields_of(planned_range, "cuts") for planned_range in planned]
        )
    return replace(comparison, ranges=planned)


async def count_ranges(session: Executor, comparison_id: int) -> tuple[int, int]:
    """Return the number of ranges that were found equal, and the number of all ranges."""
    (row,) = await session.fetch(
        "select count(source_rows) as done, count(*) as ranges"
        " from streamer.compared_range where comparison_id = $1",
        comparison_id,
    )
    return row["done"], row["ranges"]


async def end_comparison(session: Executor, comparison_id: int) -> None:
    """Remove a comparison that ended."""
    await COMPARISONS.delete(session, "where id = $1", comparison_id)
