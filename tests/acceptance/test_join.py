"""A large table joins under writes, with a kill in every state. Threads copy it; `test_sync` kills
the parts of Spark.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up, command
from tests.support.streamer import write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)

ROWS = 100_000
SETTINGS = "sync: {jobs: 2, rows_per_second: 80000}"
"""Slow enough to be killed in the middle."""
DIES_IN_CATCH_UP = {"STREAMER_FAILPOINTS": "sync.catching_up=kill"}


@contextmanager
def writing(source: Database) -> Iterator[None]:
    """Write both tables all the while."""
    stop = threading.Event()

    def write() -> None:
        with source.connect() as connection:
            n = 0
            while not stop.wait(0.01):
                n += 1
                connection.execute(
                    f"""
                    insert into fresh (id) values ({n}) on conflict (id) do update set at = now();
                    insert into large values ({ROWS + n}, 'new') on conflict (id) do nothing;
                    update large set v = v || '.' where id = {n * 37 % ROWS};
                    delete from large where id = {n * 101 % ROWS}
                    """.encode()
                )

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def until(target: Database, state: str, process: Process) -> None:
    """Wait until the large table is in a state."""
    rows = f"select 1 from streamer.relation where source = 'public.large' and state = '{state}'"
    eventually(lambda: target.execute(rows), 240, f"{state}\n{process.output}")


def test_a_large_table_joins(source: Database, target: Database, tmp_path: Path) -> None:
    for db in (source, target):
        db.execute("create table fresh (id int primary key, at timestamptz default now())")
    source.execute(
        "create table large (id int primary key, v text);"
        f" insert into large select g, md5(g::text) from generate_series(1, {ROWS}) g"
    )
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "fresh: {initial: none}", settings=SETTINGS)
    copying = (
        "select 1 from pg_stat_progress_copy p join pg_stat_activity a using (pid)"
        " where p.datname = current_database() and a.application_name like 'streamer copy%'"
    )
    with writing(source):
        with Process(config, spark=False) as process:
            caught_up(process)
            write_config(
                config, source, target, "fresh: {initial: none}\nlarge:", settings=SETTINGS
            )
            process.process.send_signal(signal.SIGHUP)
            until(target, "init", process)
            process.kill()
        for _ in range(2):
            with Process(config, spark=False) as process:
                until(target, "copying", process)
                eventually(lambda: target.execute(copying), 60, "rows are copied")
                process.kill()
        with Process(config, spark=False, environment=DIES_IN_CATCH_UP) as process:
            assert process.process.wait(240) == -signal.SIGKILL
        with Process(config, spark=False) as process:
            until(target, "ready", process)
            process.kill()
    with Process(config, spark=False) as process:
        with writing(source):
            # The process that copies dies as well, with the program running on.
            resync(target, process)
            eventually(lambda: target.execute(copying), 120, f"copies\n{process.output}")
            (found,) = process.children("")
            found.kill()
            assert_fresh(source, target)
            until(target, "ready", process)
            assert_fresh(source, target)
            with readers(target) as fewest:
                resync(target, process)
                until(target, "ready", process)
            assert min(fewest) > ROWS * 0.9, "a reader saw a part of the table"
        caught_up(process)
        assert_same(source, target, "large")
        assert_same(source, target, "fresh")
        assert process.terminate() == 0
    slots = "select slot_name from pg_replication_slots where database = current_database()"
    assert source.execute(slots) == [("streamer_shop",)]
    assert target.execute(r"select relname from pg_class where relname ~ '^copy_\d'") == []


def resync(target: Database, process: Process) -> None:
    result = command(process.config, "resync", "large", "--no-wait")
    assert result.returncode == 0, result.stderr
    until(target, "copying", process)


def assert_fresh(source: Database, target: Database) -> None:
    """Changes committed now arrive while the large table is still being copied or not."""
    newest = source.value("select max(id) from fresh")
    eventually(lambda: target.value(f"select max(id) >= {newest} from fresh"), 60, "fresh rows")


@contextmanager
def readers(target: Database) -> Iterator[list[int]]:
    """Count the rows of the large table over and over."""
    counts: list[int] = []
    stop = threading.Event()

    def read() -> None:
        with target.connect() as connection:
            while not stop.is_set():
                row = connection.execute("select count(*) from large").fetchone()
                assert row is not None
                counts.append(int(str(row[0])))
                stop.wait(0.05)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()
