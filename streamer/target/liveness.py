"""Whether a server that has not answered for long is still at it.

A statement may take hours: a lock, a large index. So there is no time-out; but a peer that vanished
behind a firewall or a proxy, or whose answer got lost, would be waited for just as long, and TCP
notices only some of that. When a statement takes long, another connection asks what the server's
session is doing. If nobody answers there, if the session is gone, or if it has been waiting for us
all the while that we waited for it, then the connection is dead.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from streamer.errors import StreamerError

WATCH_SECONDS: Final = 15.0
"""How long to wait for an answer before looking, and between two looks."""


class Unreachable(StreamerError):
    """Nobody answers at the server's address."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a session does, as pg_stat_activity shows it; ``since`` tells one statement from
    another.
    """

    is_waiting_for_us: bool
    since: str


class Ask(Protocol):
    """Returns what the session does, None if it is gone. Raises Unreachable, or another
    StreamerError if this cannot be told now.
    """

    def __call__(self) -> Awaitable[Activity | None]: ...


class Watch:
    """Looks after one connection; *sever* is called when it is dead."""

    def __init__(
        self, ask: Ask, sever: Callable[[], None], unsent: Callable[[], int] = lambda: 0
    ) -> None:
        """*unsent*: how many bytes wait to be sent; as they become fewer, the server reads."""
        self._unsent = unsent
        self._ask = ask
        self._sever = sever
        self._looking: asyncio.Task[None] | None = None
        self.progress = 0
        """Moved by whoever sends data while a statement is under way."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A statement is under way in this block."""
        timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._begin)
        try:
            yield
        finally:
            timer.cancel()
            if self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def _begin(self) -> None:
        self._looking = asyncio.create_task(self._look(), name="watch")

    async def _look(self) -> None:
        before: tuple[int, int, Activity] | None = None
        while True:
            now: tuple[int, int, Activity] | None = None
            try:
                activity = await self._ask()
            except Unreachable:
                break
            except StreamerError:
                pass  # it answers, so it is there
            else:
                if activity is None:
                    break
                if activity.is_waiting_for_us:
                    now = (self.progress, self._unsent(), activity)
                    if now == before:
                        break
            before = now
            await asyncio.sleep(WATCH_SECONDS)
        self._sever()
