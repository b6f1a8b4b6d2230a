"""``streamer tenants drift``: where the tables of a group's databases differ from each other.

Each source's definitions come from its catalogs. An item is a column, a primary key or another
constraint of a table. Most tenants have the common definition; a tenant with a different
definition, or without the item, deviates. The target deviates if its table differs from the table
for the common definition, by the rules of `streamer compare --definitions`. A column that only
removed tenants had is also a deviation.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.purges import RemainingColumn, read_remaining_columns
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.commands.terminal_table import ListingColumn, print_lines, table_lines
from streamer.errors.command_lines import command
from streamer.errors.error_classes import MappingError, SourceError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import Mapping, RelationMapping, SourceLabel, SourceMapping
from streamer.mapping.scope import Scope
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.runtime.tables.relations import resolve_at
from streamer.schema.desired_columns import type_clause
from streamer.schema.planned_definition import TargetPlace
from streamer.schema.table_definition import TableDefinition
from streamer.schema.table_difference import table_difference
from streamer.schema_changes.read_definitions import read_at_source, read_at_target
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetAddress, target_connection

SOURCES_AT_ONCE: Final = 8
KEY: Final = "primary key"
TABLE: Final = "table"
_KINDS: Final = {"c": "check", "u": "unique", "x": "exclusion", "f": "foreign key"}

Item = tuple[str, str]
"""The kind of an item, such as `column`, and its name."""


@dataclass(frozen=True, slots=True)
class TenantTable:
    """A table of one tenant. ``definition``: None if the tenant has no such table."""

    source: SourceLabel
    mapping: RelationMapping
    definition: TableDefinition | None

    @property
    def name(self) -> str:
        """The name of the table at all tenants: the name at the source, or the pattern of a rule
        with a sid.
        """
        rule = self.mapping.rule
        return str(self.mapping.source if rule.sid is None else rule.pattern)

    @property
    def items(self) -> dict[Item, str]:
        """The definitions of the table's items, without the schema of a tenant that is a schema."""
        items = items_of(self.definition)
        if self.mapping.rule.sid is None or self.definition is None:
            return items
        namespace = self.definition.name.namespace
        schemas = (f"{namespace}.", f"{quote_identifier(namespace)}.")

        def without_schema(text: str) -> str:
            for schema in schemas:
                text = text.replace(schema, "")
            return text

        return {(TABLE, self.name): "present"} | {
            (kind, without_schema(name)): without_schema(text)
            for (kind, name), text in items.items()
            if kind != TABLE
        }


@dataclass(frozen=True, slots=True)
class Drift:
    """An item of a table.

    ``common``: the definition of most tenants; None if most lack the item. ``target``: the
    definition of the target; None if the target lacks or does not get the item. ``deviating``: the
    deviating definitions, by tenant.
    """

    table: str
    target_table: str
    kind: str
    name: str
    common: str | None
    target: str | None
    deviating: dict[str, str | None]
    target_deviates: bool
    remedy: str | None = None
    """The command for a column that only removed tenants had."""

    @property
    def is_equal(self) -> bool:
        return not self.deviating and not self.target_deviates

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"equal": self.is_equal}


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The items of all tables. ``unreachable``: tenants that did not answer, with the reason."""

    tenants: list[str]
    items: list[Drift]
    unreachable: dict[str, str] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        return not self.unreachable and all(item.is_equal for item in self.items)

    @property
    def deviating(self) -> dict[str, int]:
        """Tenants that deviate, and in how many items; the worst first."""
        counts = Counter(label for item in self.items for label in item.deviating)
        return dict(counts.most_common())

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.is_equal,
            "tenants": self.tenants,
            "unreachable": self.unreachable,
            "deviating": self.deviating,
            "items": [item.to_json() for item in self.items],
        }


async def read_drift(address: TargetAddress, mapping: Mapping, scope: Scope) -> DriftReport:
    """Compare the definitions of the sources of *scope*, and of the target.

    Raises TargetConnectionError, TargetRejectedError; MappingError for a scope without a source.
    """
    sources = scope.sources_of_tables(mapping)
    unreachable: dict[str, str] = {}
    limit = asyncio.Semaphore(SOURCES_AT_ONCE)
    bookkeeping = Bookkeeping(address, "streamer drift")

    async def read(source: SourceMapping) -> list[TenantTable]:
        async with limit:
            try:
                tables = await _read_source(source, mapping.target_namespace, bookkeeping)
            except (SourceError, MappingError) as exc:
                unreachable[source.label] = str(exc)
                return []
        return scope.select(source, ((str(t.mapping.source), t.mapping.sid, t) for t in tables))

    try:
        tenant_tables = [
            table for tables in await asyncio.gather(*map(read, sources)) for table in tables
        ]
    finally:
        await bookkeeping.close()
    names = sorted({table.mapping.target for table in tenant_tables}, key=str)
    async with target_connection(address, "streamer drift") as target:
        relations = await read_relations(target, names)
        targets = await read_at_target(target, [relation.oid for relation in relations.values()])
        has_purges = await target.fetch_value("select pg_catalog.to_regclass('streamer.purge')")
        left = await read_remaining_columns(target) if has_purges else []
    items = list(judge(tenant_tables, {table.name: table for table in targets.values()}, left))
    named = {source.label for source in sources if scope.names(source)}
    labels = sorted({table.source for table in tenant_tables} | named)
    if not labels and not unreachable:
        raise scope.unknown()
    return DriftReport(labels, items, dict(sorted(unreachable.items())))


async def _read_source(
    source: SourceMapping, namespace: str, bookkeeping: Bookkeeping
) -> list[TenantTable]:
    async with connection_of_run(source, bookkeeping) as plain:
        mappings, relations, _ = await resolve_at(plain, source, namespace)
        definitions = await read_at_source(
            plain, [definition.oid for definition in relations.values()]
        )
    by_name = {definition.name: definition for definition in definitions.values()}
    return [
        TenantTable(SourceLabel(source.database, m.sid), m, by_name.get(m.source)) for m in mappings
    ]


def judge(
    tables: Iterable[TenantTable],
    targets: dict[RelationName, TableDefinition],
    left: Sequence[RemainingColumn] = (),
) -> Iterator[Drift]:
    """Yield the items of all tables. Pure.

    Tenants of a group share a table if their sources' tables and their targets have the same names.
    If a rule gives their tables a sid, only the rule and the targets must be the same.

    *left*: columns that only removed tenants had.
    """
    groups: dict[tuple[str, str, str], list[TenantTable]] = {}
    for table in tables:
        key = (table.source.database, table.name, str(table.mapping.target))
        groups.setdefault(key, []).append(table)
    for _, group in sorted(groups.items(), key=lambda item: item[0]):
        target = targets.get(group[0].mapping.target)
        yield from _judge_table(group, target)
        if target is not None:
            yield from _judge_remaining(group, target, left)


def _judge_table(group: Sequence[TenantTable], target: TableDefinition | None) -> Iterator[Drift]:
    mapping = group[0].mapping
    tables = {table.source: table for table in group}
    per_tenant = {table.source: table.items for table in group}
    target_items = items_of(target)

    @cache
    def differing(source: SourceLabel) -> set[Item]:
        is_shared = len(group) > 1
        return set() if target is None else _differing(tables[source], target, is_shared=is_shared)

    for item in dict.fromkeys(item for items in per_tenant.values() for item in items):
        values = {label: items.get(item) for label, items in per_tenant.items()}
        common = _most_common(values.values())
        model = next(label for label, value in values.items() if value == common)
        place = _at_target(mapping, item)
        is_required = place is not None and common is not None
        kind, name = item
        yield Drift(
            table=group[0].name,
            target_table=str(mapping.target),
            kind=kind,
            name=name,
            common=common,
            target=None if place is None else target_items.get(place),
            deviating={label: value for label, value in values.items() if value != common},
            target_deviates=is_required and (target is None or place in differing(model)),
        )


def _at_target(mapping: RelationMapping, item: Item) -> Item | None:
    """Return the target's counterpart of a tenant's item; None if the target needs none."""
    kind, name = item
    column = mapping.target_column(name) if kind == "column" else None
    items = {TABLE: str(mapping.target), KEY: "", "column": column}
    target_name = items.get(kind)
    return None if target_name is None else (kind, target_name)


def _differing(table: TenantTable, target: TableDefinition, *, is_shared: bool) -> set[Item]:
    """Return the items of the target that differ from the items which a tenant's table makes."""
    assert table.definition is not None, "the tenant has an item of the table"
    columns = frozenset(column.name for column in target.columns)
    has_sid = table.source.sid is not None and SID in columns
    place = TargetPlace(table.mapping, has_sid, columns, is_partitioned=bool(target.partitions))
    places = {table.mapping.source: place}
    differences = table_difference(table.definition, place, places.get, target, is_shared=is_shared)
    return {(item.kind, "" if item.kind == KEY else item.name) for item in differences}


def _judge_remaining(
    group: Sequence[TenantTable], target: TableDefinition, left: Sequence[RemainingColumn]
) -> Iterator[Drift]:
    mapping = group[0].mapping
    present_items = {item for table in group for item in table.items}
    columns = {column.name: column for column in target.columns}
    for column in left:
        name = mapping.target_column(column.name)
        leftover = columns.get(name) if name is not None else None
        if (
            column.target != str(target.name)
            or leftover is None
            or ("column", column.name) in present_items
        ):
            continue
        table = quote_qualified(target.name.namespace, target.name.name)
        remedy = (
            f"run at the target: alter table {table} drop column {quote_identifier(leftover.name)}"
        )
        if column.unpurged_sid is not None:  # rows of the removed tenant may have values
            sid = column.unpurged_sid
            remedy = f"run first: {command('tenants purge', column.database, '--yes', sid=sid)}"
        yield Drift(
            table=group[0].name,
            target_table=str(mapping.target),
            kind="column",
            name=column.name,
            common=None,
            target=leftover.type,
            deviating={},
            target_deviates=True,
            remedy=remedy,
        )


def _most_common(values: Iterable[str | None]) -> str | None:
    counts = Counter(values)
    # Break ties: prefer a definition over its absence, then the first by text.
    return max(sorted(counts, key=str), key=lambda value: (counts[value], value is not None))


def items_of(definition: TableDefinition | None) -> dict[Item, str]:
    """Return the definitions of a table's items, by kind and name. Pure."""
    if definition is None:
        return {}
    items: dict[Item, str] = {(TABLE, str(definition.name)): "present"}
    for column in definition.columns:
        text = type_clause(column)
        items["column", column.name] = f"{text} not null" if column.not_null else text
    for constraint in definition.constraints:
        if constraint.kind == "p":
            items[KEY, ""] = ", ".join(constraint.columns)
        else:
            # without the name, which may differ between tenants
            items[_KINDS[constraint.kind], constraint.definition] = "present"
    for index in definition.indexes:
        if index.is_unique:
            columns = ", ".join(key.column or key.expression or "" for key in index.keys)
            where = f" where {index.predicate}" if index.predicate else ""
            items["unique index", f"({columns}){where}"] = "present"
    return items


def render(report: DriftReport, *, everything: bool) -> None:
    """Print the matrix: the items that differ, or all of them."""
    items = [item for item in report.items if everything or not item.is_equal]
    if items:
        print_lines(table_lines(_COLUMNS, items))
    lines = [
        f"no tenant still has column {item.name} of {item.target_table}; {item.remedy}"
        for item in report.items
        if item.remedy is not None
    ]
    if lines:
        lines.append(
            "then `streamer compare --definitions` names indexes and constraints that were "
            "dropped with it"
        )
    for label, number in report.deviating.items():
        lines.append(f"{label} deviates in {number} item{'' if number == 1 else 's'}")
    lines += [f"{label}: not compared: {why}" for label, why in report.unreachable.items()]
    if report.is_equal:
        lines.append(f"{len(report.tenants)} tenants have the same definitions as the target")
    print_lines(lines)


_COLUMNS: Final[Sequence[ListingColumn[Drift]]] = (
    ListingColumn("table", lambda item: item.table),
    ListingColumn("item", lambda item: f"{item.kind} {item.name}".strip()),
    ListingColumn("most tenants", lambda item: "absent" if item.common is None else item.common),
    ListingColumn("target", lambda item: item.target or ("absent" if item.target_deviates else "")),
    ListingColumn("who deviates", lambda item: "; ".join(deviations(item))),
)


def deviations(item: Drift) -> list[str]:
    """Return the deviating definitions of an item, each with its tenants; `target` comes last."""
    by_value: dict[str, list[str]] = {}
    for label, value in item.deviating.items():
        by_value.setdefault(value or "absent", []).append(label)
    texts = [f"{value}: {', '.join(labels)}" for value, labels in sorted(by_value.items())]
    return [*texts, "target"] if item.target_deviates else texts
