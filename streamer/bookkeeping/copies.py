"""Stores the beginning, the progress and the end of copies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from streamer.bookkeeping import ddl_records, quarantined_changes
from streamer.bookkeeping.bookkeeping_table import Executor, Values
from streamer.bookkeeping.relation_columns import stored_storage
from streamer.bookkeeping.relation_records import RELATIONS
from streamer.bookkeeping.relation_states import (
    CHANGED,
    COPIES,
    OF_RELATIONS,
    CopyRecord,
    change_states,
    state_columns,
)
from streamer.control.chunked_copy import GROWTH
from streamer.control.table_state import CopyScope, Need, State
from streamer.errors.error_classes import TargetFencedError
from streamer.mapping.relation_names import parse_name
from streamer.schema.source_definition import SourceDefinition
from streamer.source.tables.rewritten_tables import Storage
from streamer.target.connection import TargetConnection, transaction
from streamer.util.lsn import Lsn


async def read_filling(session: Executor, relation_ids: Sequence[int]) -> set[int]:
    """Return the relations whose last copy filled the target directly and did not finish."""
    condition = f"{OF_RELATIONS} and r.filling"
    return {copy.relation_id for copy in await COPIES.read(session, condition, relation_ids)}


async def read_sharers(session: Executor, target: str) -> list[CopyRecord]:
    """Return the relations that share *target* by disjoint keys."""
    return await COPIES.read(session, "where r.target = $1 and r.disjoint order by r.id", target)


async def forget_rows_of_sharers(session: Executor, target: str) -> None:
    """Record that *target* has no row of the relations that share the table by disjoint keys."""
    await RELATIONS.update(
        session, {"was_in_sync": False}, "where target = $2 and disjoint", target
    )


async def begin_copies(
    connection: TargetConnection, relation_ids: Sequence[int], need: Need
) -> dict[int, CopyRecord]:
    """Store new attempts to copy relations, each in the scope *need*; return the attempts by
    relation id.

    Raises TargetFencedError if the need of a relation has changed: after a loss of changes, such a
    copy would mark the relation as in sync. The caller has begun a transaction.
    """
    values: dict[str, Any] = {"waiting_for": None}
    if need is Need.ROWS:
        values |= dict.fromkeys(("snapshot_lsn", "chunks", "rows_total"))
        values |= dict.fromkeys(("rows_copied", "bytes_copied"), 0)

    def change(record: CopyRecord) -> Values | None:
        if not record.table_state.lacks(need):
            return None
        begun = state_columns(record.table_state.copy_begins())
        return {**begun, **values, "attempt": record.attempt + 1}

    begun = await change_states(connection, change, OF_RELATIONS, relation_ids)
    if len(begun) < len(relation_ids):
        raise TargetFencedError("this table stopped, or lost its bookkeeping, when its copy began")
    return {copy.relation_id: replace(copy, attempt=copy.attempt + 1) for copy in begun}


async def find_in_sync_before(session: Executor, relation_ids: Sequence[int]) -> set[int]:
    """Return the relations that have been in sync, whose next copy is therefore no first copy."""
    rows = await session.fetch(
        "select id from streamer.relation where id = any ($1::int8[]) and was_in_sync",
        list(relation_ids),
    )
    return {row["id"] for row in rows}


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """A relation whose copy is in the target. The stream contains its changes from ``lsn`` on.

    ``definition``, ``storage``: the definition and the storage of the source's table at ``lsn``.
    Without ``attempt`` there was no copy: `initial: none` marked the relation as synced. The
    ``chunks`` of ``scope`` describe the rows in the target; None for all rows.
    """

    relation_id: int
    scope: CopyScope
    lsn: Lsn
    attempt: int | None
    rows: int
    size: int
    owns_rows: bool
    columns: Mapping[str, int]
    definition: SourceDefinition
    storage: Mapping[int, Storage] | None = None
    end_lsn: Lsn | None = None
    """The former position of a relation in sync."""
    leaves: Mapping[int, str] | None = None
    """The partitions after the copy: by OID, the transactions that attached the partition."""

    @property
    def is_end(self) -> bool:
        """Whether all rows of the table are now copied."""
        return not self.scope.is_to_point and self.scope.chunks is None

    @property
    def omits_quarantined(self) -> bool:
        """Whether the copy leaves out rows that may be in quarantine."""
        chunks = self.scope.chunks
        is_partial = self.scope.is_to_point and self.scope.resync.is_partial
        return is_partial or (chunks is not None and chunks.count > 1)

    def is_stored(self, copy: CopyRecord) -> bool:
        """Whether the bookkeeping has stored this switch to the stream."""
        if self.scope.chunks is not None:
            return copy.chunks == self.scope.chunks
        is_over = copy.state != State.COPYING and copy.snapshot_lsn == self.lsn
        return is_over and copy.attempt == self.attempt

    def values(self, copy: CopyRecord) -> Values | None:
        """Return the columns to store for *copy*; None if there is a newer attempt."""
        if self.attempt not in (None, copy.attempt) or copy.needs_resync:
            return None
        state = copy.table_state.switched_to_stream(self.scope.chunks, self.lsn)
        moved = {**state_columns(state), "waiting_for": None, "end_lsn": self.lsn}
        if (chunks := self.scope.chunks) is not None:
            is_next = (copy.chunks is None) == (chunks.count == 1)
            if not is_next or copy.snapshot_lsn is not None or copy.end_lsn > self.lsn:
                return None
            return {**moved, **self._counts(copy), **self._definition, "chunks": chunks}
        moved |= {"snapshot_lsn": self.lsn, "resync": None, "chunks": None, "was_in_sync": True}
        if not self.scope.is_to_point:
            return moved | self._all_rows(copy)
        if copy.end_lsn != self.end_lsn or copy.end_lsn > self.lsn:
            return None  # another process has moved the position
        return moved | self._part(copy)

    def _all_rows(self, copy: CopyRecord) -> dict[str, Any]:
        counts = self._counts(copy)
        values = {
            "rows_total": counts["rows_copied"],
            "owns_rows": copy.owns_rows or self.owns_rows,
            "storage": stored_storage(self.storage),
            "filling": False,
        }
        if self.attempt is None:
            values["declared"] = True
        return {**counts, **self._definition, **values, **_FILLED}

    def _part(self, copy: CopyRecord) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self.leaves is not None:
            values |= {"leaves": [*self.leaves], "leaf_joins": [*self.leaves.values()]}
        if self.scope.is_whole:
            storage = stored_storage(self.storage)
            return {**values, "columns": dict(self.columns), "storage": storage, **_FILLED}
        filled = self.scope.resync.columns or ()
        return {**values, "unfilled": [name for name in copy.unfilled if name not in filled]}

    def _counts(self, copy: CopyRecord) -> dict[str, int]:
        """Return the counts, including the rows of former chunks."""
        former = (0, 0) if copy.chunks is None else (copy.rows_copied, copy.bytes_copied)
        return {"rows_copied": former[0] + self.rows, "bytes_copied": former[1] + self.size}

    @property
    def _definition(self) -> dict[str, Any]:
        return {"columns": dict(self.columns), "definition": self.definition}


async def switch_to_stream(connection: TargetConnection, copies: Sequence[FinishedCopy]) -> None:
    """Switch the relations of *copies* to the stream.

    Raises TargetFencedError if a copy has begun again meanwhile.
    """
    by_id = {copy.relation_id: copy for copy in copies}
    repaired = [copy.relation_id for copy in copies if not copy.omits_quarantined]
    complete = [copy.relation_id for copy in copies if copy.is_end]
    async with transaction(connection):
        await quarantined_changes.remove_copied(connection, repaired)
        await ddl_records.remove_copied(connection, complete)
        stored = await change_states(
            connection,
            lambda record: by_id[record.relation_id].values(record),
            OF_RELATIONS,
            list(by_id),
            computed=_CHUNKS,
        )
        if len(stored) < len(copies):
            raise TargetFencedError("a request or another process has begun this copy again")


async def is_switched(connection: TargetConnection, copy: FinishedCopy) -> bool:
    """Whether a switch to the stream with an unknown outcome was committed."""
    record = await COPIES.find(connection, "where r.id = $1", copy.relation_id)
    return record is not None and copy.is_stored(record)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sums over the parts of a copy. ``heap_bytes``: the size of finished parts at the source."""

    rows: int
    bytes: int
    heap_bytes: int
    heap_bytes_total: int
    rows_total: int | None


@dataclass(frozen=True, slots=True)
class RunningParts:
    """The progress of the parts in progress."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a copy, including rows that COPY has read but no transaction has
    committed.
    """

    rows: int
    rows_total: int | None
    bytes: int
    bytes_total: int | None
    rows_per_second: float | None
    seconds_left: float | None


def estimate(ledger: Ledger, running: RunningParts, seconds: float | None) -> CopyProgress:
    """Estimate the progress of a copy whose first rows came *seconds* ago; None without rows. Pure.

    A part's size in COPY's format differs from its size at the source; finished parts show the
    ratio.
    """
    rows, size = ledger.rows + running.rows, ledger.bytes + running.bytes
    size_total: float = ledger.heap_bytes_total
    if ledger.heap_bytes and ledger.bytes:
        size_total *= ledger.bytes / ledger.heap_bytes
        share = size / size_total
    elif ledger.rows_total:
        share = rows / ledger.rows_total
    else:
        share = size / size_total if size_total else 0.0
    rate = remaining = None
    if seconds is not None and rows:
        rate = rows / max(seconds, 0.001)
        remaining = max(0.0, seconds / share - seconds) if share else None
    return CopyProgress(
        rows=rows,
        rows_total=None if not ledger.rows_total else max(ledger.rows_total, rows),
        bytes=size,
        bytes_total=max(round(size_total), size) if size_total else None,
        rows_per_second=None if rate is None else round(rate, 1),
        seconds_left=None if remaining is None else round(remaining, 1),
    )


async def read_progress(connection: TargetConnection) -> dict[int, CopyProgress]:
    """Return the progress of the copies in progress, by relation id."""
    ledgers = await connection.fetch(_LEDGERS_SQL, GROWTH)
    if not ledgers:
        return {}
    running: list[Any] = []
    if connection.server_version >= 14_00_00:
        running = await connection.fetch(_RUNNING_SQL)
    by_table = {(row["application_name"], row["namespace"], row["name"]): row for row in running}
    progress = {}
    for row in ledgers:
        name, target = f"streamer copy {row['source_id']}", parse_name(row["target"])
        now = by_table.get((name, "streamer", f"copy_{row['relation_id']}")) or by_table.get(
            (name, target.namespace, target.name)
        )
        parts = RunningParts(now["rows"], now["bytes"]) if now else RunningParts(0, 0)
        ages = [age for age in (row["seconds"], now and now["seconds"]) if age is not None]
        ledger = Ledger(*(row[field.name] for field in fields(Ledger)))
        progress[row["relation_id"]] = estimate(ledger, parts, max(ages, default=None))
    return progress


@dataclass(frozen=True, slots=True)
class OwnSession:
    """A session that copies, and a table on which the session holds or awaits a lock."""

    pid: int
    application_name: str
    namespace: str
    table: str
    is_blocked: bool


async def read_own_sessions(connection: TargetConnection) -> list[OwnSession]:
    """Return the sessions at the target that prepare, copy or finish tables of any source."""
    return [OwnSession(**row) for row in await connection.fetch(_OWN_SESSIONS_SQL)]


async def fill_directly(session: Executor, relation_ids: Sequence[int]) -> None:
    """Record that copies fill the target tables directly, so that streamer owns all rows."""
    await RELATIONS.update(
        session,
        {"filling": True, "owns_rows": True},
        "where id = any ($2::int8[])",
        relation_ids,
    )


async def set_row_estimates(session: Executor, rows: Mapping[int, int | None]) -> None:
    """Store the number of rows of the source's tables, by relation id."""
    await RELATIONS.update_each(
        session, ({"id": key, "rows_total": count} for key, count in rows.items())
    )


async def read_leftover_stages(session: Executor, source_id: int | None) -> list[str]:
    """Return the staging tables, by name, of unknown relations and of relations of a source."""
    return [row["name"] for row in await session.fetch(_LEFTOVERS_SQL, source_id)]


_FILLED: Final[Values] = {"unfilled": (), "copy_is_due": False}
"""The values to store for a relation whose existing rows are complete."""
_CHUNKS: Final = {
    **CHANGED,
    "chunks": """
jsonb_build_object('attempt', r.attempt, 'began_at', coalesce(r.chunks->'began_at', to_jsonb((
    select min(started_at) from streamer.sync_partition where relation_id = r.id)))) || v.chunks
""",
}
_LEFTOVERS_SQL: Final = """
select c.relname as name
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
left join streamer.relation r on c.relname = 'copy_' || r.id
where n.nspname = 'streamer' and c.relkind = 'r' and c.relname ~ '^copy_[0-9]+$'
  and (r.id is null or r.source_id = $1)
"""
# The copy of a table continues after a pause.
_LEDGERS_SQL: Final = """
select r.id as relation_id, r.source_id, r.target, r.rows_total,
       p.rows + b.rows as rows, p.bytes + b.bytes as bytes,
       p.heap_bytes + b.heap_bytes as heap_bytes,
       greatest(p.heap_bytes_total + b.heap_bytes, b.heap_bytes_total) as heap_bytes_total,
       extract(epoch from clock_timestamp() - least(p.started_at, b.began_at))::float8 as seconds
from streamer.relation r,
     lateral (
         select coalesce(sum(rows_copied), 0)::int8 as rows,
                coalesce(sum(bytes_copied), 0)::int8 as bytes,
                coalesce(sum(size_bytes) filter (where finished_at is not null), 0)::int8
                    as heap_bytes,
                coalesce(sum(size_bytes), 0)::int8 as heap_bytes_total,
                min(started_at) as started_at
         from streamer.sync_partition where relation_id = r.id
     ) p,
     lateral (
         select case when r.chunks is null then 0 else r.rows_copied end as rows,
                case when r.chunks is null then 0 else r.bytes_copied end as bytes,
                coalesce(((r.chunks->>'chunk_bytes')::int8 / $1::float8
                    * ((1 + $1) ^ (r.chunks->>'count')::int - 1))::int8, 0) as heap_bytes,
                coalesce((r.chunks->>'size_bytes')::int8, 0) as heap_bytes_total,
                (r.chunks->>'began_at')::timestamptz as began_at
     ) b
where r.state = 'copying' or (r.state = 'paused' and r.snapshot_lsn is null)
"""
# pg_locks also lists the locks that a session awaits.
_OWN_SESSIONS_SQL: Final = r"""
select distinct w.pid, w.application_name, n.nspname as namespace, c.relname as table,
       coalesce(w.wait_event_type = 'Lock', false) as is_blocked
from pg_catalog.pg_stat_activity w
join pg_catalog.pg_locks l on l.pid = w.pid and l.locktype = 'relation'
join pg_catalog.pg_class c on c.oid = l.relation and c.relkind in ('r', 'p')
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where w.datname = pg_catalog.current_database() and w.usename = current_user
  and w.application_name ~ '^streamer (sync|copy) \d+( round \d+)?$'
  and l.database = (select d.oid from pg_catalog.pg_database d
                    where d.datname = pg_catalog.current_database())
  and n.nspname not in ('pg_catalog', 'pg_toast')
"""
# The view shows progress by table name; the sessions distinguish parts of several sources.
_RUNNING_SQL: Final = r"""
select regexp_replace(a.application_name, ' round \d+$', '') as application_name,
       n.nspname as namespace, c.relname as name,
       sum(p.tuples_processed)::int8 as rows, sum(p.bytes_processed)::int8 as bytes,
       extract(epoch from clock_timestamp() - min(a.xact_start))::float8 as seconds
from pg_catalog.pg_stat_progress_copy p
join pg_catalog.pg_stat_activity a using (pid)
join pg_catalog.pg_class c on c.oid = p.relid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where p.datname = current_database() and p.command = 'COPY FROM'
group by 1, 2, 3
"""
