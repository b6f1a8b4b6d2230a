"""The parent of ``processes: N`` starts and restarts the processes, and passes signals on.

The parent streams no source. Each process is a replica, so locks in the target distribute the
sources. The parent holds the listening socket that all processes inherit, and names the process
that accepts its connections. If that process dies, connections wait for the next process.

Commands travel over the standard input of a process. A signal that a service manager sends to the
parent and to its processes is therefore not a second signal. The end of the parent closes that
pipe, which ends the processes.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from streamer.runtime.child_processes.child_process import RELOAD, SERVE, STOP, Membership
from streamer.runtime.child_processes.restarts import Restarts, choose_acceptor
from streamer.util.owned_directory import OwnedDirectory
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

PROGRAM: Final = "streamer"


class Parent:
    """*arguments*: the arguments of `streamer` before the options of `run`. *port*: the descriptor
    of the listening socket, if any.
    """

    def __init__(self, count: int, arguments: Sequence[str], port: int | None) -> None:
        self._count = count
        self._arguments = list(arguments)
        self._port = port
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._started_at: dict[int, float] = {}
        self._serving: int | None = None
        self._stopping = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Run until all processes end; return the exit code."""
        parent = Path(tempfile.gettempdir())
        with OwnedDirectory(parent, f"streamer-processes-{os.getuid()}-") as directory:
            async with asyncio.TaskGroup() as group:
                for number in range(1, self._count + 1):
                    group.create_task(
                        self._keep_running(number, directory), name=f"process {number}"
                    )
        return self._exit_code

    async def _keep_running(self, number: int, directory: Path) -> None:
        """Run a process, and restart the process until all processes must end."""
        restarts = Restarts()
        while not self._stopping.is_set():
            process = await self._start(Membership(number, self._port, directory))
            began = time.monotonic()
            self._processes[number], self._started_at[number] = process, began
            if self._stopping.is_set():
                self._send(number, STOP)
            self._appoint_acceptor()
            code = await process.wait()
            del self._processes[number], self._started_at[number]
            self._appoint_acceptor()
            if self._stopping.is_set():
                if code > 0:
                    self._exit_code = self._exit_code or code
                return
            seconds = restarts.next_seconds(code, time.monotonic() - began)
            fields = {"number": number, "pid": process.pid, "exit": _describe(code)}
            if seconds is None:
                log.error("a process cannot run, so all processes end", **fields)
                self._exit_code = code
                self.stop()
                return
            log.warning("a process ended and will start again", **fields, seconds=seconds)
            await wait_for_event(self._stopping, seconds)

    async def _start(self, membership: Membership) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            PROGRAM,
            *self._arguments,
            "--process",
            str(membership),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=() if self._port is None else (self._port,),
        )
        log.info("process started", number=membership.number, pid=process.pid)
        return process

    def _appoint_acceptor(self) -> None:
        """Choose the live process that accepts the connections of the port."""
        chosen = self._serving if self._serving in self._processes else None
        if chosen is None and (chosen := choose_acceptor(self._started_at)) is not None:
            self._send(chosen, SERVE)
        self._serving = chosen

    def _send(self, number: int, command: str) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # the process ends at this moment
            stdin.write(f"{command}\n".encode())

    def stop(self) -> None:
        """End all processes in order."""
        self._stopping.set()
        for number in self._processes:
            self._send(number, STOP)

    def reload(self) -> None:
        """Reload the configuration in all processes."""
        for number in self._processes:
            self._send(number, RELOAD)


def _describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else str(code)
