"""A network between the program and a server that can be cut, delayed, throttled and blackholed.

A `Proxy` listens on its own port and passes bytes on to a server, at the present address of the
server. The proxy runs an event loop in a thread, so synchronous and asynchronous tests use the same
interface. A control returns when it has taken effect.
"""

import asyncio
import contextlib
import enum
import math
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any, Protocol, Self, TypeVar

import pytest

from tests.support.postgres import Database
from tests.support.waiting import until

T = TypeVar("T")

_CHUNK_BYTES = 64 * 1024


class Listening(Protocol):
    """A server that listens on this machine."""

    port: int


class Way(enum.Enum):
    """A direction, seen from the program."""

    OUT = "to the server"
    BACK = "to the program"


class _Pair:
    """A connection of the program, and the proxy's connection to the server."""

    def __init__(self, program: asyncio.StreamWriter) -> None:
        self.program = program
        self.server: asyncio.StreamWriter | None = None
        self.loses_answer = False
        self.is_closed = False
        self.is_swallowed = False
        self.pumps: list[asyncio.Task[None]] = []

    def close(self, *, reset: bool) -> None:
        for writer in (self.program, self.server):
            if writer is not None:
                if reset:
                    endpoint = writer.get_extra_info("socket")
                    linger = struct.pack("ii", 1, 0)
                    with contextlib.suppress(OSError):
                        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    writer.transport.abort()
                else:
                    writer.close()
        self.is_closed = True
        for pump in self.pumps:
            pump.cancel()


class Proxy:
    """A way to *server*; use it as a context manager."""

    def __init__(self, server: Listening) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._pairs: set[_Pair] = set()
        self._passes = asyncio.Event()
        self._is_away = False
        self._delay = {Way.OUT: 0.0, Way.BACK: 0.0}
        self._bytes_per_second: float | None = None
        self._cut_after: dict[Way, int] = {}
        self._lost_answers = 0
        self._lost_answer_to = b""
        self.answers_lost = 0
        """How many connections were cut in place of an answer, see `lose_answers`."""
        self.port = 0

    # ---- life ----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()

        async def listen() -> asyncio.Server:
            self._passes.set()
            return await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK_BYTES)

        self._listener = self._run(listen())
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._listener.close()
            self._passes.set()

            def is_closed() -> bool:
                self._close_all(reset=True)
                return not self._pairs

            await until(is_closed, "connections stay open")

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def _do(self, action: Callable[[], None]) -> None:
        async def do() -> None:
            action()

        self._run(do())

    # ---- controls ------------------------------------------------------------------------------

    def cut(self, *, reset: bool = False) -> None:
        """End all connections, in order or with a reset."""
        self._do(lambda: self._close_all(reset=reset))

    def cut_some(self, random: Random) -> None:
        """End a random share of the connections."""

        def cut() -> None:
            for pair in sorted(self._pairs, key=id):
                if random.random() < 0.4:
                    pair.close(reset=True)

        self._do(cut)

    def move_to(self, server: Listening) -> None:
        """Pass new connections on to a different server; present connections stay where they are."""
        self._do(lambda: setattr(self, "_server", server))

    def cut_after(self, size: int, way: Way) -> None:
        """End all connections when *size* more bytes have passed in a direction."""
        self._do(lambda: self._cut_after.update({way: size}))

    def lose_answers(self, to: bytes = b"commit\0", times: int = 1) -> None:
        """End a connection in place of the server's answer to *to*, for the next *times* answers.

        The server has done the work by then, but the client gets no answer.
        """

        def set_up() -> None:
            self._lost_answer_to, self._lost_answers = to, times

        self._do(set_up)

    def leave(self) -> None:
        """Imitate a stopped server: end all connections, and accept no new connections."""

        def leave() -> None:
            self._is_away = True
            self._close_all(reset=False)

        self._do(leave)

    def blackhole(self) -> None:
        """Pass no bytes on, not even the end of a connection; go on accepting connections."""
        self._do(self._passes.clear)

    def move(self, server: Listening) -> None:
        """Pass new connections on to a different server; present connections stay where they are."""

        def move() -> None:
            self._server = server

        self._do(move)

    def swallow(self) -> None:
        """Pass on no further bytes of the present connections, not even their end."""

        def swallow() -> None:
            for pair in self._pairs:
                pair.is_swallowed = True

        self._do(swallow)

    def delay(self, seconds: float, *ways: Way) -> None:
        """Delay all bytes in the given directions (both by default) by *seconds*."""
        self._do(lambda: self._delay.update(dict.fromkeys(ways or Way, seconds)))

    def throttle(self, bytes_per_second: float | None) -> None:
        """Limit the bytes per second, for each connection and direction."""
        self._do(lambda: setattr(self, "_bytes_per_second", bytes_per_second))

    def heal(self) -> None:
        """Pass on all bytes again, also the bytes that a blackhole has kept."""

        def heal() -> None:
            self._delay = {Way.OUT: 0.0, Way.BACK: 0.0}
            self._bytes_per_second = None
            self._cut_after.clear()
            self._lost_answers = 0
            self._is_away = False
            self._passes.set()

        self._do(heal)

    @property
    def is_answering(self) -> bool:
        """Whether the proxy has lost all answers that a test told it to lose."""
        return self._lost_answers == 0

    # ---- passing on ----------------------------------------------------------------------------

    def _close_all(self, *, reset: bool) -> None:
        for pair in self._pairs:
            pair.close(reset=reset)
        self._cut_after.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_away:
            writer.close()
            return
        pair = _Pair(writer)
        self._pairs.add(pair)
        try:
            await self._passes.wait()
            back, pair.server = await asyncio.open_connection(
                "127.0.0.1", self._server.port, limit=_CHUNK_BYTES
            )
            if not pair.is_closed:
                ways = ((Way.OUT, reader, pair.server), (Way.BACK, back, writer))
                pair.pumps = [asyncio.create_task(self._pump(pair, *way)) for way in ways]
                await asyncio.wait(pair.pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the server is down, which the program notices now
        finally:
            pair.close(reset=False)
            self._pairs.discard(pair)

    async def _pump(
        self, pair: _Pair, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(self._delay[way])
                if self._bytes_per_second:
                    await asyncio.sleep(len(data) / self._bytes_per_second)
                await self._passes.wait()
                if pair.is_swallowed:
                    continue
                if way is Way.OUT and self._lost_answers and self._lost_answer_to in data:
                    self._lost_answers -= 1
                    pair.loses_answer = True
                elif way is Way.BACK and pair.loses_answer:
                    self.answers_lost += 1
                    pair.close(reset=True)
                    return
                if (remaining := self._cut_after.get(way)) is not None:
                    self._cut_after[way] = remaining - len(data)
                    data = data[:remaining]
                writer.write(data)
                await writer.drain()
                if remaining is not None and len(data) == remaining:
                    self._close_all(reset=False)
                    return
            await self._passes.wait()
            await until(lambda: not pair.is_swallowed or pair.is_closed, seconds=math.inf)


@pytest.fixture
def source_proxy(source: Database) -> Iterator[Proxy]:
    """The proxy between the program and the source."""
    with Proxy(source.server) as proxy:
        source.port = proxy.port
        yield proxy


@pytest.fixture
def target_proxy(target: Database) -> Iterator[Proxy]:
    """The proxy between the program and the target."""
    with Proxy(target.server) as proxy:
        target.port = proxy.port
        yield proxy
