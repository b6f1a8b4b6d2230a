"""A lane whose worker gives shares back, and the drainer's way through them."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer.apply.lanes.lane import Lane
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.spool import LaneSpool, SpoolDirectory
from streamer.decode.transactions import Changes, Transaction
from streamer.util.lsn import Lsn
from tests.unit.build import mapped_relation, relation

MEGABYTE = 1024 * 1024
MAPPED = mapped_relation()
RELATION = relation(["a"])


class Queue:
    def put(self, lane: Lane, *transactions: LaneTransaction) -> None: ...
    def hurry(self) -> None: ...


class Owner:
    def lane_held(self, lane: Lane) -> None: ...
    def lane_live(self, lane: Lane) -> None: ...


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    directory = SpoolDirectory(tmp_path)
    owner: Any = Owner()
    yield Lane("a lane", Queue(), owner, lambda: LaneSpool(directory))
    directory.close()


def lane_transaction(number: int, size: int = 10) -> LaneTransaction:
    payload = bytes([number % 256]) * size
    return LaneTransaction(
        Transaction(number, Lsn(number * 100), 0),
        [(MAPPED, Changes(RELATION, [payload]))],
        Lsn(number * 100 + 50),
        size,
    )


def numbers(transactions: list[LaneTransaction]) -> list[int]:
    return [lane_transaction.transaction.xid for lane_transaction in transactions]


def test_transactions_that_come_back_are_taken_in_commit_order_until_they_are_applied(
    lane: Lane,
) -> None:
    for number in range(1, 6):
        lane.dispatch(lane_transaction(number))
    lane.give_back([lane_transaction(3), lane_transaction(4), lane_transaction(5)])  # queued
    lane.dispatch(lane_transaction(6))
    assert not lane.may_drain
    lane.give_back(
        [lane_transaction(1), lane_transaction(2)]
    )  # the window that was being committed
    assert lane.may_drain
    assert lane.held(MAPPED) == (6, 60)

    assert numbers(lane.read_held(1000)) == [1, 2]
    lane.drained(1)
    assert lane.held(MAPPED) == (5, 50)
    taken = []
    while transactions := lane.read_held(1000):
        taken += numbers(transactions)
        lane.drained(0)
        assert numbers(lane.read_held(1000)) == numbers(transactions), (
            "what was not applied comes again"
        )
        lane.drained(len(transactions))
    assert taken == [2, 3, 4, 5, 6]
    assert lane.held(MAPPED) == (0, 0)
    assert lane.go_live()
    assert not lane.is_held


def test_transactions_that_come_back_wait_on_disk(lane: Lane, tmp_path: Path) -> None:
    """As many lanes as there are may be held for days."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(1, 21):
            lane.dispatch(lane_transaction(number))
        for number in range(20, 0, -1):
            lane.give_back([lane_transaction(number, MEGABYTE)])
        assert tracemalloc.get_traced_memory()[0] - before < 2 * MEGABYTE
        lane.read_held(4 * MEGABYTE)
        lane.drained(0)
        assert tracemalloc.get_traced_memory()[0] - before < 3 * MEGABYTE
    finally:
        tracemalloc.stop()
    assert len(list(tmp_path.glob("*/*.spool"))) == 20
    lane.close()
    assert list(tmp_path.glob("*/*.spool")) == []
