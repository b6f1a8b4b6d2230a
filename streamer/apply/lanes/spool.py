"""Changes on disk, in order: a held lane's changes, and streamed transactions before their commit.

Spooled changes need not be durable: after a crash the source sends changes in flight again. Files
live in a directory of the process. The process removes the directory at its end; after a crash, the
next process removes the directory.

A lane's spool is a sequence of segment files. The spool has a position for reading and a position
for writing, and deletes segments after their release.
"""

import mmap
import os
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Final, cast

import structlog

from streamer.apply.lanes.held_counts import Held
from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.decode.large_values import LARGE_BYTES, pieces, slices
from streamer.decode.pgoutput import Relation
from streamer.decode.transactions import Changes, Transaction
from streamer.errors.error_classes import SpoolError
from streamer.util.lsn import Lsn
from streamer.util.owned_directory import NotPrivateError, OwnedDirectory, make_private

SEGMENT_BYTES: Final = 64 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024
_BUFFER_BYTES: Final = 64 * 1024

_BLOCK_BYTES: Final = 128 * 1024
"""Approximate bytes of payloads in a record, unless a single payload is larger."""

_TRANSACTION: Final = 1
_RELATION: Final = 2
_PAYLOADS: Final = 3
_END: Final = 4

_header = struct.Struct(">BI")
_count = struct.Struct(">I")
_transaction_fields = struct.Struct(">IQq?")
_relation_fields = struct.Struct(">I")
_end_fields = struct.Struct(">Q")


log = structlog.get_logger()


class OpenTransactionDiscarded(Exception):  # a signal to the reader, not an error
    """The spool discarded the unfinished transaction that the reader was in the middle of."""


def _blocks(payloads: list[bytes], tag: bytes = b"") -> Iterator[bytes]:
    """Pack payloads into records: *tag*, the number of payloads, the lengths, and the payloads.

    For speed, no statement here runs for every payload. A record is a single bytes object unless a
    payload is large, because the spool does not copy large payloads.
    """
    step = max(1, len(payloads) * _BLOCK_BYTES // (sum(map(len, payloads)) or 1))
    for start in range(0, len(payloads), step):
        part = payloads[start : start + step]
        lengths = array("I", map(len, part)).tobytes()
        size = len(tag) + _count.size + len(lengths) + sum(map(len, part))
        head = _header.pack(_PAYLOADS, size) + tag + _count.pack(len(part))
        if size > LARGE_BYTES:
            yield from (head, lengths, *part)
        else:
            yield b"".join([head, lengths, *part])


def _unpack_block(data: bytes, begin: int) -> list[bytes]:
    """Return the payloads of the record whose content begins at *begin*."""
    (number,) = _count.unpack_from(data, begin)
    first = begin + _count.size
    lengths = array("I")
    begin = first + number * lengths.itemsize
    lengths.frombytes(data[first:begin])
    return slices(data, list(accumulate(lengths, initial=begin)))


def prepare_parent(parent: Path) -> None:
    """Create the configured directory of spools, or check that it belongs to this user alone.

    The directory contains journals, Spark jobs and the installation's id. Raises SpoolError.
    """
    try:
        make_private(parent)
    except OSError as exc:
        raise _unusable(parent, exc) from exc


def _unusable(parent: Path, error: OSError) -> SpoolError:
    hint = "set spool.directory to a writable directory with room"
    if isinstance(error, NotPrivateError):
        hint = error.remedy or "set spool.directory to a directory of streamer's own user"
    return SpoolError(f"cannot use {parent} for held changes: {error.strerror}", hint=hint)


class SpoolDirectory:
    """The directory of a process's spools."""

    def __init__(self, parent: Path) -> None:
        prepare_parent(parent)
        try:
            self._directory = OwnedDirectory(parent, "streamer-")
        except OSError as exc:
            raise _unusable(parent, exc) from exc
        self.path = self._directory.path
        self._count = 0

    def new_file(self) -> Path:
        self._count += 1
        if not self.path.exists():
            self._make_again()
        return self.path / f"{self._count:08d}.spool"

    def lane_spool(self) -> "LaneSpool":
        """Return a new spool for a lane, without files until the first change."""
        return LaneSpool(self)

    def _make_again(self) -> None:
        """Create the directory again that a cleaner removed. Open files stay usable."""
        log.warning("the spool directory disappeared; creating it again", path=str(self.path))
        prepare_parent(self.path.parent)
        try:
            self._directory.make_again()
        except OSError as exc:
            raise SpoolError(f"cannot make {self.path} again: {exc.strerror}") from exc

    def close(self) -> None:
        """Remove the directory and all files in it."""
        self._directory.close()


class _Segment:
    """A file for appending, with a buffer, and for reading from anywhere."""

    __slots__ = ("_buffer", "_buffered", "_descriptor", "_path", "size")

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
        except OSError as exc:
            raise SpoolError(
                f"cannot make a file for held changes in {path.parent}: {exc.strerror}",
                hint="free disk space there, or set spool.directory to another directory",
            ) from exc
        self._buffer: list[bytes] = []
        self._buffered = 0
        self.size = 0
        """Bytes in the file and in the buffer."""

    def append(self, data: bytes) -> None:
        if len(data) > LARGE_BYTES:
            self._flush()
            for piece in pieces(data):
                self._write(piece, self.size)
                self.size += len(piece)
            return
        self._buffer.append(data)
        self._buffered += len(data)
        self.size += len(data)
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._write(b"".join(self._buffer), self.size - self._buffered)
        self._buffer.clear()
        self._buffered = 0

    def _write(self, data: bytes, position: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._descriptor, view, position)
                position += written
                view = view[written:]
        except OSError as exc:
            raise SpoolError(
                f"cannot write held changes to {self._path.parent}: {exc.strerror}",
                hint="free disk space there, or set spool.directory to a larger disk",
            ) from exc

    def truncate(self, size: int) -> None:
        self._flush()
        self.size = size

    def read(self, offset: int) -> bytes:
        """Return bytes from *offset* on, at least a whole record; no bytes at the end.

        A large record is mapped instead of read: memory holds only pages in use.
        """
        if self._buffered:
            self._flush()
        data = os.pread(self._descriptor, min(_READ_BYTES, self.size - offset), offset)
        if len(data) >= _header.size:
            needed = _header.size + _header.unpack_from(data)[1]
            if needed > LARGE_BYTES:
                return self._map(offset, needed)
            if needed > len(data):
                data = os.pread(self._descriptor, needed, offset)
        return data

    def _map(self, offset: int, size: int) -> bytes:
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        size += offset - begin
        mapped = mmap.mmap(self._descriptor, size, offset=begin, access=mmap.ACCESS_READ)
        return cast("bytes", memoryview(mapped)[offset - begin :])

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


class LaneSpool:
    """The transactions of a held lane."""

    def __init__(self, directory: SpoolDirectory) -> None:
        self._directory = directory
        self._segments: deque[_Segment] = deque()
        self._relations: list[tuple[MappedRelation, Relation]] = []
        self._relation_numbers: dict[tuple[int, int], int] = {}
        self._write_is_open = False
        self._open_at: tuple[int, int] = (0, 0)  # where the unfinished transaction begins
        self._first_segment = 0  # number of the first segment that still exists
        self._released: tuple[int, int] = (0, 0)
        self._cursor: tuple[int, int] = (0, 0)
        # The end and the counts of each finished transaction that is read but not yet released.
        self._read: deque[tuple[tuple[int, int], Held]] = deque()
        self._reader = _TransactionReader(self._relations)
        self._discarded = False
        self._held = Held()
        self._open_held = Held()  # the counts of the unfinished transaction
        self._piece_held = Held()  # the counts of the pieces read of a transaction

    # ---- writing -------------------------------------------------------------------------------

    def append(self, lane_transaction: LaneTransaction) -> None:
        """Write a transaction, or the next piece of the unfinished transaction. Raises
        SpoolError.
        """
        records: list[bytes] = []
        add = records.append
        if not self._write_is_open:
            self._open_at = self._end()
            transaction = lane_transaction.transaction
            fields = _transaction_fields.pack(
                transaction.xid,
                transaction.final_lsn,
                transaction.commit_time,
                lane_transaction.is_lead,
            )
            add(_header.pack(_TRANSACTION, len(fields)) + fields)
        pack = _header.pack
        for mapped, changes in lane_transaction.changes:
            number = self._relation_number(mapped, changes.relation)
            add(pack(_RELATION, _relation_fields.size) + _relation_fields.pack(number))
            records.extend(_blocks(changes.payloads))
        self._held.add(lane_transaction)
        self._open_held.add(lane_transaction)
        self._write_is_open = lane_transaction.end_lsn is None
        if lane_transaction.end_lsn is not None:
            self._open_held = Held()
            add(pack(_END, _end_fields.size) + _end_fields.pack(lane_transaction.end_lsn))
        segment = self._last_segment()
        for record in records:
            segment.append(record)

    def _relation_number(self, mapped: MappedRelation, relation: Relation) -> int:
        key = (id(mapped), id(relation))
        number = self._relation_numbers.get(key)
        if number is None:
            number = self._relation_numbers[key] = len(self._relations)
            self._relations.append(
                (mapped, relation)
            )  # keeps both objects, so their ids stay valid
        return number

    def _last_segment(self) -> _Segment:
        if not self._segments or self._segments[-1].size >= SEGMENT_BYTES:
            self._segments.append(_Segment(self._directory.new_file()))
        return self._segments[-1]

    def _end(self) -> tuple[int, int]:
        if not self._segments:
            return (self._first_segment, 0)
        return (self._first_segment + len(self._segments) - 1, self._segments[-1].size)

    def discard_open(self) -> None:
        """Discard the unfinished transaction; a reader in its middle gets
        OpenTransactionDiscarded.
        """
        if not self._write_is_open:
            return
        self._write_is_open = False
        self._held.remove(self._open_held)
        self._open_held = Held()
        self._discarded = self._cursor > self._open_at
        number, offset = self._open_at
        while self._segments and self._first_segment + len(self._segments) - 1 > number:
            self._segments.pop().close()
        if self._segments:
            self._segments[-1].truncate(offset)

    # ---- reading -------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether the owner has released all transactions."""
        return self._released >= self._end()

    @property
    def size_bytes(self) -> int:
        """Unreleased bytes on disk."""
        number, offset = self._released
        read = offset if number == self._first_segment else 0
        return sum(segment.size for segment in self._segments) - read

    @property
    def held(self) -> Held:
        """The changes that the owner has not released."""
        return self._held

    def read(self, size: int) -> list[LaneTransaction]:
        """Read finished transactions of about *size* bytes, or a piece of a larger transaction.

        Empty if the reader reached the end. Raises OpenTransactionDiscarded.
        """
        if self._discarded:
            raise OpenTransactionDiscarded
        transactions: list[LaneTransaction] = []
        used_total = 0
        while used_total < size:
            data = self._read_bytes()
            if not data:
                break
            first = len(transactions)
            used, ends = self._reader.feed(data, transactions)
            if used == 0:
                raise SpoolError("held changes are damaged")
            number, offset = self._cursor
            self._cursor = (number, offset + used)
            for lane_transaction, end in zip(transactions[first:], ends, strict=True):
                self._piece_held.add(lane_transaction)
                self._read.append(((number, offset + end), self._piece_held))
                self._piece_held = Held()
            used_total += used
        if not transactions and (piece := self._reader.pop_piece()) is not None:
            transactions.append(piece)
            self._piece_held.add(piece)
        return transactions

    def _read_bytes(self) -> bytes:
        while True:
            number, offset = self._cursor
            index = number - self._first_segment
            if index >= len(self._segments):
                return b""
            segment = self._segments[index]
            if offset < segment.size:
                return segment.read(offset)
            if index + 1 >= len(self._segments):
                return b""
            self._cursor = (number + 1, 0)

    def rewind(self) -> None:
        """Read again from the first unreleased transaction."""
        self._cursor = self._released
        self._reader = _TransactionReader(self._relations)
        self._discarded = False
        self._read.clear()
        self._piece_held = Held()

    def release(self, count: int) -> None:
        """Release the first *count* finished transactions that are read."""
        for _ in range(count):
            self._released, held = self._read.popleft()
            self._held.remove(held)
        while len(self._segments) > 1 and self._first_segment < self._released[0]:
            self._segments.popleft().close()
            self._first_segment += 1

    def close(self) -> None:
        while self._segments:
            self._segments.popleft().close()


class _TransactionReader:
    """Turns records back into lane transactions. Pure."""

    __slots__ = ("_changes", "_is_lead", "_payloads", "_relations", "_size", "_transaction")

    def __init__(self, relations: list[tuple[MappedRelation, Relation]]) -> None:
        self._relations = relations
        self._transaction: Transaction | None = None
        self._is_lead = True
        self._start_piece()

    def _start_piece(self) -> None:
        self._changes: list[tuple[MappedRelation, Changes]] = []
        self._payloads: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes, transactions: list[LaneTransaction]) -> tuple[int, list[int]]:
        """Read whole records from *data*, and add finished transactions to *transactions*.

        Returns the number of bytes read, and the end of each of these transactions.
        """
        position, end = 0, len(data)
        boundaries: list[int] = []
        unpack = _header.unpack_from
        while position + _header.size <= end:
            kind, length = unpack(data, position)
            begin = position + _header.size
            if begin + length > end:
                break
            position = begin + length
            if kind == _PAYLOADS:
                payloads = _unpack_block(data, begin)
                self._payloads += payloads
                self._size += sum(map(len, payloads))
            elif kind == _RELATION:
                mapped, relation = self._relations[_relation_fields.unpack_from(data, begin)[0]]
                self._payloads = []
                self._changes.append((mapped, Changes(relation, self._payloads)))
            elif kind == _TRANSACTION:
                xid, final_lsn, commit_time, lead = _transaction_fields.unpack_from(data, begin)
                self._transaction = Transaction(xid, Lsn(final_lsn), commit_time)
                self._is_lead = lead
            else:
                transactions.append(
                    self._build_transaction(Lsn(_end_fields.unpack_from(data, begin)[0]))
                )
                self._transaction = None
                boundaries.append(position)
        return position, boundaries

    def _build_transaction(self, end_lsn: Lsn | None) -> LaneTransaction:
        assert self._transaction is not None
        lane_transaction = LaneTransaction(
            self._transaction, self._changes, end_lsn, self._size, self._is_lead
        )
        self._start_piece()
        return lane_transaction

    def pop_piece(self) -> LaneTransaction | None:
        """Return the read piece of an unfinished lane transaction, if any."""
        if self._transaction is None or self._size == 0:
            return None
        mapped, changes = self._changes[-1]
        piece = self._build_transaction(None)
        # Later changes belong to the same relation until the next _RELATION record.
        self._changes.append((mapped, Changes(changes.relation, self._payloads)))
        return piece


_NO_SUBXID: Final = bytes(4)  # InvalidTransactionId


class StreamedSpool:
    """The messages of a streamed transaction."""

    def __init__(self, directory: SpoolDirectory) -> None:
        self._segment = _Segment(directory.new_file())

    def append(self, subxid: bytes, messages: list[bytes]) -> None:
        for block in _blocks(messages, subxid or _NO_SUBXID):
            self._segment.append(block)

    def append_large(self, subxid: bytes, message: bytes) -> None:
        kind, body = message[:1], message[5:]
        length = array("I", [len(kind) + len(body)])
        size = len(subxid) + _count.size + length.itemsize + length[0]
        head = _header.pack(_PAYLOADS, size) + subxid + _count.pack(1) + length.tobytes()
        self._segment.append(head + bytes(kind))
        self._segment.append(body)

    def replay(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield the appended messages in order, by blocks."""
        position = 0
        while position < self._segment.size:
            data = self._segment.read(position)
            offset = 0
            while offset + _header.size <= len(data):
                begin = offset + _header.size
                end = begin + _header.unpack_from(data, offset)[1]
                if end > len(data):
                    break
                subxid = bytes(data[begin : begin + len(_NO_SUBXID)])
                messages = _unpack_block(data, begin + len(_NO_SUBXID))
                yield b"" if subxid == _NO_SUBXID else subxid, messages
                offset = end
            if offset == 0:
                raise SpoolError("a spooled transaction is damaged")
            position += offset

    def close(self) -> None:
        self._segment.close()
