"""Sends a transaction in one message, and the rows of its COPY statements after the message.

The driver waits for the answer to each of its messages, and writes the rows of COPY in several
pieces. For a small transaction these waits cost more than the work. PostgreSQL documentation,
"Message Flow", simple query: a message may have several statements, and COPY reads the rows from
the next messages. If a statement fails, the server ignores the remaining rows.

The message begins and commits the transaction, so the driver's session is idle before and after.
Meanwhile this protocol takes the place of the driver's protocol at the transport.
"""

import asyncio
import struct
from collections.abc import Iterable
from typing import Any, Final

_header = struct.Struct(">cI")
_HEADER_SIZE: Final = 5
_PASSED_ON: Final = frozenset({b"N", b"S", b"A"})
"""Messages that the server may send at any time: notices, parameters and notifications."""


def copy_data(chunks: Iterable[bytes]) -> bytes:
    """Return the messages with the rows and the end of a COPY."""
    rows = b"".join(chunks)
    return b"".join((_header.pack(b"d", len(rows) + 4), rows, _header.pack(b"c", 4)))


class WholeMessage(asyncio.Protocol):
    """The answer to a message. ``tags``: the command tags of the statements that ended.

    ``error``: the fields of an error. ``is_answered``: the server has sent its whole answer. If the
    connection is lost before, the outcome of the transaction is unknown here.
    """

    def __init__(self, transport: Any, driver: asyncio.Protocol) -> None:
        """*driver*: the idle driver's protocol at *transport*."""
        self.tags: list[bytes] = []
        self.error: dict[str, str] | None = None
        self.is_answered = False
        self._transport = transport
        self._driver = driver
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._rest = b""

    def send(self, sql: str, rows: list[bytes]) -> None:
        """Send the statements of *sql*, and the rows of each COPY, made by `copy_data`."""
        text = sql.encode()
        self._transport.set_protocol(self)
        self._transport.write(b"".join((_header.pack(b"Q", len(text) + 5), text, b"\0", *rows)))

    async def end(self) -> None:
        """Wait until the server answers, or the connection is lost.

        A caller that is cancelled may call this method again.
        """
        if not self._is_over:
            self._waiter = self._loop.create_future()
            await self._waiter

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        start, size = 0, len(data)
        while size - start >= _HEADER_SIZE:
            kind, length = _header.unpack_from(data, start)
            stop = start + 1 + length
            if stop > size:
                break
            if kind == b"C":
                self.tags.append(data[start + _HEADER_SIZE : stop - 1])
            elif kind == b"E":
                self.error = _fields(data[start + _HEADER_SIZE : stop])
            elif kind == b"Z":
                self.is_answered = True
                self._finish()
                if stop < size:
                    self._driver.data_received(data[stop:])
                return
            elif kind in _PASSED_ON:
                self._driver.data_received(data[start:stop])
            start = stop
        self._rest = data[start:]

    def _finish(self) -> None:
        self._is_over = True
        self._transport.set_protocol(self._driver)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()
        self._driver.connection_lost(exc)

    def pause_writing(self) -> None:
        self._driver.pause_writing()

    def resume_writing(self) -> None:
        self._driver.resume_writing()


def _fields(message: bytes) -> dict[str, str]:
    """Return the fields of an error by their letters."""
    return {
        field[:1].decode(): field[1:].decode("utf-8", "replace")
        for field in message.split(b"\0")
        if field
    }
