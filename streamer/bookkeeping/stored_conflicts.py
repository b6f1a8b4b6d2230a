"""The rows of streamer.conflict. The transaction of a change adds the conflicts of the change."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor


@dataclass(frozen=True, slots=True)
class StoredConflict:
    """A row of streamer.conflict. ``key``: the key of the change; ``existing``: facts about the
    target's row; both as JSON.
    """

    id: int
    relation_id: int
    kind: str
    resolution: str
    operation: str
    key: str | None
    lsn: Annotated[str, Codec("c.lsn::text")]
    commit_time: datetime
    xid: int
    existing: str | None
    noted_at: datetime


CONFLICTS: Final = BookkeepingTable("conflict", "c", StoredConflict)
_INSERT_SQL: Final = """
insert into streamer.conflict
    (relation_id, kind, resolution, operation, key, lsn, commit_time, xid, existing)
select $1, c.kind, c.resolution, c.operation, c.key::json, c.lsn::pg_lsn, c.commit_time, c.xid,
       c.existing::json
from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::timestamptz[],
            $8::int8[], $9::text[]) with ordinality
     c (kind, resolution, operation, key, lsn, commit_time, xid, existing, n)
order by c.n
on conflict (relation_id, lsn, kind) where resolution = 'stopped' do nothing
"""
_TRIM_SQL: Final = """
where relation_id = $1 and id <= (
    select id from streamer.conflict where relation_id = $1 order by id desc offset $2 limit 1)
"""


async def add_conflicts(
    session: Executor, relation_id: int, rows: Sequence[tuple[Any, ...]], limit: int
) -> None:
    """Store conflicts of a relation, and delete all but the newest *limit*."""
    await session.execute(_INSERT_SQL, relation_id, *map(list, zip(*rows, strict=True)))
    await CONFLICTS.delete(session, _TRIM_SQL, relation_id, limit)


async def read_newest_conflicts(
    session: Executor, relation_ids: Sequence[int], limit: int
) -> list[StoredConflict]:
    condition = "where relation_id = any ($1::int8[]) order by id desc limit $2"
    return await CONFLICTS.read(session, condition, relation_ids, limit)
