"""A time limit for many short pieces of work, without a timer for each piece."""

import asyncio
import time
from collections.abc import Callable


class Alarm:
    """Calls *ring* when work exceeds a time limit, and repeats the call at that interval.

    A piece of work uses the timer of an earlier piece. When that timer fires too early, the object
    sets the timer again for the remaining time. So many short pieces of work cost a single timer.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._seconds = 0.0
        self._rings_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0

    def begin(self, seconds: float) -> None:
        """Begin work that should take less than *seconds*."""
        self._seconds = seconds
        self._rings_at = time.monotonic() + seconds
        if self._timer is None or self._fires_at > self._rings_at:
            self._set_timer(self._rings_at)

    def end(self) -> None:
        """End the work."""
        self._rings_at = None

    def _set_timer(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = moment
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, moment - time.monotonic()), self._check)

    def _check(self) -> None:
        self._timer = None
        if self._rings_at is None:
            return
        if self._rings_at <= time.monotonic():
            self._rings_at = time.monotonic() + self._seconds
            self._ring()
        if self._rings_at is not None:
            self._set_timer(self._rings_at)
