"""The functions of psycopg's libpq, for calls without psycopg in between.

psycopg documents the address of a connection (`pgconn_ptr`), but does not expose the library. The
wheel psycopg_binary bundles a copy of libpq, so the process may load several copies. A call of the
wrong copy with psycopg's connection is undefined, so this module requires exactly one copy in the
process.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psycopg import pq

from streamer.compiled import choice

_MAPS: Final = Path("/proc/self/maps")


_NAMES: Final = ("PQgetCopyData", "PQfreemem", "PQputCopyData", "PQconsumeInput")


@dataclass(frozen=True, slots=True)
class CopyFunctions:
    """Addresses of functions of libpq that carry the data of COPY."""

    get_copy_data: int
    free_memory: int
    put_copy_data: int
    consume_input: int


def _find() -> CopyFunctions | None:
    """Return the functions of psycopg's libpq; None unless exactly one copy is certain."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libpq" in line}
    if len(paths) != 1:
        return None
    try:
        library = ctypes.CDLL(paths.pop())
        if library.PQlibVersion() != pq.version():
            return None
        addresses = [
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES
        ]
    except (OSError, AttributeError):
        return None
    return CopyFunctions(*addresses) if all(addresses) else None


FUNCTIONS: Final = None if choice.compiled is None else _find()
"""Resolved at import, because reading the process's maps would block the event loop for a
moment.
"""


def address_of(connection: "pq.abc.PGconn") -> int | None:
    """Return the address of a connection; None if psycopg does not expose the address."""
    address = getattr(connection, "pgconn_ptr", None)  # missing in psycopg's types
    return address if isinstance(address, int) else None
