"""The query of a copy follows from definitions and rules alone."""

from dataclasses import replace

from streamer.copy.copy_query import PART_BYTES_MIN, CopyInput, copy_source, part_bytes
from streamer.copy.copy_snapshot import TableSeen
from streamer.copy.parts.ctid_ranges import PART_BYTES, Heap
from streamer.copy.plan_copies import DEFER_BYTES_MIN, is_large
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.schema.target_relation import TargetRelation
from tests.unit.build import (
    relation_mapping,
    source_column,
    source_relation,
    target_column,
    target_relation,
)

HISTORY = (
    target_column("kvsz_start", "timestamp with time zone"),
    target_column("kvsz_end", "timestamp with time zone"),
    target_column("kvsz_deleted", "boolean"),
)


def order(mapping: RelationMapping, target: TargetRelation, *, sid: str | None = None) -> CopyInput:
    columns = (
        source_column("id"),
        source_column("name"),
        source_column("made", generated="s"),
    )
    return CopyInput(7, 2, mapping, columns, target, sid, "t", (Heap("t", 0, 1),), True)


def test_columns_that_the_target_has_are_copied_by_its_names() -> None:
    mapping = relation_mapping(columns={"id": "key", "name": "name"})
    made = copy_source(order(mapping, target_relation(["key", "name", "own"])), 18_00_00, 18_00_00)
    assert made.select_list == '"id", "name"'
    assert made.names == ("key", "name")
    assert made.into == ("t", '"key", "name"')
    assert made.binary
    assert made.can_split


def test_generated_and_missing_columns_are_left_out_and_expressions_may_use_them() -> None:
    made = copy_source(
        order(relation_mapping(), target_relation(["id", "made"])), 18_00_00, 18_00_00
    )
    assert made.names == ("id",)
    assert made.columns == '"id", "name", "made"'


def test_the_sid_comes_first_and_a_history_begins_with_its_first_version() -> None:
    target = target_relation([target_column("sid"), "id", "name", *HISTORY])
    mapping = relation_mapping(table_type=TableType.HISTORY)
    made = copy_source(order(mapping, target, sid="eu"), 18_00_00, 18_00_00)
    assert made.names == ("sid", "id", "name", "kvsz_start", "kvsz_end", "kvsz_deleted")
    assert made.select_list.startswith("'eu'::text, \"id\"")
    assert made.binary


def test_a_type_that_differs_makes_the_whole_copy_text() -> None:
    other = replace(target_column("name"), type_oid=1043)
    made = copy_source(
        order(relation_mapping(), target_relation(["id", other])), 18_00_00, 18_00_00
    )
    assert made.names == ("id", "name")
    assert not made.binary


def test_a_source_that_reads_all_pages_for_each_range_is_not_split() -> None:
    made = copy_source(order(relation_mapping(), target_relation(["id"])), 13_00_00, 18_00_00)
    assert not made.can_split


def test_a_limit_on_the_rate_makes_parts_smaller() -> None:
    gigabyte, rows = 1 << 30, 1_000_000
    assert part_bytes(gigabyte, rows, None, None) == PART_BYTES
    assert part_bytes(gigabyte, None, 100.0, None) == PART_BYTES
    assert part_bytes(gigabyte, rows, 1e9, None) == PART_BYTES
    assert part_bytes(gigabyte, rows, 1000.0, None) == round(1000 * 30 * gigabyte / rows)
    assert part_bytes(gigabyte, rows, 0.1, None) == PART_BYTES_MIN
    assert part_bytes(gigabyte, None, None, 1_000_000.0) == 30_000_000
    assert part_bytes(gigabyte, rows, 1000.0, 2_000_000.0) == round(1000 * 30 * gigabyte / rows)


def test_indexes_are_put_off_for_all_leaves_of_a_large_table_and_for_no_small_one() -> None:
    leaf = Heap("only t", DEFER_BYTES_MIN // 2, 1)
    assert not is_large(TableSeen(source_relation(), (leaf,), True, {}))
    assert is_large(TableSeen(source_relation(), (leaf, leaf), True, {}))
