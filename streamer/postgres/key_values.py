"""Values of keys with the same order in Python as in PostgreSQL. Pure.

Their types have the same order on all servers: no collation, time zone or version changes the
order. Text has the same order if its collation sorts by bytes
(`streamer.source.tables.bytewise_columns`). Sessions of streamer pin DateStyle, TimeZone,
bytea_output and extra_float_digits, which decide the texts.

PostgreSQL's ``date_send``, ``timestamp_send``, ``numeric_send`` and ``float8send`` define the
binary formats.
"""

import re
import struct
from decimal import Decimal
from typing import Final

KeyValue = int | bytes | tuple[int, Decimal] | tuple[bool, float]

INTEGER_TYPES: Final = ("smallint", "integer", "bigint")
_DATE: Final = "date"
_TIMESTAMPS: Final = ("timestamp without time zone", "timestamp with time zone")
ORDERED_TYPES: Final = frozenset(
    (
        *INTEGER_TYPES,
        *("uuid", "bytea", "boolean", "numeric", "double precision", _DATE),
        *_TIMESTAMPS,
    )
)
"""Types, without modifiers, whose values `read_key_value` compares as every server does."""
TEXT_TYPES: Final = frozenset(("text", "character varying", "name"))
"""Types whose values sort by UTF-8 bytes if the collation sorts by bytes. The set omits
`character`, which ignores trailing blanks.
"""

_BYTES: Final = {_DATE: 4, _TIMESTAMPS[0]: 8, _TIMESTAMPS[1]: 8}
_TIME_TEXT: Final = re.compile(
    r"(\d{4,})-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
    r"(?:([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?)?( BC)?",
    re.ASCII,
)
_NUMERIC_MINUS: Final = 0x4000
_NUMERIC_RANKS: Final = {0xC000: 2, 0xD000: 1, 0xF000: -1}
_RANKS: Final = {"NaN": 2, "Infinity": 1, "-Infinity": -1}
_ZERO: Final = Decimal(0)


def without_modifier(kind: str) -> str:
    """Return the type *kind* without its modifier: ``numeric`` for ``numeric(10,2)``."""
    return re.sub(r"\([^)]*\)", "", kind)


def read_key_value(data: bytes, kind: str, *, is_text: bool) -> KeyValue:
    """Return a value of the type *kind* with the same order in Python as on the server.

    *data*: the bytes that the server sends, in text or binary. Raises ValueError.
    """
    kind = without_modifier(kind)
    if kind in TEXT_TYPES:
        return bytes(data)
    if not is_text:
        return _read_binary(data, kind)
    text = data.decode("ascii")
    if kind == "uuid":
        return bytes.fromhex(text.replace("-", ""))
    if kind == "bytea":
        if not text.startswith("\\x"):
            raise ValueError("bytea is not in hexadecimal")
        return bytes.fromhex(text[2:])
    if kind == "numeric":
        return (_RANKS[text], _ZERO) if text in _RANKS else (0, Decimal(text))
    if kind == "double precision":
        return _float(float(text))
    if kind in _BYTES:
        return _read_time(text, kind)
    if kind == "boolean":
        return int(text in ("t", "true"))  # as sent, or cast to text
    return int(text)


def _read_binary(data: bytes, kind: str) -> KeyValue:
    if kind in ("uuid", "bytea"):
        return bytes(data)
    if kind == "numeric":
        return _read_numeric(data)
    if kind == "double precision":
        return _float(struct.unpack(">d", data)[0])
    return int.from_bytes(data, "big", signed=True)


def _float(value: float) -> tuple[bool, float]:
    """Return *value* in a form in which NaN is greater than all numbers, and equal to itself."""
    return (True, 0.0) if value != value else (False, value)


def _read_numeric(data: bytes) -> tuple[int, Decimal]:
    try:
        count, weight, sign, _ = struct.unpack_from(">HhHH", data)
        groups = struct.unpack_from(f">{count}H", data, 8)
    except struct.error as exc:
        raise ValueError("a binary numeric is truncated") from exc
    if sign in _NUMERIC_RANKS:
        return _NUMERIC_RANKS[sign], _ZERO
    digits = tuple(int(digit) for group in groups for digit in f"{group:04}")
    negative = int(sign == _NUMERIC_MINUS)
    return 0, Decimal((negative, digits or (0,), 4 * (weight - count + 1)))


def _read_time(text: str, kind: str) -> int:
    """Return days or microseconds since 2000-01-01, as in the binary format."""
    last = 1 << (8 * _BYTES[kind] - 1)
    if text in ("infinity", "-infinity"):
        return last - 1 if text == "infinity" else -last
    match = _TIME_TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a {kind} in ISO format")
    year, month, day = map(int, match.group(1, 2, 3))
    days = _days(1 - year if match[12] else year, month, day)
    if kind == _DATE:
        return days
    hours, minutes, seconds = (int(part or 0) for part in match.group(4, 5, 6))
    zone_parts = (int(part or 0) for part in match.group(9, 10, 11))
    offset = sum(part * size for part, size in zip(zone_parts, (3600, 60, 1), strict=True))
    offset = -offset if match[8] == "-" else offset
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds - offset
    return total * 1_000_000 + int((match[7] or "").ljust(6, "0"))


def _days(year: int, month: int, day: int) -> int:
    """Return the days since 2000-01-01 in the Gregorian calendar, for any year.

    The year begins with March here, so that a leap day is the last day of its year.
    """
    year, month = (year - 1, month + 9) if month <= 2 else (year, month - 3)
    earlier_days = year * 365 + year // 4 - year // 100 + year // 400
    return earlier_days + (153 * month + 2) // 5 + day - 1 - 730425
