"""Values in binary as text, for messages."""

import struct
import uuid

import pytest

from streamer.postgres.binary_values import binary_text

ID = uuid.UUID("9f1c1b1e-6d0e-4c0e-8d4a-6a3f0a4f8d11")


@pytest.mark.parametrize(
    ("data", "type_oid", "expected"),
    [
        (struct.pack(">i", 9), 23, "9"),
        (struct.pack(">q", -(2**40)), 20, str(-(2**40))),
        ("größe".encode(), 25, "größe"),
        (ID.bytes, 2950, str(ID)),
        (struct.pack(">i", 0), 1082, "2000-01-01"),
        (b"\x00\xff", 17, "\\x00ff"),
        (b"\x01\x02", 999_999, "\\x0102"),
        (b"\x01", 23, "\\x01"),
        (bytes.fromhex("0001 0000 0000 0002 04d2"), 1700, "1234.00"),
        (bytes.fromhex("0009 0000 0000 0002 04d2"), 1700, "\\x000900000000000204d2"),
    ],
)
def test_a_value_is_shown_as_people_write_it(data: bytes, type_oid: int, expected: str) -> None:
    assert binary_text(data, type_oid) == expected
