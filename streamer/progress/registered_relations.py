"""Registers the mapped tables of a source in streamer.relation, and forgets those that leave."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from streamer.error_reports import ErrorReport
from streamer.failpoints import failpoint
from streamer.mapping.names import RelationName
from streamer.mapping.options import Initial
from streamer.mapping.recomputed import recomputed
from streamer.mapping.resync import Mode, Resync
from streamer.mapping.rules import RelationMapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.purges import read_left_rows
from streamer.progress.relation_columns import request_unfilled
from streamer.progress.relations import RELATIONS, RelationRecord
from streamer.progress.table import Executor
from streamer.progress.unmapped_relations import bring_back, forget_former, keep_former
from streamer.source.catalog import SourceRelation
from streamer.target.connection import TargetConnection

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
    async with bookkeeping.transaction() as connection:
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
        rows = await RELATIONS.read(
            connection, "where source_id = $1 and source = any ($2::text[])", source_id, sources
        )
    if has_requested:
        failpoint("expressions.stored")
    records = {
        record.source: replace(record, has_returned=record.source in returned) for record in rows
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
        values = dict.fromkeys(("declared", "owns_rows", "needs_resync"), True)
        error = {"state": "error", "error": ErrorReport.of(rows.error)}
        await RELATIONS.set(
            connection, rows.relation_id, {**values, **error}, also="changed_at = now()"
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


async def forget_relation(bookkeeping: Bookkeeping, relation_id: int) -> None:
    async with bookkeeping.transaction() as connection:
        await remove_relation(connection, relation_id)


async def remove_relation(session: Executor, relation_id: int) -> None:
    """Remove a relation in the transaction of the caller, and remember it as a former one."""
    await keep_former(session, relation_id)
    await RELATIONS.delete(session, "where id = $1", relation_id)


async def remove_relations(session: Executor, source_id: int) -> None:
    """Remove all relations of a source, and forget its former ones."""
    await forget_former(session, source_id)
    await RELATIONS.delete(session, "where source_id = $1", source_id)
