"""An unauthorized client at Spark's ports: speaks the block transfer protocol over a plain socket.

The frames follow Spark's `network-common`: an eight byte length that includes itself, a type, and
the message. `OpenBlocks` in an RPC request names blocks; `ChunkFetchRequest` fetches them.
"""

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator

import psutil

_CHUNK_FETCH_REQUEST, _CHUNK_FETCH_SUCCESS = 0, 1
_RPC_REQUEST, _RPC_RESPONSE = 3, 4
_OPEN_BLOCKS = 0
SECONDS = 10.0


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">i", len(encoded)) + encoded


def _frame(kind: int, body: bytes) -> bytes:
    return struct.pack(">qb", len(body) + 9, kind) + body


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := connection.recv(count - len(data))):
            raise ConnectionError("closed")
        data += more
    return data


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read a frame. Raises ConnectionError for a server with a different protocol."""
    (length,) = struct.unpack(">q", _read(connection, 8))
    if not 9 <= length <= 1 << 26:
        raise ConnectionError("not Spark's protocol")
    body = _read(connection, length - 8)
    return body[0], body[1:]


def _fetch(address: tuple[str, int], block: str) -> bytes | None:
    """Return the content of a block; None if the server has no block of that name.

    Raises OSError if the server refuses, or does not speak the protocol.
    """
    request = bytes([_OPEN_BLOCKS]) + _text("app") + _text("driver")
    request += struct.pack(">i", 1) + _text(block)
    with socket.create_connection(address, SECONDS) as connection:
        connection.sendall(_frame(_RPC_REQUEST, struct.pack(">qi", 1, len(request)) + request))
        kind, body = _answer(connection)
        if kind != _RPC_RESPONSE:
            return None
        (stream,) = struct.unpack_from(">q", body, 13)  # request id, length, message type
        connection.sendall(_frame(_CHUNK_FETCH_REQUEST, struct.pack(">qi", stream, 0)))
        kind, body = _answer(connection)
        return body if kind == _CHUNK_FETCH_SUCCESS else None


def broadcast_blocks(address: tuple[str, int], count: int = 4) -> bytes:
    """Return the content of the first broadcasts that the server at *address* gives away."""
    content = b""
    with contextlib.suppress(OSError):
        for number in range(count):
            content += _fetch(address, f"broadcast_{number}_piece0") or b""
    return content


def listening(processes: Iterable[psutil.Process]) -> Iterator[tuple[str, int]]:
    """Return the addresses that processes listen on."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    yield connection.laddr.ip, connection.laddr.port
