"""The rows of streamer.held: for each table, the changes that wait in the process of its source."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Executor, fields_of
from streamer.util.lsn import Lsn


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A row of streamer.held: changes of a relation that wait in its process.

    The source must keep WAL from ``behind_lsn`` on for these changes; None if they are part of a
    transaction that has not ended.
    """

    relation_id: int
    changes: int
    bytes: int
    behind_lsn: Lsn | None


HELD: Final = BookkeepingTable("held", "h", HeldRecord)
SUMMARY_SQL: Final = """
select r.source, h.changes, h.bytes, h.behind_lsn::text
from streamer.held h join streamer.relation r on r.id = h.relation_id
"""


async def read_held(session: Executor) -> dict[int, HeldRecord]:
    """Return the held changes of relations, by id, from the last reports of the processes."""
    return {record.relation_id: record for record in await HELD.read(session)}


async def set_held(session: Executor, source_id: int, held: Collection[HeldRecord]) -> None:
    """Store the held changes of a source's relations; relations without a record hold no
    changes.
    """
    await HELD.delete(
        session,
        "using streamer.relation r where r.id = h.relation_id and r.source_id = $1"
        " and h.relation_id <> all ($2::int8[])",
        source_id,
        [record.relation_id for record in held],
    )
    joined = "join streamer.relation r on r.id = v.relation_id"
    await HELD.put(session, map(fields_of, held), "relation_id", joined)
