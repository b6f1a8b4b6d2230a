"""Rows as COPY data.

PostgreSQL documentation, COPY, "Text Format" and "Binary Format". Rows of text transport become
text rows, rows of binary transport binary rows; values are passed on as they came. Escaping is
checked once per chunk: a chunk whose special bytes are exactly the separators we put there needs
none, and that is almost every chunk. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from streamer.decode.large import PIECE_BYTES, LargeValue
from streamer.decode.text_conversion import UnconvertedText
from streamer.decode.tuples import NULL, MixedRow, Row, Value
from streamer.errors import RowTooLargeError, UntranslatableTextError

CHUNK_ROWS: Final = 2000
ROW_BYTES_MAX: Final = 0x3FFFFFFF
"""PostgreSQL's MaxAllocSize: COPY keeps a line, or a value in binary, in one piece of memory."""

Picker = Callable[[Row], Sequence[Value]] | None

_BINARY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_BINARY_TRAILER: Final = b"\xff\xff"


def escape_text(value: bytes) -> bytes:
    """Escape one value for COPY's text format."""
    return (
        value.replace(b"\\", b"\\\\")
        .replace(b"\t", b"\\t")
        .replace(b"\n", b"\\n")
        .replace(b"\r", b"\\r")
    )


def constant(value: str | int | None, *, binary: bool, int_size: int = 4) -> Value:
    """Turn a value of ours into an item of a row."""
    if value is None:
        return b"\xff\xff\xff\xff" if binary else NULL
    if not binary:
        return str(value).encode()
    data = (
        value.encode() if isinstance(value, str) else value.to_bytes(int_size, "big", signed=True)
    )
    return len(data).to_bytes(4, "big") + data


def encode_rows(
    rows: Iterable[Row], *, pick: Picker, prefix: Sequence[Value], width: int, binary: bool
) -> Iterator[bytes]:
    """Yield COPY data for *rows*: whole rows at a time, but for rows with large values.

    *pick* takes the columns out of a row that are wanted, all by default; *prefix* are items that
    come before them in every row; *width* is how many items that makes in all.
    """
    if binary:
        yield _BINARY_HEADER
    chunk: list[Row] = []
    done = 0
    for row in rows:
        chunk.append(row)
        if len(chunk) >= CHUNK_ROWS:
            yield from _encode(chunk, pick, prefix, width, binary, done)
            done += len(chunk)
            chunk = []
    if chunk:
        yield from _encode(chunk, pick, prefix, width, binary, done)
    if binary:
        yield _BINARY_TRAILER


def _encode(
    rows: list[Row], pick: Picker, prefix: Sequence[Value], width: int, binary: bool, done: int
) -> Iterable[bytes]:
    encode = _encode_binary if binary else _encode_text
    try:
        return (encode(rows, pick, prefix, width),)
    except TypeError:  # nothing joins a LargeValue
        return _encode_in_pieces(rows, pick, prefix, width, binary, done)


def _encode_in_pieces(
    rows: list[Row], pick: Picker, prefix: Sequence[Value], width: int, binary: bool, done: int
) -> Iterator[bytes]:
    """Yield COPY data for *rows*, some of which hold large values, in pieces.

    *done*: how many rows of the same COPY came before. Raises RowTooLargeError.
    """
    head = width.to_bytes(2, "big") if binary else b""
    for number, row in enumerate(rows, done):
        buffer = [head]
        buffered = size = 0
        items = [*prefix, *(row if pick is None else pick(row))]
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


def _encode_text(rows: list[Row], pick: Picker, prefix: Sequence[Value], width: int) -> bytes:
    head = b"".join(escape_if_needed(value) + b"\t" for value in prefix)
    if width == len(prefix):
        head = head[:-1]
    picked: Iterable[Sequence[Any]] = rows if pick is None else map(pick, rows)
    data = head + (b"\n" + head).join(map(b"\t".join, picked)) + b"\n"
    if _is_clean(data, rows, pick, head, width):
        return data
    picked = rows if pick is None else map(pick, rows)
    lines = (head + b"\t".join([escape_if_needed(value) for value in row]) for row in picked)
    return b"\n".join(lines) + b"\n"


def escape_if_needed(value: Value) -> bytes:
    """Escape a value, but not the NULL marker."""
    return bytes(value) if value is NULL else escape_text(bytes(value))


def _is_clean(data: bytes, rows: list[Row], pick: Picker, head: bytes, width: int) -> bool:
    """Whether no byte of *data* is special but those that separate and the NULL markers."""
    count = len(rows)
    if b"\\" in data and data.count(b"\\") != count * head.count(b"\\") + _count_nulls(rows, pick):
        return False
    separators = count * (width - 1)
    return data.count(b"\n") == count and data.count(b"\t") == separators and b"\r" not in data


def _count_nulls(rows: list[Row], pick: Picker) -> int:
    mixed = [row for row in rows if isinstance(row, MixedRow)]
    if pick is None:
        return sum(row.null_count for row in mixed)
    return sum(value is NULL for row in mixed for value in pick(row))


def _encode_binary(rows: list[Row], pick: Picker, prefix: Sequence[Value], width: int) -> bytes:
    head = width.to_bytes(2, "big") + b"".join(prefix)
    picked: Iterable[Sequence[Any]] = rows if pick is None else map(pick, rows)
    return head + head.join(map(b"".join, picked))
