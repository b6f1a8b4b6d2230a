"""The queued bytes of each source."""

import asyncio
from typing import Any

from streamer.apply.lanes.queue_budget import Budget


class _Lane:
    def __init__(self, owner: Any) -> None:
        self.owner = owner


def test_a_source_alone_may_use_all() -> None:
    budget, lane = Budget(100, 10), _Lane("a")
    budget.add(lane, 99)
    assert budget.has_room("a")
    budget.add(lane, 1)
    assert not budget.has_room("a")
    assert budget.has_room("b")


def test_a_source_that_has_used_its_part_stops_nobody_else() -> None:
    budget, lanes = Budget(100, 10), {name: _Lane(name) for name in "abc"}
    budget.add(lanes["a"], 100)
    budget.add(lanes["b"], 49)
    assert budget.has_room("b")
    budget.add(lanes["b"], 1)
    assert not budget.has_room("b")
    assert budget.has_room("c")
    budget.subtract(lanes["a"], 100)
    assert budget.has_room("b")


def test_every_source_may_queue_a_little() -> None:
    budget = Budget(100, 10)
    for number in range(50):
        assert budget.has_room(number)
        budget.add(_Lane(number), 9)
        assert budget.has_room(number)


async def test_a_source_that_waits_goes_on_as_others_give_back() -> None:
    budget, lane, other = Budget(100, 10), _Lane("a"), _Lane("b")
    budget.add(other, 60)
    budget.add(lane, 60)
    waiting = asyncio.create_task(budget.wait_for_room("a"))
    await asyncio.sleep(0)
    budget.subtract(other, 10)
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.subtract(other, 50)
    await asyncio.wait_for(waiting, 30)
