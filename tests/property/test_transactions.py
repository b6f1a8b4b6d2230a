"""For any source, each committed transaction arrives once, complete and in order.

`Source` behaves like a walsender with pgoutput. `Source` sends RELATION before the first change of
a relation and after each change of the definition. Some transactions are streamed in parts, and
some transactions or subtransactions are rolled back. The test compares the commits with the pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamer.decode.transactions import (
    TransactionAssembler,
    TransactionBlock,
    TransactionPiece,
)
from tests.property import encode

RELIDS = (16385, 0x74000000, 16387)
UNMAPPED = 16387
PIECE_BYTES_MAX = 150

Flat = dict[int, list[tuple[int, bytes]]]
"""The changes of each relation in order, each with the number of columns at that time."""


class ListSpool:
    """A spool in memory that detects use after its end."""

    def __init__(self) -> None:
        self.kept: list[tuple[bytes, list[bytes]]] = []
        self.is_open = True

    def append(self, subxid: bytes, messages: list[bytes]) -> None:
        assert self.is_open
        self.kept.append((subxid, messages))

    def append_large(self, subxid: bytes, message: bytes) -> None:
        assert self.is_open
        self.kept.append((subxid, [bytes(message[:1]) + bytes(message[5:])]))

    def replay(self) -> Iterator[tuple[bytes, list[bytes]]]:
        assert self.is_open
        for subxid, messages in self.kept:
            for start in range(0, len(messages), 3):
                yield subxid, messages[start : start + 3]

    def close(self) -> None:
        self.is_open = False


@dataclass
class Streamed:
    xid: int
    is_foreign: bool
    known: dict[int, int] = field(default_factory=dict)
    changes: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    """Subtransaction, relation, number of columns, change."""
    open: list[list[int]] = field(default_factory=list)
    """Open subtransactions, the innermost last: the xid, then the xids of subtransactions that fall
    with it.
    """
    has_begun: bool = False

    @property
    def current_xid(self) -> int:
        return self.open[-1][0] if self.open else self.xid

    @property
    def locked(self) -> set[int]:
        """Relations that have changes; a rolled back subtransaction loses its changes."""
        return {change[1] for change in self.changes}


Operation = tuple[str, int]
"""The action, and the relation."""

_ORDINARY = ["change", "change", "change", "truncate", "message"]


def operations(*more: str) -> st.SearchStrategy[list[Operation]]:
    what = st.sampled_from([*_ORDINARY, *more])
    return st.lists(st.tuples(what, st.sampled_from(RELIDS)), max_size=6)


class Transactions(RuleBasedStateMachine):
    """A source, its assembler, and the expected pieces."""

    forward_origins = False

    def __init__(self) -> None:
        super().__init__()
        self.spools: list[ListSpool] = []
        self.assembler = TransactionAssembler(
            lambda relation: relation.relid != UNMAPPED,
            self.open_spool,
            piece_bytes_max=PIECE_BYTES_MAX,
            forward_origins=self.forward_origins,
        )
        self.out: list[bytes] = []
        self.widths = dict.fromkeys(RELIDS, 1)
        self.known: dict[int, int] = {}
        self.streams: dict[int, Streamed] = {}
        self.next_xid = 700
        self.next_lsn = 1000
        self.number = 0
        self.expected: list[tuple[int, int, Flat]] = []
        self.arrived: list[tuple[int, int, Flat]] = []
        self.pieces: list[TransactionPiece] = []

    def open_spool(self, xid: int) -> ListSpool:
        self.spools.append(ListSpool())
        return self.spools[-1]

    # ---- the source ----------------------------------------------------------------------------

    def new_xid(self) -> int:
        self.next_xid += 1
        return self.next_xid

    def new_lsn(self) -> int:
        self.next_lsn += 10
        return self.next_lsn

    def send_relation(self, relid: int, known: dict[int, int], xid: int | None) -> None:
        width = self.widths[relid]
        if known.get(relid) != width:
            known[relid] = width
            columns = [(int(n == 0), f"c{n}", 25, -1) for n in range(width)]
            self.out.append(encode.relation(relid, "public", f"t{relid}", "d", columns, xid))

    def change(self, relid: int) -> list[encode.Cell]:
        self.number += 1
        return [b"%d" % self.number] * self.widths[relid]

    def burst(self, data: st.DataObject) -> None:
        """Feed the sent messages, in bursts of any size."""
        while self.out:
            size = data.draw(st.integers(1, len(self.out)))
            burst, self.out = self.out[:size], self.out[size:]
            for found in self.assembler.feed(burst):
                for piece in found.pieces() if isinstance(found, TransactionBlock) else [found]:
                    self.take(piece)

    def take(self, piece: TransactionPiece) -> None:
        if self.pieces:
            assert piece.transaction is self.pieces[0].transaction
        self.pieces.append(piece)
        if piece.end_lsn is None:
            return
        flat: Flat = {}
        for part in self.pieces:
            for changes in part.changes:
                items = flat.setdefault(changes.relation.relid, [])
                width = len(changes.relation.columns)
                items += [(width, payload) for payload in changes.payloads]
        self.arrived.append((piece.transaction.xid, piece.end_lsn, flat))
        self.pieces = []

    @rule(data=st.data(), todos=st.lists(operations(), min_size=1, max_size=4))
    def transactions(self, data: st.DataObject, todos: list[list[Operation]]) -> None:
        for todo in todos:
            self.transaction(todo, foreign=data.draw(st.integers(0, 3)) == 0)
        self.burst(data)

    def transaction(self, todo: list[Operation], *, foreign: bool) -> None:
        xid, final_lsn, flat = self.new_xid(), self.new_lsn(), Flat()
        self.out.append(encode.begin(final_lsn, 5, xid))
        if foreign:
            self.out.append(encode.origin(1, "elsewhere"))
        for what, relid in todo:
            if what == "message":
                self.out.append(encode.message(1, final_lsn, "prefix", b"content"))
            elif what == "truncate":
                relids = [relid] if relid == UNMAPPED else [relid, UNMAPPED]
                for truncated in relids:
                    self.send_relation(truncated, self.known, None)
                self.out.append(encode.truncate(relids))
                flat.setdefault(relid, []).append((self.widths[relid], self.out[-1]))
            else:
                self.send_relation(relid, self.known, None)
                self.out.append(encode.insert(relid, self.change(relid)))
                flat.setdefault(relid, []).append((self.widths[relid], self.out[-1]))
        end_lsn = self.new_lsn()
        self.out.append(encode.commit(final_lsn, end_lsn, 5))
        self.expect(xid, end_lsn, flat, foreign)

    def expect(self, xid: int, end_lsn: int, flat: Flat, foreign: bool) -> None:
        if foreign and not self.forward_origins:
            flat = {}
        flat.pop(UNMAPPED, None)
        self.expected.append((xid, end_lsn, flat))

    @rule(relid=st.sampled_from(RELIDS), width=st.integers(1, 3))
    def redefine(self, relid: int, width: int) -> None:
        """ALTER TABLE waits for all transactions that have changed the table."""
        if any(relid in stream.locked for stream in self.streams.values()):
            return
        self.widths[relid] = width
        self.known.pop(relid, None)
        for stream in self.streams.values():
            stream.known.pop(relid, None)

    @rule(
        data=st.data(),
        todo=operations("savepoint", "savepoint", "release"),
        foreign=st.booleans(),
        again=st.booleans(),
    )
    def stream(
        self, data: st.DataObject, todo: list[Operation], foreign: bool, again: bool
    ) -> None:
        if self.streams and again:
            stream = self.streams[data.draw(st.sampled_from(sorted(self.streams)))]
        else:
            stream = Streamed(self.new_xid(), foreign)
            self.streams[stream.xid] = stream
        self.out.append(encode.stream_start(stream.xid, first=not stream.has_begun))
        if stream.is_foreign and not stream.has_begun:
            self.out.append(encode.origin(1, "elsewhere"))
        stream.has_begun = True
        for what, relid in todo:
            xid = stream.current_xid
            if what == "savepoint":
                stream.open.append([self.new_xid()])
            elif what == "release":
                self.release_savepoint(stream)
            elif what == "message":
                self.out.append(encode.message(1, 1, "prefix", b"content", xid))
            else:
                self.send_relation(relid, stream.known, xid)
                if what == "truncate":
                    self.out.append(encode.truncate([relid], 0, xid))
                else:
                    self.out.append(encode.insert(relid, self.change(relid), xid=xid))
                payload = self.out[-1][:1] + self.out[-1][5:]
                stream.changes.append((xid, relid, self.widths[relid], payload))
        self.out.append(encode.stream_stop())
        self.burst(data)

    def release_savepoint(self, stream: Streamed) -> None:
        if stream.open:
            released = stream.open.pop()
            if stream.open:
                stream.open[-1] += released

    @precondition(lambda self: any(stream.open for stream in self.streams.values()))
    @rule(data=st.data())
    def roll_back_to_savepoint(self, data: st.DataObject) -> None:
        """All later changes fall; each streamed subtransaction is aborted separately."""
        within = sorted(xid for xid, stream in self.streams.items() if stream.open)
        stream = self.streams[data.draw(st.sampled_from(within))]
        depth = data.draw(st.integers(0, len(stream.open) - 1))
        aborted = {xid for level in stream.open[depth:] for xid in level}
        del stream.open[depth:]
        was_streamed = {change[0] for change in stream.changes} & aborted
        stream.changes = [change for change in stream.changes if change[0] not in aborted]
        for subxid in sorted(was_streamed, reverse=True):
            stream.known.clear()  # cleanup_rel_sync_cache in pgoutput.c
            self.out.append(encode.stream_abort(stream.xid, subxid))
        self.burst(data)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), does_commit=st.booleans())
    def end_stream(self, data: st.DataObject, does_commit: bool) -> None:
        stream = self.streams.pop(data.draw(st.sampled_from(sorted(self.streams))))
        if not does_commit:
            self.out.append(encode.stream_abort(stream.xid, stream.xid))
            self.burst(data)
            return
        commit_lsn, end_lsn = self.new_lsn(), self.new_lsn()
        self.out.append(encode.stream_commit(stream.xid, commit_lsn, end_lsn, 5))
        self.known |= stream.known
        flat: Flat = {}
        for _, relid, width, payload in stream.changes:
            flat.setdefault(relid, []).append((width, payload))
        self.expect(stream.xid, end_lsn, flat, stream.is_foreign)
        self.burst(data)

    @rule(data=st.data(), todo=operations())
    def lose_connection(self, data: st.DataObject, todo: list[Operation]) -> None:
        """In the middle of a transaction; all uncommitted changes are lost."""
        self.out.append(encode.begin(self.new_lsn(), 5, self.new_xid()))
        for _, relid in todo:
            self.send_relation(relid, self.known, None)
            self.out.append(encode.insert(relid, self.change(relid)))
        self.burst(data)
        assert not self.assembler.is_between_transactions
        self.assembler.reset()
        self.pieces = []
        self.known.clear()
        self.streams.clear()

    # ---- invariants -----------------------------------------------------------------------------

    @invariant()
    def what_was_committed_has_arrived(self) -> None:
        assert self.arrived == self.expected

    @invariant()
    def nothing_is_unfinished(self) -> None:
        assert self.pieces == []
        assert self.assembler.is_between_transactions

    @invariant()
    def spools_are_open_for_transactions_that_are(self) -> None:
        assert sum(spool.is_open for spool in self.spools) == len(self.streams)


class ForwardingTransactions(Transactions):
    forward_origins = True


TestTransactions = Transactions.TestCase
TestForwardingTransactions = ForwardingTransactions.TestCase
