"""Messages as pgoutput writes them, after "Logical Replication Message Formats" of PostgreSQL's
documentation.

Independent of `streamer.decode`: the module has no common code, so that a misreading of the
documentation stays visible.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, Literal, TypedDict

TOAST: Final = "toast"
"""An unchanged TOAST value, which the source does not send."""

Cell = bytes | None | Literal["toast"]
"""A column of a row message: a value, NULL, or not sent."""


class OldTuple(TypedDict, total=False):
    """The old row of an update or delete, or the key of that row."""

    old: list[Cell]
    key: list[Cell]


ColumnDefinition = tuple[int, str, int, int]
"""Flags, name, type OID and type modifier."""


def _string(text: str) -> bytes:
    return text.encode() + b"\0"


def _xid(xid: int | None) -> bytes:
    """Within a stream, the xid of the (sub)transaction follows the kind of a message."""
    return b"" if xid is None else struct.pack(">I", xid)


def begin(final_lsn: int, commit_time: int, xid: int) -> bytes:
    return b"B" + struct.pack(">QqI", final_lsn, commit_time, xid)


def commit(commit_lsn: int, end_lsn: int, commit_time: int, flags: int = 0) -> bytes:
    return b"C" + struct.pack(">BQQq", flags, commit_lsn, end_lsn, commit_time)


def origin(origin_lsn: int, name: str) -> bytes:
    return b"O" + struct.pack(">Q", origin_lsn) + _string(name)


def relation(
    relid: int,
    namespace: str,
    name: str,
    replica_identity: str,
    columns: Sequence[ColumnDefinition],
    xid: int | None = None,
) -> bytes:
    parts = [b"R", _xid(xid), struct.pack(">I", relid), _string(namespace), _string(name)]
    parts += [replica_identity.encode(), struct.pack(">H", len(columns))]
    for flags, column, type_oid, modifier in columns:
        parts += [bytes([flags]), _string(column), struct.pack(">Ii", type_oid, modifier)]
    return b"".join(parts)


def type_(type_oid: int, namespace: str, name: str, xid: int | None = None) -> bytes:
    return b"Y" + _xid(xid) + struct.pack(">I", type_oid) + _string(namespace) + _string(name)


def truncate(relids: Sequence[int], options: int = 0, xid: int | None = None) -> bytes:
    head = b"T" + _xid(xid) + struct.pack(">IB", len(relids), options)
    return head + b"".join(struct.pack(">I", relid) for relid in relids)


def message(
    flags: int, message_lsn: int, prefix: str, content: bytes, xid: int | None = None
) -> bytes:
    head = b"M" + _xid(xid) + struct.pack(">BQ", flags, message_lsn) + _string(prefix)
    return head + struct.pack(">I", len(content)) + content


def stream_start(xid: int, *, first: bool) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


def stream_stop() -> bytes:
    return b"E"


def stream_commit(
    xid: int, commit_lsn: int, end_lsn: int, commit_time: int, flags: int = 0
) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, flags, commit_lsn, end_lsn, commit_time)


def stream_abort(xid: int, subxid: int) -> bytes:
    return b"A" + struct.pack(">II", xid, subxid)


def tuple_data(cells: Iterable[Cell], *, binary: bool = False) -> bytes:
    """A row: TupleData."""
    row = list(cells)
    parts = [struct.pack(">H", len(row))]
    for cell in row:
        if cell is None:
            parts.append(b"n")
        elif isinstance(cell, bytes):
            parts += [b"b" if binary else b"t", struct.pack(">I", len(cell)), cell]
        else:
            parts.append(b"u")
    return b"".join(parts)


def insert(
    relid: int, new: Iterable[Cell], *, binary: bool = False, xid: int | None = None
) -> bytes:
    return b"I" + _xid(xid) + struct.pack(">I", relid) + b"N" + tuple_data(new, binary=binary)


def update(
    relid: int,
    new: Iterable[Cell],
    *,
    key: Iterable[Cell] | None = None,
    old: Iterable[Cell] | None = None,
    binary: bool = False,
    xid: int | None = None,
) -> bytes:
    """An update: with the key tuple if the key changed, with the old tuple for identity FULL."""
    parts = [b"U", _xid(xid), struct.pack(">I", relid)]
    if key is not None:
        parts += [b"K", tuple_data(key, binary=binary)]
    if old is not None:
        parts += [b"O", tuple_data(old, binary=binary)]
    return b"".join([*parts, b"N", tuple_data(new, binary=binary)])


def delete(
    relid: int,
    *,
    key: Iterable[Cell] | None = None,
    old: Iterable[Cell] | None = None,
    binary: bool = False,
    xid: int | None = None,
) -> bytes:
    head = b"D" + _xid(xid) + struct.pack(">I", relid)
    if key is not None:
        return head + b"K" + tuple_data(key, binary=binary)
    assert old is not None
    return head + b"O" + tuple_data(old, binary=binary)
