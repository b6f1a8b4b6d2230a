"""The age of changes that are not visible yet, and the sessions that a table waits for."""

import asyncio
import re

import pytest

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.write.planner import Planner
from streamer.drain import drainer
from streamer.schema.source_definition import DefinedColumn
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")


async def test_a_locked_table_lags_and_names_the_session_it_waits_for(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for table in ("locked", "free"):
        source.execute(f"create table {table} (id int primary key)")
    async with stream("locked:\nfree:", settings="workers: 1") as streamer:
        await streamer.caught_up()
        metrics = streamer.engine.metrics.registry
        shop = {"database": "shop", "sid": ""}
        with target.connect() as user:
            pid = user.info.backend_pid
            user.execute("begin")
            user.execute("lock table locked in access exclusive mode")
            source.execute("insert into locked values (1)")

            async def is_named() -> bool:
                source.execute("insert into free select coalesce(max(id), 0) + 1 from free")
                waiting_for = (await streamer.table("public.locked"))["waiting_for"] or ""
                named = (
                    rf'target table "public.locked": pid {pid} \(role "postgres", '
                    r"idle in transaction for \d+ s"
                )
                return re.search(named, waiting_for) is not None

            await streamer.eventually(is_named, 40)

            async def lags() -> bool:
                return bool((await streamer.table("public.locked"))["lag_seconds"] > 4)

            await streamer.eventually(lags, 40)
            status = await streamer.status()
            assert status["lag_seconds"] > 4, "other tables that go on do not hide it"
            assert metrics.get_sample_value("streamer_lag_seconds", shop) > 4  # type: ignore[operator]
            labels = shop | {"table": "public.locked"}
            assert metrics.get_sample_value("streamer_table_lag_seconds", labels) > 4  # type: ignore[operator]

            async def free_goes_on() -> bool:
                return bool((await streamer.table("public.free"))["lag_seconds"] == 0)

            await streamer.eventually(free_goes_on, 40)
            user.execute("rollback")
        await streamer.caught_up(40)
        assert_same(source, target, "locked")

        async def is_over() -> bool:
            table = await streamer.table("public.locked")
            return table["waiting_for"] is None and table["lag_seconds"] == 0

        await streamer.eventually(is_over, 40)


async def test_a_table_that_queues_for_a_connection_of_the_drainer_says_so(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer, "DRAINERS_MAX", 1)
    tables = ("first", "second")
    for table in tables:
        source.execute(f"create table {table} (id int primary key)")
    async with stream("first:\nsecond:", settings="workers: 1") as streamer:
        await streamer.caught_up()
        with target.connect() as user:
            user.execute("begin")
            for table in tables:
                user.execute(f"lock table {table} in access exclusive mode".encode())
                source.execute(f"insert into {table} values (1)")

            async def one_queues() -> bool:
                found = [(await streamer.table(f"public.{t}"))["waiting_for"] or "" for t in tables]
                return any("connections for held tables" in reason for reason in found)

            await streamer.eventually(one_queues, 60)
            user.execute("rollback")
        await streamer.caught_up(60)

        async def is_over() -> bool:
            found = [(await streamer.table(f"public.{table}"))["waiting_for"] for table in tables]
            return found == [None, None]

        await streamer.eventually(is_over, 60)
        for table in tables:
            assert_same(source, target, table)


async def test_a_plan_that_waits_for_the_source_keeps_no_connection_of_the_drainer(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drainer, "DRAINERS_MAX", 1)
    monkeypatch.setattr(drainer, "LOCK_SECONDS", 1.0)
    answers, asked = asyncio.Event(), asyncio.Event()
    answers.set()
    define = Planner._read_definition

    async def wait_and_define(planner: Planner, mapped: MappedRelation) -> dict[str, DefinedColumn]:
        if mapped.mapping.source.name == "slow":
            asked.set()
            await answers.wait()
        return await define(planner, mapped)

    monkeypatch.setattr(Planner, "_read_definition", wait_and_define)
    for table in ("slow", "quick"):
        source.execute(f"create table {table} (id int primary key)")
    async with stream("slow:\nquick:", settings="workers: 1") as streamer:
        await streamer.caught_up()
        with target.connect() as user:
            user.execute("begin")
            for table in ("slow", "quick"):
                user.execute(f"lock table {table} in access exclusive mode".encode())
                source.execute(f"insert into {table} values (1)")

            async def are_held() -> bool:
                tables = [await streamer.table(f"public.{name}") for name in ("slow", "quick")]
                return all(table["held_changes"] for table in tables)

            await streamer.eventually(are_held, 60)
            answers.clear()
            asked.clear()
            await asyncio.wait_for(asked.wait(), 60)
            user.execute("rollback")

        async def is_applied() -> bool:
            return target.execute("select count(*) from quick") == [(1,)]

        await streamer.eventually(is_applied, 30)
        answers.set()
        await streamer.caught_up(60)
        assert_same(source, target, "slow")
