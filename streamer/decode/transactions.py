"""Assembles messages to transactions: the changes of each commit, in order.

The assembler reads the payloads of replication frames and returns *blocks* and *pieces*. A block
contains the whole transactions of a burst, with a list of changes for each relation. A transaction
larger than ``piece_bytes_max`` becomes several pieces, so that memory stays bounded. Only the last
piece has an ``end_lsn``; until then, a lost connection makes the assembler discard the pieces
(`reset`).

Streamed transactions (protocol version 2, STREAM START … STREAM COMMIT) arrive before the commit. A
`StreamSpool` keeps each top-level transaction, which becomes pieces at STREAM COMMIT. STREAM ABORT
of a subtransaction removes exactly the messages with the subtransaction's xid. The removed messages
include RELATION messages. The source has rolled back such a definition, and sends the valid
definition before the next change (`cleanup_rel_sync_cache` in pgoutput.c).

A transactional logical message whose prefix begins with `pgoutput.OWN_PREFIX` is an *instruction*.
An instruction keeps its place among the changes: later changes go into new lists. A transaction
with an instruction is in no block. A streamed instruction carries the xid of the top-level
transaction (pgoutput_message in pgoutput.c), so STREAM ABORT of a subtransaction does not remove
the instruction. A message about a definition names the subtransaction in its content.

Pure, apart from the given spool.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

from streamer.compiled import choice
from streamer.decode import pgoutput
from streamer.decode.pgoutput import LogicalMessage, Relation
from streamer.errors.error_classes import ProtocolError
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from streamer.decode.table_messages import TableMessages
    from streamer.decode.text_conversion import TextConversion

_ROW_KINDS: Final = bytes(sorted(pgoutput.ROW_KINDS))
_ROW_SET: Final = frozenset(_ROW_KINDS)
_KEPT_KINDS: Final = _ROW_KINDS + bytes([pgoutput.RELATION, pgoutput.TRUNCATE])
"""The kinds of messages of a streamed transaction that the spool keeps."""


@dataclass(slots=True)
class Changes:
    """Consecutive changes of a relation, all made with the same definition.

    In a block, ``numbers`` are the transactions that made the changes, and ``stops`` the ends of
    each transaction's changes. Both are empty for the changes of a single transaction.
    """

    relation: Relation
    payloads: list[bytes]
    numbers: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        return sum(map(len, self.payloads))

    def by_number(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the number and the payloads of each transaction of a block."""
        start = 0
        for number, stop in zip(self.numbers, self.stops, strict=True):
            yield number, self.payloads[start:stop]
            start = stop


@dataclass(slots=True)
class Transaction:
    """A source transaction that is known to have committed. ``commit_time`` is a protocol time."""

    xid: int
    final_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """A logical message to streamer. ``place``: the number of `Changes` in the piece before it."""

    place: int
    message: LogicalMessage


@dataclass(slots=True)
class TransactionPiece:
    """Some changes of a transaction; only the last piece has an ``end_lsn``."""

    transaction: Transaction
    changes: list[Changes]
    end_lsn: Lsn | None
    instructions: list[Instruction] = field(default_factory=list)
    """Logical messages to streamer, in order."""


@dataclass(slots=True)
class TransactionBlock:
    """Consecutive whole transactions, in commit order.

    The lists have an item for each transaction; the index is the transaction's number.
    """

    xids: list[int] = field(default_factory=list)
    final_lsns: list[int] = field(default_factory=list)
    commit_times: list[int] = field(default_factory=list)
    end_lsns: list[int] = field(default_factory=list)
    changes: list[Changes] = field(default_factory=list)

    def transaction(self, number: int) -> Transaction:
        return Transaction(
            self.xids[number], Lsn(self.final_lsns[number]), self.commit_times[number]
        )

    def pieces(self) -> Iterator[TransactionPiece]:
        """Yield each transaction as a piece."""
        by_number: list[list[Changes]] = [[] for _ in self.xids]
        for changes in self.changes:
            for number, payloads in changes.by_number():
                by_number[number].append(Changes(changes.relation, payloads))
        for number, of_one in enumerate(by_number):
            end_lsn = Lsn(self.end_lsns[number])
            yield TransactionPiece(self.transaction(number), of_one, end_lsn)


class _Nowhere(list[bytes]):
    """Drops the payloads of a relation that is not mapped, or of a foreign transaction."""

    def append(self, _: bytes) -> None:
        pass

    def extend(self, _: Iterable[bytes]) -> None:
        pass


class StreamSpool(Protocol):
    """Keeps the messages of a streamed transaction, in order.

    Messages with a *subxid* are changes of one relation by that (sub)transaction, and no longer
    contain the xid.
    """

    def append(self, subxid: bytes, messages: list[bytes]) -> None: ...
    def append_large(self, subxid: bytes, message: bytes) -> None:
        """Keep a row message, which still has *subxid* after the kind, without a copy."""
        ...

    def replay(self) -> Iterator[tuple[bytes, list[bytes]]]: ...
    def close(self) -> None: ...


class _Streamed:
    """A streamed transaction that has neither committed nor rolled back yet."""

    __slots__ = ("aborted", "arrivals", "has_origin", "spool")

    def __init__(self, spool: StreamSpool) -> None:
        self.spool = spool
        self.aborted: set[bytes] = set()
        self.arrivals: deque[int] = deque()
        """The stream positions of the RELATION messages in the spool, as message numbers."""
        self.has_origin = False


class TransactionAssembler:
    """Groups the messages of a replication stream into transactions.

    *is_mapped* returns for each piece whether the mapping includes a relation; the assembler drops
    further changes. *forward_origins*: keep transactions that the source received by replication.
    *messages*: finds the logical messages of a source that sends them as rows of a table.
    """

    def __init__(
        self,
        is_mapped: Callable[[Relation], bool],
        open_spool: Callable[[int], StreamSpool],
        *,
        piece_bytes_max: int,
        forward_origins: bool = False,
        messages: "TableMessages | None" = None,
    ) -> None:
        self._messages = messages
        self._is_mapped = is_mapped
        self._open_spool = open_spool
        self._piece_bytes_max = piece_bytes_max
        self._forward_origins = forward_origins
        self.conversion: TextConversion | None = None
        """Converts the stream's text to UTF-8, if the source uses a different encoding."""
        self._relations: dict[bytes, Relation] = {}
        self._relation_count = 0
        self._arrivals: dict[bytes, int] = {}
        """The number of each relation's newest valid RELATION message."""
        self._transaction: Transaction | None = None
        self._is_foreign = False
        self._in_pieces = False
        """Whether the assembler has already returned a piece of the transaction."""
        self._start_block()
        self._size = 0
        self._streamed: dict[int, _Streamed] = {}
        self._in_stream: _Streamed | None = None
        self._kept: list[bytes] = []  # messages that are not in the spool yet

    @property
    def is_between_transactions(self) -> bool:
        """Whether no transaction is incomplete, except streamed transactions.

        Streamed transactions commit after any position that the slot can confirm now, so the source
        sends them again from the start.
        """
        return self._transaction is None and self._in_stream is None

    def reset(self) -> None:
        """Drop unfinished transactions, which the source will send again over a new connection."""
        self._transaction = self._in_stream = None
        self._kept.clear()
        self._relations.clear()
        self._arrivals.clear()
        if self._messages is not None:
            self._messages.reset()
        self._in_pieces = False
        self._start_block()
        self._size = 0
        for streamed in self._streamed.values():
            streamed.spool.close()
        self._streamed.clear()

    def feed(self, payloads: list[bytes]) -> Iterator[TransactionPiece | TransactionBlock]:
        """Read a burst of messages in order; yield the completed transactions.

        A block does not extend beyond a burst, and a piece exceeds ``piece_bytes_max`` by at most a
        burst. Raises ProtocolError for an unknown, truncated or misplaced message.
        """
        if self._messages is not None:
            payloads = list(self._messages.replace(payloads))
        compiled = choice.compiled
        row_kinds, begin, commit = _ROW_KINDS, pgoutput.BEGIN, pgoutput.COMMIT
        number, count = 0, len(payloads)
        while number < count:
            if compiled is not None and self._in_stream is None:
                number = self._gather(compiled, payloads, number)
                if number == count:
                    break
            # The hot path in pure Python: ordinary transactions, and messages of streamed
            # transactions.
            payload = payloads[number]
            kind = payload[0] if payload else 0
            if self._in_stream is not None:
                if kind in _KEPT_KINDS:
                    self._kept.append(payload)
                else:
                    self._handle_in_stream(kind, payload)
            elif kind in row_kinds:
                relid = payload[1:5]
                changes = self._touched.get(relid)
                if changes is None:
                    changes = self._touch(relid)
                changes.payloads.append(payload)
            elif kind == commit:
                yield from self._handle_commit(payload)
            elif kind == begin:
                self._handle_begin(payload)
            else:
                yield from self._handle(kind, payload)
            number += 1
        self._keep()
        yield from self._pop_block()
        self._forget_unwanted()
        if self._transaction is not None:
            self._size += sum(map(len, payloads))
            if self._size > self._piece_bytes_max:
                yield self._finish_piece(None)

    def _gather(self, compiled: ModuleType, payloads: list[bytes], number: int) -> int:
        """Assemble ordinary transactions from payload *number* on with compiled code.

        Return the number of the next payload.
        """
        transaction = self._transaction
        begun: Any = None
        if transaction is not None:
            begun = (transaction.xid, transaction.final_lsn, transaction.commit_time)
        number, unfinished = compiled.gather(
            payloads,
            number,
            self._block,
            self._touched,
            self._opened,
            begun,
            is_foreign=self._is_foreign,
            takes_commit=not (self._in_pieces or self._former or self._instructions),
        )
        if unfinished is not begun:
            self._size = 0
            self._is_foreign = False
            self._transaction = None
            if unfinished is not None:
                xid, final_lsn, commit_time = unfinished
                self._transaction = Transaction(xid, Lsn(final_lsn), commit_time)
        return number

    def _handle_begin(self, payload: bytes) -> None:
        self._expect_no_transaction(pgoutput.BEGIN)
        begin = pgoutput.parse_begin(payload)
        self._transaction = Transaction(begin.xid, begin.final_lsn, begin.commit_time)
        self._is_foreign = False

    def _handle_commit(self, payload: bytes) -> Iterator[TransactionPiece | TransactionBlock]:
        transaction = self._expect_transaction(pgoutput.COMMIT)
        commit = pgoutput.parse_commit(payload)
        if commit.commit_lsn != transaction.final_lsn:
            raise ProtocolError(
                f"COMMIT at {commit.commit_lsn} does not belong to the transaction "
                f"that was to commit at {transaction.final_lsn}"
            )
        if self._in_pieces or self._instructions:
            yield self._finish_piece(commit.end_lsn)
            self._transaction = None
            return
        last_end_lsn = self._block.end_lsns[-1] if self._block.end_lsns else 0
        if transaction.final_lsn < last_end_lsn or commit.end_lsn <= transaction.final_lsn:
            yield from self._pop_block()
        block = self._block
        for changes in (*self._former, *self._touched.values()):
            count = len(changes.payloads)
            if count > (changes.stops[-1] if changes.stops else 0):
                changes.numbers.append(len(block.xids))
                changes.stops.append(count)
        block.xids.append(transaction.xid)
        block.final_lsns.append(transaction.final_lsn)
        block.commit_times.append(transaction.commit_time)
        block.end_lsns.append(commit.end_lsn)
        self._touched.clear()
        self._former.clear()
        self._transaction = None
        self._size = 0

    def _handle(self, kind: int, payload: bytes) -> Iterator[TransactionPiece | TransactionBlock]:
        message = pgoutput.parse(payload, conversion=self.conversion)
        match message:
            case pgoutput.Origin():
                self._expect_transaction(kind)
                self._is_foreign = not self._forward_origins
                self._former += self._touched.values()
                self._touched.clear()
            case pgoutput.Relation():
                self._relation_count += 1
                self._handle_relation(message, self._relation_count)
            case pgoutput.Truncate():
                self._expect_transaction(kind)
                self._handle_truncate(message, payload)
            case pgoutput.Type():
                pass  # Types are matched by name in the catalogs.
            case LogicalMessage():
                if message.is_instruction:
                    self._expect_transaction(kind)
                    yield from self._pop_block()  # so that the piece contains only this transaction
                    self._add_instruction(message)
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
                yield from self._pop_block()
                yield from self._handle_stream_commit(message)

    def _expect_transaction(self, kind: int) -> Transaction:
        if self._transaction is None:
            raise ProtocolError(f"pgoutput message {chr(kind)!r} outside a transaction")
        return self._transaction

    def _expect_no_transaction(self, kind: int) -> None:
        if self._transaction is not None:
            raise ProtocolError(f"pgoutput message {chr(kind)!r} inside a transaction")

    def _start_block(self) -> None:
        self._block = TransactionBlock()
        # The relations of the block by relid, with their present definitions. The second
        # dictionary contains the relations with changes of the present transaction. Unmapped
        # relations are in both, but not in the block.
        self._opened: dict[bytes, Changes] = {}
        self._touched: dict[bytes, Changes] = {}
        self._former: list[Changes] = []
        """Closed change lists of the present transaction: a new definition, an origin or an
        instruction ended them.
        """
        self._instructions: list[Instruction] = []
        """Logical messages of the present transaction, which makes the transaction a separate
        piece.
        """

    def _pop_block(self) -> Iterator[TransactionBlock]:
        """Yield a non-empty block; changes of the present transaction stay behind."""
        block = self._block
        if not block.xids:
            return
        touched, former = self._touched, self._former
        self._start_block()
        for changes in former:
            self._former += self._stay_behind(changes)
        for relid, changes in touched.items():
            for changes_behind in self._stay_behind(changes):
                self._opened[relid] = self._touched[relid] = changes_behind
        block.changes = [changes for changes in block.changes if changes.payloads]
        yield block

    def _forget_unwanted(self) -> None:
        """Check the mapping again in the next burst, because a table may be mapped by then."""
        for relid, changes in list(self._opened.items()):
            if isinstance(changes.payloads, _Nowhere):
                del self._opened[relid]

    def _stay_behind(self, changes: Changes) -> Iterator[Changes]:
        stop = changes.stops[-1] if changes.stops else 0
        if later := changes.payloads[stop:]:
            del changes.payloads[stop:]
            self._block.changes.append(Changes(changes.relation, later))
            yield self._block.changes[-1]

    def _finish_piece(self, end_lsn: Lsn | None) -> TransactionPiece:
        """Return the changes of the present transaction, the only transaction of the block."""
        assert self._transaction is not None
        piece = TransactionPiece(
            self._transaction, self._block.changes, end_lsn, self._instructions
        )
        self._start_block()
        self._size = 0
        self._in_pieces = end_lsn is None
        return piece

    def _touch(self, relid: bytes) -> Changes:
        """Return the list for the present transaction's changes of a relation."""
        relid = bytes(relid)  # a slice would keep a large message in memory
        if self._transaction is None:
            raise ProtocolError("row message outside a transaction")
        relation = self._relations.get(relid)
        if relation is None:
            raise ProtocolError(
                f"change of relation {int.from_bytes(relid, 'big')} before RELATION"
            )
        if self._is_foreign:
            changes = Changes(relation, _Nowhere())
        elif relid in self._opened:
            changes = self._opened[relid]
        else:
            is_mapped = self._is_mapped(relation)
            changes = Changes(relation, [] if is_mapped else _Nowhere())
            if is_mapped:
                self._block.changes.append(changes)
            self._opened[relid] = changes
        self._touched[relid] = changes
        return changes

    def _handle_relation(self, relation: Relation, arrival: int) -> None:
        relid = relation.relid.to_bytes(4, "big")
        self._relations[relid] = relation
        self._arrivals[relid] = max(arrival, self._arrivals.get(relid, 0))
        # Later changes have the new definition and go into a new list.
        self._opened.pop(relid, None)
        if (changes := self._touched.pop(relid, None)) is not None:
            self._former.append(changes)

    def _add_instruction(self, message: LogicalMessage) -> None:
        if self._is_foreign:
            return
        self._instructions.append(Instruction(len(self._block.changes), message))
        # Changes after the instruction go into new lists.
        self._opened.clear()
        self._former += self._touched.values()
        self._touched.clear()

    def _handle_truncate(self, message: pgoutput.Truncate, payload: bytes) -> None:
        for number in message.relids:
            relid = number.to_bytes(4, "big")
            changes = self._touched.get(relid) or self._touch(relid)
            changes.payloads.append(payload)

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
            case pgoutput.Type():
                pass
            case LogicalMessage() as message:
                if message.is_instruction:
                    self._kept.append(bytes(payload))
            case _:
                raise ProtocolError(f"pgoutput message {chr(kind)!r} inside a stream")

    def _keep(self) -> None:
        messages, self._kept = self._kept, []
        start = 0
        for number, message in enumerate(messages):
            if isinstance(message, memoryview):
                assert self._in_stream is not None
                self._keep_small(messages[start:number])
                self._in_stream.spool.append_large(bytes(message[1:5]), message)
                start = number + 1
        self._keep_small(messages[start:] if start else messages)

    def _keep_small(self, run: list[bytes]) -> None:
        if run:
            assert self._in_stream is not None
            spool = self._in_stream.spool
            # Most streamed changes come in runs of a single relation. The assembler unpacks a run
            # now, while it waits for the source anyway; later it passes the run on as a whole.
            if len({message[1:9] for message in run}) == 1 and {m[0] for m in run} <= _ROW_SET:
                spool.append(run[0][1:5], [message[:1] + message[5:] for message in run])
            else:
                for message in run:
                    if message[0] == pgoutput.RELATION:
                        self._relation_count += 1
                        self._in_stream.arrivals.append(self._relation_count)
                spool.append(b"", run)

    def _handle_stream_abort(self, message: pgoutput.StreamAbort) -> None:
        streamed = self._streamed.get(message.xid)
        if streamed is None:
            # PostgreSQL 18 also sends STREAM ABORT for an aborted transaction of which it has sent
            # no part. Then there is no message to remove.
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
        former = dict(self._arrivals), dict(self._relations)
        try:
            for subxid, messages in streamed.spool.replay():
                if not subxid:
                    self._replay(messages, streamed)
                elif subxid not in streamed.aborted:
                    relid = messages[0][1:5]
                    changes = self._touched.get(relid) or self._touch(relid)
                    changes.payloads.extend(messages)
                self._size += sum(map(len, messages))
                if self._size > self._piece_bytes_max:
                    yield self._finish_piece(None)
        finally:
            streamed.spool.close()
        yield self._finish_piece(message.end_lsn)
        self._transaction = None
        self._keep_newer(*former)

    def _keep_newer(self, arrivals: dict[bytes, int], relations: dict[bytes, Relation]) -> None:
        """Restore definitions that arrived after the definitions of a streamed transaction.

        Later transactions use these, and pgoutput may not send the messages again (`schema_sent` in
        pgoutput.c). The definition of a table that is written to can change nevertheless: no lock
        prevents ALTER PUBLICATION with a new column list.
        """
        for relid, arrival in arrivals.items():
            if self._arrivals[relid] == arrival:
                self._relations[relid] = relations[relid]

    def _replay(self, messages: list[bytes], streamed: _Streamed) -> None:
        """Read the messages of a streamed transaction that committed; each begins with an xid."""
        aborted = streamed.aborted
        for message in messages:
            kind = message[0]
            arrival = streamed.arrivals.popleft() if kind == pgoutput.RELATION else 0
            if message[1:5] in aborted:
                continue
            plain = message[:1] + message[5:]
            if kind == pgoutput.RELATION:
                relation = pgoutput.parse(message, in_stream=True, conversion=self.conversion)
                assert isinstance(relation, Relation)
                self._handle_relation(relation, arrival)
            elif kind == pgoutput.TRUNCATE:
                truncate = pgoutput.parse(plain)
                assert isinstance(truncate, pgoutput.Truncate)
                self._handle_truncate(truncate, plain)
            elif kind == pgoutput.MESSAGE:
                instruction = pgoutput.parse(plain)
                assert isinstance(instruction, LogicalMessage)
                if instruction.subxid not in aborted:
                    self._add_instruction(instruction)
            else:
                relid = plain[1:5]
                changes = self._touched.get(relid) or self._touch(relid)
                changes.payloads.append(plain)
