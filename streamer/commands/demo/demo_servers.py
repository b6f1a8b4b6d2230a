"""The processes of the demo: starts and stops three servers and streamer, in a directory."""

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from streamer.commands.demo.embedded_servers import (
    Server,
    free_port,
    make_directory,
    packaged_binaries,
)
from streamer.commands.demo.shop_tables import DATABASE, TABLES_YAML, WAREHOUSE
from streamer.copy.spark.obstacle import find_obstacle
from streamer.errors.error_classes import StreamerError
from streamer.util.owned_directory import write_private
from streamer.util.waiting import in_thread

SOURCES: Final = {"eu": 16, "us": 18}
"""The shops, by sid, and the version of PostgreSQL that each shop runs."""
TARGET: Final = 18
STOP_SECONDS: Final = 12.0
_POLL_SECONDS: Final = 0.05
_SETTINGS: Final = {"max_connections": "60", "max_wal_size": "2GB", "log_min_messages": "fatal"}


class DemoError(StreamerError):
    """The demo cannot start, or streamer failed during it."""

    code = "demo"
    runbook = "demo-fails"
    advice = "Follow the message."


class Stage:
    """The directory and the processes of the demo."""

    def __init__(self) -> None:
        self.directory = make_directory("streamer-demo-")
        self.config = self.directory / "config.yaml"
        self.log = self.directory / "streamer.log"
        self.http_port = free_port()
        self.servers: list[Server] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def page(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/"

    @property
    def metrics(self) -> str:
        return f"{self.page}metrics"

    @property
    def sources(self) -> dict[str, Server]:
        """The shops' servers, by sid."""
        return dict(zip(SOURCES, self.servers, strict=False))

    @property
    def target(self) -> Server:
        return self.servers[-1]

    async def start_servers(self) -> None:
        """Make and start the servers, and create the databases."""
        await in_thread(self._prepare_servers)
        async with asyncio.TaskGroup() as group:
            for server in self.servers:
                name = WAREHOUSE if server is self.target else DATABASE
                group.create_task(in_thread(_make, server, name), name=server.directory.name)

    def _prepare_servers(self) -> None:
        password = secrets.token_urlsafe(12)
        places = {f"{DATABASE}-{sid}": major for sid, major in SOURCES.items()}
        for name, major in (places | {WAREHOUSE: TARGET}).items():
            self.servers.append(
                Server(
                    self.directory / name, packaged_binaries(major), _SETTINGS, password=password
                )
            )

    def write_config(self) -> None:
        """Write the configuration for the program."""
        urls = "\n".join(
            f'      - {{url: "{server.url(DATABASE)}", sid: {sid}}}'
            for sid, server in self.sources.items()
        )
        text = _CONFIG.format(
            target=self.target.url(WAREHOUSE),
            port=self.http_port,
            spool=self.directory / "spool",
            database=DATABASE,
            urls=urls,
            tables=TABLES_YAML,
        )
        write_private(self.config, text)

    def start_streamer(self) -> None:
        """Start ``streamer run`` in its own session: Ctrl-C reaches the demo, which ends `run`."""
        self._temporary.mkdir()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command("run"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=self._environment(),
                start_new_session=True,
            )

    @property
    def _temporary(self) -> Path:
        return self.directory / "tmp"

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "streamer", "--config", str(self.config), *arguments]

    def _environment(self) -> dict[str, str]:
        temporary = str(self._temporary)
        return os.environ | {"TMPDIR": temporary, "SPARK_LOCAL_DIRS": temporary}

    async def compare(self) -> list[dict[str, Any]]:
        """Run ``streamer compare`` and return the tables. Raises DemoError after a failure."""
        process = await asyncio.create_subprocess_exec(
            *self._command("compare", "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.directory,
            env=self._environment(),
            start_new_session=True,
        )
        try:
            output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)  # also ends the Spark process of the comparison
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STOP_SECONDS):
                        await process.wait()
        try:
            tables: list[dict[str, Any]] = json.loads(output)["tables"]
        except ValueError:
            messages = errors.decode(errors="replace").strip().splitlines()
            raise DemoError(
                f"`streamer compare` failed: {messages[-1] if messages else ''}"
            ) from None
        return tables

    def check_streamer(self) -> None:
        """Raise DemoError, with the last lines of the log, if the program has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise DemoError(
                f"`streamer run` ended with exit code {self._process.returncode}: "
                f"{self.last_log_lines()}"
            )

    def last_log_lines(self, count: int = 3) -> str:
        """Return the end of the program's log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it has no log"
        return " | ".join(line.strip() for line in lines[-count:]) or "its log is empty"

    async def stop(self) -> None:
        """End the program and the servers, and remove the directory."""
        if self._process is not None:
            await _end(self._process)
        await asyncio.gather(*(in_thread(server.stop, "immediate") for server in self.servers))
        await in_thread(shutil.rmtree, self.directory, ignore_errors=True)

    def write_stop_script(self) -> Path:
        """Write the script that ends the remaining processes after the end of the demo."""
        assert self._process is not None
        postmasters = (server.postmaster_pid for server in self.servers)
        path = self.directory / "stop"
        path.write_text(
            _STOP_SCRIPT.format(
                directory=shlex.quote(str(self.directory)),
                program=self._process.pid,
                postmasters=" ".join(str(pid) for pid in postmasters if pid is not None),
            )
        )
        path.chmod(0o700)
        return path


_CONFIG: Final = """\
# Written by `streamer demo`.
target:
  url: "{target}"
workers: 2
http:
  listen: 127.0.0.1:{port}
sync:
  jobs: 2
spool:
  directory: "{spool}"
sources:
  - database: {database}
    urls:
{urls}
    tables:
{tables}"""

# The kernel reuses PIDs: a process is ours only if its command line names our directory.
_STOP_SCRIPT: Final = """\
#!/bin/sh
# Ends the processes of `streamer demo --keep`, the program before its servers, and removes its
# files.
directory={directory}
end() {{
  case "$(ps -ww -o args= -p "$2")" in *"$directory"*) ;; *) return ;; esac
  kill -s "$1" "$2"
  tries=0
  while kill -0 "$2" 2>/dev/null && [ "$tries" -lt 150 ]; do
    sleep 0.1
    tries=$((tries + 1))
  done
}}
end TERM {program}
for postmaster in {postmasters}; do
  end QUIT "$postmaster"
done
rm -rf "$directory"
"""


def _make(server: Server, database: str) -> None:
    server.create()
    server.start()
    server.execute(f"create database {database}")


async def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop the program, by a kill if necessary, together with its Spark process."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_spark() -> None:
    """Raises DemoError unless Spark can start on this machine."""
    if (obstacle := find_obstacle()) is not None:
        hint = f"{obstacle.fix}; `make demo` installs both"
        raise DemoError(obstacle.problem, hint=hint)
