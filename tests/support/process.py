"""The program as a process, the way users run it."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from streamer.admin.mapping.applied_mapping import load_applied
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.commands import status as status_command
from streamer.commands import wait as wait_command
from streamer.config import static_mapping
from streamer.copy.spark.start import WORKER_SETTINGS
from streamer.mapping.rules import Mapping
from streamer.target.connection import TargetAddress
from tests.support.forks import ForkedProcess

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


class Process:
    """`streamer run` on a configuration file, with its log kept.

    Without *spark*, copies are made by threads of another process in its place. *program*: a module
    that runs it in some other way.
    """

    def __init__(
        self,
        config: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        spark: bool = True,
        program: str | None = None,
    ) -> None:
        self.config = config
        self.log = config.parent / f"run-{time.monotonic_ns()}.log"
        program = program or ("streamer" if spark else "tests.support.plain_streamer")
        self.log.touch()
        self.process = ForkedProcess(
            program,
            ["--config", str(config), "run", *arguments],
            environment=os.environ | (environment or {}),
            stdout=Path(os.devnull),
            stderr=self.log,
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """Kill the process alone; its children have to notice by themselves."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def children(self, pattern: str) -> list[psutil.Process]:
        """Return the descendants whose command line contains *pattern*."""
        processes = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if pattern in " ".join(child.cmdline()):
                    processes.append(child)
            except psutil.Error:
                continue
        return processes

    def terminate(self, seconds: float = 30.0) -> int:
        """Ask it to stop; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)


SPARK_PYTHON: Final = f"-m {WORKER_SETTINGS['spark.python.daemon.module']}"
"""In the command line of Spark's Python processes. The JVM's has the module's name only."""


def command(
    config: Path, *arguments: str, seconds: float = 60
) -> "subprocess.CompletedProcess[str]":
    """Run a command of the program to its end, in the directory of *config*."""
    config = config.resolve()
    return run(
        "streamer", "--config", str(config), *arguments, seconds=seconds, directory=config.parent
    )


def run(
    program: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    seconds: float = 60,
    directory: Path = ROOT,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end."""
    with tempfile.TemporaryDirectory() as streams:
        stdout, stderr = Path(streams, "stdout"), Path(streams, "stderr")
        process = ForkedProcess(
            program,
            list(arguments),
            environment=os.environ | (environment or {}),
            stdout=stdout,
            stderr=stderr,
            directory=directory,
        )
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            list(arguments), code, stdout.read_text(), stderr.read_text()
        )


def is_frozen(process: Process) -> bool:
    """Whether a failpoint has stopped it; SIGCONT lets it go on."""
    return psutil.Process(process.process.pid).status() == psutil.STATUS_STOPPED


def caught_up(process: Process, seconds: float = 180) -> None:
    """Wait until everything committed now is visible and every table ready, as `streamer wait`."""

    async def wait() -> str | None:
        address, mapping = await _read(process.config)
        return await wait_command.wait(address, mapping, seconds)

    missing = _in_thread(wait)
    assert missing is None, f"{missing}\n{process.output}"


def status(config: Path) -> list[dict[str, Any]]:
    """Return each source in the output of `streamer status --json`."""

    async def read() -> list[dict[str, Any]]:
        address, mapping = await _read(config)
        bookkeeping = Bookkeeping(address, "streamer status")
        try:
            statuses = await status_command.read_status(bookkeeping, mapping)
        finally:
            await bookkeeping.close()
        return [status.to_json() for status in statuses]

    sources: list[dict[str, Any]] = json.loads(json.dumps(_in_thread(read), default=str))
    return sources


def report(config: Path) -> dict[str, Any]:
    """Return the output of `streamer status --json`."""

    async def read() -> dict[str, Any]:
        return (await status_command.read_report(*await _read(config))).to_json()

    output: dict[str, Any] = json.loads(json.dumps(_in_thread(read), default=str))
    return output


async def _read(config: Path) -> tuple[TargetAddress, Mapping]:
    settings, mapping = static_mapping.load(config)
    if settings.mapping_database is not None:
        mapping = await load_applied(settings)
    return TargetAddress.parse(settings.target.url), mapping


def _in_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run *work* from wherever, be it a running event loop. A process of its own would take two
    seconds to start, many hundred times.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(lambda: asyncio.run(work())).result()
