"""Rows as COPY data.

PostgreSQL documentation, COPY, "Text Format" and "Binary Format". Rows of text transport become
text rows, rows of binary transport binary rows, with unchanged values. A check of each chunk
decides about escapes. Most chunks contain no special bytes except the separators, and need no
escapes. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from streamer.compiled import choice
from streamer.decode.large_values import PIECE_BYTES, LargeValue
from streamer.decode.pgoutput import to_datetime
from streamer.decode.text_conversion import UnconvertedText
from streamer.decode.tuples import NULL, NULL_BINARY, MixedRow, PendingRow, Row, Value, read_rows
from streamer.errors.error_classes import RowTooLargeError, UntranslatableTextError

if TYPE_CHECKING:
    from streamer.compiled._compiled import RowEncoder

CHUNK_ROWS: Final = 2000
COMPILED_COLUMNS_MAX: Final = 1664
"""MaxTupleAttributeNumber of PostgreSQL. A staged row never has more columns."""
ROW_BYTES_MAX: Final = 0x3FFFFFFF
"""PostgreSQL's MaxAllocSize, the limit of a line of COPY, or of a value in binary."""

_BINARY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_BINARY_TRAILER: Final = b"\xff\xff"


def escape_text(value: bytes) -> bytes:
    """Escape a value for COPY's text format."""
    return (
        value.replace(b"\\", b"\\\\")
        .replace(b"\t", b"\\t")
        .replace(b"\n", b"\\n")
        .replace(b"\r", b"\\r")
    )


def constant(value: str | int | None, *, binary: bool, int_size: int = 4) -> Value:
    """Encode a value that streamer adds, such as a sid, as an item of a row."""
    if value is None:
        return b"\xff\xff\xff\xff" if binary else NULL
    if not binary:
        return str(value).encode()
    data = (
        value.encode() if isinstance(value, str) else value.to_bytes(int_size, "big", signed=True)
    )
    return len(data).to_bytes(4, "big") + data


def commit_time_value(commit_time: int, binary: bool) -> Value:
    """Encode a time, in microseconds since 2000, as an item of a row."""
    if binary:
        return constant(commit_time, binary=True, int_size=8)
    return str(to_datetime(commit_time)).encode()


@dataclass(frozen=True)
class RowLayout:
    """How rows of *columns* items become rows of COPY data.

    ``positions``: the items to write, in order; None for all. ``prefix``: leading items that all
    rows share. ``lead_count``: the number of columns after the prefix that differ by row, see
    `encode_led_rows`.
    """

    columns: int
    binary: bool
    positions: tuple[int, ...] | None = None
    prefix: tuple[Value, ...] = ()
    lead_count: int = 0

    @cached_property
    def width(self) -> int:
        """The number of written columns."""
        written = self.columns if self.positions is None else len(self.positions)
        return len(self.prefix) + self.lead_count + written

    @cached_property
    def head(self) -> bytes:
        """COPY data that each row begins with."""
        if self.binary:
            return self.width.to_bytes(2, "big") + b"".join(self.prefix)
        items = [escape_if_needed(value) for value in self.prefix]
        return b"\t".join(items if self.width == len(items) else [*items, b""])

    @cached_property
    def pick(self) -> Callable[[Row], Sequence[Value]] | None:
        """Select the written items of a row; None for all items in order."""
        positions = self.positions
        if positions is None or positions == tuple(range(self.columns)):
            return None
        if len(positions) == 1:
            (position,) = positions
            return lambda row: (row[position],)
        return itemgetter(*positions) if positions else lambda row: ()

    @cached_property
    def encoder(self) -> "RowEncoder | None":
        """The compiled encoder of rows, if this process has the compiled code."""
        if choice.compiled is None or self.columns > COMPILED_COLUMNS_MAX:
            return None
        positions = tuple(range(self.columns)) if self.positions is None else self.positions
        null = NULL_BINARY if self.binary else NULL
        encoder: RowEncoder = choice.compiled.RowEncoder(
            self.columns, positions, binary=self.binary, null=null
        )
        return encoder


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows for a table, as *chunks* of COPY data.

    ``first``: the number of the first row, for errors about a row.
    """

    table: str
    columns: list[str]
    chunks: Iterator[bytes]
    binary: bool
    namespace: str = "pg_temp"
    first: int = 0


def encode_rows(rows: Iterable[PendingRow], layout: RowLayout) -> Iterator[bytes]:
    """Yield COPY data for *rows*: whole rows at a time, except rows with large values.

    A row is a list of items, or a row message with a single tuple.
    """
    return _framed(_encode_chunks(rows, layout), layout.binary)


def _framed(chunks: Iterable[bytes], binary: bool) -> Iterator[bytes]:
    """Yield *chunks* with the header and trailer of the format. Each yielded chunk costs a message,
    so both are parts of a chunk.
    """
    if not binary:
        yield from chunks
        return
    ahead = _BINARY_HEADER
    for number, chunk in enumerate(chunks):
        if number:
            yield ahead
        ahead = chunk if number else ahead + chunk
    yield ahead + _BINARY_TRAILER


def _encode_chunks(rows: Iterable[PendingRow], layout: RowLayout) -> Iterator[bytes]:
    remaining, done = iter(rows), 0
    while chunk := list(islice(remaining, CHUNK_ROWS)):
        yield from _encode(chunk, layout, done)
        done += len(chunk)


def encode_led_rows(
    chunks: Iterable[tuple[list[bytes], list[PendingRow]]], layout: RowLayout
) -> Iterator[bytes]:
    """Yield COPY data for rows, each after a lead: COPY data of ``lead_count`` columns.

    A chunk contains leads and rows. In text a lead ends with a tab if the row has values. No row
    holds a large value.
    """
    return _framed(_encode_led_chunks(chunks, layout), layout.binary)


def _encode_led_chunks(
    chunks: Iterable[tuple[list[bytes], list[PendingRow]]], layout: RowLayout
) -> Iterator[bytes]:
    for leads, pending in chunks:
        if layout.encoder is not None:
            yield layout.encoder.encode(layout.head, pending, leads)
            continue
        head, pick = layout.head, layout.pick
        whole = read_rows(pending, layout.binary)
        picked: Iterable[Sequence[Any]] = whole if pick is None else map(pick, whole)
        if layout.binary:
            yield b"".join(
                head + lead + b"".join(row) for lead, row in zip(leads, picked, strict=True)
            )
        else:
            yield b"".join(
                head + lead + b"\t".join(map(escape_if_needed, row)) + b"\n"
                for lead, row in zip(leads, picked, strict=True)
            )


def _encode(chunk: list[PendingRow], layout: RowLayout, done: int) -> Iterable[bytes]:
    encoder = layout.encoder
    try:
        if encoder is not None:
            return (encoder.encode(layout.head, chunk),)
        rows = read_rows(chunk, layout.binary)
        encode = _encode_binary if layout.binary else _encode_text
        return (encode(rows, layout),)
    except TypeError:  # join refuses a LargeValue
        return _encode_in_pieces(read_rows(chunk, layout.binary), layout, done)


def _encode_in_pieces(rows: list[Row], layout: RowLayout, done: int) -> Iterator[bytes]:
    """Yield COPY data for *rows*, some of which hold large values, in pieces.

    *done*: the number of earlier rows of the COPY. Raises RowTooLargeError.
    """
    binary = layout.binary
    head = layout.width.to_bytes(2, "big") if binary else b""
    pick = layout.pick
    for number, row in enumerate(rows, done):
        buffer = [head]
        buffered = size = 0
        items = [*layout.prefix, *(row if pick is None else pick(row))]
        for position, item in enumerate(items):
            if not binary and position:
                buffer.append(b"\t")
            if isinstance(item, UnconvertedText) and (missing := item.missing()) is not None:
                raise UntranslatableTextError(number, item.conversion.encoding, missing)
            parts = item.pieces() if isinstance(item, LargeValue) else (item,)
            for part in parts:
                data = bytes(part) if binary else escape_if_needed(part)
                buffer.append(data)
                buffered += len(data)
                size += len(data)
                if size > ROW_BYTES_MAX:
                    raise RowTooLargeError(number, sum(map(len, items)))
                if buffered >= PIECE_BYTES:
                    yield b"".join(buffer)
                    buffer.clear()
                    buffered = 0
        if not binary:
            buffer.append(b"\n")
        yield b"".join(buffer)


def _encode_text(rows: list[Row], layout: RowLayout) -> bytes:
    head, pick = layout.head, layout.pick
    picked: Iterable[Sequence[Any]] = rows if pick is None else map(pick, rows)
    data = head + (b"\n" + head).join(map(b"\t".join, picked)) + b"\n"
    if _is_clean(data, rows, layout):
        return data
    picked = rows if pick is None else map(pick, rows)
    lines = (head + b"\t".join([escape_if_needed(value) for value in row]) for row in picked)
    return b"\n".join(lines) + b"\n"


def escape_if_needed(value: Value) -> bytes:
    """Escape a value, but not the NULL marker."""
    return bytes(value) if value is NULL else escape_text(bytes(value))


def _is_clean(data: bytes, rows: list[Row], layout: RowLayout) -> bool:
    """Whether *data* has no special bytes except separators and NULL markers."""
    count = len(rows)
    backslashes = count * layout.head.count(b"\\")
    if b"\\" in data and data.count(b"\\") != backslashes + _count_nulls(rows, layout.pick):
        return False
    separators = count * (layout.width - 1)
    return data.count(b"\n") == count and data.count(b"\t") == separators and b"\r" not in data


def _count_nulls(rows: list[Row], pick: Callable[[Row], Sequence[Value]] | None) -> int:
    mixed = [row for row in rows if isinstance(row, MixedRow)]
    if pick is None:
        return sum(row.null_count for row in mixed)
    return sum(value is NULL for row in mixed for value in pick(row))


def _encode_binary(rows: list[Row], layout: RowLayout) -> bytes:
    head, pick = layout.head, layout.pick
    picked: Iterable[Sequence[Any]] = rows if pick is None else map(pick, rows)
    return head + head.join(map(b"".join, picked))
