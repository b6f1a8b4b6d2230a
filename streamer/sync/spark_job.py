"""The PySpark program that copies tables: a process of its own, no asyncio.

Two ways to run it. ``streamer run`` starts ``python -m streamer.sync.spark_job --serve`` and writes
the path of one job file per line to its standard input; the session stays warm between jobs and
ends with that input, so it never outlives the process that wanted it. By hand, or with spark-submit
on a cluster: ``spark_job.py --job FILE``. A job file has mode 0600 and is the only thing that holds
connection strings; they reach executors inside the task's closure, never in the command line, the
configuration, the Spark UI or an event log.

Events go to standard output as lines of JSON. What was copied is told by
``streamer.sync_partition``.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from streamer.sync.copy import CopyEnds, PartCopier, connect

_output = threading.Lock()


def emit(event: str, **fields: Any) -> None:
    """Write one event."""
    with _output:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def start_session(master: str, jobs: int) -> SparkSession:
    """Start or join Spark. *jobs* bounds how many tasks run at a time."""
    if master.startswith("local"):
        # local[*] means the cores of this machine, but tasks wait for servers: `jobs` says how
        # many.
        master = f"local[{jobs},4]"
    builder = SparkSession.builder.appName("streamer sync").master(master)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.driver.memory": "512m",
        "spark.cores.max": str(jobs),
        "spark.task.maxFailures": "4",
        "spark.log.level": "ERROR",
        # A retried task finds its parts' ledger rows locked by its former self for a moment.
        "spark.python.worker.reuse": "true",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def copy_parts(parts: list[dict[str, Any]], ends: CopyEnds) -> Iterator[dict[str, Any]]:
    """Copy a task's parts; yield those that a server refused. Lost connections raise, and Spark
    retries.
    """
    failed: set[int] = set()
    remaining = list(parts)
    while remaining:
        part = None
        try:
            with (
                connect(ends.source_url, ends.application_name) as source,
                connect(ends.target_url, ends.application_name) as target,
            ):
                copier = PartCopier(source, target, ends)
                while remaining:
                    part = remaining[0]
                    if part["relation_id"] not in failed:
                        copier.copy(part)
                    remaining.pop(0)
        except Exception as exc:  # one relation's failure is not the others'
            if part is None or _is_passing(exc):
                raise
            remaining.pop(0)
            failed.add(part["relation_id"])
            message = _describe(exc)
            _record_error(part, ends, message)
            yield {"relation_id": part["relation_id"], "error": message}


def _is_passing(error: Exception) -> bool:
    state = getattr(error, "sqlstate", None)
    return (
        state is None or state[:2] in ("08", "40", "53", "57", "58") or state in ("55P03", "22023")
    )


def _describe(error: Exception) -> str:
    diagnostic = getattr(error, "diag", None)
    return getattr(diagnostic, "message_primary", None) or str(error).splitlines()[0]


def _record_error(part: dict[str, Any], ends: CopyEnds, message: str) -> None:
    with connect(ends.target_url, ends.application_name) as target:
        target.execute(
            "update streamer.sync_partition set error = %s"
            " where relation_id = %s and part = %s and attempt = %s",
            (message, part["relation_id"], part["part"], part["attempt"]),
        )


def run_job(session: SparkSession, path: Path) -> list[dict[str, Any]]:
    """Run the job described in a file; return the relations that failed."""
    job = json.loads(path.read_text(encoding="utf-8"))
    tasks = job["tasks"]
    ends = CopyEnds(**job["ends"])

    def copy_tasks(part_lists: Iterable[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        for parts in part_lists:
            yield from copy_parts(parts, ends)

    context = session.sparkContext
    # One partition per task: Spark starts them in order, so the largest begin first.
    return list(context.parallelize(tasks, len(tasks)).mapPartitions(copy_tasks).collect())


def _run_and_report(session: SparkSession, path: str) -> None:
    try:
        failures = run_job(session, Path(path))
    except Exception as exc:  # noqa: BLE001  # reported to whoever started us; the session goes on
        emit("failed", job=path, error=f"{type(exc).__name__}: {_cause(exc)}")
        _exit_without_java(session)
    else:
        emit("finished", job=path, failures=failures)


def _exit_without_java(session: SparkSession) -> None:
    """End this process if its JVM is gone: no job can run in it any more."""
    try:
        session.sparkContext.parallelize([0], 1).count()
    except Exception:  # noqa: BLE001  # whatever it is, there is nothing left to work with
        os._exit(1)


def _cause(error: Exception) -> str:
    """Find the line that says why, in what PySpark says of a failed task."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if "psycopg." in line or "Error:" in line:
            return line[:500]
    return lines[0][:500] if lines else "unknown"


def serve(session: SparkSession) -> None:
    """Run jobs whose file names come on standard input, several at a time, until it ends."""
    emit("ready")
    for line in sys.stdin:
        path = line.strip()
        if path:
            threading.Thread(target=_run_and_report, args=(session, path), daemon=True).start()
    # Whoever started us is gone: do not wait for tasks that nobody wants any more.
    os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="Copy tables with Spark for streamer.")
    parser.add_argument(
        "--master", default=os.environ.get("STREAMER_SYNC__SPARK_MASTER", "local[*]")
    )
    parser.add_argument("--jobs", type=int, default=4, help="tasks that run at a time")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--job", type=Path, help="run one job file and exit")
    which.add_argument("--serve", action="store_true", help="run job files named on standard input")
    options = parser.parse_args(arguments)
    session = start_session(options.master, options.jobs)
    if options.serve:
        serve(session)
        return 0
    failures = run_job(session, options.job)
    emit("finished", job=str(options.job), failures=failures)
    session.stop()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
