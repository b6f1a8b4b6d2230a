"""Extended statistics of a table and its partitions, as statements for its target. Pure.

Statistics name columns and expressions, as partition keys do. A partitioned target needs partitions
before the first row, so `create_partitions_sql` is a part of CREATE TABLE.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_literal, quote_qualified
from streamer.schema.partition_statements import (
    create_partition_sql,
    key_renderer,
    partition_by,
    partition_name,
)
from streamer.schema.partitions import (
    ROOT,
    KeyItem,
    Partition,
    PartitionKey,
    UnclearPartitionError,
    outside_quotes,
    split_list,
)
from streamer.schema.planned_definition import ObjectKind, Planned, TargetPlace
from streamer.schema.table_definition import StatisticsDefinition, TableDefinition

# ---- extended statistics -----------------------------------------------------------------------


def plan_statistics(definition: TableDefinition, place: TargetPlace) -> list[Planned]:
    """Render the extended statistics of a table."""
    return [_statistics(item, definition, place) for item in definition.statistics]


def _statistics(
    statistics: StatisticsDefinition, definition: TableDefinition, place: TargetPlace
) -> Planned:
    kinds, items = _parsed(statistics.definition)
    render = key_renderer(place.mapping, (c.name for c in definition.columns), place.columns)
    kind, name = ObjectKind.EXTENDED_STATISTICS, statistics.name
    try:
        listed = ", ".join(map(render, items))
    except UnclearPartitionError as exc:
        # An expression over a hashed column may contain plain values as literals.
        sql = statistics.definition if not place.mapping.rule.hashes else ""
        return Planned(kind, name, reason=str(exc), source_sql=sql)
    quoted_name = quote_qualified(place.mapping.target.namespace, name)
    made = [f"create statistics {quoted_name}{kinds} on {listed} from {place.quoted}"]
    if statistics.target is not None:
        made.append(f"alter statistics {quoted_name} set statistics {statistics.target}")
    if statistics.comment is not None:
        made.append(f"comment on statistics {quoted_name} is {quote_literal(statistics.comment)}")
    return Planned(kind, name, tuple(made), tuple(made), source_sql=statistics.definition)


def _parsed(text: str) -> tuple[str, list[KeyItem]]:
    """Return the kinds, as written, and the items of ``pg_get_statisticsobjdef``."""
    plain = {position for position, _ in outside_quotes(text)}
    on = next(p for p in range(len(text)) if p in plain and text.startswith(" ON ", p))
    end = max(p for p in plain if text.startswith(" FROM ", p))
    head = text[:on]
    opened = head.rfind("(") if head.endswith(")") and len(head) - 1 in plain else -1
    kinds = f" {head[opened:]}" if opened >= 0 else ""
    return kinds, [KeyItem.parse(item) for item in split_list(text[on + 4 : end])]


# ---- partitions --------------------------------------------------------------------------------


def obstacle_to_partitions(
    tree: Sequence[Partition],
    mapping: RelationMapping,
    source_columns: Iterable[str],
    key: Iterable[str],
) -> str | None:
    """Return the obstacle to the partition keys of the source at the target, or None.

    *key*: the source's columns of its primary key.
    """
    if mapping.type is TableType.HISTORY:
        return "a history keeps the versions of rows whose partition was detached"
    columns = set(key)
    render = key_renderer(mapping, source_columns, None, columns)
    for partition in tree:
        if partition.key is None:
            continue
        try:
            partition_by(partition.key, render)
        except UnclearPartitionError as exc:
            return str(exc)
        items = PartitionKey.parse(partition.key).items
        if columns and any(item.column not in columns for item in items):
            return f"its primary key lacks a column of the partition key {partition.key}"
    return None


def create_partitions_sql(
    tree: Sequence[Partition],
    mapping: RelationMapping,
    source_columns: Sequence[str],
    key: Sequence[str],
) -> tuple[str, list[str]]:
    """Return the clause for the table itself, and the statements that create partitions."""
    render = key_renderer(mapping, source_columns, None, key)
    root, *partitions = tree
    names = {partition.oid: partition_name(partition, mapping.target) for partition in partitions}
    names[ROOT] = mapping.target
    statements = [
        create_partition_sql(partition, names[partition.parent], mapping.target, render)
        for partition in partitions
    ]
    return f" {partition_by(root.key or '', render)}", statements


def plan_partitioning(definition: TableDefinition, place: TargetPlace) -> list[Planned]:
    """Return the plan that reports an obstacle to the partitions that the rule requests."""
    mapping, tree = place.mapping, definition.partitions
    if not mapping.rule.partitioned or not tree:
        return []
    primary = next((c.columns for c in definition.constraints if c.kind == "p"), ())
    reason = obstacle_to_partitions(tree, mapping, (c.name for c in definition.columns), primary)
    if reason is None:
        return []
    sql = f"create table {place.quoted} (…) partition by {tree[0].key}"
    name = mapping.target.name
    return [Planned(ObjectKind.PARTITIONING, name, reason=reason, source_sql=sql)]


def for_partitions(planned: Planned, place: TargetPlace) -> Planned:
    """Return a plan for the target table *place*.

    A partitioned table accepts no concurrent index build, and in PostgreSQL 17 and older no foreign
    key that is NOT VALID.
    """
    kinds = (
        *(ObjectKind.INDEX, ObjectKind.UNIQUE, ObjectKind.EXCLUSION),
        ObjectKind.FOREIGN_KEY,
    )
    if not place.is_partitioned or planned.kind not in kinds:
        return planned
    return replace(planned, online=planned.statements, index=None)
