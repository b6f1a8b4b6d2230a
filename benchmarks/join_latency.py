"""The effect of a joining table with 400,000 rows on the latency of a streaming table.

A writer commits a row every few milliseconds to a table that streams; then SIGHUP adds the big
table. Times are commit times at the source and at the target (``track_commit_timestamp``). Spark
would compete for the machine's cores; with ``--copies threads``, threads of a small process make
the copies instead.
"""

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psycopg

from benchmarks.servers import SETTINGS, Run, source_and_target, wait_until, write_config

WRITES_PER_SECOND = 200


class Writer(threading.Thread):
    """Commits row after row."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.ended = threading.Event()
        self.last = 0

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self.ended.wait(1 / WRITES_PER_SECOND):
                self.last += 1
                connection.execute("insert into small values (%s, 'row')", (self.last,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--copies", choices=["spark", "threads"], default="spark")
    options = parser.parse_args()
    SETTINGS["track_commit_timestamp"] = "on"
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        for server in (source, target):
            server.execute("create database bench")
            server.execute("create table small (id bigint primary key, v text)", "bench")
        source.execute(
            "create table large (id bigint primary key, v text, n numeric, at timestamptz);"
            " insert into large select g, md5(g::text), g * 1.5, now()"
            f" from generate_series(1, {options.rows}) g",
            "bench",
        )
        config = Path(directory) / "config.yaml"
        urls = source.url("bench"), target.url("bench")
        write_config(config, *urls, "{small: {initial: none}}")
        program = "streamer" if options.copies == "spark" else "tests.support.plain_streamer"
        run = Run(config, program=program)
        wait_until(urls[1], "select to_regclass('streamer.source') is not null", 60, run)
        wait_until(urls[1], "select state = 'streaming' from streamer.source", 60, run)
        writer = Writer(urls[0])
        writer.start()
        time.sleep(3)
        first = writer.last + 1
        time.sleep(options.seconds)
        joins = writer.last + 1
        write_config(config, *urls, "{small: {initial: none}, large: {}}")
        began = time.monotonic()
        os.kill(run.process.pid, signal.SIGHUP)
        ready = "select state = 'ready' from streamer.relation where source = 'public.large'"
        wait_until(urls[1], ready, 300, run)
        seconds = time.monotonic() - began
        last = writer.last
        writer.ended.set()
        writer.join()
        wait_until(urls[1], f"select count(*) = {writer.last} from small", 60, run)
        digest = "select count(*), sum(n) from large"
        assert source.execute(digest, "bench") == target.execute(digest, "bench")
        run.stop()
        committed = times(urls[0])
        visible = times(urls[1])
        waits = {number: visible[number] - committed[number] for number in committed}
        quiet = report("before", [waits[n] for n in range(first, joins)])
        meanwhile = report(
            f"while {options.rows} rows join in {seconds:.1f} s, copied by {options.copies}",
            [waits[n] for n in range(joins, last + 1)],
        )
        print(f"ratio of the 99th percentiles: {meanwhile / quiet:.2f}")


def times(url: str) -> dict[int, float]:
    """Return the commit time of each row, in seconds."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select id, extract(epoch from pg_xact_commit_timestamp(xmin)) from small"
        ).fetchall()
    return {int(number): float(at) for number, at in rows}


def report(title: str, waits: list[float]) -> float:
    """Print a distribution; return its 99th percentile."""
    cuts = statistics.quantiles(waits, n=100)
    print(
        f"{title}: {len(waits)} commits, median {cuts[49] * 1000:.0f} ms,"
        f" p99 {cuts[98] * 1000:.0f} ms, longest {max(waits) * 1000:.0f} ms"
    )
    return cuts[98]


if __name__ == "__main__":
    main()
