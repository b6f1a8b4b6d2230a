"""Positions have PostgreSQL's notation, and the parser rejects any different text."""

import pytest

from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0/0", 0),
        ("0/14C0378", 0x14C0378),
        ("16/B374D848", 0x16_B374D848),
        ("FFFFFFFF/FFFFFFFF", 2**64 - 1),
    ],
)
def test_a_position_is_written_as_two_hexadecimal_halves(text: str, number: int) -> None:
    assert Lsn.parse(text) == number
    assert str(Lsn(number)) == text
    assert repr(Lsn(number)) == f"Lsn('{text}')"


def test_lower_case_and_leading_zeros_are_read() -> None:
    assert Lsn.parse("00000016/0b374d84") == Lsn(0x16_0B374D84)


@pytest.mark.parametrize(
    "text",
    ["", "/", "1", "1/", "/1", "1/2/3", "g/1", "123456789/1", "1/123456789", "1.0/1"],
)
def test_an_invalid_position_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN") as caught:
        Lsn.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["-1/1", "+1/1", "1/-1", " 1/1", "1/1\n", "0x1/1", "1_0/1", "\u0661/1"]
)
def test_a_number_of_python_that_postgresql_rejects_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        Lsn.parse(text)


def test_positions_are_ordered_like_numbers_not_like_their_text() -> None:
    assert Lsn.parse("9/0") < Lsn.parse("10/0")
    assert max(Lsn(1), Lsn(2)) == Lsn.parse("0/2")


def test_nothing_comes_before_everything() -> None:
    assert INVALID_LSN < Lsn(1) < LSN_MAX
    assert str(INVALID_LSN) == "0/0"
    assert str(LSN_MAX) == "FFFFFFFF/FFFFFFFF"
