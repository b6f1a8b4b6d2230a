"""A source and a target server for benchmarks, and their databases."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Protocol

import psycopg

from streamer.commands.demo.embedded_servers import Server, packaged_binaries

SETTINGS: Final = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "wal_level": "logical",
    "logical_decoding_work_mem": "64MB",
    "max_worker_processes": "64",
    "max_logical_replication_workers": "32",
    # Copy the same number of tables at a time as `sync.jobs` of streamer.
    "max_sync_workers_per_subscription": "4",
    # Before PostgreSQL 16, at most one subscription starts in this interval.
    "wal_retrieve_retry_interval": "50ms",
    "max_wal_senders": "64",
    "max_replication_slots": "64",
    # The benchmark vacuums between measurements.
    "autovacuum": "off",
}
POLL_SECONDS: Final = 0.005


def find_binaries(name: str) -> Path:
    """Return the directory of PostgreSQL's programs.

    *name*: ``machine`` (that of pg_config, or else the embedded 18), ``16`` or ``18`` (embedded,
    unless the machine's own is of that version), or a directory.
    """
    if name == "machine":
        return _of_machine() or packaged_binaries(18)
    if not name.isdecimal():
        return Path(name)
    path = _of_machine()
    if path is not None and version_of(path).partition(".")[0] == name:
        return path
    return packaged_binaries(int(name))


def _of_machine() -> Path | None:
    if shutil.which("pg_config") is None:
        return None
    process = subprocess.run(["pg_config", "--bindir"], check=True, capture_output=True, text=True)
    path = Path(process.stdout.strip())
    return path if (path / "initdb").exists() else None


def version_of(binaries: Path) -> str:
    """Return the version of a server, as in ``15.4``."""
    text = subprocess.run(
        [binaries / "postgres", "--version"], check=True, capture_output=True, text=True
    ).stdout
    return text.split()[2]


def has_pglogical(binaries: Path) -> bool:
    """Whether the extension pglogical is installed for the server.

    The version of Debian 12 (2.4.2 for PostgreSQL 15) cannot be measured: its supervisor accepts no
    ProcSignalBarrier, so DROP DATABASE waits for ever.
    """
    libraries = binaries.parent / "lib"
    return any(path.exists() for path in libraries.glob("**/pglogical.so"))


def settings_for(binaries: Path) -> dict[str, str]:
    """Return the settings of a server."""
    chosen = dict(SETTINGS)
    if int(version_of(binaries).partition(".")[0]) >= 18:
        chosen["max_active_replication_origins"] = "64"  # older versions use max_replication_slots
    if has_pglogical(binaries):
        chosen["shared_preload_libraries"] = "pglogical"
    return chosen


@contextlib.contextmanager
def running_servers(
    names: Sequence[str], binaries: Path | None = None, settings: dict[str, str] | None = None
) -> Iterator[list[Server]]:
    """Run a server for each name during a block; by default the machine's own."""
    binaries = binaries or find_binaries("machine")
    chosen = settings_for(binaries) | (settings or {})
    with tempfile.TemporaryDirectory(
        prefix="streamer-bench-", ignore_cleanup_errors=True
    ) as directory:
        parent = Path(directory)
        parent.chmod(0o755)
        servers = [Server(parent / name, binaries, chosen) for name in names]
        former = signal.signal(signal.SIGTERM, _exit)  # else the servers would outlive a kill
        try:
            for server in servers:
                server.create()
                server.start()
            yield servers
        finally:
            signal.signal(signal.SIGTERM, former)
            for server in servers:
                server.stop("immediate")


def _exit(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def source_and_target(
    binaries: Path | None = None, settings: dict[str, str] | None = None
) -> Iterator[tuple[Server, Server]]:
    """Run both servers during a block; by default the machine's own."""
    with running_servers(("source", "target"), binaries, settings) as (source, target):
        yield source, target


@dataclass(frozen=True, slots=True)
class Database:
    """A database of a server."""

    server: Server
    name: str

    @property
    def url(self) -> str:
        return self.server.url(self.name)

    def execute(self, sql: str) -> list[tuple[object, ...]]:
        return self.server.execute(sql, self.name)

    def value(self, sql: str) -> object:
        return self.execute(sql)[0][0]

    def create(self) -> None:
        self.server.execute(f'create database "{self.name}"')

    def drop(self) -> None:
        """Drop the database with its subscriptions and slots."""
        for (subscription,) in self.execute(
            "select subname from pg_subscription"
            " where subdbid = (select oid from pg_database where datname = current_database())"
        ):
            self.execute(f"alter subscription {subscription} disable")
            self.execute(f"alter subscription {subscription} set (slot_name = none)")
            self.execute(f"drop subscription {subscription}")
        slots = (
            "select slot_name, active from pg_replication_slots where database = current_database()"
        )
        wait_until(self.url, f"select not exists (select from ({slots}) s where active)", 60)
        for slot, _ in self.execute(slots):
            self.execute(f"select pg_drop_replication_slot('{slot}')")
        self.server.execute(f'drop database "{self.name}" with (force)')

    def run_program(self, name: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs on this database. Raises SystemExit if it fails."""
        program = self.server.program(name)
        if not program.exists():
            raise SystemExit(f"the benchmark needs {name}, and {program.parent} lacks it")
        result = subprocess.run(
            [str(program), *arguments, self.url],
            check=False,
            capture_output=True,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("PG")},
        )
        if result.returncode:
            raise SystemExit(f"{name}: {result.stderr}")


class Watched(Protocol):
    """A process that a wait depends on."""

    def check(self) -> None:
        """Raise SystemExit if the process has ended by itself."""
        ...


def wait_until(
    url: str,
    sql: str,
    seconds: float,
    watched: Watched | None = None,
    *,
    pause: float = POLL_SECONDS,
) -> float:
    """Wait until the first value of a query is true; return that time, by the monotonic clock."""
    deadline = time.monotonic() + seconds
    with psycopg.connect(url, autocommit=True, application_name="benchmark") as connection:
        while (now := time.monotonic()) < deadline:
            row = connection.execute(sql.encode()).fetchone()
            if row is not None and row[0]:
                return now
            if watched is not None:
                watched.check()
            time.sleep(pause)
    raise SystemExit(f"timed out after {seconds:g} s, waiting for: {sql}")


def write_config(
    path: Path,
    source: str,
    target: str,
    tables: str,
    *,
    transport: str = "text",
    **settings: object,
) -> None:
    """Write a configuration with a single source."""
    lines = [f"{name}: {value}" for name, value in settings.items()]
    path.write_text(
        "\n".join(
            [
                f'target: {{url: "{target}"}}',
                'http: {listen: ""}',
                *lines,
                "sources:",
                f'- {{database: bench, urls: [{{url: "{source}"}}], transport: {transport},',
                f"   tables: {tables}}}",
            ]
        )
    )


class Run:
    """A `streamer run` process, with its resident memory watched."""

    def __init__(self, config: Path, *arguments: str, program: str = "streamer") -> None:
        command = [sys.executable, "-m", program, "--config", str(config), "run", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.peak_kilobytes = 0
        self.cpu_seconds = 0.0

    def sample(self) -> None:
        """Read the process's memory and processor time."""
        with contextlib.suppress(OSError, AttributeError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            match = re.search(r"VmHWM:\s+(\d+)", status)
            if match:
                self.peak_kilobytes = int(match[1])
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            self.cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        self.sample()
        if self.process.poll() is not None:
            assert self.process.stderr is not None
            raise SystemExit(self.process.stderr.read())

    def wait(self) -> None:
        while self.process.poll() is None:
            self.sample()
            time.sleep(0.05)
        if self.process.returncode:
            assert self.process.stderr is not None
            raise SystemExit(self.process.stderr.read())

    def stop(self) -> None:
        self.process.terminate()
        self.wait()


class Sampler(threading.Thread):
    """Polls a WAL position, and keeps the time of each change."""

    def __init__(self, database: Database, sql: str, every: float = 0.001) -> None:
        """*sql*: a query for a position, as a pg_lsn."""
        super().__init__(daemon=True)
        self._url = database.url
        self._sql = f"select (({sql}) - '0/0'::pg_lsn)::int8"
        self._every = every
        self._ended = threading.Event()
        self.backend_pid = 0
        self.found: list[tuple[float, int]] = []
        """Monotonic time in seconds, and position in bytes."""

    def run(self) -> None:
        last = None
        with psycopg.connect(
            self._url, autocommit=True, application_name="benchmark"
        ) as connection:
            self.backend_pid = connection.info.backend_pid
            while not self._ended.wait(self._every):
                row = connection.execute(self._sql.encode(), prepare=True).fetchone()
                if row is not None and row[0] is not None and row[0] != last:
                    last = int(row[0])
                    self.found.append((time.monotonic(), last))

    def stop(self) -> list[tuple[float, int]]:
        self._ended.set()
        self.join()
        return self.found
