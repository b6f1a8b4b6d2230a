"""Computes HMAC-SHA256 of column values in messages of the stream and in lines of COPY.

streamer computes these hashes, so neither server gets the key. ``encode(hmac(value, key, 'sha256'),
'hex')`` of pgcrypto returns the same hash. Tasks of Spark import this module too. Pure.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Final

HASH_CHARACTERS: Final = 64
_BLOCK_BYTES: Final = 64
_ESCAPED: Final = re.compile(rb"\\(.)", re.DOTALL)
_ESCAPES: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_CHECKED: Final = b"streamer: which key is this?"


class KeyedHash:
    """HMAC-SHA256 (RFC 2104) with a key. The object stores both states after the key, which makes a
    hash cheap.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        if len(key) > _BLOCK_BYTES:
            key = hashlib.sha256(key).digest()
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def digits(self, pieces: Iterable[bytes]) -> bytes:
        """Return the hash of a value that comes in *pieces*: 64 lower-case hexadecimal digits."""
        inner, outer = self._inner.copy(), self._outer.copy()
        for piece in pieces:
            inner.update(piece)
        outer.update(inner.digest())
        return outer.hexdigest().encode()


def key_check(key: str) -> str:
    """Return 16 digits that differ for different keys, and do not reveal the key."""
    return KeyedHash(key.encode()).digits([_CHECKED])[:16].decode()


def hashed_line(line: bytes, hashes: Sequence[tuple[int, KeyedHash]]) -> bytes:
    """Return a line of COPY in text format with the fields of *hashes* hashed; NULL stays NULL.

    Raises IndexError for a line with fewer fields.
    """
    fields = bytes(line).removesuffix(b"\n").split(b"\t")
    for number, hashing in hashes:
        if (field := fields[number]) != rb"\N":
            fields[number] = hashing.digits([_unescaped(field)])
    return b"\t".join(fields) + b"\n"


def _unescaped(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    return _ESCAPED.sub(lambda found: _ESCAPES.get(found[1], found[1]), field)
