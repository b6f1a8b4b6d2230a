"""The columns whose values existing rows of the target lack."""

from streamer.apply.planner import columns_of, columns_to_bring
from streamer.source.columns import ColumnNow
from tests.unit.build import apply_plan


def test_only_columns_whose_existing_rows_have_values_are_brought() -> None:
    plan = apply_plan(["id", "a", "b", "c", "d", "e"], ["id"])
    known = {"id": 1, "old_b": 2, "a": 3, "e": -9}
    now = {
        "id": ColumnNow(1, None, True),
        "b": ColumnNow(2, None, False),  # renamed
        "a": ColumnNow(3, "x", False),
        "c": ColumnNow(4, None, False),  # NULL in all rows
        "d": ColumnNow(5, None, True),
        "e": ColumnNow(9, None, False),  # was excluded
    }
    assert columns_to_bring(plan, known, now, {}) == ["d", "e"]
    filled = now | {"d": ColumnNow(5, "7", False)}
    assert columns_to_bring(plan, known, filled, {"d": "7"}) == ["e"]
    assert columns_of(plan, known, now) == {"id": 1, "a": 3, "e": 9, "b": 2, "c": 4, "d": 5}
    assert columns_to_bring(plan, columns_of(plan, known, now), {}, {}) == []
    smaller = apply_plan(["id", "a"], ["id"])
    assert columns_of(smaller, {"id": 1, "a": -2, "b": 3}, {}) == {"id": 1, "a": 2, "b": -3}
