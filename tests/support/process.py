"""The program as a process, the way users run it."""

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from streamer.commands import status as status_command
from streamer.commands.status_output import as_json_object
from streamer.copy.spark.start import WORKER_SETTINGS
from streamer.mapping.rules import Mapping
from tests.support.forks import ForkedProcess
from tests.support.observer import Observer, ask

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


class Process:
    """`streamer run` on a configuration file, with its log kept.

    Without *spark*, threads of a process in its place make the copies. *program*: a module that
    runs the program in a different way.
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
        """Send SIGTERM to the process; return the exit code."""
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
    """Whether a failpoint has stopped the process; SIGCONT continues the process."""
    return psutil.Process(process.process.pid).status() == psutil.STATUS_STOPPED


def caught_up(process: Process, seconds: float = 180) -> None:
    """Wait until all present commits are visible and every table is ready, as `streamer wait`."""
    missing = ask(process.config, lambda observer, mapping: observer.wait(mapping, seconds))
    assert missing is None, f"{missing}\n{process.output}"


def status(config: Path) -> list[dict[str, Any]]:
    """Return each source in the output of `streamer status --json`."""
    return _plain(ask(config, Observer.statuses))


def report(config: Path) -> dict[str, Any]:
    """Return the output of `streamer status --json`, read over separate connections."""

    async def read(observer: Observer, mapping: Mapping) -> dict[str, Any]:
        return as_json_object(await status_command.read_report(observer.address, mapping))

    return _plain(ask(config, read))


def _plain(answer: T) -> T:
    """Return the values as JSON has them."""
    values: T = json.loads(json.dumps(answer, default=str))
    return values
