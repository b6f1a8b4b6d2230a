"""Killed while it makes definitions, it makes the rest, and leaves no index half built."""

import asyncio
from pathlib import Path

import pytest

from tests.support.definitions import described
from tests.support.postgres import Database, assert_same
from tests.support.process import Process
from tests.support.streamer import Streamer, write_config
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

TABLES = ("people", "orders")
DDL = """
create table people (id int primary key, email text unique);
create table orders (id int primary key, person int references people, check (id > 0));
create index orders_person on orders (person) where person > 0;
insert into people select g, 'p' || g from generate_series(1, 50) g;
insert into orders select g, g from generate_series(1, 50) g;
"""


@pytest.mark.parametrize(
    "armed",
    [
        "sync.table_created=kill",
        "definitions.planned=kill",
        "definitions.before_make=kill@2",
        "definitions.before_make=kill@4",
        "definitions.part_made=kill",
    ],
)
async def test_killed_while_definitions_are_made(
    armed: str, tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(DDL)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "people:\norders:", group="create: all")

    def die() -> None:
        with Process(path, environment={"STREAMER_FAILPOINTS": armed}, spark=False) as process:
            assert process.wait(60) == -9, process.output

    await asyncio.to_thread(die)
    source.execute("insert into orders values (51, 1)")
    await recover(path, source, target)


async def test_killed_in_the_middle_of_an_index_build(
    tmp_path: Path, source: Database, target: Database
) -> None:
    source.execute(DDL)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "people:\norders:", group="create: all")
    await recover(path, source, target)
    target.execute(
        "drop index orders_person; update streamer.definition set state = 'pending'"
        " where name = 'orders_person'"
    )
    building = (
        "select pid from pg_stat_activity where datname = current_database()"
        " and query like 'create index concurrently%' and wait_event_type = 'Lock'"
    )

    def die() -> None:
        with target.connect() as user:
            user.execute("begin; lock table orders in row exclusive mode")
            with Process(path, spark=False) as process:
                eventually(lambda: target.execute(building), 60)
                process.kill()

    await asyncio.to_thread(die)
    await recover(path, source, target)


async def recover(path: Path, source: Database, target: Database) -> None:
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up(60)

        async def is_equal() -> bool:
            return all(
                described(target, f"public.{t}") == described(source, f"public.{t}") for t in TABLES
            )

        await streamer.eventually(is_equal)

        async def is_made() -> bool:
            states = target.execute("select distinct state from streamer.definition")
            return states == [("made",)]

        await streamer.eventually(is_made)
    finally:
        await streamer.stop()
    for table in TABLES:
        assert_same(source, target, table)
