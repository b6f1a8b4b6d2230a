"""The dispatcher, with the real lanes of `Relations`, against a model that records all changes.

The source of `tests.property.test_transactions` streams transactions, aborts subtransactions and
truncates tables. Workers and drainers are the rules of this machine: the rules apply changes of a
lane when the machine decides. Tables join, leave, are copied, paused, and replaced by tables of the
same name.
"""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from streamer.apply.lanes.held_counts import Held
from streamer.apply.lanes.lane import Hold, Lane, LaneOwner, MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.control.progress_tracker import ProgressTracker
from streamer.control.table_state import ALL_ROWS, State, TableState
from streamer.decode.transactions import TransactionAssembler
from streamer.errors.error_reports import ErrorReport
from streamer.runtime.services import Health
from streamer.runtime.session.dispatcher import Dispatched, Dispatcher
from streamer.runtime.tables.relations import Relations
from streamer.source.history_check import HistoryCheck
from streamer.util.lsn import LSN_MAX, Lsn
from tests.property.test_transactions import (
    PIECE_BYTES_MAX,
    RELIDS,
    UNMAPPED,
    Flat,
    Operation,
    Transactions,
)
from tests.unit.build import mapped_relation

START = 1000
TABLES = tuple(relid for relid in RELIDS if relid != UNMAPPED)
ANOTHER_RELID = 99


@dataclass
class Owed:
    """The changes of a relation in a transaction, which the target has to get."""

    expected: list[bytes]
    end_lsn: int
    arrived: list[bytes] = field(default_factory=list)
    lane: Lane | None = None
    is_durable: bool = False


class Queue:
    """A worker's queue."""

    def __init__(self) -> None:
        self.waiting: dict[Lane, list[LaneTransaction]] = {}

    def put(self, lane: Lane, lane_transaction: LaneTransaction) -> None:
        assert lane_transaction.end_lsn is not None, (
            "a worker cannot wait for the rest of a transaction"
        )
        self.waiting.setdefault(lane, []).append(lane_transaction)

    def hurry(self) -> None: ...


class MemorySpool:
    """A lane's spool in memory."""

    def __init__(self) -> None:
        self.kept: deque[LaneTransaction] = deque()
        self.held = Held()

    @property
    def is_empty(self) -> bool:
        return not self.kept

    def append(self, lane_transaction: LaneTransaction) -> None:
        self.kept.append(lane_transaction)

    def read(self, size: int) -> list[LaneTransaction]:
        """Return at least *size* pieces, to the end of a transaction."""
        taken: list[LaneTransaction] = []
        for lane_transaction in self.kept:
            if len(taken) >= size and taken[-1].end_lsn is not None:
                break
            taken.append(lane_transaction)
        return taken

    def release(self, count: int) -> None:
        while count:
            count -= self.kept.popleft().end_lsn is not None

    def discard_open(self) -> None: ...
    def rewind(self) -> None: ...
    def close(self) -> None:
        self.kept.clear()


class Dispatching(Transactions):
    """A source, its dispatcher, and the changes that every relation should get."""

    by_transaction = False
    keeps_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        services: Any = SimpleNamespace(
            workers=[self.queue],
            by_transaction=self.by_transaction,
            spools=SimpleNamespace(lane_spool=MemorySpool),
        )
        self.events = mock.Mock(spec=LaneOwner)
        self.tracker = ProgressTracker(Lsn(START))
        self.relations = Relations("shop", services, self.events, Health(), self.tracker)
        self.events.lane_live = self.relations.move_to_home_lanes
        self.events.lane_durable = self.durable
        self.assembler = TransactionAssembler(
            lambda relation: self.relations.find(relation) is not None,
            self.open_spool,
            piece_bytes_max=PIECE_BYTES_MAX,
        )
        self.dispatcher = Dispatcher(
            self.assembler,
            self.relations,
            self.tracker,
            HistoryCheck(None, Lsn(START)),
            replaced=self.replaced,
        )
        self.dispatcher.keeps_blocks = self.keeps_blocks
        self.mapped: dict[int, MappedRelation] = {}
        self.lanes: dict[Lane, None] = {}
        self.number_of_relation = 0
        self.owed: dict[tuple[int, int], Owed] = {}
        """By relation and the transaction's commit record."""
        self.copied_through: dict[int, int] = {}
        """The consistent points of copies that run."""
        self.stop_lsn: int | None = None
        self.passed_stop_at: int | None = None
        """Where the first transaction ends that commits at the stop position or later."""
        self.has_reached_stop = False
        self.seen_flush_lsn = START
        self.last_end_lsn = START
        self.last_sent: list[bytes] = []
        self.leads: dict[int, int] = {}

    @initialize(stop_lsn=st.none() | st.integers(START, START + 200))
    def begin(self, stop_lsn: int | None) -> None:
        self.stop_lsn = stop_lsn
        self.dispatcher.stop_lsn = None if stop_lsn is None else Lsn(stop_lsn)
        for relid in TABLES:
            self.add(relid, "ready")

    def teardown(self) -> None:
        """In the end every copy ends, and every change arrives."""
        for relid in list(self.mapped):
            self.end_copy_of(relid)
        for lane in self.all_lanes():
            lane.release(Hold.PAUSED)
            self.settle_all(lane)
        assert [owed for owed in self.owed.values() if not owed.is_durable] == []
        assert self.tracker.is_idle
        assert self.tracker.flush_lsn == self.tracker.newest_lsn
        if self.passed_stop_at is not None:
            assert self.dispatcher.has_reached_stop(Lsn(START - 1))
        elif self.stop_lsn is not None:
            # The stream ends before the stop position: the source's own position reaches the stop
            # position.
            took = self.dispatcher.keepalive(Lsn(max(self.stop_lsn, self.tracker.newest_lsn)))
            assert not took or self.dispatcher.has_reached_stop(self.tracker.flush_lsn)

    # ---- the stream ----------------------------------------------------------------------------

    def expect(self, xid: int, end_lsn: int, flat: Flat, foreign: bool) -> None:
        final_lsn = end_lsn - 10
        self.last_end_lsn, self.last_sent = end_lsn, list(self.out)
        if self.stop_lsn is not None and final_lsn >= self.stop_lsn:
            self.passed_stop_at = self.passed_stop_at or end_lsn
        if foreign or self.passed_stop_at is not None:
            return
        for relid, items in flat.items():
            mapped = self.mapped.get(relid)
            if mapped is None or mapped.state.is_lost:
                continue
            if final_lsn < self.copied_through.get(relid, 0):
                continue
            is_held = self.relations.lane(mapped).is_held_for_copy
            if not is_held and (final_lsn < mapped.skip_through_lsn or mapped.relid is not None):
                continue
            payloads = [payload for _, payload in items]
            self.owed[relid, final_lsn] = Owed(payloads, end_lsn)

    def burst(self, data: st.DataObject) -> None:
        while self.out:
            size = data.draw(st.integers(1, len(self.out)))
            burst, self.out = self.out[:size], self.out[size:]
            for dispatched in self.dispatcher.feed(burst):
                assert isinstance(dispatched, Dispatched)
                for lane, part in dispatched.parts.items():
                    if part.end_lsn is not None:
                        self.count_leads(part)
                    lane.dispatch(part)
                self.check_leads()
                if dispatched.end_lsn is None and data.draw(st.booleans()):
                    self.interrupt(data)
            if not self.assembler.is_between_transactions:
                before = self.tracker.newest_lsn
                assert not self.dispatcher.keepalive(Lsn(self.next_lsn + 1000))
                assert self.tracker.newest_lsn == before

    def count_leads(self, part: LaneTransaction) -> None:
        for single in part.split():
            final_lsn = single.transaction.final_lsn
            self.leads[final_lsn] = self.leads.get(final_lsn, 0) + single.is_lead

    def check_leads(self) -> None:
        assert set(self.leads.values()) <= {1}, "each transaction is counted once"
        self.leads.clear()

    def interrupt(self, data: st.DataObject) -> None:
        """Run a rule while a transaction has come in part."""
        match data.draw(st.sampled_from(["settle", "resync", "leave", "join"])):
            case "settle":
                self.settle(data, 3, gives_back=False)
            case "resync":
                self.resync(data.draw(st.sampled_from(TABLES)))
            case "leave":
                self.leave(data.draw(st.sampled_from(TABLES)))
            case "join":
                self.join(data.draw(st.sampled_from(TABLES)))

    @rule(ahead=st.integers(-20, 0))
    def keepalive(self, ahead: int) -> None:
        took = self.dispatcher.keepalive(Lsn(self.next_lsn + ahead))
        assert took == (not self.dispatcher.has_passed_stop)

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """A transaction that was dispatched comes again."""
        if self.last_sent and self.last_sent[0][:1] == b"B":
            self.out = list(self.last_sent)
            for dispatched in self.dispatcher.feed(self.out):
                assert isinstance(dispatched, Dispatched)
                assert not dispatched.parts
                assert not dispatched.is_new
            self.out = []

    def lose_connection(self, data: st.DataObject, todo: list[Operation]) -> None:
        """An attempt to stream and its dispatcher end with the connection: no rule."""

    # ---- tables --------------------------------------------------------------------------------

    def add(self, relid: int, state: str) -> None:
        self.number_of_relation += 1
        mapped = mapped_relation(
            self.number_of_relation, source=f"public.t{relid}", end_lsn=self.last_end_lsn
        )
        stored = TableState.stored(State(state), has_snapshot=False, end_lsn=mapped.end_lsn)
        record: Any = SimpleNamespace(table_state=stored, quarantined=0, error=None)
        self.relations.add(mapped, record)
        self.mapped[relid] = mapped

    def forget_owed(self, relid: int, before_lsn: int) -> None:
        for key, owed in list(self.owed.items()):
            if key[0] == relid and key[1] < before_lsn and not owed.is_durable:
                del self.owed[key]

    @rule(relid=st.sampled_from(TABLES))
    def join(self, relid: int) -> None:
        if relid not in self.mapped:
            self.add(relid, "init")

    @rule(relid=st.sampled_from(TABLES))
    def leave(self, relid: int) -> None:
        if relid not in self.mapped:
            return
        lane = self.relations.lane(self.mapped[relid])
        if self.by_transaction and not lane.is_held_for_copy:
            return  # left to a new attempt: `reload._may_change`
        assert self.relations.remove(self.mapped.pop(relid)) is lane
        self.copied_through.pop(relid, None)
        self.forget_owed(relid, LSN_MAX)
        self.settle_queue(lane)
        lane.is_ending = True
        lane.close()
        self.dispatcher.forget(lane)

    @rule(relid=st.sampled_from(TABLES))
    def resync(self, relid: int) -> None:
        """A copy is due, and will have all changes that were dispatched before."""
        if (mapped := self.mapped.get(relid)) is None or relid in self.copied_through:
            return
        mapped.relid = None
        before = self.relations.lane(mapped)
        self.relations.become(mapped, mapped.state.rows_requested(ALL_ROWS))
        self.forget_owed(relid, LSN_MAX)
        self.settle_queue(before)

    @rule(relid=st.sampled_from(TABLES), ahead=st.integers(0, 2))
    def begin_copy(self, relid: int, ahead: int) -> None:
        """The consistent point may be ahead of the stream."""
        mapped = self.mapped.get(relid)
        if mapped is None or relid in self.copied_through:
            return
        lane = self.relations.lane(mapped)
        if not lane.is_held_for_copy:
            return
        point = Lsn(self.next_lsn + 20 * ahead)
        self.copied_through[relid] = point
        self.relations.become(mapped, mapped.state.copy_began(point))
        self.tracker.durable(lane.pending, point)
        self.forget_owed(relid, point)

    @rule(relid=st.sampled_from(TABLES))
    def end_copy(self, relid: int) -> None:
        if relid in self.copied_through:
            self.end_copy_of(relid)

    def end_copy_of(self, relid: int) -> None:
        mapped = self.mapped[relid]
        if not self.relations.lane(mapped).is_held_for_copy:
            return
        self.begin_copy(relid, 0)
        point = Lsn(self.copied_through.pop(relid))
        mapped.switched_to_stream(None, point)
        self.relations.become(mapped, mapped.state.switched_to_stream(None, point))

    @rule(relid=st.sampled_from(TABLES))
    def replace(self, relid: int) -> None:
        """The source drops a table and creates a table of the same name."""
        mapped = self.mapped.get(relid)
        if mapped is not None and not self.relations.lane(mapped).is_held_for_copy:
            mapped.relid = ANOTHER_RELID

    def replaced(self, mapped: MappedRelation) -> None:
        assert mapped.relid == ANOTHER_RELID
        (relid,) = (relid for relid, other in self.mapped.items() if other is mapped)
        self.relations.drop_changes(mapped, ErrorReport("another table has the name", "sync"))
        self.forget_owed(relid, LSN_MAX)

    @rule(relid=st.sampled_from(TABLES), is_paused=st.booleans())
    def pause(self, relid: int, is_paused: bool) -> None:
        if relid in self.mapped:
            mapped = self.mapped[relid]
            state = mapped.state.paused() if is_paused else mapped.state.resumed()
            if not is_paused and relid in self.copied_through:
                state = mapped.state.copy_requested()
            self.relations.become(mapped, state)

    # ---- workers and drainers ------------------------------------------------------------------

    def all_lanes(self) -> list[Lane]:
        present = sorted(self.relations.lanes(), key=lambda lane: lane.name)
        self.lanes |= dict.fromkeys([*self.queue.waiting, *present])
        return [lane for lane in self.lanes if not lane.is_ending]

    @rule(data=st.data(), count=st.integers(1, 5), gives_back=st.booleans())
    def settle(self, data: st.DataObject, count: int, gives_back: bool) -> None:
        """A worker or a drainer applies the oldest transactions of a lane, or cannot."""
        if not (lanes := self.all_lanes()):
            return
        lane = lanes[data.draw(st.integers(0, len(lanes) - 1))]
        waiting = self.queue.waiting.get(lane, [])
        if waiting and gives_back:
            # The window of the worker comes back after the queued changes.
            first, rest = waiting[:count], waiting[count:]
            waiting.clear()
            for transactions in (rest, first):
                if transactions:
                    lane.give_back(transactions)
        elif waiting:
            self.apply_queued(lane, count)
        elif lane.may_drain and not lane.has_open_transaction:
            self.drain(lane, count)

    def settle_queue(self, lane: Lane) -> None:
        self.apply_queued(lane, len(self.queue.waiting.get(lane, [])))
        assert lane.queued_count == 0

    def settle_all(self, lane: Lane) -> None:
        self.settle_queue(lane)
        while lane.may_drain:
            self.drain(lane, 10)

    def apply_queued(self, lane: Lane, count: int) -> None:
        waiting = self.queue.waiting.get(lane, [])
        transactions = waiting[:count]
        del waiting[:count]
        if transactions:
            for lane_transaction in transactions:
                for single in lane_transaction.split():
                    self.apply(lane, single)
            lane.applied(transactions)

    def drain(self, lane: Lane, count: int) -> None:
        taken = lane.read_held(count)
        lane.drained(sum(lane_transaction.end_lsn is not None for lane_transaction in taken))
        for lane_transaction in taken:
            self.apply(lane, lane_transaction)
            if lane_transaction.end_lsn is not None:
                self.durable(lane, [lane_transaction])
        if not lane.has_backlog:
            self.relations.release_to_home_lane(lane)
            lane.go_live()

    def apply(self, lane: Lane, lane_transaction: LaneTransaction) -> None:
        for mapped, changes in lane_transaction.changes:
            if not mapped.has(lane_transaction.transaction):
                owed = self.owed[changes.relation.relid, lane_transaction.transaction.final_lsn]
                assert owed.lane in (None, lane), "no other lane has changes of that transaction"
                owed.lane = lane
                owed.arrived += changes.payloads

    def durable(self, lane: Lane, transactions: list[LaneTransaction]) -> None:
        for lane_transaction in [single for block in transactions for single in block.split()]:
            assert lane_transaction.end_lsn is not None
            for (relid, final_lsn), owed in self.owed.items():
                if final_lsn == lane_transaction.transaction.final_lsn and owed.lane is lane:
                    assert owed.arrived == owed.expected
                    assert not owed.is_durable
                    assert all(
                        older.is_durable
                        for (other, older_lsn), older in self.owed.items()
                        if other == relid and older_lsn < final_lsn
                    ), "changes of one relation arrive in commit order"
                    owed.is_durable = True
        last = transactions[-1]
        assert last.end_lsn is not None
        self.tracker.durable(lane.pending, last.end_lsn, last.transaction.commit_time)

    # ---- invariants -----------------------------------------------------------------------------

    def what_was_committed_has_arrived(self) -> None:
        """The dispatcher takes the pieces apart, so the list of pieces stays empty."""

    @invariant()
    def the_position_never_passes_a_change_that_is_not_durable(self) -> None:
        flush_lsn = self.tracker.flush_lsn
        for owed in self.owed.values():
            assert owed.is_durable or flush_lsn < owed.end_lsn

    @invariant()
    def the_position_never_decreases(self) -> None:
        assert self.tracker.flush_lsn >= self.seen_flush_lsn
        self.seen_flush_lsn = self.tracker.flush_lsn

    @invariant()
    def no_transaction_after_the_stop_position_is_dispatched(self) -> None:
        assert self.dispatcher.has_passed_stop == (self.passed_stop_at is not None)
        if self.passed_stop_at is not None:
            assert self.tracker.newest_lsn < self.passed_stop_at

    @invariant()
    def the_stop_condition_waits_for_every_change_before_it(self) -> None:
        flush_lsn = self.tracker.flush_lsn
        has_reached = self.dispatcher.has_reached_stop(flush_lsn)
        has_arrived = self.passed_stop_at is not None and self.tracker.is_idle
        is_behind = self.stop_lsn is not None and flush_lsn >= self.stop_lsn
        assert has_reached == (has_arrived or is_behind)
        assert has_reached or not self.has_reached_stop, "reached once, it stays so"
        self.has_reached_stop = has_reached
        if has_reached:
            assert self.stop_lsn is not None
            for (_, final_lsn), owed in self.owed.items():
                assert owed.is_durable or final_lsn >= self.stop_lsn


class DispatchingByTransaction(Dispatching):
    """The relations in sync share a lane."""

    by_transaction = True


class DispatchingOneByOne(Dispatching):
    """The reference: blocks are split."""

    keeps_blocks = False


TestDispatching = Dispatching.TestCase
TestDispatchingOneByOne = DispatchingOneByOne.TestCase
TestDispatchingByTransaction = DispatchingByTransaction.TestCase
