"""A problem of a table or source ends the work for that object, and never the process."""

import asyncio
import contextlib
import shutil
from typing import Any, cast

import pytest

from streamer.apply.write.planner import Planner
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.worker import Worker
from streamer.errors.error_classes import DefectError, TargetSchemaError
from streamer.runtime.session import supervisor
from streamer.runtime.session.dispatcher import Dispatched, Dispatcher
from streamer.runtime.target_health import TargetMonitor
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.runtime.wal_retention.journaling import Journaling, _error_of
from tests.support.postgres import Database
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer

SECONDS = 60.0
DDL = "create table t (id int primary key, v text); create table u (id int primary key, v text)"
TABLES = "t: {initial: none}\nu: {initial: none}"


@pytest.mark.follows("runbooks:defect#2")
async def test_a_defect_in_planning_stops_its_table_only(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for db in (source, target):
        db.execute(DDL)
    plan = Planner._plan

    async def broken(self: Planner, mapped: Any, *arguments: Any, **options: Any) -> Any:
        if mapped.mapping.source.name == "t":
            raise TypeError("a defect")
        return await plan(self, mapped, *arguments, **options)

    async with stream(TABLES) as streamer:
        await streamer.caught_up(SECONDS)
        monkeypatch.setattr(Planner, "_plan", broken)
        source.execute("insert into t values (1); insert into u values (1)")
        await streamer.table_state("public.t", "error", SECONDS)
        assert "internal error" in (await streamer.table("public.t"))["error"]

        async def has_other() -> bool:
            return bool(target.execute("select id from u"))

        await streamer.eventually(has_other, SECONDS)
        monkeypatch.undo()
        await asyncio.to_thread(run_block, streamer.path, "defect#2", {"orders": "t"})
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t") == [(1,)]


async def test_a_defect_or_a_fence_ends_the_attempt_of_the_source(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for db in (source, target):
        db.execute(DDL)
    monkeypatch.setattr(supervisor, "MANUAL_RETRY_SECONDS", 0.2)
    broken = [True]

    def breaks_once(name: str) -> None:
        whole = getattr(Dispatcher, name)

        def fails(self: Dispatcher, *arguments: Any) -> Dispatched:
            if broken:
                broken.clear()
                raise KeyError("a defect")
            return cast("Dispatched", whole(self, *arguments))

        monkeypatch.setattr(Dispatcher, name, fails)

    async with stream(TABLES) as streamer:
        await streamer.caught_up(SECONDS)
        # A transaction is dispatched alone or in a block.
        breaks_once("_dispatch")
        breaks_once("_dispatch_block")
        source.execute("insert into t values (1, 'one')")
        await streamer.caught_up(SECONDS)
        assert not broken
        # The progress of a table changes, as if a second process had moved it.
        target.execute("update streamer.relation set end_lsn = '0/1' where source = 'public.t'")
        source.execute("insert into u values (1, 'one'); insert into t values (2, 'two')")
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t order by 1") == [(1,), (2,)]
        assert target.execute("select id from u") == [(1,)]


async def test_a_drainer_that_lost_its_cancellation_ends_with_the_attempt(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt loses the lock while the drainer plans, and planning fails at that moment."""
    for db in (source, target):
        db.execute(DDL)
    plans = Planner.plans
    planning = asyncio.Event()

    async def lose(self: Planner, lane_transaction: Any, *arguments: Any, **options: Any) -> Any:
        drains = asyncio.current_task()
        assert drains is not None
        if not planning.is_set():
            if not drains.get_name().startswith("drain "):
                raise TargetSchemaError("the worker gives the lane to a drainer")
            planning.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise TargetSchemaError("planning fails")
        return await plans(self, lane_transaction, *arguments, **options)

    async with stream(TABLES) as streamer:
        await streamer.caught_up(SECONDS)
        monkeypatch.setattr(Planner, "plans", lose)
        source.execute("insert into t values (1, 'one')")
        async with asyncio.timeout(SECONDS):
            await planning.wait()
        target.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'streamer lock %' and datname = current_database()"
        )
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t") == [(1,)]


async def test_a_defect_between_windows_or_in_a_guard_does_not_end_the_process(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for db in (source, target):
        db.execute(DDL)
    monkeypatch.setattr(supervisor, "MANUAL_RETRY_SECONDS", 0.2)
    met: list[str] = []

    def breaks_once(owner: type, name: str, *, is_after: bool = False) -> None:
        whole = getattr(owner, name)

        async def broken(self: Any, *arguments: Any) -> Any:
            if name in met:
                return await whole(self, *arguments)
            if is_after:
                await whole(self, *arguments)
            met.append(name)
            raise KeyError("a defect")

        monkeypatch.setattr(owner, name, broken)

    # The window and its changes are lost; the target commits, and the answer is lost.
    breaks_once(Worker, "_commit")
    breaks_once(TargetTransaction, "commit", is_after=True)
    breaks_once(BacklogGuard, "_judge")
    breaks_once(Journaling, "_open")
    breaks_once(TargetMonitor, "_check")
    async with stream(TABLES, group="max_retained_wal: 1GB", settings="workers: 1") as streamer:
        for number in range(1, 6):
            source.execute(
                f"insert into t values ({number}, 'x');"
                f" update t set v = v || 'y' where id < {number}"
            )
            await streamer.caught_up(SECONDS)

        async def have_met() -> bool:
            return len(met) == 5

        await streamer.eventually(have_met, SECONDS)
        source.execute("insert into u values (1, 'x')")
        await streamer.caught_up(SECONDS)
        rows = "select id, v from t order by 1"
        assert target.execute(rows) == source.execute(rows)
        assert target.execute("select id from u") == [(1,)]


async def test_a_defect_in_writing_a_journal_is_an_error_of_the_journal() -> None:
    async def broken() -> None:
        raise KeyError("a defect")

    task = asyncio.create_task(broken())
    await asyncio.wait([task])
    error = _error_of(task)
    assert isinstance(error, DefectError)
    assert "writing the journal: KeyError" in str(error)


async def test_a_spool_directory_that_a_cleaner_empties_is_made_again(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute(f"alter database {source.name} set logical_decoding_work_mem = '64kB'")
    async with stream(TABLES, settings="workers: 1") as streamer:
        await streamer.caught_up(SECONDS)
        with source.connect() as open_one:
            open_one.execute("begin")
            open_one.execute("insert into t select g, 'x' from generate_series(1, 20000) g")
            spools = streamer.settings.spool.path
            await asyncio.to_thread(shutil.rmtree, spools, ignore_errors=True)
            source.execute("insert into u values (1, 'one')")
            open_one.execute("insert into t select g, 'x' from generate_series(20001, 40000) g")
            open_one.execute("commit")
        source.execute(
            "begin; insert into u select g, repeat('x', 500) from"
            " generate_series(2, 40000) g; commit"
        )
        await streamer.caught_up(SECONDS)
        assert target.value("select count(*) from t") == 40000
        assert target.value("select count(*) from u") == 40000
