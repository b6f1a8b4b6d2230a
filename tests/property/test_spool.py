"""A lane's spool against a list, with files so small that every share crosses their edges."""

import contextlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamer.apply.lanes import spool
from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.spool import (
    LaneSpool,
    OpenTransactionDiscarded,
    SpoolDirectory,
    StreamedSpool,
)
from streamer.decode.pgoutput import Relation
from streamer.decode.transactions import Changes, Transaction
from streamer.util.lsn import Lsn
from tests.unit.build import mapped_relation, relation

Flat = list[tuple[MappedRelation, Relation, bytes]]

RELATIONS = [
    (mapped, relation(columns, relid=relid))
    for mapped, relid in ((mapped_relation(1), 1), (mapped_relation(2), 2))
    for columns in (("a",), ("a", "b"))
]

payloads = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.integers(40, 130).map(lambda size: b"x" * size),
)
contents = st.lists(
    st.tuples(st.integers(0, len(RELATIONS) - 1), st.lists(payloads, min_size=1, max_size=4)),
    max_size=4,
)
sizes = st.integers(40, 400)  # never less than the header of the first change


@dataclass
class ModelTransaction:
    transaction: Transaction
    is_lead: bool
    end_lsn: Lsn | None = None
    changes: Flat = field(default_factory=list)


def small_files() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for name, size in (
        ("SEGMENT_BYTES", 200),
        ("_READ_BYTES", 64),
        ("_BUFFER_BYTES", 50),
        ("_BLOCK_BYTES", 40),
    ):
        stack.enter_context(mock.patch.object(spool, name, size))
    return stack


class Spooling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = small_files()
        parent = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.directory = SpoolDirectory(parent)
        self.stack.callback(self.directory.close)
        self.spool = LaneSpool(self.directory)
        self.finished: list[ModelTransaction] = []
        self.open: ModelTransaction | None = None
        self.released = 0
        self.read_count = 0
        self.partial: Flat = []
        self.number = 0

    def teardown(self) -> None:
        with self.stack:
            self.spool.close()
            assert list(self.directory.path.glob("*.spool")) == []

    # ---- writing -------------------------------------------------------------------------------

    @rule(content=contents, is_last=st.booleans(), is_lead=st.booleans())
    def append(self, content: list[tuple[int, list[bytes]]], is_last: bool, is_lead: bool) -> None:
        self.number += 1
        if self.open is None:
            transaction = Transaction(self.number, Lsn(self.number * 100), -self.number)
            self.open = ModelTransaction(transaction, is_lead)
        end_lsn = Lsn(self.number * 100 + 50) if is_last else None
        changes = []
        for which, values in content:
            mapped, definition = RELATIONS[which]
            changes.append((mapped, Changes(definition, values)))
            self.open.changes += [(mapped, definition, value) for value in values]
        size = sum(change.size for _, change in changes)
        self.spool.append(
            LaneTransaction(self.open.transaction, changes, end_lsn, size, self.open.is_lead)
        )
        if is_last:
            self.open.end_lsn = end_lsn
            self.finished.append(self.open)
            self.open = None

    @rule()
    def discard_open(self) -> None:
        """The connection was lost; a reader that has seen a part of the transaction learns of the
        loss.
        """
        self.spool.discard_open()
        if self.open is None:
            return
        self.open = None
        try:
            transactions = self.spool.read(40)
        except OpenTransactionDiscarded:
            with pytest.raises(OpenTransactionDiscarded):
                self.spool.read(40)
            self.rewind()
        else:
            assert not self.is_reading_the_open_transaction
            self.check(transactions)

    # ---- reading -------------------------------------------------------------------------------

    @property
    def is_reading_the_open_transaction(self) -> bool:
        return bool(self.partial) and self.read_count == len(self.finished)

    @rule(size=sizes)
    def read(self, size: int) -> None:
        self.check(self.spool.read(size))

    def check(self, transactions: list[LaneTransaction]) -> None:
        following = self.finished[self.read_count :] + ([self.open] if self.open else [])
        if not transactions:
            # Only the beginning of the unfinished transaction can be left, without a change.
            assert [
                lane_transaction
                for lane_transaction in following
                if lane_transaction.end_lsn is not None
            ] == []
            assert self.open is None or self.partial == self.open.changes
            return
        assert len(transactions) <= len(following)
        for lane_transaction, model in zip(transactions, following, strict=False):
            assert lane_transaction.transaction == model.transaction
            assert lane_transaction.is_lead == model.is_lead
            flat = [(m, c.relation, p) for m, c in lane_transaction.changes for p in c.payloads]
            assert lane_transaction.size == sum(len(payload) for _, _, payload in flat)
            self.partial += flat
            assert self.partial == model.changes[: len(self.partial)]
            if lane_transaction.end_lsn is None:
                assert lane_transaction is transactions[0], "a piece comes alone"
                assert len(transactions) == 1
                assert flat, "a piece holds something"
                return
            assert lane_transaction.end_lsn == model.end_lsn
            assert self.partial == model.changes
            self.partial = []
            self.read_count += 1

    @precondition(lambda self: self.read_count > self.released)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Forget the first of the read transactions; the spool reads the rest again on request."""
        count = data.draw(st.integers(0, self.read_count - self.released))
        self.spool.release(count)
        self.released += count

    @rule()
    def rewind(self) -> None:
        self.spool.rewind()
        self.read_count = self.released
        self.partial = []

    @rule()
    def drain(self) -> None:
        while transactions := self.spool.read(1000):
            self.check(transactions)
        self.check([])
        self.spool.release(self.read_count - self.released)
        self.released = self.read_count

    # ---- invariants -----------------------------------------------------------------------------

    @invariant()
    def it_is_empty_when_everything_is_released(self) -> None:
        is_empty = self.released == len(self.finished) and self.open is None
        assert self.spool.is_empty == is_empty
        assert (self.spool.size_bytes == 0) == is_empty

    @invariant()
    def what_is_not_released_is_counted(self) -> None:
        kept = [*self.finished[self.released :], *([self.open] if self.open else [])]
        for mapped in {mapped for mapped, _ in RELATIONS}:
            payloads = [
                p
                for lane_transaction in kept
                for m, _, p in lane_transaction.changes
                if m is mapped
            ]
            assert self.spool.held.counts_of(mapped) == (len(payloads), sum(map(len, payloads)))

    @invariant()
    def released_files_are_deleted(self) -> None:
        if self.spool.is_empty:
            assert len(list(self.directory.path.glob("*.spool"))) <= 1


TestSpooling = Spooling.TestCase


subxids = st.sampled_from([b"", b"\0\0\0\1", b"\xff\0\0\0"])


@given(st.lists(st.tuples(subxids, st.lists(payloads, max_size=9)), max_size=6))
def test_a_streamed_transaction_is_replayed_as_it_came_and_as_often_as_asked(
    bursts: list[tuple[bytes, list[bytes]]],
) -> None:
    def flat(kept: Iterable[tuple[bytes, list[bytes]]]) -> list[tuple[bytes, bytes]]:
        return [(subxid, message) for subxid, messages in kept for message in messages]

    with small_files(), tempfile.TemporaryDirectory() as parent:
        directory = SpoolDirectory(Path(parent))
        streamed = StreamedSpool(directory)
        for burst in bursts:
            streamed.append(*burst)
        assert flat(streamed.replay()) == flat(bursts)
        streamed.append(b"", [b"more"])
        assert flat(streamed.replay()) == [*flat(bursts), (b"", b"more")]
        streamed.close()
        assert list(directory.path.glob("*.spool")) == []
        directory.close()
