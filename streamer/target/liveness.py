"""Tells whether a server that has been silent for long still works on a statement.

A statement can take hours: a lock, a large index. So there is no timeout. But a peer can vanish
behind a firewall or a proxy, or its answer can get lost, and TCP detects only some of these cases.
So when a statement takes long, another connection reads the activity of the server's session. The
connection is dead if the server does not answer, if the session is gone, or if it has waited for
the client all along.
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
    """No server answers at the address."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a session, from pg_stat_activity; ``since`` identifies one statement."""

    is_waiting_for_us: bool
    since: str


class Ask(Protocol):
    """Returns the activity of the session, or None if it is gone.

    Raises Unreachable, or another StreamerError if the activity is not known now.
    """

    def __call__(self) -> Awaitable[Activity | None]: ...


class Watch:
    """Looks after one connection; *sever* is called when it is dead."""

    def __init__(
        self, ask: Ask, sever: Callable[[], None], unsent: Callable[[], int] = lambda: 0
    ) -> None:
        """*unsent*: the bytes in the send buffer; while they decrease, the server reads."""
        self._unsent = unsent
        self._ask = ask
        self._sever = sever
        self._looking: asyncio.Task[None] | None = None
        self.progress = 0
        """Moved by the sender of data while a statement runs."""

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
