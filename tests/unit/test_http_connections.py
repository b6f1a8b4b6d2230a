"""Clients that keep the HTTP server waiting: the server limits and ends such connections."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI, Request, Response

from streamer.observability import http_connections
from streamer.observability.http_server import listen, serving
from tests.support.waiting import until

HEAD = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n"
LARGE = 16 * 1024 * 1024

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/ready")
    async def ready() -> str:
        return "ready"

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(LARGE))

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    return app


class Server:
    def __init__(self, port: int) -> None:
        self.port = port
        self.clients: list[Client] = []

    async def connect(self, sent: bytes = b"") -> Client:
        client = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        self.clients.append(client)
        client[1].write(sent)
        return client

    async def answers(self) -> bool:
        reader, _ = await self.connect(HEAD % b"ready" + b"Connection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            return (await reader.read()).endswith(b'"ready"')
        return False


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(http_connections, "CHECK_SECONDS", 0.02)
    listening = listen("127.0.0.1:0")
    async with serving(listening, make_app()):
        opened = Server(listening.getsockname()[1])
        try:
            yield opened
        finally:
            for _, writer in opened.clients:
                writer.transport.abort()


async def ends(client: Client) -> bool:
    """Return whether the server ended the connection without an answer."""
    with contextlib.suppress(ConnectionError):
        return await client[0].read() == b""
    return True


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        (http_connections.HEAD, b""),
        (http_connections.HEAD, b"GET / HTTP/1.1\r\nHost:"),
        (http_connections.BODY, b"POST /size HTTP/1.1\r\nHost: l\r\nContent-Length: 9\r\n\r\n123"),
    ],
)
async def test_a_request_that_does_not_end_ends_its_connection(
    kind: int, sent: bytes, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(http_connections.SECONDS, kind, 0.1)
    async with asyncio.timeout(30):
        assert await ends(await server.connect(sent))


async def test_an_answer_that_its_client_does_not_read_ends_its_connection(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(http_connections.SECONDS, http_connections.STALL, 0.1)
    ended = asyncio.Event()
    end = http_connections.BoundedConnection.end

    def note(connection: http_connections.BoundedConnection) -> None:
        end(connection)
        ended.set()

    monkeypatch.setattr(http_connections.BoundedConnection, "end", note)
    reader, _ = await server.connect(HEAD % b"large" + b"\r\n")
    async with asyncio.timeout(30):
        await ended.wait()
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read()) < LARGE


async def test_a_crowd_keeps_few_descriptors_and_no_probe_from_its_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "CONNECTIONS_MAX", 20)
    crowd = [await server.connect(b"GET /") for _ in range(60)]
    assert await server.answers()
    async with asyncio.timeout(30):
        for client in crowd[:40]:
            assert await ends(client)
    stalled = [await server.connect(HEAD % b"large" + b"\r\n") for _ in range(30)]
    async with asyncio.timeout(http_connections.STALL_SECONDS / 2):
        await until(server.answers, "a probe is answered beside clients that read nothing")
    assert len(stalled) == 30


async def test_requests_that_do_not_wait_for_the_answer_end_with_the_first(server: Server) -> None:
    """A crowd with thousands of requests each would leave no connection to a probe."""
    reader, _ = await server.connect((HEAD % b"ready" + b"\r\n") * 50)
    received = b""
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1024):
                received += piece
    assert received.count(b"HTTP/1.1 200") <= 1


async def test_the_share_of_descriptors_follows_the_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (4 * http_connections.DESCRIPTORS_SHARE, 1024)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    crowd = [await server.connect() for _ in range(5)]
    async with asyncio.timeout(30):
        assert await ends(crowd[0])
    assert await server.answers()
