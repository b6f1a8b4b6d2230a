"""The rows of streamer.quarantine: refused changes, with later changes of their rows.

Values and definitions are JSON in ASCII (`streamer.apply.rows.change_as_json`), which a target
of any encoding can store.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Executor
from streamer.util.lsn import Lsn

PAGE_ROWS: Final = 500
"""The number of rows that a query returns at a time."""


@dataclass(frozen=True, slots=True)
class QuarantinedChange:
    """A row of streamer.quarantine."""

    id: int
    relation_id: int
    operation: str
    key: str | None
    old: str | None
    new: str | None
    definition: str
    lsn: Lsn
    commit_time: datetime
    xid: int
    error: str
    code: str | None
    quarantined_at: datetime
    retried_at: datetime | None
    ended_at: datetime | None


QUARANTINE: Final = BookkeepingTable("quarantine", "q", QuarantinedChange)
_LAST_ID: Final = 2**63 - 1
_INSERT_SQL: Final = """
insert into streamer.quarantine
       (relation_id, operation, key, old, new, definition, lsn, commit_time, xid, error, code)
select $1, c.operation, c.key::json, c.old::json, c.new::json, c.definition::json, c.lsn::pg_lsn,
       c.commit_time, c.xid, c.error, c.code
from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[],
            $8::timestamptz[], $9::int8[], $10::text[], $11::text[]) with ordinality
     c (operation, key, old, new, definition, lsn, commit_time, xid, error, code, n)
order by c.n
"""
_MARK_SQL: Final = """
insert into streamer.quarantine
       (relation_id, operation, key, old, new, definition, lsn, commit_time, xid, error, code)
select $1, 'delete', q.key, q.key, null, q.definition, $2::text::pg_lsn, $3, $4, $5, null
from (select distinct on (key::text) operation, key, definition from streamer.quarantine
      where relation_id = $1 and ($6::int8[] is null or id = any ($6))
      order by key::text, id desc) q
where q.operation <> 'delete'
"""
_LEAVE_SQL: Final = """
update streamer.quarantine q set error = l.error, code = l.code, retried_at = now()
from unnest($1::int8[], $2::text[], $3::text[]) l (id, error, code) where q.id = l.id
"""
_FOLLOW_SQL: Final = """
update streamer.quarantine q
set key = w.key::json, old = w.old::json, new = w.new::json, definition = w.definition::json
from unnest($1::int8[], $2::text[], $3::text[], $4::text[], $5::text[])
     w (id, key, old, new, definition)
where q.id = w.id
"""
SUMMARY_SQL: Final = """
select r.source, q.operation, q.code, count(*) as changes, min(q.quarantined_at) as since
from streamer.quarantine q join streamer.relation r on r.id = q.relation_id
group by 1, 2, 3
"""


async def read_quarantine_page(
    session: Executor,
    relation_id: int,
    after: int,
    *,
    before: int | None = None,
    ids: Collection[int] | None = None,
) -> list[QuarantinedChange]:
    """Return the next changes of a relation, with ids between *after* and *before*.

    *ids*: the ids of the changes to return; None for all.
    """
    return await QUARANTINE.read(
        session,
        "where relation_id = $1 and id > $2 and id < $3 and ($4::int8[] is null or id = any ($4))"
        " order by id limit $5",
        relation_id,
        after,
        _LAST_ID if before is None else before,
        ids,
        PAGE_ROWS,
    )


async def read_oldest_quarantined(
    session: Executor, relation_ids: Sequence[int], limit: int
) -> list[QuarantinedChange]:
    return await QUARANTINE.read(
        session, "where relation_id = any ($1::int8[]) order by id limit $2", relation_ids, limit
    )


async def read_quarantined(session: Executor, ids: Sequence[int]) -> list[QuarantinedChange]:
    return await QUARANTINE.read(session, "where id = any ($1::int8[])", ids)


async def count_quarantined(session: Executor, relation_id: int) -> int:
    return int(
        await session.fetch_value(
            "select count(*) from streamer.quarantine where relation_id = $1", relation_id
        )
    )


async def add_quarantined(
    session: Executor, relation_id: int, rows: Sequence[tuple[Any, ...]]
) -> None:
    """Store changes of a relation, in the order of the source."""
    await session.execute(_INSERT_SQL, relation_id, *map(list, zip(*rows, strict=True)))


async def end_quarantined(
    session: Executor, relation_id: int, at: datetime, ids: Sequence[int] | None = None
) -> None:
    """Store *at* as the end of the versions that changes of a history table write. *ids*: the ids
    of these changes; None for all.
    """
    await QUARANTINE.update(
        session,
        {"ended_at": at},
        "where relation_id = $2 and ended_at is null and ($3::int8[] is null or id = any ($3))",
        relation_id,
        ids,
    )


async def mark_quarantined(
    session: Executor,
    relation_id: int,
    lsn: Lsn,
    at: datetime,
    xid: int,
    error: str,
    ids: Sequence[int] | None = None,
) -> int:
    """Add a delete for each row among the changes *ids*; return the number of added changes."""
    return await session.execute(_MARK_SQL, relation_id, str(lsn), at, xid, error, ids)


async def remove_quarantined(
    session: Executor, relation_id: int, ids: Sequence[int] | None = None
) -> int:
    """Remove changes of a relation; with None, all changes."""
    return await QUARANTINE.delete(
        session,
        "where relation_id = $1 and ($2::int8[] is null or id = any ($2))",
        relation_id,
        ids,
    )


async def remove_copied(session: Executor, relation_ids: Sequence[int]) -> None:
    """Remove changes whose rows a copy includes. The last of several chunks includes only some
    rows.
    """
    await QUARANTINE.delete(
        session,
        "using streamer.relation r"
        " where r.id = q.relation_id and r.id = any ($1::int8[]) and r.chunks is null",
        relation_ids,
    )


async def store_retry_errors(
    session: Executor, remaining: Sequence[tuple[int, str, str | None]]
) -> None:
    """Store the reasons why changes stay after a retry: id, error and SQLSTATE of each change."""
    await session.execute(_LEAVE_SQL, *map(list, zip(*remaining, strict=True)))


async def store_retry_error(
    session: Executor, relation_id: int, ids: Sequence[int] | None, error: str
) -> None:
    """Store the reason why no change of a relation could be retried."""
    await QUARANTINE.update(
        session,
        {"error": error, "code": None},
        "where relation_id = $2 and ($3::int8[] is null or id = any ($3))",
        relation_id,
        ids,
        also="retried_at = now()",
    )


async def follow_quarantined(
    session: Executor, rows: Sequence[tuple[int, str | None, str | None, str | None, str]]
) -> None:
    """Store changes converted to a new definition: id, key, old and new values, and definition."""
    await session.execute(_FOLLOW_SQL, *map(list, zip(*rows, strict=True)))
