"""The demo from beginning to end.

After any end, an error or Ctrl-C included, the demo stops its processes and removes the directory.
With `--keep`, both stay after the comparison.
"""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from typing import Final

import psycopg
import typer
from rich.console import Console

from streamer.commands import wait as wait_command
from streamer.commands.demo import shop_tables
from streamer.commands.demo.demo_figures import DemoReport, gather_tables, read_figures
from streamer.commands.demo.demo_output import Follow, View
from streamer.commands.demo.demo_servers import SOURCES, TARGET, DemoError, Stage, check_spark
from streamer.commands.demo.shop_workload import Workload
from streamer.commands.status import StatusReport, read_report
from streamer.config import static_mapping
from streamer.config.settings import ENVIRONMENT_PREFIX
from streamer.errors.error_classes import StreamerError
from streamer.target.connection import TargetAddress
from streamer.util.waiting import in_thread

SYNC_SECONDS_MAX: Final = 600.0
WAIT_SECONDS_MAX: Final = 120.0
SAMPLE_SECONDS: Final = 0.5
EXIT_INTERRUPTED: Final = 130


async def demo(seconds: float, *, keep: bool, as_json: bool) -> int:
    """Run the demo; return 0 if source and target are equal, 1 if not, 130 after Ctrl-C."""
    # The demo starts its own servers, and no setting of the user may redirect the demo.
    for name in list(os.environ):
        if name.startswith((ENVIRONMENT_PREFIX, "PG")):
            del os.environ[name]
    view = View(Console(stderr=as_json))
    showing = asyncio.create_task(_show(view, seconds, keep=keep), name="demo")
    with _on_signals(showing, view):
        await asyncio.wait([showing])
    if showing.cancelled():
        return EXIT_INTERRUPTED
    try:
        report = showing.result()
    except BaseExceptionGroup as group:
        raise _first_error(group) from group
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    return 0 if report.is_equal else 1


def _first_error(error: BaseException) -> BaseException:
    """Return the error that ended a group of tasks: a StreamerError, if any."""
    while isinstance(error, BaseExceptionGroup):
        ours, _ = error.split(StreamerError)
        error = (ours or error).exceptions[0]
    return error


@contextlib.contextmanager
def _on_signals(task: "asyncio.Task[DemoReport]", view: View) -> Iterator[None]:
    """Cancel *task* at the first SIGINT, SIGTERM or SIGHUP; later signals are ignored."""
    loop = asyncio.get_running_loop()
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            view.say("stopping servers and streamer")
            task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def _show(view: View, seconds: float, *, keep: bool) -> DemoReport:
    await in_thread(check_spark)
    stage = Stage()
    is_kept = False
    try:
        report = await _play(stage, view, seconds)
        if keep:
            is_kept = True
            _print_addresses(stage, view)
        return report
    finally:
        if not is_kept:
            await stage.stop()


async def _play(stage: Stage, view: View, seconds: float) -> DemoReport:
    titles = {
        sid: f"{shop_tables.DATABASE}:{sid}, PostgreSQL {major}" for sid, major in SOURCES.items()
    }
    view.say(f"{', and '.join(titles.values())}, into one warehouse, PostgreSQL {TARGET}")
    with view.working("starting three servers"):
        await stage.start_servers()
    with view.working("creating the shops' tables and rows"):
        rows = await _make_shops(stage)
    stage.write_config()
    stage.start_streamer()
    view.say(f"page of streamer: {stage.page}")
    report = DemoReport()
    program = await in_thread(_Program, stage)
    await _show_sync(stage, program, view, rows, report)
    await _show_stream(stage, program, view, seconds, report)
    with view.working("comparing the shops with the warehouse: streamer compare"):
        report.tables = gather_tables(await stage.compare())
    view.summarize(report)
    return report


async def _make_shops(stage: Stage) -> int:
    """Create and fill the shops' tables; return the number of rows."""

    async def make(sid: str, url: str) -> int:
        counts = (f"(select count(*) from {table.source})" for table in shop_tables.TABLES)  # noqa: S608
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute(shop_tables.SCHEMA)
            await connection.execute(shop_tables.seed_sql(sid).encode())
            cursor = await connection.execute(f"select {' + '.join(counts)}".encode())
            row = await cursor.fetchone()
            assert row is not None
            return int(row[0])

    urls = {sid: server.url(shop_tables.DATABASE) for sid, server in stage.sources.items()}
    return sum(await asyncio.gather(*(make(sid, url) for sid, url in urls.items())))


class _Program:
    """The streamer process of the demo, as commands see the process."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        settings, self._mapping = static_mapping.load(stage.config)
        self._address = TargetAddress.parse(settings.target.url)

    async def status(self) -> StatusReport:
        """Return the report of ``streamer status``. Raises DemoError if the program failed."""
        self._stage.check_streamer()
        report = await read_report(self._address, self._mapping)
        states = [(source.state, source.error) for source in report.sources]
        states += [
            (table.state, table.error) for source in report.sources for table in source.tables
        ]
        for state, error in states:
            if state == "error":
                raise DemoError(f"streamer stopped: {error}")
        return report

    async def wait(self) -> None:
        """Wait as ``streamer wait`` does. Raises DemoError."""
        missing = await wait_command.wait(self._address, self._mapping, WAIT_SECONDS_MAX)
        if missing is not None:
            words = self._stage.last_log_lines()
            raise DemoError(f"streamer does not catch up: {missing}; {words}")


async def _show_sync(
    stage: Stage, program: _Program, view: View, rows: int, report: DemoReport
) -> None:
    began = time.monotonic()
    count = len(shop_tables.TABLES) * len(SOURCES)
    with view.following() as follow:
        while True:
            status = await program.status()
            tables = [table for source in status.sources for table in source.tables]
            copied = sum(table.rows_copied for table in tables)
            follow(status, f"{copied:,} of {rows:,} rows" if copied else "Spark starts")
            ready = sum(table.state == "ready" for table in tables)
            if ready == count:
                break
            if time.monotonic() - began > SYNC_SECONDS_MAX:
                raise DemoError(
                    f"{ready} of {count} tables are ready after"
                    f" {SYNC_SECONDS_MAX:g} s: {stage.last_log_lines()}"
                )
            await asyncio.sleep(SAMPLE_SECONDS)
    report.sync_seconds = time.monotonic() - began
    report.rows_copied = copied
    view.say(
        f"copied {copied:,} rows of {count} tables: {report.sync_seconds:.1f} s, "
        "including the start of Spark"
    )


async def _show_stream(
    stage: Stage, program: _Program, view: View, seconds: float, report: DemoReport
) -> None:
    """Run the workload of the shops, then wait until the warehouse contains all changes."""
    workload = Workload(
        {sid: server.url(shop_tables.DATABASE) for sid, server in stage.sources.items()}
    )
    first = await read_figures(stage.metrics)
    began = time.monotonic()

    async def follow_until(follow: Follow, task: "asyncio.Task[None]") -> float:
        started = time.monotonic()
        while not task.done():
            status = await program.status()
            figures = await read_figures(stage.metrics)
            report.peak_lag_seconds = max(report.peak_lag_seconds, figures.lag_seconds)
            report.peak_lag_bytes = max(report.peak_lag_bytes, int(figures.lag_bytes))
            elapsed = min(time.monotonic() - began, seconds)
            commits = ", ".join(f"{sid} {workload.transactions(sid):,}" for sid in SOURCES)
            follow(status, f"{elapsed:.0f} of {seconds:g} s; commits: {commits}")
            await asyncio.wait([task], timeout=SAMPLE_SECONDS)
        return time.monotonic() - started

    with view.following() as follow:
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(workload.run(seconds), name="workload")
            report.workload_seconds = await follow_until(follow, busy)
            waiting = group.create_task(program.wait(), name="wait")
            report.drain_seconds = await follow_until(follow, waiting)
    last = await read_figures(stage.metrics)
    report.changes = int(last.changes - first.changes)
    report.transactions = int(last.transactions - first.transactions)
    report.commit_to_visible_seconds = last.commit_to_visible_seconds(first)


def _print_addresses(stage: Stage, view: View) -> None:
    stop = stage.write_stop_script()
    psql = stage.target.program("psql")
    lines = [
        f"{sid:<10} {server.url(shop_tables.DATABASE)}" for sid, server in stage.sources.items()
    ]
    lines += [
        f"{shop_tables.WAREHOUSE:<10} {stage.target.url(shop_tables.WAREHOUSE)}",
        f"{'psql':<10} {psql}",
        f"{'page':<10} {stage.page}",
        f"{'metrics':<10} {stage.metrics}",
        f"{'status':<10} {shlex.quote(sys.executable)} -m streamer -c {stage.config} status",
        f"{'log':<10} {stage.log}",
        f"{'stop':<10} {stop}",
    ]
    view.say("servers and streamer keep running:\n  " + "\n  ".join(lines))
