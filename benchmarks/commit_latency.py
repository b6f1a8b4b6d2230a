"""From a commit at the source to its rows at the target, at a fixed rate of transactions.

A client commits one row at a time, at fixed moments; another polls the target every two
milliseconds. ``--native`` measures PostgreSQL's own subscription. Processor time is that of the
`streamer run` process, as part of one core; ``--rate 0`` measures an idle process.
"""

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psycopg

from benchmarks.servers import (
    Run,
    active,
    make_items,
    make_subscription,
    source_and_target,
    wait_until,
    write_config,
)

WARM_SECONDS = 2.0
POLL_SECONDS = 0.002
_INSERT = "insert into items values (%s, 'a name', %s, now(), 'a note')"
_NEWEST = "select max(id) from items"


class Client(threading.Thread):
    """Commits *rate* rows a second."""

    def __init__(self, url: str, rate: float) -> None:
        super().__init__()
        self._url = url
        self._rate = rate
        self.committed: dict[int, float] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            began, row = time.monotonic(), 0
            while not self.ended.wait(max(0.0, began + row / self._rate - time.monotonic())):
                row += 1
                connection.execute(_INSERT, (row, row), prepare=True)
                self.committed[row] = time.monotonic()


class Poller(threading.Thread):
    """Sees when rows are visible at the target."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.seen: dict[int, float] = {}
        self.newest = 0
        self.ended = threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self.ended.wait(POLL_SECONDS):
                (newest,) = connection.execute(_NEWEST, prepare=True).fetchone() or (None,)
                now = time.monotonic()
                for row in range(self.newest + 1, (newest or 0) + 1):
                    self.seen[row] = now
                self.newest = newest or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    settings = dict(each.split("=", 1) for each in options.setting)
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        make_items(source, target)
        if options.native:
            make_subscription(source, target, "binary = true")
            target.execute("alter subscription native enable", "native")
            wait_until(source.url("bench"), active("native"), 60)
            measure(options, source.url("bench"), target.url("native"), None)
            return
        config = Path(directory) / "config.yaml"
        urls = source.url("bench"), target.url("bench")
        write_config(config, *urls, "{items: {initial: none}}", **settings)
        run = Run(config)
        wait_until(urls[1], "select to_regclass('streamer.source') is not null", 60, run)
        wait_until(urls[1], "select state = 'streaming' from streamer.source", 60, run)
        measure(options, *urls, run)
        run.stop()


def measure(options: argparse.Namespace, source: str, target: str, run: Run | None) -> None:
    """Commit for a while; print the delays, and the process's use of a core."""
    client, poller = Client(source, options.rate), Poller(target)
    if options.rate:
        client.start()
        poller.start()
    time.sleep(WARM_SECONDS)
    began, before = time.monotonic(), _cpu_seconds(run)
    time.sleep(options.seconds)
    seconds, used = time.monotonic() - began, _cpu_seconds(run) - before
    if run is not None:
        print(f"{used / seconds:.1%} of a core at {options.rate:g} transactions a second")
    if not options.rate:
        return
    client.ended.set()
    client.join()
    last = max(client.committed)
    while poller.newest < last:
        time.sleep(0.01)
    poller.ended.set()
    poller.join()
    delays = [poller.seen[row] - at for row, at in client.committed.items() if at > began]
    cuts = statistics.quantiles(delays, n=100)
    print(
        f"{len(delays)} commits became visible in {len(set(poller.seen.values()))} steps: p50"
        f" {cuts[49] * 1000:.1f} ms, p90 {cuts[89] * 1000:.1f} ms, p99 {cuts[98] * 1000:.1f} ms"
    )


def _cpu_seconds(run: Run | None) -> float:
    if run is None:
        return 0.0
    run.sample()
    return run.cpu_seconds


if __name__ == "__main__":
    main()
