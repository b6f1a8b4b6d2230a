"""Messages become transactions: pieces, definitions, streams, and messages out of order."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest

from streamer.decode.pgoutput import Relation
from streamer.decode.transactions import (
    Changes,
    TransactionAssembler,
    TransactionBlock,
    TransactionPiece,
)
from streamer.errors.error_classes import ProtocolError
from streamer.util.lsn import Lsn
from tests.property import encode
from tests.support.implementations import implementation  # noqa: F401

T = 16385
U = 16386


class ListSpool:
    def __init__(self, xid: int) -> None:
        self.xid = xid
        self.kept: list[tuple[bytes, list[bytes]]] = []
        self.is_open = True

    def append(self, subxid: bytes, messages: list[bytes]) -> None:
        self.kept.append((subxid, messages))

    def append_large(self, subxid: bytes, message: bytes) -> None:
        self.kept.append((subxid, [bytes(message[:1]) + bytes(message[5:])]))

    def replay(self) -> Iterator[tuple[bytes, list[bytes]]]:
        for subxid, messages in self.kept:
            for message in messages:
                yield subxid, [message]

    def close(self) -> None:
        self.is_open = False


class Assembler:
    """An assembler, its spools, and the relations of its queries."""

    def __init__(
        self,
        wanted: Callable[[Relation], bool] = lambda relation: True,
        *,
        piece_bytes_max: int = 1_000_000,
        forward_origins: bool = False,
    ) -> None:
        self.spools: list[ListSpool] = []
        self.asked: list[Relation] = []

        def ask(relation: Relation) -> bool:
            self.asked.append(relation)
            return wanted(relation)

        self.assembler = TransactionAssembler(
            ask,
            self._open,
            piece_bytes_max=piece_bytes_max,
            forward_origins=forward_origins,
        )

    def _open(self, xid: int) -> ListSpool:
        self.spools.append(ListSpool(xid))
        return self.spools[-1]

    def feed(self, *payloads: bytes) -> list[TransactionPiece]:
        """Feed a burst; return the transactions one by one."""
        return [
            piece
            for found in self.assembler.feed(list(payloads))
            for piece in (found.pieces() if isinstance(found, TransactionBlock) else [found])
        ]

    def feed_each(self, *payloads: bytes) -> list[TransactionPiece]:
        """Feed a burst for each message."""
        return [piece for payload in payloads for piece in self.feed(payload)]


def define(relid: int = T, columns: Iterable[str] = ("a",), xid: int | None = None) -> bytes:
    defined = [(int(n == 0), name, 25, -1) for n, name in enumerate(columns)]
    return encode.relation(relid, "public", f"t{relid}", "d", defined, xid)


def row(value: str, relid: int = T, xid: int | None = None) -> bytes:
    return encode.insert(relid, [value.encode()], xid=xid)


def begin(xid: int = 1, final_lsn: int = 100) -> bytes:
    return encode.begin(final_lsn, 7, xid)


def commit(final_lsn: int = 100, end_lsn: int = 110) -> bytes:
    return encode.commit(final_lsn, end_lsn, 7)


def flat(changes: list[Changes]) -> list[tuple[int, int, list[bytes]]]:
    """Relation, number of columns, payloads."""
    return [(c.relation.relid, len(c.relation.columns), c.payloads) for c in changes]


# ---- ordinary transactions ---------------------------------------------------------------------


def test_a_transaction_is_one_piece_that_comes_with_its_commit() -> None:
    assembler = Assembler()
    assert assembler.feed(begin(745, 100), define(), row("1")) == []
    assert not assembler.assembler.is_between_transactions
    (piece,) = assembler.feed(row("2"), commit(100, 110))
    assert assembler.assembler.is_between_transactions
    assert piece.end_lsn == Lsn(110)
    transaction = piece.transaction
    assert (transaction.xid, transaction.final_lsn, transaction.commit_time) == (745, 100, 7)
    assert flat(piece.changes) == [(T, 1, [row("1"), row("2")])]
    assert piece.changes[0].size == len(row("1")) + len(row("2"))


def test_several_transactions_of_one_burst_come_in_order() -> None:
    pieces = Assembler().feed(
        begin(1, 100),
        define(),
        row("1"),
        commit(100, 110),
        begin(2, 120),
        row("2"),
        commit(120, 130),
    )
    assert [(piece.transaction.xid, piece.end_lsn) for piece in pieces] == [(1, 110), (2, 130)]
    assert [flat(piece.changes)[0][2] for piece in pieces] == [[row("1")], [row("2")]]


def test_a_transaction_without_changes_is_a_piece_too() -> None:
    (piece,) = Assembler().feed(begin(), commit())
    assert (piece.changes, piece.end_lsn) == ([], Lsn(110))


def test_changes_are_gathered_by_relation_each_in_order() -> None:
    (piece,) = Assembler().feed(
        begin(), define(T), row("1"), define(U), row("2", U), row("3"), row("4", U), commit()
    )
    assert flat(piece.changes) == [
        (T, 1, [row("1"), row("3")]),
        (U, 1, [row("2", U), row("4", U)]),
    ]


def test_changes_after_a_new_definition_form_a_new_batch() -> None:
    (piece,) = Assembler().feed(
        begin(), define(columns="a"), row("1"), define(columns="ab"), row("2"), row("3"), commit()
    )
    assert flat(piece.changes) == [(T, 1, [row("1")]), (T, 2, [row("2"), row("3")])]


def test_a_definition_holds_for_the_transactions_that_follow() -> None:
    assembler = Assembler()
    assembler.feed(begin(), define(columns="ab"), commit())
    (piece,) = assembler.feed(begin(2, 200), row("1"), commit(200, 210))
    assert flat(piece.changes) == [(T, 2, [row("1")])]
    assert len(assembler.asked) == 1


def test_changes_of_relations_that_nobody_wants_are_dropped() -> None:
    assembler = Assembler(lambda relation: relation.relid == U)
    (piece,) = assembler.feed(begin(), define(T), define(U), row("1"), row("2", U), commit())
    assert flat(piece.changes) == [(U, 1, [row("2", U)])]
    (piece,) = assembler.feed(begin(2, 200), row("1"), commit(200, 210))
    assert piece.changes == []


def test_a_truncate_is_a_change_of_each_relation_it_empties() -> None:
    truncate = encode.truncate([T, U])
    (piece,) = Assembler().feed(
        begin(), define(T), row("1"), define(U), truncate, row("2"), commit()
    )
    assert flat(piece.changes) == [(T, 1, [row("1"), truncate, row("2")]), (U, 1, [truncate])]


def test_types_and_messages_are_passed_over() -> None:
    (piece,) = Assembler().feed(
        begin(),
        encode.type_(1, "s", "t"),
        define(),
        encode.message(1, 1, "p", b"c"),
        row("1"),
        commit(),
    )
    assert flat(piece.changes) == [(T, 1, [row("1")])]
    assert Assembler().feed(encode.message(0, 1, "p", b"c")) == []


# ---- large transactions ------------------------------------------------------------------------


def test_a_large_transaction_comes_in_pieces_and_only_the_last_has_an_end() -> None:
    assembler = Assembler(piece_bytes_max=3 * len(row("1")))
    pieces = assembler.feed_each(begin(), define(), *[row(str(n)) for n in range(8)], commit())
    assert len(pieces) > 2
    assert [piece.end_lsn for piece in pieces] == [None] * (len(pieces) - 1) + [Lsn(110)]
    assert len({id(piece.transaction) for piece in pieces}) == 1
    payloads = [p for piece in pieces for changes in piece.changes for p in changes.payloads]
    assert payloads == [row(str(n)) for n in range(8)]
    assert all(
        sum(changes.size for changes in piece.changes) <= 4 * len(row("1")) for piece in pieces
    )


def test_pieces_of_a_large_transaction_keep_their_definitions() -> None:
    assembler = Assembler(piece_bytes_max=1)
    pieces = assembler.feed_each(
        begin(), define(columns="a"), row("1"), row("2"), define(columns="ab"), row("3"), commit()
    )
    changes = [item for piece in pieces for item in flat(piece.changes)]
    assert changes == [(T, 1, [row("1")]), (T, 1, [row("2")]), (T, 2, [row("3")])]


def test_a_transaction_just_as_large_as_allowed_is_one_piece() -> None:
    payloads = [begin(), define(), row("1"), row("2")]
    size = sum(map(len, payloads))
    assert Assembler(piece_bytes_max=size).feed(*payloads) == []
    (piece,) = Assembler(piece_bytes_max=size - 1).feed(*payloads)
    assert piece.end_lsn is None


def test_the_size_counts_anew_for_each_transaction() -> None:
    assembler = Assembler(piece_bytes_max=200)
    for number in range(1, 10):
        lsn = number * 100
        pieces = assembler.feed_each(
            begin(number, lsn), define(), row("x" * 20), commit(lsn, lsn + 10)
        )
        assert [piece.end_lsn for piece in pieces] == [lsn + 10]


# ---- origins -----------------------------------------------------------------------------------


def test_a_transaction_that_was_itself_replicated_is_empty() -> None:
    assembler = Assembler()
    origin = encode.origin(5, "elsewhere")
    (piece,) = assembler.feed(begin(), origin, define(), row("1"), encode.truncate([T]), commit())
    assert (piece.changes, piece.end_lsn) == ([], Lsn(110))
    (piece,) = assembler.feed(begin(2, 200), row("2"), commit(200, 210))
    assert flat(piece.changes) == [(T, 1, [row("2")])]


def test_it_is_kept_where_that_is_asked_for() -> None:
    assembler = Assembler(forward_origins=True)
    (piece,) = assembler.feed(begin(), encode.origin(5, "x"), define(), row("1"), commit())
    assert flat(piece.changes) == [(T, 1, [row("1")])]


# ---- streamed transactions ---------------------------------------------------------------------


def start(xid: int, *, first: bool = True) -> bytes:
    return encode.stream_start(xid, first=first)


STOP = encode.stream_stop()


def stream_commit(xid: int, commit_lsn: int = 300, end_lsn: int = 310) -> bytes:
    return encode.stream_commit(xid, commit_lsn, end_lsn, 9)


def test_a_streamed_transaction_comes_with_its_commit_as_if_it_had_not_been_streamed() -> None:
    assembler = Assembler()
    assert assembler.feed(start(5), define(xid=5), row("1", xid=5), STOP) == []
    assert assembler.assembler.is_between_transactions
    assert assembler.feed(start(5, first=False), row("2", xid=5), STOP) == []
    (piece,) = assembler.feed(stream_commit(5))
    assert flat(piece.changes) == [(T, 1, [row("1"), row("2")])]
    transaction = piece.transaction
    assert (transaction.xid, transaction.final_lsn, transaction.commit_time) == (5, 300, 9)
    assert piece.end_lsn == 310
    assert [spool.is_open for spool in assembler.spools] == [False]
    assert assembler.assembler.is_between_transactions


def test_streams_interleave_with_each_other_and_with_ordinary_transactions() -> None:
    assembler = Assembler()
    pieces = assembler.feed(
        *(start(5), define(xid=5), row("a1", xid=5), STOP),
        *(start(6), define(xid=6), row("b1", xid=6), STOP),
        *(begin(7, 100), define(), row("c"), commit(100, 110)),
        *(start(5, first=False), row("a2", xid=5), STOP),
        *(stream_commit(6, 200, 210), stream_commit(5, 300, 310)),
    )
    assert [(piece.transaction.xid, piece.end_lsn) for piece in pieces] == [
        (7, 110),
        (6, 210),
        (5, 310),
    ]
    assert [flat(piece.changes)[0][2] for piece in pieces] == [
        [row("c")],
        [row("b1")],
        [row("a1"), row("a2")],
    ]


def test_an_aborted_subtransaction_takes_out_exactly_its_own_changes() -> None:
    (piece,) = Assembler().feed(
        *(start(5), define(xid=5), row("1", xid=5), row("2", xid=6), row("3", xid=7)),
        *(encode.truncate([T], xid=6), row("4", xid=5), STOP),
        encode.stream_abort(5, 6),
        *(start(5, first=False), row("5", xid=8), STOP),
        stream_commit(5),
    )
    assert flat(piece.changes) == [(T, 1, [row("1"), row("3"), row("4"), row("5")])]


def test_a_definition_that_was_rolled_back_is_not_used_by_the_rest_of_its_transaction() -> None:
    """BEGIN; SAVEPOINT; ALTER TABLE ADD; many rows; ROLLBACK TO; many rows.

    When the subtransaction aborts, pgoutput forgets the sent definition, and sends the true
    definition with the next change (cleanup_rel_sync_cache in pgoutput.c).
    """
    assembler = Assembler()
    assembler.feed(begin(), define(columns="ab"), commit())
    (piece,) = assembler.feed(
        *(start(5), row("1", xid=5), define(columns="abc", xid=6), row("2", xid=6), STOP),
        encode.stream_abort(5, 6),
        *(start(5, first=False), define(columns="ab", xid=5), row("3", xid=5), STOP),
        stream_commit(5),
    )
    assert [(width, rows) for _, width, rows in flat(piece.changes)] == [
        (2, [row("1")]),
        (2, [row("3")]),
    ]


def test_a_definition_that_was_rolled_back_is_not_used_by_later_transactions() -> None:
    """Two more sessions change the table before the first session has committed."""
    assembler = Assembler()
    pieces = assembler.feed(
        *(start(5), define(columns="abc", xid=6), row("1", xid=6), STOP),
        encode.stream_abort(5, 6),
        *(begin(7, 100), define(columns="ab"), row("2"), commit(100, 110)),
        stream_commit(5, 300, 310),
        *(begin(8, 400), row("3"), commit(400, 410)),
    )
    assert flat(pieces[0].changes) == [(T, 2, [row("2")])]
    assert flat(pieces[2].changes) == [(T, 2, [row("3")])]


@pytest.mark.parametrize("new", ["ab", "abcd"])
def test_the_last_definition_in_the_stream_holds_after_a_streamed_transaction(new: str) -> None:
    """A column list may change while a transaction is open. pgoutput regards the new definition as
    sent, although the receiver uses the older definition of the open transaction only at its
    commit. Servers from May 2025 on send the definition again.
    """
    assembler = Assembler()
    pieces = assembler.feed(
        *(start(5), define(columns="abc", xid=5), row("1", xid=5), STOP),
        *(start(6), define(columns="abc", xid=6), row("2", xid=6), STOP),
        *(begin(7, 100), define(columns=new), row("3"), commit(100, 110)),
        *(start(6, first=False), define(columns=new, xid=6), row("4", xid=6), STOP),
        stream_commit(6, 200, 210),
        stream_commit(5, 300, 310),
        *(begin(8, 400), row("5"), commit(400, 410)),
    )
    width = len(new)
    assert [flat(piece.changes) for piece in pieces] == [
        [(T, width, [row("3")])],
        [(T, 3, [row("2")]), (T, width, [row("4")])],
        [(T, 3, [row("1")])],
        [(T, width, [row("5")])],
    ]


def test_a_streamed_definition_that_came_last_holds_after_its_transaction() -> None:
    assembler = Assembler()
    pieces = assembler.feed(
        *(begin(7, 100), define(columns="ab"), row("1"), commit(100, 110)),
        *(start(5), define(columns="abc", xid=5), row("2", xid=5), STOP),
        stream_commit(5, 200, 210),
        *(begin(8, 300), row("3"), commit(300, 310)),
    )
    assert [flat(piece.changes)[0][1] for piece in pieces] == [2, 3, 3]


def test_a_streamed_transaction_that_is_rolled_back_leaves_nothing() -> None:
    assembler = Assembler()
    pieces = assembler.feed(
        *(start(5), define(xid=5), row("1", xid=5), STOP), encode.stream_abort(5, 5)
    )
    assert pieces == []
    assert not assembler.spools[0].is_open
    with pytest.raises(ProtocolError, match="before RELATION"):
        assembler.feed(begin(), row("2"), commit())


def test_a_large_streamed_transaction_comes_in_pieces() -> None:
    assembler = Assembler(piece_bytes_max=2 * len(row("1")))
    rows = [row(str(n), xid=5) for n in range(8)]
    assembler.feed(start(5), define(xid=5), *rows, STOP)
    pieces = assembler.feed(stream_commit(5))
    assert len(pieces) > 2
    assert [piece.end_lsn for piece in pieces] == [None] * (len(pieces) - 1) + [Lsn(310)]
    payloads = [p for piece in pieces for changes in piece.changes for p in changes.payloads]
    assert payloads == [row(str(n)) for n in range(8)]


def test_the_origin_of_a_streamed_transaction_counts() -> None:
    messages = (
        *(start(5), encode.origin(1, "x"), define(xid=5), row("1", xid=5), STOP),
        *(start(5, first=False), row("2", xid=5), STOP),
        stream_commit(5),
    )
    (piece,) = Assembler().feed(*messages)
    assert (piece.changes, piece.end_lsn) == ([], Lsn(310))
    (piece,) = Assembler(forward_origins=True).feed(*messages)
    assert flat(piece.changes) == [(T, 1, [row("1"), row("2")])]


def test_types_and_messages_of_a_stream_are_passed_over() -> None:
    (piece,) = Assembler().feed(
        start(5),
        encode.type_(1, "s", "t", xid=5),
        define(xid=5),
        encode.message(1, 1, "p", b"c", xid=5),
        row("1", xid=5),
        STOP,
        stream_commit(5),
    )
    assert flat(piece.changes) == [(T, 1, [row("1")])]


# ---- instructions ------------------------------------------------------------------------------


def order(xid: int | None = None, content: bytes = b"x", flags: int = 1) -> bytes:
    return encode.message(flags, 1, "streamer.execute", content, xid=xid)


def placed(piece: TransactionPiece) -> list[tuple[int, str, bytes]]:
    return [(i.place, i.message.prefix, i.message.content) for i in piece.instructions]


def test_an_instruction_keeps_its_place_among_the_changes_of_its_transaction() -> None:
    pieces = Assembler().feed(
        *(begin(1, 100), define(), row("1"), commit(100, 110)),
        *(begin(2, 200), row("2"), order(content=b"a"), row("3"), order(content=b"b")),
        *(commit(200, 210), begin(3, 300), row("4"), commit(300, 310)),
    )
    assert [flat(piece.changes) for piece in pieces] == [
        [(T, 1, [row("1")])],
        [(T, 1, [row("2")]), (T, 1, [row("3")])],
        [(T, 1, [row("4")])],
    ]
    assert [placed(piece) for piece in pieces] == [
        [],
        [(1, "streamer.execute", b"a"), (2, "streamer.execute", b"b")],
        [],
    ]
    assert [piece.end_lsn for piece in pieces] == [110, 210, 310]


def test_a_transaction_of_an_instruction_alone_is_a_piece() -> None:
    (piece,) = Assembler().feed_each(begin(), order(), commit())
    assert (piece.changes, len(piece.instructions), piece.end_lsn) == ([], 1, 110)


def test_messages_of_other_programs_and_untransactional_ones_are_no_instructions() -> None:
    (piece,) = Assembler().feed(
        *(begin(), order(flags=0), encode.message(1, 1, "streamer", b""), define(), row("1")),
        *(encode.message(1, 1, "debezium", b"c"), b"M\1" + bytes(8) + b"\xff\0" + bytes(4)),
        *(row("2"), commit()),
    )
    assert (flat(piece.changes), piece.instructions) == ([(T, 1, [row("1"), row("2")])], [])


def test_an_instruction_that_was_itself_replicated_is_none() -> None:
    (piece,) = Assembler().feed(begin(), encode.origin(5, "x"), order(), commit())
    assert piece.instructions == []


def test_an_instruction_of_a_streamed_transaction_comes_with_its_commit() -> None:
    assembler = Assembler()
    begun = [start(5), define(xid=5), row("1", xid=5), order(5), row("2", xid=5), STOP]
    assert assembler.feed(*begun) == []
    (piece,) = assembler.feed(stream_commit(5))
    assert flat(piece.changes) == [(T, 1, [row("1")]), (T, 1, [row("2")])]
    assert placed(piece) == [(1, "streamer.execute", b"x")]


def test_instructions_of_a_large_transaction_come_with_the_piece_that_has_them() -> None:
    pieces = Assembler(piece_bytes_max=1).feed_each(
        begin(), define(), row("1"), order(), row("2"), commit()
    )
    assert [len(piece.instructions) for piece in pieces if piece.instructions] == [1]
    payloads = [p for piece in pieces for changes in piece.changes for p in changes.payloads]
    assert payloads == [row("1"), row("2")]
    assert pieces[-1].end_lsn == 110


# ---- a lost connection -------------------------------------------------------------------------


def test_a_reset_discards_unfinished_transactions() -> None:
    assembler = Assembler()
    assembler.feed(start(5), define(xid=5), row("1", xid=5), STOP)
    assembler.feed(begin(), define(), row("2"))
    assembler.assembler.reset()
    assert assembler.assembler.is_between_transactions
    assert [spool.is_open for spool in assembler.spools] == [False]
    (piece,) = assembler.feed(begin(), define(), row("2"), commit())
    assert flat(piece.changes) == [(T, 1, [row("2")])]
    assert assembler.feed(start(5), define(xid=5), row("1", xid=5), STOP) == []


def test_a_reset_within_a_stream_ends_it() -> None:
    assembler = Assembler()
    assembler.feed(start(5), define(xid=5))
    assert not assembler.assembler.is_between_transactions
    assembler.assembler.reset()
    assert assembler.assembler.is_between_transactions
    with pytest.raises(ProtocolError):
        assembler.feed(STOP)


def test_definitions_are_sent_again_after_a_reset() -> None:
    assembler = Assembler()
    assembler.feed(begin(), define(), commit())
    assembler.assembler.reset()
    with pytest.raises(ProtocolError, match=f"change of relation {T} before RELATION"):
        assembler.feed(begin(), row("1"))


# ---- out of order ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([row("1")], id="row outside a transaction"),
        pytest.param([encode.truncate([T])], id="truncate outside a transaction"),
        pytest.param([commit()], id="commit without begin"),
        pytest.param([begin(), begin()], id="begin twice"),
        pytest.param([begin(1, 100), commit(101, 110)], id="commit of another transaction"),
        pytest.param([begin(), commit(), commit()], id="commit twice"),
        pytest.param([begin(), row("1")], id="row before relation"),
        pytest.param([begin(), encode.truncate([T])], id="truncate before relation"),
        pytest.param([encode.origin(1, "x")], id="origin outside a transaction"),
        pytest.param([begin(), start(5)], id="stream inside a transaction"),
        pytest.param([STOP], id="stream stop without start"),
        pytest.param([start(5), start(6)], id="stream within a stream"),
        pytest.param([start(5), begin()], id="begin within a stream"),
        pytest.param([start(5), commit()], id="commit within a stream"),
        pytest.param([start(5), stream_commit(5)], id="stream commit within a stream"),
        pytest.param([start(5), encode.stream_abort(5, 5)], id="stream abort within a stream"),
        pytest.param([start(5, first=False)], id="stream goes on without having begun"),
        pytest.param([start(5), STOP, start(5)], id="stream begins twice"),
        pytest.param([stream_commit(5)], id="stream commit of an unknown transaction"),
        pytest.param([begin(), stream_commit(5)], id="stream commit inside a transaction"),
        pytest.param([begin(), encode.stream_abort(5, 5)], id="stream abort inside a transaction"),
        pytest.param(
            [start(5), STOP, stream_commit(5), stream_commit(5)], id="stream commit twice"
        ),
        pytest.param(
            [start(5), row("1", xid=5), STOP, stream_commit(5)], id="streamed row before relation"
        ),
        pytest.param([b""], id="empty message"),
        pytest.param([begin(), b""], id="empty message in a transaction"),
        pytest.param([start(5), b""], id="empty message in a stream"),
        pytest.param([b"X"], id="unknown message"),
        pytest.param([start(5), b"X"], id="unknown message in a stream"),
        pytest.param([begin(), b"I\0\0"], id="truncated row"),
        pytest.param([start(5), b"I\0\0", STOP, stream_commit(5)], id="truncated streamed row"),
        pytest.param([start(5), b"R\0", STOP, stream_commit(5)], id="truncated definition"),
        pytest.param([begin()[:-1]], id="truncated begin"),
    ],
)
def test_messages_out_of_order_are_a_protocol_error(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        Assembler().feed(*messages)


def test_a_spool_is_closed_even_if_replaying_it_fails() -> None:
    assembler = Assembler()
    with pytest.raises(ProtocolError):
        assembler.feed(start(5), row("1", xid=5), STOP, stream_commit(5))
    assert [spool.is_open for spool in assembler.spools] == [False]


def large(message: bytes) -> bytes:
    return cast("bytes", memoryview(message))


def test_large_messages_are_changes_like_any_other() -> None:
    assembler = Assembler()
    (piece,) = assembler.feed(begin(), define(), large(row("1")), row("2"), commit())
    assert flat(piece.changes) == [(T, 1, [row("1"), row("2")])]
    streamed = [row("3", xid=6), large(row("4", xid=7)), large(row("5", xid=6)), row("6", xid=6)]
    assembler.feed(start(5), define(xid=5), *streamed, STOP)
    assembler.feed(encode.stream_abort(5, 7))
    pieces = assembler.feed(stream_commit(5))
    assert [p for piece in pieces for c in piece.changes for p in c.payloads] == [
        row("3"),
        row("5"),
        row("6"),
    ]


def test_a_table_that_joins_inside_a_transaction_gets_the_changes_of_the_next() -> None:
    mapped: set[int] = set()
    stream = Assembler(lambda relation: relation.relid in mapped)
    assert stream.feed(define(), begin(7), row("1")) == []
    mapped.add(T)
    pieces = stream.feed(row("2"), commit(), begin(8, 120), row("3"), commit(120, 130))
    assert [piece.transaction.xid for piece in pieces] == [7, 8]
    assert [changes.payloads for changes in pieces[1].changes] == [[row("3")]]
