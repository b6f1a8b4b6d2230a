"""One transaction of 5,000,000 rows: streamer against PostgreSQL's own subscription.

The transaction is in the WAL when either side connects, one after the other. The time runs from the
start of its walsender until the last row is visible. With ``--streaming on`` both ask for
in-progress transactions and get this one in pieces before its COMMIT, with ``off`` after it.

For streamer it also asserts two things at the end. The walsender is still the first one, with
``wal_sender_timeout = 5s``, so streamer answered keepalives all the while. The spool is empty.
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.servers import (
    Run,
    active,
    drain_natively,
    has_everything,
    make_items,
    make_subscription,
    source_and_target,
    wait_until,
    write_config,
)

TRANSACTION = (
    "insert into items select g, 'name of item ' || g, g * 1.25, now(), md5(g::text)"
    " from generate_series(1, {rows}) g"
)
MEMORY_MAX = 500 * 1024
"""kB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--streaming", choices=["on", "off", "both"], default="both")
    parser.add_argument("--only", choices=["streamer", "native"])
    options = parser.parse_args()
    modes = ["on", "off"] if options.streaming == "both" else [options.streaming]
    for streaming in modes:
        measure(options.rows, streaming, options.only)


def measure(rows: int, streaming: str, only: str | None) -> None:
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        make_items(source, target)
        source.execute("alter system set wal_sender_timeout = '5s'")
        source.execute("select pg_reload_conf()")
        config, spool = Path(directory) / "config.yaml", Path(directory) / "spool"
        write_config(
            config,
            source.url("bench"),
            target.url("bench"),
            "{items: {initial: none}}",
            streaming=streaming,
            spool=f"{{directory: {spool}}}",
        )
        Run(config, "--stop-when-caught-up").wait()
        make_subscription(source, target, f"streaming = {streaming}")
        source.execute(TRANSACTION.format(rows=rows), "bench")
        source.execute("checkpoint")
        target.execute("checkpoint")
        end = source.execute("select pg_current_wal_flush_lsn()")[0][0]
        expected = source.execute("select count(*), sum(amount) from items", "bench")
        print(f"one transaction of {rows} rows, streaming {streaming}")
        results = {}
        if only != "native":
            run = Run(config)
            wait_until(source.url("bench"), active("streamer_bench"), 60, run)
            walsender = source.execute(sender("streamer_bench"))
            began = time.monotonic()
            wait_until(target.url("bench"), has_everything(end), 1800, run)
            results["streamer"] = time.monotonic() - began
            assert target.execute("select count(*), sum(amount) from items", "bench") == expected
            assert source.execute(sender("streamer_bench")) == walsender, "it had to reconnect"
            left = sum(path.stat().st_size for path in spool.rglob("*") if path.is_file())
            run.sample()
            run.stop()
            print(
                f"streamer: {results['streamer']:.1f} s, {run.cpu_seconds:.1f} s of processor time,"
                f" peak memory {run.peak_kilobytes / 1024:.0f} MB, spool {left} bytes afterwards"
            )
            assert run.peak_kilobytes < MEMORY_MAX, "more memory than promised"
            assert not left, "the spool is not empty"
        if only != "streamer":
            results["native"] = drain_natively(source, target, end, 1800)
            assert target.execute("select count(*), sum(amount) from items", "native") == expected
            print(f"native:   {results['native']:.1f} s")
        if len(results) == 2:
            print(f"ratio native / streamer: {results['native'] / results['streamer']:.2f}")


def sender(slot: str) -> str:
    return f"select active_pid from pg_replication_slots where slot_name = '{slot}'"


if __name__ == "__main__":
    main()
