"""Samples the sources of this process, and stores minutes that outlive the process.

A sample uses only facts of this process, without queries. Each completed minute goes to the target.
All processes read the minutes, including this process after a restart.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from streamer.admin.live.minute_exchange import MinuteExchange
from streamer.admin.live.minute_series import (
    FIELDS,
    FINE_SECONDS,
    FINE_SLOTS,
    Series,
    spark,
)
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.minutes import Values
from streamer.observability.metrics import Metrics
from streamer.runtime.session.supervisor import Supervisor

SPARK_SECONDS: Final = FINE_SECONDS * FINE_SLOTS
_DIGITS: Final = (3, 2, 0)
"""The decimal places of the values in answers, in the order of `FIELDS`."""


class Sampled(Protocol):
    """The sampled object, which is an engine."""

    @property
    def supervisors(self) -> Sequence[Supervisor]: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def bookkeeping(self) -> Bookkeeping | None: ...


class SourceHistory:
    """Samples every source of this process each 10 s.

    *read_labels*: returns the sources with a history, including the sources of sibling processes.
    """

    def __init__(
        self,
        engine: Sampled,
        read_labels: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._read_labels = read_labels
        self._clock = clock
        self._series = Series()
        self.exchange = MinuteExchange(lambda: engine.bookkeeping, self._series, clock)
        self._changes: dict[str, int] = {}
        self._sampled_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample, unless sampling has begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="history of sources")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            # Sampling continues while the target does not answer.
            group.create_task(self.exchange.run(), name="exchange of minutes")
            while True:
                await asyncio.sleep(FINE_SECONDS - self._clock() % FINE_SECONDS)
                self.sample()

    def sample(self) -> None:
        """Add a sample of each source; the exchange stores a completed minute."""
        now = self._clock()
        self._series.retain(self._read_labels())
        self.exchange.enqueue(self._series.add(now, self._read(now)))

    def _read(self, now: float) -> dict[str, Values]:
        """Return the present values of each source of this process, without a rate at first."""
        applied = self._engine.metrics.changes_of_sources
        seconds = 1.0 if self._sampled_at is None else max(now - self._sampled_at, 1.0)
        samples: dict[str, Values] = {}
        counted: dict[str, int] = {}
        for supervisor in self._engine.supervisors:
            if supervisor.runs_elsewhere:
                continue
            label, pipeline = supervisor.source.label, supervisor.pipeline
            counted[label] = changes = applied.get(label, 0)
            count = self._changes.get(label)
            lag = rate = None
            if pipeline is not None:
                lag = pipeline.lag_seconds()
                rate = None if count is None else max(0, changes - count) / seconds
            wal = supervisor.retained_wal_bytes
            samples[label] = (lag, rate, None if wal is None else float(wal))
        self._changes, self._sampled_at = counted, now
        return samples

    # ---- reading -------------------------------------------------------------------------------

    def columns(self, source: str, since: float = 0.0) -> dict[str, list[float | None]]:
        """Return times and values of a source after *since* as columns of equal length.

        ``times``: unix time. An unknown value is None.
        """
        points = self._series.points(source, since=since)
        columns: dict[str, list[float | None]] = {"times": [at for at, _ in points]}
        for number, name in enumerate(FIELDS):
            digits = _DIGITS[number]
            values = (values[number] for _, values in points)
            columns[name] = [None if v is None else round(v, digits) for v in values]
        return columns

    def points(self, source: str) -> list[tuple[int, Values]]:
        """Return times and values of a source over the last day, the oldest first."""
        return self._series.points(source)

    def spark(self, source: str) -> str:
        """Return the rate of a source over the last hour as points of a polyline."""
        return spark(self._series.rates(source, self._clock() - SPARK_SECONDS))
