"""Samples sources and tables of this process, and stores the values of each minute at the target.

A sample uses only facts of this process, without queries. The values of each completed
minute of a source go to `streamer.minute`. All processes read these rows, including this process
after a restart.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from streamer.admin.live.charts import DELAY_COLUMNS, QUANTILES, quantile, spark
from streamer.admin.live.minute_exchange import MinuteExchange
from streamer.admin.live.minute_series import (
    FIELDS,
    FINE_SECONDS,
    FINE_SLOTS,
    UNKNOWN,
    Point,
    Series,
    highest,
)
from streamer.admin.live.table_history import TABLE_FIELDS, Sampled, TableHistory
from streamer.admin.live.work_samples import Working, WorkSamples
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.minutes import Minute, Values

SPARK_SECONDS: Final = FINE_SECONDS * FINE_SLOTS
_DIGITS: Final = (3, 2, 0)
"""The decimal places of the values in answers, in the order of `FIELDS` and `TABLE_FIELDS`."""
_DELAY_DIGITS: Final = (4, 4, 4)
Columns = dict[str, list[float | None]]
"""Times and values as columns of equal length. ``times``: unix time in seconds. An unknown value is
None.
"""


class SampledEngine(Sampled, Working, Protocol):
    """The sampled engine, with the bookkeeping for the minutes."""

    @property
    def bookkeeping(self) -> Bookkeeping | None: ...


class SourceHistory:
    """Samples every source of this process each 10 s.

    *read_labels*: returns the sources with a history, including the sources of sibling processes.
    """

    def __init__(
        self,
        engine: SampledEngine,
        read_labels: Callable[[], Iterable[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._read_labels = read_labels
        self._clock = clock
        self._series: Series[str] = Series()
        self._delays = DelayHistory(engine)
        self.tables = TableHistory(engine)
        self.work = WorkSamples(engine)
        self._is_shared = False
        """Whether other processes run some of the sources."""
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
        now, labels = self._clock(), set(self._read_labels())
        seconds = 1.0 if self._sampled_at is None else max(now - self._sampled_at, 1.0)
        self._series.retain(labels)
        samples = self._read(seconds)
        self._is_shared = not labels <= samples.keys()
        completed = self._series.add(now, samples)
        self.exchange.enqueue([Minute(at, label, values) for at, label, values in completed])
        self._delays.sample(now)
        self.tables.sample(now, seconds)
        self._sampled_at = now

    def _read(self, seconds: float) -> dict[str, Values]:
        """Return the present values of each source of this process, without a rate at first."""
        applied = self._engine.metrics.changes_of_sources
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
        self._changes = counted
        return samples

    # ---- reading -------------------------------------------------------------------------------

    def columns(self, source: str, since: float = 0.0) -> Columns:
        """Return times and values of a source after *since*."""
        return _columns(self._series.points(source, since=since), FIELDS, _DIGITS)

    def table_columns(self, source: str, table: str, since: float = 0.0) -> Columns:
        """Return times and values of a table after *since*, and sample the table from now on."""
        self.tables.follow(source, table, self._clock())
        return _columns(self.tables.points(source, table, since), TABLE_FIELDS, _DIGITS)

    def fleet_columns(self, since: float = 0.0) -> Columns:
        """Return times and totals of all sources after *since*, and the quantiles of the delays of
        this process. A thread may call this.
        """
        by_minute = self._is_shared
        totals = self._series.totals(by_minute=by_minute, since=since)
        delays = dict(self._delays.points(by_minute=by_minute, since=since))
        quantiles = [(at, delays.get(at, UNKNOWN)) for at, _ in totals]
        columns = _columns(quantiles, DELAY_COLUMNS, _DELAY_DIGITS)
        return _columns(totals, FIELDS, _DIGITS) | columns

    def spark(self, source: str) -> str:
        """Return the rate of a source over the last hour as points of a polyline."""
        return spark(self._series.rates(source, self._clock() - SPARK_SECONDS))


def _columns(points: list[Point], names: Sequence[str], digits: Sequence[int]) -> Columns:
    columns: Columns = {"times": [at for at, _ in points]}
    for number, name in enumerate(names):
        values = (values[number] for _, values in points)
        columns[name] = [None if v is None else round(v, digits[number]) for v in values]
    return columns


class DelayHistory:
    """Samples the quantiles of the time from a commit at a source until the target shows the commit
    (`commit_to_visible`), over all sources of this process.
    """

    def __init__(self, engine: Sampled) -> None:
        self._engine = engine
        self._series: Series[None] = Series(highest)
        self._counts: list[float] | None = None

    def sample(self, now: float) -> None:
        """Add the quantiles of the observations since the last sample."""
        bounds, counts = self._engine.metrics.delays()
        fresh = [new - old for new, old in zip(counts, self._counts or counts, strict=True)]
        p50, p95, p99 = (quantile(share, bounds, fresh) for share in QUANTILES)
        self._series.add(now, {None: (p50, p95, p99)})
        self._counts = counts

    def points(self, *, by_minute: bool, since: float) -> list[Point]:
        """Return times and quantiles after *since*, the oldest first."""
        return self._series.points(None, by_minute=by_minute, since=since)
