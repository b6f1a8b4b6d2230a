"""Delays between attempts: longer each time, with jitter so that tasks do not retry together."""

import asyncio
import random
from typing import Any, Final

FIRST_SECONDS: Final = 0.1
SECONDS_MAX: Final = 5.0


class Backoff:
    """Capped exponential back-off with jitter, which logs each reason for waiting once."""

    def __init__(self, *, first: float = FIRST_SECONDS, most: float = SECONDS_MAX) -> None:
        self._next = first
        self._most = most
        self._logged: str | None = None

    def log(self, logger: Any, event: str, error: BaseException) -> None:
        """Log a failure unless equal to the last logged failure."""
        text = str(error)
        if text != self._logged:
            self._logged = text
            logger.warning(event, error=text)

    def next_seconds(self) -> float:
        """Return the time to wait: a random time between half of the current delay and the
        whole.
        """
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return seconds

    async def wait(self) -> None:
        await asyncio.sleep(self.next_seconds())
