"""The sequences that follow those of a source, in the bookkeeping: for ``streamer status``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamer.progress.bookkeeping import Bookkeeping
from streamer.remedies import Remedy
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
    remedy: Remedy | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "source_value": self.source_value,
            "target_value": self.target_value,
            "error": self.error,
            "remedy": None if self.remedy is None else self.remedy.to_json(),
        }


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
            " (source_id, source, target, source_value, target_value, error, error_remedy)"
            " select $1, a, b, c, d, e, f::jsonb from unnest($2::text[], $3::text[], $4::int8[],"
            " $5::int8[], $6::text[], $7::text[]) as n (a, b, c, d, e, f)",
            source_id,
            [record.source for record in records],
            [record.target for record in records],
            [record.source_value for record in records],
            [record.target_value for record in records],
            [record.error for record in records],
            [record.remedy and json.dumps(record.remedy.to_json()) for record in records],
        )


async def read_sequences(bookkeeping: Bookkeeping) -> dict[int, list[SequenceRecord]]:
    """Read the sequences of every source, by the id of the source. Raises TargetError."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select source_id, source, target, source_value, target_value, error, error_remedy"
            " from streamer.sequence order by source_id, source"
        )
    found: dict[int, list[SequenceRecord]] = {}
    for row in rows:
        fields = dict(row)
        remedy = fields.pop("error_remedy")
        fields["remedy"] = None if remedy is None else Remedy.from_json(json.loads(remedy))
        found.setdefault(fields.pop("source_id"), []).append(SequenceRecord(**fields))
    return found
