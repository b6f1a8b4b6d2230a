"""The sequences that follow those of a source, in the bookkeeping: for ``streamer status``."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamer.progress.bookkeeping import Bookkeeping
from streamer.target.connection import transaction


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """A sequence of a source and its counterpart.

    The values are the last ones that each had given when streamer looked; None before the first
    use.
    """

    source: str
    target: str
    source_value: int | None
    target_value: int | None
    error: str | None = None


async def store_sequences(
    bookkeeping: Bookkeeping, source_id: int, records: Sequence[SequenceRecord]
) -> None:
    """Store *records* as all sequences that follow those of a source. Raises TargetError."""
    async with bookkeeping.connection() as connection, transaction(connection):
        await connection.execute("delete from streamer.sequence where source_id = $1", source_id)
        if not records:
            return
        await connection.execute(
            "insert into streamer.sequence"
            " (source_id, source, target, source_value, target_value, error)"
            " select $1, * from unnest($2::text[], $3::text[], $4::int8[], $5::int8[], $6::text[])",
            source_id,
            [record.source for record in records],
            [record.target for record in records],
            [record.source_value for record in records],
            [record.target_value for record in records],
            [record.error for record in records],
        )


async def read_sequences(bookkeeping: Bookkeeping) -> dict[int, list[SequenceRecord]]:
    """Read the sequences of every source, by the id of the source. Raises TargetError."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select source_id, source, target, source_value, target_value, error"
            " from streamer.sequence order by source_id, source"
        )
    found: dict[int, list[SequenceRecord]] = {}
    for row in rows:
        fields = dict(row)
        found.setdefault(fields.pop("source_id"), []).append(SequenceRecord(**fields))
    return found
