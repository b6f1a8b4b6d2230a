"""The rows of streamer.held: the changes of each table that wait in the process of its source."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from streamer.lsn import Lsn
from streamer.progress.bookkeeping import Bookkeeping


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A row of streamer.held: changes of a relation that wait in its process.

    The source has to keep its WAL from ``behind_lsn`` on for them; None if they are part of a
    transaction that has not ended.
    """

    relation_id: int
    changes: int
    bytes: int
    behind_lsn: Lsn | None


_HELD_SQL: Final = """
select relation_id, changes, bytes, behind_lsn::text as behind_lsn from streamer.held
"""
_SET_HELD_SQL: Final = """
with gone as (
    delete from streamer.held h using streamer.relation r
    where r.id = h.relation_id and r.source_id = $1 and h.relation_id <> all ($2::int8[]))
insert into streamer.held
select v.id, v.changes, v.bytes, v.behind_lsn::pg_lsn
from unnest($2::int8[], $3::int8[], $4::int8[], $5::text[]) v (id, changes, bytes, behind_lsn)
join streamer.relation r on r.id = v.id and r.source_id = $1
on conflict (relation_id) do update
set changes = excluded.changes, bytes = excluded.bytes, behind_lsn = excluded.behind_lsn
"""


def _held_record(row: Any) -> HeldRecord:
    fields = dict(row)
    if fields["behind_lsn"] is not None:
        fields["behind_lsn"] = Lsn.parse(fields["behind_lsn"])
    return HeldRecord(**fields)


async def read_held(bookkeeping: Bookkeeping) -> dict[int, HeldRecord]:
    """Return the held changes of relations, by id, as their process reported them last."""
    async with bookkeeping.connection() as connection:
        records = map(_held_record, await connection.fetch(_HELD_SQL))
        return {record.relation_id: record for record in records}


async def set_held(bookkeeping: Bookkeeping, source_id: int, held: Collection[HeldRecord]) -> None:
    """Store the held changes of a source's relations; unnamed relations hold none."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            _SET_HELD_SQL,
            source_id,
            [record.relation_id for record in held],
            [record.changes for record in held],
            [record.bytes for record in held],
            [None if r.behind_lsn is None else str(r.behind_lsn) for r in held],
        )
