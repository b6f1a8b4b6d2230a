"""Waiting for an event, and for a lane, without polling."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

from streamer.apply.lanes.lane import Lane, LaneOwner, until_idle
from streamer.runtime.tables.relations import until_applied
from streamer.util.lsn import Lsn
from streamer.util.waiting import wait_for_event, wait_while_idle


async def test_a_wait_ends_when_the_event_is_set_or_the_time_is_over() -> None:
    event = asyncio.Event()
    assert not await wait_for_event(event, 0)
    event.set()
    assert await wait_for_event(event, None)


async def test_a_task_that_waits_for_a_lane_wakes_once_its_worker_has_no_changes() -> None:
    owner = mock.Mock(spec=LaneOwner)
    lane = Lane("shop", mock.Mock(), owner, mock.Mock())
    transactions: list[Any] = [
        SimpleNamespace(end_lsn=Lsn(n), changes=[], redefines=False) for n in (1, 2)
    ]
    for lane_transaction in transactions:
        lane.dispatch(lane_transaction)
    async with asyncio.timeout(30), asyncio.TaskGroup() as waiting:
        waiting.create_task(until_idle(lane))
        waiting.create_task(until_applied(lane, Lsn(9)))
        for lane_transaction in transactions:
            await asyncio.sleep(0)
            lane.applied([lane_transaction])
    assert lane.queued_count == 0


async def test_an_idle_object_is_checked_and_wakes_no_task() -> None:
    checks: list[bool] = []
    event, idle = asyncio.Event(), [True, True, False]

    def is_idle() -> bool:
        checks.append(idle[len(checks)])
        return checks[-1]

    assert not await asyncio.wait_for(wait_while_idle(event, 0.001, is_idle), 60)
    assert checks == idle
    event.set()
    assert await asyncio.wait_for(wait_while_idle(event, 60, is_idle), 60)
    assert checks == idle, "the end of the wait ends the checks, too"
