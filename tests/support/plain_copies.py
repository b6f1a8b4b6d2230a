"""The work of `streamer.copy.spark.job --serve`, in threads instead of Spark, without the start of
Spark.

The rest of a copy is real: the launcher, a separate process, jobs, events, retried tasks. The
process is a fork of its parent, because the imports would take 0.2 s of CPU.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from streamer.copy.parts.part_copier import CopyEnds, copy_parts
from streamer.copy.spark.launcher import Driver, start_driver

ATTEMPTS_MAX = 4

_output = threading.Lock()
_cancelled: set[str] = set()


def emit(event: str, **fields: Any) -> None:
    with _output:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def _run_task(path: str, parts: list[dict[str, Any]], ends: CopyEnds) -> list[dict[str, Any]]:
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            return list(copy_parts(parts, ends))
        except Exception:
            if attempt == ATTEMPTS_MAX or path in _cancelled:
                raise
    raise AssertionError


def _run_job(path: str) -> None:
    try:
        result = _find_result(path, json.loads(Path(path).read_text(encoding="utf-8")))
    except Exception as exc:  # noqa: BLE001  # reported to the parent process
        emit("failed", job=path, error=f"{type(exc).__name__}: {exc}".splitlines()[0])
    else:
        emit("finished", job=path, result=result)


def _find_result(path: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    ends = CopyEnds.from_json(job["ends"])
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda parts: _run_task(path, parts, ends), job["tasks"]))
    return [failure for failures in done for failure in failures]


def main() -> None:
    emit("ready")
    for line in sys.stdin:
        command, _, path = line.strip().partition(" ")
        if command == "run":
            threading.Thread(target=_run_job, args=(path,), daemon=True).start()
        else:  # a thread cannot be interrupted; the tasks do not run again
            _cancelled.add(path)
    os._exit(0)


async def start(_: Sequence[str], *, env: dict[str, str]) -> Driver:
    """Start the process, in place of `start_driver`."""

    def serve() -> None:
        """Work in the forked process, and never return to the program."""
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        main()

    return await start_driver([], preexec_fn=serve)
