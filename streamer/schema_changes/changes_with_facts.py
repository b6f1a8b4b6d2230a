"""Reads the facts for the translation of a table's changes into statements for the target."""

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from streamer.bookkeeping.relation_columns import read_unfilled
from streamer.mapping.rule_options import DdlKind, TableType
from streamer.mapping.rules import RelationMapping
from streamer.schema.indexes_constraints_types import ObjectChange, TypeChange, base_type
from streamer.schema.partitions import PartitionChange
from streamer.schema.source_definition import AnyChange, ColumnChange, SourceDefinition
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.kept_labels import add_labels_sql, read_kept_labels
from streamer.schema_changes.object_changes import Objects
from streamer.schema_changes.read_definitions import read_at_target
from streamer.schema_changes.shared_changes import PeerSources, read_peers
from streamer.schema_changes.translate.definition_translator import (
    DefinitionTranslator,
    Translation,
)
from streamer.schema_changes.translate.generated_columns import GeneratedFacts
from streamer.schema_changes.translate.partition_translator import PartitionTranslator
from streamer.schema_changes.translate.type_translator import TypeTranslation, columns_of
from streamer.schema_changes.types_with_facts import translate_types
from streamer.target.catalog import read_partitions

_BRINGS_TYPES: Final = frozenset({DdlKind.ADD_COLUMN, DdlKind.CHANGE_TYPE, DdlKind.WIDEN_TYPE})
"""Changes that may give a column a new type."""
C = TypeVar("C")


def of_class(changes: Iterable[AnyChange], kind: type[C]) -> list[C]:
    """Return the *changes* of the class *kind*."""
    return [change for change in changes if isinstance(change, kind)]


async def translate_changes(
    table: ChangedTable,
    command: SourceCommand,
    target: TargetRelation,
    changes: Sequence[AnyChange],
    ignored: Sequence[AnyChange] = (),
    done: Sequence[AnyChange] = (),
) -> Translation:
    """Return the statements for *changes* without *ignored* changes.

    Dropped and renamed objects come first, then types, then columns, which may depend on both.
    *done*: changes that a peer source has made.
    """
    session, mapped = table.session, table.mapped
    is_shared = target.is_shared(mapped.mapping)
    peers = await read_peers(session, command.place, changes) if is_shared else PeerSources()
    made = [change for change in changes if change not in ignored and change not in done]
    labels: dict[str, list[str]] = {}
    if mapped.mapping.type is TableType.HISTORY:
        types = command.definition.types or ()
        of_columns = of_class(made, ColumnChange)
        labels = await read_kept_labels(session, mapped.mapping, target, types, of_columns)
    typed = await translate_types(table, command, target, of_class(made, TypeChange), labels)
    columns = DefinitionTranslator(
        mapped.mapping,
        target,
        peers=peers.definitions,
        unchanged=peers.unchanged,
        unfilled=await read_unfilled(session, mapped.relation_id),
        generated=GeneratedFacts.of(
            [column.name for column in command.definition.columns],
            (await read_at_target(session, [target.oid]))[target.oid],
            session.server_version,
        ),
        renamed=typed.renamed,
    )
    translation = columns.translate(of_class(made, ColumnChange))
    for change in of_class(done, ColumnChange):
        columns.backfill_peer_change(change, translation)
    translation.statements += columns.ignore(of_class(ignored, ColumnChange)).statements
    _add_types(translation, typed, columns, command)
    translation.before += await add_labels_sql(session, labels, typed.created)
    translation.needed_types = needed_types(made, command.definition, mapped.mapping)
    translation.is_for_all = peers.all_wait and not ignored
    if objects := of_class(made, ObjectChange):
        objects_of = Objects(table, command.message)
        translator = await objects_of.translator(target, peers.definitions, columns.columns)
        translation.objects = translator.translate(objects)
        translation.reasons += translation.objects.reasons
        translation.statements[:0] = translation.objects.statements
    if parts := of_class(made, PartitionChange):
        partitions = await partition_translator(table, command, target)
        translation.statements += partitions.translate(parts, copy_follows=command.copy_follows)
        translation.leaving = [] if command.copy_follows else partitions.leaving(parts)
    return translation


def _add_types(
    translation: Translation,
    typed: TypeTranslation,
    columns: DefinitionTranslator,
    command: SourceCommand,
) -> None:
    """Add the statements for types, and the consequences for columns."""
    translation.statements[:0] = typed.statements
    translation.before += typed.before
    if command.copy_follows:
        translation.doubts += typed.doubts
    for name, reason in typed.rewritten.items():
        for column in columns_of(command.definition.columns, name):
            columns.fill(column, reason, translation)
    for name in sorted(typed.merged):
        for column in columns_of(command.definition.columns, name):
            columns.give_type(column, translation)


def needed_types(
    changes: Sequence[AnyChange], definition: SourceDefinition, mapping: RelationMapping
) -> set[str]:
    """Return the types that *changes* need and do not create. *definition* is the definition after
    the changes. Pure.
    """
    needed: set[str] = set()
    for change in changes:
        if isinstance(change, TypeChange):
            needed |= change.after.parts
        elif isinstance(change, ColumnChange) and change.kind in _BRINGS_TYPES:
            column = change.after
            if column is not None and mapping.target_column(column.name):
                needed.add(base_type(column.type))
    return needed - {type_.quoted for type_ in definition.types or ()}


async def partition_translator(
    table: ChangedTable, command: SourceCommand, target: TargetRelation
) -> PartitionTranslator:
    """Return a translator that knows the partitions of the target."""
    mapped = table.mapped
    return PartitionTranslator(
        mapped.mapping,
        target,
        source_columns=[column.name for column in command.definition.columns],
        target_partitions=await read_partitions(table.session, target),
        at=command.at,
        lsn=str(command.place.lsn),
    )
