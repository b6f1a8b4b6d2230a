"""Initial copy of a large table: streamer's Spark copy against psql piped into psql.

Both copy the same table, in binary, and end with its primary key. streamer's time runs from the
first connection of a Spark task until the table is ``ready`` (key, indexes, ANALYZE). The time from
the start of ``run`` to that connection is printed apart. The second side is ``psql -c "copy … to
stdout (format binary)" | psql -c "copy … from stdin (format binary)"`` into a table that has its
key.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import big_table
from benchmarks.servers import Run, source_and_target, wait_until, write_config

INDEX = "create index on big (customer, at)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", choices=["streamer", "psql"])
    parser.add_argument(
        "--table",
        choices=["created", "key", "index"],
        default="created",
        help="the target's table: made by streamer, or there with its key only, or one index more",
    )
    options = parser.parse_args()
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        source.execute("create database bench")
        source.execute(big_table.create(), "bench")
        table = big_table.create()
        if options.table == "index":
            table = f"{table}; {INDEX}"
        rows = options.megabytes * 1024 * 1024 // 128
        big_table.fill(source, rows)
        size = source.execute("select pg_table_size('big')", "bench")[0][0]
        assert isinstance(size, int)
        print(f"{rows} rows, {size / 1e6:.0f} MB")
        results = {}
        if options.only != "psql":
            target.execute("create database bench")
            if options.table != "created":
                target.execute(table, "bench")
            config = Path(directory) / "config.yaml"
            write_config(
                config,
                source.url("bench"),
                target.url("bench"),
                "{big: }",
                sync=f"{{jobs: {options.jobs}}}",
            )
            started_at = time.monotonic()
            run = Run(config)
            started = (
                "select count(*) > 0 from pg_stat_activity"
                " where application_name like 'streamer copy%'"
            )
            wait_until(target.url("bench"), started, 120, run)
            began = time.monotonic()
            print(f"first connection of a task {began - started_at:.2f} s after the start of run")
            copied = (
                "select count(*) > 0 and bool_and(finished_at is not null)"
                " from streamer.sync_partition"
            )
            wait_until(target.url("bench"), copied, 600, run)
            moved = time.monotonic() - began
            ready = "select bool_and(state = 'ready') from streamer.relation"
            wait_until(target.url("bench"), ready, 600, run)
            results["streamer"] = time.monotonic() - began
            run.sample()
            run.stop()
            print(
                f"streamer: rows {moved:.2f} s, ready {results['streamer']:.2f} s,"
                f" peak memory of run {run.peak_kilobytes / 1024:.0f} MB"
            )
            target.execute("checkpoint")
        if options.only != "streamer":
            target.execute("create database plain")
            target.execute(table, "plain")
            psql = str(target.program("psql"))
            began = time.monotonic()
            reading = subprocess.Popen(
                [psql, source.url("bench"), "-qc", "copy big to stdout (format binary)"],
                stdout=subprocess.PIPE,
            )
            subprocess.run(
                [psql, target.url("plain"), "-qc", "copy big from stdin (format binary)"],
                stdin=reading.stdout,
                check=True,
            )
            reading.wait()
            results["psql"] = time.monotonic() - began
            print(f"psql:     {results['psql']:.2f} s")
        if len(results) == 2:
            print(f"ratio psql / streamer: {results['psql'] / results['streamer']:.2f}")


if __name__ == "__main__":
    main()
