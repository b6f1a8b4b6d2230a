"""Converts rows of the capture's table to logical messages. Pure.

pgoutput sends logical messages from PostgreSQL 14 on. On older servers the capture inserts messages
into a small published table (`streamer.source.capture.ddl_capture`). Like a logical message, an
INSERT into this table has the position and the subtransaction of the command. So the stream first
converts each INSERT to a logical message, and later code handles only logical messages.

The table has a single column, of type bytea. Layouts: "Logical Replication Message Formats" in
PostgreSQL's documentation.
"""

import struct
from collections.abc import Iterator
from typing import Final

from streamer.decode import pgoutput
from streamer.errors.error_classes import ProtocolError

_COLUMN: Final = struct.Struct(">cHcI")
"""NEW_TUPLE, number of columns, kind and length of the first column."""
_TRANSACTIONAL: Final = b"\x01" + bytes(8)
"""The flags and the LSN of a logical message; no code reads the LSN."""


class TableMessages:
    """Finds the table in a replication stream, and replaces its rows."""

    def __init__(self, namespace: str, name: str, prefix: str) -> None:
        """*prefix*: the prefix of the logical messages."""
        self._names = f"{namespace}\0{name}\0".encode()
        self._prefix = prefix.encode() + b"\0"
        self._relids: set[bytes] = set()
        self._in_stream = False

    def reset(self) -> None:
        """Reset the state for a new connection, which describes all relations again."""
        self._relids.clear()
        self._in_stream = False

    def replace(self, payloads: list[bytes]) -> Iterator[bytes]:
        """Yield *payloads*, with logical messages in place of the table's rows.

        Raises ProtocolError for a row that the capture cannot have written.
        """
        for payload in payloads:
            kind = payload[0] if payload else 0
            start = 5 if self._in_stream else 1  # after the xid of a streamed message
            if kind == pgoutput.INSERT and bytes(payload[start : start + 4]) in self._relids:
                yield self._message(bytes(payload), start)
                continue
            if kind == pgoutput.RELATION:
                self._check_relation(bytes(payload), start)
            elif kind == pgoutput.STREAM_START:
                self._in_stream = True
            elif kind == pgoutput.STREAM_STOP:
                self._in_stream = False
            yield payload

    def _check_relation(self, payload: bytes, start: int) -> None:
        relid = payload[start : start + 4]
        if payload.startswith(self._names, start + 4):
            self._relids.add(relid)
        else:
            self._relids.discard(relid)

    def _message(self, payload: bytes, start: int) -> bytes:
        value = _value(payload, start + 4)
        if value is None:
            raise ProtocolError("a row of the capture's table is not one value of type bytea")
        head = bytes([pgoutput.MESSAGE]) + payload[1:start] + _TRANSACTIONAL + self._prefix
        return head + struct.pack(">I", len(value)) + value


def _value(payload: bytes, begin: int) -> bytes | None:
    """Return the only value of the row at *begin*, from the text or binary format."""
    if len(payload) < begin + _COLUMN.size:
        return None
    tuple_kind, columns, kind, length = _COLUMN.unpack_from(payload, begin)
    value = payload[begin + _COLUMN.size :]
    if tuple_kind[0] != pgoutput.NEW_TUPLE or columns != 1 or length != len(value):
        return None
    if kind == b"b":
        return value
    if kind != b"t" or not value.startswith(b"\\x"):
        return None
    try:
        return bytes.fromhex(value[2:].decode("ascii"))
    except ValueError:
        return None
