"""An HTTP receiver on this machine, for messages of the program."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Delivery:
    """A POST. ``headers``: by lower-case name."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> dict[str, Any]:
        content = json.loads(self.body)
        assert isinstance(content, dict)
        return content


@dataclass
class Receiver:
    """Stores received messages. ``status``: the status of each answer; None for no answer."""

    url: str
    status: int | None = 200
    accepted: list[Delivery] = field(default_factory=list)
    refused: list[Delivery] = field(default_factory=list)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    """The open connections."""

    @property
    def events(self) -> list[tuple[str, str, str]]:
        """Event, kind and subject of each problem of the accepted notifications."""
        problems = [each for delivery in self.accepted for each in delivery.content["problems"]]
        return [(each["event"], each["kind"], each["subject"]) for each in problems]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
            headers = {}
            for line in lines:
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = await reader.readexactly(int(headers["content-length"]))
            status = self.status
            delivery = Delivery(first.split()[1], headers, body)
            (self.accepted if status == 200 else self.refused).append(delivery)
            if status is None:
                await reader.read()
            else:
                head = f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                writer.write(head.encode())
                await writer.drain()
        self.writers.discard(writer)
        writer.close()


@contextlib.asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Receive during a block."""
    receiver = Receiver("")
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        try:
            yield receiver
        finally:
            for writer in receiver.writers:
                writer.close()
