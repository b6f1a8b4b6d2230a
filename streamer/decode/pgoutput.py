"""The messages of PostgreSQL's logical replication protocol that the output plugin pgoutput sends.

PostgreSQL documentation, chapter "Logical Replication Message Formats"; source files pgoutput.c and
proto.c. Integers are big endian, strings end with NUL, times count microseconds from 2000-01-01
UTC.

The assembler identifies row messages (insert, update, delete) by the first byte, and keeps the
bytes for the worker (`streamer.decode.tuples`). `parse` is for all other messages. Unexpected data
is a ProtocolError with the offset: a guess here would write wrong data.
"""

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from streamer.decode.text_conversion import TextConversion
from streamer.errors.error_classes import ProtocolError
from streamer.util.lsn import Lsn

BEGIN: Final = ord("B")
COMMIT: Final = ord("C")
ORIGIN: Final = ord("O")
RELATION: Final = ord("R")
TYPE: Final = ord("Y")
INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
TRUNCATE: Final = ord("T")
MESSAGE: Final = ord("M")
STREAM_START: Final = ord("S")
STREAM_STOP: Final = ord("E")
STREAM_COMMIT: Final = ord("c")
STREAM_ABORT: Final = ord("A")

KEY_TUPLE: Final = ord("K")
OLD_TUPLE: Final = ord("O")
NEW_TUPLE: Final = ord("N")

OWN_PREFIX: Final = "streamer."
"""The prefix of a logical message that is an instruction to streamer begins with this text."""
DDL_PREFIX: Final = f"{OWN_PREFIX}ddl"
EXECUTE_PREFIX: Final = f"{OWN_PREFIX}execute"

EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


def to_datetime(microseconds: int) -> datetime:
    """Convert a protocol time to a datetime in UTC."""
    return EPOCH + timedelta(microseconds=microseconds)


def from_datetime(moment: datetime) -> int:
    """Convert a datetime to a protocol time."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@dataclass(slots=True)
class Begin:
    final_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(slots=True)
class Commit:
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    origin_lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    """A published column: name, type and whether the replica identity uses the column."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


_numbers = itertools.count(1)


def next_number() -> int:
    """Return a number that is higher than the numbers of all RELATION messages so far."""
    return next(_numbers)


@dataclass(frozen=True, slots=True)
class Relation:
    """The definition of a relation for the changes that follow.

    ``replica_identity`` is pg_class.relreplident: ``d`` default, ``n`` none, ``f`` full, ``i``
    index.
    """

    relid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]
    number: int = field(default_factory=next_number, compare=False, repr=False)
    """A number above the numbers of all earlier messages from any source."""


@dataclass(frozen=True, slots=True)
class Redefinition(Relation):
    """Replaces a RELATION message for messages about the definition of a relation."""


@dataclass(frozen=True, slots=True)
class Type:
    type_oid: int
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Truncate:
    relids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


def restarts_identity(payload: bytes) -> bool:
    """Whether a TRUNCATE message, without the xid of a stream, says RESTART IDENTITY.

    The options come after the kind and the number of relations: 1 is CASCADE, 2 RESTART IDENTITY
    ("Logical Replication Message Formats" in PostgreSQL's documentation).
    """
    return bool(payload[5] & 2)


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    transactional: bool
    message_lsn: Lsn
    prefix: str
    content: bytes

    @property
    def is_instruction(self) -> bool:
        """Whether this is a message to streamer with a place among the changes of a transaction."""
        return self.transactional and self.prefix.startswith(OWN_PREFIX)

    @property
    def subxid(self) -> bytes | None:
        """The subtransaction that wrote the message; only in messages about definitions."""
        word, _, _ = self.content.partition(b" ")
        if self.prefix != DDL_PREFIX or not word.isdigit():
            return None
        return (int(word) & 0xFFFFFFFF).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class StreamStart:
    xid: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    pass


@dataclass(frozen=True, slots=True)
class StreamCommit:
    xid: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """``subxid`` equals ``xid`` when the whole transaction was rolled back."""

    xid: int
    subxid: int


Message = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
)


class _Cursor:
    """Reads the fields of a message in order."""

    __slots__ = ("_conversion", "_data", "_position")

    def __init__(self, data: bytes, conversion: TextConversion | None) -> None:
        self._data = data
        self._conversion = conversion
        self._position = 1

    def _read(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._data):
            raise self.error("truncated")
        field = self._data[self._position : end]
        self._position = end
        return field

    def error(self, problem: str) -> ProtocolError:
        kind = chr(self._data[0])
        return ProtocolError(f"{problem} pgoutput message {kind!r} at offset {self._position}")

    def int8(self) -> int:
        return self._read(1)[0]

    def int16(self) -> int:
        return int.from_bytes(self._read(2), "big")

    def int32(self) -> int:
        return int.from_bytes(self._read(4), "big")

    def signed32(self) -> int:
        return int.from_bytes(self._read(4), "big", signed=True)

    def time(self) -> int:
        return int.from_bytes(self._read(8), "big", signed=True)

    def lsn(self) -> Lsn:
        return Lsn(int.from_bytes(self._read(8), "big"))

    def _terminated(self) -> bytes:
        end = self._data.find(b"\0", self._position)
        if end < 0:
            raise self.error("truncated")
        data = self._data[self._position : end]
        self._position = end + 1
        return data

    def string(self) -> str:
        start = self._position
        data = self._terminated()
        try:
            return (
                data.decode() if self._conversion is None else self._conversion.convert_name(data)
            )
        except UnicodeDecodeError:
            self._position = start
            raise self.error("undecodable text in") from None

    def prefix(self) -> str:
        """The prefix of a message of any program, whose encoding the source does not check."""
        return self._terminated().decode(errors="replace")

    def content(self) -> bytes:
        return self._read(self.int32())

    def skip(self, size: int) -> bytes:
        return self._read(size)

    @property
    def has_more(self) -> bool:
        return self._position < len(self._data)

    def row(self) -> list[bytes]:
        """The columns of a TupleData, each with kind and length."""
        columns = []
        for _ in range(self.int16()):
            start = self._position
            if self.int8() in b"tb":
                self._read(self.int32())
            columns.append(self._data[start : self._position])
        return columns

    def finish(self) -> None:
        if self._position != len(self._data):
            raise self.error("trailing bytes after")


_begin_fields: Final = struct.Struct(">xQqI")
_commit_fields: Final = struct.Struct(">xBQQq")


def parse_begin(data: bytes) -> Begin:
    """Parse BEGIN. This function and `parse_commit` are separate and fast, because every
    transaction has both messages.
    """
    if len(data) != _begin_fields.size:
        raise ProtocolError(f"malformed pgoutput message 'B' of {len(data)} bytes")
    final_lsn, commit_time, xid = _begin_fields.unpack(data)
    return Begin(Lsn(final_lsn), commit_time, xid)


def parse_commit(data: bytes) -> Commit:
    """Parse COMMIT."""
    if len(data) != _commit_fields.size or data[1] != 0:
        raise ProtocolError(f"malformed pgoutput message 'C' of {len(data)} bytes")
    _, commit_lsn, end_lsn, commit_time = _commit_fields.unpack(data)
    return Commit(Lsn(commit_lsn), Lsn(end_lsn), commit_time)


def parse(
    data: bytes, *, in_stream: bool = False, conversion: TextConversion | None = None
) -> Message:
    """Parse a message that is not about a row.

    *in_stream*: the message came between STREAM START and STREAM STOP, where the xid of the
    (sub)transaction follows the kind byte. *conversion*: the conversion of names to UTF-8. Raises
    ProtocolError for row messages too.
    """
    kind = data[0] if data else 0
    parser = _PARSERS.get(kind)
    if kind == BEGIN:
        return parse_begin(data)
    if kind == COMMIT:
        return parse_commit(data)
    if parser is None:
        raise ProtocolError(f"unknown pgoutput message {chr(kind)!r} at offset 0")
    cursor = _Cursor(data, conversion)
    if in_stream and kind in _CARRY_XID:
        cursor.int32()
    message = parser(cursor)
    cursor.finish()
    return message


def _origin(cursor: _Cursor) -> Origin:
    return Origin(cursor.lsn(), cursor.string())


def _relation(cursor: _Cursor) -> Relation:
    relid = cursor.int32()
    namespace = cursor.string() or "pg_catalog"
    name = cursor.string()
    replica_identity = chr(cursor.int8())
    if replica_identity not in "dnfi":
        raise cursor.error("unknown replica identity in")
    columns = []
    for _ in range(cursor.int16()):
        flags = cursor.int8()
        if flags > 1:
            raise cursor.error("unknown column flags in")
        column, oid, modifier = cursor.string(), cursor.int32(), cursor.signed32()
        columns.append(Column(column, oid, modifier, flags == 1))
    return Relation(relid, namespace, name, replica_identity, tuple(columns))


def _type(cursor: _Cursor) -> Type:
    return Type(cursor.int32(), cursor.string() or "pg_catalog", cursor.string())


def _truncate(cursor: _Cursor) -> Truncate:
    count = cursor.int32()
    options = cursor.int8()
    if options > 3:
        raise cursor.error("unknown options in")
    relids = tuple(cursor.int32() for _ in range(count))
    return Truncate(relids, cascade=bool(options & 1), restart_identity=bool(options & 2))


def _message(cursor: _Cursor) -> LogicalMessage:
    flags = cursor.int8()
    if flags > 1:
        raise cursor.error("unknown flags in")
    return LogicalMessage(flags == 1, cursor.lsn(), cursor.prefix(), cursor.content())


def _stream_start(cursor: _Cursor) -> StreamStart:
    return StreamStart(cursor.int32(), cursor.int8() == 1)


def _stream_stop(cursor: _Cursor) -> StreamStop:
    return StreamStop()


def _stream_commit(cursor: _Cursor) -> StreamCommit:
    xid = cursor.int32()
    if cursor.int8() != 0:
        raise cursor.error("unknown flags in")
    return StreamCommit(xid, cursor.lsn(), cursor.lsn(), cursor.time())


def _stream_abort(cursor: _Cursor) -> StreamAbort:
    return StreamAbort(cursor.int32(), cursor.int32())


_PARSERS: Final[dict[int, Callable[[_Cursor], Message]]] = {
    ORIGIN: _origin,
    RELATION: _relation,
    TYPE: _type,
    TRUNCATE: _truncate,
    MESSAGE: _message,
    STREAM_START: _stream_start,
    STREAM_STOP: _stream_stop,
    STREAM_COMMIT: _stream_commit,
    STREAM_ABORT: _stream_abort,
}
_CARRY_XID: Final = frozenset({RELATION, TYPE, INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE})

ROW_KINDS: Final = frozenset({INSERT, UPDATE, DELETE})


def new_row(payload: bytes) -> list[bytes]:
    """Return the columns of a message's newest row, each with kind and length."""
    row: list[bytes] = []
    if payload[0] in ROW_KINDS:
        cursor = _Cursor(payload, None)
        cursor.skip(4)
        while not row or cursor.has_more:
            cursor.skip(1)
            row = cursor.row()
    return row


def as_upserts(payload: bytes, relation: Relation) -> list[bytes]:
    """Return changes with the same result as a message, even if the target already has the new row.

    An INSERT becomes an UPDATE: in both messages the new row follows the OID. An UPDATE of a key
    becomes a DELETE of the old key, and an UPDATE of the row with the new key. All other messages
    remain unchanged.
    """
    if payload[0] == INSERT:
        return [b"U" + payload[1:]]
    if payload[0] != UPDATE or payload[5] != KEY_TUPLE:
        return [payload]
    cursor = _Cursor(payload, None)
    oid, marker, old = cursor.skip(4), cursor.skip(1), cursor.row()
    new_marker, new = cursor.skip(1), cursor.row()
    cursor.finish()
    if not len(relation.columns) == len(old) == len(new):
        raise cursor.error("wrong number of columns in")
    keys = [number for number, column in enumerate(relation.columns) if column.is_key]
    for number in keys:
        # The new row lacks an unchanged TOAST value of the key, and the old key contains the value.
        if new[number] == b"u":
            new[number] = old[number]
    if all(new[number] == old[number] for number in keys):
        return [payload]
    count = len(new).to_bytes(2, "big")
    return [
        b"".join([b"D", oid, marker, count, *old]),
        b"".join([b"U", oid, new_marker, count, *new]),
    ]
