"""A partition added to or removed from the source's table, as statements for its target. Pure.

A target with the source's partitions creates, detaches or renames a partition, too. Any other
target treats the rows of a detached partition as deleted rows. A clone deletes the rows,
`on_delete: mark` marks the rows, and a history closes their versions. An append table keeps the
rows.
"""

from collections.abc import Sequence
from dataclasses import replace

from streamer.errors.command_lines import command
from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlKind, MetadataKind, TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.columns_in_expressions import uses_column
from streamer.schema.partition_statements import create_partition_sql, key_renderer, partition_name
from streamer.schema.partitions import (
    ROOT,
    KeyItem,
    Partition,
    PartitionChange,
    PartitionRows,
    UnclearPartitionError,
    rows_of,
)
from streamer.schema.target_relation import TargetRelation


class PartitionTranslator:
    """Translates changes of partitions for the target of one relation.

    *source_columns*: the names of the source's columns. *target_partitions*: the target and its
    partitions; empty for a plain table. *at*, *lsn*: the commit time at the source, and its
    position.
    """

    def __init__(
        self,
        mapping: RelationMapping,
        target: TargetRelation,
        *,
        source_columns: Sequence[str],
        target_partitions: Sequence[Partition],
        at: str,
        lsn: str,
    ) -> None:
        self._mapping = mapping
        self._target = target
        self._sid = mapping.sid if target.has_sid else None
        self._columns = list(source_columns)
        self._target_partitions = list(target_partitions)
        self._at = f"{quote_literal(at)}::timestamptz"
        self._lsn = f"{quote_literal(lsn)}::pg_lsn"

    def translate(self, changes: Sequence[PartitionChange], *, copy_follows: bool) -> list[str]:
        """Return the statements for *changes*, in order.

        *copy_follows*: a copy replaces all rows. Raises TargetSchemaError.
        """
        statements: list[str] = []
        for change in changes:
            try:
                if change.kind is DdlKind.ATTACH_PARTITION:
                    statements += self._attach(change)
                elif change.kind is DdlKind.RENAME_TABLE:
                    statements += self._rename(change)
                else:
                    statements += self._detach(change, copy_follows=copy_follows)
            except UnclearPartitionError as exc:
                raise TargetSchemaError(self._problem(change, str(exc))) from None
        return statements

    def leaving(self, changes: Sequence[PartitionChange]) -> list[PartitionRows]:
        """Return the rows of the partitions that *changes* remove; no rows for an append table."""
        leaving: list[PartitionRows] = []
        for change in changes if self._mapping.type is not TableType.APPEND else ():
            if change.kind is DdlKind.DETACH_PARTITION:
                try:
                    leaving.append(self._rows(change))
                except UnclearPartitionError as exc:
                    leaving.append(PartitionRows(change.partition.full_name, unclear=str(exc)))
        return leaving

    def _problem(self, change: PartitionChange, reason: str) -> str:
        name = change.partition.full_name
        if change.kind is DdlKind.ATTACH_PARTITION:
            return f'partition "{name}" cannot be created at the target: {reason}'
        # A copy of differing rows deletes no row of a target with disjoint keys.
        mode = () if self._mapping.rule.is_disjoint else ("--mode", "diff")
        resync = command("resync", str(self._mapping.source), *mode)
        return (
            f'the rows of partition "{name}", which the source detached or dropped, cannot be '
            f"found at the target: {reason}; skip this change, and `{resync}` removes them"
        )

    def _counterpart(self, partition: Partition, tree: Sequence[Partition]) -> Partition | None:
        """Return the target's partition with the bounds of the source's *partition*."""
        bounds = _bounds(partition, tree)
        return next(
            (
                node
                for node in self._target_partitions
                if _bounds(node, self._target_partitions) == bounds
            ),
            None,
        )

    def _name(self, partition: Partition) -> RelationName:
        return partition_name(partition, self._target.name)

    def _parent_at_target(
        self, partition: Partition, tree: Sequence[Partition]
    ) -> Partition | None:
        """Return the target's parent of a partition; None if the target has no such parent."""
        parent = next((node for node in tree if node.oid == partition.parent), None)
        if partition.parent != ROOT:
            return None if parent is None else self._counterpart(parent, tree)
        return next((node for node in self._target_partitions if node.bound is None), None)

    def _attach(self, change: PartitionChange) -> list[str]:
        partition = change.partition
        parent = self._parent_at_target(partition, change.tree)
        if parent is None or parent.key is None:
            return []
        oid = ROOT if partition.parent == ROOT else parent.oid
        if any((p.parent, p.bound) == (oid, partition.bound) for p in self._target_partitions):
            return []  # created by a peer or an operator, perhaps under a different name
        render = key_renderer(self._mapping, self._columns, self._target.columns)
        statement = create_partition_sql(partition, parent.full_name, self._target.name, render)
        # A later change of the same message may concern this partition.
        name = self._name(partition)
        created = replace(partition, oid=-partition.oid, parent=oid, namespace=name.namespace)
        self._target_partitions.append(created)
        return [statement]

    def _rename(self, change: PartitionChange) -> list[str]:
        node = self._counterpart(change.partition, change.tree)
        if node is None or node.name == change.name or not self._is_alone or change.name is None:
            return []
        self._target_partitions[self._target_partitions.index(node)] = replace(
            node, name=change.name
        )
        name = quote_qualified(node.namespace, node.name)
        return [f"alter table {name} rename to {quote_identifier(change.name)}"]

    @property
    def _is_alone(self) -> bool:
        """Whether the target contains only the partitions of this source."""
        is_shared = self._target.is_shared(self._mapping)
        return not is_shared and self._mapping.type is TableType.CLONE

    def _detach(self, change: PartitionChange, *, copy_follows: bool) -> list[str]:
        partition = change.partition
        present = self._counterpart(partition, change.tree)
        if present is not None and self._is_alone:
            parent = self._parent_at_target(partition, change.tree)
            assert parent is not None
            self._target_partitions.remove(present)
            name = quote_qualified(present.namespace, present.name)
            table = quote_qualified(parent.namespace, parent.name)
            return [f"alter table {table} detach partition {name}"]
        if copy_follows or self._mapping.type is TableType.APPEND:
            return []
        if self._mapping.rule.is_disjoint:
            raise UnclearPartitionError("rows of other tables may be within its bounds")
        return [self._remove(self._rows(change).condition)]

    def _rows(self, change: PartitionChange) -> PartitionRows:
        render = key_renderer(self._mapping, self._columns, self._target.columns)
        items: list[KeyItem] = []

        def record_and_render(item: KeyItem) -> str:
            items.append(item)
            return render(item)

        condition = rows_of(change.partition, change.tree, record_and_render)
        used = (column for column in self._columns if any(_uses(item, column) for item in items))
        return PartitionRows(change.partition.full_name, condition, tuple(used))

    def _remove(self, condition: str) -> str:
        table = self._target.rows
        if self._sid is not None:
            sid = f"{quote_identifier(SID)}::text = {quote_literal(self._sid)}"
            condition = f"{sid} and {condition}"
        if self._mapping.type is TableType.HISTORY:
            history = self._mapping.rule.history
            return (
                f"update {table} set {history.end_sql(self._at, 'true')} "
                f"where {history.is_open()} and {condition}"
            )
        rule = self._mapping.rule
        if rule.deleted_at is not None:
            values = {
                MetadataKind.COMMITTED_AT: self._at,
                MetadataKind.SYNCED_AT: "pg_catalog.clock_timestamp()",
                MetadataKind.LSN: self._lsn,
                MetadataKind.OPERATION: "'delete'",
                MetadataKind.DELETED_AT: self._at,
            }
            marks = ", ".join(
                f"{quote_identifier(n)} = {values[kind]}" for kind, n in rule.metadata
            )
            condition = f"{quote_identifier(rule.deleted_at)} is null and {condition}"
            return f"update {table} set {marks} where {condition}"
        return f"delete from {table} where {condition}"


def _uses(item: KeyItem, column: str) -> bool:
    return item.column == column or uses_column(item.expression or "", column)


def _bounds(partition: Partition, tree: Sequence[Partition]) -> tuple[str | None, ...]:
    """Return the bounds of the ancestors of a partition, then the bound of the partition."""
    parent = next((node for node in tree if node.oid == partition.parent), None)
    return (*(() if parent is None else _bounds(parent, tree)), partition.bound)
