"""A lane that is held to a point against a model: earlier commits are applied first, and all
changes once and in order.
"""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamer.apply.lanes.lane import Hold, Lane
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.spool import LaneSpool, SpoolDirectory
from streamer.decode.transactions import Changes, Transaction
from streamer.util.lsn import Lsn
from tests.support import properties  # noqa: F401  # the number of examples
from tests.unit.build import mapped_relation, relation

MAPPED = mapped_relation()
RELATION = relation(["a"])


class Queue:
    """A worker's queue: the worker applies the oldest transactions, or returns all."""

    def __init__(self) -> None:
        self.transactions: list[LaneTransaction] = []

    def put(self, lane: Lane, *transactions: LaneTransaction) -> None:
        self.transactions.extend(transactions)

    def hurry(self) -> None: ...


class Owner:
    def lane_held(self, lane: Lane) -> None: ...
    def lane_live(self, lane: Lane) -> None: ...
    def lane_durable(self, lane: Lane, transactions: list[LaneTransaction]) -> None: ...


class HeldToPoint(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.directory = SpoolDirectory(Path(self.temporary.name))
        self.queue = Queue()
        owner: Any = Owner()
        self.lane = Lane("a lane", self.queue, owner, lambda: LaneSpool(self.directory))
        self.newest = 0
        self.dispatched: list[int] = []
        self.applied: list[int] = []

    def teardown(self) -> None:
        self.lane.close()
        self.directory.close()
        self.temporary.cleanup()

    @initialize()
    def begin(self) -> None:
        assert not self.lane.is_held

    @rule(step=st.integers(1, 5))
    def dispatch(self, step: int) -> None:
        self.newest += step
        self.dispatched.append(self.newest)
        self.lane.dispatch(
            LaneTransaction(
                Transaction(self.newest, Lsn(self.newest * 10), 0),
                [(MAPPED, Changes(RELATION, [b"change"]))],
                Lsn(self.newest * 10 + 5),
                6,
            )
        )

    @precondition(lambda self: self.queue.transactions)
    @rule(count=st.integers(1, 3))
    def work(self, count: int) -> None:
        done, self.queue.transactions = (
            self.queue.transactions[:count],
            self.queue.transactions[count:],
        )
        self.applied += [lane_transaction.transaction.xid for lane_transaction in done]
        self.lane.applied(done)

    @precondition(lambda self: self.queue.transactions)
    @rule()
    def give_back(self) -> None:
        given, self.queue.transactions = self.queue.transactions, []
        self.lane.give_back(given)

    @precondition(lambda self: Hold.POINT not in self.lane.hold)
    @rule()
    def hold(self) -> None:
        self.lane.hold_to_point(None)

    @precondition(lambda self: Hold.POINT in self.lane.hold)
    @rule(ahead=st.integers(0, 8))
    def take_snapshot(self, ahead: int) -> None:
        """A snapshot is newer than all received changes, and than the snapshot before."""
        point = Lsn((self.newest + ahead) * 10 + 6)
        if self.lane.point is None or point > self.lane.point:
            self.lane.hold_to_point(point)

    @precondition(lambda self: self.lane.may_drain)
    @rule(size=st.integers(1, 30), count=st.integers(0, 3))
    def drain(self, size: int, count: int) -> None:
        transactions = self.lane.read_held(size)
        assert self.lane.point is None or all(
            lane_transaction.transaction.final_lsn < self.lane.point
            for lane_transaction in transactions
        )
        if transactions:  # the target may refuse some, or all
            done = transactions[:count]
            self.applied += [lane_transaction.transaction.xid for lane_transaction in done]
            self.lane.drained(len(done))

    @precondition(lambda self: self.lane.is_at_point and self.lane.point is not None)
    @rule()
    def exchange(self) -> None:
        point = self.lane.point
        assert point is not None
        if self.newest * 10 + 5 < point:
            return  # the stream has not delivered all changes before the point
        before = [number for number in self.dispatched if number * 10 < point]
        assert self.applied == before
        self.lane.release(Hold.POINT)

    @precondition(lambda self: self.lane.is_held)
    @rule()
    def go_live(self) -> None:
        if self.lane.go_live():
            assert Hold.POINT not in self.lane.hold

    @invariant()
    def everything_is_applied_once_and_in_order(self) -> None:
        assert self.applied == self.dispatched[: len(self.applied)]


TestHeldToPoint = HeldToPoint.TestCase
