"""Registers the mapped tables of a source in streamer.relation, and removes former tables."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.purges import read_remaining_rows, store_rows
from streamer.bookkeeping.relation_columns import request_unfilled
from streamer.bookkeeping.relation_records import RELATIONS, RelationRecord
from streamer.bookkeeping.unmapped_relations import forget_former, restore_records, store_former
from streamer.control.resync_options import Mode, Resync
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.recomputed_columns import recomputed
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Initial, TableType
from streamer.mapping.rules import RelationMapping
from streamer.source.catalog import SourceRelation
from streamer.target.connection import TargetConnection
from streamer.util.failpoints import failpoint

_OF_SOURCES: Final = "where source_id = $1 and source = any ($2::text[])"
_MOVED_SQL: Final = """
select r.id from streamer.relation r
join unnest($2::text[], $3::text[], $4::text[]) w (source, target, sid) on w.source = r.source
where r.source_id = $1 and (r.target <> w.target or r.row_sid is distinct from w.sid)
"""
_DISJOINT_SQL: Final = """
update streamer.relation r set disjoint = w.disjoint
from unnest($2::text[], $3::bool[]) w (source, disjoint)
where r.source_id = $1 and r.source = w.source and r.disjoint <> w.disjoint
"""
# Otherwise the planner would request columns with a negative number again.
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
    definitions: Mapping[RelationName, SourceRelation] = MappingProxyType({}),
) -> list[RelationRecord]:
    """Return the records of mapped relations, in the order of *mappings*; create missing records.

    A copy replaces the rows of a relation that was in the mapping before. With *may_resume*, the
    stream is about to begin at the acknowledged position: the relation continues if that position
    has not moved since. A relation with a new target or a new sid is new. With a new type, or new
    expressions, a copy fills the same target again, unless the mapping says `initial: none`. A
    relation that keeps history applies its changes up to the point of that copy. If only `set`
    differs and `can_backfill` allows a backfill, this function requests a backfill of the columns.
    *definitions*: the known definitions of the source.

    The number of statements does not depend on the number of relations, because a start with
    thousands of relations would take thousands of round trips.
    """
    by_name = {str(mapping.source): mapping for mapping in mappings}
    rows_of = {source: (str(m.target), m.sid) for source, m in by_name.items()}
    async with bookkeeping.transaction() as connection:
        await _remove_moved(connection, source_id, rows_of)
        returned = await restore_records(connection, source_id, rows_of, may_resume=may_resume)
        new = (
            {"source_id": source_id} | _columns_of_mapping(mapping) for mapping in by_name.values()
        )
        await RELATIONS.insert(connection, new, "on conflict (source_id, source) do nothing")
        disjoint = [mapping.rule.is_disjoint for mapping in by_name.values()]
        await connection.execute(_DISJOINT_SQL, source_id, list(by_name), disjoint)
        await _refuse_remaining_rows(connection, source_id, by_name.values())
        rows = await RELATIONS.read(connection, _OF_SOURCES, source_id, list(by_name))
        if changed := [row.source for row in rows if not _matches(row, by_name[row.source])]:
            await _store_changed_mappings(
                connection, source_id, {s: by_name[s] for s in changed}, definitions
            )
            rows = await RELATIONS.read(connection, _OF_SOURCES, source_id, list(by_name))
    if changed:
        failpoint("expressions.stored")
    records = {row.source: replace(row, has_returned=row.source in returned) for row in rows}
    return [records[source] for source in by_name]


async def _remove_moved(
    connection: TargetConnection, source_id: int, rows_of: Mapping[str, tuple[str, str | None]]
) -> None:
    """Remove the records of relations that now write other rows. Their former rows stay."""
    targets, sids = zip(*rows_of.values(), strict=True) if rows_of else ((), ())
    values = (source_id, list(rows_of), list(targets), list(sids))
    if moved := [row["id"] for row in await connection.fetch(_MOVED_SQL, *values)]:
        await store_rows(connection, moved)
        await RELATIONS.delete(connection, "where id = any ($1::int8[])", moved)


def _columns_of_mapping(mapping: RelationMapping) -> dict[str, Any]:
    names = {"source": mapping.source, "target": mapping.target, "row_sid": mapping.sid}
    return names | {"type": mapping.type, "expressions": mapping.rule.expressions_fingerprint}


def _matches(record: RelationRecord, mapping: RelationMapping) -> bool:
    stored = (record.type, record.expressions)
    return stored == (mapping.type.value, mapping.rule.expressions_fingerprint)


async def _store_changed_mappings(
    connection: TargetConnection,
    source_id: int,
    by_name: Mapping[str, RelationMapping],
    definitions: Mapping[RelationName, SourceRelation],
) -> None:
    """Store new types and expressions of relations, and require the necessary copies."""
    changed = []
    condition = f"{_OF_SOURCES} order by id for update of r"
    for record in await RELATIONS.read(connection, condition, source_id, list(by_name)):
        mapping = by_name[record.source]
        if not await _request_recomputed(
            connection, record, mapping, definitions.get(mapping.source)
        ):
            changed.append({"id": record.relation_id} | _values_after_change(record, mapping))
    await RELATIONS.update_each(connection, changed)


def _values_after_change(record: RelationRecord, mapping: RelationMapping) -> dict[str, Any]:
    """Return the values of a relation whose target rows come from a former mapping. Pure."""
    is_copied = mapping.rule.initial is not Initial.NONE
    has_type = record.type == mapping.type.value
    lacks_changes = mapping.type is not TableType.CLONE and has_type and record.needs_resync
    is_in_sync = has_type and record.snapshot_lsn is not None and not record.needs_resync
    values = _columns_of_mapping(mapping) | {
        "state": record.state,
        "snapshot_lsn": record.snapshot_lsn,
        "resync": record.resync if record.has_resync else None,
        "chunks": None,
        "copy_is_due": record.copy_is_due,
        "error": record.error if lacks_changes else None,
        "needs_resync": lacks_changes,
        "mass_delete": None,
        "outlives": False,
    }
    if is_copied and mapping.rule.keeps_history and is_in_sync:
        return values | {"state": "copying", "resync": Resync(Mode.DIFF), "copy_is_due": True}
    if is_copied:
        values["snapshot_lsn"] = None
        values["state"] = record.state if lacks_changes else "init"
    return values


async def _refuse_remaining_rows(
    connection: TargetConnection, source_id: int, mappings: Iterable[RelationMapping]
) -> None:
    """Make new relations with `initial: none` wait for a resync where rows or changes are missing.

    streamer wrote the rows in the target before the source of these relations was removed.
    """
    uncopied = [str(mapping.source) for mapping in mappings if mapping.rule.initial is Initial.NONE]
    for rows in await read_remaining_rows(connection, source_id, uncopied) if uncopied else ():
        values = dict.fromkeys(("declared", "owns_rows", "was_in_sync", "needs_resync"), True)
        error = {"state": "error", "error": ErrorReport.of(rows.error)}
        await RELATIONS.set(
            connection, rows.relation_id, {**values, **error}, also="changed_at = now()"
        )


def can_backfill(mapping: RelationMapping, relation: SourceRelation | None) -> bool:
    """Whether a backfill can recompute only the columns that `set` computes differently.

    Without a key, a change finds its row by the values of all columns. So the target must not
    contain values of the old expressions while the stream computes values with the new expressions.
    """
    return relation is not None and bool(relation.key) and mapping.rule.initial is not Initial.NONE


async def _request_recomputed(
    connection: TargetConnection,
    record: RelationRecord,
    mapping: RelationMapping,
    relation: SourceRelation | None,
) -> bool:
    """Store new expressions of a relation in sync, and request a backfill of changed columns.

    Return False if the relation needs a copy of all rows instead, for example because of rows in
    quarantine.
    """
    is_in_sync = record.snapshot_lsn is not None and not record.needs_resync
    if not is_in_sync or record.quarantined or record.type != mapping.type.value:
        return False
    if relation is None or not can_backfill(mapping, relation):
        return False
    if (changed := recomputed(record.expressions, mapping, relation.column_names)) is None:
        return False
    fingerprint = mapping.rule.expressions_fingerprint
    await connection.execute(
        _RECOMPUTED_SQL, record.relation_id, fingerprint, list(changed.sources)
    )
    if changed.columns:
        await request_unfilled(connection, record.relation_id, changed.columns)
    return True


async def forget_relation(bookkeeping: Bookkeeping, relation_id: int) -> None:
    async with bookkeeping.transaction() as connection:
        await remove_relation(connection, relation_id)


async def remove_relation(session: Executor, relation_id: int) -> None:
    """Remove a relation in the transaction of the caller, and store it as a former relation."""
    await store_former(session, relation_id)
    await store_rows(session, [relation_id])
    await RELATIONS.delete(session, "where id = $1", relation_id)


async def remove_dropped(session: Executor, relation_id: int) -> None:
    """Remove a relation whose table the source dropped; see `remove_relation`.

    Lost changes of the dropped table do not concern a later table with the same name.
    """
    await RELATIONS.set(session, relation_id, {"needs_resync": False})
    await remove_relation(session, relation_id)


async def remove_relations(session: Executor, source_id: int) -> None:
    """Remove all relations of a source, and its former relations."""
    await forget_former(session, source_id)
    await RELATIONS.delete(session, "where source_id = $1", source_id)
