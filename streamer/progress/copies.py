"""The bookkeeping of copies: how one begins, how far it is, and how it ends, in the transaction
that ends it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.error_reports import ErrorReport
from streamer.errors import TargetFencedError
from streamer.lsn import Lsn
from streamer.mapping.chunks import GROWTH, ChunkedCopy
from streamer.mapping.definition import SourceDefinition
from streamer.mapping.names import parse_name
from streamer.progress import quarantined_changes
from streamer.progress.definition_changes import OBSOLETE_SQL
from streamer.progress.relation_columns import storage_json
from streamer.progress.relations import RELATIONS
from streamer.progress.table import Executor
from streamer.source.rewritten_tables import Storage
from streamer.target.connection import TargetConnection


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """The state of a table's bookkeeping when a copy begins.

    ``is_filling``: the copy before filled the target directly and did not finish. ``owns_rows``:
    streamer wrote this source's rows in the target.
    """

    attempt: int
    is_filling: bool
    owns_rows: bool


async def read_filling(connection: TargetConnection, relation_ids: Sequence[int]) -> set[int]:
    """Return the relations whose last copy filled the target directly and did not finish."""
    rows = await connection.fetch(
        "select id from streamer.relation where id = any ($1::int8[]) and filling", relation_ids
    )
    return {row["id"] for row in rows}


async def begin_copies(
    connection: TargetConnection, relation_ids: Sequence[int]
) -> dict[int, BegunCopy]:
    """Store ``copying`` and a new attempt of relations.

    Raises TargetFencedError if streamer found changes of a relation missing meanwhile. A copy that
    began now would make the relation look in sync.
    """
    rows = await connection.fetch(_BEGIN_COPIES_SQL, list(relation_ids))
    begun = {
        row["id"]: BegunCopy(row["attempt"], row["is_filling"], row["owns_rows"]) for row in rows
    }
    if len(begun) < len(relation_ids):
        raise TargetFencedError("this table stopped, or lost its bookkeeping, as its copy began")
    return begun


async def begin_part(connection: TargetConnection, relation_id: int) -> BegunCopy:
    """Store a new attempt to copy some rows of a relation in sync. Raises TargetFencedError."""
    rows = await connection.fetch(_BEGIN_PART_SQL, relation_id)
    if not rows:
        raise TargetFencedError("this table stopped, or lost its bookkeeping, as its copy began")
    return BegunCopy(**rows[0])


@dataclass(frozen=True, slots=True)
class BegunChunk:
    """The state of a table's bookkeeping when its next chunk begins: ``chunks`` before it, and the
    position of their rows. ``may_have_rows``: an earlier attempt may have left some of this chunk.
    """

    attempt: int
    chunks: ChunkedCopy
    end_lsn: Lsn
    may_have_rows: bool


async def begin_chunk(connection: TargetConnection, relation_id: int) -> BegunChunk:
    """Store a new attempt to copy the next chunk of a relation. Raises TargetFencedError."""
    rows = await connection.fetch(_BEGIN_CHUNK_SQL, relation_id)
    if not rows:
        raise TargetFencedError("this table stopped, or lost its bookkeeping, as its copy went on")
    (row,) = rows
    chunks = ChunkedCopy.from_json(json.loads(row["chunks"]))
    return BegunChunk(row["attempt"], chunks, Lsn.parse(row["end_lsn"]), row["may_have_rows"])


async def hand_over_chunk(
    connection: TargetConnection,
    relation_id: int,
    lsn: Lsn,
    chunks: ChunkedCopy,
    *,
    attempt: int,
    rows: int,
    size: int,
    columns: Mapping[str, int],
    definition: SourceDefinition,
) -> None:
    """A chunk is in the target, with the changes up to *lsn*: the stream brings later ones.

    *chunks*: with this one. *columns*, *definition*: as in `HandedOver`. Raises TargetFencedError
    if the copy has begun again.
    """
    updated = await connection.execute(
        _HAND_OVER_CHUNK_SQL,
        relation_id,
        str(lsn),
        attempt,
        json.dumps(chunks.to_json()),
        rows,
        size,
        json.dumps(dict(columns)),
        definition.to_json(),
        chunks.count == 1,
    )
    if not updated:
        raise TargetFencedError("a request or another process has begun this copy again")


async def read_chunks(connection: TargetConnection, relation_id: int) -> ChunkedCopy | None:
    """Return the chunks of a relation that the target has."""
    stored = await connection.fetch_value(
        "select chunks::text from streamer.relation where id = $1", relation_id
    )
    return None if stored is None else ChunkedCopy.from_json(json.loads(stored))


async def hand_over_part(
    connection: TargetConnection,
    relation_id: int,
    lsn: Lsn,
    *,
    attempt: int,
    end_lsn: Lsn,
    is_whole: bool,
    columns: Mapping[str, int],
    storage: Mapping[int, Storage],
    filled: Sequence[str] = (),
) -> None:
    """Rows of a relation in sync were exchanged at *lsn*, where its stream goes on.

    *end_lsn*: the relation's position before. *is_whole*: the exchange compared all its rows, so
    none is in quarantine any more. *columns*, *storage*: as in `hand_over`. *filled*: the columns
    that all rows have got, if not whole rows. Raises TargetFencedError if another process has moved
    the position, or the copy has begun again.
    """
    updated = await connection.execute(
        _HAND_OVER_PART_SQL,
        relation_id,
        str(lsn),
        attempt,
        str(end_lsn),
        is_whole,
        json.dumps(dict(columns)),
        list(filled),
        storage_json(storage),
    )
    if not updated:
        raise TargetFencedError("a request or another process has begun this copy again")


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A relation whose copy is in the target: the stream brings its changes from *lsn* on.

    ``definition``, ``storage``: those of the source's table at *lsn*. Without ``attempt`` there was
    no copy: `initial: none` declared the relation in sync.
    """

    relation_id: int
    lsn: Lsn
    attempt: int | None
    rows: int
    size: int
    owns_rows: bool
    columns: Mapping[str, int]
    definition: SourceDefinition
    storage: Mapping[int, Storage] | None = None


async def hand_over(connection: TargetConnection, relations: Sequence[HandedOver]) -> None:
    """Hand *relations* over to the stream; several at once need a transaction of the caller.

    Raises TargetFencedError if a copy has begun again meanwhile.
    """
    updated = await connection.execute(
        _HAND_OVER_SQL,
        [each.relation_id for each in relations],
        [str(each.lsn) for each in relations],
        [each.rows for each in relations],
        [each.size for each in relations],
        [each.attempt for each in relations],
        [each.owns_rows for each in relations],
        [json.dumps(dict(each.columns)) for each in relations],
        [each.definition.to_json() for each in relations],
        [storage_json(each.storage) for each in relations],
    )
    if updated < len(relations):
        raise TargetFencedError("a request or another process has begun this copy again")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Sums over the parts of a copy; ``heap_bytes``: their size at the source."""

    rows: int
    bytes: int
    heap_bytes: int
    heap_bytes_total: int
    rows_total: int | None


@dataclass(frozen=True, slots=True)
class RunningParts:
    """The progress of the parts under way."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of a copy. Rows that COPY has read but no transaction has committed count."""

    rows: int
    rows_total: int | None
    bytes: int
    bytes_total: int | None
    rows_per_second: float | None
    seconds_left: float | None


def estimate(ledger: Ledger, running: RunningParts, seconds: float | None) -> CopyProgress:
    """Say how far a copy is that began to bring rows *seconds* ago; None if it has not. Pure.

    A part is larger or smaller in COPY's format than at the source: how much tell the parts that
    are done.
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
    rate = left = None
    if seconds is not None and rows:
        rate = rows / max(seconds, 0.001)
        left = max(0.0, seconds / share - seconds) if share else None
    return CopyProgress(
        rows=rows,
        rows_total=None if not ledger.rows_total else max(ledger.rows_total, rows),
        bytes=size,
        bytes_total=max(round(size_total), size) if size_total else None,
        rows_per_second=None if rate is None else round(rate, 1),
        seconds_left=None if left is None else round(left, 1),
    )


async def read_progress(connection: TargetConnection) -> dict[int, CopyProgress]:
    """Return how far the copies are that are under way, by relation id."""
    ledgers = await connection.fetch(_LEDGERS_SQL, GROWTH)
    if not ledgers:
        return {}
    running: list[Any] = []
    if connection.server_version >= 14_00_00:
        running = await connection.fetch(_RUNNING_SQL)
    by_table = {(row["application_name"], row["namespace"], row["name"]): row for row in running}
    found = {}
    for row in ledgers:
        name, target = f"streamer copy {row['source_id']}", parse_name(row["target"])
        now = by_table.get((name, "streamer", f"copy_{row['relation_id']}")) or by_table.get(
            (name, target.namespace, target.name)
        )
        parts = RunningParts(now["rows"], now["bytes"]) if now else RunningParts(0, 0)
        ages = [age for age in (row["seconds"], now and now["seconds"]) if age is not None]
        ledger = Ledger(
            row["rows"],
            row["bytes"],
            row["heap_bytes"],
            row["heap_bytes_total"],
            row["rows_total"],
        )
        found[row["relation_id"]] = estimate(ledger, parts, max(ages, default=None))
    return found


@dataclass(frozen=True, slots=True)
class OwnSession:
    """A session that copies, and a table on which it holds a lock or waits for one."""

    pid: int
    application_name: str
    namespace: str
    table: str
    is_blocked: bool


async def read_own_sessions(connection: TargetConnection) -> list[OwnSession]:
    """Return the sessions at the target that prepare, copy or finish tables, of all sources."""
    return [OwnSession(**row) for row in await connection.fetch(_OWN_SESSIONS_SQL)]


async def set_copy_error(
    session: Executor, relation_ids: list[int], error: ErrorReport | None
) -> None:
    """Store why copies under way have to begin again; None when they go on."""
    await RELATIONS.update(
        session,
        {"error": error},
        "where id = any ($2::int8[]) and state in ('init', 'copying')"
        " and error is distinct from $3",
        relation_ids,
        error and error.text,
    )


async def fill_directly(session: Executor, relation_ids: Sequence[int]) -> None:
    """Store that copies fill the target tables themselves, so all rows there are streamer's."""
    await RELATIONS.update(
        session,
        {"filling": True, "owns_rows": True},
        "where id = any ($2::int8[])",
        relation_ids,
    )


async def set_row_estimates(session: Executor, rows: Mapping[int, int | None]) -> None:
    """Store how many rows the source's tables have, by relation id."""
    await RELATIONS.update_each(
        session, ({"id": key, "rows_total": count} for key, count in rows.items())
    )


async def read_leftover_stages(session: Executor, source_id: int | None) -> list[str]:
    """Return the staging tables, by name, of unknown relations and of those of a source."""
    return [row["name"] for row in await session.fetch(_LEFTOVERS_SQL, source_id)]


async def is_handed_over(
    connection: TargetConnection, relation_id: int, lsn: Lsn, *, attempt: int
) -> bool:
    """Whether a hand-over with an unknown outcome was committed."""
    return bool(
        await connection.fetch_value(
            "select state <> 'copying' and snapshot_lsn = $2::text::pg_lsn and attempt = $3"
            " from streamer.relation where id = $1",
            relation_id,
            str(lsn),
            attempt,
        )
    )


_LEFTOVERS_SQL: Final = """
select c.relname as name
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
left join streamer.relation r on c.relname = 'copy_' || r.id
where n.nspname = 'streamer' and c.relkind = 'r' and c.relname ~ '^copy_[0-9]+$'
  and (r.id is null or r.source_id = $1)
"""
_BEGIN_COPIES_SQL: Final = """
update streamer.relation r set
    attempt = attempt + 1,
    state = case state when 'paused' then state else 'copying' end,
    error = case when state in ('init', 'copying') then error end,
    error_code = case when state in ('init', 'copying') then error_code end,
    error_remedy = case when state in ('init', 'copying') then error_remedy end, waiting_for = null,
    snapshot_lsn = null, chunks = null,
    rows_total = null, rows_copied = 0, bytes_copied = 0,
    changed_at = now()
where r.id = any ($1::int8[]) and not needs_resync
returning r.id, attempt, filling as is_filling, target_created or owns_rows as owns_rows
"""
_BEGIN_PART_SQL: Final = """
update streamer.relation set
    attempt = attempt + 1, state = case state when 'paused' then state else 'copying' end,
    error = null, error_code = null, error_remedy = null, waiting_for = null, changed_at = now()
where id = $1 and not needs_resync and snapshot_lsn is not null and resync is not null
returning attempt, filling as is_filling, target_created or owns_rows as owns_rows
"""
_HAND_OVER_PART_SQL: Final = f"""
with gone as ({quarantined_changes.COPIED_SQL.format(relation_ids="array[$1::int8]")} and $5)
update streamer.relation set
    state = case state when 'paused' then state else 'catching_up' end,
    snapshot_lsn = $2::text::pg_lsn, end_lsn = $2::text::pg_lsn,
    columns = case when $5 then $6::text::jsonb else columns end,
    storage = case when $5 then $8::text::jsonb else storage end,
    unfilled = case when $5 then '{{}}'
                    else array(select unnest(unfilled) except select unnest($7::text[])) end,
    copy_is_due = copy_is_due and not $5,
    resync = null, error = null, error_code = null, error_remedy = null, waiting_for = null,
    changed_at = now()
where id = $1 and attempt = $3 and end_lsn = $4::text::pg_lsn and end_lsn <= $2::text::pg_lsn
"""
_BEGIN_CHUNK_SQL: Final = """
update streamer.relation set
    attempt = attempt + 1, state = case state when 'paused' then state else 'copying' end,
    error = null, error_code = null, error_remedy = null, waiting_for = null, changed_at = now()
where id = $1 and not needs_resync and chunks is not null
returning attempt, chunks::text as chunks, end_lsn::text as end_lsn,
    attempt > coalesce((chunks->>'attempt')::int8, 0) + 1 as may_have_rows
"""
# The first of several chunks begins a copy of all rows.
_HAND_OVER_CHUNK_SQL: Final = f"""
with gone as ({quarantined_changes.COPIED_SQL.format(relation_ids="array[$1::int8]")} and $9)
update streamer.relation r set
    end_lsn = $2::text::pg_lsn,
    chunks = jsonb_build_object('began_at', coalesce(chunks->'began_at', to_jsonb((
        select min(started_at) from streamer.sync_partition where relation_id = r.id))),
        'attempt', attempt) || $4::text::jsonb,
    rows_copied = rows_copied + $5, bytes_copied = bytes_copied + $6,
    columns = $7::text::jsonb, definition = $8::text::jsonb,
    error = null, error_code = null, error_remedy = null, waiting_for = null, changed_at = now()
where id = $1 and attempt = $3 and not needs_resync and snapshot_lsn is null
  and end_lsn <= $2::text::pg_lsn and (chunks is null) = $9
"""
# The copy includes the rows of changes in quarantine, unless chunks came before.
_HAND_OVER_SQL: Final = f"""
with gone as ({quarantined_changes.COPIED_SQL.format(relation_ids="$1::int8[]")}
    and exists (select from streamer.relation r where r.id = relation_id and r.chunks is null)),
obsolete as ({OBSOLETE_SQL.format(relation_ids="$1::int8[]")})
update streamer.relation r set
    state = case state when 'paused' then state else 'catching_up' end,
    snapshot_lsn = c.lsn::pg_lsn, end_lsn = c.lsn::pg_lsn,
    rows_copied = c.copied + b.copied, rows_total = c.copied + b.copied,
    bytes_copied = c.size + b.size,
    declared = r.declared or c.attempt is null,
    owns_rows = r.owns_rows or c.owns, columns = c.columns::jsonb,
    definition = c.definition::jsonb, storage = c.storage::jsonb,
    filling = false, chunks = null, resync = null, error = null, error_code = null,
    error_remedy = null, waiting_for = null, changed_at = now(), unfilled = '{{}}',
    copy_is_due = false
from unnest($1::int8[], $2::text[], $3::int8[], $4::int8[], $5::int4[], $6::bool[], $7::text[],
            $8::text[], $9::text[])
     c (id, lsn, copied, size, attempt, owns, columns, definition, storage)
join lateral (
    select case when o.chunks is null then 0 else o.rows_copied end,
           case when o.chunks is null then 0 else o.bytes_copied end
    from streamer.relation o where o.id = c.id) b (copied, size) on true
where r.id = c.id and (c.attempt is null or r.attempt = c.attempt)
"""
# A table that is paused before its copy is complete is still being copied.
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
# In pg_locks a session has a row for a lock that it waits for, too.
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
# By name of the table; parts of several sources differ by their sessions.
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
