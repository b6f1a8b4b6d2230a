"""Definitions of tables that share a target without a sid, with `ddl: capture`."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from streamer.drain import drainer
from tests.support.postgres import Database
from tests.support.remedies import remedy_of
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

GROUP = "ddl: capture\non_ddl: apply"
FILL = """
create table {0} (id int primary key, v text, n int);
insert into {0} select g, '{0} ' || g, g % 3 from generate_series({1}, {1} + 4) g
"""
WAITING = "select count(*) from streamer.ddl where state = 'waiting'"


def read_rows(db: Database, table: str, names: str, ids: range) -> list[tuple[object, ...]]:
    """Return the columns *names* of the rows with *ids*; no row without one of the columns."""
    within = f"id between {ids.start} and {ids.stop - 1}"
    try:
        return db.execute(f"select {names} from {table} where {within} order by id")
    except psycopg.errors.UndefinedColumn:
        return []


def read_names(db: Database, table: str) -> str:
    return str(
        db.value(
            "select string_agg(quote_ident(attname) || '::text', ', ' order by attname)"
            f" from pg_attribute where attrelid = '{table}'::regclass and attnum > 0"
            " and not attisdropped"
        )
    )


async def is_so(streamer: Streamer, ask: Callable[[], bool]) -> None:
    await streamer.eventually(lambda: asyncio.to_thread(ask), 60)


async def test_shards_change_their_definitions_one_after_the_other(
    source: Database,
    second: Database,
    target: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change of a shard gives the rows of the second shard no value."""
    monkeypatch.setattr(drainer, "ERROR_RETRY_SECONDS", 0.5)
    shards = {"a": (source, range(10, 100)), "b": (second, range(100, 200))}
    for db, ids in shards.values():
        db.execute(FILL.format("t", ids.start))
    path = tmp_path / "config.yaml"
    rule, others = "t: {keys: disjoint}", {"b": second}
    write_config(path, source, target, rule, sid="a", others=others, group=GROUP)
    streamer = Streamer(path)
    streamer.start()

    def is_alike(sid: str) -> bool:
        db, ids = shards[sid]
        names = read_names(db, "t")
        return read_rows(db, "t", names, ids) == read_rows(target, "t", names, ids)

    async def change(commands: str, *sids: str) -> None:
        for sid in sids:
            db, ids = shards[sid]
            db.execute(commands.format(ids.start, ids.start + 1))
            await is_so(streamer, partial(is_alike, sid))

    try:
        await streamer.caught_up(60)
        added = "alter table t add w int not null default {0}; update t set n = 9 where id = {1}"
        await change(added, "a")
        assert {row[0] for row in read_rows(target, "t", "w", shards["b"][1])} == {None}
        await change(added, "b")
        await change("alter table t rename v to words; delete from t where id = {1}", "a", "b")
        await change("alter table t drop column n; insert into t (id) values ({1})", "a", "b")
        assert "n" not in read_names(target, "t").split("::text")
        retyped = "alter table t alter w type text using w || '!'; delete from t where id = {1}"
        source.execute(retyped.format(10, 11))
        await remedy_of(streamer, "public.t", "waits for a decision", "a")
        await change(retyped, "b")
        await is_so(streamer, partial(is_alike, "a"))
        await streamer.caught_up(60)
        assert target.value(WAITING) == 0
        assert all(is_alike(sid) for sid in shards)
    finally:
        await streamer.stop()


async def test_a_renamed_table_stays_and_the_rows_of_partitions_wait_for_a_common_copy(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(FILL.format("events_1", 10))
    source.execute(
        "create table events_2 (id int primary key, v text, n int) partition by range (id);"
        "create table twenties partition of events_2 for values from (20) to (30);"
        "create table thirties partition of events_2 for values from (30) to (40);"
        "insert into events_2 select g, 'events_2 ' || g from generate_series(20, 35) g"
    )
    source.execute(FILL.format("strays", 40))
    rule = '"events_*": {target: events, keys: disjoint}'

    def is_alike(*tables: str) -> bool:
        wanted = sorted(row for table in tables for row in source.execute(f"table {table}"))
        return wanted == sorted(target.execute("table events"))

    async with stream(rule, settings="discovery_interval: 0.5", group=GROUP) as streamer:
        await streamer.caught_up(60)
        versions = "select id, xmin::text from events where id < 14 order by 1"
        before = target.execute(versions)
        source.execute("alter table events_1 rename to events_9")
        source.execute("update events_9 set v = 'renamed' where id = 14")
        await is_so(streamer, lambda: is_alike("events_9", "events_2"))
        await streamer.caught_up(60)
        assert target.execute(versions) == before
        source.execute("alter table events_2 attach partition strays for values from (40) to (50)")
        gap = await remedy_of(streamer, "public.events_2", "attached as a partition")
        (again,) = gap.commands
        assert again.line == "streamer resync public.events_2 --database shop"
        await streamer.ask("resync", "public.events_2")
        await is_so(streamer, lambda: is_alike("events_9", "events_2"))
        await streamer.caught_up(60)
        source.execute("alter table events_2 detach partition thirties")
        source.execute("insert into events_2 values (45, 'later')")
        stop = await remedy_of(streamer, "public.events_2", "rows of other tables may be within")
        assert "skip this change, and `streamer resync public.events_2` removes them" in str(
            (await streamer.table("public.events_2"))["error"]
        )
        assert stop.has("ddl skip")
        await streamer.decide("skip", "events_2")
        await streamer.caught_up(60)
        await streamer.ask("resync", "public.events_2")
        await is_so(streamer, lambda: is_alike("events_9", "events_2"))
