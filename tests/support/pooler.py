"""A pooler like pgbouncer: clients share sessions of the server, each for a transaction."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_ASKS_FOR_TLS = (80877103, 80877104)
_CANCEL = 80877102


@dataclass
class Backend:
    """A session of the server. ``greeting``: the messages after authentication."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    greeting: bytes = b""


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind = await reader.readexactly(1)
    length = await reader.readexactly(4)
    return kind, kind + length + await reader.readexactly(struct.unpack(">I", length)[0] - 4)


@dataclass
class Pooler:
    """Clients have a session for each transaction or, with *per_client*, for all transactions."""

    host: str
    port: int
    per_client: bool = False
    idle: list[Backend] = field(default_factory=list)
    tasks: "set[asyncio.Task[object]]" = field(default_factory=set)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(900_000))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                startup = await self._startup(reader, writer)
                if startup is not None:
                    await self._talk(startup, reader, writer)
        finally:
            self.tasks.remove(task)
            writer.close()

    async def _startup(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes | None:
        while True:
            length = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack(">I", length)[0] - 4)
            (code,) = struct.unpack(">I", body[:4])
            if code == _CANCEL:
                return None
            if code not in _ASKS_FOR_TLS:
                return length + body
            writer.write(b"N")

    async def _acquire(self, startup: bytes) -> Backend:
        if self.idle:
            return self.idle.pop()
        backend = Backend(*await asyncio.open_connection(self.host, self.port))
        backend.writer.write(startup)
        while True:
            kind, message = await _message(backend.reader)
            if kind == b"S":
                backend.greeting += message
            if kind == b"Z":
                return backend
            assert kind in (b"R", b"S", b"K", b"N"), message

    async def _talk(
        self, startup: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        backend = await self._acquire(startup)
        key = struct.pack(">cIII", b"K", 12, next(self.numbers), 0)
        ok = struct.pack(">cII", b"R", 8, 0)
        writer.write(ok + backend.greeting + key + b"Z\0\0\0\5I")
        answering: asyncio.Task[None] | None = None
        if not self.per_client:
            self.idle.append(backend)
        try:
            while True:
                kind, message = await _message(reader)
                if kind == b"X":
                    return
                if answering is None or answering.done():
                    if not self.per_client:
                        backend = await self._acquire(startup)
                    answering = asyncio.create_task(self._answer(backend, writer))
                backend.writer.write(message)
        finally:
            if answering is not None:
                answering.cancel()
            if backend not in self.idle:
                backend.writer.close()

    async def _answer(self, backend: Backend, writer: asyncio.StreamWriter) -> None:
        """Pass messages on until the transaction has ended."""
        while True:
            kind, message = await _message(backend.reader)
            if kind == b"Z" and message[-1:] == b"I":
                if not self.per_client:
                    self.idle.append(backend)
                writer.write(message)
                return
            writer.write(message)


@contextlib.asynccontextmanager
async def pooler(host: str, port: int, *, per_client: bool = False) -> AsyncIterator[int]:
    """Run a pooler in front of a server; yield the port."""
    pool = Pooler(host, port, per_client)
    server = await asyncio.start_server(pool.serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in (tasks := list(pool.tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for backend in pool.idle:
            backend.writer.close()
