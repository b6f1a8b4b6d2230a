"""Row data of pgoutput: the hot path of decoding.

PostgreSQL documentation, "Logical Replication Message Formats", TupleData: an int16 column count,
then a kind byte for each column. After kinds ``t`` (text) and ``b`` (binary), an int32 length and
that many bytes follow. Kind ``n`` is NULL, kind ``u`` an unchanged TOAST value that was not sent.
In binary transport, values of types without a send function come as text.

A row is a list with an item per column, and no item is a Python value. In text transport an item
holds the column's text. In binary transport an item holds length *and* bytes, as a row of ``COPY …
(FORMAT binary)`` needs. A call costs about a microsecond for five columns, so this is plain code
without objects, with checks per row, not per column.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Final

from streamer.decode.large_values import large_or_bytes
from streamer.errors.error_classes import ProtocolError

_length_at: Final = struct.Struct(">I").unpack_from

KIND_NULL: Final = ord("n")
KIND_UNCHANGED: Final = ord("u")
KIND_TEXT: Final = ord("t")
KIND_BINARY: Final = ord("b")

Value = bytes


class _Sentinel(array):  # type: ignore[type-arg]
    """Joins into COPY data like any value, but is equal only to itself.

    So a text that consists of a backslash and N differs from NULL.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


NULL: Final[Value] = _Sentinel("B", b"\\N")  # type: ignore[assignment]
NULL_BINARY: Final[Value] = _Sentinel("B", b"\xff\xff\xff\xff")  # type: ignore[assignment]
UNCHANGED: Final[Value] = _Sentinel("B", b"\\U")  # type: ignore[assignment]
AS_TEXT: Final[Value] = _Sentinel("B", b"\xff\xff\xff\xfe")  # type: ignore[assignment]
"""Stands for a value that comes as text in binary transport. Only columns that the target does not
get may contain it: in COPY data it is a length of -2, which the target refuses.
"""

Row = list[Value]
PendingRow = Row | bytes
"""A row to write: its items, or its row message."""


class MixedRow(Row):
    """A row with NULLs or unchanged values. A row without them is a plain list."""

    __slots__ = ("null_count", "unchanged_count")

    def __init__(self) -> None:
        super().__init__()
        self.null_count = 0
        self.unchanged_count = 0


def read_text_tuple(data: bytes, position: int) -> tuple[Row, int]:
    """Read the TupleData of text transport at *position*; return the row and the end.

    The end can lie past the end of *data* if the message is truncated: the caller knows the end
    of the message and checks. IndexError and struct.error also mean a truncated message.
    """
    if isinstance(data, memoryview):
        return _read_large_tuple(data, position, KIND_TEXT)
    start = position
    count = data[position] << 8 | data[position + 1]
    position += 2
    row: Row = []
    append = row.append
    for _ in range(count):
        if data[position] != 116:  # KIND_TEXT; a literal is measurably faster here
            return _read_mixed_tuple(data, start, KIND_TEXT)
        begin = position + 5
        position = begin + _length_at(data, position + 1)[0]
        append(data[begin:position])
    return row, position


def read_text_row(message: bytes) -> tuple[Row, int]:
    """Read the only tuple of a row message of text transport; like `read_text_tuple`, but faster.

    Text has no NUL bytes, so the three NUL bytes of a length below 256 mark the start of a column.
    If the expected number of columns appears, each with the stated length, the result is certain.
    Otherwise the message is read column by column.
    """
    try:
        parts = message.split(b"t\0\0\0")
    except AttributeError:  # a large message is a memoryview
        return read_text_tuple(message, 6)
    head = parts.pop(0)
    if len(head) != 8 or len(parts) != head[6] << 8 | head[7]:
        return read_text_tuple(message, 6)
    row: Row = []
    append = row.append
    for part in parts:
        if part[0] != len(part) - 1:
            return read_text_tuple(message, 6)
        append(part[1:])
    return row, len(message)


def read_binary_row(message: bytes) -> tuple[Row, int]:
    """Read the only tuple of a row message of binary transport."""
    return read_binary_tuple(message, 6)


def read_binary_tuple(data: bytes, position: int) -> tuple[Row, int]:
    """Read the TupleData of binary transport like `read_text_tuple`, but keep each value's length
    prefix.
    """
    if isinstance(data, memoryview):
        return _read_large_tuple(data, position, KIND_BINARY)
    start = position
    count = data[position] << 8 | data[position + 1]
    position += 2
    row: Row = []
    append = row.append
    for _ in range(count):
        if data[position] != 98:  # KIND_BINARY
            return _read_mixed_tuple(data, start, KIND_BINARY)
        begin = position + 1
        position += 5 + _length_at(data, begin)[0]
        append(data[begin:position])
    return row, position


def _read_mixed_tuple(data: bytes, position: int, value_kind: int) -> tuple[MixedRow, int]:
    count = data[position] << 8 | data[position + 1]
    position += 2
    row = MixedRow()
    null, skip = (NULL, 5) if value_kind == KIND_TEXT else (NULL_BINARY, 1)
    for _ in range(count):
        kind = data[position]
        if kind == value_kind:
            begin = position + skip
            position += 5 + _length_at(data, position + 1)[0]
            row.append(data[begin:position])
        elif kind == KIND_NULL:
            row.append(null)
            row.null_count += 1
            position += 1
        elif kind == KIND_UNCHANGED:
            row.append(UNCHANGED)
            row.unchanged_count += 1
            position += 1
        elif kind == KIND_TEXT and value_kind == KIND_BINARY:
            row.append(AS_TEXT)
            position += 5 + _length_at(data, position + 1)[0]
        else:
            raise ProtocolError(f"unexpected column kind {chr(kind)!r} at offset {position}")
    return row, position


def _read_large_tuple(data: bytes, position: int, value_kind: int) -> tuple[Row, int]:
    """Read TupleData of a large message, whose slices are memoryviews."""
    row, end = _read_mixed_tuple(data, position, value_kind)
    for number, item in enumerate(row):
        if isinstance(item, memoryview):
            row[number] = large_or_bytes(item)
    return row, end


def read_rows(rows: Sequence[PendingRow], binary: bool) -> list[Row]:
    """Return *rows* with all messages read."""
    read = read_binary_row if binary else read_text_row
    return [read(row)[0] if isinstance(row, bytes) else row for row in rows]


def is_partial(row: PendingRow) -> bool:
    """Whether *row* lacks unchanged TOAST values."""
    return isinstance(row, MixedRow) and row.unchanged_count > 0


def unchanged_positions(row: PendingRow) -> frozenset[int]:
    """Return the positions of the unchanged TOAST values in *row*."""
    return frozenset(n for n, value in enumerate(row) if value is UNCHANGED)


def merge(newer: Row, older: Row) -> Row:
    """Fill the unchanged values of *newer* from *older*, which may also lack values."""
    merged = MixedRow()
    for new, old in zip(newer, older, strict=True):
        value = old if new is UNCHANGED else new
        if value is NULL or value is NULL_BINARY:
            merged.null_count += 1
        elif value is UNCHANGED:
            merged.unchanged_count += 1
        merged.append(value)
    return merged
