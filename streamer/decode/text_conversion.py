"""Converts text of a source whose encoding is neither UTF8 nor SQL_ASCII to UTF-8, value by value.

PostgreSQL can convert text before sending, but a character without an equivalent in UTF-8 then ends
the stream of all tables. So the source sends stored text unchanged, and this module converts rows.
The source's conversion provides the table of characters
(`streamer.source.server.database_encoding`). Python's codecs would differ from PostgreSQL in some
characters.

A value with a character without an equivalent becomes an `UnconvertedText`, which no COPY accepts.
The change is then handled like a change whose value the target refuses. Pure.
"""

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, cast

from streamer.decode.large_values import LargeValue, pieces
from streamer.decode.tuples import Row, Value
from streamer.errors.error_classes import ProtocolError

ReadRow = Callable[..., tuple[Row, int]]

_SINGLE: Final = r"[\x80-\xff]"
_PAIR: Final = r"[\x80-\xff]{2}"
_TRIPLE: Final = rf"\x8f{_PAIR}"
_PATTERNS: Final = {
    "EUC_CN": _PAIR,
    "EUC_KR": _PAIR,
    "EUC_JP": rf"{_TRIPLE}|(?!\x8f){_PAIR}",
    "EUC_JIS_2004": rf"{_TRIPLE}|(?!\x8f){_PAIR}",
    "EUC_TW": rf"\x8e[\x80-\xff]{{3}}|{_TRIPLE}|(?![\x8e\x8f]){_PAIR}",
}
"""Lead bytes of multi-byte characters (pg_wchar.c, pg_euc*_mblen). In every other encoding that
this module converts, a character is one byte.
"""
_NOT_UTF8: Final = b"\xff"
"""Precedes each character without an equivalent in UTF-8."""


def character_ranges(encoding: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the byte ranges of all characters outside ASCII that *encoding* may have."""
    any_byte, second = (0x80, 0xFF), (0xA1, 0xFE)
    match encoding:
        case "EUC_CN" | "EUC_KR":
            return ((second, second),)
        case "EUC_JP" | "EUC_JIS_2004":
            return (
                (second, second),
                ((0x8E, 0x8E), (0xA1, 0xDF)),
                ((0x8F, 0x8F), second, second),
            )
        case "EUC_TW":
            return ((second, second), ((0x8E, 0x8E), (0xA1, 0xB0), second, second))
    return ((any_byte,),)


class TextConversion:
    """Converts text of an encoding. *characters*: all characters outside ASCII, with their UTF-8
    bytes.
    """

    def __init__(self, encoding: str, characters: Mapping[bytes, bytes]) -> None:
        self.encoding = encoding
        self._characters = characters
        pattern = _PATTERNS.get(encoding)
        whole = _SINGLE if pattern is None else f"{pattern}|{_SINGLE}"
        self._pattern = re.compile(whole.encode("latin-1"), re.DOTALL)
        self._is_multibyte = pattern is not None
        self._table = None if self._is_multibyte else _single_byte_table(characters)

    def convert(self, value: bytes) -> Value:
        """Return *value* in UTF-8; an `UnconvertedText` if a character has no equivalent."""
        if value.isascii():
            return value
        if self._table is not None:
            try:
                return codecs.charmap_decode(value, "strict", self._table)[0].encode()
            except UnicodeDecodeError:
                return cast("Value", UnconvertedText(memoryview(value), self))
        try:
            return self._pattern.sub(lambda match: self._characters[match[0]], value)
        except KeyError:
            return cast("Value", UnconvertedText(memoryview(value), self))

    def convert_name(self, data: bytes) -> str:
        """Return the name *data* as text. Raises ProtocolError."""
        converted = self.convert(data)
        if isinstance(converted, UnconvertedText):
            raise ProtocolError(
                f'a name has a character of encoding "{self.encoding}" that UTF-8 lacks'
            )
        return converted.decode()

    def reading(self, read: ReadRow) -> ReadRow:
        """Return a function that reads a row with *read*, and converts the row."""

        def read_converted(message: bytes, *position: int) -> tuple[Row, int]:
            row, end = read(message, *position)
            for number, value in enumerate(row):
                if value.__class__ is bytes:
                    if not value.isascii():
                        row[number] = self.convert(value)
                elif isinstance(value, LargeValue):
                    row[number] = cast("Value", UnconvertedText(value.view, self))
            return row, end

        return read_converted

    def in_pieces(self, view: memoryview) -> Iterator[bytes]:
        """Yield a text in UTF-8, with `_NOT_UTF8` before each character without an equivalent."""
        incomplete = b""
        size = 0
        for piece in pieces(cast("bytes", view)):
            size += len(piece)
            data = incomplete + piece
            end = len(data) if size == len(view) else self._end_of_characters(data)
            yield self._pattern.sub(self._mark_missing, data[:end])
            incomplete = data[end:]

    def _mark_missing(self, match: re.Match[bytes]) -> bytes:
        return self._characters.get(match[0]) or _NOT_UTF8 + match[0]

    def _end_of_characters(self, data: bytes) -> int:
        """Return the end of the last whole character of *data*; the remaining bytes belong to the
        next piece.
        """
        if not self._is_multibyte:
            return len(data)
        start = len(data)
        while start and data[start - 1] >= 0x80:
            start -= 1
        for match in self._pattern.finditer(data, start):
            if len(match[0]) == 1:
                return match.start()
        return len(data)

    def missing(self, view: memoryview) -> bytes | None:
        """Return the first character of a text without an equivalent in UTF-8."""
        for piece in self.in_pieces(view):
            if (at := piece.find(_NOT_UTF8)) >= 0:
                character = self._pattern.match(piece, at + 1)
                return character[0] if character is not None else piece[at + 1 :]
        return None


class UnconvertedText(LargeValue):
    """A text that is large, or has a character that UTF-8 lacks.

    ``view``: the text as the source stores it. ``bytes()`` returns UTF-8 with an invalid byte
    before each such character. So neither a target nor a retry from quarantine can mistake the
    value for a valid text.
    """

    __slots__ = ("conversion",)

    def __init__(self, view: memoryview, conversion: TextConversion) -> None:
        super().__init__(view)
        self.conversion = conversion

    def missing(self) -> bytes | None:
        """Return the first character without an equivalent in UTF-8."""
        return self.conversion.missing(self.view)

    def pieces(self) -> Iterator[bytes]:
        return self.conversion.in_pieces(self.view)

    def __len__(self) -> int:
        return sum(map(len, self.pieces()))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, UnconvertedText):
            return self.view == other.view
        return isinstance(other, bytes) and bytes(self) == other

    def __hash__(self) -> int:
        return hash(self.view)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self).decode(encoding, errors)


def _single_byte_table(characters: Mapping[bytes, bytes]) -> str:
    """Return the table for `codecs.charmap_decode`."""
    texts = (characters.get(bytes([byte]), b"").decode() for byte in range(0x80, 0x100))
    return "".join(map(chr, range(0x80))) + "".join(text or "\ufffe" for text in texts)
