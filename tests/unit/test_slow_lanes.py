"""Which lanes move aside because the others of their worker wait for them."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from streamer.apply.slow_lanes import WINDOWS, SlowLanes


@dataclass(eq=False)
class _Lane:
    name: str


def moves_aside(
    seconds: float, *, beside: float | None = 0.002, changes: int = 1, others_wait: bool = True
) -> bool:
    """Whether a lane that takes *seconds* of each window moves aside, and in the right window."""
    lanes, lane, other = SlowLanes(), cast("Any", _Lane("lane")), cast("Any", _Lane("other"))
    for number in range(1, WINDOWS + 3):
        if beside is not None:
            assert not lanes.wrote(other, beside, 1, others_wait=True)
        if lanes.wrote(lane, seconds, changes, others_wait=others_wait):
            assert number == WINDOWS, "it moves aside as soon as it has been slow often enough"
            return True
    return False


@pytest.mark.parametrize("beside", [0.002, 0.01, None])
def test_a_lane_with_slow_batches_moves_aside(beside: float | None) -> None:
    assert moves_aside(0.05, beside=beside)


@pytest.mark.parametrize(
    "window",
    [
        {"seconds": 0.02},
        {"seconds": 0.05, "beside": 0.03},
        {"seconds": 0.2, "changes": 8000},
        {"seconds": 0.05, "others_wait": False},
    ],
    ids=["fast", "as slow as the others", "busy", "nobody waits"],
)
def test_a_lane_that_is_not_slow_for_itself_stays(window: dict[str, Any]) -> None:
    assert not moves_aside(**window)


def test_a_lane_that_is_slow_now_and_then_stays() -> None:
    lanes, lane = SlowLanes(), cast("Any", _Lane("lane"))
    for _ in range(10):
        assert not lanes.wrote(lane, 0.05, 1, others_wait=True)
        assert not lanes.wrote(lane, 0.0, 1, others_wait=True)
