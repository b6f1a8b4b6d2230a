"""Many sources in a process begin in order, share few connections, and proceed separately."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamer.apply.lanes import slow_lanes
from streamer.apply.write import worker
from streamer.copy.spark.launcher import SparkLauncher
from streamer.mapping.rules import SourceMapping
from streamer.runtime.session.choose_transport import ChosenTransport, choose_transport
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer, copy_in_threads
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("without_spark")]
SECONDS = 60.0
HEAD = """
target: {{url: "{target}"}}
http: {{listen: ""}}
workers: 1
sync: {{{sync}}}
spool: {{directory: {spool}}}
sources:
"""


@asynccontextmanager
async def running(
    source: Database,
    target: Database,
    directory: Path,
    sources: str,
    sync: str = "sources_at_once: 1",
) -> AsyncIterator[Streamer]:
    path = directory / "config.yaml"
    head = HEAD.format(target=target.url, spool=directory / "spool", sync=sync)
    path.write_text(head + sources.replace("URL", source.url))
    streamer = Streamer(path)
    streamer.start()
    try:
        yield streamer
    finally:
        await streamer.stop()


class Gate:
    """Lets copies of tables pass one by one, and records the order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[str] = []
        self.may_pass: set[str] | None = set()
        gate = self

        async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
            tables = [p["description"].split(" ")[1] for task in job["tasks"] for p in task]
            gate.copied += tables
            await until(lambda: gate.may_pass is None or gate.may_pass >= set(tables), seconds=120)
            return await copy_in_threads(self, job)

        monkeypatch.setattr(SparkLauncher, "submit", submit)

    def open(self) -> None:
        self.may_pass = None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


async def test_first_copies_come_in_order_and_sources_that_wait_have_no_slot(
    source: Database, target: Database, tmp_path: Path, gate: Gate
) -> None:
    # GIVEN sources of different sizes and priorities, and a copy at a time
    for name, rows in (("large", 20_000), ("small", 1), ("first", 30_000)):
        source.execute(
            f"create table {name} (id int primary key);"
            f" insert into {name} select g from generate_series(1, {rows}) g; analyze {name}"
        )
    source.execute("create table streamed (id int primary key)")
    target.execute("create table streamed (id int primary key)")
    sources = "".join(
        f"- {{database: {name}, urls: [{{url: 'URL'{more}}}], tables: {{{name}: {rule}}}}}\n"
        for name, more, rule in (
            ("large", "", ""),
            ("small", "", ""),
            ("first", ", priority: 5", ""),
            ("streamed", "", "{initial: none}"),
        )
    )
    slots = "select slot_name from pg_replication_slots where database = current_database()"
    async with running(source, target, tmp_path, sources) as streamer:

        async def states() -> dict[str, dict[str, Any]]:
            return {status["database"]: status for status in await streamer.statuses()}

        async def all_have_asked() -> bool:
            found = await states()
            waiting = [name for name, each in found.items() if each["waiting_for"]]
            return len(waiting) == 2 and len(gate.copied) == 1

        # WHEN all sources have requested a turn
        await streamer.eventually(all_have_asked, SECONDS)
        (begun,) = {"large", "small", "first"} - {
            name for name, each in (await states()).items() if each["waiting_for"]
        }
        # THEN only one has a slot, beside the source without a table to copy
        await streamer.table_state("public.streamed", "ready", SECONDS)
        there = {name for (name,) in source.execute(slots)}
        assert there == {"streamer_streamed", f"streamer_{begun}"}
        turn = "its turn: [12] sources? cop(ies|y) first"
        for name, status in (await states()).items():
            if name not in ("streamed", begun):
                assert re.match(turn, status["waiting_for"]), status
                assert status["state"] == "starting"
                assert status["error"] is None
        # AND the remaining sources follow by priority, then by size
        gate.open()
        await streamer.caught_up(SECONDS)
        rest = [name for name in ("first", "small", "large") if name != begun]
        assert gate.copied == [f"public.{name}" for name in (begun, *rest)]
        for name in ("large", "small", "first"):
            assert_same(source, target, name)
        # AND a single session of the process holds all locks
        sessions = "select count(*) from pg_stat_activity where application_name like '{}%'"
        locks = sessions.format("streamer lock")
        assert target.value(f"{locks} and datname = current_database()") == 1


async def test_the_sources_of_a_server_copy_one_after_another(
    source: Database, target: Database, tmp_path: Path, gate: Gate
) -> None:
    for name in ("a", "b"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    sources = "".join(
        f"- {{database: {name}, urls: [{{url: 'URL'}}], tables: {{{name}: }}}}\n" for name in "ab"
    )
    async with running(source, target, tmp_path, sources, "sources_per_server: 1") as streamer:

        async def is_told() -> bool:
            waits = [status["waiting_for"] or "" for status in await streamer.statuses()]
            return any("1 source copies at this server first" in wait for wait in waits)

        await streamer.eventually(is_told, SECONDS)
        await until(lambda: len(gate.copied) == 1, seconds=SECONDS)
        gate.open()
        await streamer.caught_up(SECONDS)
        for name in ("a", "b"):
            assert_same(source, target, name)


async def test_a_source_that_copies_nothing_keeps_no_turn_while_it_starts(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    async def linger(mapping: SourceMapping, *arguments: Any, **options: Any) -> ChosenTransport:
        if mapping.database == "a":
            reached.set()
            await may_go_on.wait()
        return await choose_transport(mapping, *arguments, **options)

    monkeypatch.setattr("streamer.runtime.session.source_reconciler.choose_transport", linger)
    for db in (source, target):
        db.execute("create table streamed (id int primary key)")
    source.execute("create table copied (id int primary key); insert into copied values (1)")
    sources = "- {database: a, urls: [{url: 'URL'}], tables: {streamed: {initial: none}}}\n"
    async with running(source, target, tmp_path, sources) as streamer:
        # GIVEN a source that knows its tables, and whose next step makes the slot
        await reached.wait()
        # WHEN a second source has a table to copy
        more = "- {database: b, urls: [{url: 'URL'}], tables: {copied: }}\n"
        streamer.path.write_text(streamer.path.read_text() + more.replace("URL", source.url))
        await streamer.apply()
        # THEN the second source copies
        await streamer.table_state("public.copied", "ready", SECONDS)
        may_go_on.set()
        await streamer.caught_up(SECONDS)


async def test_a_table_that_joins_does_not_wait_for_the_copies_of_others(
    source: Database, target: Database, tmp_path: Path, gate: Gate
) -> None:
    for name in ("big", "joins", "waits"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    sources = "- {database: shop, urls: [{url: 'URL'}], tables: {big: }}\n"
    async with running(source, target, tmp_path, sources) as streamer:
        # GIVEN a copy that does not end
        await until(lambda: gate.copied == ["public.big"], seconds=SECONDS)
        # WHEN a source and a table join, which wait for separate turns
        gate.may_pass = {"public.joins"}
        text = streamer.path.read_text().replace("big: }", "big: , joins: }")
        text += "- {database: crm, urls: [{url: 'URL'}], tables: {waits: }}\n"
        streamer.path.write_text(text.replace("URL", source.url))
        await streamer.apply()
        # THEN the table is copied, and streams
        await streamer.table_state("public.joins", "ready", SECONDS)
        source.execute("insert into joins values (2)")
        await until(lambda: target.value("select count(*) from joins") == 2, seconds=SECONDS)
        assert gate.copied == ["public.big", "public.joins"]
        gate.open()
        await streamer.caught_up(SECONDS)
        for name in ("big", "joins", "waits"):
            assert_same(source, target, name)


async def test_a_table_whose_copy_fails_does_not_wait_for_the_end_of_its_round(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewrite restarts the first copy, the target refuses the second, and the third lasts."""
    may_end, submitted = asyncio.Event(), 0

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal submitted
        submitted += 1
        if submitted == 1:  # after the plan of the copies
            source.execute("cluster rewritten using rewritten_pkey")
        tasks: dict[bool, list[Any]] = {True: [], False: []}
        for task in job["tasks"]:
            for part in task:
                tasks["public.long" in part["description"]].append([part])
        failures = await copy_in_threads(self, job | {"tasks": tasks[False]})
        if tasks[True]:
            await may_end.wait()
        return failures + await copy_in_threads(self, job | {"tasks": tasks[True]})

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    names = ("long", "rewritten", "refused")
    for name in names:
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    target.execute("create table refused (id int primary key check (id > 1))")
    sources = "- {database: shop, urls: [{url: 'URL'}], tables: {long: , rewritten: , refused: }}\n"
    async with running(source, target, tmp_path, sources) as streamer:
        await streamer.table_state("public.rewritten", "ready", SECONDS)
        await streamer.table_state("public.refused", "error", SECONDS)
        target.execute("alter table refused drop constraint refused_id_check")
        await streamer.ask("resync", "public.refused")
        await streamer.table_state("public.refused", "ready", SECONDS)
        assert (await streamer.table("public.long"))["state"] == "copying"
        may_end.set()
        source.execute("; ".join(f"insert into {name} values (2)" for name in names))
        await streamer.caught_up(SECONDS)
        for name in names:
            assert_same(source, target, name)


GATED = """
create table gate (is_open bool);
insert into gate values (true);
create table batch (session text);
create function linger() returns trigger language plpgsql as $$
begin
    insert into public.batch values (current_setting('application_name'));
    perform pg_sleep(0.05);
    while not exists (select from public.gate where is_open) loop perform pg_sleep(0.02); end loop;
    return null;
end $$;
create trigger linger after insert on slow for each statement execute function linger();
alter table slow enable always trigger linger;
"""


async def test_a_table_with_slow_batches_soon_delays_no_other_source(
    source: Database, target: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By order of events: once the slow table is aside, the remaining tables pass while its batch
    waits.
    """
    monkeypatch.setattr(slow_lanes, "LONG_TIMES", 0)  # this machine may be slow, too
    monkeypatch.setattr(worker, "SLOW_SECONDS", 600.0)
    monkeypatch.setattr(worker, "ASIDE_SECONDS", 600.0)
    for table in ("slow", "fast", "other"):
        source.execute(f"create table {table} (id int primary key)")
    sources = (
        "- {database: shop, urls: [{url: 'URL'}], tables: {slow: , fast: }}\n"
        "- {database: crm, urls: [{url: 'URL'}], tables: {other: }}\n"
    )
    async with running(source, target, tmp_path, sources) as streamer:
        await streamer.caught_up(SECONDS)
        target.execute(GATED)
        numbers = iter(range(1, 100_000))

        def at_work(name: str) -> Callable[[], bool]:
            sql = (
                "select exists (select from pg_stat_activity where wait_event = 'PgSleep'"
                f" and application_name like '{name}%' and datname = current_database())"
            )
            return lambda: bool(target.value(sql))

        # GIVEN a table that takes 50 ms for each batch, which has moved aside
        moved = "select exists (select from batch where session like 'streamer drainer%')"

        async def has_moved() -> bool:
            number = next(numbers)
            for table in ("slow", "fast", "other"):
                source.execute(f"insert into {table} values ({number})")
            return bool(target.value(moved))

        await streamer.eventually(has_moved, SECONDS)
        # WHEN a batch of the table does not end
        target.execute("update gate set is_open = false")
        last = next(numbers)
        source.execute(f"insert into slow values ({last})")
        await until(at_work("streamer drainer"), seconds=SECONDS)
        # THEN changes of both sources pass
        for table in ("fast", "other"):
            source.execute(f"insert into {table} values ({last})")
            sql = f"select exists (select from {table} where id = {last})"
            await until(lambda sql=sql: bool(target.value(sql)), seconds=SECONDS)  # type: ignore[misc]
        assert not target.value(f"select exists (select from slow where id = {last})")
        assert not at_work("streamer worker")()
        target.execute("update gate set is_open = true")
        await streamer.caught_up(SECONDS)
        for table in ("slow", "fast", "other"):
            assert_same(source, target, table)


async def test_a_source_whose_tables_are_only_declared_leaves_no_snapshot_open(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """An open transaction keeps dead rows, and delays CREATE INDEX CONCURRENTLY."""
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    held = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and backend_type = 'walsender' and backend_xmin is not null"
    )
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        await until(lambda: source.value(held) == 0, "the snapshot of the slot is closed")
