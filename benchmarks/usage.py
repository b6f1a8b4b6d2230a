"""CPU and memory of processes, from /proc."""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.servers import Database
from streamer.commands.demo.embedded_servers import Server

_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds, of user and system. ``program``: streamer's process. ``target``: backends and
    apply workers. ``source``: walsenders.
    """

    program: float = 0.0
    target: float = 0.0
    source: float = 0.0

    @property
    def total(self) -> float:
        return self.program + self.target + self.source

    @property
    def busiest(self) -> float:
        return max(self.program, self.target, self.source)

    def scaled(self, by: float) -> "Cpu":
        return Cpu(self.program * by, self.target * by, self.source * by)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """CPU seconds by pid at a moment."""

    program: dict[int, float]
    target: dict[int, float]
    source: dict[int, float]

    def until(self, later: "Snapshot") -> Cpu:
        """Return the CPU time between this snapshot and *later*."""
        return Cpu(
            _used(self.program, later.program),
            _used(self.target, later.target),
            _used(self.source, later.source),
        )


def _used(start: dict[int, float], end: dict[int, float]) -> float:
    return sum(seconds - start.get(pid, 0.0) for pid, seconds in end.items())


def take_snapshot(program: int | None, target: Database, source: Server) -> Snapshot:
    """Read the CPU time of *program*, of the sessions in the database *target*, and of the source's
    walsenders.
    """
    sessions = target.execute(
        "select pid from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and application_name <> 'benchmark'"
        " and backend_type in ('client backend', 'logical replication worker',"
        " 'logical replication apply worker', 'logical replication parallel worker',"
        " 'logical replication tablesync worker')"
        " or datname = current_database() and backend_type like 'pglogical%'"
    )
    senders = source.execute("select pid from pg_stat_activity where backend_type = 'walsender'")
    return Snapshot(
        _cpu([] if program is None else [program]),
        _cpu(int(str(pid)) for (pid,) in sessions),
        _cpu(int(str(pid)) for (pid,) in senders),
    )


def _cpu(pids: Iterable[int]) -> dict[int, float]:
    by_pid = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        fields = stat.rpartition(")")[2].split()
        by_pid[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    return by_pid


def peak_memory(pid: int) -> int:
    """Return the peak of a process's resident memory, in bytes; 0 if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+)", status)
    return int(match[1]) * 1024 if match else 0


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of the cores' time that the machine uses now, from 0 to 1."""
    begun = psutil.cpu_times()
    time.sleep(seconds)
    ended = psutil.cpu_times()
    idle = ended.idle - begun.idle
    return max(0.0, 1 - idle / max(sum(ended) - sum(begun), 1e-9))


def machine_memory() -> int:
    """Return the memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
