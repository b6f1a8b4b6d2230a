"""Which lanes leave a worker because they delay the remaining lanes of the worker."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from streamer.apply.lanes.slow_lanes import COOL_SECONDS, WINDOWS, Move, SlowLanes


@dataclass(eq=False)
class _Lane:
    name: str


def lane(name: str) -> Any:
    return cast("Any", _Lane(name))


def moves(
    seconds: float, *, beside: float | None = 0.002, changes: int = 1, others_wait: bool = True
) -> Move:
    """Where a lane that takes *seconds* of each window moves, which is in the right window."""
    lanes, mine, other = SlowLanes(), lane("mine"), lane("other")
    for number in range(1, WINDOWS + 3):
        if beside is not None:
            assert lanes.wrote(other, beside, 1, others_wait=False) is Move.NONE
        found = lanes.wrote(mine, seconds, changes, others_wait=others_wait)
        if found is not Move.NONE:
            assert number == WINDOWS, "it moves as soon as it has taken long often enough"
            return found
    return Move.NONE


@pytest.mark.parametrize("beside", [0.002, 0.01, None])
def test_a_lane_that_takes_long_for_few_changes_moves_to_disk(beside: float | None) -> None:
    assert moves(0.05, beside=beside) is Move.TO_DISK


@pytest.mark.parametrize(
    "window",
    [{"seconds": 0.2, "changes": 8000}, {"seconds": 0.02}, {"seconds": 0.02, "changes": 1000}],
    ids=["many changes", "short for a slow one", "quick changes"],
)
def test_a_lane_that_takes_longer_than_others_gets_a_connection(window: dict[str, Any]) -> None:
    assert moves(**window) is Move.TO_OWN_CONNECTION


@pytest.mark.parametrize(
    "window",
    [
        {"seconds": 0.008},
        {"seconds": 0.05, "beside": 0.03},
        {"seconds": 0.2, "changes": 8000, "beside": 0.06},
        {"seconds": 0.05, "others_wait": False},
    ],
    ids=["short", "as long as the others", "as hot as the others", "nobody waits"],
)
def test_a_lane_that_delays_no_other_stays(window: dict[str, Any]) -> None:
    assert moves(**window) is Move.NONE


def test_a_lane_that_takes_long_now_and_then_stays() -> None:
    lanes, mine = SlowLanes(), lane("mine")
    for _ in range(10):
        assert lanes.wrote(mine, 0.015, 1, others_wait=True) is Move.NONE
        assert lanes.wrote(mine, 0.0, 1, others_wait=True) is Move.NONE


def test_windows_for_which_no_other_lane_waits_do_not_count() -> None:
    """Lanes with a rare commit wait as long as lanes that commit all the time."""
    lanes, mine = SlowLanes(), lane("mine")
    found = [
        lanes.wrote(mine, 0.05, 9000, others_wait=number % 10 == 9)
        for number in range(10 * WINDOWS)
    ]
    assert found[-1] is Move.TO_OWN_CONNECTION
    assert set(found[:-1]) == {Move.NONE}


def test_each_of_several_hot_lanes_moves() -> None:
    lanes, hot, small = SlowLanes(), [lane("a"), lane("b")], lane("small")
    moved = set()
    for _ in range(2 * WINDOWS):
        lanes.wrote(small, 0.001, 1, others_wait=True)
        for each in hot:
            if lanes.wrote(each, 0.05, 9000, others_wait=True) is Move.TO_OWN_CONNECTION:
                moved.add(each)
    assert moved == set(hot)


def test_a_lane_is_cool_once_it_takes_little() -> None:
    lanes, mine = SlowLanes(), lane("mine")
    assert not lanes.is_cool(mine)
    lanes.wrote(mine, 0.05, 9000, others_wait=False)
    assert not lanes.is_cool(mine)
    for _ in range(10):
        lanes.wrote(mine, COOL_SECONDS / 2, 10, others_wait=False)
    assert lanes.is_cool(mine)
