"""The rows of streamer.relation: state, definition and progress of each mapped table."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

from streamer.bookkeeping.bookkeeping_table import ELSEWHERE, BookkeepingTable, Codec, Executor
from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.mass_delete import MassDelete
from streamer.control.resync_options import Resync
from streamer.control.table_state import State, TableState
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.errors.remedies import Remedy
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rename_targets import Renamed, RenameTargets
from streamer.mapping.rules import SourceLabel
from streamer.postgres.quoting import quote_qualified
from streamer.target.fencing_token import LOCK_CLASS, LOCKS_SQL
from streamer.util.lsn import Lsn

_QUARANTINED_SQL: Final = "(select count(*) from streamer.quarantine q where q.relation_id = r.id)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """The columns of streamer.relation that make the state of a table."""

    relation_id: Annotated[int, Codec("r.id")]
    state: str
    snapshot_lsn: Lsn | None
    end_lsn: Lsn
    error: ErrorReport | None
    resync: Annotated[Resync, Codec("coalesce({}, '{{}}')")]
    needs_resync: bool
    chunks: ChunkedCopy | None = None
    """The rows that an unfinished copy in chunks has written."""

    @property
    def table_state(self) -> TableState:
        """The state in which a process starts with this row."""
        return TableState.stored(
            State(self.state),
            end_lsn=self.end_lsn,
            error=self.error,
            has_snapshot=self.snapshot_lsn is not None,
            needs_resync=self.needs_resync,
            resync=self.resync,
            chunks=self.chunks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationRecord(StateRecord):
    """A row of streamer.relation. ``source`` and ``target``: names as texts of `RelationName`."""

    source_id: int
    source: str
    target: str
    row_sid: str | None
    """The sid of the relation's rows in the target."""
    disjoint: bool
    """Only their keys distinguish the relation's rows from rows of other relations."""
    type: str
    attempt: int
    rows_copied: int
    bytes_copied: int
    rows_total: int | None
    wait: Annotated[TableWait | None, Codec("case when r.waiting_for is not null then {} end")]
    lag_seconds: Annotated[
        float | None, Codec("extract(epoch from clock_timestamp() - r.lag_since)::float8")
    ]
    visible_lsn: Lsn | None
    target_created: bool
    declared: bool
    owns_rows: bool
    publication_membership: str | None
    source_oid: int | None
    identity: str | None
    transport: str | None
    transport_reason: str | None
    expressions: str | None
    truncates_skipped: int
    mass_delete: MassDelete | None
    outlives: bool
    quarantined: Annotated[int, Codec(_QUARANTINED_SQL)]
    has_returned: Annotated[bool, ELSEWHERE] = False
    """The relation was mapped before, left the mapping, and has just returned."""
    changed_at: datetime | None = None
    """The time of the last change of the state."""
    has_resync: Annotated[bool, Codec("r.resync is not null")] = False
    """A copy of some or all rows is due or in progress."""
    unfilled: tuple[str, ...] = ()
    """Columns of the target whose values existing rows lack."""
    copy_is_due: bool = False
    """Existing rows need a copy that streamer began by itself."""
    identity_remedy: Remedy | None = None
    """The statements that give the source's table a usable replica identity."""
    partition_error: ErrorReport | None = None
    """Why streamer cannot create or remove time partitions of the target table."""

    @property
    def is_bare(self) -> bool:
        """Whether the target lacks rows of the relation, and no copy has begun (`read_bare`)."""
        return self.snapshot_lsn is None and not self.attempt and not self.owns_rows

    @property
    def waiting_mass_delete(self) -> MassDelete | None:
        """The mass delete that waits for an operator's decision."""
        return None if self.mass_delete is None or self.mass_delete.is_decided else self.mass_delete


UnreadyTables = dict[str, dict[str, tuple[str, ErrorReport | None]]]
"""State and error of tables that are not ready, by the label of their source and their name."""

RELATIONS: Final = BookkeepingTable("relation", "r", RelationRecord)
_OTHER_WRITERS_SQL: Final = """
select r.target, s.database from streamer.relation r join streamer.source s on s.id = r.source_id
where r.row_sid = $2 and s.database <> $1 and r.target = any ($3::text[]) order by 1, 2 limit 1
"""
_OF_SID_SQL: Final = """
select r.source from streamer.relation r join streamer.source s on s.id = r.source_id
where s.database = $1 and r.row_sid = $2 and s.sid is distinct from r.row_sid order by 1 limit 1
"""
_LABELS_SQL: Final = """
select r.id as relation_id, s.database, s.sid, r.source
from streamer.relation r join streamer.source s on s.id = r.source_id where r.id = any ($1::int8[])
"""
_AWAITED_SQL: Final = f"""
select exists (
    select from unnest($1::text[], $2::text[]) m (database, sid)
    left join streamer.source s on s.database = m.database and s.sid is not distinct from m.sid
    where not exists (select from {LOCKS_SQL} l where l.class = $3::int8 and l.id = s.id)
      and (not exists (select from streamer.relation r where r.source_id = s.id)
           or exists (select from streamer.relation r
                      where r.source_id = s.id and not r.needs_resync
                        and (r.state in ('init', 'copying')
                             or r.state = 'error' and r.snapshot_lsn is null))))
"""
_UNREADY_SQL: Final = """
select s.database, s.sid, r.source, r.state, r.error, r.error_code, r.error_remedy
from streamer.relation r join streamer.source s on s.id = r.source_id where r.state <> 'ready'
"""
_RENAME_SQL: Final = """
select pg_catalog.to_regclass($2) is not null as target_exists,
       pg_catalog.to_regclass($3) is not null as is_taken,
       exists (select from streamer.relation o where o.target = r.target and o.id <> r.id)
           as is_shared,
       r.snapshot_lsn is null and r.attempt = 0 and not r.owns_rows as is_bare,
       exists (select from streamer.relation o
                where o.source_id = r.source_id and o.source = $4
                  and o.snapshot_lsn is null and o.attempt = 0 and not o.owns_rows
                  and coalesce(o.publication_membership, r.publication_membership)
                      = r.publication_membership)
           as has_bare_successor
from streamer.relation r where r.id = $1
"""
SUMMARY_SQL: Final = """
select s.database, s.sid, r.source, r.target, r.type, r.state, r.error, r.error_code,
       r.changed_at, r.attempt, r.end_lsn::text, r.snapshot_lsn::text, r.rows_copied,
       r.resync::text
from streamer.relation r join streamer.source s on s.id = r.source_id
order by r.changed_at desc limit 200
"""


async def awaits_copies(session: Executor, sources: Collection[tuple[str, str | None]]) -> bool:
    """Whether a copy is due for one of *sources* (database and sid) that no process streams. The
    source is new, or a copy has not ended.
    """
    if await session.fetch_value("select pg_catalog.to_regclass('streamer.relation') is null"):
        return bool(sources)
    databases, sids = zip(*sources, strict=True)
    return bool(await session.fetch_value(_AWAITED_SQL, databases, sids, LOCK_CLASS))


async def read_relation_records(
    session: Executor, source_id: int | None = None
) -> list[RelationRecord]:
    return await RELATIONS.read(
        session, "where $1::int8 is null or source_id = $1 order by source_id, source", source_id
    )


async def read_created(session: Executor, targets: Iterable[RelationName]) -> set[RelationName]:
    """Return the *targets* that streamer created."""
    names = {str(name): name for name in targets}
    rows = await session.fetch(
        "select distinct target from streamer.relation"
        " where target_created and target = any ($1::text[])",
        list(names),
    )
    return {names[row["target"]] for row in rows}


async def read_bare(session: Executor, relation_ids: Iterable[int]) -> set[int]:
    """Return the *relation_ids* of relations without rows in the target and without a begun
    copy.
    """
    rows = await session.fetch(
        "select id from streamer.relation where id = any ($1::int8[])"
        " and snapshot_lsn is null and attempt = 0 and not owns_rows",
        list(relation_ids),
    )
    return {row["id"] for row in rows}


async def read_targets(session: Executor, database: str | None = None) -> set[str]:
    """Return the target tables of all sources of *database*, or of all sources."""
    rows = await session.fetch(
        "select distinct r.target from streamer.relation r"
        " join streamer.source s on s.id = r.source_id"
        " where $1::text is null or s.database = $1",
        database,
    )
    return {row["target"] for row in rows}


async def find_other_writer(
    session: Executor, database: str, sid: str, targets: Collection[str]
) -> tuple[str, str] | None:
    """Return one of *targets* in which a different database writes rows of *sid*, and that
    database.
    """
    rows = await session.fetch(_OTHER_WRITERS_SQL, database, sid, list(targets))
    return (rows[0]["target"], rows[0]["database"]) if rows else None


async def read_sources_of_sid(session: Executor, sid: str) -> set[int]:
    """Return the ids of the sources with tables whose rows have *sid*."""
    rows = await session.fetch(
        "select distinct source_id from streamer.relation where row_sid = $1", sid
    )
    return {row["source_id"] for row in rows}


async def find_relation_of_sid(session: Executor, database: str, sid: str) -> str | None:
    """Return a source table of *database* whose rows have *sid* by the rule of the table."""
    table: str | None = await session.fetch_value(_OF_SID_SQL, database, sid)
    return table


async def read_labels(
    session: Executor, relation_ids: Collection[int]
) -> dict[int, tuple[SourceLabel, str]]:
    """Return the label of the source and the source's table of relations, by id."""
    rows = await session.fetch(_LABELS_SQL, list(relation_ids))
    return {r["relation_id"]: (SourceLabel(r["database"], r["sid"]), r["source"]) for r in rows}


async def read_unready_tables(session: Executor) -> UnreadyTables:
    """Return the tables of all sources that are not ready."""
    by_source: UnreadyTables = {}
    for row in await session.fetch(_UNREADY_SQL):
        tables = by_source.setdefault(SourceLabel(row["database"], row["sid"]), {})
        tables[row["source"]] = (
            row["state"],
            ErrorReport.stored(row["error"], row["error_code"], row["error_remedy"]),
        )
    return by_source


async def read_rename_targets(
    session: Executor, move: Renamed, target: RelationName
) -> RenameTargets:
    """Return the facts about the former target and the new *target* of a renamed table."""
    quoted = [quote_qualified(name.namespace, name.name) for name in (move.target, target)]
    (row,) = await session.fetch(_RENAME_SQL, move.relation_id, *quoted, str(move.now))
    return RenameTargets(**row)


async def read_insert_only(session: Executor) -> list[RelationRecord]:
    """Return the relations whose source publishes no identity of old rows."""
    return await RELATIONS.read(session, "where identity = 'none'")
