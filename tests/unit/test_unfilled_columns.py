"""The columns whose values existing rows of the target lack."""

from streamer.apply.write.planner import columns_to_backfill, columns_to_store
from streamer.schema.source_definition import DefinedColumn
from tests.unit.build import apply_plan


def test_only_columns_whose_existing_rows_have_values_are_copied() -> None:
    plan = apply_plan(["id", "a", "b", "c", "d", "e"], ["id"])
    known = {"id": 1, "old_b": 2, "a": 3, "e": -9}
    columns = (
        DefinedColumn(1, "id", "text", not_null=True),
        DefinedColumn(2, "b", "text"),  # renamed
        DefinedColumn(3, "a", "text", fill="x"),
        DefinedColumn(4, "c", "text"),  # NULL in all rows
        DefinedColumn(5, "d", "text", default_mark="123"),
        DefinedColumn(9, "e", "text"),  # was excluded
    )
    now = {column.name: column for column in columns}
    assert columns_to_backfill(plan, known, now, {}) == ["d", "e"]
    filled = now | {"d": DefinedColumn(5, "d", "text", fill="7")}
    assert columns_to_backfill(plan, known, filled, {"d": "7"}) == ["e"]
    assert columns_to_store(plan, known, now) == {"id": 1, "a": 3, "e": 9, "b": 2, "c": 4, "d": 5}
    assert columns_to_backfill(plan, columns_to_store(plan, known, now), {}, {}) == []
    smaller = apply_plan(["id", "a"], ["id"])
    assert columns_to_store(smaller, {"id": 1, "a": -2, "b": 3}, {}) == {"id": 1, "a": 2, "b": -3}
