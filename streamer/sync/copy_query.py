"""What a copy reads at the source, and the columns of the target that it writes. Pure."""

from typing import Final

from streamer.apply.binary import binary_types
from streamer.apply.plan import computed_cast
from streamer.mapping.rules import TableType
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_literal
from streamer.sync.plan import PART_BYTES, CopySource
from streamer.sync.prepare import TableCopy
from streamer.target.conventions import HISTORY_COLUMNS, SID

PART_SECONDS_MAX: Final = 30.0
"""A part keeps its table locked. With a limit on the rate it is cut as small as that."""
PART_BYTES_MIN: Final = 1024 * 1024


def copy_source(copy: TableCopy, source_version: int, target_version: int) -> CopySource:
    """Return what the parts of *copy* have in common; its `columns` become those that it writes."""
    select: list[str] = []
    names: list[str] = []
    types = binary_types(source_version, target_version)
    is_binary = True
    mapping = copy.mapped.mapping
    if copy.sid is not None:
        is_binary = is_binary and copy.target.columns[SID].type == "text"
        select.append(f"{quote_literal(copy.sid)}::text")
        names.append(SID)
    for column in copy.relation.columns:
        name = mapping.target_column(column.name)
        if column.generated:
            continue  # not published either
        if name is not None and mapping.is_computed(name):
            continue
        there = copy.target.columns.get(name) if name is not None else None
        if name is None or there is None or there.generated:
            continue
        select.append(quote_identifier(column.name))
        names.append(name)
        is_same = column.type_oid == there.type_oid
        is_binary = is_binary and is_same and column.type_oid in types
    for name, expression in mapping.rule.set:
        there = copy.target.columns[name]
        select.append(f"({expression}){computed_cast(there, of_target=False)}")
        names.append(name)
        is_same = there.base_oid == there.type_oid
        is_binary = is_binary and is_same and there.type_oid in types
    if mapping.type is TableType.HISTORY:
        select += [
            "'1900-01-01 00:00:00+00'::timestamptz",
            "'9999-01-01 00:00:00+00'::timestamptz",
        ]
        select.append("false")
        names += HISTORY_COLUMNS
        history = [copy.target.columns[name].type for name in names[-3:]]
        is_binary = is_binary and history == ["timestamp with time zone"] * 2 + ["boolean"]
    copy.columns = tuple(names)
    rule = mapping.rule
    return CopySource(
        relation_id=copy.mapped.relation_id,
        attempt=copy.attempt,
        select_list=", ".join(select),
        condition=None if rule.filter is None else rule.filter.text,
        into=(copy.destination, quote_columns(names)),
        binary=is_binary and bool(names),
        heaps=copy.heaps,
        can_split=copy.can_split and source_version >= 14_00_00,
        columns=quote_columns(column.name for column in copy.relation.columns),
    )


def part_bytes(copy: TableCopy, rows_per_second: float | None) -> int:
    """Return how large the parts of *copy* are to be when a task may read *rows_per_second*."""
    size, rows = copy.relation.size_bytes, copy.relation.row_count_estimate
    if rows_per_second is None or not size or not rows:
        return PART_BYTES
    wanted = rows_per_second * PART_SECONDS_MAX * size / rows
    return max(PART_BYTES_MIN, min(PART_BYTES, round(wanted)))
