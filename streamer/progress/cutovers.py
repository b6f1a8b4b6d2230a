"""The rows of streamer.cutover: how far the cut-over of a source is.

A step is stored before its work begins. So a command that was killed leaves the truth behind, and
the next one does that step again.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from streamer.lsn import Lsn
from streamer.progress.bookkeeping import Bookkeeping


@dataclass(frozen=True, slots=True)
class CutoverRecord:
    """A row of streamer.cutover. ``details``: facts for undoing it, and the options of its start.

    ``marker_lsn``: the end of the source's WAL once nothing could write there any more.
    """

    source_id: int
    step: str
    details: dict[str, Any]
    marker_lsn: Lsn | None
    is_finished: bool


_READ_SQL: Final = """
select source_id, step, details, marker_lsn::text as marker_lsn,
       finished_at is not null as is_finished
from streamer.cutover where source_id = $1
"""
_STORE_SQL: Final = """
insert into streamer.cutover (source_id, step, details) values ($1, $2, $3::text::jsonb)
on conflict (source_id) do update set step = excluded.step, details = excluded.details
"""


async def read_cutover(bookkeeping: Bookkeeping, source_id: int) -> CutoverRecord | None:
    """Return the cut-over of a source, unless there is none."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(_READ_SQL, source_id)
    if not rows:
        return None
    fields = dict(rows[0])
    fields["details"] = json.loads(fields["details"])
    fields["marker_lsn"] = fields["marker_lsn"] and Lsn.parse(fields["marker_lsn"])
    return CutoverRecord(**fields)


async def store_step(
    bookkeeping: Bookkeeping, source_id: int, step: str, details: dict[str, Any]
) -> None:
    """Store the step whose work is about to begin, and the facts for undoing it."""
    async with bookkeeping.connection() as connection:
        await connection.execute(_STORE_SQL, source_id, step, json.dumps(details))


async def store_marker(bookkeeping: Bookkeeping, source_id: int, lsn: Lsn) -> None:
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.cutover set marker_lsn = $2::text::pg_lsn where source_id = $1",
            source_id,
            str(lsn),
        )


async def finish_cutover(bookkeeping: Bookkeeping, source_id: int) -> None:
    """Record that the target may be written to: from here on there is no way back."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.cutover set finished_at = pg_catalog.clock_timestamp()"
            " where source_id = $1",
            source_id,
        )


async def forget_cutover(bookkeeping: Bookkeeping, source_id: int) -> None:
    async with bookkeeping.connection() as connection:
        await connection.execute("delete from streamer.cutover where source_id = $1", source_id)


async def is_cutting_over(bookkeeping: Bookkeeping, source_id: int) -> bool:
    """Return whether sequences of the target have their exact values, or are about to get them."""
    async with bookkeeping.connection() as connection:
        return bool(
            await connection.fetch_value(
                "select exists (select from streamer.cutover where source_id = $1)", source_id
            )
        )
