"""The bookkeeping of copies: how one begins, how far it is, and how it ends, in the transaction
that ends it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

from streamer.error_reports import ErrorReport
from streamer.errors import TargetFencedError
from streamer.lsn import Lsn
from streamer.mapping.chunks import GROWTH, ChunkedCopy
from streamer.mapping.definition import SourceDefinition
from streamer.mapping.names import parse_name
from streamer.progress import definition_changes, quarantined_changes
from streamer.progress.relation_columns import stored_storage
from streamer.progress.relations import RELATIONS, STATE
from streamer.progress.table import BookkeepingTable, Codec, Executor, Values, plain, to_json
from streamer.source.rewritten_tables import Storage
from streamer.target.connection import TargetConnection, transaction


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """A relation whose copy begins, as a new ``attempt``.

    ``is_filling``: the copy before filled the target directly and did not finish. ``owns_rows``:
    streamer wrote this source's rows in the target. ``chunks``: those before the next one, of which
    an earlier attempt may have left rows (``may_have_rows``).
    """

    relation_id: Annotated[int, Codec("r.id")]
    attempt: int
    is_filling: Annotated[bool, Codec("r.filling")]
    owns_rows: Annotated[bool, Codec("r.target_created or r.owns_rows")]
    chunks: ChunkedCopy | None
    may_have_rows: Annotated[
        bool, Codec("r.attempt > coalesce((r.chunks->>'attempt')::int8, 0) + 1")
    ]


COPIES: Final = BookkeepingTable("relation", "r", BegunCopy)


async def read_filling(session: Executor, relation_ids: Sequence[int]) -> set[int]:
    """Return the relations whose last copy filled the target directly and did not finish."""
    rest = "where r.id = any ($1::int8[]) and r.filling"
    return {copy.relation_id for copy in await COPIES.read(session, rest, relation_ids)}


async def begin_copies(session: Executor, relation_ids: Sequence[int]) -> dict[int, BegunCopy]:
    """Store ``copying`` and a new attempt of relations.

    Raises TargetFencedError if streamer found changes of a relation missing meanwhile. A copy that
    began now would make the relation look in sync.
    """
    values = dict.fromkeys(("snapshot_lsn", "chunks", "rows_total", "waiting_for"))
    none = {"rows_copied": 0, "bytes_copied": 0}
    begun = await _begin(session, relation_ids, values | none, "", also=_SAME_ERROR)
    return {copy.relation_id: copy for copy in begun}


async def begin_part(session: Executor, relation_id: int) -> BegunCopy:
    """Store a new attempt to copy some rows of a relation in sync. Raises TargetFencedError."""
    is_wanted = "and r.snapshot_lsn is not null and r.resync is not null"
    (begun,) = await _begin(session, [relation_id], _WELL, is_wanted)
    return begun


async def begin_chunk(session: Executor, relation_id: int) -> BegunCopy:
    """Store a new attempt to copy the next chunk of a relation. Raises TargetFencedError."""
    (begun,) = await _begin(session, [relation_id], _WELL, "and r.chunks is not null")
    return begun


async def _begin(
    session: Executor, relation_ids: Sequence[int], values: Values, rest: str, also: str = ""
) -> list[BegunCopy]:
    begun = await COPIES.change(
        session,
        values,
        f"where r.id = any ($2::int8[]) and not r.needs_resync {rest}",
        relation_ids,
        also=f"attempt = attempt + 1, state = {STATE.format('copying')}, {_CHANGED}{also}",
    )
    if len(begun) < len(relation_ids):
        raise TargetFencedError("this table stopped, or lost its bookkeeping, as its copy began")
    return begun


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

    *chunks*: with this one; the first one begins a copy of all rows. *columns*, *definition*: as in
    `HandedOver`. Raises TargetFencedError if the copy has begun again.
    """
    async with transaction(connection):
        if chunks.count == 1:
            await quarantined_changes.remove_copied(connection, [relation_id])
        is_stored = await RELATIONS.set(
            connection,
            relation_id,
            _WELL | {"end_lsn": lsn, "columns": dict(columns), "definition": definition},
            "and attempt = $3 and not needs_resync and snapshot_lsn is null"
            " and end_lsn <= $4::text::pg_lsn and (chunks is null) = $5",
            attempt,
            str(lsn),
            chunks.count == 1,
            to_json(plain(chunks)),
            rows,
            size,
            also=_CHUNK,
        )
        if not is_stored:
            raise TargetFencedError(_BEGUN_AGAIN)


async def read_chunks(session: Executor, relation_id: int) -> ChunkedCopy | None:
    """Return the chunks of a relation that the target has."""
    copy = await COPIES.find(session, "where r.id = $1", relation_id)
    return None if copy is None else copy.chunks


async def hand_over_part(
    session: Executor,
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
    the position, or the copy has begun again. The caller has begun a transaction.
    """
    values = _WELL | {"snapshot_lsn": lsn, "end_lsn": lsn, "resync": None}
    if is_whole:
        await quarantined_changes.remove_copied(session, [relation_id])
        values |= {"columns": dict(columns), "storage": stored_storage(storage), **_FILLED}
    is_stored = await RELATIONS.set(
        session,
        relation_id,
        values,
        "and attempt = $3 and end_lsn = $4::text::pg_lsn and end_lsn <= $5::text::pg_lsn",
        attempt,
        str(end_lsn),
        str(lsn),
        *([] if is_whole else [filled]),
        also=f"state = {STATE.format('catching_up')}, {_CHANGED}" + ("" if is_whole else _PARTLY),
    )
    if not is_stored:
        raise TargetFencedError(_BEGUN_AGAIN)


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

    @property
    def stored(self) -> Values:
        """The values of its columns."""
        return {
            **_WELL,
            **_FILLED,
            "id": self.relation_id,
            "snapshot_lsn": self.lsn,
            "end_lsn": self.lsn,
            "rows_copied": self.rows,
            "rows_total": self.rows,
            "bytes_copied": self.size,
            "owns_rows": self.owns_rows,
            "columns": dict(self.columns),
            "definition": self.definition,
            "storage": stored_storage(self.storage),
            "filling": False,
            "chunks": None,
            "resync": None,
            **({"declared": True} if self.attempt is None else {"attempt": self.attempt}),
        }


async def hand_over(connection: TargetConnection, relations: Sequence[HandedOver]) -> None:
    """Hand *relations* over to the stream: those that were copied, or those that are declared.

    Raises TargetFencedError if a copy has begun again meanwhile.
    """
    ids = [each.relation_id for each in relations]
    is_newest = "and r.attempt = v.attempt" if "attempt" in relations[0].stored else ""
    async with transaction(connection):
        await quarantined_changes.remove_copied(connection, ids)
        await definition_changes.remove_copied(connection, ids)
        rows = (each.stored for each in relations)
        if await RELATIONS.update_each(connection, rows, is_newest, _COPIED) < len(relations):
            raise TargetFencedError(_BEGUN_AGAIN)


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
        ledger = Ledger(*(row[field.name] for field in fields(Ledger)))
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


_BEGUN_AGAIN: Final = "a request or another process has begun this copy again"
_CHANGED: Final = "changed_at = now()"
_WELL: Final[dict[str, Any]] = {"error": None, "waiting_for": None}
_FILLED: Final[Values] = {"unfilled": (), "copy_is_due": False}
"""Existing rows lack no value."""
_PARTLY: Final = ", unfilled = array(select unnest(unfilled) except select unnest($6::text[]))"
_SAME_ERROR: Final = "".join(
    f", {name} = case when state in ('init', 'copying') then {name} end"
    for name in ("error", "error_code", "error_remedy")
)
"""Of a copy that begins again: `set_copy_error`."""
_CHUNK: Final = f"""
rows_copied = rows_copied + $7, bytes_copied = bytes_copied + $8, {_CHANGED},
chunks = jsonb_build_object(
    'began_at', coalesce(chunks->'began_at', to_jsonb((
        select min(started_at) from streamer.sync_partition where relation_id = r.id))),
    'attempt', attempt) || $6::text::jsonb
"""
_COPIED: Final = {
    "state": STATE.format("catching_up"),
    "owns_rows": "r.owns_rows or v.owns_rows",
    "changed_at": "now()",
} | {
    # With the rows of former chunks.
    name: f"v.{name} + case when r.chunks is null then 0 else r.{counted} end"
    for name, counted in (
        ("rows_copied", "rows_copied"),
        ("rows_total", "rows_copied"),
        ("bytes_copied", "bytes_copied"),
    )
}
_LEFTOVERS_SQL: Final = """
select c.relname as name
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
left join streamer.relation r on c.relname = 'copy_' || r.id
where n.nspname = 'streamer' and c.relkind = 'r' and c.relname ~ '^copy_[0-9]+$'
  and (r.id is null or r.source_id = $1)
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
