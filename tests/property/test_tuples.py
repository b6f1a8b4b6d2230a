"""The decoder reads rows as written, for any values."""

import struct
from typing import cast
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from streamer.decode import large_values
from streamer.decode.large_values import LargeValue
from streamer.decode.tuples import (
    NULL,
    NULL_BINARY,
    UNCHANGED,
    MixedRow,
    Row,
    is_partial,
    merge,
    read_binary_row,
    read_binary_tuple,
    read_text_row,
    read_text_tuple,
)
from streamer.errors.error_classes import ProtocolError
from tests.property import encode
from tests.property.encode import Cell

SEPARATOR = b"t\0\0\0"
"""Patterns that the fast path recognises."""

values = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"", b"t", b"tt", b"n", b"u", b"\\N", b"\\U", SEPARATOR, SEPARATOR + b"\x01"]),
    st.lists(st.sampled_from([b"t", b"\0", b"\x01", b"\x04", b"a"]), max_size=12).map(b"".join),
    st.integers(250, 262).map(lambda size: b"t" * size),
    st.just(SEPARATOR * 80),
)
cells: st.SearchStrategy[Cell] = st.one_of(values, st.none(), st.just("toast"))
rows = st.lists(cells, max_size=6)
relids = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0x74000000, 0x00740000, 0x00000074, 0x74747474, 0x49740000]),
)


def expected(row: list[Cell], *, binary: bool) -> list[object]:
    """The result of reading *row*: sentinels for NULL and unchanged TOAST, lengths in front in binary."""
    items: list[object] = []
    for cell in row:
        if cell is None:
            items.append(NULL_BINARY if binary else NULL)
        elif isinstance(cell, bytes):
            items.append(struct.pack(">I", len(cell)) + cell if binary else cell)
        else:
            items.append(UNCHANGED)
    return items


def check(row: Row, wanted: list[object], source: list[Cell]) -> None:
    assert len(row) == len(wanted)
    for item, want in zip(row, wanted, strict=True):
        if isinstance(want, bytes):
            assert item.__class__ is bytes
            assert item == want
        else:
            assert item is want
    unchanged, nulls = source.count(encode.TOAST), source.count(None)
    assert is_partial(row) == (unchanged > 0)
    assert isinstance(row, MixedRow) == (unchanged + nulls > 0)
    if isinstance(row, MixedRow):
        assert (row.null_count, row.unchanged_count) == (nulls, unchanged)


@given(relids, rows)
def test_a_text_row_is_read_as_it_was_written(relid: int, source: list[Cell]) -> None:
    payload = encode.insert(relid, source)
    row, end = read_text_row(payload)
    assert end == len(payload)
    check(row, expected(source, binary=False), source)


@given(relids, rows)
def test_a_binary_row_is_read_as_it_was_written(relid: int, source: list[Cell]) -> None:
    payload = encode.insert(relid, source, binary=True)
    row, end = read_binary_row(payload)
    assert end == len(payload)
    check(row, expected(source, binary=True), source)


@given(rows, rows, st.booleans())
def test_two_rows_of_a_message_are_distinguished(
    old: list[Cell], new: list[Cell], binary: bool
) -> None:
    payload = encode.update(16385, new, old=old, binary=binary)
    read = read_binary_tuple if binary else read_text_tuple
    row, position = read(payload, 6)
    check(row, expected(old, binary=binary), old)
    assert payload[position : position + 1] == b"N"
    row, end = read(payload, position + 1)
    check(row, expected(new, binary=binary), new)
    assert end == len(payload)


@given(relids, rows, rows, st.booleans())
def test_a_large_message_is_read_like_any_other(
    relid: int, old: list[Cell], new: list[Cell], binary: bool
) -> None:
    payload = encode.update(relid, new, old=old, binary=binary)
    read = read_binary_tuple if binary else read_text_tuple
    with mock.patch.object(large_values, "LARGE_VALUE_BYTES", 5):
        row, position = read(cast("bytes", memoryview(payload)), 6)
        following, end = read(cast("bytes", memoryview(payload)), position + 1)
    assert end == len(payload)
    for found, source in ((row, old), (following, new)):
        wanted = expected(source, binary=binary)
        assert found == wanted
        assert list(map(hash, found)) == list(map(hash, wanted))
        assert is_partial(found) == (encode.TOAST in source)
        for item in found:
            assert isinstance(item, LargeValue) == (len(item) > 5 and item.__class__ is not bytes)


def outcome(read: object, payload: bytes, *arguments: int) -> tuple[list[bytes], int] | str:
    assert callable(read)
    try:
        row, end = read(payload, *arguments)
    except (IndexError, struct.error):
        return "truncated"
    except ProtocolError:
        return "refused"
    return (list(row), end) if end == len(payload) else "truncated"


broken = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.lists(st.sampled_from([SEPARATOR, b"\x01", b"a", b"n", b"u", b"\0", b"I"]), max_size=15).map(
        b"".join
    ),
)


@given(broken)
def test_the_fast_way_to_read_a_row_never_differs_from_the_slow_one(rest: bytes) -> None:
    payload = b"I\0\0\0\x01N" + rest
    assert outcome(read_text_row, payload) == outcome(read_text_tuple, payload, 6)


@given(relids, rows, st.data())
def test_the_fast_way_agrees_on_truncated_and_trailing_bytes(
    relid: int, source: list[Cell], data: st.DataObject
) -> None:
    payload = encode.insert(relid, source)
    cut = payload[: data.draw(st.integers(6, len(payload)))]
    longer = payload + data.draw(st.sampled_from([b"x", b"n", b"\0", SEPARATOR, SEPARATOR + b"\0"]))
    for message in (cut, longer):
        assert outcome(read_text_row, message) == outcome(read_text_tuple, message, 6)
        assert message == payload or isinstance(outcome(read_text_row, message), str)


@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_a_row_or_an_expected_error(rest: bytes, binary: bool) -> None:
    read = read_binary_row if binary else read_text_row
    outcome(read, b"I\0\0\0\x01N" + rest)


@given(st.lists(st.tuples(cells, cells), max_size=6), st.booleans())
def test_merging_keeps_newer_values_and_fills_unknown_values(
    pairs: list[tuple[Cell, Cell]], binary: bool
) -> None:
    newer, older = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    read = read_binary_tuple if binary else read_text_tuple
    read_rows = [read(encode.tuple_data(row, binary=binary), 0)[0] for row in (newer, older)]
    wanted: list[Cell] = [old if new == encode.TOAST else new for new, old in pairs]
    merged = merge(*read_rows)
    assert merged == expected(wanted, binary=binary)
    assert is_partial(merged) == (encode.TOAST in wanted)
    assert isinstance(merged, MixedRow)
    assert merged.null_count == wanted.count(None)
