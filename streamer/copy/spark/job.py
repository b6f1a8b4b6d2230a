"""The Spark process, which runs jobs without asyncio.

There are two ways to start the process. ``streamer run`` starts ``python -m streamer.copy.spark.job
--serve`` and writes lines ``run FILE`` and ``cancel FILE`` to its standard input. The driver stays
warm between jobs. The process ends when standard input is closed, so the process never outlives
streamer. An operator, or spark-submit on a cluster, starts ``job.py --job FILE``.

A job file names a ``program``, a module of `PROGRAMS` with ``run(context, job, ends)``, and has the
connection strings of both databases in ``ends``. This module imports a program only for the first
job of that program, so that the process starts fast.

Executors on remote machines need Python with psycopg, and a connection to both databases; the
driver ships the few modules that a task runs. A job file has mode 0600. In local mode a task reads
the connection strings from a file of the same mode. On a cluster the strings travel in the task's
closure, once Spark has proved that it authenticates and encrypts (`streamer.copy.spark.security`).
No command line, configuration or message contains the strings, so neither UI nor event log shows a
secret.

Events go to standard output as lines of JSON. ``streamer.sync_partition`` records the copied parts.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamer.copy.spark.security import find_weaknesses, is_local
from streamer.copy.spark.start import StartedSpark, start_spark
from streamer.util.owned_directory import read_private

if TYPE_CHECKING:
    from pyspark import SparkContext

PROGRAMS: Final = {
    "copy": "streamer.copy.spark.copy_program",
    "compare": "streamer.compare.spark_program",
    "parquet": "streamer.compare.parquet_report",
}
"""The modules that run jobs, by the job's ``program``."""

SHIPPED: Final = (
    "streamer",
    "streamer.bookkeeping",
    "streamer.bookkeeping.task_statements",
    "streamer.compare",
    "streamer.compare.compared_table",
    "streamer.compare.cut_ranges",
    "streamer.compare.judge_keys",
    "streamer.compare.readings",
    "streamer.compare.row_hashes",
    "streamer.compare.unit_reader",
    "streamer.compare.verdicts",
    "streamer.compiled",
    "streamer.compiled.choice",
    "streamer.copy",
    "streamer.copy.parts",
    "streamer.copy.parts.part_copier",
    "streamer.errors",
    "streamer.errors.command_lines",
    "streamer.errors.error_classes",
    "streamer.errors.remedies",
    "streamer.postgres",
    "streamer.postgres.conninfo",
    "streamer.postgres.key_ranges",
    "streamer.postgres.keyed_hash",
    "streamer.postgres.password_source",
    "streamer.postgres.quoting",
    "streamer.postgres.replication_origin",
    "streamer.postgres.row_values",
    "streamer.postgres.secret_command",
    "streamer.postgres.session_settings",
    "streamer.postgres.sqlstate",
    "streamer.source",
    "streamer.source.reached_server",
    "streamer.source.stream",
    "streamer.source.stream.libpq",
    "streamer.source.wal_end",
    "streamer.target",
    "streamer.target.fencing_token",
    "streamer.util",
    "streamer.util.failpoints",
    "streamer.util.lsn",
    "streamer.util.owned_directory",
)
"""The modules of streamer that a task imports, with their packages."""

STARVING_SECONDS: Final = 20.0
CANCEL_SECONDS: Final = 1.0

_output = threading.Lock()


def emit(event: str, **fields: Any) -> None:
    """Write an event."""
    with _output:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


class InsecureSparkError(Exception):
    """A cluster does not protect the connection strings of a job."""


def prepare_cluster(context: "SparkContext", *, allow_insecure: bool) -> None:
    """Check that a cluster protects secrets, and ship the code of tasks.

    Raises InsecureSparkError.
    """
    if is_local(context.master):
        return
    # Read the effective settings: no file of this machine is certain to contain all settings.
    weaknesses = find_weaknesses(dict(context.getConf().getAll()))
    if weaknesses and allow_insecure:
        emit("insecure", weaknesses=weaknesses)
    elif weaknesses:
        context.stop()
        raise InsecureSparkError(
            f"Error: {'; '.join(weaknesses)}; see docs/guides/spark-cluster.md"
        )
    _ship(context)


def _ship(context: "SparkContext") -> None:
    """Send executors the modules of a task, so that they run the version that planned the task,
    even if a different version is installed.

    Spark removes the directory of the archive, however the process ends.
    """
    from pyspark import SparkFiles

    directory = Path(SparkFiles.getRootDirectory()) / "shipped"
    directory.mkdir(mode=0o700)
    path = directory / "streamer_tasks.zip"
    write_shipped(path)
    context.addPyFile(str(path))


def write_shipped(path: Path) -> None:
    """Write the archive of `SHIPPED`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SHIPPED:
            file = Path(str(importlib.import_module(name).__file__))
            inner = name.replace(".", "/")
            is_package = file.name == "__init__.py"
            archive.write(file, f"{inner}/__init__.py" if is_package else f"{inner}.py")


def run_job(context: "SparkContext", path: Path) -> Any:
    """Run the job described in a file; return its result, such as the relations that failed."""
    job = json.loads(read_private(path))
    program = importlib.import_module(PROGRAMS[job.get("program", "copy")])
    # The group applies to jobs of this thread. Interrupting a task ends the Python worker, and so
    # its connections.
    context.setJobGroup(str(path), "streamer", interruptOnCancel=True)
    if not is_local(context.master):
        return program.run(context, job, job["ends"])
    with _ends_file(job["ends"], path.parent) as ends_path:
        return program.run(context, job, ends_path)


@contextmanager
def _ends_file(ends: dict[str, Any], directory: Path) -> Iterator[str]:
    """Write *ends* to a file that only this user can read, during a block."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=directory, prefix="ends-", suffix=".json"
    ) as file:
        json.dump(ends, file)
        file.flush()
        yield file.name


def _run_and_report(context: "SparkContext", path: str) -> None:
    try:
        result = run_job(context, Path(path))
    except Exception as exc:  # noqa: BLE001  # reported to the parent process
        emit("failed", job=path, error=f"{type(exc).__name__}: {_cause(exc)}")
        _exit_without_java(context)
    else:
        emit("finished", job=path, result=result)


def _exit_without_java(context: "SparkContext") -> None:
    """End this process if the JVM or the context has ended, because no job can run any more."""
    try:
        is_over = context._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001  # after any failure, no job can run
        is_over = True
    if is_over:
        os._exit(1)


def _cause(error: Exception) -> str:
    """Find the line with the cause in PySpark's report of a failed task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error:" in line:
            return line[:500]
    for line in lines:  # if a Python process died, only Spark's own exception remains
        if "Exception: " in line:
            return line[:500]
    return lines[0][:500] if lines else type(error).__name__


def _report_starving(context: "SparkContext") -> None:
    """Report tasks that wait while no task runs, because Spark does not report a lack of free
    workers.
    """
    tracker = context.statusTracker()
    waiting_since: float | None = None
    is_reported = False
    while True:
        time.sleep(STARVING_SECONDS / 4)
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        if not stages or any(stage is None or stage.numActiveTasks for stage in stages):
            waiting_since = None
            if is_reported:
                emit("starving_ended")
                is_reported = False
        elif waiting_since is None:
            waiting_since = time.monotonic()
        elif time.monotonic() - waiting_since >= STARVING_SECONDS:
            emit("starving")
            is_reported = True
            waiting_since = None


def _cancel(context: "SparkContext", path: str, running: threading.Thread) -> None:
    """Cancel a job repeatedly until its thread ends, because Spark ignores a request before the job
    begins.
    """
    while running.is_alive():
        context.cancelJobGroup(path)
        running.join(CANCEL_SECONDS)


def _warm_up(context: "SparkContext") -> None:
    """Run empty tasks, so that Spark forks the Python workers of a job and loads classes."""
    count = context.defaultParallelism
    context.parallelize(range(count), count).mapPartitions(list).collect()


def serve(spark: StartedSpark) -> None:
    """Run and cancel jobs by commands on standard input, several jobs at a time, until the input
    ends.
    """
    context = spark.context
    emit("ready", lacks_archive=spark.lacks_archive)
    threading.Thread(target=_report_starving, args=(context,), daemon=True).start()
    if is_local(context.master):
        threading.Thread(target=_warm_up, args=(context,), daemon=True).start()
    running: dict[str, threading.Thread] = {}
    for line in sys.stdin:
        command, _, path = line.strip().partition(" ")
        running = {name: thread for name, thread in running.items() if thread.is_alive()}
        if command == "run":
            running[path] = threading.Thread(
                target=_run_and_report, args=(context, path), daemon=True
            )
            running[path].start()
        elif command == "cancel" and path in running:
            threading.Thread(
                target=_cancel, args=(context, path, running[path]), daemon=True
            ).start()
    # The parent process has ended, so the copies are useless.
    os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Run streamer's jobs with Spark.")
    parser.add_argument(
        "--master",
        default=os.environ.get("STREAMER_SYNC__SPARK_MASTER"),
        help="the master's URL; default: spark-submit's, or local[*]",
    )
    parser.add_argument("--jobs", type=int, default=4, help="tasks that run at a time")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark's"
    )
    parser.add_argument(
        "--allow-insecure",
        action="store_true",
        help="send connection strings through a cluster that does not authenticate or encrypt",
    )
    parser.add_argument("--archive-classes", type=Path, help=argparse.SUPPRESS)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--job", type=Path, help="run one job file and exit")
    which.add_argument("--serve", action="store_true", help="run job files named on standard input")
    options = parser.parse_args(arguments)
    try:
        spark = _start(options)
    except Exception as exc:
        emit("ended", error=_cause(exc))
        raise SystemExit(1) from exc
    if options.serve:
        serve(spark)
        return 0
    result = run_job(spark.context, options.job)
    emit("finished", job=str(options.job), result=result)
    spark.stop()
    return 1 if result else 0


def _start(options: argparse.Namespace) -> StartedSpark:
    spark = start_spark(
        options.master,
        options.jobs,
        {name: value for name, _, value in (c.partition("=") for c in options.conf)},
        allow_insecure=options.allow_insecure,
        archive_classes=options.archive_classes,
    )
    prepare_cluster(spark.context, allow_insecure=options.allow_insecure)
    return spark


if __name__ == "__main__":
    sys.exit(main())
