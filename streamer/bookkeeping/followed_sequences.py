"""The sequences that follow sequences of a source, for ``streamer status``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor, fields_of
from streamer.errors.remedies import Remedy


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """A sequence of a source and its counterpart.

    The values are the last values that each sequence had returned at the last check; None before
    the first use.
    """

    source: str
    target: str
    source_value: int | None
    target_value: int | None
    error: str | None = None
    remedy: Annotated[Remedy | None, Codec("q.error_remedy")] = None
    source_id: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "source_value": self.source_value,
            "target_value": self.target_value,
            "error": self.error,
            "remedy": None if self.remedy is None else self.remedy.to_json(),
        }


SEQUENCES: Final = BookkeepingTable("sequence", "q", SequenceRecord)


async def store_sequences(
    bookkeeping: Bookkeeping, source_id: int, records: Sequence[SequenceRecord]
) -> None:
    """Store *records* as all sequences that follow sequences of a source. Raises TargetError."""
    async with bookkeeping.transaction() as connection:
        await SEQUENCES.delete(connection, "where source_id = $1", source_id)
        await SEQUENCES.insert(
            connection,
            (
                fields_of(record, "remedy")
                | {"source_id": source_id, "error_remedy": record.remedy}
                for record in records
            ),
        )


async def read_sequences(session: Executor) -> dict[int, list[SequenceRecord]]:
    """Read the sequences of every source, by the id of the source. Raises TargetError."""
    by_source: dict[int, list[SequenceRecord]] = {}
    for record in await SEQUENCES.read(session, "order by source_id, source"):
        by_source.setdefault(record.source_id, []).append(record)
    return by_source
