"""Shares the values of each minute among the processes of a fleet, through `streamer.minute`.

Each process stores the rows of the sources that it runs, and reads the rows of the remaining
processes. So the page of any process shows the history of the whole fleet, and a source that moves
keeps its history. An unreachable target delays the exchange: the values wait in memory.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from streamer.admin.live.minute_series import AHEAD_SECONDS, COARSE_SECONDS, KEPT_SECONDS, Series
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.minutes import Minute, add_minutes, read_minutes
from streamer.errors.error_classes import StreamerError

log = structlog.get_logger()

STORE_AT: Final = 1
"""The second of each minute in which a process stores the previous minute."""
READ_AT: Final = 25
"""The second in which a process reads: by then all processes have stored, if their clocks roughly
agree.
"""
LATE_SECONDS: Final = 2 * COARSE_SECONDS
"""Each read begins this long before the time of the last read but one, to include minutes that
other processes stored late.
"""
CHECK_SECONDS: Final = 1.0
PART_SECONDS: Final = 600
"""The length of history in a single statement, because the event loop also streams."""


class MinuteExchange:
    """*find_bookkeeping*: returns None before the target has the tables."""

    def __init__(
        self,
        find_bookkeeping: Callable[[], Bookkeeping | None],
        series: Series[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._find_bookkeeping = find_bookkeeping
        self._series = series
        self._clock = clock
        self._waiting: dict[int, dict[str, None]] = {}
        """Sources with a minute to store, by the time of the minute."""
        self._read_at: list[float] = []
        """The times of the last two reads; empty before the first."""
        self._failure: str | None = None

    def enqueue(self, minutes: Sequence[Minute]) -> None:
        """Store *minutes* of the series as soon as the target accepts them."""
        for minute in minutes:
            self._waiting.setdefault(minute.at, {})[minute.source] = None
        oldest = self._clock() - KEPT_SECONDS
        while self._waiting and (first := next(iter(self._waiting))) < oldest:
            del self._waiting[first]

    async def run(self) -> None:
        """Store and read each minute until cancelled."""
        while self._find_bookkeeping() is None:  # noqa: ASYNC110 (the engine sends no event)
            await asyncio.sleep(CHECK_SECONDS)
        await self._try(self.read)
        while True:
            await self._sleep_until(STORE_AT)
            await self._try(self.store)
            await self._sleep_until(READ_AT)
            await self._try(self.read)

    async def _sleep_until(self, second: int) -> None:
        seconds = (second - self._clock()) % COARSE_SECONDS
        await asyncio.sleep(seconds or COARSE_SECONDS)

    async def _try(self, act: Callable[[], Awaitable[None]]) -> None:
        """Call *act*, and ignore a failure: the next minute calls *act* again."""
        try:
            await act()
            self._failure = None
        except StreamerError as exc:
            if str(exc) != self._failure:
                self._failure = str(exc)
                log.warning(
                    "streamer cannot store or read the history of sources in the target",
                    error=str(exc),
                )

    async def store(self) -> None:
        """Store the minutes that wait. Raises StreamerError."""
        bookkeeping = self._find_bookkeeping()
        while bookkeeping is not None and self._waiting:
            times = [*self._waiting][: PART_SECONDS // COARSE_SECONDS]
            minutes = [
                minute
                for at in times
                for source in self._waiting[at]
                if (minute := self._series.minute(source, at)) is not None
            ]
            await add_minutes(bookkeeping, minutes, KEPT_SECONDS)
            for at in times:
                del self._waiting[at]

    async def read(self) -> None:
        """Read the minutes that other processes have stored. Raises StreamerError."""
        bookkeeping = self._find_bookkeeping()
        if bookkeeping is None:
            return
        now = self._clock()
        oldest = now - KEPT_SECONDS
        since = max(oldest, self._read_at[0] - LATE_SECONDS) if self._read_at else oldest
        while since < now:
            # The clock of another process may be ahead.
            is_last = since + PART_SECONDS >= now
            until = now + AHEAD_SECONDS if is_last else since + PART_SECONDS
            minutes = await read_minutes(bookkeeping, since, until)
            self._series.merge(minutes, now)
            since = until
        self._read_at = [*self._read_at[-1:], now]
