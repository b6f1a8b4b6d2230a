"""The rows of streamer.purge: tables with rows of removed sources, and their purge."""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor
from streamer.errors.error_classes import GapError
from streamer.errors.remedies import Remedy, run
from streamer.mapping.rules import SourceLabel

_BEGIN_SQL: Final = """
insert into streamer.purge (database, sid, target, began_at)
select $1, $2, t, pg_catalog.now() from unnest($3::text[]) t
on conflict (database, sid, target) do update set
    began_at = coalesce(purge.began_at, excluded.began_at), finished_at = null,
    next_block = case when purge.finished_at is null then purge.next_block end,
    rows_deleted = case when exists (
        select from streamer.purge u
        where (u.database, u.sid) = ($1, $2) and u.began_at is not null and u.finished_at is null
    ) then purge.rows_deleted else 0 end
"""


_KEEP_TARGETS_SQL: Final = """
insert into streamer.purge (database, sid, target)
select distinct s.database, coalesce(r.row_sid, ''), r.target
from streamer.source s join streamer.relation r on r.source_id = s.id {relations}
on conflict (database, sid, target) do update set
    rows_deleted = 0, next_block = null, blocks = null, began_at = null, finished_at = null
"""
# A removed source may come back with fewer columns; the extra target columns stay. A source whose
# columns were never recorded may use every column, so no column of its table counts as left.
_KEEP_COLUMNS_SQL: Final = """
update streamer.purge p set columns = array(
    select c.key from streamer.relation r join streamer.source s on s.id = r.source_id,
         pg_catalog.jsonb_each_text(r.columns) c
     {relations}
       and (s.database, coalesce(r.row_sid, ''), r.target) = (p.database, p.sid, p.target)
       and c.value::int > 0
    union select pg_catalog.unnest(p.columns))
where (p.database, p.sid, p.target) in (
    select s.database, coalesce(r.row_sid, ''), r.target
    from streamer.relation r join streamer.source s on s.id = r.source_id {relations})
"""
_OF_SOURCE: Final = "where s.id = $1"
_OF_TABLES: Final = """
where r.id = any ($1::int8[]) and r.row_sid is distinct from s.sid and r.row_sid is not null
and (r.snapshot_lsn is not null or r.attempt > 0 or r.owns_rows)
"""
"""Relations whose rows have a different sid than their source, so a purge of the source misses
these rows.
"""
_LEFT_COLUMNS_SQL: Final = """
select p.target, c.name, pg_catalog.min(p.database) as database,
       nullif(pg_catalog.min(p.sid) filter (where p.finished_at is null), '') as unpurged_sid
from streamer.purge p, unnest(p.columns) c (name)
where exists (select from streamer.relation r where r.target = p.target)
  and not exists (select from streamer.relation r
                   where r.target = p.target
                     and (r.columns is null or coalesce((r.columns ->> c.name)::int, 0) > 0))
group by 1, 2 order by 1, 2
"""


_LEFT_ROWS_SQL: Final = """
select r.id as relation_id, r.source, r.target, s.database, s.sid, r.row_sid,
       p.began_at is not null as is_purged
from streamer.relation r join streamer.source s on s.id = r.source_id
join streamer.purge p
  on (p.database, p.sid, p.target) = (s.database, coalesce(r.row_sid, ''), r.target)
where s.id = $1 and r.source = any ($2::text[])
  and not r.declared and r.snapshot_lsn is null and r.state = 'init'
"""
_TABLES_OF_SOURCE_SQL: Final = """
select p.target from streamer.purge p
where p.database = $1 and (p.sid = $2 or p.sid = '' and not exists (
    select from streamer.relation r where r.target = p.target and not r.disjoint))
union
select r.target from streamer.relation r join streamer.source s on s.id = r.source_id
where (s.database, s.sid) = ($1, $2)
"""
_REMOVED_SQL: Final = """
select database, nullif(sid, '') as sid, target, began_at is not null as is_purged
from streamer.purge
"""


@dataclass(frozen=True, slots=True)
class RemainingRows:
    """A table that streams again after its source was removed."""

    relation_id: int
    source: str
    target: str
    database: str
    sid: str | None
    row_sid: str | None
    is_purged: bool

    @property
    def error(self) -> GapError:
        """The error of a table that is not in sync, although `initial: none` says so."""
        return remaining_rows_error(
            self.source,
            self.target,
            self.database,
            self.sid,
            row_sid=self.row_sid,
            is_purged=self.is_purged,
        )


def remaining_rows_error(
    source: str,
    target: str,
    database: str,
    sid: str | None,
    *,
    row_sid: str | None,
    is_purged: bool,
) -> GapError:
    """Return the error of a table whose source was removed and has returned. Pure."""
    label = SourceLabel(database, row_sid)
    loss = "rows, because a purge has deleted rows" if is_purged else "the changes since then"
    again = run("resync", source, database=database, sid=sid)
    return GapError(
        f'"{label}" was removed from the mapping, and {target} lacks {loss}; `initial: none` says '
        "that the table is in sync",
        hint=Remedy.of("to replace its rows, run: ", again),
    )


@dataclass(frozen=True, slots=True)
class RemainingColumn:
    """A column that only removed sources had, by its name at these sources.

    ``unpurged_sid``: a removed source whose rows may still be in the target.
    """

    target: str
    name: str
    database: str
    unpurged_sid: str | None


@dataclass(frozen=True, slots=True)
class PurgeRecord:
    """A row of streamer.purge. ``next_block``: no block before this block contains rows of the
    source.
    """

    database: str
    sid: str
    target: str
    rows_deleted: int
    next_block: int | None
    blocks: int | None
    has_begun: Annotated[bool, Codec("p.began_at is not null")]
    is_finished: Annotated[bool, Codec("p.finished_at is not null")]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.database, self.sid, self.target

    @property
    def progress(self) -> float | None:
        """The purged fraction of the table, from 0 to 1; None if unknown.

        A purge over an index on sid passes no block before its end.
        """
        if self.is_finished:
            return 1.0
        if not self.blocks or not self.next_block:
            return None
        return min(1.0, self.next_block / self.blocks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"progress": self.progress}


PURGES: Final = BookkeepingTable("purge", "p", PurgeRecord)
_OF_KEY: Final = "where (database, sid, target) = ($2, $3, $4)"


async def read_purges(session: Executor) -> list[PurgeRecord]:
    """Return all rows."""
    return await PURGES.read(session, "where sid <> '' order by database, sid, target")


async def store_targets(session: Executor, source_id: int) -> None:
    """Store the tables and columns of a source before its removal, because its rows stay."""
    await session.execute(_KEEP_TARGETS_SQL.format(relations=_OF_SOURCE), source_id)
    await store_columns(session, source_id)


async def store_columns(session: Executor, source_id: int) -> None:
    """Store the columns of a source that is about to be removed, for tables with recorded
    columns.
    """
    await session.execute(_KEEP_COLUMNS_SQL.format(relations=_OF_SOURCE), source_id)


async def store_rows(session: Executor, relation_ids: Collection[int]) -> None:
    """Store tables and columns of relations that leave the mapping, if the rows of these relations
    have a different sid than the source.

    `store_targets` stores the other tables when the source leaves.
    """
    for sql in (_KEEP_TARGETS_SQL, _KEEP_COLUMNS_SQL):
        await session.execute(sql.format(relations=_OF_TABLES), list(relation_ids))


async def read_remaining_columns(session: Executor) -> list[RemainingColumn]:
    """Return columns that removed sources had, but that no present source of the target has."""
    return [RemainingColumn(**dict(row)) for row in await session.fetch(_LEFT_COLUMNS_SQL)]


async def read_remaining_rows(
    session: Executor, source_id: int, sources: Collection[str]
) -> list[RemainingRows]:
    """Return the tables among *sources* that returned to the mapping."""
    rows = await session.fetch(_LEFT_ROWS_SQL, source_id, list(sources))
    return [RemainingRows(**dict(row)) for row in rows]


async def read_tables_of_source(session: Executor, database: str, sid: str) -> set[str]:
    """Return the target tables that may contain rows of a removed source, with or without its sid.

    No record of a table whose rows have no sid shows which source of *database* wrote the rows.
    """
    rows = await session.fetch(_TABLES_OF_SOURCE_SQL, database, sid)
    return {row["target"] for row in rows}


async def read_removed(session: Executor) -> dict[tuple[str, str], bool]:
    """Return the tables of removed sources, by the source's label and the target.

    The value: whether a purge has deleted rows.
    """
    return {
        (SourceLabel(row["database"], row["sid"]), row["target"]): row["is_purged"]
        for row in await session.fetch(_REMOVED_SQL)
    }


async def begin_purge(session: Executor, database: str, sid: str, targets: Collection[str]) -> None:
    """Store the tables of a purge; an interrupted purge continues at its stored block and count."""
    await session.execute(_BEGIN_SQL, database, sid, sorted(targets))


async def move_purge(
    session: Executor,
    record: PurgeRecord,
    deleted: int,
    next_block: int,
    blocks: int,
) -> None:
    """Store the progress of the purge of a table, in the transaction that deletes its rows."""
    values = {"next_block": next_block, "blocks": blocks}
    also = "rows_deleted = rows_deleted + $5"
    await PURGES.update(session, values, _OF_KEY, *record.key, deleted, also=also)


async def finish_purge(session: Executor, record: PurgeRecord) -> None:
    """Record that a table contains no more rows of the source."""
    await session.execute(
        "update streamer.purge set finished_at = now()"
        " where (database, sid, target) = ($1, $2, $3)",
        *record.key,
    )
