"""Many tables in a source, and many sources in a process: the costs of a start and of idling.

``--tables 5000`` makes that many tables in each source, ``--sources 200`` that many databases of a
server. The benchmark measures the first start and a restart. The figures are the time until all
sources stream, CPU and memory of the process, and the size of ``/metrics``. For both servers, it
counts transactions and connections.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.servers import Database, find_binaries, source_and_target, wait_until
from benchmarks.sides import Process, launch
from benchmarks.usage import peak_memory, take_snapshot
from streamer.commands.demo.embedded_servers import Server, free_port

SETTINGS = {
    "max_connections": "2000",
    "max_wal_senders": "500",
    "max_replication_slots": "500",
    "shared_buffers": "256MB",
    "max_locks_per_transaction": "512",
    "fsync": "off",
}
TABLE = "create table t_{n} (id bigint primary key, v text);"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=5000, help="tables of each source")
    parser.add_argument("--sources", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of standing still")
    parser.add_argument("--postgres", default="machine")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # After a signal, stop the servers, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with (
        source_and_target(find_binaries(options.postgres), SETTINGS) as (source, target),
        tempfile.TemporaryDirectory() as directory,
    ):
        sources = make_sources(source, options.sources, options.tables)
        warehouse = Database(target, "warehouse")
        warehouse.create()
        create_tables(warehouse, options.tables, with_sid=options.sources > 1)
        port = free_port()
        config = Path(directory) / "config.yaml"
        config.write_text(configuration(sources, warehouse, Path(directory) / "spool", port))
        for attempt in ("first start", "restart"):
            figures = measure(attempt, config, options, source, warehouse, port)
            if options.json:
                sys.stdout.write(json.dumps(figures) + "\n")
            else:
                print(", ".join(f"{name} {value}" for name, value in figures.items()))


def make_sources(server: Server, count: int, tables: int) -> list[Database]:
    """Return the databases of sources, which are copies of the first database."""
    first = Database(server, "source_0")
    first.create()
    create_tables(first, tables, with_sid=False)
    sources = [first]
    for number in range(1, count):
        server.execute(f"create database source_{number} template source_0")
        sources.append(Database(server, f"source_{number}"))
    return sources


def create_tables(database: Database, count: int, *, with_sid: bool) -> None:
    table = TABLE
    if with_sid:
        table = "create table t_{n} (sid text, id bigint, v text, primary key (sid, id));"
    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        database.execute("".join(table.format(n=number) for number in numbers))


def configuration(sources: list[Database], target: Database, spool: Path, port: int) -> str:
    urls = "\n".join(
        f'    - {{url: "{source.url}"' + (f", sid: s{n}}}" if len(sources) > 1 else "}")
        for n, source in enumerate(sources)
    )
    return (
        f'target: {{url: "{target.url}"}}\nhttp: {{listen: "127.0.0.1:{port}"}}\n'
        f"spool: {{directory: {spool}}}\nsources:\n - database: shop\n   urls:\n{urls}\n"
        '   tables: {"t_*": {initial: none}}\n'
    )


def measure(
    attempt: str,
    config: Path,
    options: argparse.Namespace,
    source: Server,
    target: Database,
    port: int,
) -> dict[str, Any]:
    start = {server: transactions(server) for server in (source, target.server)}
    began = time.monotonic()
    process = launch(["--config", str(config), "run"], config.with_suffix(".log"))
    try:
        wait_for_streaming(process, options, config, target)
        seconds = time.monotonic() - began
        used = take_snapshot(process.pid, target, source)
        counts = {server: transactions(server) - start[server] for server in start}
        idle = take_snapshot(process.pid, target, source)
        time.sleep(options.seconds)
        still = idle.until(take_snapshot(process.pid, target, source))
        asked = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
            metrics = answer.read()
        took = time.monotonic() - asked
        return {
            "attempt": attempt,
            "start_seconds": round(seconds, 1),
            "start_cpu_seconds": round(sum(used.program.values()), 1),
            "source_transactions": counts[source],
            "target_transactions": counts[target.server],
            "memory_mb": peak_memory(process.pid) // 1_000_000,
            "idle_cpu_percent": round(100 * still.program / options.seconds, 2),
            "idle_target_percent": round(100 * still.target / options.seconds, 2),
            "idle_source_percent": round(100 * backends(source, options.seconds), 2),
            "source_connections": connections(source),
            "target_connections": connections(target.server),
            "failed_attempts": count_lines(config, "is tried again"),
            "unhandled_failures": count_lines(config, "was never retrieved"),
            "metrics_bytes": len(metrics),
            "metrics_seconds": round(took, 2),
        }
    finally:
        process.send_signal(15)
        process.wait(60)


def count_lines(config: Path, text: str) -> int:
    """Return the number of lines of the log that contain *text*."""
    return config.with_suffix(".log").read_text().count(text)


def wait_for_streaming(
    process: Process, options: argparse.Namespace, config: Path, target: Database
) -> None:
    class Watched:
        def check(self) -> None:
            if process.poll() is not None:
                raise SystemExit(config.with_suffix(".log").read_text()[-3000:])

    is_made = "select to_regclass('streamer.source') is not null"
    wait_until(target.url, is_made, 120, Watched())
    streaming = (
        f"select count(*) = {options.sources} from streamer.source s"
        " join pg_locks l on l.locktype = 'advisory' and l.objid = s.id::oid"
        " where s.state = 'streaming'"
    )
    wait_until(target.url, streaming, 1800, Watched())


def transactions(server: Server) -> int:
    return int(str(server.execute("select sum(xact_commit)::int8 from pg_stat_database")[0][0]))


def connections(server: Server) -> int:
    sql = (
        "select count(*) from pg_stat_activity where application_name <> 'benchmark'"
        " and backend_type in ('client backend', 'walsender') and pid <> pg_backend_pid()"
    )
    return int(str(server.execute(sql)[0][0]))


def backends(server: Server, seconds: float) -> float:
    """Return the cores that all sessions of *server* use, over the next *seconds*."""
    import psutil

    def used() -> dict[int, float]:
        by_pid = {}
        assert server.postmaster_pid is not None
        for child in psutil.Process(server.postmaster_pid).children():
            try:
                times = child.cpu_times()
            except psutil.Error:
                continue
            by_pid[child.pid] = times.user + times.system
        return by_pid

    start = used()
    time.sleep(seconds)
    return sum(cpu - start.get(pid, 0.0) for pid, cpu in used().items()) / seconds


if __name__ == "__main__":
    main()
