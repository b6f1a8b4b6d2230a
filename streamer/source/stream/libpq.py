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


@dataclass(frozen=True, slots=True)
class CopyFunctions:
    """Addresses of PQgetCopyData and PQfreemem."""

    get_copy_data: int
    free_memory: int


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
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (library.PQgetCopyData, library.PQfreemem)
        ]
    except (OSError, AttributeError):
        return None
    get_copy_data, free_memory = addresses
    if get_copy_data is None or free_memory is None:
        return None
    return CopyFunctions(get_copy_data, free_memory)


FUNCTIONS: Final = None if choice.compiled is None else _find()
"""Resolved at import, because reading the process's maps would block the event loop for a
moment.
"""
