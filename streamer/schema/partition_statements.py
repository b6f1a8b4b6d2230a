"""Partition keys and bounds of a source's table, over the target's columns. Pure."""

from collections.abc import Iterable

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.columns_in_expressions import (
    AbsentColumnError,
    UnclearExpressionError,
    over_columns,
)
from streamer.schema.desired_columns import names_at_target
from streamer.schema.partitions import (
    KeyItem,
    Partition,
    PartitionKey,
    Render,
    UnclearPartitionError,
)


def key_renderer(
    mapping: RelationMapping,
    source_columns: Iterable[str],
    target_columns: Iterable[str] | None,
    key: Iterable[str] = (),
) -> Render:
    """Return a function that renders an item of a partition key for the target.

    The function raises UnclearPartitionError for a value that the target lacks. *target_columns*:
    the columns of the target; None if the mapping alone decides, and the target gets the columns of
    *key*.
    """
    available = None if target_columns is None else frozenset(target_columns)
    names = {
        column: None if name is None or mapping.has_expression(name) else name
        for column, name in names_at_target(source_columns, mapping, available, set(key)).items()
    }

    def render(item: KeyItem) -> str:
        text = item.expression if item.column is None else quote_identifier(item.column)
        try:
            return over_columns(text or "", names)
        except AbsentColumnError as exc:
            raise UnclearPartitionError(
                f'the target does not get the values of column "{exc.column}"'
            ) from None
        except UnclearExpressionError as exc:
            raise UnclearPartitionError(str(exc)) from None

    return render


def partition_by(key: str, render: Render) -> str:
    """Return the clause PARTITION BY for a partition key. Raises UnclearPartitionError."""
    parsed = PartitionKey.parse(key)
    items = ", ".join(render(item) + item.rest for item in parsed.items)
    return f"partition by {parsed.strategy.lower()} ({items})"


def partition_name(partition: Partition, target: RelationName) -> RelationName:
    """Return the name of a partition at the target, in the schema of the table."""
    return RelationName(target.namespace, partition.name)


def create_partition_sql(
    partition: Partition, parent: RelationName, target: RelationName, render: Render
) -> str:
    """Return the statement that creates a partition. Raises UnclearPartitionError."""
    name = partition_name(partition, target)
    clause = f" {partition_by(partition.key, render)}" if partition.key is not None else ""
    return (
        f"create table {quote_qualified(name.namespace, name.name)} partition of "
        f"{quote_qualified(parent.namespace, parent.name)} {partition.bound}{clause}"
    )
