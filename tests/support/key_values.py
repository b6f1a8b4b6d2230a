"""Values of the types that order chunks, in the server's order, in text and in binary."""

from typing import Final

ASCENDING: Final[dict[str, list[tuple[str, str]]]] = {
    "integer": [(str(n), (n % 2**32).to_bytes(4, "big").hex()) for n in range(-3, 4)],
    "boolean": [("false", "00"), ("true", "01")],
    "bytea": [
        ("\\x", ""),
        ("\\x00", "00"),
        ("\\x0000", "0000"),
        ("\\x0a", "0a"),
        ("\\x27", "27"),
        ("\\x5c22", "5c22"),
        ("\\xff", "ff"),
    ],
    "text": [
        (text, text.encode().hex()) for text in ("", " ", "%s", "'\"\\", "a", "é", "\U0001f600")
    ],
    "date": [
        ("-infinity", "80000000"),
        ("4713-01-01 BC", "ffda97cd"),
        ("0001-12-31 BC", "fff4dbf8"),
        ("0001-01-01", "fff4dbf9"),
        ("2000-02-29", "0000003b"),
        ("5874897-12-31", "7fda970c"),
        ("infinity", "7fffffff"),
    ],
    "timestamp(3) without time zone": [
        ("-infinity", "8000000000000000"),
        ("0044-03-15 23:59:59.999 BC", "ff1af9f30a327c18"),
        ("1999-12-31 23:59:59.5", "fffffffffff85ee0"),
        ("2000-01-01 00:00:00", "0000000000000000"),
        ("2000-01-01 00:00:00.001", "00000000000003e8"),
        ("10000-01-01 00:00:00", "0380e70b913b8000"),
        ("infinity", "7fffffffffffffff"),
    ],
    "timestamp with time zone": [
        ("-infinity", "8000000000000000"),
        ("4713-01-01 00:00:00+00 BC", "fd0f7fbdaf17e000"),
        ("1999-12-31 23:59:59.000001+00", "fffffffffff0bdc1"),
        ("2000-01-01 00:00:00+00", "0000000000000000"),
        ("2024-02-29 00:00:00.000001+00", "0002b578b58c6001"),
        ("294276-12-31 23:59:59.999999+00", "7fffff5bb3b29fff"),
        ("infinity", "7fffffffffffffff"),
    ],
    "double precision": [
        ("-Infinity", "fff0000000000000"),
        ("-1e-300", "81a56e1fc2f8f359"),
        ("0", "0000000000000000"),
        ("0.1", "3fb999999999999a"),
        ("1e+300", "7e37e43c8800759c"),
        ("Infinity", "7ff0000000000000"),
        ("NaN", "7ff8000000000000"),
    ],
    "numeric": [
        ("-Infinity", "00000000f0000020"),
        ("-10000.5", "0003000140000001000100001388"),
        ("0.00", "0000000000000002"),
        ("0.00001", "0001fffe0000000503e8"),
        (
            "123456789012345678901234567890.10",
            "0009000700000002000c0d801ed204d2162e23340d801ed203e8",
        ),
        ("Infinity", "00000000d0000020"),
        ("NaN", "00000000c0000000"),
    ],
}
"""The binary format is in hexadecimal."""
