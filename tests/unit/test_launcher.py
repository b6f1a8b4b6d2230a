"""A Spark process that ends in the middle of its work is not started again without a pause."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from streamer.commands.check.spark_findings import check_driver
from streamer.copy.spark import launcher as launcher_module
from streamer.copy.spark.launcher import (
    ARCHIVE_SECONDS,
    IDLE_SECONDS,
    STOP_SECONDS,
    SparkLauncher,
)
from streamer.errors.error_classes import SparkJobError
from streamer.util.backoff import Backoff
from tests.support.waiting import until


def jobs(directory: Path) -> list[Path]:
    return list(directory.glob("job-*"))


async def test_a_crashing_process_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashing.py").write_text("raise SystemExit('no memory')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher_module, "PROGRAM", "crashing")
    waited: list[float] = []

    async def wait(backoff: Backoff) -> None:
        waited.append(backoff._next)
        backoff.next_seconds()

    monkeypatch.setattr(Backoff, "wait", wait)
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    running = asyncio.create_task(launcher.run())
    for count in range(1, 4):
        with pytest.raises(SparkJobError, match="the Spark process ended: no memory"):
            await launcher.submit({})
        assert len(waited) == count
    assert waited == [1.0, 2.0, 4.0]
    running.cancel()
    await asyncio.wait([running])
    assert jobs(tmp_path) == []


@pytest.mark.parametrize("has_own_group", [False, True])
async def test_a_process_that_never_ran_leaves_no_open_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_own_group: bool
) -> None:
    """The JVM, and the daemon of its Python workers, have the driver's standard error."""
    (tmp_path / "driver.py").write_text(
        "import subprocess, sys\n"
        "child = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);'\n"
        "child += 'print(1, flush=True); signal.alarm(20); signal.pause()'\n"
        "arguments = [sys.executable, '-c', child]\n"
        f"group = dict(start_new_session={has_own_group})\n"
        "jvm = subprocess.Popen(arguments, stdout=subprocess.PIPE, **group)\n"
        "jvm.stdout.readline()\n"
        "print('{}', flush=True)\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher_module, "PROGRAM", "driver")
    monkeypatch.setattr(launcher_module, "STOP_SECONDS", 0.5)
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    await launcher.start()
    driver = launcher._driver
    assert driver is not None
    assert driver.process.stdout is not None
    await driver.process.stdout.readline()
    await launcher.stop()
    assert driver.transport.is_closing()
    pipe = driver.transport.get_pipe_transport(2)
    assert pipe is not None
    assert pipe.is_closing()


async def test_a_job_that_is_given_up_while_its_file_is_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_write, written = threading.Event(), threading.Event(), threading.Event()
    write = launcher_module._write_job

    def write_late(path: Path, job: dict[str, Any]) -> None:
        begun.set()
        assert may_write.wait(60)
        write(path, job)
        written.set()

    monkeypatch.setattr(launcher_module, "_write_job", write_late)
    submitted = asyncio.create_task(SparkLauncher("local[1]", 1, tmp_path).submit({}))
    await until(begun.is_set)
    submitted.cancel()
    asyncio.get_running_loop().call_soon(may_write.set)
    await asyncio.wait([submitted])
    await until(written.is_set)
    assert submitted.cancelled()
    # The file would hold connection strings.
    assert jobs(tmp_path) == []


PROGRAM = """
import json, sys
for line in sys.stdin:
    command, path = line.split()
    job = json.load(open(path)) if command == "run" else {}
    with open(sys.argv[0] + ".log", "a") as log:
        log.write(command + chr(10))
    if not job.get("lasts") and command == "run":
        print(json.dumps({"event": "finished", "job": path, "result": []}), flush=True)
"""


async def test_the_process_ends_after_its_last_job_and_a_job_that_is_given_up_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "obeying.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher_module, "PROGRAM", "obeying")
    monkeypatch.setattr(launcher_module, "choose_environment", dict)
    monkeypatch.setattr(launcher_module, "IDLE_SECONDS", 0.5)
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    running = asyncio.create_task(launcher.run())
    seen = tmp_path / "obeying.py.log"

    for first in (True, False):  # the second time in a separate process
        await launcher.submit({})
        assert launcher._driver is not None
        process = launcher._driver.process
        lasting = asyncio.create_task(launcher.submit({"lasts": True}))
        await until(lambda: seen.read_text().endswith("run\nrun\n"))
        lasting.cancel()
        await until(lambda: seen.read_text().endswith("cancel\n"))
        await until(lambda process=process: process.returncode is not None)  # type: ignore[misc]
        assert launcher._driver is None
        assert first or seen.read_text().count("cancel") == 2
    running.cancel()
    await asyncio.wait([running])
    assert jobs(tmp_path) == []


async def test_a_process_starts_before_its_first_job_and_ends_if_none_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is real: the time of being idle runs from the last job, or from the start."""
    (tmp_path / "waiting.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher_module, "PROGRAM", "waiting")
    monkeypatch.setattr(launcher_module, "choose_environment", dict)
    monkeypatch.setattr(launcher_module, "IDLE_SECONDS", 2.0)
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    running = asyncio.create_task(launcher.run())
    launcher.prepare()
    await until(lambda: launcher._driver is not None)
    driver = launcher._driver
    assert driver is not None
    await launcher.submit({})
    assert launcher._driver is driver
    began = time.monotonic()
    await driver.process.wait()
    assert time.monotonic() - began > 1.0
    launcher.prepare()
    await until(lambda: launcher._driver not in (None, driver))
    second = launcher._driver
    assert second is not None
    await second.process.wait()
    running.cancel()
    await asyncio.wait([running])


async def test_a_process_that_starts_before_the_task_takes_the_jobs_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "early.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher_module, "PROGRAM", "early")
    monkeypatch.setattr(launcher_module, "choose_environment", dict)
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    await launcher.start()
    driver = launcher._driver
    assert driver is not None
    early = asyncio.create_task(launcher.submit({}))
    running = asyncio.create_task(launcher.run())
    await early
    await launcher.submit({})
    assert launcher._driver is driver
    assert (tmp_path / "early.py.log").read_text() == "run\nrun\n"
    running.cancel()
    await asyncio.wait([running])
    assert driver.process.returncode is not None


def test_the_process_and_the_archive_end_within_half_a_minute_of_the_last_copy() -> None:
    assert IDLE_SECONDS + STOP_SECONDS + ARCHIVE_SECONDS < 30


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_402", None])
async def test_a_wrong_or_missing_java_is_said_in_place_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    if version is not None:
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    launcher = SparkLauncher("local[1]", 1, tmp_path)
    running = asyncio.create_task(launcher.run())
    with pytest.raises(SparkJobError, match=f"Java 17.*{version or 'cannot be run'}.*JAVA_HOME"):
        await launcher.submit({})
    running.cancel()
    await asyncio.wait([running])
    (finding,) = check_driver(copies=True)
    assert "Java 17" in finding.problem
