"""The difference between the expected and the actual definition of a target table. Pure.

The same renderer writes the source's definition through the mapping, and the target's definition
without a mapping. So two objects are equal if the statements are equal.

`create` selects the objects to compare. Columns, types and the primary key belong to each level.
Extra objects of the target are differences if they may refuse rows of the source: constraints and
unique indexes. A default that only the target has, on a column of the source, is a difference, too:
programs would get this default after a cut-over. Plain indexes and extra columns are the
operator's business.

A table of several sources must accept the values of all sources. So a longer type, more labels of
an enum and more partitions than a single source needs do not count as differences.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import OnColumnAdded, TableType
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier
from streamer.schema.columns_in_expressions import (
    UnclearExpressionError,
    rename_columns,
    without_needless_quotes,
)
from streamer.schema.create_type import create_type_sql
from streamer.schema.desired_columns import type_clause
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.partition_statements import key_renderer, partition_by
from streamer.schema.partitions import Partition, Render
from streamer.schema.planned_definition import ObjectKind, Places, Planned, TargetPlace
from streamer.schema.render_definitions import Renderer, is_of_open_versions, other_name
from streamer.schema.source_definition import DefinedColumn, widens
from streamer.schema.statistics_and_partitions import plan_partitioning
from streamer.schema.table_definition import TableDefinition


@dataclass(frozen=True, slots=True)
class DefinitionDifference:
    """``source``: the expected object of the target, as SQL or text; None for an extra object.
    ``target``: the actual object; None if missing.
    """

    kind: str
    name: str
    source: str | None
    target: str | None

    def __str__(self) -> str:
        if self.target is None:
            return f'{self.kind} "{self.name}" is missing: {self.source}'
        if self.source is None:
            return f'{self.kind} "{self.name}" is only at the target: {self.target}'
        return f'{self.kind} "{self.name}" is {self.target}, and should be {self.source}'

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def table_difference(
    source: TableDefinition,
    place: TargetPlace,
    places: Places,
    target: TableDefinition,
    *,
    is_shared: bool = False,
) -> list[DefinitionDifference]:
    """Return how *target* differs from *source*.

    *place*: the target of *source*. *places*: the targets of the tables that *source* references.
    *is_shared*: several sources write to the target table.
    """
    return [
        *_columns(source, place, target, is_shared=is_shared),
        *_primary_key(source, place, target),
        *_objects(source, place, places, target),
        *_partitions(source, place, target, is_shared=is_shared),
    ]


def type_difference(
    source: list[DefinedType], target: list[DefinedType], *, keeps_more: bool = False
) -> list[DefinitionDifference]:
    """Return how the types of the target's columns differ from the source's types.

    *keeps_more*: the target may accept more values, for other sources or ended versions.
    """
    at_target = {type_.full_name: type_ for type_ in target}
    pairs = [
        (type_, at_target[type_.full_name]) for type_ in source if type_.full_name in at_target
    ]
    return [
        DefinitionDifference("type", str(type_.full_name), _described(type_), _described(actual))
        for type_, actual in pairs
        if _described(type_) != _described(actual) and not (keeps_more and actual.takes_all(type_))
    ]


def _described(type_: DefinedType) -> str:
    """Return the SQL of a type after the name, with sorted checks and without the multirange,
    which PostgreSQL 13 lacks.
    """
    checks = tuple(sorted(type_.checks, key=lambda check: check[1:]))
    create, *later = create_type_sql(replace(type_, checks=checks, multirange=None))
    return "; ".join([create.partition(" as ")[2], *later])


# ---- columns -----------------------------------------------------------------------------------


def _columns(
    source: TableDefinition, place: TargetPlace, target: TableDefinition, *, is_shared: bool
) -> Iterator[DefinitionDifference]:
    at_target = {column.name: column for column in target.columns}
    # Several sources, and versions of removed rows, need a table that accepts nulls.
    is_alone = place.is_alone
    may_lack = place.mapping.rule.on_column_added is OnColumnAdded.IGNORE
    for column in source.columns:
        name = place.mapping.own_column(column.name, at_target)
        if name is None or place.mapping.hash_of(name) is not None:
            continue
        actual = at_target.get(name)
        if actual is None:
            if not may_lack or column.name in _primary_columns(source):
                yield DefinitionDifference("column", name, type_clause(column), None)
            continue
        texts = _computed(column, source, place), _computed(actual, target, as_it_is(target.name))
        takes_more = is_shared and _is_longer(actual, column)
        if len(set(map(without_needless_quotes, texts))) > 1 and not takes_more:
            yield DefinitionDifference("column", name, *texts)
        is_key = actual.name in _primary_columns(target)
        if column.not_null != actual.not_null and (is_alone or actual.not_null) and not is_key:
            nulls = ["not null" if c.not_null else "null" for c in (column, actual)]
            yield DefinitionDifference("column", name, *nulls)


def _is_longer(actual: DefinedColumn, column: DefinedColumn) -> bool:
    is_plain = not column.generated and not actual.generated
    return is_plain and column.collation == actual.collation and widens(column.type, actual.type)


def _computed(column: DefinedColumn, table: TableDefinition, place: TargetPlace) -> str:
    """Return the type of a column, and the expression over the target's columns."""
    if not column.generated:
        return type_clause(column)
    names = {c.name: place.column(c.name) or c.name for c in table.columns}
    try:
        text = rename_columns(column.default or "", names)
    except UnclearExpressionError:
        text = column.default or ""
    return f"{type_clause(column)} generated always as ({text})"


def _primary_columns(table: TableDefinition) -> tuple[str, ...]:
    return next((c.columns for c in table.constraints if c.kind == "p"), ())


def _primary_key(
    source: TableDefinition, place: TargetPlace, target: TableDefinition
) -> Iterator[DefinitionDifference]:
    if place.mapping.type is not TableType.CLONE:
        return
    expected, actual = place.key(_primary_columns(source)), _primary_columns(target)
    if expected is not None and tuple(expected) != actual:
        texts = [f"({', '.join(key)})" if key else None for key in (expected, actual)]
        yield DefinitionDifference("primary key", target.name.name, *texts)


# ---- partitions --------------------------------------------------------------------------------


def _partitions(
    source: TableDefinition, place: TargetPlace, target: TableDefinition, *, is_shared: bool
) -> Iterator[DefinitionDifference]:
    """Compare partitions, if the rule asks for partitions without an obstacle at the target."""
    if not place.mapping.rule.partitioned or plan_partitioning(source, place):
        return
    render = key_renderer(place.mapping, (c.name for c in source.columns), place.columns)
    as_is = key_renderer(as_it_is(target.name).mapping, (c.name for c in target.columns), None)
    tree, target_tree = source.partitions, target.partitions
    expected = {p.name: _partition(p, tree, render, is_shared) for p in tree[1:]}
    actual = {p.name: _partition(p, target_tree, as_is, is_shared) for p in target_tree[1:]}
    if tree and tree[0].key is not None:
        root, actual_root = partition_by(tree[0].key, render), None
        if target_tree and target_tree[0].key is not None:
            actual_root = partition_by(target_tree[0].key, as_is)
        if root != actual_root:
            yield DefinitionDifference("partitioning", target.name.name, root, actual_root)
    if is_shared:  # names of partitions with equal bounds may differ
        bounds = set(actual.values())
        missing = [(name, text) for name, text in expected.items() if text not in bounds]
        yield from (DefinitionDifference("partition", n, text, None) for n, text in missing)
        return
    for name in sorted({*expected, *actual}):
        if expected.get(name) != actual.get(name):
            yield DefinitionDifference("partition", name, expected.get(name), actual.get(name))


def _partition(
    partition: Partition, tree: Sequence[Partition], render: Render, is_shared: bool
) -> str:
    """Return the definition of a partition, after the parent's name or, for a table of several
    sources, after the parent's bounds.
    """
    parent = next((node for node in tree if node.oid == partition.parent), None)
    head = "" if parent is None else parent.name
    if is_shared and parent is not None:
        head = "" if parent.bound is None else _partition(parent, tree, render, is_shared)
    clause = "" if partition.key is None else f" {partition_by(partition.key, render)}"
    return f"{head} {partition.bound}{clause}".strip()


# ---- indexes, constraints, defaults ------------------------------------------------------------


def as_it_is(name: RelationName) -> TargetPlace:
    """Return a target with the names of the source's table."""
    pattern = RelationPattern(name.namespace, name.name)
    return TargetPlace(RelationMapping(name, name, TableRule(pattern)), has_sid=False)


def _objects(
    source: TableDefinition, place: TargetPlace, places: Places, target: TableDefinition
) -> Iterator[DefinitionDifference]:
    create = place.mapping.rule.create
    at_target = {
        (planned.kind, planned.name): planned
        for planned in Renderer(target, as_it_is(target.name), as_it_is).plan(create)
    }
    for expected in Renderer(source, place, places).plan(create):
        actual = at_target.pop((expected.kind, expected.name), None)
        if expected.reason is not None:
            continue  # `streamer status` shows the reason
        statements = expected.statements
        if actual is None:
            renamed = other_name(expected.name, place.mapping.target)
            actual = at_target.pop((expected.kind, renamed), None)
            former, quoted = quote_identifier(expected.name), quote_identifier(renamed)
            statements = tuple(statement.replace(former, quoted) for statement in statements)
        if actual is None:
            if not _is_omitted(expected, place):
                yield DefinitionDifference(expected.kind, expected.name, _text(expected), None)
        elif not _is_omitted(expected, place) and _plain(actual.statements) != _plain(statements):
            yield DefinitionDifference(expected.kind, expected.name, _text(expected), _text(actual))
    column_names = {place.column(column.name) for column in source.columns}
    for extra in at_target.values():
        is_default = extra.kind is ObjectKind.DEFAULT and extra.name in column_names
        counts = _binds(extra) or (is_default and not _is_omitted(extra, place))
        if counts and not _is_of_open_versions(extra.name, source, place, target):
            yield DefinitionDifference(extra.kind, extra.name, None, _text(extra))


def _plain(statements: Iterable[str]) -> list[str]:
    return [without_needless_quotes(statement) for statement in statements]


def _is_omitted(planned: Planned, place: TargetPlace) -> bool:
    """Whether the object is a default, which a table of versions or several sources lacks."""
    return planned.kind is ObjectKind.DEFAULT and not place.is_alone


def _binds(planned: Planned) -> bool:
    """Whether an object of the target may refuse rows."""
    match planned.kind:
        case ObjectKind.INDEX:
            return planned.sql.startswith("create unique")
        case ObjectKind.UNIQUE | ObjectKind.EXCLUSION | ObjectKind.CHECK | ObjectKind.FOREIGN_KEY:
            return True
        case _:
            return False


def _is_of_open_versions(
    name: str, source: TableDefinition, place: TargetPlace, target: TableDefinition
) -> bool:
    """Whether an index of a history allows a key of the source only one open version."""
    index = target.all_indexes.get(name)
    if place.mapping.type is not TableType.HISTORY or index is None:
        return False
    keys = [c.columns for c in source.constraints if c.kind in "pu"]
    keys += [tuple(k.column or "" for k in i.keys) for i in source.indexes if i.is_unique]
    history = place.mapping.rule.history
    columns = {key.column for key in index.keys} - {SID, history.end}
    return is_of_open_versions(index, history) and columns in [
        {place.column(column) for column in key} for key in keys
    ]


def _text(planned: Planned) -> str:
    return "; ".join(planned.statements) or planned.source_sql
