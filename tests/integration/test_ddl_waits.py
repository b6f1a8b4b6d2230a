"""`ddl: capture`: tables that share a type wait for each other at a change of the type, and never
in a circle.
"""

import asyncio
from typing import Any

import pytest

from streamer.control import progress_tracker
from streamer.copy import copy_coordinator
from streamer.copy.spark.launcher import SparkLauncher
from streamer.runtime.session.pipeline import Pipeline
from streamer.runtime.session.session import Session
from streamer.schema_changes import changes_during_copy
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer, copy_in_threads

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

GROUP = "ddl: capture\non_ddl: {drop_column: apply, drop_attribute: apply}"
DIFF: dict[str, Any] = {"mode": "diff"}
TABLES = """
create type mood as enum ('sad', 'happy');
create table a (id int primary key, m mood); create table b (id int primary key, m mood);
create table t (id int primary key);
insert into a values (1, 'sad'); insert into b values (1, 'sad'); insert into t values (1);
"""
A_AND_B = "a: {truncate_target: true}\nb: {truncate_target: true}"
RENAMED = (
    "insert into a values (2, 'happy'); insert into b values (2, 'happy')",
    "alter type mood rename value 'happy' to 'glad'",
    "insert into a values (3, 'glad'); insert into b values (3, 'glad')",
)


async def run(source: Database, *commands: str) -> None:
    for command in commands:
        await asyncio.to_thread(source.execute, command)


async def pause(streamer: Streamer, *tables: str) -> None:
    for table in tables:
        await streamer.ask("pause", f"public.{table}")
        await streamer.table_state(f"public.{table}", "paused")


async def test_a_table_that_waits_for_a_later_round_holds_no_type_back(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_coordinator, "ROUNDS_MAX", 1)
    source.execute(TABLES)
    async with stream(A_AND_B, group=GROUP) as streamer:
        await streamer.caught_up()
        await pause(streamer, "a", "b")
        await run(source, *RENAMED)
        await streamer.ask("resync", "public.a", **DIFF)
        await streamer.ask("resync", "public.b", **DIFF)
        await streamer.caught_up(20)
        for table in ("a", "b"):
            assert_same(source, target, table)


async def test_a_table_that_waits_for_a_copy_of_all_rows_holds_no_type_back(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLES)
    async with stream(A_AND_B, group=GROUP) as streamer:
        await streamer.caught_up()
        await pause(streamer, "b")
        await run(source, *RENAMED)
        await streamer.ask("resync", "public.b")
        await streamer.caught_up(20)
        for table in ("a", "b"):
            assert_same(source, target, table)


async def test_a_copy_changes_no_type_before_the_stream_shows_its_other_users(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, dispatch = asyncio.Event(), Pipeline._dispatch
    gate.set()

    async def dispatch_later(self: Pipeline, session: Session, payloads: list[bytes]) -> None:
        await gate.wait()
        await dispatch(self, session, payloads)

    async def waits() -> bool:
        return "the stream has not reached" in str((await streamer.table("public.b"))["error"])

    monkeypatch.setattr(Pipeline, "_dispatch", dispatch_later)
    monkeypatch.setattr(changes_during_copy, "STREAM_SECONDS", 0.1)
    source.execute(TABLES)
    async with stream(A_AND_B, group=GROUP) as streamer:
        await streamer.caught_up()
        gate.clear()
        await run(source, *RENAMED)
        await streamer.ask("resync", "public.b")
        await streamer.eventually(waits, 10)
        gate.set()
        await streamer.caught_up()
        for table in ("a", "b"):
            assert_same(source, target, table)


async def test_a_table_joins_whose_type_changes_later_in_the_stream(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLES)
    async with stream("a:", group=GROUP) as streamer:
        await streamer.caught_up()
        await pause(streamer, "a")
        await run(source, *RENAMED)
        streamer.path.write_text(streamer.path.read_text().replace("    a:", "    a:\n    b:"))
        await streamer.apply()

        async def waits() -> bool:
            tables = {each["source"]: each for each in (await streamer.status())["tables"]}
            return 'table "public.a", which has' in str(tables.get("public.b", {}).get("error"))

        await streamer.eventually(waits)
        await streamer.ask("resume", "public.a")
        await streamer.caught_up()
        for table in ("a", "b"):
            assert_same(source, target, table)


async def test_tables_with_more_transactions_to_come_than_their_positions_do_not_wait(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker then stores only the range of some transactions, without their positions."""
    monkeypatch.setattr(progress_tracker, "RUNS_MAX", 2)
    source.execute(TABLES)
    async with stream(A_AND_B, group=GROUP) as streamer:
        await streamer.caught_up()
        await pause(streamer, "a", "b")
        for number in range(10, 15):
            await run(source, f"insert into a values ({number}); insert into b values ({number})")
        await run(source, *RENAMED)
        for table in ("a", "b"):
            await streamer.ask("resume", f"public.{table}")
        await streamer.caught_up(20)
        for table in ("a", "b"):
            assert_same(source, target, table)


MODES: dict[str, dict[str, Any]] = {
    "reload": {},
    "diff": {"mode": "diff"},
    "where": {"mode": "diff", "scope": {"where": ["id > 0"]}},
}
RENAME = ["alter type mood rename value 'happy' to 'glad'"]
SWAP = [
    "alter type mood rename value 'happy' to 'x'",
    "alter type mood rename value 'sad' to 'happy'",
    "alter type mood rename value 'x' to 'sad'",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("commands", [RENAME, SWAP], ids=["rename", "swap"])
async def test_a_type_that_changes_during_a_copy_has_it_begin_again(
    mode: str,
    commands: list[str],
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source shows rows with the present labels, also under a snapshot."""
    gate, submitted, read = asyncio.Event(), asyncio.Event(), asyncio.Event()
    gate.set()

    async def submit(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        submitted.set()
        await gate.wait()
        try:
            return await copy_in_threads(self, job)
        finally:
            read.set()

    monkeypatch.setattr(SparkLauncher, "submit", submit)
    source.execute(TABLES)
    async with stream(A_AND_B, group=GROUP) as streamer:
        await streamer.caught_up()
        source.execute("insert into b values (2, 'happy')")
        await streamer.caught_up()
        target.execute("delete from b where id = 2")  # so that a comparison has rows to copy
        await pause(streamer, "a")  # the target's type stays unchanged
        gate.clear()
        submitted.clear()
        read.clear()
        await streamer.ask("resync", "public.b", **MODES[mode])
        await asyncio.wait_for(submitted.wait(), 60)
        source.execute("insert into a values (2, 'happy')")
        await run(source, *commands, "insert into b values (3, 'sad')")
        gate.set()
        await asyncio.wait_for(read.wait(), 60)
        await streamer.ask("resume", "public.a")
        await streamer.caught_up()
        assert (await streamer.table("public.b"))["error"] is None
        for table in ("a", "b"):
            assert_same(source, target, table)
