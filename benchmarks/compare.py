"""The processor time of `streamer compare`: both servers, Spark's JVM, Python.

``--on local spark`` compares the same rows in a single Python process, and then on Spark. ``psql``
reads a sum of hashes of all rows from both servers at the same time, in place of a comparison.

Both sides get the same rows, of which a few then change at the target. `run` streams meanwhile, as
for an operator. The time of a server includes all its processes, and so the work for `run` and
autovacuum. The memory is the peak of the JVM, and of all Python processes together.

``python -m benchmarks.compare --rows 10000000`` needs about 6 GB of disk. Rows and indexes take 1.3
GB at each server, and `max_wal_size` keeps the WAL of each below 2 GB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from benchmarks import big_table
from benchmarks.servers import Run, source_and_target, wait_until, write_config
from streamer.commands.demo.embedded_servers import Server

SETTINGS: Final = {"max_wal_size": "1GB"}
"""Without this limit, the WAL of the rows would need more space than the rows."""
SAMPLE_SECONDS: Final = 0.1
SUM: Final = "select count(*), sum(hashtextextended(big::text, 0)) from big"


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all files below *directory*."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def server_seconds(process: psutil.Process) -> float:
    """Return the processor time of a postmaster's processes, including processes that have
    ended.
    """
    times = process.cpu_times()
    total = float(times.children_user + times.children_system)
    for child in process.children():
        try:
            cpu = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += cpu.user + cpu.system
    return total


class Family:
    """The processes of a command: processor time and peak of memory by kind."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seconds: dict[tuple[str, int], float] = {}
        self.peaks: dict[str, int] = defaultdict(int)

    def sample(self) -> None:
        memory: dict[str, int] = defaultdict(int)
        try:
            members = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for member in members:
            try:
                kind = self._kind(member)
                times = member.cpu_times()
                memory[kind] += member.memory_info().rss
            except psutil.Error:
                continue
            self._seconds[kind, member.pid] = times.user + times.system
        for kind, size in memory.items():
            self.peaks[kind] = max(self.peaks[kind], size)

    def _kind(self, member: psutil.Process) -> str:
        if member.name() == "java":
            return "Spark's JVM"
        is_task = "spark_worker" in " ".join(member.cmdline())
        return "Python of tasks" if is_task else "Python of the command and the driver"

    def seconds(self) -> dict[str, float]:
        by_kind: dict[str, float] = defaultdict(float)
        for (kind, _), seconds in self._seconds.items():
            by_kind[kind] += seconds
        return by_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--differing", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--key", choices=["bigint", "text"], default="bigint")
    parser.add_argument("--rounds", type=int, default=1, help="the order of the sides alternates")
    parser.add_argument(
        "--on", nargs="+", choices=["local", "spark", "psql"], default=["psql", "local", "spark"]
    )
    options = parser.parse_args()
    with (
        source_and_target(settings=SETTINGS) as (source, target),
        tempfile.TemporaryDirectory() as directory,
    ):
        for server in (source, target):
            server.execute("create database bench")
            server.execute(big_table.create(options.key), "bench")
            big_table.fill(server, options.rows)
        config = Path(directory) / "config.yaml"
        write_config(
            config,
            source.url("bench"),
            target.url("bench"),
            "{big: {initial: none}}",
            sync=f"{{jobs: {options.jobs}}}",
        )
        run = Run(config)
        ready = "select bool_and(state = 'ready') from streamer.relation"
        made = "select to_regclass('streamer.relation') is not null"
        wait_until(target.url("bench"), made, 120, run)
        wait_until(target.url("bench"), ready, 120, run)
        step = max(1, options.rows // max(1, options.differing))
        target.execute(
            f"update big set note = 'other' where (customer + 10000 * floor(amount / 2500))"
            f" % {step} = 0",
            "bench",
        )
        roots = {
            name: psutil.Process(server.postmaster_pid)
            for name, server in (("source", source), ("target", target))
        }
        for number in range(options.rounds):
            for place in options.on[:: -1 if number % 2 else 1]:
                print(f"on {place}:")
                if place == "psql":
                    measure_sums((source, target), roots)
                else:
                    above = "0" if place == "spark" else "1TB"
                    measure(config, roots, options.rows, spark_above=above)
        run.stop()
        for server in (source, target):
            server.execute("checkpoint")
        used = sum(directory_bytes(server.data) for server in (source, target))
        print(f"both servers hold {used / 1e9:.1f} GB on disk")


def measure_sums(servers: Iterable[Server], roots: dict[str, psutil.Process]) -> None:
    start = {name: server_seconds(root) for name, root in roots.items()}
    began = time.monotonic()
    programs = [
        subprocess.Popen(
            [server.program("psql"), server.url("bench"), "-qtc", SUM], stdout=subprocess.PIPE
        )
        for server in servers
    ]
    sums = [program.communicate()[0].split() for program in programs]
    seconds = time.monotonic() - began
    print(f"sums of hashes in {seconds:.1f} s: {sums}")
    for name, root in roots.items():
        print(f"{name:38} {server_seconds(root) - start[name]:7.1f} s of processor time")


def measure(config: Path, roots: dict[str, psutil.Process], rows: int, *, spark_above: str) -> None:
    start = {name: server_seconds(root) for name, root in roots.items()}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "streamer", "-c", str(config), "compare", "--json"],
            stdout=output,
            env=os.environ | {"STREAMER_SYNC__COMPARE_ON_SPARK_ABOVE": spark_above},
        )
        family = Family(command.pid)
        while True:
            family.sample()
            try:
                command.wait(SAMPLE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        seconds = time.monotonic() - began
        output.seek(0)
        (table,) = json.load(output)["tables"]
    used = {name: server_seconds(root) - start[name] for name, root in roots.items()}
    used |= family.seconds()
    total = sum(used.values())
    print(
        f"{rows} rows on each side in {seconds:.1f} s: {table['different']} different,"
        f" {table['missing']} missing, {table['extra']} extra, {table['undecided']} undecided"
    )
    for name, spent in used.items():
        peak = f", at most {family.peaks[name] / 1e6:.0f} MB" if name in family.peaks else ""
        print(f"{name:38} {spent:7.1f} s of processor time, {spent / total:4.0%}{peak}")


if __name__ == "__main__":
    main()
