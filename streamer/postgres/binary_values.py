"""Converts values in PostgreSQL's binary format to text, for messages. psycopg reads the formats.
Pure.
"""

from typing import Final

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import Format

# From pg_type.dat. psycopg's loaders read these sizes without checking the end of a value.
_SIZES: Final = {
    16: 1,  # boolean
    20: 8,  # bigint
    21: 2,  # smallint
    23: 4,  # integer
    26: 4,  # oid
    700: 4,  # real
    701: 8,  # double precision
    1082: 4,  # date
    1083: 8,  # time
    1114: 8,  # timestamp
    1184: 8,  # timestamptz
    1186: 16,  # interval
    2950: 16,  # uuid
}
_OF_ANY_SIZE: Final = {17, 19, 25, 1042, 1043}  # bytea, name, text, character, character varying
_NUMERIC: Final = 1700


def binary_text(data: bytes, type_oid: int) -> str:
    """Return a value in text form, or in hexadecimal if its type or size is unknown."""
    if _has_its_size(data, type_oid):
        try:
            value = Transformer().get_loader(type_oid, Format.BINARY).load(data)
        except (psycopg.Error, ValueError):
            return f"\\x{data.hex()}"
        if not isinstance(value, bytes):
            return str(value)
    return f"\\x{data.hex()}"


def _has_its_size(data: bytes, type_oid: int) -> bool:
    if type_oid == _NUMERIC:  # a header of 8 bytes begins with the number of digits
        return len(data) >= 8 and len(data) == 8 + 2 * int.from_bytes(data[:2], "big")
    return type_oid in _OF_ANY_SIZE or _SIZES.get(type_oid) == len(data)
