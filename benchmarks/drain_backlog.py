"""Draining a backlog of 1,000,000 changes: streamer against PostgreSQL's own subscription.

Half inserts, half updates by key, 20 rows a transaction, five columns. Both sides drain the same
WAL, one after the other, into a table of their own. The time runs from the start of the walsender
until the last row is visible. It excludes the start-up of either side. ``--transport binary`` asks
for binary on both sides.
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

WORKLOAD = """
create procedure workload(transactions int, size int) language plpgsql as $$
declare t int; base int;
begin
  for t in 0 .. transactions / 2 - 1 loop
    base := t * size;
    insert into items select base + g, 'name of item ' || (base + g), (base + g) * 1.25, now(),
      md5((base + g)::text) from generate_series(1, size) g;
    commit;
    -- Rows from here and there, as an application would touch them.
    update items set amount = amount + 1, at = now(), note = md5(t::text)
      where id in (select 1 + (base::bigint * 7 + g * 7919) % (base + size)
                     from generate_series(1, size) g);
    commit;
  end loop;
end $$
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", choices=["streamer", "native"])
    parser.add_argument("--transport", choices=["text", "binary"], default="text")
    options = parser.parse_args()
    is_binary = options.transport == "binary"
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        make_items(source, target)
        source.execute(WORKLOAD, "bench")
        config = Path(directory) / "config.yaml"
        write_config(
            config,
            source.url("bench"),
            target.url("bench"),
            "{items: {initial: none}}",
            workers=options.workers,
            transport=options.transport,
        )
        Run(config, "--stop-when-caught-up").wait()
        make_subscription(source, target, f"binary = {str(is_binary).lower()}")
        transactions = options.changes // 20
        source.execute("alter database bench set enable_hashjoin = off", "bench")
        source.execute("alter database bench set enable_seqscan = off", "bench")
        source.execute("alter database bench set enable_mergejoin = off", "bench")
        source.execute(f"call workload({transactions}, 20)", "bench")
        source.execute("checkpoint")
        target.execute("checkpoint")
        end = source.execute("select pg_current_wal_flush_lsn()")[0][0]
        (last,) = source.execute("select count(*), sum(amount), max(at) from items", "bench")
        done = f"select (count(*), sum(amount), max(at)) = row{_literal(last)} from items"
        print(f"{options.changes} changes, {transactions} transactions, {options.transport}")
        results = {}
        if options.only != "native":
            run = Run(config)
            wait_until(source.url("bench"), active("streamer_bench"), 60, run)
            asked = source.execute(_ASKED)[0][0]
            assert ("binary 'true'" in str(asked)) is is_binary, "streamer fell back to text"
            began = time.monotonic()
            wait_until(target.url("bench"), has_everything(end), 600, run)
            results["streamer"] = time.monotonic() - began
            assert target.execute(done, "bench")[0][0], "streamer: the content differs"
            run.sample()
            run.stop()
            print(
                f"streamer: {results['streamer']:.2f} s, {run.cpu_seconds:.1f} s of processor time,"
                f" peak memory {run.peak_kilobytes / 1024:.0f} MB"
            )
        if options.only != "streamer":
            results["native"] = drain_natively(source, target, end, 600)
            assert target.execute(done, "native")[0][0], "native: the content differs"
            print(f"native:   {results['native']:.2f} s")
        if len(results) == 2:
            print(f"ratio native / streamer: {results['native'] / results['streamer']:.2f}")


def _literal(row: tuple[object, ...]) -> str:
    return "(" + ", ".join(f"'{value}'" for value in row) + ")"


_ASKED = (
    "select a.query from pg_stat_activity a join pg_replication_slots s on s.active_pid = a.pid"
    " where s.slot_name = 'streamer_bench'"
)


if __name__ == "__main__":
    main()
