"""The output of the demo: bars and a live table on a terminal, single lines elsewhere."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamer.commands.demo.watch import Flow, Sample, SyncProgress
from streamer.commands.screen import lag_style
from streamer.quantities import format_bytes, format_latency

LINE_SECONDS: Final = 2.0
RATE_SECONDS: Final = 2.0
"""A rate is that of the last two seconds."""


@dataclass(slots=True)
class TableOfShops:
    """A table of all shops, as ``streamer compare`` found it. ``rows``: by sid."""

    source: str
    target: str
    rows: dict[str, int] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.differences


def gather_tables(compared: Iterable[dict[str, Any]]) -> tuple[TableOfShops, ...]:
    """Gather the tables of ``compare --json`` by their name. Pure."""
    found: dict[str, TableOfShops] = {}
    for row in compared:
        table = found.setdefault(row["source"], TableOfShops(row["source"], row["target"]))
        table.rows[row["sid"]] = row["rows_source"]
        if not row["equal"]:
            counts = ", ".join(
                f"{row[kind]} {kind}" for kind in ("missing", "extra", "different", "undecided")
            )
            table.differences.append(f"{row['sid']}: {row['error'] or counts}")
    return tuple(found.values())


@dataclass(slots=True)
class DemoReport:
    """How it went."""

    rows_copied: int = 0
    sync_seconds: float = 0.0
    workload_seconds: float = 0.0
    drain_seconds: float = 0.0
    changes: int = 0
    transactions: int = 0
    peak_lag_seconds: float = 0.0
    peak_lag_bytes: int = 0
    commit_to_visible_seconds: float | None = None
    tables: tuple[TableOfShops, ...] = ()

    @property
    def is_equal(self) -> bool:
        return bool(self.tables) and all(table.is_equal for table in self.tables)

    @property
    def changes_per_second(self) -> float:
        return self.changes / self.workload_seconds if self.workload_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "tables"}
        fields["changes_per_second"] = self.changes_per_second
        fields["equal"] = self.is_equal
        fields["tables"] = [
            {
                "table": table.source,
                "target": table.target,
                "rows": table.rows,
                "equal": table.is_equal,
                "differences": table.differences,
            }
            for table in self.tables
        ]
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in fields.items()
        }


class View:
    """Writes to a console, in one of two ways."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show that something takes a moment, and then how long it took."""
        began = time.monotonic()
        with self._console.status(text) if self._console.is_terminal else contextlib.nullcontext():
            yield
        self.say(f"{text}: {time.monotonic() - began:.1f} s")

    # ---- the copy ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def sync(self, rows_total: int) -> Iterator[Callable[[SyncProgress], None]]:
        """Show a copy of *rows_total* rows; return the function that takes its progress."""
        if not self._console.is_terminal:
            yield _SyncLines(self, rows_total).update
            return
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            _RowRate(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        task = progress.add_task("Spark starts", total=None)

        def update(sync: SyncProgress) -> None:
            if sync.rows_copied:
                progress.update(
                    task,
                    description="Spark copies",
                    total=rows_total,
                    completed=min(sync.rows_copied, rows_total),
                )

        with progress:
            yield update

    # ---- the stream ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, seconds: float, titles: dict[str, str]) -> Iterator["StreamView"]:
        """Show *seconds* of workload; *titles* names the sources by sid."""
        view = StreamView(seconds, titles)
        if not self._console.is_terminal:
            view.on_sample = _StreamLines(self, view).update
            yield view
            return
        with Live(view, console=self._console, refresh_per_second=5):
            yield view

    # ---- the end -------------------------------------------------------------------------------

    def summarize(self, report: DemoReport) -> None:
        """Show how it went."""
        sids = list(report.tables[0].rows) if report.tables else []
        table = Table(title="source and target", title_justify="left", expand=False)
        table.add_column("table")
        table.add_column("target")
        for sid in sids:
            table.add_column(f"rows {sid}", justify="right")
        table.add_column("equal")
        for its in report.tables:
            table.add_row(
                its.source,
                its.target,
                *(f"{its.rows[sid]:,}" for sid in sids),
                Text("yes", "green") if its.is_equal else Text("NO", "bold red"),
            )
        self._console.print(table)
        for its in report.tables:
            for difference in its.differences:
                self._console.print(f"{its.source}: {difference}", markup=False, soft_wrap=True)
        latency = ""
        if report.commit_to_visible_seconds is not None:
            latency = f", visible {format_latency(report.commit_to_visible_seconds)} after commit"
        self.say(
            f"rows copied      {report.rows_copied:,} in {report.sync_seconds:.1f} s,"
            " including the start of Spark\n"
            f"changes streamed {report.changes:,} in {report.transactions:,} transactions,"
            f" {report.changes_per_second:,.0f} per second{latency}\n"
            f"peak lag         {format_latency(report.peak_lag_seconds)},"
            f" {format_bytes(report.peak_lag_bytes)};"
            f" caught up {report.drain_seconds:.1f} s after the last commit\n"
            f"equal            {'yes' if report.is_equal else 'NO'}"
        )


class _RowRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} rows/s" if task.speed else "")


class _SyncLines:
    """The copy as lines."""

    def __init__(self, view: View, rows_total: int) -> None:
        self._view = view
        self._total = rows_total
        self._next_at = 0.0
        self._first: tuple[float, int] | None = None

    def update(self, sync: SyncProgress) -> None:
        now = time.monotonic()
        if self._first is None:
            if not sync.rows_copied:
                if not self._next_at:
                    self._view.say("  Spark starts")
                    self._next_at = now
                return
            self._first = (now, sync.rows_copied)
        elif now < self._next_at:
            return
        self._next_at = now + LINE_SECONDS
        began, first = self._first
        rate = (sync.rows_copied - first) / (now - began) if now > began else 0.0
        pace = ""
        if rate:
            left = max(0, self._total - sync.rows_copied) / rate
            pace = f", {rate:,.0f} rows/s, {left:.0f} s left"
        self._view.say(
            f"  {sync.rows_copied:,} of {self._total:,} rows"
            f" ({100 * sync.rows_copied // self._total} %){pace}"
        )


class StreamView:
    """The stream as a live table: latest values, and rates over the last seconds."""

    def __init__(self, seconds: float, titles: dict[str, str]) -> None:
        self.titles = titles
        self.phase = "workload"
        self.on_sample: Callable[[], None] = lambda: None
        self.workload_transactions: dict[str, int] = {}
        self.workload_rates: dict[str, float] = {}
        self.samples: deque[Sample] = deque()
        self._counts: deque[dict[str, int]] = deque()
        self._began = time.monotonic()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        return min(time.monotonic() - self._began, self._seconds)

    def update(self, sample: Sample, transactions: dict[str, int]) -> None:
        """Take the metrics of the program, and the work that the shops did until the same
        moment.
        """
        self.samples.append(sample)
        self._counts.append(transactions)
        while sample.taken_at - self.samples[0].taken_at > RATE_SECONDS:
            self.samples.popleft()
            self._counts.popleft()
        self.on_sample()

    @property
    def _window_seconds(self) -> float:
        return self.samples[-1].taken_at - self.samples[0].taken_at or 1.0

    def change_rate(self, sid: str) -> float:
        first, last = self.samples[0].flows.get(sid), self.samples[-1].flows.get(sid)
        return ((last or Flow()).changes - (first or Flow()).changes) / self._window_seconds

    def transaction_rate(self, sid: str) -> float:
        return (self._counts[-1][sid] - self._counts[0][sid]) / self._window_seconds

    def flow(self, sid: str) -> Flow:
        return self.samples[-1].flows.get(sid) or Flow()

    def __rich__(self) -> Group:
        table = Table(expand=False)
        table.add_column("source")
        for name in ("commits/s", "changes/s", "changes", "lag", "lag bytes"):
            table.add_column(name, justify="right", min_width=9)
        for sid, title in self.titles.items() if self.samples else ():
            flow = self.flow(sid)
            table.add_row(
                title,
                f"{self.transaction_rate(sid):,.0f}",
                f"{self.change_rate(sid):,.0f}",
                f"{flow.changes:,}",
                Text(format_latency(flow.lag_seconds), lag_style(flow.lag_seconds)),
                format_bytes(flow.lag_bytes),
            )
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self.phase),
            ProgressBar(self._seconds, self.elapsed, width=40),
            Text(f"{self.elapsed:.0f} of {self._seconds:g} s"),
        )
        return Group(table, bar)


class _StreamLines:
    """The stream as lines."""

    def __init__(self, view: View, stream: StreamView) -> None:
        self._view = view
        self._stream = stream
        self._next_at = time.monotonic() + LINE_SECONDS

    def update(self) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + LINE_SECONDS
        stream = self._stream
        parts = [
            f"{sid} {stream.transaction_rate(sid):,.0f} commits/s"
            f" {stream.change_rate(sid):,.0f} changes/s"
            f" lag {format_latency(stream.flow(sid).lag_seconds)}"
            f" {format_bytes(stream.flow(sid).lag_bytes)}"
            for sid in stream.titles
        ]
        self._view.say(f"  {stream.elapsed:4.0f} s  {'; '.join(parts)}")
