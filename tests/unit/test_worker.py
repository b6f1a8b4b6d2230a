"""The worker's queue, without a target."""

import asyncio
from typing import Any, cast

from streamer.apply.budget import Budget
from streamer.apply.lane import Lane
from streamer.apply.lane_transaction import LaneTransaction
from streamer.apply.pace import CommitPace
from streamer.apply.worker import Worker
from streamer.decode.transactions import Transaction
from streamer.lsn import Lsn


class _NoTarget:
    async def close(self) -> None:
        pass


class _NoOwner:
    pass


async def test_a_worker_whose_queue_is_taken_back_before_it_runs_goes_on() -> None:
    nothing = cast("Any", None)
    budget = Budget(1000)
    worker = Worker(0, cast("Any", _NoTarget()), nothing, budget, nothing, CommitPace(0, 0.2))
    lane = Lane("a lane", worker, cast("Any", _NoOwner()), nothing)
    running = asyncio.create_task(worker.run())
    for _ in range(5):  # until it waits for a share
        await asyncio.sleep(0)
    worker.put(lane, LaneTransaction(Transaction(7, Lsn(100), 0), [], Lsn(110), 10))
    await worker.drop({lane})
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
