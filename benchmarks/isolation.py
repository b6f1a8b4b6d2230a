"""The latency of a source while a second source of the same worker is slow or hot.

A worker serves two sources. A writer commits single rows to the first source. The second source is
idle in the case ``alone``. In the case ``slow`` it writes to a table whose trigger at the target
takes 50 ms for each batch. In the case ``hot`` it updates 1,000 rows as fast as it can. In the case
``elsewhere`` a third source does that, and a second process of streamer serves the third source.
Then the machine is as busy as in the case ``hot``, and the sources share only the machine.

The cases alternate in rounds. The first two seconds of a case do not count, because lanes move
then. Times are those of the commits at the source and at the target (``track_commit_timestamp``).
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
from benchmarks.sides import Process, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    Running = tuple[Process, Path]

WRITES_PER_SECOND: Final = 100
SLOW_PER_SECOND: Final = 40
SETTLING_SECONDS: Final = 2.0
HOT: Final = "update hot set v = %(n)s where id %% 10 = %(n)s %% 10"
TRIGGER: Final = """
create function linger() returns trigger language plpgsql as $$
begin perform pg_sleep(0.05); return null; end $$;
create trigger linger after insert on slow for each statement execute function linger();
alter table slow enable always trigger linger;
"""


class Writer(threading.Thread):
    """Runs a statement repeatedly, with a number, until stopped."""

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
        first, second, third = (Database(source, name) for name in ("first", "second", "third"))
        warehouse, elsewhere = Database(target, "warehouse"), Database(target, "other")
        for database in (first, second, third, warehouse, elsewhere):
            database.create()
        first.execute("create table small (id bigint primary key)")
        second.execute("create table slow (id bigint primary key)")
        for database in (second, third):
            database.execute("create table hot (id bigint primary key, v bigint)")
            database.execute("insert into hot select g, 0 from generate_series(1, 1000) g")
        watched = Watched(
            start(Path(directory), warehouse, {first: "small: ", second: "slow: , hot: "}),
            start(Path(directory), elsewhere, {third: "hot: "}),
        )
        for database, count in ((warehouse, 3), (elsewhere, 1)):
            is_made = "select to_regclass('streamer.relation') is not null"
            wait_until(database.url, is_made, 60, watched)
            ready = f"select count(*) = {count} from streamer.relation where state = 'ready'"
            wait_until(database.url, ready, 300, watched)
        warehouse.execute(TRIGGER)
        waits: dict[str, list[float]] = {}
        cases: dict[str, Callable[[], Writer | None]] = {
            "alone": lambda: None,
            "slow": lambda: Writer(second.url, "insert into slow values (%(n)s)", SLOW_PER_SECOND),
            "hot": lambda: Writer(second.url, HOT, None),
            "elsewhere": lambda: Writer(third.url, HOT, None),
        }
        try:
            for _ in range(options.rounds):
                for name, beside in cases.items():
                    second.execute("truncate slow")
                    first.execute("truncate small")
                    delays = measure(first, warehouse, beside(), options.seconds, watched)
                    waits.setdefault(name, []).extend(delays)
        finally:
            watched.end()
        for name, delays in waits.items():
            report(name, delays, waits["alone"])


def start(directory: Path, warehouse: Database, tables: "dict[Database, str]") -> "Running":
    """Start streamer, with a single worker, for some sources."""
    config = directory / f"{warehouse.name}.yaml"
    config.write_text(
        f'target: {{url: "{warehouse.url}"}}\nhttp: {{listen: ""}}\nworkers: 1\n'
        f"spool: {{directory: {directory}/{warehouse.name}}}\nsources:\n"
        + "".join(
            f'- {{database: {source.name}, urls: [{{url: "{source.url}"}}], tables: {{{names}}}}}\n'
            for source, names in tables.items()
        )
    )
    log = config.with_suffix(".log")
    return launch(["--config", str(config), "run"], log), log


class Watched:
    """The processes that must run during a measurement."""

    def __init__(self, *running: "Running") -> None:
        self._running = running

    def check(self) -> None:
        for process, log in self._running:
            if process.poll() is not None:
                raise SystemExit(log.read_text()[-3000:])

    def end(self) -> None:
        for process, _ in self._running:
            process.send_signal(15)
        for process, _ in self._running:
            process.wait(60)


def measure(
    first: Database, warehouse: Database, beside: Writer | None, seconds: float, watched: Watched
) -> list[float]:
    """Return the seconds from commit to visibility for each row of a case."""
    if beside is not None:
        beside.start()
    writer = Writer(first.url, "insert into small values (%(n)s)", WRITES_PER_SECOND)
    writer.start()
    writer.ended.wait(SETTLING_SECONDS)
    first_counted = writer.last
    writer.ended.wait(seconds)
    writer.end()
    if beside is not None:
        beside.end()
    wait_until(warehouse.url, f"select count(*) = {writer.last} from small", 120, watched)
    committed, visible = times(first.url), times(warehouse.url)
    return [visible[number] - committed[number] for number in committed if number > first_counted]


def report(name: str, waits: list[float], alone: list[float]) -> None:
    def cuts(delays: list[float]) -> list[float]:
        all_cuts = statistics.quantiles(delays, n=100)
        return [all_cuts[49], all_cuts[94], all_cuts[98]]

    figures = ", ".join(
        f"{part} % within {of_all * 1000:.0f} ms ({of_all / of_alone:.2f} times that alone)"
        for part, of_all, of_alone in zip((50, 95, 99), cuts(waits), cuts(alone), strict=True)
    )
    print(f"{name}: {len(waits)} commits, {figures}")


if __name__ == "__main__":
    main()
