"""The latency of one source while another source of the same worker is slow, or hot.

One worker serves two sources. A writer commits one row at a time to the first one. The second one
stands still in the case ``alone``. In the case ``slow`` it writes to a table whose trigger at the
target takes 50 ms for each batch. In the case ``hot`` it updates 1,000 rows as fast as it can. The
cases follow one another in rounds, in one process. Times are those of the commits at the source and
at the target (``track_commit_timestamp``).
"""

import argparse
import statistics
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from benchmarks.join_latency import times
from benchmarks.servers import SETTINGS, Database, source_and_target, wait_until
from benchmarks.sides import launch

if TYPE_CHECKING:
    from collections.abc import Callable

WRITES_PER_SECOND: Final = 100
SLOW_PER_SECOND: Final = 40
TRIGGER: Final = """
create function linger() returns trigger language plpgsql as $$
begin perform pg_sleep(0.05); return null; end $$;
create trigger linger after insert on slow for each statement execute function linger();
alter table slow enable always trigger linger;
"""


class Writer(threading.Thread):
    """Runs a statement again and again, with a number, until it is ended."""

    def __init__(self, url: str, sql: str, per_second: float | None) -> None:
        super().__init__()
        self._url, self._sql, self._per_second = url, sql, per_second
        self.ended = threading.Event()
        self.last = 0

    def run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self.ended.wait(1 / self._per_second if self._per_second else 0):
                self.last += 1
                connection.execute(self._sql.encode(), {"n": self.last})

    def end(self) -> None:
        self.ended.set()
        self.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each case in a round")
    options = parser.parse_args()
    SETTINGS["track_commit_timestamp"] = "on"
    with source_and_target() as (source, target), tempfile.TemporaryDirectory() as directory:
        first, second = Database(source, "first"), Database(source, "second")
        warehouse = Database(target, "warehouse")
        for database in (first, second, warehouse):
            database.create()
        first.execute("create table small (id bigint primary key)")
        second.execute("create table slow (id bigint primary key)")
        second.execute("create table hot (id bigint primary key, v bigint)")
        second.execute("insert into hot select g, 0 from generate_series(1, 1000) g")
        config = Path(directory) / "config.yaml"
        config.write_text(
            f'target: {{url: "{warehouse.url}"}}\nhttp: {{listen: ""}}\nworkers: 1\n'
            f"spool: {{directory: {directory}/spool}}\nsources:\n"
            f'- {{database: first, urls: [{{url: "{first.url}"}}], tables: {{small: }}}}\n'
            f'- {{database: second, urls: [{{url: "{second.url}"}}], tables: {{slow: , hot: }}}}\n'
        )
        process = launch(["--config", str(config), "run"], config.with_suffix(".log"))

        class Watched:
            def check(self) -> None:
                if process.poll() is not None:
                    raise SystemExit(config.with_suffix(".log").read_text()[-3000:])

        there = "select to_regclass('streamer.relation') is not null"
        wait_until(warehouse.url, there, 60, Watched())
        ready = "select count(*) = 3 from streamer.relation where state = 'ready'"
        wait_until(warehouse.url, ready, 300, Watched())
        warehouse.execute(TRIGGER)
        waits: dict[str, list[float]] = {"alone": [], "slow": [], "hot": []}
        cases: dict[str, Callable[[], Writer | None]] = {
            "alone": lambda: None,
            "slow": lambda: Writer(second.url, "insert into slow values (%(n)s)", SLOW_PER_SECOND),
            "hot": lambda: Writer(
                second.url, "update hot set v = %(n)s where id %% 10 = %(n)s %% 10", None
            ),
        }
        try:
            for _ in range(options.rounds):
                for name, beside in cases.items():
                    second.execute("truncate slow")
                    first.execute("truncate small")
                    waits[name] += measure(first, warehouse, beside(), options.seconds, Watched())
        finally:
            process.send_signal(15)
            process.wait(60)
        for name, found in waits.items():
            report(name, found, waits["alone"])


def measure(
    first: Database, warehouse: Database, beside: Writer | None, seconds: float, watched: object
) -> list[float]:
    """Return from commit to visible, in seconds, for each row of a case."""
    if beside is not None:
        beside.start()
    writer = Writer(first.url, "insert into small values (%(n)s)", WRITES_PER_SECOND)
    writer.start()
    writer.ended.wait(seconds)
    writer.end()
    if beside is not None:
        beside.end()
    wait_until(warehouse.url, f"select count(*) = {writer.last} from small", 120, watched)  # type: ignore[arg-type]
    committed, visible = times(first.url), times(warehouse.url)
    return [visible[number] - committed[number] for number in committed]


def report(name: str, waits: list[float], alone: list[float]) -> None:
    def cuts(found: list[float]) -> tuple[float, float]:
        all_cuts = statistics.quantiles(found, n=100)
        return all_cuts[49], all_cuts[98]

    (median, most), (median_alone, most_alone) = cuts(waits), cuts(alone)
    print(
        f"{name}: {len(waits)} commits, median {median * 1000:.0f} ms"
        f" ({median / median_alone:.2f} times that alone), 99 % {most * 1000:.0f} ms"
        f" ({most / most_alone:.2f} times)"
    )


if __name__ == "__main__":
    main()
