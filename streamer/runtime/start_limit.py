"""Limits how many sources open their sessions at a time.

Opening a session costs connections on both sides, statements over the shared bookkeeping
connection, and processor time. If hundreds of sources started at once, each start would take so
long that servers end the connections. A source that waits for its server does not delay the rest:
it returns its place after `START_SECONDS`, and continues without a place.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

STARTS_AT_ONCE: Final = 8
START_SECONDS: Final = 5.0


class Starts:
    """The places of one process; first come, first served."""

    def __init__(self, at_once: int = STARTS_AT_ONCE, seconds: float = START_SECONDS) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._seconds = seconds

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Callable[[], None]]:
        """Hold a place during a block; the yielded function gives the place back before the end."""
        await self._places.acquire()
        has_place = True

        def leave() -> None:
            nonlocal has_place
            if has_place:
                has_place = False
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._seconds, leave)
        try:
            yield leave
        finally:
            timer.cancel()
            leave()
