"""Starts the Spark process, submits jobs, monitors the process and ends it.

Spark never runs in the event loop's process: Spark may crash or run out of memory without harm to
the stream. The launcher starts the process with the first job, or earlier (`prepare`), and keeps
the process warm for a while after the last job. The process has a separate group, so a signal to
the group ends the JVM, too. The Python workers have another group, and end with the JVM.

If Spark started without a class data archive, the launcher creates an archive after the end of the
process (`streamer.copy.spark.class_archive`).
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import Process, SubprocessStreamProtocol, create_subprocess_exec
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from streamer.copy.spark import class_archive
from streamer.copy.spark.obstacle import find_obstacle
from streamer.copy.spark.security import LOCAL_ENVIRONMENT, choose_environment, is_local
from streamer.errors.error_classes import SparkJobError
from streamer.util.backoff import Backoff
from streamer.util.owned_directory import write_private
from streamer.util.waiting import in_thread

log = structlog.get_logger()

PROGRAM: Final = "streamer.copy.spark.job"
IDLE_SECONDS: Final = 10.0
"""The time for which the process waits for another job. A new process starts in a few seconds."""
STOP_SECONDS: Final = 3.0
ARCHIVE_SECONDS: Final = 15.0
"""The maximum time to create the class data archive. With `IDLE_SECONDS` and `STOP_SECONDS` this
ends less than 30 s after the last copy. After a timeout, the next process tries again.
"""
CRASH_SECONDS_MAX: Final = 30.0
"""The maximum wait before the next start, if the process ended in the middle of its work."""
_LINE_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(eq=False, slots=True)
class Driver:
    """The running process, and the task that reads ``messages`` from its standard error."""

    process: Process
    transport: asyncio.SubprocessTransport
    messages: list[str] = field(default_factory=list)
    listener: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stderr is not None
        self.listener = asyncio.create_task(
            _keep_last(self.process.stderr, self.messages), name="spark-stderr"
        )

    async def end(self) -> None:
        """End the process group: first with SIGTERM, then with SIGKILL."""
        # The JVM outlives the driver, and keeps the pipe open. The last message in the pipe shows
        # why the process ended.
        ended = [asyncio.create_task(self.process.wait(), name="spark-exit"), self.listener]
        try:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, sent)
                _, running = await asyncio.wait(ended, timeout=STOP_SECONDS)
                if not running:
                    break
        finally:
            for task in ended:
                task.cancel()
            self.transport.close()  # the daemon of the Python workers has a group of its own


async def start_driver(arguments: Sequence[str], **options: Any) -> Driver:
    """Start Python with *arguments*. *options*: of `subprocess.Popen`."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(_LINE_BYTES_MAX, loop),
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        **options,
    )
    return Driver(Process(transport, protocol, loop), transport)


class SparkLauncher:
    """The Spark process of streamer. `run` is the owner's task; any task may call `submit`."""

    def __init__(
        self,
        master: str,
        jobs: int,
        directory: Path,
        spark_settings: dict[str, str] | None = None,
        *,
        allow_insecure: bool = False,
    ) -> None:
        self._master = master
        self._jobs = jobs
        self._spark_settings = spark_settings or {}
        self._allow_insecure = allow_insecure
        self.directory = directory
        """The directory for the files of jobs, which contain connection strings."""
        self._driver: Driver | None = None
        self._waiting: dict[str, asyncio.Future[list[dict[str, Any]]]] = {}
        self._requested = asyncio.Event()
        self._idle: asyncio.Timeout | None = None
        self._count = 0
        self._last_error: str | None = None
        self._is_ready = False
        self._lacks_archive = False
        self.is_starving = False
        """No Spark worker takes the tasks of the present jobs."""

    @property
    def is_starting(self) -> bool:
        """Whether jobs wait for the Spark process to start."""
        return bool(self._waiting) and not self._is_ready

    def prepare(self) -> None:
        """Make `run` start the process, because a job will follow soon."""
        self._requested.set()
        self._set_idle()

    async def start(self) -> None:
        """Start the process before the task `run`, which then takes over the process."""
        if await asyncio.to_thread(find_obstacle) is None:
            self._requested.set()
            await self._begin_process()

    async def submit(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Run *job* to the end; return the failed relations with reasons.

        A cancellation cancels the job: the tasks end, and make room for tasks of other jobs.
        Raises SparkJobError if the process ends or the job fails as a whole.
        """
        self._count += 1
        path = self.directory / f"job-{self._count}.json"
        try:
            await in_thread(_write_job, path, job)
            return await self._run_job(str(path))
        finally:
            await in_thread(path.unlink, True)

    async def _run_job(self, path: str) -> list[dict[str, Any]]:
        waiting: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._waiting[path] = waiting
        self._requested.set()
        self._set_idle()
        self._send("run", path)
        try:
            return await waiting
        except asyncio.CancelledError:
            self._send("cancel", path)
            raise
        finally:
            del self._waiting[path]
            self._set_idle()

    def _send(self, command: str, path: str) -> None:
        if self._driver is not None and self._driver.process.stdin is not None:
            self._driver.process.stdin.write(f"{command} {path}\n".encode())

    def _set_idle(self) -> None:
        """Set the idle timeout, which begins at the end of the last job."""
        if self._idle is None or self._idle.expired():
            return
        now = asyncio.get_running_loop().time()
        self._idle.reschedule(None if self._waiting else now + IDLE_SECONDS)

    async def run(self) -> None:
        """Start a process for waiting jobs; end the process after a while without jobs."""
        backoff = Backoff(first=1.0, most=CRASH_SECONDS_MAX)
        try:
            while True:
                await self._requested.wait()
                if await self._run_process():
                    backoff = Backoff(first=1.0, most=CRASH_SECONDS_MAX)
                    if self._lacks_archive:
                        await self._make_archive()
                else:
                    await backoff.wait()
        finally:
            await self.stop()

    async def _run_process(self) -> bool:
        """Run a process until it ends; return False if waiting jobs failed with the process."""
        if (obstacle := await asyncio.to_thread(find_obstacle)) is not None:
            self._fail_waiting(SparkJobError(obstacle.problem, hint=obstacle.fix))
            self._requested.clear()  # until a submitter asks again
            return False
        if self._driver is None:
            await self._begin_process()
            for path in self._waiting:
                self._send("run", path)
        assert self._driver is not None
        messages = self._driver.messages
        is_idle = False
        try:
            is_idle = await self._follow(self._driver.process)
        finally:
            await self.stop()
            words = self._last_error or (messages[-1] if messages else "no message")
            # The next process runs a job that came at the last moment.
            error = SparkJobError(f"the Spark process ended: {words}")
            failed = not is_idle and self._fail_waiting(error)
        return not failed

    async def _begin_process(self) -> None:
        arguments = ["-m", PROGRAM, "--serve"]
        arguments += ["--master", self._master, "--jobs", str(self._jobs)]
        for name, value in self._spark_settings.items():
            arguments += ["--conf", f"{name}={value}"]
        if self._allow_insecure:
            arguments.append("--allow-insecure")
        self._last_error = None
        log.info("starting Spark", master=self._master)
        self._driver = await start_driver(arguments, env=_environment(self._master))

    def _fail_waiting(self, error: SparkJobError) -> bool:
        """Fail the waiting jobs because their process has ended; return whether a job waited."""
        failed = [waiting for waiting in self._waiting.values() if not waiting.done()]
        if failed:
            self._requested.clear()  # until the submitter asks again
        for waiting in failed:
            waiting.set_exception(error)
        return bool(failed)

    async def _make_archive(self) -> None:
        """Create the class data archive while no job needs the machine; a new job cancels the
        creation.
        """
        self._lacks_archive = False
        process = await create_subprocess_exec(
            *(sys.executable, "-m", class_archive.PROGRAM),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(self._master),
        )
        ended = asyncio.create_task(process.wait(), name="class archive")
        request = asyncio.create_task(self._requested.wait(), name="Spark is wanted")
        try:
            await asyncio.wait(
                [ended, request], timeout=ARCHIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            request.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await ended

    async def _follow(self, process: Process) -> bool:
        """Read events until the process ends or has been idle for long; return whether it has been
        idle.
        """
        try:
            async with asyncio.timeout(None) as self._idle:
                self._set_idle()
                await self._read_events(process)
        except TimeoutError:
            return True
        finally:
            self._idle = None
        return False

    async def _read_events(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            with contextlib.suppress(ValueError):  # a line of Spark, not an event
                event = json.loads(line)
                if isinstance(event, dict):
                    self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "ready":
                self._is_ready = True
                self._lacks_archive = bool(event.get("lacks_archive"))
            case "starving_ended":
                self.is_starving = False
            case "ended":
                self._last_error = event["error"]
            case "insecure":
                log.warning(
                    "Spark sends connection strings unprotected", reasons=event["weaknesses"]
                )
            case "starving":
                self.is_starving = True
                log.warning(
                    "the copy waits for Spark: no worker has taken a task; check that workers run"
                    " and have a free core and free memory",
                    master=self._master,
                )
        waiting = self._waiting.get(event.get("job", ""))
        if waiting is None or waiting.done():
            return
        if event["event"] == "finished":
            waiting.set_result(event["result"])
        elif event["event"] == "failed":
            waiting.set_exception(SparkJobError(f"the Spark job failed: {event['error']}"))

    async def stop(self) -> None:
        """End the process, if any."""
        driver, self._driver = self._driver, None
        self._is_ready = self.is_starving = False
        if driver is None:
            return
        if not self._waiting:
            self._requested.clear()
        await driver.end()


def _environment(master: str) -> dict[str, str]:
    """Return the environment for Spark, whose executors use this Python."""
    environment = {"PYSPARK_PYTHON": sys.executable} | choose_environment(os.environ)
    return environment | LOCAL_ENVIRONMENT if is_local(master) else environment


async def _keep_last(stream: asyncio.StreamReader, lines: list[str], most: int = 50) -> None:
    while line := await stream.readline():
        text = line.decode(errors="replace").strip()
        if text:
            lines.append(text)
            del lines[:-most]


def _write_job(path: Path, job: dict[str, Any]) -> None:
    """Write *job*, which has connection strings, to a file that only this user can read."""
    write_private(path, json.dumps(job))
