"""The task that samples the sources of this process, and the store of minutes that outlives it.

It reads only what the process knows: a sample asks no server. With a mapping database, streamer
stores each completed minute there and continues with the last day at its next start.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, Protocol

import structlog

from streamer.admin.series import (
    FIELDS,
    FINE_SECONDS,
    FINE_SLOTS,
    KEPT_SECONDS,
    Minute,
    Series,
    Values,
    spark,
)
from streamer.errors import StoreError
from streamer.observability.metrics import Metrics
from streamer.runtime.supervisor import Supervisor

log = structlog.get_logger()

SPARK_SECONDS: Final = FINE_SECONDS * FINE_SLOTS
_DIGITS: Final = (3, 2, 0)
"""Of the values in answers, in the order of `FIELDS`."""


class Sampled(Protocol):
    """The sampled object: an engine."""

    @property
    def supervisors(self) -> Sequence[Supervisor]: ...

    @property
    def metrics(self) -> Metrics: ...


class MinuteStore(Protocol):
    """Where minutes outlive the process: the mapping database."""

    async def add_minutes(self, minutes: Sequence[Minute], oldest: int) -> None: ...

    async def minutes(self, since: int) -> list[Minute]: ...


class SourceHistory:
    """Samples every source each 10 s. *store*: None keeps the samples in memory only."""

    def __init__(
        self,
        engine: Sampled,
        store: MinuteStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._store = store
        self._clock = clock
        self._series = Series()
        self._changes: dict[str, int] = {}
        self._sampled_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def start(self) -> None:
        """Begin to sample, if that has not begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="history of sources")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        await self.load()
        while True:
            await asyncio.sleep(FINE_SECONDS - self._clock() % FINE_SECONDS)
            await self.sample()

    async def load(self) -> None:
        """Continue with the minutes of the process before."""
        if self._store is None:
            return
        try:
            minutes = await self._store.minutes(int(self._clock()) - KEPT_SECONDS)
        except StoreError as exc:
            self._report(exc)
            return
        # A day of hundreds of sources takes a moment, and the event loop also streams.
        self._series = await asyncio.to_thread(Series.of_minutes, minutes)

    async def sample(self) -> None:
        """Add a sample of each source, and store the minute that it completes."""
        now = self._clock()
        labels = [supervisor.source.label for supervisor in self._engine.supervisors]
        self._series.keep_only(labels)
        minutes = self._series.add(now, self._read(now))
        if self._store is None or not minutes:
            return
        try:
            await self._store.add_minutes(minutes, int(now) - KEPT_SECONDS)
            self._failure = None
        except StoreError as exc:
            self._report(exc)

    def _read(self, now: float) -> dict[str, Values]:
        """Return the present values of each source. The first sample has no rate."""
        applied = self._engine.metrics.changes_of_sources
        seconds = None if self._sampled_at is None else max(now - self._sampled_at, 1.0)
        found: dict[str, Values] = {}
        for supervisor in self._engine.supervisors:
            label, pipeline = supervisor.source.label, supervisor.pipeline
            changes = applied.get(label, 0)
            before = self._changes.get(label, changes)
            lag = None if pipeline is None else pipeline.lag_seconds(datetime.now(UTC))
            is_known = seconds is not None and pipeline is not None
            rate = max(0, changes - before) / (seconds or 1.0) if is_known else None
            wal = supervisor.retained_wal_bytes
            found[label] = (lag, rate, None if wal is None else float(wal))
            self._changes[label] = changes
        for label in self._changes.keys() - found.keys():
            del self._changes[label]
        self._sampled_at = now
        return found

    def _report(self, error: StoreError) -> None:
        """Log a failure once; the samples stay in memory."""
        if str(error) != self._failure:
            self._failure = str(error)
            log.warning("streamer cannot store the history of sources", error=str(error))

    # ---- reading -------------------------------------------------------------------------------

    def columns(self, source: str, since: float = 0.0) -> dict[str, list[float | None]]:
        """Return times and values of a source after *since* as columns of equal length.

        ``times``: unix time. An unknown value is None.
        """
        points = self._series.of(source, since=since)
        columns: dict[str, list[float | None]] = {"times": [at for at, _ in points]}
        for number, name in enumerate(FIELDS):
            digits = _DIGITS[number]
            values = (values[number] for _, values in points)
            columns[name] = [None if v is None else round(v, digits) for v in values]
        return columns

    def points(self, source: str) -> list[tuple[int, Values]]:
        """Return times and values of a source over the last day, the oldest first."""
        return self._series.of(source)

    def spark(self, source: str) -> str:
        """Return the rate of a source over the last hour as points of a polyline."""
        return spark(self._series.rates(source, self._clock() - SPARK_SECONDS))
