"""What ``streamer status`` prints, and the screen of ``--watch``."""

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamer.apply.target import TargetAddress
from streamer.commands.screen import format_bytes, format_seconds, lag_style, until_interrupted
from streamer.commands.status import SourceStatus, StatusReport, TableStatus, read_report
from streamer.observability.logs import redact
from streamer.route.mapping import Mapping
from streamer.runtime.target_watch import TargetHealth

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


def render_target(target: TargetHealth) -> Text:
    """Return the line of the target."""
    line = Text.assemble("target ", target.name, ": ", _state(target.state))
    if target.error is not None:
        line.append(f": {redact(target.error)}")
    if target.hint is not None:
        line.append(f"\n  to do: {redact(target.hint)}")
    return line


def render_status(statuses: Sequence[SourceStatus]) -> Group:
    """Return statuses for people."""
    return Group(*(part for status in statuses for part in _render_source(status)))


def _render_source(status: SourceStatus) -> Iterable[RenderableType]:
    title = Text.assemble(f"{status.label}: ", _state(status.state))
    if status.lag_bytes is None:
        title.append(", lag ?")
    else:
        title.append(f", lag {format_bytes(status.lag_bytes)}")
    if status.lag_seconds is not None:
        seconds = status.lag_seconds
        title.append(", ").append(format_seconds(seconds), lag_style(seconds))
    if status.heartbeat_seconds is not None:
        seconds = status.heartbeat_seconds
        title.append(", heartbeat ").append(format_seconds(seconds), lag_style(seconds))
    retained = status.retained_wal_bytes
    title.append(f", WAL retained {'?' if retained is None else format_bytes(retained)}")
    if status.backlog is not None:
        title.append(_backlog(status.backlog))
    table = Table(title=title, title_justify="left", title_style="", expand=False)
    for column in ("table", "target", "type", "state", "position", "copied", "held"):
        table.add_column(column, overflow="fold")
    for row in status.tables:
        table.add_row(
            Text(row.source),
            Text(row.target),
            row.type,
            _state(row.state),
            row.end_lsn,
            _copied(row),
            _held(row),
        )
    yield table
    if status.error:
        yield Text(f"  error: {redact(status.error)}")
    for row in status.tables:
        if row.error:
            yield Text(f"  {row.source}: {redact(row.error)}")
        if row.waiting_for:
            yield Text(f"  {row.source}: waits for {redact(row.waiting_for)}")
        if row.quarantined:
            yield Text(
                f"  {row.source}: {row.quarantined} changes are in quarantine; "
                "streamer quarantine list shows them"
            )


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


def _copied(row: TableStatus) -> str:
    rows, size = f"{row.rows_copied:,}", format_bytes(row.bytes_copied)
    if row.state == "copying":
        if row.rows_total:
            rows += f" of about {row.rows_total:,}"
        if row.bytes_total:
            size += f" of about {format_bytes(row.bytes_total)}"
    text = f"{rows} rows, {size}"
    if row.rows_per_second is not None:
        text += f", {row.rows_per_second:,.0f} rows/s"
    if row.seconds_left is not None:
        text += f", {format_seconds(row.seconds_left)} left"
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
    address: TargetAddress,
    mapping: Mapping,
    interval: float,
    console: Console,
    *,
    as_json: bool = False,
) -> None:
    """Show the status every *interval* seconds until interrupted; on no terminal, one below the
    other, or one JSON object a line.

    An outage of the target is shown, and waited for.
    """
    await until_interrupted(_watch(address, mapping, interval, console, as_json=as_json))


async def _watch(
    address: TargetAddress, mapping: Mapping, interval: float, console: Console, *, as_json: bool
) -> None:
    report = await read_report(address, mapping)
    is_live = console.is_terminal and not as_json
    screen = Live(console=console, screen=True, auto_refresh=False) if is_live else None
    with screen or contextlib.nullcontext():
        while True:
            if screen is not None:
                screen.update(_screen(report), refresh=True)
            elif as_json:
                found = report.to_json() | {"error": report.target.error}
                console.file.write(json.dumps(found, default=str) + "\n")
                console.file.flush()
            else:
                console.print(_screen(report))
                console.file.flush()
            await asyncio.sleep(interval)
            report = await read_report(address, mapping)


def _screen(report: StatusReport) -> Group:
    """Return a page: what asks for attention first, because the end of a long one is cut off."""
    head = Text(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}")
    statuses = report.sources
    for status in statuses:
        status.tables.sort(key=lambda table: (table.state == "ready", table.source))
    calm = [s for s in statuses if s.state == "streaming" and s.error is None]
    ordered = [*(status for status in statuses if status not in calm), *calm]
    return Group(head, render_target(report.target), render_status(ordered))
