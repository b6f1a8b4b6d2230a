"""Processes of the program without the imports: a server imports the modules once, and forks.

The imports of `streamer run` take more than a second of CPU, some hundred times in a run of the
suite. A forked process is an ordinary process: with its own session, environment and standard
streams, ended by a signal, and with an exit code. The tests are not its parent, so the server
writes the exit code into a file.

Requests are lines of JSON on standard input, answers lines of JSON on standard output.
"""

import atexit
import contextlib
import gc
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.waiting import polls

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.01
IMPORTED = (
    "streamer.admin.admin_server",
    "streamer.cli.run_as_processes",
    "streamer.cli.run_command",
    "streamer.commands.check.check",
    "streamer.commands.execute_script",
    "streamer.commands.quarantined_rows",
    "streamer.commands.request_outcomes",
    "streamer.commands.status_output",
    "streamer.commands.teardown",
    "streamer.commands.wait",
    "streamer.runtime.child_processes.orphaned_journals",
    "streamer.runtime.process.engine",
)
"""The modules that commands import when they run."""


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use.

    *program*: a module to run like ``python -m``, or ``module:function`` to call under the name of
    a command, as in the script that pip installs.
    """

    def __init__(
        self,
        program: str,
        arguments: list[str],
        *,
        environment: dict[str, str],
        stdout: Path,
        stderr: Path,
        directory: Path = ROOT,
    ) -> None:
        self.returncode: int | None = None
        self._exit = stderr.with_name(f"{stderr.name}.exit-{time.monotonic_ns()}")
        self.pid: int = _server.ask(
            program=program,
            arguments=arguments,
            environment=environment,
            stdout=str(stdout),
            stderr=str(stderr),
            exit=str(self._exit),
            directory=str(directory),
        )["pid"]

    def poll(self) -> int | None:
        if self.returncode is None and self._exit.exists():
            self.returncode = int(self._exit.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        for _ in polls(math.inf if timeout is None else timeout, every=POLL_SECONDS):
            if (code := self.poll()) is not None:
                return code
        assert timeout is not None
        raise subprocess.TimeoutExpired(str(self.pid), timeout)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the process, but no longer than *seconds*."""
        return any(self.poll() is not None for _ in polls(seconds, every=POLL_SECONDS))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the server is about to report the end
                os.kill(self.pid, number)


class _Server:
    """The process that forks, started at the first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.support.forks"],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                atexit.register(self._close)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer

    def _close(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_server = _Server()


_exits: dict[int, Path] = {}
"""Where to write the exit codes, by the numbers of the processes that run."""


def _serve() -> dict[str, Any] | None:
    """Fork for every request; return the request in each forked process, None at the end."""
    while line := sys.stdin.readline():
        request: dict[str, Any] = json.loads(line)
        # A process may end before the number of the process is in `_exits`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if pid := os.fork():
            _exits[pid] = Path(request["exit"])
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if not pid:
            return request
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()
    return None


def _write_exits(*_: object) -> None:
    """Write the exit codes of the processes that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            path = _exits.pop(pid)
            with contextlib.suppress(FileNotFoundError):  # nobody waits for the process any more
                path.with_suffix(".part").write_text(str(os.waitstatus_to_exitcode(status)))
                path.with_suffix(".part").rename(path)


def _become(request: dict[str, Any]) -> None:
    """Become the process of *request*, up to the start of its program."""
    os.setsid()
    for number, name in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    time.tzset()
    from streamer.util import failpoints

    # A test that arms failpoints for itself may have started the server.
    failpoints._armed = failpoints._parse(os.environ.get(failpoints.VARIABLE, ""))
    sys.argv = [request["program"].partition(".")[0], *request["arguments"]]


def _import_program() -> None:
    import pydantic.v1  # noqa: F401  # FastAPI imports it with the first route
    import typer.main

    for name in IMPORTED:
        importlib.import_module(name)
    from streamer.admin.page.render_templates import load
    from streamer.cli.main import app

    load()
    # Typer makes fifty commands in 30 ms, and adds later what depends on the environment.
    group = typer.main.get_group(app)
    setattr(typer.main, "get_group", lambda _: group)  # noqa: B010  # a function in place of a method


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, _write_exits)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_program()
    # Without this, every process traverses all imported objects at its end: 0.3 s of CPU.
    gc.collect()
    gc.freeze()
    if (request := _serve()) is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(request)
        module, _, function = request["program"].partition(":")
        if function:
            sys.modules["__main__"].__package__ = None  # a script has none
            getattr(importlib.import_module(module), function)()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
