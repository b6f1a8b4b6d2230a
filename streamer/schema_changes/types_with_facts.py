"""Reads the facts for the translation of a table's type changes into statements."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from streamer.bookkeeping.relation_definitions import (
    read_known_types,
    read_other_users,
    read_others,
    read_own_targets,
    read_users,
)
from streamer.errors.error_classes import TargetContentionError, TargetSchemaError
from streamer.mapping.rule_options import DdlKind
from streamer.mapping.rules import RelationMapping
from streamer.postgres.describing import NAMED_TYPES_SQL
from streamer.schema.indexes_constraints_types import (
    DefinedType,
    TypeChange,
    base_type,
    quoted_type,
)
from streamer.schema.source_definition import SourceDefinition
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.changed_table import ChangedTable, SourceCommand
from streamer.schema_changes.read_definitions import read_target_types
from streamer.schema_changes.translate.joining_source import (
    find_target_enums,
    with_target_enums,
    with_target_name,
)
from streamer.schema_changes.translate.type_translator import TypeTranslation, TypeTranslator
from streamer.target.connection import TargetConnection
from streamer.target.former_types import read_uses

_TYPES_LOCK: Final = 0x7479706573  # "types"
_KEEPS_VALUES: Final = frozenset({DdlKind.CREATE_TYPE, DdlKind.ADD_ENUM_VALUE})
"""Changes after which a type takes all former values."""


async def lock_types(target: TargetConnection) -> None:
    """Acquire the advisory lock under which lanes change types, until the transaction ends.

    A concurrent lane waits before any change of a type. After a commit the lane reads the changed
    types; after a rollback the lane makes the change.
    """
    await target.fetch("select pg_catalog.pg_advisory_xact_lock($1)", _TYPES_LOCK)


async def translate_types(
    table: ChangedTable,
    command: SourceCommand,
    target: TargetRelation,
    changes: Sequence[TypeChange],
    labels: Mapping[str, Sequence[str]],
) -> TypeTranslation:
    """Return the statements for changes of types; *labels*: see
    `streamer.schema_changes.kept_labels`.

    A peer source may have created and changed a new type before this stream reaches the type. The
    target's type may therefore already match the source's current definition. Raises
    TargetSchemaError, and TargetContentionError while a table still has unapplied changes that use
    the old definition.
    """
    if not changes:
        return TypeTranslation()
    try:
        translation = await _translate(table, command, target, changes, labels)
    except TargetSchemaError:
        newest = await _newest(table, changes)
        if newest == changes:
            raise
        translation = await _translate(table, command, target, newest, labels)
    await _wait_for_users(table, command, changes, translation)
    return translation


async def _newest(table: ChangedTable, changes: Sequence[TypeChange]) -> list[TypeChange]:
    """Return *changes* with the present definitions of new types at the source."""
    if not any(change.kind is DdlKind.CREATE_TYPE for change in changes):
        return list(changes)
    now = await table.read_present()
    present = {type_.oid: type_ for type_ in (now and now.types) or ()}
    return [
        replace(c, after=present.get(c.after.oid, c.after)) if c.kind is DdlKind.CREATE_TYPE else c
        for c in changes
    ]


async def _translate(
    table: ChangedTable,
    command: SourceCommand,
    target: TargetRelation,
    changes: Sequence[TypeChange],
    labels: Mapping[str, Sequence[str]],
) -> TypeTranslation:
    session, mapped = table.session, table.mapped
    of_target = await read_target_types(session, target)
    target_enums = find_target_enums(command.definition, mapped.mapping, target, of_target)
    changes = with_target_enums(changes, target_enums)
    sharers = await read_others(session, mapped.relation_id) if target_enums else []
    named = {type_ for change in changes for type_ in (change.before, change.after) if type_}
    text = await session.fetch_value(
        NAMED_TYPES_SQL, [t.namespace for t in named], [t.name for t in named]
    )
    types = [
        *map(DefinedType.of, json.loads(text or "[]")),
        *of_target,
    ]
    by_name = {t.quoted: t for t in types}
    of_columns = {}
    for column in command.definition.columns:
        name = mapped.mapping.target_column(column.name)
        if name is not None and name in target.columns:
            of_columns[base_type(column.type)] = by_name.get(base_type(target.columns[name].type))
    own_types = {
        change.before.full_name: type_
        for change in changes
        if change.before is not None and (type_ := of_columns.get(change.after.quoted)) is not None
    }
    names = [t.full_name for t in named]
    # Tables of peer sources share types with this table, even if their target tables differ.
    words = [str(change) for change in changes]
    peers = await read_other_users(session, command.place, names, words)
    translation = TypeTranslator(
        {t.full_name: t for t in types},
        [
            *(peer.used_types for peer in peers),
            *(_enums_of(peer, mapped.mapping, target, of_target) for peer in sharers),
        ],
        uses=await read_uses(session, types, await read_own_targets(session, mapped.relation_id)),
        own=own_types,
        known=await read_known_types(session, mapped.relation_id, names),
        kept=labels,
    ).translate(changes)
    for name_at_source, enum in target_enums.items():
        if (reason := translation.rewritten.pop(enum.quoted, None)) is not None:
            translation.rewritten[quoted_type(name_at_source)] = reason
    return translation


def _enums_of(
    peer: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    types: Sequence[DefinedType],
) -> list[DefinedType]:
    """Return the enums of a tenant's schema under the names of the target's enums."""
    enums = find_target_enums(peer, mapping, target, types)
    return [
        with_target_name(type_, enums) for type_ in peer.types or () if type_.full_name in enums
    ]


async def _wait_for_users(
    table: ChangedTable,
    command: SourceCommand,
    changes: Sequence[TypeChange],
    translation: TypeTranslation,
) -> None:
    """Raise TargetContentionError while a table has unapplied changes that use an old type."""
    oids = set(translation.awaited)
    if translation.statements:
        oids |= {c.after.oid for c in changes if c.kind not in _KEEPS_VALUES}
    for name in await read_users(table.session, table.mapped.relation_id, oids):
        is_own = name == table.mapped.mapping.source
        if not is_own and table.tables.is_behind(name, command.place.lsn):
            raise TargetContentionError(
                f'table "{name}", which has a column of the type that changes, must first apply '
                "earlier changes"
            )
