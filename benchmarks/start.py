"""How long commands take, and how long `run` takes to the first bytes of a copy.

``--against`` names the `streamer` of another installation, such as another checkout: the sides take
turns in each round. Every copy has new databases, and a Spark process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", action="append", default=[], metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--without-page", action="store_true", help="measure with `listen` empty")
    options = parser.parse_args()
    programs = [str(Path(sys.executable).with_name("streamer")), *options.against]
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with source_and_target() as servers, tempfile.TemporaryDirectory() as directory:
        source = Database(servers[0], "bench")
        source.create()
        source.execute(big_table.create())
        big_table.fill(source.server, ROWS)
        config = Path(directory) / "config.yaml"
        for number in range(options.rounds):
            for program in programs if number % 2 else reversed(programs):
                for name, seconds in _round(
                    program, source, servers[1], config, has_page=not options.without_page
                ).items():
                    figures[program, name].append(seconds)
    for (program, name), measured in sorted(figures.items(), key=lambda item: item[0][::-1]):
        low, middle, high = min(measured), statistics.median(measured), max(measured)
        print(f"{name:12} {middle:6.2f} s ({low:.2f} to {high:.2f})  {program}")


def _round(
    program: str, source: Database, server: Server, config: Path, *, has_page: bool
) -> dict[str, float]:
    """Copy a table, run each command while its changes stream, and return the seconds."""
    target = Database(server, "bench")
    target.create()
    listen = f"127.0.0.1:{free_port()}" if has_page else ""
    config.write_text(
        f'target: {{url: "{target.url}"}}\nhttp: {{listen: "{listen}"}}\nsources:\n'
        f'- {{database: bench, urls: [{{url: "{source.url}"}}], tables: {{big: }}}}\n'
    )
    start = [program, "-c", str(config)]
    seconds: dict[str, float] = {}
    began = time.monotonic()
    run = subprocess.Popen([*start, "run"], stderr=subprocess.DEVNULL)
    try:
        wait_until(target.url, INSTALLED_SQL, 60)
        seconds["first bytes"] = wait_until(target.url, FIRST_BYTES_SQL, 60) - began
        seconds["ready"] = wait_until(target.url, READY_SQL, 60) - began
        for command in COMMANDS:
            began = time.monotonic()
            subprocess.run([*start, command], check=False, capture_output=True)
            seconds[command] = time.monotonic() - began
    finally:
        run.terminate()
        run.wait()
    subprocess.run([*start, "teardown", "--yes"], check=True, capture_output=True)
    target.drop()
    return seconds


if __name__ == "__main__":
    main()
