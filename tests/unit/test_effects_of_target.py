"""Problems that the target causes are one problem."""

from typing import Any

import pytest

from streamer.admin.live.effects_of_target import (
    WAITS_FOR_TARGET,
    causes_of,
    remaining_problems,
    state_of_source,
)
from streamer.admin.live.fleet_overview import fleet_overview_of
from streamer.admin.live.problem_view import problems_for_operator
from streamer.admin.live.status_view import source_view

AWAY: dict[str, Any] = {"name": "dw", "state": "unreachable", "error": "no answer"} | {
    "error_code": "target_down"
}
LATE: dict[str, Any] = {"name": "dw", "state": "reachable", "error": None} | {
    "wait": {"text": "commits wait for a standby", "remedy": None, "is_turn": False}
}


def source(**values: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"database": "shop", "sid": None, "state": "streaming", "error": None}
    return (
        usual
        | {"lag_seconds": 0.0, "lag_bytes": 0, "retained_wal_bytes": 0}
        | {"tables": []}
        | values
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"lag_seconds": 900.0},
        {"state": "waiting", "error": "no answer", "error_code": "target_down"},
        {"state": "waiting", "error": "no standby", "error_code": "target_read_only"},
        {"own": {"state": "waiting", "error": "no answer", "error_code": "target_auth"}},
        {"state": "not started"},
        {"state": "stopped"},
        {"state": "starting"},
    ],
    ids=str,
)
def test_a_source_that_only_the_target_stops_waits_for_the_target(values: dict[str, Any]) -> None:
    row, causes = source(**values), causes_of(AWAY)
    assert remaining_problems(row, causes) == []
    assert state_of_source(row, causes) == WAITS_FOR_TARGET
    assert [item["place"] for item in problems_for_operator([row], AWAY)] == ["Target"]
    assert source_view(row, target=AWAY)["shown_state"] == WAITS_FOR_TARGET
    (line,) = fleet_overview_of([row], AWAY).lines
    assert (line.health, line.shown_state) == ("quiet", WAITS_FOR_TARGET)
    # The API has the state of the bookkeeping.
    assert line.row["state"] == row["state"]


def test_a_problem_with_a_cause_of_its_own_stays() -> None:
    row = source(
        state="unreachable",
        error="no route",
        error_code="source_down",
        tables=[{"source": "public.t", "state": "error", "error": "no column", "quarantined": 0}],
    )
    causes = causes_of(AWAY)
    assert [problem.text for problem in remaining_problems(row, causes)] == [
        "no route", "no column",
    ]  # fmt: skip
    assert state_of_source(row, causes) == "unreachable"


def test_without_a_cause_every_problem_stays() -> None:
    row = source(state="waiting", error="no answer", error_code="target_down")
    assert len(remaining_problems(row, causes_of(None))) == 1
    assert state_of_source(row, causes_of(None)) == "waiting"
    assert fleet_overview_of([row]).lines[0].health == "bad"


def test_a_lag_is_an_effect_of_commits_that_wait_at_the_target() -> None:
    row, causes = source(lag_seconds=900.0), causes_of(LATE)
    assert len(causes) == 1
    assert remaining_problems(row, causes) == []
    assert state_of_source(row, causes) == "streaming"
    stopped = source(state="stopped")
    assert len(remaining_problems(stopped, causes)) == 1
