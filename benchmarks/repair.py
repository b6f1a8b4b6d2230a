"""Resyncs of a table in which few rows differ: bytes sent, space at the target, and memory.

``reload`` copies the table again. ``diff`` compares both sides at the point of its snapshot and
copies the ranges that differ. ``keys`` is the resync that `streamer repair` requests once its
comparison knows the keys. All three restore the same rows.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import big_table
from benchmarks.servers import Run, source_and_target, wait_until, write_config
from streamer.commands.demo.embedded_servers import Server
from streamer.control.resync_options import KeySet, Mode, Resync, RowScope

READY = (
    "select bool_and(state = 'ready') and not exists"
    " (select from streamer.request where state in ('queued', 'taken')) from streamer.relation"
)
EQUAL = "select sum(hashtextextended(big::text, 0)) from big"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--differing", type=int, default=10)
    options = parser.parse_args()
    step = options.rows // options.differing
    keys = tuple((str(n * step + 1),) for n in range(options.differing))
    ways = {
        "reload": Resync(),
        "diff": Resync(Mode.DIFF),
        "keys": Resync(Mode.DIFF, scope=RowScope(keys=(KeySet(("id",), ("bigint",), keys),))),
    }
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        for server in (source, target):
            server.execute("create database bench")
        source.execute(big_table.create(), "bench")
        big_table.fill(source, options.rows)
        print(f"{options.rows} rows, of which {options.differing} differ")
        config = Path(directory) / "config.yaml"
        write_config(config, source.url("bench"), target.url("bench"), "{big: }")
        for name, resync in ways.items():
            run = Run(config)
            made = "select to_regclass('streamer.request') is not null"
            wait_until(target.url("bench"), made, 120, run)
            wait_until(target.url("bench"), READY, 600, run)
            streams = "select bool_and(state = 'streaming') from streamer.source"
            wait_until(target.url("bench"), streams, 120, run)
            _measure(name, resync, source, target, run, step)
            run.stop()


def _measure(
    name: str, resync: Resync, source: Server, target: Server, run: Run, step: int
) -> None:
    target.execute(f"update big set note = 'wrong' where id % {step} = 1", "bench")
    target.execute("vacuum analyze big", "bench")
    start = _wal(target)
    began = time.monotonic()
    target.execute(
        "insert into streamer.request (relation_id, action, options)"
        f" select id, 'resync', '{json.dumps(resync.to_json())}' from streamer.relation;"
        " notify streamer",
        "bench",
    )
    wait_until(target.url("bench"), READY, 600, run)
    took = time.monotonic() - began
    run.sample()
    copied = target.execute(
        "select sum(rows_copied)::int8, sum(bytes_copied)::int8 from streamer.sync_partition",
        "bench",
    )[0]
    sums: list[Any] = [server.execute(EQUAL, "bench") for server in (source, target)]
    if sums[0] != sums[1]:
        raise SystemExit(f"{name}: the tables differ")
    print(
        f"{name:>7}: {took:5.1f} s, {copied[0]:>8} rows and {copied[1]:>10} bytes copied,"
        f" {(_wal(target) - start) / 1e6:6.1f} MB of WAL at the target,"
        f" peak memory of run {run.peak_kilobytes / 1024:.0f} MB"
    )


def _wal(target: Server) -> int:
    position = target.execute("select (pg_current_wal_lsn() - '0/0')::int8", "bench")[0][0]
    return int(str(position))


if __name__ == "__main__":
    main()
