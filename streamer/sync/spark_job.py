"""The PySpark program that copies tables: a separate process, without asyncio.

There are two ways to run it. ``streamer run`` starts ``python -m streamer.sync.spark_job --serve``
and writes ``run FILE`` or ``cancel FILE``, a line each, to its standard input. The session stays
warm between jobs and ends with that input, so it never outlives its process. By hand, or with
spark-submit on a cluster: ``spark_job.py --job FILE``.

Executors on other machines need Python with psycopg, and a way to both databases; the driver ships
the few modules that a task runs. A job file has mode 0600. In local mode a task reads its
connection strings from a file of the same mode. On a cluster they travel in the task's closure,
once Spark has proved that it authenticates and encrypts (`spark_security`). No command line,
configuration or message has them, so neither the UI nor an event log shows them.

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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.sql import SparkSession

from streamer.sync.parts import CopyEnds, copy_tasks
from streamer.sync.spark_security import (
    CLUSTER_SETTINGS,
    LOCAL_SETTINGS,
    find_weaknesses,
    is_local,
)

SHIPPED: Final = (
    "streamer",
    "streamer.errors",
    "streamer.failpoints",
    "streamer.postgres",
    "streamer.postgres.origin",
    "streamer.postgres.row_values",
    "streamer.postgres.session",
    "streamer.postgres.sqlstate",
    "streamer.source",
    "streamer.source.place",
    "streamer.sync",
    "streamer.sync.parts",
    "streamer.target",
    "streamer.target.claim",
)
"""All modules of streamer that a task imports, with their packages."""

# Half the time to start: jobs end before optimizing them pays off.
_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",
    # Rows pass through Python processes; the JVMs only hand out work. This is about their least.
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.defaultJavaOptions": _JAVA_OPTIONS,
    "spark.executor.defaultJavaOptions": _JAVA_OPTIONS,
    "spark.task.maxFailures": "4",
    "spark.log.level": "ERROR",
    "spark.python.worker.reuse": "true",
}
"""Streamer's settings of Spark; the user's `spark_settings` take precedence."""

STARVING_SECONDS: Final = 20.0
CANCEL_SECONDS: Final = 1.0

_output = threading.Lock()


def emit(event: str, **fields: Any) -> None:
    """Write one event."""
    with _output:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def start_session(
    master: str | None,
    jobs: int,
    spark_settings: dict[str, str] | None = None,
    *,
    allow_insecure: bool = False,
) -> SparkSession:
    """Start or join Spark. *jobs* limits the number of tasks at a time.

    Without a *master* it is spark-submit's, with its settings; otherwise *spark_settings* take
    precedence over streamer's. Raises InsecureSparkError for a cluster that does not protect the
    secrets of a job.
    """
    given: dict[str, str] = {}
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit runs us, with a JVM that knows
        SparkContext.getSystemProperty("spark.master")  # connects to it
        given = dict(SparkConf().getAll())
    master = master or given.get("spark.master") or "local[*]"
    if is_local(master):
        # local[*] means the cores of this machine, but tasks wait for servers: `jobs` says how
        # many.
        master = f"local[{jobs},4]"
    settings = SETTINGS | {"spark.cores.max": str(jobs)}
    if not is_local(master) and not allow_insecure:
        settings |= CLUSTER_SETTINGS
    settings |= given | (spark_settings or {})
    if is_local(master):
        settings |= LOCAL_SETTINGS
    builder = SparkSession.builder.appName("streamer sync")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.master(master).getOrCreate()
    if not is_local(master):
        _require_secure(session, allow_insecure)
        _ship(session.sparkContext)
    return session


class InsecureSparkError(Exception):
    """A cluster does not protect the connection strings of a job."""


def _require_secure(session: SparkSession, allow_insecure: bool) -> None:
    """Read the effective settings of Spark, which no file of this machine shows for sure."""
    weaknesses = find_weaknesses(dict(session.sparkContext.getConf().getAll()))
    if weaknesses and allow_insecure:
        emit("insecure", weaknesses=weaknesses)
    elif weaknesses:
        session.stop()
        raise InsecureSparkError(
            f"Error: {'; '.join(weaknesses)}; see docs/guides/spark-cluster.md"
        )


def _ship(context: SparkContext) -> None:
    """Send executors the modules of a task: the version that planned the task, whatever they have
    installed.

    The archive is in a directory that Spark removes at any kind of end.
    """
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


def run_job(session: SparkSession, path: Path) -> list[dict[str, Any]]:
    """Run the job described in a file; return the relations that failed."""
    job = json.loads(path.read_text(encoding="utf-8"))
    tasks, ends = job["tasks"], CopyEnds.from_json(job["ends"])
    context = session.sparkContext
    # Of this thread. Interrupting a task ends its Python worker, and so its connections.
    context.setJobGroup(str(path), "streamer sync", interruptOnCancel=True)
    # One partition per task: Spark starts them in order, so the largest begin first.
    parts = context.parallelize(tasks, len(tasks))
    if not is_local(context.master):
        return list(parts.mapPartitions(partial(copy_tasks, ends=ends)).collect())
    with _ends_file(ends, path.parent) as ends_path:
        return list(parts.mapPartitions(partial(copy_tasks, ends=ends_path)).collect())


@contextmanager
def _ends_file(ends: CopyEnds, directory: Path) -> Iterator[str]:
    """Write *ends* to a file that only this user can read, for the length of a block."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=directory, prefix="ends-", suffix=".json"
    ) as file:
        json.dump(asdict(ends), file)
        file.flush()
        yield file.name


def _run_and_report(session: SparkSession, path: str) -> None:
    try:
        failures = run_job(session, Path(path))
    except Exception as exc:  # noqa: BLE001  # the parent process reports it; the session continues
        emit("failed", job=path, error=f"{type(exc).__name__}: {_cause(exc)}")
        _exit_without_java(session)
    else:
        emit("finished", job=path, failures=failures)


def _exit_without_java(session: SparkSession) -> None:
    """End this process if its JVM is gone or its session over: no job can run in it any more."""
    try:
        is_over = session.sparkContext._jsc.sc().isStopped()
    except Exception:  # noqa: BLE001  # any failure leaves nothing to work with
        is_over = True
    if is_over:
        os._exit(1)


def _cause(error: Exception) -> str:
    """Find the line with the cause in PySpark's report of a failed task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error:" in line:
            return line[:500]
    return lines[0][:500] if lines else type(error).__name__


def _report_starving(session: SparkSession) -> None:
    """Say so when tasks wait and none runs: a cluster without free workers makes no other sign."""
    tracker = session.sparkContext.statusTracker()
    hungry_since: float | None = None
    is_reported = False
    while True:
        time.sleep(STARVING_SECONDS / 4)
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        if not stages or any(stage is None or stage.numActiveTasks for stage in stages):
            hungry_since = None
            if is_reported:
                emit("fed")
                is_reported = False
        elif hungry_since is None:
            hungry_since = time.monotonic()
        elif time.monotonic() - hungry_since >= STARVING_SECONDS:
            emit("starving")
            is_reported = True
            hungry_since = None


def _cancel(session: SparkSession, path: str, running: threading.Thread) -> None:
    """Cancel a job until its thread ends: Spark forgets a request for a job that has not begun."""
    while running.is_alive():
        session.sparkContext.cancelJobGroup(path)
        running.join(CANCEL_SECONDS)


def serve(session: SparkSession) -> None:
    """Run and cancel jobs as told on standard input, several at a time, until it ends."""
    emit("ready")
    threading.Thread(target=_report_starving, args=(session,), daemon=True).start()
    running: dict[str, threading.Thread] = {}
    for line in sys.stdin:
        command, _, path = line.strip().partition(" ")
        running = {name: thread for name, thread in running.items() if thread.is_alive()}
        if command == "run":
            running[path] = threading.Thread(
                target=_run_and_report, args=(session, path), daemon=True
            )
            running[path].start()
        elif command == "cancel" and path in running:
            threading.Thread(
                target=_cancel, args=(session, path, running[path]), daemon=True
            ).start()
    # The parent process is gone: the copies of the tasks have no use.
    os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Copy tables with Spark for streamer.")
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
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--job", type=Path, help="run one job file and exit")
    which.add_argument("--serve", action="store_true", help="run job files named on standard input")
    options = parser.parse_args(arguments)
    spark_settings = {name: value for name, _, value in (c.partition("=") for c in options.conf)}
    try:
        session = start_session(
            options.master, options.jobs, spark_settings, allow_insecure=options.allow_insecure
        )
    except Exception as exc:
        emit("ended", error=_cause(exc))
        raise SystemExit(1) from exc
    if options.serve:
        serve(session)
        return 0
    failures = run_job(session, options.job)
    emit("finished", job=str(options.job), failures=failures)
    session.stop()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
