"""Data encoded for COPY, read by a parser after PostgreSQL's documentation."""

import struct
from collections.abc import Iterator, Sequence
from typing import cast
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from streamer.apply.rows import copydata
from streamer.apply.rows.copydata import RowLayout, constant, encode_rows
from streamer.decode import large_values
from streamer.decode.tuples import (
    NULL,
    PendingRow,
    Row,
    read_binary_row,
    read_binary_tuple,
    read_text_row,
    read_text_tuple,
)
from tests.property import encode
from tests.support.implementations import implementation  # noqa: F401

Cells = list[bytes | None]

SIGNATURE = b"PGCOPY\n\xff\r\n\0"
ESCAPES = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def parse_text(data: bytes) -> Iterator[Cells]:
    """COPY, "Text Format": lines end with a newline, values are separated by tabs."""
    assert data == b"" or data.endswith(b"\n")
    for line in data.split(b"\n")[:-1]:
        assert line != b"\\.", "the end-of-data marker"
        assert b"\r" not in line, "a carriage return that is not escaped"
        yield [None if field == b"\\N" else unescape(field) for field in line.split(b"\t")]


def unescape(field: bytes) -> bytes:
    value, position = [], 0
    while position < len(field):
        letter = field[position : position + 1]
        if letter == b"\\":
            position += 1
            letter = field[position : position + 1]
            assert letter, "a backslash at the end of a value"
            assert not letter.isdigit(), "an octal escape"
            assert letter != b"x", "a hexadecimal escape"
            letter = ESCAPES.get(letter, letter)
        value.append(letter)
        position += 1
    return b"".join(value)


def parse_binary(data: bytes) -> Iterator[Cells]:
    """COPY, "Binary Format": a header, rows of values with lengths, a trailer."""
    assert data.startswith(SIGNATURE + struct.pack(">II", 0, 0))
    position = len(SIGNATURE) + 8
    while True:
        (count,) = struct.unpack_from(">h", data, position)
        position += 2
        if count == -1:
            break
        row: Cells = []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", data, position)
            position += 4
            row.append(None if length < 0 else data[position : position + length])
            position += max(length, 0)
        yield row
    assert position == len(data)


special = st.lists(
    st.sampled_from([b"\\", b"\t", b"\n", b"\r", b"N", b".", b"a", b"\x08", b"0", b"x"]), max_size=6
).map(b"".join)
text_values = st.one_of(
    special,
    st.sampled_from([b"", b"\\N", b"\\.", b"\\", b"plain"]),
    st.binary(max_size=6).map(lambda value: value.replace(b"\0", b"")),
)
binary_values = st.binary(max_size=6)


def tables(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[Cells]]:
    return st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.one_of(values, values, st.none()), min_size=width, max_size=width),
            max_size=8,
        )
    )


def as_rows(table: list[Cells], binary: bool) -> list[Row]:
    """Rows in the form of the decoder."""
    read = read_binary_row if binary else read_text_row
    return [read(encode.insert(1, row, binary=binary))[0] for row in table]


def encoded(
    rows: Sequence[PendingRow],
    *,
    binary: bool,
    columns: int,
    positions: tuple[int, ...] | None = None,
    prefix: tuple[bytes, ...] = (),
    chunk_rows: int = 3,
) -> list[Cells]:
    with mock.patch.object(copydata, "CHUNK_ROWS", chunk_rows):
        data = b"".join(encode_rows(rows, RowLayout(columns, binary, positions, prefix)))
    return list(parse_binary(data) if binary else parse_text(data))


@given(tables(text_values), st.integers(1, 9))
def test_text_rows_are_read_back(table: list[Cells], chunk_rows: int) -> None:
    width = len(table[0]) if table else 1
    rows = as_rows(table, binary=False)
    assert encoded(rows, binary=False, columns=width, chunk_rows=chunk_rows) == table


@given(tables(binary_values), st.integers(1, 9))
def test_binary_rows_are_read_back(table: list[Cells], chunk_rows: int) -> None:
    width = len(table[0]) if table else 1
    rows = as_rows(table, binary=True)
    assert encoded(rows, binary=True, columns=width, chunk_rows=chunk_rows) == table


@given(
    st.booleans().flatmap(
        lambda b: st.tuples(st.just(b), tables(binary_values if b else text_values))
    ),
    st.integers(1, 9),
)
def test_rows_with_large_values_are_read_back(
    case: tuple[bool, list[Cells]], piece_bytes: int
) -> None:
    """The pieces are cut anywhere, also inside an escape sequence."""
    binary, table = case
    with (
        mock.patch.object(large_values, "LARGE_VALUE_BYTES", 4 + 2 if binary else 2),
        mock.patch.object(large_values, "PIECE_BYTES", piece_bytes),
        mock.patch.object(copydata, "PIECE_BYTES", piece_bytes),
    ):
        read = read_binary_tuple if binary else read_text_tuple
        rows = [
            read(cast("bytes", memoryview(encode.insert(1, row, binary=binary))), 6)[0]
            for row in table
        ]
        prefix = (constant(7, binary=binary, int_size=2),)
        columns = len(table[0]) if table else 1
        found = encoded(rows, binary=binary, columns=columns, prefix=prefix)
    assert found == [[as_cell(7, binary), *row] for row in table]


@st.composite
def picks(draw: st.DrawFn) -> tuple[list[Cells], list[int], list[str | int | None], bool]:
    binary = draw(st.booleans())
    table = draw(tables(binary_values if binary else text_values))
    width = len(table[0]) if table else 1
    positions = draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=4))
    prefix: list[str | int | None] = draw(
        st.lists(
            st.one_of(st.none(), st.integers(-9, 9), st.sampled_from(["eu", "a\tb\\", "\\N", "é"])),
            max_size=2,
        )
    )
    return table, positions, prefix, binary


@given(picks())
def test_picked_columns_after_a_prefix_are_read_back(
    case: tuple[list[Cells], list[int], list[str | int | None], bool],
) -> None:
    table, positions, prefix, binary = case
    options = {
        "binary": binary,
        "columns": len(table[0]) if table else 1,
        "positions": tuple(positions),
        "prefix": tuple(constant(value, binary=binary, int_size=2) for value in prefix),
    }
    read = encoded(as_rows(table, binary), **options)  # type: ignore[arg-type]
    messages = [encode.insert(1, row, binary=binary) for row in table]
    assert encoded(messages, **options) == read  # type: ignore[arg-type]
    assert read == [
        [*(as_cell(value, binary) for value in prefix), *(row[n] for n in positions)]
        for row in table
    ]


def as_cell(value: str | int | None, binary: bool) -> bytes | None:
    """A constant in COPY data."""
    if isinstance(value, int):
        return struct.pack(">h", value) if binary else b"%d" % value
    return None if value is None else value.encode()


@given(tables(text_values))
def test_rows_of_our_own_making_may_hold_nulls_in_plain_lists(table: list[Cells]) -> None:
    """Rows for exact order are plain lists, not those of the decoder."""
    width = len(table[0]) if table else 1
    rows = [[NULL if cell is None else cell for cell in row] for row in table]
    assert encoded(rows, binary=False, columns=width) == table
