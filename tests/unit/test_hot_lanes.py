"""Which lane gets a separate connection."""

from typing import Any, cast

from streamer.apply.lanes.hot_lanes import HotLanes
from streamer.apply.lanes.lane import Lane
from streamer.apply.lanes.slow_lanes import ASIDE_SECONDS

HOME, WORKERS = cast("Any", object()), [cast("Any", object()), cast("Any", object())]
LATER = ASIDE_SECONDS + 1


def hot_lanes() -> HotLanes:
    lanes = HotLanes()
    for worker in WORKERS:
        lanes.add_worker(worker)
    return lanes


def new_lane(*, queued_count: int = 0) -> Lane:
    nothing = cast("Any", None)
    return Lane("a lane", HOME, nothing, nothing, queued_count=queued_count)


def move(lanes: HotLanes, lane: Lane, now: float = 0) -> bool:
    """Move *lane* to a free worker as a worker does; return whether a worker is free."""
    worker = lanes.reserve(lane, now)
    lane.queue = worker or lane.queue
    return worker is not None


def test_a_hot_worker_serves_one_lane_and_a_further_lane_stays() -> None:
    lanes, hot = hot_lanes(), [new_lane(queued_count=1) for _ in range(3)]
    assert [move(lanes, each) for each in hot] == [True, True, False]
    assert [each.queue for each in hot] == [*WORKERS, HOME]
    assert not move(lanes, hot[0]), "it has a hot worker"


def test_a_lane_goes_home_once_it_is_cool_and_its_time_is_over() -> None:
    lanes, hot = hot_lanes(), new_lane()
    assert lanes.release(hot, LATER, is_cool=True) is None, "it is at home"
    move(lanes, hot)
    assert lanes.release(hot, 1, is_cool=True) is None
    assert lanes.release(hot, LATER, is_cool=False) is None
    assert lanes.release(hot, LATER, is_cool=True) is HOME
    assert lanes.reserve(new_lane(), LATER) is WORKERS[0]


def test_a_hot_worker_is_free_when_its_lane_is_idle_or_has_ended() -> None:
    lanes, idle, busy = hot_lanes(), new_lane(), new_lane(queued_count=1)
    move(lanes, idle)
    move(lanes, busy)
    assert not move(lanes, new_lane(), 1), "the idle one may soon have changes again"
    assert move(lanes, new_lane(queued_count=1), LATER)
    assert idle.queue is HOME
    assert not move(lanes, new_lane(), LATER)
    busy.is_ending = True
    assert move(lanes, new_lane(), LATER)


def test_a_lane_that_lost_its_worker_while_idle_does_not_take_that_of_another() -> None:
    lanes, idle, other = hot_lanes(), new_lane(), new_lane(queued_count=1)
    move(lanes, idle)
    move(lanes, other, LATER)
    assert lanes.release(idle, 2 * LATER, is_cool=True) is None
    assert lanes.release(other, 2 * LATER, is_cool=True) is HOME
