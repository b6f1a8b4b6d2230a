"""The rows of streamer.relation: state, definition and progress of each mapped table."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from streamer.error_reports import ErrorReport, TableWait
from streamer.failpoints import failpoint
from streamer.lsn import Lsn
from streamer.mapping.chunks import ChunkedCopy
from streamer.mapping.mass_delete import MassDelete
from streamer.mapping.names import RelationName
from streamer.mapping.options import Initial
from streamer.mapping.recomputed import recomputed
from streamer.mapping.resync import Mode, Resync
from streamer.mapping.rules import RelationMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.purges import read_left_rows
from streamer.progress.unmapped_relations import bring_back, keep_former
from streamer.source.catalog import SourceRelation
from streamer.target.connection import TargetConnection, transaction
from streamer.target.unfilled_columns import request_unfilled


@dataclass(frozen=True, slots=True)
class RelationRecord:
    """A row of streamer.relation. ``source`` and ``target``: as `RelationName` prints them."""

    relation_id: int
    source_id: int
    source: str
    target: str
    type: str
    state: str
    snapshot_lsn: Lsn | None
    end_lsn: Lsn
    attempt: int
    rows_copied: int
    bytes_copied: int
    rows_total: int | None
    error: ErrorReport | None
    wait: TableWait | None
    lag_seconds: float | None
    visible_lsn: Lsn | None
    target_created: bool
    declared: bool
    owns_rows: bool
    resync: Resync
    publication_mark: str | None
    source_oid: int | None
    identity: str | None
    transport: str | None
    transport_reason: str | None
    needs_resync: bool
    expressions: str | None
    truncates_skipped: int
    brake: MassDelete | None
    outlives: bool
    quarantined: int
    chunks: ChunkedCopy | None = None
    """The rows that a copy in chunks has brought, while that is under way."""
    has_returned: bool = False
    """It was mapped before, not all the time, and is mapped again as of now."""
    changed_at: datetime | None = None
    """When its state changed last."""

    @property
    def is_bare(self) -> bool:
        """Whether it has brought nothing to the target, nor begun to (`read_bare`)."""
        return self.snapshot_lsn is None and not self.attempt and not self.owns_rows

    @property
    def waiting_brake(self) -> MassDelete | None:
        """The mass delete that waits for an operator's decision."""
        return None if self.brake is None or self.brake.is_decided else self.brake


_RELATIONS_SQL: Final = """
select id as relation_id, source_id, source, target, type, state,
       snapshot_lsn::text as snapshot_lsn, end_lsn::text as end_lsn, attempt,
       rows_copied, bytes_copied, rows_total, error, error_code, error_remedy,
       case when waiting_for is not null then wait end as wait,
       extract(epoch from clock_timestamp() - lag_since)::float8 as lag_seconds,
       visible_lsn::text as visible_lsn, target_created,
       declared, owns_rows, resync, publication_mark, source_oid, identity,
       transport, transport_reason, needs_resync, expressions, truncates_skipped, brake,
       outlives, chunks, changed_at,
       (select count(*) from streamer.quarantine q where q.relation_id = relation.id) as quarantined
from streamer.relation
"""


def _relation_record(row: Any) -> RelationRecord:
    fields = dict(row)
    fields["error"] = ErrorReport.stored(
        fields["error"], fields.pop("error_code"), fields.pop("error_remedy")
    )
    wait = fields["wait"]
    fields["wait"] = None if wait is None else TableWait.from_json(json.loads(wait))
    fields["end_lsn"] = Lsn.parse(fields["end_lsn"])
    if fields["snapshot_lsn"] is not None:
        fields["snapshot_lsn"] = Lsn.parse(fields["snapshot_lsn"])
    if fields["visible_lsn"] is not None:
        fields["visible_lsn"] = Lsn.parse(fields["visible_lsn"])
    fields["resync"] = _resync(fields["resync"])
    fields["brake"] = MassDelete.stored(fields["brake"])
    chunks = fields["chunks"]
    fields["chunks"] = None if chunks is None else ChunkedCopy.from_json(json.loads(chunks))
    return RelationRecord(**fields)


def _resync(stored: str | None) -> Resync:
    return Resync.from_json(None if stored is None else json.loads(stored))


async def read_relation_records(
    bookkeeping: Bookkeeping, source_id: int | None = None
) -> list[RelationRecord]:
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            f"{_RELATIONS_SQL} where $1::int8 is null or source_id = $1 order by source_id, source",
            source_id,
        )
        return [_relation_record(row) for row in rows]


async def read_created(
    connection: TargetConnection, targets: Iterable[RelationName]
) -> set[RelationName]:
    """Return those of *targets* that streamer created."""
    names = {str(name): name for name in targets}
    rows = await connection.fetch(
        "select distinct target from streamer.relation"
        " where target_created and target = any ($1::text[])",
        list(names),
    )
    return {names[row["target"]] for row in rows}


_MOVED_SQL: Final = """
delete from streamer.relation r using unnest($2::text[], $3::text[]) w (source, target)
where r.source_id = $1 and r.source = w.source and r.target <> w.target
"""
_NEW_SQL: Final = """
insert into streamer.relation (source_id, source, target, type, expressions)
select $1, w.* from unnest($2::text[], $3::text[], $4::text[], $5::text[]) w
on conflict (source_id, source) do nothing
"""
_CHANGED_SQL: Final = """
update streamer.relation r
set type = w.type, expressions = w.expressions,
    state = case when p.lacks_changes then r.state when p.is_in_step then 'copying'
                 when w.is_copied then 'init' else r.state end,
    snapshot_lsn = case when w.is_copied and not p.is_in_step then null else r.snapshot_lsn end,
    resync = case when p.is_in_step then $7::text::jsonb else r.resync end, chunks = null,
    copy_is_due = r.copy_is_due or p.is_in_step,
    error = case when p.lacks_changes then r.error end,
    error_code = case when p.lacks_changes then r.error_code end,
    error_remedy = case when p.lacks_changes then r.error_remedy end,
    needs_resync = p.lacks_changes, brake = null, outlives = false
from unnest($2::text[], $3::text[], $4::text[], $5::boolean[], $6::boolean[])
     w (source, type, expressions, is_copied, keeps_past)
join streamer.relation o on o.source_id = $1 and o.source = w.source,
     lateral (select w.keeps_past and w.is_copied and o.type = w.type
                     and o.snapshot_lsn is not null and not o.needs_resync,
                     w.type <> 'clone' and o.type = w.type and o.needs_resync)
             p (is_in_step, lacks_changes)
where r.id = o.id and (r.type <> w.type or r.expressions is distinct from w.expressions)
"""


# Rows in quarantine come with a copy of all rows only.
_IN_SYNC_SQL: Final = """
select id, source, type, expressions from streamer.relation r
where source_id = $1 and source = any ($2::text[]) and snapshot_lsn is not null and not needs_resync
  and not exists (select from streamer.quarantine q where q.relation_id = r.id)
order by id for update
"""
# The planner would request columns with a negative number once more.
_RECOMPUTED_SQL: Final = """
update streamer.relation r set expressions = $2, columns = coalesce(
    (select jsonb_object_agg(
         key, case when key = any ($3::text[]) then abs(value::int) else value::int end)
     from jsonb_each_text(r.columns)), r.columns)
where id = $1
"""


async def register_relations(
    bookkeeping: Bookkeeping,
    source_id: int,
    mappings: Iterable[RelationMapping],
    *,
    may_resume: bool = False,
    found: Mapping[RelationName, SourceRelation] = MappingProxyType({}),
) -> list[RelationRecord]:
    """Return the records of mapped relations, in the order of *mappings*; new ones get one.

    A copy replaces the rows of a relation that was in the mapping before. With *may_resume*, when
    the stream is about to begin at the acknowledged position, the relation continues if that
    position has not moved since. A relation with another target is new. With another type, or other
    expressions, a copy fills the same target again, unless the mapping says `initial: none`. If the
    relation keeps its past, it takes its changes up to the point of that copy. Where
    only `set` differs, this requests the columns that it changes, if `brings_columns` allows that.
    *found*: the source's definitions, as far as it has them.

    The number of statements does not depend on the number of relations: a start with thousands
    would take as many round trips.
    """
    wanted = list(mappings)
    targets = {str(mapping.source): str(mapping.target) for mapping in wanted}
    sources, types = list(targets), [mapping.type.value for mapping in wanted]
    marks = [mapping.rule.expressions_mark for mapping in wanted]
    are_copied = [mapping.rule.initial is not Initial.NONE for mapping in wanted]
    keep_past = [mapping.rule.keeps_past for mapping in wanted]
    async with bookkeeping.connection() as connection, transaction(connection):
        await connection.execute(_MOVED_SQL, source_id, sources, list(targets.values()))
        returned = await bring_back(connection, source_id, targets, may_resume=may_resume)
        await connection.execute(_NEW_SQL, source_id, sources, list(targets.values()), types, marks)
        await _refuse_left_rows(connection, source_id, wanted)
        has_requested = await _request_recomputed(connection, source_id, wanted, found)
        await connection.execute(
            _CHANGED_SQL,
            source_id,
            sources,
            types,
            marks,
            are_copied,
            keep_past,
            json.dumps(Resync(Mode.DIFF).to_json()),
        )
        rows = await connection.fetch(
            f"{_RELATIONS_SQL} where source_id = $1 and source = any ($2::text[])",
            source_id,
            sources,
        )
    if has_requested:
        failpoint("expressions.stored")
    records = {
        record.source: replace(record, has_returned=record.source in returned)
        for record in map(_relation_record, rows)
    }
    return [records[source] for source in sources]


async def _refuse_left_rows(
    connection: TargetConnection, source_id: int, wanted: Iterable[RelationMapping]
) -> None:
    """Let new relations with `initial: none` wait for a resync where rows or changes are missing.

    Their rows in the target are those that streamer wrote before their source was removed.
    """
    declared = [str(mapping.source) for mapping in wanted if mapping.rule.initial is Initial.NONE]
    for rows in await read_left_rows(connection, source_id, declared) if declared else ():
        report = ErrorReport.of(rows.error)
        await connection.execute(
            "update streamer.relation set state = 'error', declared = true, owns_rows = true,"
            " needs_resync = true, error = $2, error_code = $3, error_remedy = $4::text::jsonb,"
            " changed_at = now() where id = $1",
            rows.relation_id,
            report.text,
            report.code,
            report.stored_remedy,
        )


def brings_columns(mapping: RelationMapping, relation: SourceRelation | None) -> bool:
    """Whether columns that `set` computes otherwise can be brought alone.

    Without a key, a change finds its row by the values of all columns. So the target may not hold
    some by the old expressions while the stream computes them by the new ones.
    """
    return relation is not None and bool(relation.key) and mapping.rule.initial is not Initial.NONE


async def _request_recomputed(
    connection: TargetConnection,
    source_id: int,
    wanted: Iterable[RelationMapping],
    found: Mapping[RelationName, SourceRelation],
) -> bool:
    """Store other expressions of relations in sync, and request the columns that they change.

    Return whether there are any.
    """
    has_requested = False
    by_source = {str(mapping.source): mapping for mapping in wanted}
    for row in await connection.fetch(_IN_SYNC_SQL, source_id, list(by_source)):
        mapping = by_source[row["source"]]
        mark = mapping.rule.expressions_mark
        relation = found.get(mapping.source)
        if row["expressions"] == mark or row["type"] != mapping.type.value:
            continue
        if relation is None or not brings_columns(mapping, relation):
            continue
        if (changed := recomputed(row["expressions"], mapping, relation.column_names)) is None:
            continue
        await connection.execute(_RECOMPUTED_SQL, row["id"], mark, list(changed.sources))
        if changed.columns:
            await request_unfilled(connection, row["id"], changed.columns)
            has_requested = True
    return has_requested


async def read_bare(bookkeeping: Bookkeeping, relation_ids: Iterable[int]) -> set[int]:
    """Return those of *relation_ids* that have brought nothing to the target, nor begun to."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select id from streamer.relation where id = any ($1::int8[])"
            " and snapshot_lsn is null and attempt = 0 and not owns_rows",
            list(relation_ids),
        )
        return {row["id"] for row in rows}


async def forget_relation(bookkeeping: Bookkeeping, relation_id: int) -> None:
    async with bookkeeping.connection() as connection, transaction(connection):
        await keep_former(connection, relation_id)
        await connection.execute("delete from streamer.relation where id = $1", relation_id)


async def set_published(
    bookkeeping: Bookkeeping, published: dict[int, tuple[str | None, str | None, int | None]]
) -> None:
    """Store the publication marks, replica identities and OIDs that relations, by id, have."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation r"
            " set publication_mark = p.mark, identity = p.identity, source_oid = p.oid"
            " from unnest($1::int8[], $2::text[], $3::text[], $4::int8[])"
            " p (id, mark, identity, oid) where r.id = p.id",
            list(published),
            [mark for mark, _, _ in published.values()],
            [identity for _, identity, _ in published.values()],
            [oid for _, _, oid in published.values()],
        )


async def set_transports(bookkeeping: Bookkeeping, transports: dict[int, tuple[str, str]]) -> None:
    """Store the transport of relations, by their id, and the reason."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation r set transport = t.transport, transport_reason = t.reason"
            " from unnest($1::int8[], $2::text[], $3::text[]) t (id, transport, reason)"
            " where r.id = t.id and (r.transport, r.transport_reason)"
            " is distinct from (t.transport, t.reason)",
            list(transports),
            [transport for transport, _ in transports.values()],
            [reason for _, reason in transports.values()],
        )


async def require_resync_of_source(
    bookkeeping: Bookkeeping, source_id: int, error: ErrorReport
) -> None:
    """Changes of a source are lost for good: record it for every relation that awaits no copy."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set error = $2, error_code = $3,"
            " error_remedy = $4::text::jsonb, changed_at = now(),"
            " state = case state when 'paused' then state else 'error' end"
            " where source_id = $1 and snapshot_lsn is not null"
            " and error is distinct from $2",
            source_id,
            error.text,
            error.code,
            error.stored_remedy,
        )


async def require_resync(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> None:
    """Changes of a relation are missing for good: it waits until an operator requests a copy."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set error = $2, error_code = $3, needs_resync = true,"
            " error_remedy = $5::text::jsonb, changed_at = now(),"
            " state = case state when 'paused' then state else 'error' end,"
            " attempt = attempt + 1, snapshot_lsn = null, chunks = null, waiting_for = null,"
            " brake = null, outlives = false,"
            " resync = coalesce(resync, $4::text::jsonb) where id = $1",
            relation_id,
            error.text,
            error.code,
            json.dumps(Resync().to_json()),
            error.stored_remedy,
        )


async def demand_copy(bookkeeping: Bookkeeping, relation_id: int, resync: Resync) -> None:
    """Require another copy of a relation that was in sync or in copy."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set error = null, error_code = null,"
            " error_remedy = null, needs_resync = false,"
            " state = case state when 'paused' then state else 'init' end,"
            " waiting_for = null, changed_at = now(), brake = null, outlives = false,"
            " attempt = attempt + 1, snapshot_lsn = null, chunks = null,"
            " resync = $2::text::jsonb"
            " where id = $1",
            relation_id,
            json.dumps(resync.to_json()),
        )


async def forget_target(bookkeeping: Bookkeeping, relation_id: int) -> None:
    """Another table has the name of the target: none of its rows is known to be streamer's."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation"
            " set filling = false, owns_rows = false, target_created = false where id = $1",
            relation_id,
        )


async def demand_copy_at_point(
    bookkeeping: Bookkeeping, relation_id: int, columns: Sequence[str] | None
) -> None:
    """Require rows of a relation in sync, whose changes up to the copy's point count, too.

    *columns*: those of the target to bring, if not all.
    """
    async with bookkeeping.connection() as connection, transaction(connection):
        if columns is None or columns:
            await request_unfilled(connection, relation_id, columns)


async def demand_part(bookkeeping: Bookkeeping, relation_id: int, resync: Resync) -> None:
    """Require the rows of *resync* of a relation in sync, whose last copy has just failed."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set resync = $2::text::jsonb, error = null,"
            " error_code = null, error_remedy = null, changed_at = now(),"
            " state = case state when 'paused' then state else 'copying' end"
            " where id = $1 and snapshot_lsn is not null and not needs_resync",
            relation_id,
            json.dumps(resync.to_json()),
        )


async def fail_copy(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> None:
    """Record why a relation cannot be copied."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set state = 'error', error = $2, error_code = $3,"
            " error_remedy = $4::text::jsonb, waiting_for = null, changed_at = now()"
            " where id = $1",
            relation_id,
            error.text,
            error.code,
            error.stored_remedy,
        )


async def fail_chunk(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> None:
    """Record why a copy in chunks stops; the chunks before stay, and follow the stream.

    A paused table continues when an operator resumes it, so it has no error.
    """
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set error = $2, error_code = $3, state = 'error',"
            " error_remedy = $4::text::jsonb, waiting_for = null, changed_at = now()"
            " where id = $1 and chunks is not null and state <> 'paused'",
            relation_id,
            error.text,
            error.code,
            error.stored_remedy,
        )


async def is_copy_due(bookkeeping: Bookkeeping, relation_id: int) -> bool:
    """Whether rows of a relation in sync need a copy that streamer began by itself."""
    async with bookkeeping.connection() as connection:
        return bool(
            await connection.fetch_value(
                "select copy_is_due from streamer.relation where id = $1", relation_id
            )
        )


async def fail_part(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> None:
    """Record why a copy of some rows of a relation was given up; the relation is as it was."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set error = $2, error_code = $3, resync = null,"
            " error_remedy = $4::text::jsonb,"
            " state = case state when 'paused' then state else 'ready' end,"
            " waiting_for = null, changed_at = now() where id = $1 and snapshot_lsn is not null",
            relation_id,
            error.text,
            error.code,
            error.stored_remedy,
        )


async def set_waiting(
    bookkeeping: Bookkeeping, relation_ids: list[int], wait: TableWait | None
) -> None:
    """Store the obstacles of waiting relations, and clear those that are gone."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set waiting_for = $2, wait = $3::text::jsonb"
            " where id = any ($1::int8[]) and waiting_for is distinct from $2",
            relation_ids,
            wait and str(wait),
            wait and wait.stored,
        )


async def read_known_leaves(
    bookkeeping: Bookkeeping, relation_ids: list[int]
) -> dict[int, dict[int, str]]:
    """Return the replicated partitions of each partitioned relation.

    Each comes with the transactions that attached it; empty if an older version did not store them.
    """
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(
            "select id, leaves, leaf_joins from streamer.relation"
            " where id = any ($1::int8[]) and leaves is not null",
            relation_ids,
        )
    return {
        row["id"]: dict(
            zip(row["leaves"], row["leaf_joins"] or [""] * len(row["leaves"]), strict=True)
        )
        for row in rows
    }


async def set_leaves(bookkeeping: Bookkeeping, relation_id: int, leaves: dict[int, str]) -> None:
    """Store the replicated partitions, with the transactions that attached them."""
    async with bookkeeping.connection() as connection:
        await store_leaves(connection, relation_id, leaves)


async def store_leaves(
    connection: TargetConnection, relation_id: int, leaves: Mapping[int, str]
) -> None:
    """The same, in the transaction of *connection*."""
    await connection.execute(
        "update streamer.relation set leaves = $2, leaf_joins = $3 where id = $1",
        relation_id,
        list(leaves),
        list(leaves.values()),
    )


async def report_gap(bookkeeping: Bookkeeping, relation_id: int, error: ErrorReport) -> bool:
    """Show the gap of a ready relation unless it shows another error; return whether it is new."""
    async with bookkeeping.connection() as connection:
        told = await connection.execute(
            "update streamer.relation set error = $2, error_code = $3,"
            " error_remedy = $4::text::jsonb"
            " where id = $1 and state = 'ready'"
            " and (error is null or error_code = $3 and error <> $2)",
            relation_id,
            error.text,
            error.code,
            error.stored_remedy,
        )
    return bool(told)


async def set_brake(
    bookkeeping: Bookkeeping, relation_id: int, found: MassDelete, error: ErrorReport
) -> None:
    """Pause a relation before the source transaction *found*, unless a copy replaces it anyway."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set state = 'paused', brake = $2::text::jsonb,"
            " error = $3, error_code = $4, error_remedy = $5::text::jsonb, changed_at = now()"
            " where id = $1 and snapshot_lsn is not null and not needs_resync",
            relation_id,
            json.dumps(found.to_json()),
            error.text,
            error.code,
            error.stored_remedy,
        )


async def request_still_unfilled(bookkeeping: Bookkeeping, relation_id: int) -> None:
    """Request the values that existing rows of a relation still lack, if there are any.

    The same cause may have stopped the relation and the copy that was to bring them.
    """
    async with bookkeeping.connection() as connection, transaction(connection):
        for row in await connection.fetch(
            "select unfilled, copy_is_due from streamer.relation"
            " where id = $1 and (unfilled <> '{}' or copy_is_due) and resync is null for update",
            relation_id,
        ):
            columns = None if row["copy_is_due"] else row["unfilled"]
            await request_unfilled(connection, relation_id, columns)


async def set_streaming_state(
    bookkeeping: Bookkeeping, relation_id: int, state: str, error: ErrorReport | None = None
) -> None:
    """Store how applying changes fares, unless an operator wants something else meanwhile."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation set state = $2, error = $3, error_code = $4,"
            " error_remedy = $5::text::jsonb, changed_at = now()"
            " where id = $1 and state in ('catching_up', 'ready', 'error')"
            " and snapshot_lsn is not null and resync is null",
            relation_id,
            state,
            error and error.text,
            error and error.code,
            error and error.stored_remedy,
        )
