"""The query of a copy: the columns read at the source and written at the target. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.apply.rows.apply_plan import computed_cast
from streamer.apply.rows.binary_transfer import binary_types
from streamer.copy.parts.ctid_ranges import PART_BYTES, CopySource, Heap
from streamer.mapping.rule_options import MetadataKind, TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import HISTORY_BEGIN, HISTORY_OPEN, SID
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_literal
from streamer.schema.target_relation import TargetRelation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from streamer.schema.source_definition import DefinedColumn

PART_SECONDS_MAX: Final = 30.0
"""The maximum duration of a part under a limit on the rate; the part locks the table."""
PART_BYTES_MIN: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CopyInput:
    """The input of the query for a table's copy.

    ``columns``: the columns of the source's table. ``destination``: the table that COPY fills,
    quoted. ``sid``: the value of the target's column `sid`, if written.
    """

    relation_id: int
    attempt: int
    mapping: RelationMapping
    columns: "Sequence[DefinedColumn]"
    target: TargetRelation
    sid: str | None
    destination: str
    heaps: tuple[Heap, ...]
    can_split: bool
    scope: str | None = None
    """A condition over the source's columns for the rows to copy."""
    only: frozenset[str] | None = None
    """The target columns to copy, including its key; None for all."""
    snapshot: tuple[str, str] = ("", "")
    """The source's time at the snapshot, and its consistent point, for row metadata."""
    conditions: tuple[str, ...] = ()
    """Further conditions over the source's columns, of `copy_where` and `partition_by`."""
    has_request_condition: bool = False
    """Whether `scope` contains a condition of an operator's request."""

    def includes(self, name: str) -> bool:
        """Return whether the copy writes the target column *name*."""
        return self.only is None or name in self.only


class _Selection:
    """The columns of the query, in order. The query uses the binary format as long as each column
    qualifies for binary.
    """

    def __init__(self, types: frozenset[int]) -> None:
        self._types = types
        self.expressions: list[str] = []
        self.names: list[str] = []
        self.is_binary = True

    def add(self, expression: str, name: str, *, is_same: bool, type_oid: int) -> None:
        """Add a column of the source. *is_same*: source and target have the same type."""
        self._append(expression, name, is_binary=is_same and type_oid in self._types)

    def add_filled(self, expression: str, name: str, *, is_binary: bool) -> None:
        """Add a column that streamer fills."""
        self._append(expression, name, is_binary=is_binary)

    def _append(self, expression: str, name: str, *, is_binary: bool) -> None:
        self.expressions.append(expression)
        self.names.append(name)
        self.is_binary = self.is_binary and is_binary


def copy_source(copy_input: CopyInput, source_version: int, target_version: int) -> CopySource:
    """Return the facts that the parts of a copy have in common."""
    selection = _Selection(binary_types(source_version, target_version))
    if copy_input.sid is not None and copy_input.includes(SID):
        is_text = copy_input.target.columns[SID].type == "text"
        selection.add_filled(f"{quote_literal(copy_input.sid)}::text", SID, is_binary=is_text)
    _add_columns(selection, copy_input)
    _add_computed(selection, copy_input)
    if copy_input.only is None:
        _add_metadata(selection, copy_input)
    if copy_input.mapping.type is TableType.HISTORY and copy_input.only is None:
        _add_history(selection, copy_input)
    rule = copy_input.mapping.rule
    keys = {hashed.target: hashed.check for hashed in rule.hashes}
    hashes = [(at, keys[name]) for at, name in enumerate(selection.names) if name in keys]
    filtered = None if rule.filter is None else rule.filter.text
    texts = (filtered, *copy_input.conditions, copy_input.scope)
    conditions = [text for text in texts if text is not None]
    return CopySource(
        relation_id=copy_input.relation_id,
        attempt=copy_input.attempt,
        select_list=", ".join(selection.expressions),
        condition=") and (".join(conditions) or None,
        into=(copy_input.destination, quote_columns(selection.names)),
        binary=selection.is_binary and bool(selection.names) and not hashes,
        heaps=copy_input.heaps,
        can_split=copy_input.can_split and source_version >= 14_00_00,
        columns=quote_columns(column.name for column in copy_input.columns),
        names=tuple(selection.names),
        hashes=tuple(hashes),
        expressions=tuple(_settings(copy_input, conditions)),
    )


def _settings(copy_input: CopyInput, conditions: "Sequence[str]") -> "Iterator[str]":
    """Yield the settings whose expressions are in the query; *conditions*: those of the rows."""
    rule = copy_input.mapping.rule
    for name, condition in (("`filter`", rule.filter), ("`copy_where`", rule.copy_where)):
        if condition is not None and condition.text in conditions:
            yield name
    if copy_input.has_request_condition:
        yield "the condition of the resync (a resync of the whole table drops the condition)"
    yield from (f"`set` of {name}" for name, _ in rule.set if copy_input.includes(name))


def _add_columns(selection: _Selection, copy_input: CopyInput) -> None:
    mapping = copy_input.mapping
    for column in copy_input.columns:
        name = mapping.target_column(column.name)
        if column.generated:
            continue  # the publication leaves the column out, too
        if name is not None and mapping.has_expression(name):
            continue
        existing = copy_input.target.columns.get(name) if name is not None else None
        if name is None or existing is None or existing.generated or not copy_input.includes(name):
            continue
        is_same = column.type_oid == existing.type_oid
        selection.add(
            quote_identifier(column.name), name, is_same=is_same, type_oid=column.type_oid
        )


def _add_computed(selection: _Selection, copy_input: CopyInput) -> None:
    for name, expression in copy_input.mapping.rule.set:
        if not copy_input.includes(name):
            continue
        target_column = copy_input.target.columns[name]
        selection.add(
            f"({expression}){computed_cast(target_column, of_target=False)}",
            name,
            is_same=target_column.base_oid == target_column.type_oid,
            type_oid=target_column.type_oid,
        )


def _add_metadata(selection: _Selection, copy_input: CopyInput) -> None:
    """Add the metadata of copied rows: the source does not store when a row last changed."""
    time, lsn = copy_input.snapshot
    values = {
        MetadataKind.COMMITTED_AT: f"{quote_literal(time)}::timestamptz",
        MetadataKind.SYNCED_AT: "pg_catalog.clock_timestamp()",
        MetadataKind.LSN: f"{quote_literal(lsn)}::pg_lsn",
        MetadataKind.OPERATION: "'copy'::text",
        MetadataKind.DELETED_AT: "null::timestamptz",
    }
    for kind, name in copy_input.mapping.rule.metadata:
        selection.add_filled(values[kind], name, is_binary=True)


def _add_history(selection: _Selection, copy_input: CopyInput) -> None:
    values = (HISTORY_BEGIN, HISTORY_OPEN, "false")
    types = copy_input.mapping.rule.history.types
    for (name, type_name), value in zip(types.items(), values, strict=True):
        selection.add_filled(
            value, name, is_binary=copy_input.target.columns[name].type == type_name
        )


def part_bytes(
    size: int, rows: int | None, rows_per_second: float | None, bytes_per_second: float | None
) -> int:
    """Return the size of a table's parts for tasks with these limits.

    *size*, *rows*: estimates for the whole table.
    """
    paced = [float(PART_BYTES)]
    if rows_per_second is not None and size and rows:
        paced.append(rows_per_second * PART_SECONDS_MAX * size / rows)
    if bytes_per_second is not None:
        paced.append(bytes_per_second * PART_SECONDS_MAX)
    return max(PART_BYTES_MIN, round(min(paced)))
