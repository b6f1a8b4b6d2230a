"""COPY data, byte for byte; `tests/property` reads the data back."""

import pytest

from streamer.apply.rows.copydata import CHUNK_ROWS, RowLayout, constant, encode_rows, escape_text
from streamer.decode.tuples import NULL, NULL_BINARY, MixedRow, Row, read_text_row
from tests.property import encode
from tests.support.implementations import implementation  # noqa: F401


def mixed(*values: bytes) -> Row:
    row = MixedRow()
    row += values
    row.null_count = sum(value is NULL or value is NULL_BINARY for value in values)
    return row


def text(
    rows: list[Row],
    columns: int,
    positions: tuple[int, ...] | None = None,
    prefix: tuple[bytes, ...] = (),
) -> bytes:
    return b"".join(encode_rows(rows, RowLayout(columns, False, positions, prefix)))


@pytest.mark.parametrize(
    ("value", "escaped"),
    [
        (b"plain", b"plain"),
        (b"a\tb", b"a\\tb"),
        (b"a\nb", b"a\\nb"),
        (b"a\rb", b"a\\rb"),
        (b"\\", b"\\\\"),
        (b"\\N", b"\\\\N"),
        (b"\\.", b"\\\\."),
        (b"\\\t", b"\\\\\\t"),
        ("é€😀".encode(), "é€😀".encode()),
    ],
)
def test_characters_that_copy_would_misread_are_escaped(value: bytes, escaped: bytes) -> None:
    assert escape_text(value) == escaped
    assert text([[b"x", value]], 2) == b"x\t" + escaped + b"\n"


def test_values_are_separated_by_tabs_and_rows_by_newlines() -> None:
    assert text([[b"1", b"a"], [b"2", b""]], 2) == b"1\ta\n2\t\n"
    assert text([], 2) == b""


def test_null_is_written_as_such_only_where_it_is_null() -> None:
    rows = [mixed(b"1", NULL), [b"2", b"\\N"], mixed(NULL, b"\\N")]
    assert text(rows, 2) == b"1\t\\N\n2\t\\\\N\n\\N\t\\\\N\n"


def test_one_special_value_does_not_change_the_other_rows_of_its_chunk() -> None:
    rows: list[Row] = [[b"a", b"b"], [b"c\td", b"e"], mixed(b"f", NULL)]
    assert text(rows, 2) == b"a\tb\nc\\td\te\nf\t\\N\n"


def test_a_tab_in_one_value_and_a_missing_one_do_not_cancel_out() -> None:
    assert text([[b"a\t", b"b"], [b"c", b"d\n"]], 2) == b"a\\t\tb\nc\td\\n\n"


def test_a_prefix_is_in_front_of_each_row_and_escaped_too() -> None:
    prefix = (constant("e\tu", binary=False), constant(None, binary=False))
    assert text([[b"1"], [b"2"]], 1, prefix=prefix) == b"e\\tu\t\\N\t1\ne\\tu\t\\N\t2\n"


def test_a_prefix_may_be_all_there_is() -> None:
    rows: list[Row] = [[b"1"], [b"2"]]
    assert text(rows, 1, (), (b"p",)) == b"p\np\n"


def test_columns_are_picked_in_any_order() -> None:
    rows = [mixed(b"1", NULL, b"\\"), [b"2", b"b", b"c"]]
    assert text(rows, 3, (2, 1)) == b"\\\\\t\\N\nc\tb\n"
    assert text(rows, 3, (0,)) == b"1\n2\n"


def test_a_null_that_is_not_picked_does_not_hide_a_backslash() -> None:
    assert text([mixed(NULL, b"\\")], 2, (1,)) == b"\\\\\n"


def test_binary_rows_stand_between_header_and_trailer() -> None:
    layout = RowLayout(2, True, prefix=(constant(7, binary=True, int_size=2),))
    chunks = encode_rows([[b"\0\0\0\2\\N", NULL_BINARY]], layout)
    header = b"PGCOPY\n\xff\r\n\0" + b"\0" * 8
    row = b"\0\3" + b"\0\0\0\2\0\7" + b"\0\0\0\2\\N" + b"\xff\xff\xff\xff"
    assert b"".join(chunks) == header + row + b"\xff\xff"


def test_binary_data_without_rows_is_still_valid() -> None:
    chunks = list(encode_rows([], RowLayout(1, True)))
    assert b"".join(chunks) == b"PGCOPY\n\xff\r\n\0" + b"\0" * 8 + b"\xff\xff"


def test_rows_come_in_chunks_of_whole_rows() -> None:
    rows: list[Row] = [[b"%d" % n] for n in range(2 * CHUNK_ROWS + 1)]
    chunks = list(encode_rows(iter(rows), RowLayout(1, False)))
    assert [chunk.count(b"\n") for chunk in chunks] == [CHUNK_ROWS, CHUNK_ROWS, 1]
    assert b"".join(chunks).split() == [row[0] for row in rows]


@pytest.mark.parametrize(
    ("value", "binary", "expected"),
    [
        (None, False, NULL),
        (None, True, b"\xff\xff\xff\xff"),
        (5, False, b"5"),
        (-1, True, b"\0\0\0\4\xff\xff\xff\xff"),
        ("é", False, "é".encode()),
        ("é", True, b"\0\0\0\2" + "é".encode()),
    ],
)
def test_constants_of_ours_become_items_of_rows(
    value: str | int | None, binary: bool, expected: bytes
) -> None:
    assert constant(value, binary=binary) == expected


def test_rows_of_the_decoder_pass_unchanged() -> None:
    row, _ = read_text_row(encode.insert(1, [b"1", None, b"x\\y"]))
    assert text([row], 3) == b"1\t\\N\tx\\\\y\n"


def test_a_message_is_written_like_the_row_it_holds() -> None:
    message = encode.insert(1, [b"1", None, b"x\\y\t"])
    layout = RowLayout(3, False, (2, 0, 1), (b"p",))
    assert b"".join(encode_rows([message], layout)) == b"p\tx\\\\y\\t\t1\t\\N\n"
