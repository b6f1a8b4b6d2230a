"""The program as a process, the way users run it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

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
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, "--config", str(config), "run", *arguments],
                cwd=ROOT,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | (environment or {}),
                start_new_session=True,
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
        """Kill the process alone; what it started has to notice by itself."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def children(self, pattern: str) -> list[psutil.Process]:
        """Return the descendants whose command line contains *pattern*."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if pattern in " ".join(child.cmdline()):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    def terminate(self, seconds: float = 10.0) -> int:
        """Ask it to stop; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)


def command(
    config: Path, *arguments: str, seconds: float = 60
) -> "subprocess.CompletedProcess[str]":
    """Run a command of the program to its end."""
    return subprocess.run(
        [sys.executable, "-m", "streamer", "--config", str(config), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def caught_up(process: Process, seconds: float = 60) -> None:
    """Wait until everything committed now is visible and every table ready."""
    result = command(process.config, "wait", "--timeout", str(seconds), seconds=seconds + 30)
    assert result.returncode == 0, f"{result.stderr}\n{process.output}"


def status(config: Path) -> list[dict[str, Any]]:
    result = command(config, "status", "--json")
    assert result.returncode == 0, result.stderr
    sources: list[dict[str, Any]] = json.loads(result.stdout)["sources"]
    return sources


def eventually(condition: Callable[[], Any], seconds: float = 30, what: str = "") -> Any:
    """Wait until *condition* returns something true; return that."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not so after {seconds:g} s: {what}"
        time.sleep(0.05)
