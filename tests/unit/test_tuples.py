"""Reading rows: the shapes that matter, case by case. `tests/property` tries the rest."""

import struct

import pytest

from streamer.decode.tuples import (
    AS_TEXT,
    NULL,
    NULL_BINARY,
    UNCHANGED,
    MixedRow,
    is_partial,
    merge,
    read_binary_row,
    read_binary_tuple,
    read_text_row,
    read_text_tuple,
)
from streamer.errors.error_classes import ProtocolError
from tests.property import encode
from tests.property.encode import TOAST, Cell


@pytest.mark.parametrize(
    "value", [b"", b"x", b"t", b"\\N", b"x" * 255, b"x" * 256, b"t" * 70_000, b"t\0\0\0\x01"]
)
def test_values_of_every_length_are_read(value: bytes) -> None:
    payload = encode.insert(1, [b"a", value, b""])
    assert read_text_row(payload) == ([b"a", value, b""], len(payload))
    assert read_text_tuple(payload, 6) == ([b"a", value, b""], len(payload))


def test_a_row_without_columns_is_read() -> None:
    payload = encode.insert(1, [])
    assert read_text_row(payload) == ([], len(payload))
    assert read_binary_row(payload) == ([], len(payload))


@pytest.mark.parametrize("relid", [0x74000000, 0x00740000, 0x00007400, 0x74747474])
def test_a_relid_that_looks_like_a_value_changes_nothing(relid: int) -> None:
    payload = encode.insert(relid, [b"a", b"b"])
    assert read_text_row(payload) == ([b"a", b"b"], len(payload))


def test_116_columns_look_like_the_kind_of_a_value() -> None:
    row: list[Cell] = [b"x"] * 0x74
    payload = encode.insert(1, row)
    assert read_text_row(payload) == (row, len(payload))


def test_null_differs_from_values_that_look_like_null() -> None:
    row, _ = read_text_row(encode.insert(1, [None, b"\\N", b""]))
    assert row[0] is NULL
    assert row[1:] == [b"\\N", b""]
    assert row[1] != NULL
    assert isinstance(row, MixedRow)
    assert (row.null_count, row.unchanged_count) == (1, 0)


def test_binary_values_keep_their_length() -> None:
    row, end = read_binary_row(encode.insert(1, [b"ab", None, b"", TOAST], binary=True))
    assert row[0] == b"\0\0\0\2ab"
    assert row[1] is NULL_BINARY
    assert row[2] == b"\0\0\0\0"
    assert row[3] is UNCHANGED
    assert end == len(encode.insert(1, [b"ab", None, b"", TOAST], binary=True))


def test_a_row_is_partial_when_a_value_was_not_sent() -> None:
    assert is_partial(read_text_row(encode.insert(1, [b"a", TOAST]))[0])
    assert not is_partial(read_text_row(encode.insert(1, [b"a", None]))[0])
    assert not is_partial(read_text_row(encode.insert(1, [b"a"]))[0])


def test_binary_values_are_refused_in_text_transport() -> None:
    with pytest.raises(ProtocolError, match="unexpected column kind 'b' at offset 2"):
        read_text_tuple(encode.tuple_data([b"x"], binary=True), 0)


def test_a_text_in_binary_transport_is_no_value() -> None:
    text = encode.tuple_data([b"x"])[2:]
    binary = encode.tuple_data([b"y"], binary=True)[2:]
    row, end = read_binary_tuple(b"\0\3" + text + b"n" + binary, 0)
    assert row[0] is AS_TEXT
    assert row[1:] == [NULL_BINARY, b"\0\0\0\1y"]
    assert end == 2 + len(text) + 1 + len(binary)
    assert not is_partial(row)
    # The target rejects a value that should not have come so far: a length of -2.
    assert b"".join(row).startswith(b"\xff\xff\xff\xfe\xff\xff\xff\xff")


def test_truncation_shows_in_the_end_or_as_an_index_error() -> None:
    payload = encode.insert(1, [b"abc", b"d" * 300, None])
    for size in range(6, len(payload)):
        for read in (read_text_row, lambda message: read_text_tuple(message, 6)):
            try:
                _, end = read(payload[:size])
            except (IndexError, struct.error):
                continue
            assert end != size


def test_merging_takes_only_unsent_values_from_the_older_row() -> None:
    newer, _ = read_text_row(encode.insert(1, [b"1", TOAST, TOAST, None, TOAST]))
    older, _ = read_text_row(encode.insert(1, [b"0", b"big", None, b"x", TOAST]))
    merged = merge(newer, older)
    assert merged == [b"1", b"big", NULL, NULL, UNCHANGED]
    assert isinstance(merged, MixedRow)
    assert (merged.null_count, merged.unchanged_count) == (2, 1)
    whole = merge(merged, [b"", b"", b"", b"", b"known"])
    assert whole[4] == b"known"
    assert not is_partial(whole)
