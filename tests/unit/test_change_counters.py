"""Marks of two moments: how much of a table the second comparison has to read."""

import json
from dataclasses import replace

import pytest

from streamer.compare.change_counters import (
    ChangeCounters,
    Extent,
    ServerCounters,
    TableCounters,
    extent_of,
    late_sql,
)

SERVER = ServerCounters("2026-01-01", 700, "never", "types")
TABLE = TableCounters("rule", "0/10", ("d", "d"), ("c", "c"))
BEFORE = ChangeCounters(SERVER, SERVER, {"public.t": TABLE})
LATER = replace(SERVER, horizon=800)


def scope(**changes: object) -> Extent:
    return extent_of("public.t", BEFORE, replace(BEFORE, **changes))  # type: ignore[arg-type]


def test_a_table_with_the_same_counts_on_both_servers_is_not_read() -> None:
    assert scope() is Extent.NOTHING
    assert scope(source=LATER, target=LATER) is Extent.NOTHING


@pytest.mark.parametrize(
    "changed",
    [
        {"tables": {"public.t": replace(TABLE, changes=("c", "x"))}},
        {"tables": {"public.t": replace(TABLE, changes=("x", "c"))}},
        {"tables": {"public.t": replace(TABLE, position="0/20")}},
        {"is_settled": False},
        {"source": replace(SERVER, counts_since="today")},
        {"target": replace(SERVER, counts_since=None)},
    ],
)
def test_any_sign_of_a_change_makes_it_read_the_changes(changed: dict[str, object]) -> None:
    assert scope(**changed) is Extent.CHANGES


def test_statistics_that_prove_nothing_twice_still_prove_nothing() -> None:
    old = replace(SERVER, counts_since=None)
    counters = ChangeCounters(old, SERVER, {"public.t": TABLE})
    assert extent_of("public.t", counters, counters) is Extent.CHANGES


@pytest.mark.parametrize(
    "changed",
    [
        {"source": replace(SERVER, started="later")},
        {"target": replace(SERVER, started="later")},
        {"target": replace(SERVER, types="others")},
        {"tables": {"public.t": replace(TABLE, definitions=("d", "x"))}},
        {"tables": {"public.t": replace(TABLE, rule="another")}},
        {"tables": {}},
    ],
)
def test_where_xmin_proves_nothing_all_rows_are_read(changed: dict[str, object]) -> None:
    assert scope(**changed) is Extent.WHOLE


def test_a_table_that_the_check_did_not_know_is_read_as_a_whole() -> None:
    assert extent_of("public.u", BEFORE, BEFORE) is Extent.WHOLE


def test_marks_come_back_from_the_bookkeeping() -> None:
    assert ChangeCounters.from_json(json.loads(json.dumps(BEFORE.to_json()))) == BEFORE


def test_only_sessions_from_before_the_stop_can_be_late() -> None:
    assert "null::timestamptz is null" in late_sql(None)
    assert "a.backend_start < '2026-01-01'::timestamptz" in late_sql("2026-01-01")
