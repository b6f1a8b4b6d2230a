"""Many sources in a process, and many tables in a source: the costs of a start and of an idle
process.

``--sources 50 200 1000`` measures a process for each of these numbers of sources. The sources are
databases of ``--clusters`` servers. ``--tables`` is the number of tables of a source, or of each of
its ``--schemas``, which are tenants in tables that all schemas share. ``--copies`` includes first
copies of the empty tables. The benchmark measures the first start and a restart: seconds and
processor time until all sources stream, memory and connections. Then it measures the processor time
of the process and of the servers while no source changes.
``--against`` names the `streamer` of another installation, such as another checkout.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.servers import Database, find_binaries, running_servers, wait_until
from benchmarks.usage import peak_memory
from streamer.commands.demo.embedded_servers import Server, free_port

SETTINGS: Final = {
    "max_connections": "2000",
    "max_wal_senders": "1000",
    "max_replication_slots": "1000",
    "shared_buffers": "128MB",
    "max_locks_per_transaction": "512",
    "fsync": "off",
}
QUIET_SECONDS: Final = 10.0
"""The wait between the start and the measurement of the idle process."""
TABLE: Final = "create table t_{n} (id bigint primary key, v text);"
TABLES_RULE: Final = '"t_*": {initial: none}'
SCHEMAS_RULE: Final = '"tenant_*.*": {sid: "{schema:tenant_(.*)}", initial: none}'
SHARED_TABLE: Final = "create table t_{n} (sid text, id bigint, v text, primary key (sid, id));"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=10, help="tables of each source")
    parser.add_argument("--schemas", type=int, default=0, help="schemas of each source")
    parser.add_argument("--copies", action="store_true", help="copy the tables at the first start")
    parser.add_argument("--setting", action="append", default=[], help="NAME=VALUE of the servers")
    parser.add_argument("--sources", type=int, nargs="+", default=[1])
    parser.add_argument("--clusters", type=int, default=1, help="servers of the sources")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured idle time")
    parser.add_argument("--postgres", default="machine")
    parser.add_argument("--against", action="append", default=[], metavar="PROGRAM")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Ended by a signal, the servers stop too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    names = ["target", *(f"cluster_{number}" for number in range(options.clusters))]
    settings = SETTINGS | dict(setting.split("=", 1) for setting in options.setting)
    with (
        running_servers(names, find_binaries(options.postgres), settings) as (target, *clusters),
        tempfile.TemporaryDirectory() as directory,
    ):
        sources = make_sources(clusters, max(options.sources), options.tables, options.schemas)
        own = str(Path(sys.executable).with_name("streamer"))
        for count, program in itertools.product(options.sources, [*options.against, own]):
            warehouse = Database(target, "warehouse")
            warehouse.create()
            is_shared = count > 1 or options.schemas
            create_tables(warehouse, options.tables, SHARED_TABLE if is_shared else TABLE)
            rule = SCHEMAS_RULE if options.schemas else TABLES_RULE
            rule = rule.replace("none", "copy") if options.copies else rule
            place = Path(tempfile.mkdtemp(dir=directory))
            fleet = Fleet(program, sources[:count], warehouse, place, rule)
            for attempt in ("first start", "restart"):
                what = {"program": program, "sources": count, "attempt": attempt}
                figures = what | fleet.measure(options.seconds)
                if options.json:
                    sys.stdout.write(json.dumps(figures) + "\n")
                else:
                    print(
                        ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True
                    )
                sys.stdout.flush()
            fleet.tear_down()
            warehouse.drop()


def make_sources(
    clusters: Sequence[Server], count: int, tables: int, schemas: int
) -> list[Database]:
    """Return databases that are divided among *clusters*."""
    for cluster in clusters:
        first = Database(cluster, "template_of_sources")
        first.create()
        if not schemas:
            create_tables(first, tables, TABLE)
        for number in range(schemas):
            schema = f"create schema tenant_{number}; set search_path = tenant_{number};"
            first.execute(schema + "".join(TABLE.format(n=n) for n in range(tables)))
    sources = []
    for number, cluster in zip(range(count), itertools.cycle(clusters), strict=False):
        name = f"source_{number}"
        cluster.execute(f"create database {name} template template_of_sources")
        sources.append(Database(cluster, name))
    for cluster in clusters:
        cluster.execute("checkpoint")
    return sources


def create_tables(database: Database, count: int, table: str) -> None:
    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        database.execute("".join(table.format(n=number) for number in numbers))


class Fleet:
    """A process of `streamer run` for *sources*."""

    def __init__(
        self,
        program: str,
        sources: Sequence[Database],
        target: Database,
        directory: Path,
        rule: str,
    ) -> None:
        self._program = program
        self._sources = sources
        self._target = target
        self._clusters = list({source.server: None for source in sources})
        self._port = free_port()
        self._config = directory / "config.yaml"
        self._log = directory / "log"
        urls = "\n".join(
            f'    - {{url: "{source.url}"' + (f", sid: s{n}}}" if len(sources) > 1 else "}")
            for n, source in enumerate(sources)
        )
        self._config.write_text(
            f'target: {{url: "{target.url}"}}\nhttp: {{listen: "127.0.0.1:{self._port}"}}\n'
            f"spool: {{directory: {directory / 'spool'}}}\nsources:\n - database: shop\n"
            f"   urls:\n{urls}\n   tables: {{{rule}}}\n"
        )

    def measure(self, seconds: float) -> dict[str, Any]:
        servers = [self._target.server, *self._clusters]
        counts = [count_transactions(server) for server in servers]
        spent = [processor_seconds(postmaster(server)) for server in servers]
        began = time.monotonic()
        process = self._launch("run")
        try:
            self._wait_for_streaming(process)
            took = time.monotonic() - began
            program = psutil.Process(process.pid)
            start = [processor_seconds(program), *map(processor_seconds, map(postmaster, servers))]
            ran = [count_transactions(server) for server in servers]
            time.sleep(QUIET_SECONDS)
            quiet = [processor_seconds(program), *map(processor_seconds, map(postmaster, servers))]
            time.sleep(seconds)
            idle = [processor_seconds(program), *map(processor_seconds, map(postmaster, servers))]
            percents = [100 * (b - a) / seconds for a, b in zip(quiet, idle, strict=True)]
            asked = time.monotonic()
            address = f"http://127.0.0.1:{self._port}/metrics"
            resident = program.memory_info().rss
            children = program.children(recursive=True)
            connections = list(map(count_connections, servers))
            with urllib.request.urlopen(address, timeout=120) as answer:
                metrics = answer.read()
            return {
                "start_seconds": round(took, 1),
                "start_cpu_seconds": round(start[0], 1),
                "start_target_cpu_seconds": round(start[1] - spent[0], 1),
                "start_source_cpu_seconds": round(sum(start[2:]) - sum(spent[1:]), 1),
                "start_target_transactions": ran[0] - counts[0],
                "start_source_transactions": sum(ran[1:]) - sum(counts[1:]),
                "resident_mb": resident // 1_000_000,
                "peak_mb": peak_memory(process.pid) // 1_000_000,
                "children_mb": sum(c.memory_info().rss for c in children) // 1_000_000,
                "idle_cpu_percent": round(percents[0], 2),
                "idle_target_percent": round(percents[1], 2),
                "idle_source_percent": round(sum(percents[2:]), 2),
                "target_connections": connections[0],
                "source_connections": sum(connections[1:]),
                "failed_attempts": self._count_lines("is tried again", "retrying"),
                "unhandled_failures": self._count_lines("was never retrieved"),
                "metrics_bytes": len(metrics),
                "metrics_seconds": round(time.monotonic() - asked, 2),
            }
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def tear_down(self) -> None:
        """Remove slots and publications, so that the next fleet may use the sources."""
        if self._launch("teardown", "--yes").wait():
            raise SystemExit(self._log.read_text()[-3000:])

    def _launch(self, *arguments: str) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [self._program, "--config", str(self._config), *arguments],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def _count_lines(self, *texts: str) -> int:
        """Return how many lines of the log have one of *texts*."""
        lines = self._log.read_text().splitlines()
        return sum(any(text in line for text in texts) for line in lines)

    def _wait_for_streaming(self, process: "subprocess.Popen[bytes]") -> None:
        log = self._log

        class Watched:
            def check(self) -> None:
                if process.poll() is not None:
                    raise SystemExit(log.read_text()[-3000:])

        is_made = "select to_regclass('streamer.source') is not null"
        wait_until(self._target.url, is_made, 120, Watched())
        streaming = (
            f"select count(distinct s.id) = {len(self._sources)} from streamer.source s"
            " join pg_locks l on l.locktype = 'advisory' and l.objid = s.id::oid"
            " where s.state = 'streaming'"
            " and not exists (select from streamer.relation where state <> 'ready')"
        )
        wait_until(self._target.url, streaming, 1800, Watched(), pause=0.2)


def count_transactions(server: Server) -> int:
    return int(str(server.execute("select sum(xact_commit)::int8 from pg_stat_database")[0][0]))


def count_connections(server: Server) -> int:
    sql = (
        "select count(*) from pg_stat_activity where application_name <> 'benchmark'"
        " and backend_type in ('client backend', 'walsender') and pid <> pg_backend_pid()"
    )
    return int(str(server.execute(sql)[0][0]))


def postmaster(server: Server) -> psutil.Process:
    assert server.postmaster_pid is not None
    return psutil.Process(server.postmaster_pid)


def processor_seconds(process: psutil.Process) -> float:
    """Return the processor time of a process, of its children, and of those that have ended."""
    return sum(map(_seconds_of, [process, *process.children(recursive=True)]))


def _seconds_of(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:4])
    except psutil.Error:
        return 0.0


if __name__ == "__main__":
    main()
