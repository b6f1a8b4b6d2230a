"""Messages to transactions: the changes that were committed together, in their order.

The assembler takes the payloads of replication frames and returns *pieces*. Almost every
transaction is one piece, finished when its COMMIT arrives. A transaction larger than
``piece_bytes_max`` makes several pieces, so that memory stays bounded. Only its last piece has an
``end_lsn``; until then a lost connection can still undo the transaction (`reset`).

Streamed transactions (protocol version 2, STREAM START … STREAM COMMIT) arrive before they commit.
A `StreamSpool` keeps each top-level transaction, which becomes pieces at STREAM COMMIT. STREAM
ABORT of a subtransaction removes exactly the messages with its xid. These include RELATION
messages: the source rolled back their definition as well, and sends the valid one before the next
change (`cleanup_rel_sync_cache` in pgoutput.c).

Pure, apart from the given spool.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from streamer.decode import pgoutput
from streamer.decode.pgoutput import Relation
from streamer.errors import ProtocolError
from streamer.hot import choice
from streamer.lsn import Lsn

if TYPE_CHECKING:
    from streamer.decode.text_conversion import TextConversion

_ROW_KINDS: Final = bytes(sorted(pgoutput.ROW_KINDS))
_ROW_SET: Final = frozenset(_ROW_KINDS)
_KEPT_KINDS: Final = _ROW_KINDS + bytes([pgoutput.RELATION, pgoutput.TRUNCATE])
"""Kinds of messages that the spool keeps of a streamed transaction."""


@dataclass(slots=True)
class Changes:
    """Consecutive changes of one relation, all made with the same definition of it."""

    relation: Relation
    payloads: list[bytes]

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        return sum(map(len, self.payloads))


@dataclass(slots=True)
class Transaction:
    """A source transaction that is known to have committed. ``commit_time`` is a protocol time."""

    xid: int
    final_lsn: Lsn
    commit_time: int


@dataclass(slots=True)
class TransactionPiece:
    """Some changes of a transaction; only the last piece has an ``end_lsn``."""

    transaction: Transaction
    changes: list[Changes]
    end_lsn: Lsn | None


class StreamSpool(Protocol):
    """Keeps the messages of one streamed transaction, in order.

    With a *subxid* they are changes of one relation made by that (sub)transaction, and no longer
    have it in front of them.
    """

    def append(self, subxid: bytes, messages: list[bytes]) -> None: ...
    def append_large(self, subxid: bytes, message: bytes) -> None:
        """Keep one row message, which still has *subxid* behind its kind, without copying it."""
        ...

    def replay(self) -> Iterator[tuple[bytes, list[bytes]]]: ...
    def close(self) -> None: ...


class _Streamed:
    """A streamed transaction that has neither committed nor rolled back yet."""

    __slots__ = ("aborted", "has_origin", "spool")

    def __init__(self, spool: StreamSpool) -> None:
        self.spool = spool
        self.aborted: set[bytes] = set()
        self.has_origin = False


class TransactionAssembler:
    """Groups the messages of one replication stream into transactions.

    *wanted* tells for each piece whether the mapping includes a relation; the assembler drops
    changes of other relations. *forward_origins*: keep transactions that the source received by
    replication.
    """

    def __init__(
        self,
        wanted: Callable[[Relation], bool],
        open_spool: Callable[[int], StreamSpool],
        *,
        piece_bytes_max: int,
        forward_origins: bool = False,
    ) -> None:
        self._wanted = wanted
        self._open_spool = open_spool
        self._piece_bytes_max = piece_bytes_max
        self._forward_origins = forward_origins
        self.conversion: TextConversion | None = None
        """Converts the stream's text to UTF-8, if the source uses another encoding."""
        self._relations: dict[bytes, Relation] = {}
        self._transaction: Transaction | None = None
        self._is_foreign = False
        self._changes: list[Changes] = []
        # Where the payloads of a relation go now; a discarding deque for relations that are not
        # mapped.
        self._sinks: dict[bytes, list[bytes] | deque[bytes]] = {}
        self._size = 0
        self._streamed: dict[int, _Streamed] = {}
        self._in_stream: _Streamed | None = None
        self._kept: list[bytes] = []  # of that, and not in its spool yet

    @property
    def is_between_transactions(self) -> bool:
        """Whether no transaction is received in part, apart from streamed ones.

        Streamed transactions do not count: they commit after any position that the slot can confirm
        now, so the source sends them again from their start.
        """
        return self._transaction is None and self._in_stream is None

    def reset(self) -> None:
        """Drop unfinished transactions: the connection is lost, and the source will send them
        again.
        """
        self._transaction = self._in_stream = None
        self._kept.clear()
        self._relations.clear()
        self._start_piece()
        for streamed in self._streamed.values():
            streamed.spool.close()
        self._streamed.clear()

    def feed(self, payloads: list[bytes]) -> Iterator[TransactionPiece]:
        """Take a burst of messages in the order they came; yield the pieces they complete.

        A burst bounds how far a piece may exceed ``piece_bytes_max``. Raises ProtocolError for
        anything unknown, truncated or out of order.
        """
        take_rows = None if choice.compiled is None else choice.compiled.take_rows
        sinks = self._sinks
        find_sink = sinks.get
        row_kinds, begin, commit = _ROW_KINDS, pgoutput.BEGIN, pgoutput.COMMIT
        number, count = 0, len(payloads)
        while number < count:
            # The hot path: ordinary transactions, and messages of streamed ones.
            payload = payloads[number]
            kind = payload[0] if payload else 0
            if self._in_stream is not None:
                if kind in _KEPT_KINDS:
                    self._kept.append(payload)
                else:
                    self._handle_in_stream(kind, payload)
            elif kind in row_kinds:
                if take_rows is not None:
                    taken = take_rows(payloads, number, sinks)
                    if taken > number:
                        number = taken
                        continue
                relid = payload[1:5]
                sink = find_sink(relid)
                if sink is None:
                    sink = self._open_sink(relid)
                sink.append(payload)
            elif kind == commit:
                yield self._handle_commit(payload)
            elif kind == begin:
                self._handle_begin(payload)
            else:
                yield from self._handle(kind, payload)
            number += 1
        self._keep()
        if self._transaction is not None:
            self._size += sum(map(len, payloads))
            if self._size > self._piece_bytes_max:
                yield self._finish_piece(None)

    def _handle_begin(self, payload: bytes) -> None:
        self._expect_no_transaction(pgoutput.BEGIN)
        begin = pgoutput.parse_begin(payload)
        self._transaction = Transaction(begin.xid, begin.final_lsn, begin.commit_time)
        self._is_foreign = False

    def _handle_commit(self, payload: bytes) -> TransactionPiece:
        transaction = self._expect_transaction(pgoutput.COMMIT)
        commit = pgoutput.parse_commit(payload)
        if commit.commit_lsn != transaction.final_lsn:
            raise ProtocolError(
                f"COMMIT at {commit.commit_lsn} does not belong to the transaction "
                f"that was to commit at {transaction.final_lsn}"
            )
        piece = self._finish_piece(commit.end_lsn)
        self._transaction = None
        return piece

    def _handle(self, kind: int, payload: bytes) -> Iterator[TransactionPiece]:
        message = pgoutput.parse(payload, conversion=self.conversion)
        match message:
            case pgoutput.Origin():
                self._expect_transaction(kind)
                self._is_foreign = not self._forward_origins
                self._sinks.clear()
            case pgoutput.Relation():
                self._handle_relation(message)
            case pgoutput.Truncate():
                self._expect_transaction(kind)
                self._handle_truncate(message, payload)
            case pgoutput.Type() | pgoutput.LogicalMessage():
                pass  # Types are matched by name in the catalogs; messages are for others.
            case pgoutput.StreamStart():
                self._expect_no_transaction(kind)
                self._handle_stream_start(message)
            case pgoutput.StreamStop():
                raise ProtocolError("STREAM STOP without STREAM START")
            case pgoutput.StreamAbort():
                self._expect_no_transaction(kind)
                self._handle_stream_abort(message)
            case pgoutput.StreamCommit():
                self._expect_no_transaction(kind)
                yield from self._handle_stream_commit(message)

    def _expect_transaction(self, kind: int) -> Transaction:
        if self._transaction is None:
            raise ProtocolError(f"pgoutput message {chr(kind)!r} outside a transaction")
        return self._transaction

    def _expect_no_transaction(self, kind: int) -> None:
        if self._transaction is not None:
            raise ProtocolError(f"pgoutput message {chr(kind)!r} inside a transaction")

    def _start_piece(self) -> None:
        self._changes = []
        self._sinks.clear()
        self._size = 0

    def _finish_piece(self, end_lsn: Lsn | None) -> TransactionPiece:
        assert self._transaction is not None
        piece = TransactionPiece(self._transaction, self._changes, end_lsn)
        self._start_piece()
        return piece

    def _sink(self, relid: bytes) -> list[bytes] | deque[bytes]:
        sink = self._sinks.get(relid)
        return self._open_sink(relid) if sink is None else sink

    def _open_sink(self, relid: bytes) -> list[bytes] | deque[bytes]:
        relid = bytes(relid)  # a slice of a large message would keep that in memory
        if self._transaction is None:
            raise ProtocolError("row message outside a transaction")
        if relid not in self._relations:
            raise ProtocolError(
                f"change of relation {int.from_bytes(relid, 'big')} before RELATION"
            )
        relation = self._relations[relid]
        sink: list[bytes] | deque[bytes]
        if self._is_foreign or not self._wanted(relation):
            sink = deque(maxlen=0)
        else:
            sink = []
            self._changes.append(Changes(relation, sink))
        self._sinks[relid] = sink
        return sink

    def _handle_relation(self, relation: Relation) -> None:
        relid = relation.relid.to_bytes(4, "big")
        self._relations[relid] = relation
        # Changes that follow were made with the new definition and are kept apart.
        self._sinks.pop(relid, None)

    def _handle_truncate(self, message: pgoutput.Truncate, payload: bytes) -> None:
        for number in message.relids:
            relid = number.to_bytes(4, "big")
            self._sink(relid).append(payload)

    def _handle_stream_start(self, message: pgoutput.StreamStart) -> None:
        streamed = self._streamed.get(message.xid)
        if streamed is None:
            if not message.is_first:
                raise ProtocolError(f"STREAM START continues unknown transaction {message.xid}")
            streamed = self._streamed[message.xid] = _Streamed(self._open_spool(message.xid))
        elif message.is_first:
            raise ProtocolError(f"STREAM START begins transaction {message.xid} a second time")
        self._in_stream = streamed

    def _handle_in_stream(self, kind: int, payload: bytes) -> None:
        streamed = self._in_stream
        assert streamed is not None
        match pgoutput.parse(payload, in_stream=True, conversion=self.conversion):
            case pgoutput.StreamStop():
                self._keep()
                self._in_stream = None
            case pgoutput.Origin():
                streamed.has_origin = True
            case pgoutput.Type() | pgoutput.LogicalMessage():
                pass
            case _:
                raise ProtocolError(f"pgoutput message {chr(kind)!r} inside a stream")

    def _keep(self) -> None:
        kept, self._kept = self._kept, []
        start = 0
        for number, message in enumerate(kept):
            if isinstance(message, memoryview):
                assert self._in_stream is not None
                self._keep_small(kept[start:number])
                self._in_stream.spool.append_large(bytes(message[1:5]), message)
                start = number + 1
        self._keep_small(kept[start:] if start else kept)

    def _keep_small(self, kept: list[bytes]) -> None:
        if kept:
            assert self._in_stream is not None
            spool = self._in_stream.spool
            # A row of changes of one relation, by far the most that is streamed, is unpacked here,
            # where the source takes longer than we do, and goes through in one piece later.
            if len({message[1:9] for message in kept}) == 1 and {m[0] for m in kept} <= _ROW_SET:
                spool.append(kept[0][1:5], [message[:1] + message[5:] for message in kept])
            else:
                spool.append(b"", kept)

    def _handle_stream_abort(self, message: pgoutput.StreamAbort) -> None:
        streamed = self._streamed.get(message.xid)
        if streamed is None:
            # PostgreSQL 18 also sends this for a transaction that it found aborted before it sent
            # any of it. There is nothing to remove then.
            return
        if message.subxid == message.xid:
            streamed.spool.close()
            del self._streamed[message.xid]
        else:
            streamed.aborted.add(message.subxid.to_bytes(4, "big"))

    def _handle_stream_commit(self, message: pgoutput.StreamCommit) -> Iterator[TransactionPiece]:
        streamed = self._streamed.pop(message.xid, None)
        if streamed is None:
            raise ProtocolError(f"STREAM COMMIT of unknown transaction {message.xid}")
        self._transaction = Transaction(message.xid, message.commit_lsn, message.commit_time)
        self._is_foreign = streamed.has_origin and not self._forward_origins
        try:
            for subxid, messages in streamed.spool.replay():
                if not subxid:
                    self._replay(messages, streamed.aborted)
                elif subxid not in streamed.aborted:
                    self._sink(messages[0][1:5]).extend(messages)
                self._size += sum(map(len, messages))
                if self._size > self._piece_bytes_max:
                    yield self._finish_piece(None)
        finally:
            streamed.spool.close()
        yield self._finish_piece(message.end_lsn)
        self._transaction = None

    def _replay(self, messages: list[bytes], aborted: set[bytes]) -> None:
        """Read the messages of a streamed transaction that committed; each begins with an xid."""
        find_sink = self._sinks.get
        for message in messages:
            if message[1:5] in aborted:
                continue
            kind = message[0]
            plain = message[:1] + message[5:]
            if kind == pgoutput.RELATION:
                relation = pgoutput.parse(message, in_stream=True, conversion=self.conversion)
                assert isinstance(relation, Relation)
                self._handle_relation(relation)
            elif kind == pgoutput.TRUNCATE:
                truncate = pgoutput.parse(plain)
                assert isinstance(truncate, pgoutput.Truncate)
                self._handle_truncate(truncate, plain)
            else:
                relid = plain[1:5]
                sink = find_sink(relid)
                if sink is None:
                    sink = self._open_sink(relid)
                sink.append(plain)
