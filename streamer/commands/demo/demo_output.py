"""The output of the demo: the live status on a terminal, single lines elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamer.commands.demo.demo_figures import DemoReport
from streamer.commands.status import StatusReport
from streamer.commands.status_output import render_lines
from streamer.util.quantities import format_bytes, format_latency

LINE_SECONDS: Final = 2.0

Follow = Callable[[StatusReport, str], None]
"""Shows a status, and a sentence about the demo's own work."""


class View:
    """Writes to a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show *text* during the block, and then the time that the block took."""
        began = time.monotonic()
        with self._console.status(text) if self._console.is_terminal else contextlib.nullcontext():
            yield
        self.say(f"{text}: {time.monotonic() - began:.1f} s")

    @contextlib.contextmanager
    def following(self) -> Iterator[Follow]:
        """Show the statuses passed to the returned function, as ``status --watch`` does."""
        if self._console.is_terminal:
            with Live(console=self._console, transient=True, auto_refresh=False) as live:

                def show(report: StatusReport, text: str) -> None:
                    lines = render_lines(report, self._console.width)
                    live.update(Group(*lines, Text(), Text(text)), refresh=True)

                yield show
            return
        last, said_at = "", 0.0

        def say(report: StatusReport, text: str) -> None:
            nonlocal last, said_at
            if text != last and time.monotonic() >= said_at + LINE_SECONDS:
                last, said_at = text, time.monotonic()
                self.say(f"  {text}")

        yield say

    def summarize(self, report: DemoReport) -> None:
        """Show the result of the demo."""
        sids = list(report.tables[0].rows) if report.tables else []
        table = Table(title="source and target", title_justify="left", expand=False)
        table.add_column("table")
        table.add_column("target")
        for sid in sids:
            table.add_column(f"rows {sid}", justify="right")
        table.add_column("equal")
        for compared in report.tables:
            table.add_row(
                compared.source,
                compared.target,
                *(f"{compared.rows[sid]:,}" for sid in sids),
                Text("yes", "green") if compared.is_equal else Text("NO", "bold red"),
            )
        self._console.print(table)
        for compared in report.tables:
            for difference in compared.differences:
                self._console.print(
                    f"{compared.source}: {difference}", markup=False, soft_wrap=True
                )
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
