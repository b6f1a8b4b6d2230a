"""Limits how many sources open their sessions at a time.

Opening a session costs connections on both sides, statements over the shared bookkeeping
connection, and processor time. If hundreds of sources started at once, each start would take so
long that servers would end the connections. A source that waits for its server does not delay the
rest: it returns its permit after `START_SECONDS`, and continues without a permit.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

STARTS_AT_ONCE: Final = 8
START_SECONDS: Final = 5.0
START_TURN: Final = "its turn to start"
"""The wait of a source without a permit, for status and log."""


class Starts:
    """The permits of one process; first come, first served."""

    def __init__(self, at_once: int = STARTS_AT_ONCE, seconds: float = START_SECONDS) -> None:
        self._permits = asyncio.Semaphore(at_once)
        self._seconds = seconds

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[Callable[[], None]]:
        """Hold a permit during a block; the yielded function returns the permit before the end."""
        await self._permits.acquire()
        has_permit = True

        def release() -> None:
            nonlocal has_permit
            if has_permit:
                has_permit = False
                self._permits.release()

        timer = asyncio.get_running_loop().call_later(self._seconds, release)
        try:
            yield release
        finally:
            timer.cancel()
            release()
