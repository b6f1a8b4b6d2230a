"""One transaction of 5,000,000 rows: streamer against PostgreSQL's own subscription.

The transaction is in the WAL when either side connects, one after the other; the time runs from
when its walsender starts to when the last row is visible. With ``--streaming on`` both ask for
in-progress transactions and get this one in pieces before its COMMIT, with ``off`` after it.

Asserted for streamer: the walsender it began with, at ``wal_sender_timeout = 5s``, is there at the
end, so keepalives were answered all the while; and its spool is empty then.
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.servers import Run, source_and_target, wait_until, write_config

TABLE = (
    "create table {name} (id bigint primary key, name text, amount numeric(12,2), at timestamptz,"
    " note text)"
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
        for server in (source, target):
            server.execute("create database bench")
        source.execute("alter system set wal_sender_timeout = '5s'")
        source.execute("select pg_reload_conf()")
        target.execute("create database native")
        source.execute(TABLE.format(name="items"), "bench")
        target.execute(TABLE.format(name="items"), "bench")
        target.execute(TABLE.format(name="items"), "native")
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
        source.execute("create publication native for table items", "bench")
        source.execute("select pg_create_logical_replication_slot('native', 'pgoutput')", "bench")
        target.execute(
            f"create subscription native connection '{source.url('bench')}' publication native with"
            f" (create_slot = false, slot_name = native, enabled = false, copy_data = false,"
            f" streaming = {streaming})",
            "native",
        )
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
            caught_up = (
                f"select bool_and(end_lsn >= '{end}' or acknowledged_lsn >= '{end}')"
                " from streamer.source s join streamer.relation r on r.source_id = s.id"
            )
            wait_until(target.url("bench"), caught_up, 1800, run)
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
            target.execute("alter subscription native enable", "native")
            wait_until(source.url("bench"), active("native"), 60)
            began = time.monotonic()
            reached = (
                f"select confirmed_flush_lsn >= '{end}' from pg_replication_slots"
                " where slot_name = 'native'"
            )
            wait_until(source.url("bench"), reached, 1800)
            results["native"] = time.monotonic() - began
            assert target.execute("select count(*), sum(amount) from items", "native") == expected
            print(f"native:   {results['native']:.1f} s")
        if len(results) == 2:
            print(f"ratio native / streamer: {results['native'] / results['streamer']:.2f}")


def active(slot: str) -> str:
    return f"select active from pg_replication_slots where slot_name = '{slot}'"


def sender(slot: str) -> str:
    return f"select active_pid from pg_replication_slots where slot_name = '{slot}'"


if __name__ == "__main__":
    main()
