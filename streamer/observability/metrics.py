"""The counters and histograms: name, labels and help text. `runtime.health.gauges` defines the
gauges.

``make reference`` writes all metrics to ``docs/reference/metrics.md``.
"""

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric

from streamer.decode.pgoutput import from_datetime
from streamer.errors.error_classes import StreamerError
from streamer.mapping.rules import SourceLabel
from streamer.observability import build_facts
from streamer.observability.table_metrics import (
    SOURCE,
    TableCounter,
    TableDetail,
    TableLabels,
    TableSeconds,
)

if TYPE_CHECKING:
    from streamer.observability.spans import Spans

log = structlog.get_logger()

# The creation times of counters would double the series of a busy table.
disable_created_metrics()  # type: ignore[no-untyped-call]

T = TypeVar("T")

OPERATIONS: Final = ("insert", "update", "delete", "truncate")
_LATENCY_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class _Delays(Histogram):
    """A histogram that takes the observations of a whole window at once."""

    def observe_all(self, now: int, times: Sequence[int]) -> None:
        """Observe the delay from each of *times* to *now*, in microseconds. A later time counts as
        *now*: the clocks of the servers may differ.
        """
        ordered = sorted(times)
        elapsed = bisect_right(ordered, now)
        self._sum.inc((elapsed * now - sum(ordered[:elapsed])) / 1_000_000)
        slower = len(ordered)
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            oldest = now - bound * 1_000_000
            faster = bisect_left(ordered, oldest, hi=slower)
            if faster < slower:
                bucket.inc(slower - faster)
            slower = faster

    @property
    def bucket_counts(self) -> list[float]:
        """The number of observations in each bucket."""
        return [bucket.get() for bucket in self._buckets]


class Metrics:
    """The metrics of a process, in a separate registry."""

    def __init__(self, tables_max: int | None = None) -> None:
        """*tables_max*: the number of tables up to which each table has series; None: no limit."""
        self.registry = CollectorRegistry()
        add = self.registry
        self._collectors: list[_Collector] = []
        self._sources: dict[tuple[str, str], tuple[Counter, _Delays]] = {}
        self.table_detail = TableDetail(tables_max)
        self.changes_applied = self._count_by_table(
            "streamer_changes_applied",
            "Source changes that are durable in the target",
            "operation",
        )
        self.transactions_applied = Counter(
            "streamer_transactions_applied",
            "Source transactions that are durable in the target",
            SOURCE,
            registry=add,
        )
        self.commit_to_visible = _Delays(
            "streamer_commit_to_visible_seconds",
            "Time from a commit at the source to its commit at the target",
            SOURCE,
            buckets=_LATENCY_SECONDS,
            registry=add,
        )
        self.apply_seconds = TableSeconds(
            "streamer_apply_seconds",
            "Time in which the target writes a table's changes of a window. If a window has "
            "several tables, its time is divided equally among these tables. Only for the 20 "
            "tables on which a process spent the most time",
        )
        self.collect_with(self.apply_seconds.read, self.apply_seconds.build)
        self.sync_rows = self._count_by_table(
            "streamer_sync_rows", "Rows copied; added when the copy of a table ends"
        )
        self.sync_bytes = self._count_by_table(
            "streamer_sync_bytes", "Bytes copied; added when the copy of a table ends"
        )
        self.commits = Counter(
            "streamer_commits", "Transactions committed at the target", ("worker",), registry=add
        )
        self.errors = Counter(
            "streamer_errors",
            "Errors by code; errors of the target as a whole have no database and sid",
            (*SOURCE, "code"),
            registry=add,
        )
        self.conflicts = self._count_by_table(
            "streamer_conflicts",
            "Changes applied although the target row was unexpected: update_missing (streamer "
            "inserted the row), delete_missing (no row to delete)",
            "kind",
        )
        self.skipped = self._count_by_table(
            "streamer_skipped",
            "Source changes that streamer left out: delete (rows, by `resume --skip-deletes`), "
            "truncate (by the same command, or by `skip_truncate`)",
            "operation",
        )
        self.queue_bytes = Gauge(
            "streamer_queue_bytes",
            "Bytes of changes queued for a worker",
            ("worker",),
            registry=add,
        )
        self.mapping_error = Gauge(
            "streamer_mapping_error",
            "1 while the mapping database is damaged, deleted or replaced, or the mapping is lost",
            registry=add,
        )
        self.notifications = Counter(
            "streamer_notifications",
            "Messages to the webhook of `notify`, by outcome: sent, or failed (streamer retries)",
            ("outcome",),
            registry=add,
        )
        self.build = Info(
            "streamer_build", "Version, commit and implementation of the program", registry=add
        )
        self.build.info(build_facts.labels())
        ProcessCollector(registry=add)
        self.spans: Spans | None = None
        """The receiver of spans; None without an OpenTelemetry export."""
        self.changes_of_sources: dict[str, int] = {}
        """`changes_applied` by source label."""
        self.changes_of_tables: dict[tuple[str, str], tuple[int, datetime]] = {}
        """`changes_applied` by source and table, with the time of the last durable change."""

    def _count_by_table(self, name: str, help_text: str, label: str | None = None) -> TableCounter:
        counter = TableCounter(name, help_text, label, self.table_detail)
        self.collect_with(counter.read, counter.build)
        return counter

    def count_changes(self, table: TableLabels, counts: Mapping[str, int]) -> None:
        """Count changes of a table that have just become durable, by operation."""
        total = 0
        for operation in OPERATIONS:
            number = counts[operation]
            _increase(self.changes_applied, number, *table, operation)
            total += number
        database, sid, name = table
        label = SourceLabel(database, sid or None)
        self.changes_of_sources[label] = self.changes_of_sources.get(label, 0) + total
        if total:
            count, _ = self.changes_of_tables.get((label, name), (0, None))
            self.changes_of_tables[label, name] = (count + total, datetime.now(UTC))

    def count_transactions(
        self, database: str, sid: str | None, commit_times: Sequence[int]
    ) -> None:
        """Count transactions whose changes have just become durable, and observe the delays.

        *commit_times*: microseconds since PostgreSQL's epoch, at the source.
        """
        now = from_datetime(datetime.now(UTC))
        transactions, delays = self._of_source(database, sid or "")
        transactions.inc(len(commit_times))
        delays.observe_all(now, commit_times)

    def transactions_of_sources(self) -> dict[tuple[str, str], int]:
        """Return `transactions_applied` by database and sid."""
        return {
            names: int(sum(s.value for m in transactions.collect() for s in m.samples))
            for names, (transactions, _) in self._sources.items()
        }

    def _of_source(self, database: str, sid: str) -> tuple[Counter, "_Delays"]:
        """Return the series of a source, without a search by labels for every window."""
        key = database, sid
        if (series := self._sources.get(key)) is None:
            series = self.transactions_applied.labels(*key), self.commit_to_visible.labels(*key)
            self._sources[key] = series
        return series

    @property
    def commit_count(self) -> float:
        """The number of transactions committed at the target by all workers."""
        samples = (sample for family in self.commits.collect() for sample in family.samples)
        return sum(sample.value for sample in samples)

    def delays(self) -> tuple[list[float], list[float]]:
        """Return the upper bounds of the buckets of `commit_to_visible`, and the number of
        observations of all sources in each bucket.
        """
        counts = [series.bucket_counts for _, series in self._sources.values()]
        bounds = [*_LATENCY_SECONDS, math.inf]
        return bounds, [sum(column) for column in zip(*counts, strict=True)] or [0.0] * len(bounds)

    def count_copied(self, table: TableLabels, rows: int, size: int) -> None:
        """Count the rows and bytes of a finished copy."""
        _increase(self.sync_rows, rows, *table)
        _increase(self.sync_bytes, size, *table)

    def count_conflict(self, table: TableLabels, kind: str, number: int) -> None:
        _increase(self.conflicts, number, *table, kind)

    def count_skipped(self, table: TableLabels, operation: str, number: int) -> None:
        """Count changes that were left out."""
        if number:
            _increase(self.skipped, number, *table, operation)

    def count_error(self, error: StreamerError, database: str = "", sid: str | None = None) -> None:
        self.errors.labels(database, sid or "", error.code).inc()

    def collect_with(self, read: Callable[[], T], build: Callable[[T], Iterable[Metric]]) -> None:
        """Add metrics to every scrape: *read* collects facts in the event loop, *build* makes
        metrics of them in a thread.
        """
        collector = _Collector(read, build)
        self._collectors.append(collector)
        self.registry.register(collector)

    async def render(self) -> bytes:
        """Return all metrics as text. A thread renders them, so the event loop keeps serving
        streams.
        """
        return await self.use_registry(partial(generate_latest, self.registry), asyncio.to_thread)

    async def use_registry(
        self, use: Callable[[], T], in_thread: Callable[[Callable[[], T]], Awaitable[T]]
    ) -> T:
        """Call *use*, which collects the registry, in a thread of *in_thread*."""
        facts = {id(collector): collector.read() for collector in self._collectors}
        token = _facts.set(facts)
        try:
            return await in_thread(use)
        finally:
            _facts.reset(token)


def _increase(counter: TableCounter, number: int, *labels: str) -> None:
    """Add *number* to a counter, or log an error if *number* is negative.

    The changes are durable already, so an exception here would stop a correct table.
    """
    if number < 0:
        log.error("negative increment of a counter", number=number)
        return
    counter.add(number, *labels)


_facts: ContextVar[dict[int, Any] | None] = ContextVar("facts", default=None)
"""Facts that `Metrics.render` read, by identity of their collector."""


class _Collector:
    def __init__(self, read: Callable[[], T], build: Callable[[T], Iterable[Metric]]) -> None:
        self.read: Callable[[], Any] = read
        self._build: Callable[[Any], Iterable[Metric]] = build

    def collect(self) -> Iterable[Metric]:
        facts = _facts.get()
        return self._build(self.read() if facts is None else facts[id(self)])

    def describe(self) -> Iterable[Metric]:
        return ()  # the names of metrics depend on the sources


def gauge(name: str, help_text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    """Make a gauge for a scrape."""
    return GaugeMetricFamily(name, help_text, labels=labels)
