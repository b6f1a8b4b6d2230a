"""Servers and processes for benchmarks: a source, a target, and `streamer run` on them."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

from streamer.commands.embedded import Server, packaged_binaries

ITEMS = (
    "create table items (id bigint primary key, name text, amount numeric(12,2), at timestamptz,"
    " note text)"
)
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
    "wal_level": "logical",
    "logical_decoding_work_mem": "64MB",
}


def binaries() -> Path:
    """Return the PostgreSQL to measure on: ``BENCH_BINDIR``, or the embedded 18."""
    chosen = os.environ.get("BENCH_BINDIR")
    return Path(chosen) if chosen else packaged_binaries(18)


@contextlib.contextmanager
def source_and_target() -> Iterator[tuple[Server, Server]]:
    with tempfile.TemporaryDirectory(prefix="streamer-bench-") as directory:
        parent = Path(directory)
        parent.chmod(0o755)
        servers = [Server(parent / name, binaries(), SETTINGS) for name in ("source", "target")]
        try:
            for server in servers:
                server.create()
                server.start()
            yield servers[0], servers[1]
        finally:
            for server in servers:
                server.stop("immediate")


def make_items(source: Server, target: Server) -> None:
    """Make the table that both sides fill: in the database ``bench``, at the target also in
    ``native``, for PostgreSQL's own subscription.
    """
    for server, name in ((source, "bench"), (target, "bench"), (target, "native")):
        server.execute(f"create database {name}")
        server.execute(ITEMS, name)


def make_subscription(source: Server, target: Server, options: str) -> None:
    """Prepare PostgreSQL's own way, from now on, not enabled yet."""
    source.execute("create publication native for table items", "bench")
    source.execute("select pg_create_logical_replication_slot('native', 'pgoutput')", "bench")
    target.execute(
        f"create subscription native connection '{source.url('bench')}' publication native with"
        f" (create_slot = false, slot_name = native, enabled = false, copy_data = false,"
        f" {options})",
        "native",
    )


def drain_natively(source: Server, target: Server, end_lsn: object, seconds: float) -> float:
    """Return how many seconds the prepared subscription takes up to *end_lsn*, from when its
    walsender starts.
    """
    target.execute("alter subscription native enable", "native")
    wait_until(source.url("bench"), active("native"), 60)
    began = time.monotonic()
    reached = (
        f"select confirmed_flush_lsn >= '{end_lsn}' from pg_replication_slots"
        " where slot_name = 'native'"
    )
    wait_until(source.url("bench"), reached, seconds)
    return time.monotonic() - began


def active(slot: str) -> str:
    """Return a condition: a program reads the slot."""
    return f"select active from pg_replication_slots where slot_name = '{slot}'"


def has_everything(end_lsn: object) -> str:
    """Return a condition at streamer's target: it has everything up to *end_lsn*."""
    return (
        f"select bool_and(end_lsn >= '{end_lsn}' or acknowledged_lsn >= '{end_lsn}')"
        " from streamer.source s join streamer.relation r on r.source_id = s.id"
    )


def write_config(
    path: Path,
    source: str,
    target: str,
    tables: str,
    *,
    transport: str = "text",
    streaming: str = "on",
    **settings: object,
) -> None:
    lines = [f"{name}: {value}" for name, value in settings.items()]
    path.write_text(
        "\n".join(
            [
                f'target: {{url: "{target}"}}',
                'http: {listen: ""}',
                *lines,
                "sources:",
                (
                    f'- {{database: bench, urls: [{{url: "{source}"}}], transport: {transport},'
                    f" streaming: {streaming},"
                ),
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
        """Look at the process's memory and processor time."""
        with contextlib.suppress(OSError, AttributeError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            match = re.search(r"VmHWM:\s+(\d+)", status)
            if match:
                self.peak_kilobytes = int(match[1])
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            self.cpu_seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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


def wait_until(url: str, sql: str, seconds: float, run: Run | None = None) -> None:
    """Wait until a query's first value is true."""
    deadline = time.monotonic() + seconds
    with psycopg.connect(url, autocommit=True) as connection:
        while time.monotonic() < deadline:
            row = connection.execute(sql.encode()).fetchone()
            if row is not None and row[0]:
                return
            if run is not None:
                run.sample()
                if run.process.poll() is not None:
                    assert run.process.stderr is not None
                    raise SystemExit(run.process.stderr.read())
            time.sleep(0.02)
    raise SystemExit(f"timed out waiting for: {sql}")
