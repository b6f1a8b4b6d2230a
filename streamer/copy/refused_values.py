"""The remedy for a copy that the target refuses because of privileges, types or constraints.

With `ddl: capture`, streamer widens the types when a source joins a shared table
(`streamer.schema_changes.changes_during_copy`). Otherwise an operator runs the statements.
"""

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.write.rejection_advice import drop_refusing
from streamer.bookkeeping.relation_definitions import read_others
from streamer.errors.error_classes import TargetSchemaError
from streamer.errors.remedies import Remedy, at_target, run
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.read_definitions import read_target_types
from streamer.schema_changes.translate.joining_source import joining_statements
from streamer.source.catalog import SourceRelation
from streamer.target.connection import TargetConnection
from streamer.target.missing_grants import MissingGrants


async def remedy_for_refusal(
    target: TargetConnection,
    mapped: MappedRelation,
    relation: SourceRelation,
    table: TargetRelation,
    constraint: str | None,
    column: str | None,
) -> Remedy | None:
    """Return a remedy for a copy that the target refuses, with the statements for the target; None
    if the cause is unknown.

    *constraint*: a constraint or unique index that refuses a row. *column*: a column that refuses
    NULL.
    """
    missing = await MissingGrants.read(target, [mapped.mapping])
    return (
        missing.remedy
        or remedy_for_conflict(table, mapped.mapping, constraint, column)
        or await _remedy_for_values(target, mapped, relation, table)
    )


def remedy_for_conflict(
    table: TargetRelation, mapping: RelationMapping, constraint: str | None, column: str | None
) -> Remedy | None:
    """Return a remedy for a copied row that *constraint* or *column* of the target refuses, as
    `remedy_for_refusal`. Pure.
    """
    if constraint is not None:
        return drop_refusing(table, mapping, constraint)
    return _remedy_for_null(table, column)


def _remedy_for_null(table: TargetRelation, column: str | None) -> Remedy | None:
    """Return a remedy for a copy with a null value that *column* of the target refuses. Pure.

    None without a column, and for a column of the primary key.
    """
    if column is None or column in table.primary_key:
        return None
    quoted = quote_qualified(table.name.namespace, table.name.name)
    sql = f"alter table {quoted} alter column {quote_identifier(column)} drop not null"
    return Remedy.of("run at the target: ", at_target(sql))


async def _remedy_for_values(
    target: TargetConnection,
    mapped: MappedRelation,
    relation: SourceRelation,
    table: TargetRelation,
) -> Remedy | None:
    """Return a remedy with the statements for the target; None if the types take all values."""
    source = mapped.source
    is_shared = table.is_shared(mapped.mapping)
    neighbours = await read_others(target, mapped.relation_id) if is_shared else []
    try:
        statements = joining_statements(
            relation.definition,
            mapped.mapping,
            table,
            await read_target_types(target, table),
            peers=neighbours,
        )
    except TargetSchemaError as exc:
        return Remedy.of(exc.message)
    if not statements:
        return None
    resync = run("resync", str(relation.name), database=source.database, sid=source.sid)
    return Remedy.of("run at the target: ", at_target(*statements), "; then run `", resync, "`")
