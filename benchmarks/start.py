"""The time that commands take, and the time from the start of `run` to the first bytes of a copy.

Processor time includes all processes, and depends less on other work of the machine.

``--against`` names the `streamer` of another installation, such as another checkout: the sides take
turns in each round. Every copy has new databases, and a separate Spark process.
"""

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from benchmarks import big_table
from benchmarks.servers import Database, source_and_target, wait_until
from streamer.commands.demo.embedded_servers import Server, free_port

COMMANDS: Final = ("--version", "--help", "status", "check", "wait")
ROWS: Final = 500_000
FIRST_BYTES_SQL: Final = (
    "select exists (select from pg_stat_progress_copy where bytes_processed > 0)"
    " or exists (select from streamer.sync_partition where finished_at is not null)"
)
INSTALLED_SQL: Final = "select pg_catalog.to_regclass('streamer.sync_partition') is not null"
READY_SQL: Final = "select count(*) > 0 and bool_and(state = 'ready') from streamer.relation"


class Took(NamedTuple):
    """Seconds."""

    elapsed: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", action="append", default=[], metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--without-page", action="store_true", help="measure with `listen` empty")
    options = parser.parse_args()
    programs = [str(Path(sys.executable).with_name("streamer")), *options.against]
    figures: dict[tuple[str, str], list[Took]] = defaultdict(list)
    with source_and_target() as servers, tempfile.TemporaryDirectory() as directory:
        source = Database(servers[0], "bench")
        source.create()
        source.execute(big_table.create())
        big_table.fill(source.server, ROWS)
        config = Path(directory) / "config.yaml"
        for number in range(options.rounds):
            for program in programs if number % 2 else reversed(programs):
                for name, took in _round(
                    program, source, servers[1], config, has_page=not options.without_page
                ).items():
                    figures[program, name].append(took)
    for (program, name), measured in sorted(figures.items(), key=lambda item: item[0][::-1]):
        texts = [
            f"{statistics.median(values):6.2f} s ({min(values):.2f} to {max(values):.2f})"
            for values in zip(*measured, strict=True)
        ]
        print(f"{name:12} {texts[0]}, processor {texts[1]}  {program}")


def _round(
    program: str, source: Database, server: Server, config: Path, *, has_page: bool
) -> dict[str, Took]:
    """Copy a table, and run each command while its changes stream."""
    target = Database(server, "bench")
    target.create()
    listen = f"127.0.0.1:{free_port()}" if has_page else ""
    config.write_text(
        f'target: {{url: "{target.url}"}}\nhttp: {{listen: "{listen}"}}\nsources:\n'
        f'- {{database: bench, urls: [{{url: "{source.url}"}}], tables: {{big: }}}}\n'
    )
    start = [program, "-c", str(config)]
    figures: dict[str, Took] = {}
    began = time.monotonic()
    run = psutil.Popen([*start, "run"], stderr=subprocess.DEVNULL)
    try:
        wait_until(target.url, INSTALLED_SQL, 60)
        for name, sql in (("first bytes", FIRST_BYTES_SQL), ("ready", READY_SQL)):
            figures[name] = Took(wait_until(target.url, sql, 60) - began, _processor_seconds(run))
        for command in COMMANDS:
            began, spent = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*start, command], check=False, capture_output=True)
            took, usage = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            user, system = usage.ru_utime - spent.ru_utime, usage.ru_stime - spent.ru_stime
            figures[command] = Took(took, user + system)
    finally:
        run.terminate()
        run.wait()
    subprocess.run([*start, "teardown", "--yes"], check=True, capture_output=True)
    target.drop()
    return figures


def _processor_seconds(run: psutil.Popen) -> float:
    """Return the processor time of a process and of all processes below."""
    total = 0.0
    for process in (run, *run.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


if __name__ == "__main__":
    main()
