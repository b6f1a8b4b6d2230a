"""Text of any encoding becomes UTF-8, and a character that UTF-8 lacks is never passed on."""

import pytest

from streamer.apply.rows.copydata import RowLayout, encode_rows
from streamer.decode import large_values
from streamer.decode.text_conversion import TextConversion, UnconvertedText
from streamer.decode.tuples import NULL, UNCHANGED, read_text_row
from streamer.errors.error_classes import ProtocolError, UntranslatableTextError
from tests.property import encode

WIN1252 = TextConversion("WIN1252", {b"\x80": "\u20ac".encode(), b"\xe9": "\u00e9".encode()})
EUC_JP = TextConversion(
    "EUC_JP",
    {
        b"\xa4\xa2": "\u3042".encode(),
        b"\x8e\xb1": "\uff71".encode(),
        b"\x8f\xb0\xa1": b"\xe4\xb8\x82",
    },
)


def test_text_of_one_and_of_several_bytes() -> None:
    assert WIN1252.convert(b"caf\xe9 \x80") == "caf\u00e9 \u20ac".encode()
    assert EUC_JP.convert(b"a\xa4\xa2\x8e\xb1\x8f\xb0\xa1b") == "a\u3042\uff71\u4e02b".encode()
    assert EUC_JP.convert_name(b"\xa4\xa2") == "\u3042"
    with pytest.raises(ProtocolError):
        WIN1252.convert_name(b"\x81")


@pytest.mark.parametrize("conversion", [WIN1252, EUC_JP], ids=["one", "several"])
def test_a_missing_character_is_refused_and_never_valid_utf8(conversion: TextConversion) -> None:
    stored = b"x\xc3\xa9"  # read as UTF-8 this is an e with an accent
    value = conversion.convert(stored)
    assert isinstance(value, UnconvertedText)
    with pytest.raises(UnicodeDecodeError):
        bytes(value).decode()
    assert value.missing() in (b"\xc3", b"\xc3\xa9")
    escaped = value.decode("utf-8", "surrogateescape")
    assert escaped.encode("utf-8", "surrogateescape") == bytes(value)
    rows = [[b"1", b"good"], [b"2", value]]
    with pytest.raises(UntranslatableTextError) as caught:
        b"".join(encode_rows(rows, RowLayout(2, binary=False)))
    assert caught.value.change_number == 1
    assert "0xc3" in str(caught.value)


def test_rows_keep_values_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    message = encode.insert(1, [b"\x80", None, encode.TOAST, b"ascii"])
    row, end = WIN1252.reading(read_text_row)(message)
    assert end == len(message)
    assert row == ["\u20ac".encode(), NULL, UNCHANGED, b"ascii"]
    assert row[1] is NULL


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 64])
def test_large_text_is_converted_across_pieces(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(large_values, "PIECE_BYTES", piece_bytes)
    stored = b"ab\xa4\xa2\xa4\xa2c\x8f\xb0\xa1\x8e\xb1" * 3
    value = UnconvertedText(memoryview(stored), EUC_JP)
    assert bytes(value) == EUC_JP.convert(stored)
    assert len(value) == len(bytes(value))
    assert value.missing() is None
