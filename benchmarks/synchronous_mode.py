"""The time of commits at a source that waits for a standby: streamer, a subscription, or none.

Clients of pgbench insert single rows, each in a separate transaction, as fast as commits return.
``synchronous_standby_names`` lists a single side at a time. The sides take turns, and the figures
are the medians of the rounds. pgbench's log has the time of every transaction.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.servers import Database, Run, source_and_target, wait_until, write_config

SIDES: Final = ("none", "native", "streamer")
START_SECONDS: Final = 60.0
_TABLE: Final = "create table items (id bigint generated always as identity primary key, v text)"
_INSERT: Final = "insert into items (v) values ('a row of a program');\n"
_LISTED: Final = {
    "none": "",
    "native": "FIRST 1 (native)",
    "streamer": 'FIRST 1 ("streamer bench")',
}
_WAITS_SQL: Final = (
    "select count(*) = 1 from pg_stat_replication where sync_state = 'sync' and state = 'streaming'"
)


@dataclass(frozen=True, slots=True)
class Latency:
    """The times of a round: milliseconds, and transactions a second."""

    p50: float
    p95: float
    p99: float
    rate: float


def latency_of(microseconds: Sequence[int], seconds: float) -> Latency:
    """Return the distribution of the times in pgbench's log. Pure."""
    cuts = [cut / 1000 for cut in statistics.quantiles(microseconds, n=100)]
    return Latency(cuts[49], cuts[94], cuts[98], len(microseconds) / seconds)


class Bench:
    """Both servers, with the side that is measured now."""

    def __init__(self, source: Database, targets: dict[str, Database], directory: Path) -> None:
        self._source = source
        self._targets = targets
        self._directory = directory
        self._config = directory / "config.yaml"
        write_config(
            self._config,
            source.url,
            targets["streamer"].url,
            "{items: {initial: none}}",
            transport="auto",
        )

    def measure(self, side: str, clients: int, seconds: int) -> Latency:
        """Measure a side, which streams alone during the measurement."""
        run = Run(self._config) if side == "streamer" else None
        if side == "native":
            self._targets["native"].execute("alter subscription native enable")
        try:
            self._list(_LISTED[side])
            if side != "none":
                wait_until(self._source.url, _WAITS_SQL, START_SECONDS, run)
            return self._load(side, clients, seconds)
        finally:
            self._list("")
            if side == "native":
                self._targets["native"].execute("alter subscription native disable")
            if run is not None:
                run.stop()

    def _list(self, names: str) -> None:
        self._source.execute(f"alter system set synchronous_standby_names = '{names}'")
        self._source.execute("select pg_reload_conf()")

    def _load(self, side: str, clients: int, seconds: int) -> Latency:
        script = self._directory / "insert.sql"
        script.write_text(_INSERT)
        with tempfile.TemporaryDirectory(dir=self._directory) as logs:
            arguments = ("--no-vacuum", "--client", str(clients), "--time", str(seconds))
            log = ("--log", "--log-prefix", str(Path(logs) / side))
            self._source.run_program("pgbench", *arguments, *log, "--file", str(script))
            times = [
                int(line.split()[2])
                for path in Path(logs).iterdir()
                for line in path.read_text().splitlines()
            ]
        return latency_of(times, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    by_side: dict[str, list[Latency]] = {side: [] for side in SIDES}
    with source_and_target() as (server, target), tempfile.TemporaryDirectory() as directory:
        source = Database(server, "bench")
        targets = {side: Database(target, side) for side in ("native", "streamer")}
        for database in (source, *targets.values()):
            database.create()
            database.execute(_TABLE)
        source.execute("create publication native for table items")
        source.execute("select pg_create_logical_replication_slot('native', 'pgoutput')")
        targets["native"].execute(
            f"create subscription native connection '{source.url}' publication native"
            " with (create_slot = false, copy_data = false, enabled = false)"
        )
        bench = Bench(source, targets, Path(directory))
        for number in range(options.rounds):
            for place in range(len(SIDES)):
                side = SIDES[(number + place) % len(SIDES)]
                by_side[side].append(bench.measure(side, options.clients, options.seconds))
        targets["native"].execute("alter subscription native set (slot_name = none)")
        targets["native"].execute("drop subscription native")
    print(
        f"{options.clients} clients, {options.rounds} rounds of {options.seconds} s, milliseconds"
    )
    for side, rounds in by_side.items():
        p50, p95, p99, rate = (
            statistics.median(getattr(latency, name) for latency in rounds)
            for name in ("p50", "p95", "p99", "rate")
        )
        print(
            f"{side}: median {p50:.1f}, p95 {p95:.1f}, p99 {p99:.1f}, {rate:.0f} commits a second"
        )


if __name__ == "__main__":
    main()
