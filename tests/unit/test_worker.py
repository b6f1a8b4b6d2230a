"""The worker's queue, without a target."""

import asyncio
from typing import Any, cast

import pytest

from streamer.apply.lanes.lane import Lane
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.lanes.queue_budget import Budget
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.write import worker as module
from streamer.apply.write.commit_pace import CommitPace
from streamer.apply.write.worker import Window, Worker
from streamer.decode.transactions import Changes, Transaction
from streamer.mapping.rule_options import TableType
from streamer.observability.metrics import Metrics
from streamer.util.lsn import Lsn
from tests.property import encode
from tests.unit import build


class _NoTarget:
    async def close(self) -> None:
        pass


class _NoOwner:
    pass


class _Gate(_NoTarget):
    """A target that connects when `opened` is set, and has the window then."""

    def __init__(self) -> None:
        self.asked, self.opened = asyncio.Event(), asyncio.Event()

    async def connect(self, fences: object) -> None:
        self.asked.set()
        await self.opened.wait()

    async def resolve_commit(self) -> bool:
        return True


class _Owner:
    fence, source = "fence", None

    def lane_durable(self, lane: Lane, transactions: list[LaneTransaction]) -> None:
        pass


async def test_a_worker_whose_queue_is_taken_back_before_it_runs_goes_on() -> None:
    nothing = cast("Any", None)
    budget = Budget(1000)
    worker = Worker(0, cast("Any", _NoTarget()), nothing, budget, nothing, CommitPace(0, 0.2))
    lane = Lane("a lane", worker, cast("Any", _NoOwner()), nothing)
    running = asyncio.create_task(worker.run())
    for _ in range(5):  # until the worker waits for a transaction
        await asyncio.sleep(0)
    worker.put(lane, LaneTransaction(Transaction(7, Lsn(100), 0), [], Lsn(110), 10))
    await worker.drop({lane})
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_a_lane_is_dropped_when_the_window_that_has_it_is_committed() -> None:
    gate = _Gate()
    worker = Worker(
        0, cast("Any", gate), cast("Any", None), Budget(1000), Metrics(), CommitPace(0, 0.01)
    )
    lane = Lane("a lane", worker, cast("Any", _Owner()), cast("Any", None))
    running = asyncio.create_task(worker.run())
    worker.put(lane, LaneTransaction(Transaction(7, Lsn(100), 0), [], Lsn(110), 10))
    await gate.asked.wait()
    droppers = [asyncio.create_task(worker.drop({lane})) for _ in range(2)]
    done, _ = await asyncio.wait(droppers, timeout=0.1)
    assert not done
    gate.opened.set()
    await asyncio.wait_for(asyncio.gather(*droppers), 30)
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize(
    ("table_type", "is_full"), [(TableType.CLONE, False), (TableType.HISTORY, True)]
)
def test_a_version_takes_the_room_of_two_rows(
    table_type: TableType, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW_CHANGES_MAX", 6)
    if is_full:
        monkeypatch.setattr(ApplyPlan, "takes_versions", True)
    plan = build.apply_plan(["id", "v"], ["id"], table_type=table_type)
    mapped = build.mapped_relation(table_type=table_type)
    payloads = [encode.insert(plan.relation.relid, [b"%d" % n, b"v"]) for n in range(3)]
    changes = Changes(plan.relation, payloads)
    lane_transaction = LaneTransaction(
        Transaction(7, Lsn(100), 0), [(mapped, changes)], Lsn(110), 10
    )
    window = Window()
    window.add(cast("Lane", None), lane_transaction, [plan])
    assert window.change_count == window.row_count == 3
    assert window.is_full == is_full


async def test_a_lane_that_moves_leaves_nothing_behind_and_keeps_its_order() -> None:
    nothing, budget = cast("Any", None), Budget(1000)
    home, place = (
        Worker(n, cast("Any", _NoTarget()), nothing, budget, nothing, CommitPace(0, 0.2))
        for n in range(2)
    )
    lane, other = (Lane(name, home, cast("Any", _NoOwner()), nothing) for name in ("a", "b"))
    plan = build.apply_plan(["id", "v"], ["id"], table_type=TableType.HISTORY)
    mapped = build.mapped_relation(table_type=TableType.HISTORY)
    rows = Changes(plan.relation, [encode.insert(plan.relation.relid, [b"1", b"v"])])
    transactions = [
        LaneTransaction(Transaction(n, Lsn(100 * n), 0), [(mapped, rows)], Lsn(110 * n), 10)
        for n in range(1, 5)
    ]
    for lane_transaction in transactions[:2]:  # folded already
        home.put(lane, lane_transaction)
        home._queue.clear()
        home._filling.add(lane, lane_transaction, [plan])
    for each, lane_transaction in ((other, transactions[2]), (lane, transactions[3])):
        home.put(each, lane_transaction)

    home._move(lane, place)

    assert lane.queue is place
    assert list(place._queue) == [
        (lane, lane_transaction)
        for lane_transaction in (transactions[0], transactions[1], transactions[3])
    ]
    assert list(home._queue) == [(other, transactions[2])]
    assert (home.queued_bytes, place.queued_bytes) == (10, 30)
    left = home._filling
    assert (left.transaction_count, left.change_count, left.version_count, left.size) == (
        0,
        0,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("counts", "has_room", "delays"),
    [
        ([9000, 3], True, True),
        ([9000], True, False),
        ([9000, 3], False, False),
        ([500] * 10, True, False),
    ],
    ids=["hot", "alone", "backlog", "even"],
)
def test_a_window_is_not_kept_open_for_a_hot_lane_while_others_wait(
    counts: list[int], has_room: bool, delays: bool
) -> None:
    owner, nothing = _NoOwner(), cast("Any", None)
    budget = Budget(1000, source_min=0)
    worker = Worker(0, cast("Any", _NoTarget()), nothing, budget, nothing, CommitPace(0, 0.2))
    window = Window()
    for number, count in enumerate(counts):
        lane = Lane(f"lane {number}", worker, cast("Any", owner), nothing)
        window.lanes[lane] = LaneWindow(lane, change_count=count)
        window.change_count += count
        budget.add(lane, 1 if has_room else 1000)
    assert worker._delays_others(window) == delays
