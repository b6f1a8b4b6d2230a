"""``streamer compare``: whether the target contains the rows of its sources, while both change."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from streamer.commands.terminal_table import ListingColumn, print_lines, table_lines
from streamer.compare.comparison import Comparison, ComparisonScope, Options, TableResult
from streamer.compare.process_or_spark import ComparisonRunner
from streamer.config.settings import Settings
from streamer.copy.resync_scope import parse_condition
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import MappingError, StreamerError
from streamer.mapping.expressions import Expression
from streamer.mapping.rules import Mapping, SourceLabel
from streamer.util.owned_directory import OwnedDirectory

REPORT_SUFFIXES: Final = (".parquet", ".jsonl", ".ndjson", ".json")
PROGRESS_SECONDS: Final = 0.5
_SAMPLE_SHOWN: Final = 3


def parse_where(text: str | None) -> Expression | None:
    """Read the condition of ``--where``. Raises MappingError."""
    if text is None:
        return None
    return parse_condition(text)


def check_report(path: Path | None) -> None:
    """Check, before the work, that *path* is writable. Raises MappingError."""
    if path is None:
        return
    if path.suffix not in REPORT_SUFFIXES:
        raise MappingError(
            f"--report {path}: the suffix is unknown",
            hint="use .parquet, or .jsonl for one line of JSON per row",
        )
    if not path.absolute().parent.is_dir():
        raise MappingError(f"--report {path}: the directory does not exist")


@asynccontextmanager
async def comparing(settings: Settings) -> AsyncIterator[ComparisonRunner]:
    """Yield a runner of comparisons, with a Spark process of this command if a comparison needs
    Spark.
    """
    # The files contain connection strings. After a kill, the next comparison removes them.
    with OwnedDirectory(Path(tempfile.gettempdir()), "streamer-compare-") as directory:
        launcher = SparkLauncher(
            settings.sync.spark_master,
            settings.sync.jobs,
            directory,
            settings.sync.spark_settings,
            allow_insecure=settings.sync.allow_insecure_spark,
        )
        running = asyncio.create_task(launcher.run(), name="spark")
        runner = ComparisonRunner(settings.sync, launcher)
        try:
            yield runner
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await runner.close()


def progress_console() -> Console:
    """Return the terminal that shows progress; standard output gets only the result."""
    return Console(stderr=True)


@asynccontextmanager
async def _progress(comparison: Comparison, console: Console) -> AsyncIterator[None]:
    """Show the number of equal ranges during a block, if *console* is a terminal."""
    if not console.is_terminal:
        yield
        return
    showing = asyncio.create_task(_show_progress(comparison, console), name="progress")
    try:
        yield
    finally:
        showing.cancel()
        await asyncio.wait([showing])


async def _show_progress(comparison: Comparison, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as shown:
        task = shown.add_task("definitions", total=None)
        while True:
            with contextlib.suppress(StreamerError):  # the comparison reports this error
                if (counts := await comparison.count_ranges()) is not None:
                    done, ranges = counts
                    # The comparison still reads, splits and judges the remaining ranges.
                    shown.update(task, description="equal ranges", completed=done, total=ranges)
            await asyncio.sleep(PROGRESS_SECONDS)


async def compare(
    settings: Settings,
    mapping: Mapping,
    scope: ComparisonScope,
    options: Options,
    console: Console | None = None,
) -> list[TableResult]:
    """Compare tables in the process of the command. *console*: a terminal that shows progress, by
    default the terminal of the command.

    Raises MappingError, SourceError, TargetError, SparkJobError.
    """
    check_report(options.report)
    if options.sql is not None and not options.sql.absolute().parent.is_dir():
        raise MappingError(f"--sql {options.sql}: the directory does not exist")
    async with comparing(settings) as runner:
        comparison = Comparison(
            settings.target.url,
            mapping,
            runner,
            options,
        )
        async with _progress(comparison, console or progress_console()):
            return await comparison.run(scope)


def print_results(results: Iterable[TableResult], console: Console) -> None:
    """Print a line for each table, and the first keys that differ."""
    results = list(results)
    print_lines(table_lines(_COLUMNS, results), console)
    for result in results:
        for entry in result.sample[:_SAMPLE_SHOWN]:
            key = ", ".join(f"{name}={value}" for name, value in entry["key"].items())
            columns = f" in {', '.join(entry['columns'])}" if entry["columns"] else ""
            lines = [f"{_label(result)} {result.source} ({key}): {entry['kind']}{columns}"]
            lines += [
                f"  {side}: {json.dumps(row, ensure_ascii=False)}"
                for side in ("source", "target")
                for row in entry.get(side, ())
            ]
            print_lines(lines, console)
        shown = min(len(result.sample), _SAMPLE_SHOWN)
        if result.differing > shown and shown:
            more = f"{result.differing - shown:,} more rows differ; --report FILE writes all"
            print_lines([f"{_label(result)} {result.source}: {more}"], console)
    print_definitions(results, console)


def print_definitions(results: Iterable[TableResult], console: Console) -> None:
    """Print whether definitions are equal, and how they differ."""
    compared = [result for result in results if result.definitions is not None]
    lines = [
        f"{_label(result)} {result.source}: {difference}"
        for result in compared
        for difference in result.definitions or ()
    ]
    print_lines(lines or (["definitions: equal"] if compared else []), console)


def _label(result: TableResult) -> str:
    return SourceLabel(result.database, result.sid)


def describe(result: TableResult) -> str:
    """Return the answer in words. Pure."""
    if result.error is not None:
        return f"not compared: {result.error}"
    if result.is_different:
        left = f", {result.repaired:,} rows repaired" if result.repaired else ""
        return f"different{left}"
    if result.undecided:
        return f"{result.undecided} rows undecided"
    if result.repaired is not None:
        return f"equal, {result.repaired:,} row{'' if result.repaired == 1 else 's'} repaired"
    if result.continued_from is not None:
        return f"equal, including the rows that the comparison of {result.continued_from} read"
    return "equal"


_COLUMNS: Final[Sequence[ListingColumn[TableResult]]] = (
    ListingColumn("source", _label),
    ListingColumn("table", lambda result: result.source),
    ListingColumn("rows", lambda result: f"{result.rows_source:,}", is_number=True),
    ListingColumn("in target", lambda result: f"{result.rows_target:,}", is_number=True),
    ListingColumn("missing", lambda result: f"{result.missing:,}", is_number=True),
    ListingColumn("extra", lambda result: f"{result.extra:,}", is_number=True),
    ListingColumn("different", lambda result: f"{result.different:,}", is_number=True),
    ListingColumn("result", describe),
)


def summarize(results: Iterable[TableResult], *, strict: bool = False) -> str | None:
    """Return the line that ends the command unless all tables are equal. Pure.

    *strict*: definitions must be equal, too.
    """
    results = list(results)
    parts = []
    if different := [r for r in results if r.is_different]:
        parts.append(f"{len(different)} of {len(results)} tables differ from their source")
    if failed := [r for r in results if r.error is not None]:
        parts.append(f"{len(failed)} of {len(results)} tables cannot be compared")
    if undecided := [r for r in results if r.undecided and not r.is_different]:
        parts.append(
            f"{len(undecided)} of {len(results)} tables have rows that changed between all "
            "readings, or whose changes did not arrive: is `streamer run` running?"
        )
    if strict and (redefined := [r for r in results if r.definitions]):
        parts.append(f"{len(redefined)} of {len(results)} tables have a different definition")
    return "; ".join(parts) or None
