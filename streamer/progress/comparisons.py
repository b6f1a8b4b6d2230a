"""The rows of streamer.comparison and streamer.compared_range: comparisons that have not ended."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from streamer.lsn import Lsn
from streamer.progress.bookkeeping import Bookkeeping
from streamer.target.connection import transaction

RESUME_HOURS: Final = 24
"""An older comparison begins again: its answer would span too long a time."""

Bound = tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """A range of a comparison. The numbers of rows are None until it is found equal."""

    relation_id: int
    number: int
    lower: Bound
    upper: Bound
    source_rows: int | None = None
    target_rows: int | None = None

    @property
    def is_done(self) -> bool:
        return self.source_rows is not None


@dataclass(frozen=True, slots=True)
class ComparisonRecord:
    """A comparison under way. ``lsns``: where each source was when it began, by source id."""

    comparison_id: int
    began_at: datetime
    lsns: dict[int, Lsn]
    ranges: tuple[RangeRecord, ...]


async def find_comparison(bookkeeping: Bookkeeping, fingerprint: str) -> ComparisonRecord | None:
    """Return the comparison with *fingerprint* that has not ended."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select id, began_at, lsns::text as lsns from streamer.comparison"
            " where fingerprint = $1 and began_at > now() - make_interval(hours => $2)",
            fingerprint,
            RESUME_HOURS,
        )
        if not rows:
            return None
        found = rows[0]
        ranges = await connection.fetch(
            "select relation_id, number, lower, upper, source_rows, target_rows"
            " from streamer.compared_range where comparison_id = $1 order by relation_id, number",
            found["id"],
        )
    return ComparisonRecord(
        found["id"],
        found["began_at"],
        {int(source_id): Lsn.parse(lsn) for source_id, lsn in json.loads(found["lsns"]).items()},
        tuple(
            RangeRecord(
                row["relation_id"],
                row["number"],
                None if row["lower"] is None else tuple(row["lower"]),
                None if row["upper"] is None else tuple(row["upper"]),
                row["source_rows"],
                row["target_rows"],
            )
            for row in ranges
        ),
    )


async def begin_comparison(
    bookkeeping: Bookkeeping,
    fingerprint: str,
    lsns: dict[int, Lsn],
    ranges: Iterable[RangeRecord],
) -> ComparisonRecord:
    """Store a new comparison in place of one with the same *fingerprint*; remove old ones."""
    planned = tuple(ranges)
    async with bookkeeping.connection() as connection, transaction(connection):
        await connection.execute(
            "delete from streamer.comparison"
            " where fingerprint = $1 or began_at < now() - make_interval(hours => $2)",
            fingerprint,
            RESUME_HOURS,
        )
        rows = await connection.fetch(
            "insert into streamer.comparison (fingerprint, lsns) values ($1, $2::text::jsonb)"
            " returning id, began_at",
            fingerprint,
            json.dumps({source_id: str(lsn) for source_id, lsn in lsns.items()}),
        )
        comparison_id, began_at = rows[0]["id"], rows[0]["began_at"]
        await connection.execute(
            "insert into streamer.compared_range"
            " (comparison_id, relation_id, number, lower, upper)"
            " select $1, (r ->> 0)::int8, (r ->> 1)::int4,"
            " case when pg_catalog.jsonb_typeof(r -> 2) = 'array' then"
            "  array(select pg_catalog.jsonb_array_elements_text(r -> 2)) end,"
            " case when pg_catalog.jsonb_typeof(r -> 3) = 'array' then"
            "  array(select pg_catalog.jsonb_array_elements_text(r -> 3)) end"
            " from pg_catalog.jsonb_array_elements($2::text::jsonb) r",
            comparison_id,
            json.dumps([[r.relation_id, r.number, r.lower, r.upper] for r in planned]),
        )
    return ComparisonRecord(comparison_id, began_at, lsns, planned)


async def count_ranges(bookkeeping: Bookkeeping, comparison_id: int) -> tuple[int, int]:
    """Return how many ranges of a comparison were found equal, and how many there are."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select count(source_rows) as done, count(*) as ranges"
            " from streamer.compared_range where comparison_id = $1",
            comparison_id,
        )
    return rows[0]["done"], rows[0]["ranges"]


async def end_comparison(bookkeeping: Bookkeeping, comparison_id: int) -> None:
    """Remove a comparison that has ended."""
    async with bookkeeping.connection() as connection:
        await connection.execute("delete from streamer.comparison where id = $1", comparison_id)
