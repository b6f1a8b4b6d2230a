"""The output of ``streamer status``, and the pages of ``--watch``.

A summary comes first, then the problems, then every source with its tables. `render_lines` drops
columns in a narrow terminal, but never cuts or wraps a name.
"""

import asyncio
import contextlib
import json
import os
import sys
import termios
import tty
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from streamer.bookkeeping.replicas import ReplicaRecord
from streamer.commands.status import SourceStatus, StatusReport, TableStatus
from streamer.commands.status_problems import find_problems, in_order_of_need, summarize
from streamer.commands.terminal_screen import lag_style, show_until_interrupted
from streamer.commands.terminal_table import ListingColumn, print_lines, table_lines
from streamer.copy.automatic_waits import STARTING_SPARK
from streamer.errors.command_lines import some_of
from streamer.mapping.rules import SourceLabel
from streamer.observability.logs import redact
from streamer.report.problems import Problem
from streamer.runtime.target_health import TargetHealth
from streamer.util.quantities import format_bytes, format_latency

STATE_STYLES = {
    "streaming": "green",
    "ready": "green",
    "reachable": "green",
    "refused": "bold red",
    "read-only": "bold red",
    "error": "bold red",
    "unreachable": "bold red",
    "stopped": "yellow",
    "paused": "yellow",
    "waiting": "yellow",
}
_NAMED_MAX: Final = 10
"""Sources that the summary names; the list of problems names all."""

ReadReport = Callable[[], Awaitable[StatusReport]]


def render_lines(report: StatusReport, width: int | None = None) -> list[Text]:
    """Return the status as lines for people, without the columns that do not fit into *width*."""
    pairs = [(status, find_problems(status)) for status in report.sources]
    pairs.sort(key=lambda item: not item[1])
    ordered = [status for status, _ in pairs]
    lines = [_target_line(report.target), _summary(report)]
    replicas = report.fleet.replicas
    if len(replicas) > 1 or any(r.max_sources is not None for r in replicas):
        counts = report.fleet.counts()
        runs = [f"{r.name} runs {counts[r.name]}{_limit(r)}" for r in replicas]
        lines.append(Text(f"{len(runs)} replica{'s' * (len(runs) > 1)}: {', '.join(runs)}"))
        if outdated := [r.name for r in report.outdated_replicas()]:
            names = ", ".join(outdated)
            lines.append(Text(f"{names}: not yet using the newest mapping", "bold"))
    listed = [*report.problems, *(problem for _, problems in pairs for problem in problems)]
    problems = [_problem_line(problem) for problem in listed]
    if problems:
        lines += [Text(), Text("Problems:", "bold"), *problems]
    for status in ordered:
        lines += [Text(), _heading(status)]
        if tables := in_order_of_need(status):
            lines += table_lines(_columns(status), tables, width)
    return lines


def _limit(replica: ReplicaRecord) -> str:
    limit = replica.max_sources
    return "" if limit is None else f" (--max-sources {limit})"


def _target_line(target: TargetHealth) -> Text:
    return Text.assemble("target ", target.name, ": ", _state(target.state))


def _summary(report: StatusReport) -> Text:
    """Count sources and tables by state, and name what needs attention, in a line."""
    text = Text()
    for noun, states in (
        ("source", [status.state for status in report.counted]),
        ("table", [s.state_of_table(table) for s in report.counted for table in s.tables]),
    ):
        text.append(f"{len(states)} {noun}{'' if len(states) == 1 else 's'}", "bold")
        counts = sorted(Counter(states).items(), key=lambda item: STATE_STYLES.get(item[0], ""))
        for number, (state, count) in enumerate(counts):
            text.append(", " if number else ": ")
            text.append(f"{count} ").append(state, STATE_STYLES.get(state, ""))
        text.append("; ")
    return text.append(_attention(summarize(report)))


def _attention(summary: dict[str, Any]) -> str:
    """Return the number of fine sources and the names of sources with problems."""
    count, fine = summary["sources"], summary["fine"]
    labels = dict.fromkeys(
        SourceLabel(problem["database"], problem["sid"]) if problem["database"] else problem["kind"]
        for problem in summary["problems"]
    )
    if not labels:
        return "all sources are fine" if count else "no source is mapped"
    words = "is fine" if fine == 1 else "are fine"
    rest = f"{fine} of {count} sources {words}; " if fine else ""
    names = some_of(labels, _NAMED_MAX)
    return f"{rest}{len(labels)} need{'s' if len(labels) == 1 else ''} attention: {names}"


def _problem_line(problem: Problem) -> Text:
    line = Text(f"  {problem.subject}")
    if problem.state:
        line.append(" (").append_text(_state(problem.state)).append(")")
    return line.append(f": {redact(problem.sentence)}")


def _heading(status: SourceStatus) -> Text:
    title = Text.assemble(f"{status.label}: ", _state(status.state))
    if status.process is not None:
        title.append(f" by {status.process}")
    if status.role == "standby":
        title.append(", from a standby")
    if status.waiting_for and not status.error:
        title.append(f", waits for {redact(status.waiting_for)}")
    if status.implementation == "pure":
        title.append(", pure Python")
    if status.lag_bytes is None:
        title.append(", lag ?")
    else:
        title.append(f", lag {format_bytes(status.lag_bytes)}")
    if status.lag_seconds is not None:
        seconds = status.lag_seconds
        title.append(", ").append(format_latency(seconds), lag_style(seconds))
    if status.heartbeat_seconds is not None:
        seconds = status.heartbeat_seconds
        title.append(", heartbeat ").append(format_latency(seconds), lag_style(seconds))
    retained = status.retained_wal_bytes
    title.append(f", WAL retained {'?' if retained is None else format_bytes(retained)}")
    if status.backlog is not None:
        title.append(_backlog(status.backlog))
    return title


def _columns(status: SourceStatus) -> Sequence[ListingColumn[TableStatus]]:
    return (
        ListingColumn("table", lambda row: row.source),
        ListingColumn("state", lambda row: _table_state(status, row)),
        ListingColumn("held", _held, 1),
        ListingColumn("target", lambda row: row.target, 4),
        ListingColumn("type", lambda row: row.type, 3),
        ListingColumn("copied", _copied, 2),
        ListingColumn("position", lambda row: row.end_lsn, 5),
        ListingColumn("transport", lambda row: row.transport, 6),
        ListingColumn("verified (UTC)", lambda r: (r.verified_at or "")[:16].replace("T", " "), 7),
    )


def as_json_object(report: StatusReport) -> dict[str, Any]:
    """Return the output of ``status --json``."""
    return report.to_json() | {"summary": summarize(report)}


def print_status(report: StatusReport, console: Console, *, is_wide: bool) -> None:
    """Print the status; in a pipe, or where *is_wide*, with all columns."""
    width = console.width if console.is_terminal and not is_wide else None
    print_lines(render_lines(report, width), console)


def _backlog(backlog: dict[str, Any]) -> Text:
    text = Text()
    if backlog["limit_bytes"] is not None:
        state = backlog["state"]
        style = {"ok": "", "warning": "yellow"}.get(state, "bold red")
        text.append(f" of {format_bytes(backlog['limit_bytes'])}")
        if state != "ok":
            text.append(", ").append(f"backlog {state}", style)
    if backlog["spooled_bytes"]:
        text.append(f", journal {format_bytes(backlog['spooled_bytes'])}")
    return text


def _state(state: str) -> Text:
    return Text(state, STATE_STYLES.get(state, ""))


def _table_state(status: SourceStatus, row: TableStatus) -> Text:
    state = _state(status.state_of_table(row))
    if row.wait is not None and not row.wait.is_automatic:
        state.style = "yellow"
    return state


def _copied(row: TableStatus) -> str:
    if row.waiting_for == STARTING_SPARK.text:
        return "starting Spark"
    rows, size = f"{row.rows_copied:,}", format_bytes(row.bytes_copied)
    if row.state == "copying":
        if row.rows_total:
            rows += f" of about {row.rows_total:,}"
        if row.bytes_total:
            size += f" of about {format_bytes(row.bytes_total)}"
    text = f"{rows} rows, {size}"
    if row.chunks_copied is not None:
        text += f", chunk {row.chunks_copied} of about {row.chunks_total}"
    if row.rows_per_second is not None:
        text += f", {row.rows_per_second:,.0f} rows/s"
    if row.seconds_left is not None:
        text += f", {format_latency(row.seconds_left)} left"
    return text


def _held(row: TableStatus) -> str:
    if not row.held_changes:
        return ""
    plural = "" if row.held_changes == 1 else "s"
    text = f"{row.held_changes:,} change{plural}, {format_bytes(row.held_bytes)}"
    if row.retained_wal_bytes:
        text += f", keeps {format_bytes(row.retained_wal_bytes)} of WAL"
    return text


# ---- watching ----------------------------------------------------------------------------------


async def watch(
    read: ReadReport,
    interval: float,
    console: Console,
    *,
    is_wide: bool = False,
    as_json: bool = False,
) -> None:
    """Show the status every *interval* seconds until interrupted: in pages on a terminal; elsewhere
    one status after the next, or a JSON object a line.

    During an outage of the target, the view shows the outage and waits.
    """
    if console.is_terminal and not as_json:
        showing = _watch_screen(read, interval, console, is_wide=is_wide)
    else:
        showing = _watch_lines(read, interval, console, as_json=as_json)
    await show_until_interrupted(showing)


async def _watch_lines(
    read: ReadReport, interval: float, console: Console, *, as_json: bool
) -> None:
    while True:
        report = await read()
        if as_json:
            fields = as_json_object(report) | {"error": report.target.error}
            console.file.write(json.dumps(fields, default=str) + "\n")
        else:
            print_lines([_clock()], console)
            print_status(report, console, is_wide=True)
        console.file.flush()
        await asyncio.sleep(interval)


async def _watch_screen(
    read: ReadReport, interval: float, console: Console, *, is_wide: bool
) -> None:
    report = await read()
    pager = Pager()
    with (
        _keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as screen,
    ):
        looked_at = asyncio.get_running_loop().time()
        while True:
            width = None if is_wide else console.width
            lines = render_lines(report, width)
            page = pager.page(_clock(), lines, console.height)
            for line in page:
                line.no_wrap, line.overflow = True, "crop"
            screen.update(Group(*page), refresh=True)
            seconds = looked_at + interval - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    if not pager.press(await keys.get()):
                        return
                continue
            except TimeoutError:
                pass
            report = await read()
            looked_at = asyncio.get_running_loop().time()


def _clock() -> Text:
    return Text(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}")


class Pager:
    """The part of the lines that a screen shows. Pure."""

    def __init__(self) -> None:
        self._number = 0

    def press(self, key: str) -> bool:
        """Turn pages; return False if the key asks for the end."""
        if key in (" ", "\n", "\r", "n", "\x1b[6~", "\x1b[B"):
            self._number += 1
        elif key in ("b", "p", "\x1b[5~", "\x1b[A"):
            self._number = max(0, self._number - 1)
        elif key in ("g", "\x1b[H"):
            self._number = 0
        return key != "q"

    def page(self, head: Text, lines: Sequence[Text], height: int) -> list[Text]:
        """Return *head*, the lines of the current page, and a foot if there are more lines."""
        if len(lines) + 1 <= height:
            self._number = 0
            return [head, *lines]
        size = max(1, height - 2)
        count = -(-len(lines) // size)
        self._number = min(self._number, count - 1)
        shown = lines[self._number * size : (self._number + 1) * size]
        foot = f"page {self._number + 1} of {count}; space: next, b: back, q: end"
        return [head, *shown, Text(foot, "reverse")]


@contextlib.contextmanager
def _keys() -> Iterator["asyncio.Queue[str]"]:
    """Queue the operator's keystrokes during the block; none if stdin is not a terminal."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield keys
        return
    descriptor = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    attributes = termios.tcgetattr(descriptor)

    def read() -> None:
        if data := os.read(descriptor, 32):
            keys.put_nowait(data.decode(errors="replace"))
        else:
            loop.remove_reader(descriptor)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield keys
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
