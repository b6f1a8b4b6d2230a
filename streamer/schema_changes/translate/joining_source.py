"""A source that joins a table of peer sources: the part of its definition that the target already
has. Pure.

streamer treats the rest of the definition as a change of the source. So the mechanism for changes
decides by kind, stops with the SQL, and keeps the peers' values.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlKind, OnColumnAdded
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.indexes_constraints_types import DefinedType, TypeChange, base_type
from streamer.schema.partitions import ROOT, Partition
from streamer.schema.source_definition import (
    ColumnChange,
    DefinedColumn,
    SourceDefinition,
    all_differences,
    difference,
    widens,
)
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.translate.definition_translator import DefinitionTranslator
from streamer.schema_changes.translate.generated_columns import GeneratedFacts
from streamer.schema_changes.translate.type_translator import TypeTranslator

_OF_LABELS: Final = frozenset({DdlKind.ADD_ENUM_VALUE, DdlKind.RENAME_ENUM_VALUE})


def part_of_target(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    types: Iterable[DefinedType],
    partitions: Sequence[Partition],
    lacking: Collection[str],
) -> SourceDefinition:
    """Return *definition* without the parts that *target* lacks and that rows of the source need.

    The result also has the NOT NULL, the checks and the attributes that only the target has.

    *types*: the types that the target table uses. *partitions*: the partitions of the target, if
    any. *lacking*: the missing columns of the target, by the source's names.
    """
    target_types = {type_.full_name: type_ for type_ in types}
    target_types |= find_target_enums(definition, mapping, target, types)
    columns = tuple(
        _column(column, mapping, target)
        for column in definition.columns
        if column.name not in lacking
    )
    parts = []
    for defined in definition.types or ():
        present = target_types.get(defined.full_name)
        if present is not None and present.kind == defined.kind:
            parts.append(_type(defined, present))
        elif not lacking:
            parts.append(defined)
    tree = definition.partitions
    if tree and partitions:
        tree = tuple(_partitions(tree, partitions))
    own_types = None if definition.types is None else tuple(parts)
    return replace(definition, columns=columns, types=own_types, partitions=tree)


def _partitions(tree: Sequence[Partition], target_tree: Sequence[Partition]) -> Iterator[Partition]:
    """Yield the source's partitions whose bounds the target has, whatever their names."""
    bounds = {(node.parent, node.bound): node.oid for node in target_tree}
    matches = {ROOT: ROOT}
    for node in tree:
        if node.bound is None:  # the table itself
            yield node
        elif node.parent in matches and (matches[node.parent], node.bound) in bounds:
            matches[node.oid] = bounds[matches[node.parent], node.bound]
            yield node


def _column(
    column: DefinedColumn, mapping: RelationMapping, target: TargetRelation
) -> DefinedColumn:
    name = mapping.target_column(column.name)
    present = None if name is None or mapping.is_computed(name) else target.columns.get(name)
    if present is None or present.generated:
        return column
    is_narrower = widens(present.type, column.type) and not widens(column.type, present.type)
    return replace(
        column,
        type=present.type if is_narrower else column.type,
        not_null=column.not_null or present.not_null,
    )


def _type(type_: DefinedType, target: DefinedType) -> DefinedType:
    """Return the part of the source's type whose values the target's type accepts."""
    match type_.kind:
        case "e":
            labels = {label for _, label in target.labels}
            return replace(type_, labels=tuple(e for e in type_.labels if e[1] in labels))
        case "d":
            checks = {check[1:] for check in type_.checks}
            more_checks = tuple(check for check in target.checks if check[1:] not in checks)
            not_null = type_.not_null or target.not_null
            return replace(type_, checks=(*type_.checks, *more_checks), not_null=not_null)
        case "c":
            present = {name: kind for _, name, kind in target.attributes}
            names = {name for _, name, _ in type_.attributes}
            shared = [
                (n, name, present[name]) for n, name, _ in type_.attributes if name in present
            ]
            # Attribute numbers that the source's type does not have.
            more = [(-n, name, kind) for n, name, kind in target.attributes if name not in names]
            return replace(type_, attributes=(*shared, *more))
        case _:
            return type_


def find_target_enums(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    types: Iterable[DefinedType],
) -> dict[RelationName, DefinedType]:
    """Return the enums of the target's columns, by the names of the enums in a tenant's schema.

    Each tenant's schema may have an enum with an equal name. The column of the target uses the enum
    of a single schema. *types*: see `part_of_target`.
    """
    if mapping.rule.sid is None:
        return {}
    present = {type_.quoted: type_ for type_ in types if type_.kind == "e"}
    enums = {type_.quoted: type_ for type_ in definition.types or () if type_.kind == "e"}
    by_name = {}
    for column in definition.columns:
        name = mapping.target_column(column.name)
        if name is None or name not in target.columns or mapping.is_computed(name):
            continue
        enum = enums.get(base_type(column.type))
        in_target = present.get(base_type(target.columns[name].type))
        if enum is not None and in_target is not None and enum.name == in_target.name:
            by_name[enum.full_name] = in_target
    return by_name


def with_target_enums(
    changes: Iterable[TypeChange], target_enums: Mapping[RelationName, DefinedType]
) -> list[TypeChange]:
    """Return *changes*; changes of labels name the target's enums instead of the tenant's enums.

    *target_enums*: see `find_target_enums`.
    """
    return [
        replace(
            change,
            before=change.before and with_target_name(change.before, target_enums),
            after=with_target_name(change.after, target_enums),
        )
        if change.kind in _OF_LABELS
        else change
        for change in changes
    ]


def with_target_name(
    type_: DefinedType, target_enums: Mapping[RelationName, DefinedType]
) -> DefinedType:
    """Return *type_* with the name of the target's enum, if *target_enums* contains that enum."""
    target = target_enums.get(type_.full_name)
    return type_ if target is None else replace(type_, namespace=target.namespace, name=target.name)


def widening(
    definition: SourceDefinition, mapping: RelationMapping, target: TargetRelation
) -> tuple[list[ColumnChange], list[str]]:
    """Return the changes that a shared *target* needs to hold the source's rows.

    The second list names the NOT NULL columns that the source does not fill. Each change adds a
    column, widens a type or drops NOT NULL. No value of a peer changes, so the peers' definitions
    do not matter.
    """
    lacking = {
        column.name
        for column in definition.columns
        if mapping.target_column(column.name) not in target.columns
        and mapping.rule.on_column_added is not OnColumnAdded.IGNORE
    }
    changes = difference(part_of_target(definition, mapping, target, (), (), lacking), definition)
    filled = set(map(mapping.target_column, (column.name for column in definition.columns)))
    filled |= {SID, *mapping.rule.history.names, *(name for name, _ in mapping.rule.set)}
    filled |= {name for _, name in mapping.rule.metadata} | set(target.primary_key)
    return changes, [column.name for column in target.unfilled(filled)]


def widening_statements(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    types: Sequence[DefinedType] = (),
) -> list[str]:
    """Return the statements that make the `widening` of *target*.

    *types*: see `part_of_target`. The enums in *types* also get the labels of the tenant's enums.
    """
    changes, unfilled = widening(definition, mapping, target)
    alter = f"alter table {quote_qualified(target.name.namespace, target.name.name)}"
    return [
        *_label_statements(definition, mapping, target, types),
        *_translator(definition, mapping, target).translate(changes).statements,
        *(f"{alter} alter column {quote_identifier(name)} drop not null" for name in unfilled),
    ]


def _label_statements(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    types: Sequence[DefinedType],
) -> list[str]:
    target_enums = find_target_enums(definition, mapping, target, types)
    changes = [
        TypeChange(DdlKind.ADD_ENUM_VALUE, type_, type_, (None, label))
        for type_ in definition.types or ()
        if type_.full_name in target_enums
        for _, label in type_.labels
    ]
    translator = TypeTranslator({type_.full_name: type_ for type_ in target_enums.values()})
    return translator.translate(with_target_enums(changes, target_enums)).statements


def _translator(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    peers: Sequence[SourceDefinition] = (),
) -> DefinitionTranslator:
    facts = GeneratedFacts([column.name for column in definition.columns])
    return DefinitionTranslator(mapping, target, peers=peers, generated=facts)


def joining_statements(
    definition: SourceDefinition,
    mapping: RelationMapping,
    target: TargetRelation,
    types: Sequence[DefinedType],
    *,
    peers: Sequence[SourceDefinition],
) -> list[str]:
    """Return the statements after which *target* accepts all values of the source.

    Raises TargetSchemaError if the statements would break a peer source.
    """
    part = part_of_target(definition, mapping, target, types, (), ())
    changes = all_differences(part, definition)
    target_types = {type_.full_name: type_ for type_ in types}
    translator = TypeTranslator(target_types, [peer.types or () for peer in peers])
    columns = _translator(definition, mapping, target, peers)
    type_changes = [change for change in changes if isinstance(change, TypeChange)]
    target_enums = find_target_enums(definition, mapping, target, types)
    return [
        *translator.translate(with_target_enums(type_changes, target_enums)).statements,
        *columns.translate([c for c in changes if isinstance(c, ColumnChange)]).statements,
    ]
