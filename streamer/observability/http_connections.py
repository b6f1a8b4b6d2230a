"""Limits the connections to the HTTP server, which clients without a login can open, too.

Each connection takes a file descriptor, which replication needs, too. So the server uses only a
share of the descriptors. When a connection exceeds the limit, the server closes the oldest
connection that waits for its client. So idle connections cannot shut out a health check.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX: Final = 200
DESCRIPTORS_SHARE: Final = 4
"""The server uses at most 1/4 of the descriptors of the process."""
ACCEPTED_AT_ONCE: Final = 32
HEAD_SECONDS: Final = 10.0
"""How long a connection may take for the head of its next request."""
BODY_SECONDS: Final = 60.0
STALL_SECONDS: Final = 30.0
"""How long a client may take for the next piece of an answer."""
CHECK_SECONDS: Final = 1.0

HEAD, BODY, STALL, _ANSWER = range(4)
SECONDS: Final = {HEAD: HEAD_SECONDS, BODY: BODY_SECONDS, STALL: STALL_SECONDS}


class BoundedConnection(H11Protocol):
    """A connection that ends when its client keeps the server waiting."""

    def __init__(self, crowd: "Crowd", **options: Any) -> None:
        super().__init__(**options)
        self._crowd = crowd
        self._seen: tuple[object, ...] = ()
        self.since = self.loop.time()
        """The time at which the present wait began."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._crowd.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.connections.pop(self, None)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        # A client that sends requests without waiting for answers would keep the connection at work
        # for long. `Crowd.admit` ends no connection at work.
        if self.conn.trailing_data[0]:
            self.transport.close()
        super().on_response_complete()

    def wait_kind(self) -> int:
        """Return the kind of the present wait, one of the constants above."""
        cycle = self.cycle
        unsent = self.transport.get_write_buffer_size()
        if unsent:
            kind = STALL
        elif cycle is None or cycle.response_complete:
            kind = HEAD
        else:
            kind = BODY if cycle.more_body else _ANSWER
        seen = (kind, unsent, cycle)
        if seen != self._seen:
            self._seen, self.since = seen, self.loop.time()
        return kind

    def end(self) -> None:
        self._crowd.connections.pop(self, None)
        self.transport.abort()


class Crowd:
    """The connections of a server, the oldest first."""

    def __init__(self) -> None:
        self.connections: dict[BoundedConnection, None] = {}

    def connection(self, **options: Any) -> BoundedConnection:
        """Return a new connection. uvicorn calls this as its protocol factory."""
        return BoundedConnection(self, **options)

    def admit(self, new: BoundedConnection) -> None:
        """Close an older connection in favour of *new*, or *new* itself if none may be closed."""
        older = list(self.connections)
        self.connections[new] = None
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(self.connections) <= min(CONNECTIONS_MAX, soft // DESCRIPTORS_SHARE):
            return
        for kind in SECONDS:
            if first := next((c for c in older if c.wait_kind() == kind), None):
                first.end()
                return
        new.end()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """End connections whose clients take too long, during a block."""
        task = asyncio.create_task(self._close_slow(), name="connections")
        try:
            yield
        finally:
            task.cancel()

    async def _close_slow(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                seconds = SECONDS.get(connection.wait_kind())
                if seconds is not None and now - connection.since > seconds:
                    connection.end()
