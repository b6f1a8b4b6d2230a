"""Passes large messages and values on in pieces, without a copy of the whole.

PostgreSQL allows a value of nearly 1 GB, and each copy costs as much memory again. A message of
more than `LARGE_BYTES` is therefore a memoryview of the frame from libpq, or of the mapped spool
file. Slices of a memoryview share these bytes. Code that handles messages need not distinguish
them, because both types have the operations that decoding needs.

A column value of more than `LARGE_VALUE_BYTES` in such a message is a `LargeValue`. A `LargeValue`
is deliberately not a buffer: ``bytes.join`` refuses it, so no code copies the value by accident.
Pure.
"""

import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, cast

LARGE_BYTES: Final = 1024 * 1024
LARGE_VALUE_BYTES: Final = 64 * 1024
PIECE_BYTES: Final = 256 * 1024
"""The size of one write to a socket or file."""


def as_message(view: memoryview) -> bytes:
    """Return *view* as a message: a copy if small, so that libpq can free the frame."""
    return cast("bytes", view) if len(view) > LARGE_BYTES else view.tobytes()


def slices(data: bytes, bounds: Sequence[int]) -> list[bytes]:
    """Cut *data*, which may be a memoryview, into messages at *bounds*."""
    if isinstance(data, memoryview):
        return [as_message(data[a:b]) for a, b in pairwise(bounds)]
    return [data[a:b] for a, b in pairwise(bounds)]


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield *data* in pieces of at most `PIECE_BYTES`.

    Pages of a mapped file count as memory of the process until the process releases the pages. So
    the function releases the pages of a piece when the caller requests the next piece.
    """
    view = memoryview(data)
    file = view.obj
    for start in range(0, len(view), PIECE_BYTES):
        yield cast("bytes", view[start : start + PIECE_BYTES])
        if isinstance(file, mmap.mmap):
            file.madvise(mmap.MADV_DONTNEED)


class LargeValue:
    """A large item of a row. A `LargeValue` equals bytes with the same content, and has the same
    hash.
    """

    __slots__ = ("view",)

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def __len__(self) -> int:
        return len(self.view)

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LargeValue):
            return self.view == other.view
        return self.view == other

    def __hash__(self) -> int:
        return hash(self.view)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self.view, encoding, errors)

    def pieces(self) -> Iterator[bytes]:
        return pieces(cast("bytes", self.view))


def large_or_bytes(item: memoryview) -> bytes:
    """Return a column as an item of a row."""
    if len(item) > LARGE_VALUE_BYTES:
        return cast("bytes", LargeValue(item))
    return item.tobytes()
