"""Stores the new definition of a source's table after the target has received its changes."""

from collections.abc import Collection, Sequence

from streamer.apply.quarantine.follow_definitions import follow_changes
from streamer.bookkeeping.relation_columns import store_source_columns
from streamer.bookkeeping.relation_definitions import (
    rename_unfilled,
    store_definition,
    store_former_labels,
)
from streamer.mapping.rule_options import DdlKind
from streamer.mapping.rules import RelationMapping
from streamer.schema.indexes_constraints_types import TypeChange
from streamer.schema.source_definition import AnyChange, ColumnChange, columns_after
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.changes_with_facts import of_class
from streamer.target.catalog import holds_rows, read_relation


async def store_new_definition(
    table: ChangedTable,
    command: SourceCommand,
    changes: Sequence[AnyChange],
    filled: Sequence[str],
) -> None:
    """Store the definition that the target has now, and request a backfill of the columns whose
    existing values are missing.

    *filled*: columns whose values existing rows lack. Rows in quarantine follow *changes*.
    """
    session, mapped, mapping = table.session, table.mapped, table.mapped.mapping
    relation_id, definition = mapped.relation_id, command.definition
    target = await read_relation(session, mapping.target)
    present = set() if target is None else set(target.columns)
    stored = present - {name for name, _ in mapping.rule.set}
    of_columns = of_class(changes, ColumnChange)
    await store_definition(session, relation_id, definition)
    if renamed := renamed_labels(changes):
        await store_former_labels(session, relation_id, renamed, definition)
    types = {c.name: c.type for c in definition.columns if mapping.target_column(c.name) in stored}
    await follow_changes(session, relation_id, of_columns, types)
    await rename_unfilled(session, relation_id, moved_columns(of_columns, mapping, stored))
    columns = {
        name: number if mapping.target_column(name) in stored else -number
        for name, number in definition.numbers.items()
    }
    requested = list(filled)
    if command.is_late:
        requested += [name for name in added_columns(of_columns, mapping) if name in present]
    sid = mapping.sid if target is not None and target.has_sid else None
    if command.copy_follows or (requested and not await holds_rows(session, mapping.target, sid)):
        requested = []
    await store_source_columns(session, relation_id, columns, requested)


def added_columns(changes: Sequence[ColumnChange], mapping: RelationMapping) -> list[str]:
    """Return the target's names of new columns. Pure."""
    added = [change.column for change in changes if change.kind is DdlKind.ADD_COLUMN]
    return [name for column in added if (name := mapping.target_column(column)) is not None]


def moved_columns(
    changes: Sequence[ColumnChange], mapping: RelationMapping, present: Collection[str]
) -> dict[str, str | None]:
    """Return the new names of target columns by the former names; None for a drop. Pure."""
    moved: dict[str, str | None] = {}
    for source_name, column in columns_after(changes).items():
        former = mapping.target_column(source_name)
        name = None if column is None else mapping.target_column(column.name)
        if former is not None and former != name:
            moved[former] = name if name in present else None
    return moved


def renamed_labels(changes: Sequence[AnyChange]) -> dict[int, dict[str, str]]:
    """Return the new names of labels by the former names, by the OID of the type. Pure."""
    renamed: dict[int, dict[str, str]] = {}
    for change in of_class(changes, TypeChange):
        former, now = change.part
        if change.kind is DdlKind.RENAME_ENUM_VALUE and former is not None and now is not None:
            renamed.setdefault(change.after.oid, {})[former] = now
    return renamed
