"""Blocks of transactions give the lanes, positions and acknowledgements of single transactions, and
compiled code gives the blocks of pure Python.
"""

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.compiled import choice
from streamer.control.progress_tracker import LanePending, ProgressTracker
from streamer.decode.pgoutput import Relation
from streamer.decode.transactions import TransactionAssembler, TransactionBlock, TransactionPiece
from streamer.errors.error_classes import ProtocolError
from streamer.runtime.session.dispatcher import Dispatched, Dispatcher
from streamer.source.history_check import HistoryCheck
from streamer.util.lsn import Lsn
from tests.property import encode
from tests.property.test_transactions import ListSpool
from tests.unit.build import mapped_relation

if TYPE_CHECKING:
    from streamer.apply.lanes.lane_transaction import LaneTransaction

RELIDS = (16385, 16386, 16387)
UNMAPPED = 16387
START = 1000

compiled, _ = choice.choose("")
modules = [None] if compiled is None else [None, compiled]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Some transactions, with definitions that change between and within transactions."""
    out = [encode.relation(r, "public", f"t{r}", "d", [(1, "a", 25, -1)]) for r in RELIDS]
    lsn = START
    for xid in range(700, 700 + draw(st.integers(1, 8))):
        lsn += draw(st.integers(0, 10))
        final_lsn = lsn
        out.append(encode.begin(final_lsn, draw(st.integers(0, 9)), xid))
        for what in draw(st.lists(st.sampled_from("IIIIIURTMO"), max_size=6)):
            relid = draw(st.sampled_from(RELIDS))
            if what == "I":
                out.append(encode.insert(relid, [b"%d" % len(out)]))
            elif what == "U":
                out.append(encode.update(relid, [b"%d" % len(out)], key=[b"1"]))
            elif what == "R":
                out.append(encode.relation(relid, "public", f"t{relid}", "d", [(1, "b", 25, -1)]))
            elif what == "T":
                out.append(encode.truncate([relid]))
            elif what == "M":
                out.append(encode.message(1, final_lsn, "prefix", b"content"))
            elif what == "O":
                out.append(encode.origin(1, "elsewhere"))
        lsn += draw(st.integers(1, 10))
        out.append(encode.commit(final_lsn, lsn, 5))
    return out


@st.composite
def damaged(draw: st.DrawFn, stream: list[bytes]) -> list[bytes]:
    """The same, with a message lost, repeated, cut off, prolonged or changed."""
    number = draw(st.integers(0, len(stream) - 1))
    message = stream[number]
    at = draw(st.integers(0, len(message) - 1))
    match draw(st.sampled_from(["lost", "twice", "cut", "long", "changed"])):
        case "lost":
            put = []
        case "twice":
            put = [message, message]
        case "cut":
            put = [message[:at]]
        case "long":
            put = [message + b"\0"]
        case _:
            put = [message[:at] + bytes([draw(st.integers(0, 255))]) + message[at + 1 :]]
    return stream[:number] + put + stream[number + 1 :]


def bursts(draw: Any, stream: list[bytes]) -> list[list[bytes]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def assembled(some: list[list[bytes]], module: Any) -> list[Any]:
    """Return the blocks and pieces of *some* bursts, and the error at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "compiled", module)
        assembler = TransactionAssembler(
            lambda relation: relation.relid != UNMAPPED, lambda _: ListSpool(), piece_bytes_max=200
        )
        found: list[Any] = []
        try:
            for burst in some:
                found += assembler.feed(burst)
        except ProtocolError as exc:
            found.append(str(exc))
        return found


@given(data=st.data())
def test_compiled_code_assembles_the_blocks_of_pure_python(data: st.DataObject) -> None:
    stream = data.draw(streams())
    if data.draw(st.booleans()):
        stream = data.draw(damaged(stream))
    some = bursts(data.draw, stream)
    for module in modules[1:]:
        assert assembled(some, module) == assembled(some, None)


@given(data=st.data())
def test_a_stream_in_bursts_holds_the_transactions_of_one_burst(data: st.DataObject) -> None:
    stream = data.draw(streams())

    def changes(found: list[Any]) -> dict[int, dict[int, list[bytes]]]:
        result: dict[int, dict[int, list[bytes]]] = {}
        for block in found:
            pieces = block.pieces() if isinstance(block, TransactionBlock) else [block]
            for piece in pieces:
                assert isinstance(piece, TransactionPiece)
                of_one = result.setdefault(piece.transaction.xid, {})
                for some in piece.changes:
                    of_one.setdefault(some.relation.relid, []).extend(some.payloads)
        return result

    for module in modules:
        whole = changes(assembled([stream], module))
        assert changes(assembled(bursts(data.draw, stream), module)) == whole
        assert changes(assembled([[message] for message in stream], module)) == whole


class _Lane:
    """A lane that keeps all transactions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending = LanePending()
        self.is_held_for_copy = False
        self.transactions: list[LaneTransaction] = []


class _World:
    """A dispatcher with two tables, in a single lane or in two."""

    def __init__(self, draws: dict[str, Any], *, keeps_blocks: bool) -> None:
        lanes = [_Lane("a"), _Lane("b")]
        if draws["is_shared"]:
            lanes[1] = lanes[0]
        self.lanes = list(dict.fromkeys(lanes))
        self.mapped = {}
        for relid, lane, skip in zip(RELIDS, lanes, draws["skips"], strict=False):
            mapped = mapped_relation(relid, source=f"public.t{relid}")
            mapped.skip_through_lsn = Lsn(skip)
            self.mapped[relid] = (mapped, lane)
        self.replaced: list[int] = []
        if draws["is_replaced"]:
            self.mapped[RELIDS[0]][0].relid = 99
        lanes[0].is_held_for_copy = draws["is_held"]
        self.tracker = ProgressTracker(Lsn(draws["start"]))
        self.history = HistoryCheck(None, Lsn(draws["start"]))
        routes: Any = self
        self.dispatcher = Dispatcher(
            TransactionAssembler(
                lambda relation: relation.relid != UNMAPPED,
                lambda _: ListSpool(),
                piece_bytes_max=200,
            ),
            routes,
            self.tracker,
            self.history,
            replaced=lambda mapped: self.replaced.append(mapped.relation_id),
            stop_lsn=draws["stop_lsn"],
        )
        self.dispatcher.keeps_blocks = keeps_blocks

    def find(self, relation: Relation) -> Any:
        return self.mapped.get(relation.relid, (None, None))[0]

    def lane(self, mapped: Any) -> _Lane:
        return self.mapped[mapped.relation_id][1]

    def feed(self, burst: list[bytes]) -> None:
        for dispatched in self.dispatcher.feed(burst):
            assert isinstance(dispatched, Dispatched)
            for lane, part in dispatched.parts.items():
                found: Any = lane
                found.transactions += part.split()

    def transactions(self) -> dict[str, list[Any]]:
        return {
            lane.name: [
                (
                    lane_transaction.transaction,
                    lane_transaction.end_lsn,
                    lane_transaction.size,
                    sorted(
                        (mapped.relation_id, changes.relation.columns[0].name, changes.payloads)
                        for mapped, changes in lane_transaction.changes
                    ),
                )
                for lane_transaction in lane.transactions
            ]
            for lane in self.lanes
        }

    def durable(self, number: int) -> Lsn:
        """Apply the first shares of each lane, as a drainer would; return the flush LSN."""
        for lane in self.lanes:
            done = [
                lane_transaction
                for lane_transaction in lane.transactions
                if lane_transaction.end_lsn is not None
            ][:number]
            if done and done[-1].end_lsn is not None:
                self.tracker.durable(lane.pending, done[-1].end_lsn, 0)
        return self.tracker.flush_lsn


@given(data=st.data())
def test_a_block_is_dispatched_like_its_transactions(data: st.DataObject) -> None:
    stream = data.draw(streams())
    some = bursts(data.draw, stream)
    lsns = st.integers(START - 5, START + 80)
    draws: dict[str, Any] = {
        "is_shared": data.draw(st.booleans()),
        "skips": (data.draw(lsns), data.draw(st.just(0) | lsns)),
        "is_replaced": data.draw(st.integers(0, 4)) == 0,
        "is_held": data.draw(st.integers(0, 4)) == 0,
        "start": data.draw(st.just(START) | lsns),
        "last_transaction": None,
        "stop_lsn": data.draw(st.none() | lsns.map(Lsn)),
    }
    whole = _World(draws, keeps_blocks=True)
    single = _World(draws, keeps_blocks=False)
    for burst in some:
        for world in (whole, single):
            world.feed(burst)
        assert whole.transactions() == single.transactions()
        assert whole.replaced == single.replaced
        assert whole.tracker.newest_lsn == single.tracker.newest_lsn
        assert whole.dispatcher.has_passed_stop == single.dispatcher.has_passed_stop
    for number in range(10):
        # In the middle of a lane's block, the position may wait at the end of the lane's
        # transactions.
        flush_lsn = whole.durable(number)
        assert draws["start"] <= flush_lsn <= single.durable(number)
        assert whole.history.position_through(flush_lsn) <= flush_lsn
    assert whole.tracker.is_idle
    assert whole.tracker.flush_lsn == single.tracker.flush_lsn
    newest = whole.history.newest_through(whole.tracker.flush_lsn)
    assert newest == single.history.newest_through(single.tracker.flush_lsn)
