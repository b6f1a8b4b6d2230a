"""The difference between the definition that a target table should have, and the one it has. Pure.

The same renderer writes both: the source's definition through the mapping, and the target's own as
it is. So two objects are the same if their statements are.

`create` decides about the objects of the target. Columns, types and the primary key belong to every
level. Objects that only the target has are named if they may refuse rows of the source: constraints
and unique indexes. So are defaults of the source's columns, which programs get after a cut-over. An
index for readers is the operator's own affair, and so are further columns.

A table of several sources takes the values of all of them. So a longer type, more values of an enum
and more partitions than those of one source are no difference there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import TableType
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
    """``source``: the target's object as it should be, in SQL or in words; None if there should be
    none. ``target``: the object as it is; None if it is missing.
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
    """Return how *target* differs from *source*, which *place* and *places* map.

    *is_shared*: other sources write to the target table, too.
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
    """Return how the types of the target's columns differ from those of the source.

    *keeps_more*: they may take more values, of other sources or of versions that have ended.
    """
    there = {each.full_name: each for each in target}
    differing = [
        (here, other)
        for here in source
        if (other := there.get(here.full_name)) is not None
        and not (keeps_more and other.takes_all(here))
        and _described(here) != _described(other)
    ]
    return [
        DefinitionDifference("type", str(here.full_name), _described(here), _described(other))
        for here, other in differing
    ]


def _described(type_: DefinedType) -> str:
    """Return the SQL of a type behind its name. Checks have no order, and PostgreSQL 13 no
    multiranges.
    """
    checks = tuple(sorted(type_.checks, key=lambda check: check[1:]))
    create, *rest = create_type_sql(replace(type_, checks=checks, multirange=None))
    return "; ".join([create.partition(" as ")[2], *rest])


# ---- columns -----------------------------------------------------------------------------------


def _columns(
    source: TableDefinition, place: TargetPlace, target: TableDefinition, *, is_shared: bool
) -> Iterator[DefinitionDifference]:
    there = {column.name: column for column in target.columns}
    # Several sources, and versions of rows that are no more, need a table that takes nulls.
    is_alone = place.mapping.type is TableType.CLONE and not place.has_sid
    for column in source.columns:
        name = place.mapping.own_column(column.name, there)
        if name is None or place.mapping.hash_of(name) is not None:
            continue
        found = there.get(name)
        if found is None:
            yield DefinitionDifference("column", name, type_clause(column), None)
            continue
        own, its = _computed(column, source, place), _computed(found, target, as_it_is(target.name))
        takes_more = is_shared and _is_longer(found, column)
        if without_needless_quotes(own) != without_needless_quotes(its) and not takes_more:
            yield DefinitionDifference("column", name, own, its)
        if column.not_null != found.not_null and (is_alone or found.not_null):
            own, its = (("not null" if c.not_null else "null") for c in (column, found))
            if found.name not in _primary_columns(target):
                yield DefinitionDifference("column", name, own, its)


def _is_longer(there: DefinedColumn, here: DefinedColumn) -> bool:
    is_plain = not here.generated and not there.generated
    return is_plain and here.collation == there.collation and widens(here.type, there.type)


def _computed(column: DefinedColumn, table: TableDefinition, place: TargetPlace) -> str:
    """Return the type of a column, and its expression over the target's columns."""
    if not column.generated:
        return type_clause(column)
    names = {each.name: place.column(each.name) or each.name for each in table.columns}
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
    wanted, found = place.key(_primary_columns(source)), _primary_columns(target)
    if wanted is not None and tuple(wanted) != found:
        own, its = (f"({', '.join(key)})" if key else None for key in (wanted, found))
        yield DefinitionDifference("primary key", target.name.name, own, its)


# ---- partitions --------------------------------------------------------------------------------


def _partitions(
    source: TableDefinition, place: TargetPlace, target: TableDefinition, *, is_shared: bool
) -> Iterator[DefinitionDifference]:
    """Compare partitions where the rule asks for them, and the target can have them."""
    wanted = source.partitions
    if not place.mapping.rule.partitioned or plan_partitioning(source, place):
        return
    render = key_renderer(place.mapping, (c.name for c in source.columns), place.columns)
    as_is = key_renderer(as_it_is(target.name).mapping, (c.name for c in target.columns), None)
    own = {each.name: _partition(each, wanted, render, is_shared) for each in wanted[1:]}
    there_are = target.partitions
    its = {each.name: _partition(each, there_are, as_is, is_shared) for each in there_are[1:]}
    if wanted and wanted[0].key is not None:
        root, there = partition_by(wanted[0].key, render), None
        if target.partitions and target.partitions[0].key is not None:
            there = partition_by(target.partitions[0].key, as_is)
        if root != there:
            yield DefinitionDifference("partitioning", target.name.name, root, there)
    if is_shared:  # a partition of the same bounds may have another name
        bounds = set(its.values())
        missing = [(name, text) for name, text in own.items() if text not in bounds]
        yield from (DefinitionDifference("partition", n, text, None) for n, text in missing)
        return
    for name in sorted({*own, *its}):
        if own.get(name) != its.get(name):
            yield DefinitionDifference("partition", name, own.get(name), its.get(name))


def _partition(
    partition: Partition, tree: Sequence[Partition], render: Render, is_shared: bool
) -> str:
    """Return the definition of a partition, below the name of its parent or, for a table of several
    sources, below the parent's bounds.
    """
    above = next((each for each in tree if each.oid == partition.parent), None)
    parent = "" if above is None else above.name
    if is_shared and above is not None:
        parent = "" if above.bound is None else _partition(above, tree, render, is_shared)
    below = "" if partition.key is None else f" {partition_by(partition.key, render)}"
    return f"{parent} {partition.bound}{below}".strip()


# ---- indexes, constraints, defaults ------------------------------------------------------------


def as_it_is(name: RelationName) -> TargetPlace:
    """Return the place of a table whose definition needs no mapping."""
    pattern = RelationPattern(name.namespace, name.name)
    return TargetPlace(RelationMapping(name, name, TableRule(pattern)), has_sid=False)


def _objects(
    source: TableDefinition, place: TargetPlace, places: Places, target: TableDefinition
) -> Iterator[DefinitionDifference]:
    create = place.mapping.rule.create
    there = {
        (each.kind, each.name): each
        for each in Renderer(target, as_it_is(target.name), as_it_is).plan(create)
    }
    for wanted in Renderer(source, place, places).plan(create):
        found = there.pop((wanted.kind, wanted.name), None)
        if wanted.reason is not None:
            continue  # `streamer status` has the reason
        statements = wanted.statements
        if found is None:
            other = other_name(wanted.name, place.mapping.target)
            found = there.pop((wanted.kind, other), None)
            former, quoted = quote_identifier(wanted.name), quote_identifier(other)
            statements = tuple(each.replace(former, quoted) for each in statements)
        if found is None:
            if not _is_left_out(wanted, place):
                yield DefinitionDifference(wanted.kind, wanted.name, _text(wanted), None)
        elif not _is_left_out(wanted, place) and _plain(found.statements) != _plain(statements):
            yield DefinitionDifference(wanted.kind, wanted.name, _text(wanted), _text(found))
    own = {place.column(column.name) for column in source.columns}
    for extra in there.values():
        is_default = extra.kind is ObjectKind.DEFAULT and extra.name in own
        counts = _binds(extra) or (is_default and not _is_left_out(extra, place))
        if counts and not _is_of_open_versions(extra.name, source, place, target):
            yield DefinitionDifference(extra.kind, extra.name, None, _text(extra))


def _plain(statements: Iterable[str]) -> list[str]:
    return [without_needless_quotes(each) for each in statements]


def _is_left_out(planned: Planned, place: TargetPlace) -> bool:
    """Whether a change of the source does not bring an object to a table of several sources."""
    return planned.kind is ObjectKind.DEFAULT and (
        place.has_sid or place.mapping.type is not TableType.CLONE
    )


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
    """Whether an index is that of a history, by which a key of the source has one open version."""
    index = target.all_indexes.get(name)
    if place.mapping.type is not TableType.HISTORY or index is None:
        return False
    keys = [each.columns for each in source.constraints if each.kind in "pu"]
    keys += [tuple(k.column or "" for k in each.keys) for each in source.indexes if each.is_unique]
    columns = {key.column for key in index.keys} - {SID}
    return is_of_open_versions(index) and columns in [
        {place.column(column) for column in key} for key in keys
    ]


def _text(planned: Planned) -> str:
    return "; ".join(planned.statements) or planned.source_sql
