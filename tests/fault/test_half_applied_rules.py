"""The rules of a reload take effect together: no crash or error in between loses changes."""

import asyncio
import contextlib
from typing import Any

import pytest

from streamer.bookkeeping.registered_relations import register_relations
from streamer.bookkeeping.relation_records import RelationRecord
from streamer.errors.error_classes import StreamerError, TargetRejectedError
from streamer.runtime.guards import source_monitor
from streamer.runtime.session import reload_mapping
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

TABLES = "create table t (id int primary key, v text); create table u (id int primary key)"
FORMER = "t: {}\nu: {}"
NEW = 't: {set: {v: "upper(v)"}}'
STORED = "select acknowledged_lsn >= '{}'::pg_lsn from streamer.source"


@pytest.mark.parametrize("end", ["no error", "error", "kill"])
async def test_a_table_that_leaves_and_returns_loses_no_change(
    end: str,
    stream: MakeStreamer,
    source: Database,
    target: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The guard would unpublish `u` meanwhile. The next start would then stop `u`, with a message.
    monkeypatch.setattr(source_monitor, "GUARD_SECONDS", 60.0)
    source.execute(TABLES)
    async with stream(FORMER) as streamer:
        await streamer.caught_up()
        reached = asyncio.Event()

        async def register(*args: Any, **options: Any) -> list[RelationRecord]:
            """Act after `u` has left the stream and before the bookkeeping forgets `u`."""
            monkeypatch.setattr(reload_mapping, "register_relations", register_relations)
            source.execute("insert into u values (1); insert into t values (1, 'a')")
            stored = STORED.format(source.value("select pg_current_wal_insert_lsn()"))
            (supervisor,) = streamer.engine.supervisors
            supervisor.store_position()
            # Without a fault, the position stays before the changes for the whole second.
            with contextlib.suppress(AssertionError):
                await until(lambda: target.value(stored), seconds=1)
            reached.set()
            if end == "error":
                raise TargetRejectedError("permission denied")
            if end == "kill":
                await asyncio.Event().wait()
            return await register_relations(*args, **options)

        monkeypatch.setattr(reload_mapping, "register_relations", register)
        write_config(streamer.path, source, target, NEW)
        applying = asyncio.create_task(streamer.apply())
        await reached.wait()
        if end == "kill":
            await streamer.kill()
            applying.cancel()
        with contextlib.suppress(StreamerError, asyncio.CancelledError):
            await applying
        if end != "kill":
            await streamer.caught_up()
            assert target.execute("select v from t") == [("A",)], "all rules are new"
            await streamer.stop()
        # WHEN the operator takes the rules back
        write_config(streamer.path, source, target, FORMER)
        again = Streamer(streamer.path)
        again.start()
        try:
            await again.caught_up()
            await again.table_state("public.u", "ready")
            assert_same(source, target, "t")
            assert_same(source, target, "u")
        finally:
            await again.stop()


async def test_an_attempt_that_ends_ends_the_reload(
    stream: MakeStreamer, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(TABLES)
    async with stream(FORMER) as streamer:
        await streamer.caught_up()
        (supervisor,) = streamer.engine.supervisors
        with target.connect() as locking:
            locking.execute("begin; lock table u in share mode")
            source.execute("insert into u values (1)")
            waits = "select exists (select from pg_locks where not granted)"

            async def is_waiting() -> bool:
                return bool(target.value(waits))

            await streamer.eventually(is_waiting)
            write_config(streamer.path, source, target, NEW)
            applying = asyncio.create_task(streamer.apply())

            async def has_left() -> bool:
                pipeline = supervisor.pipeline
                assert pipeline is not None
                assert pipeline.session is not None
                return len(list(pipeline.session.relations)) == 1

            await streamer.eventually(has_left)
            source.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots"
                " where database = current_database()"
            )
            pipeline = supervisor.pipeline
            assert pipeline is not None
            await supervisor.until_ended(pipeline)
            async with asyncio.timeout(15):
                await applying
            locking.execute("commit")
        source.execute("insert into t values (1, 'a')")
        await streamer.caught_up()
        assert target.execute("select v from t") == [("A",)]
        write_config(streamer.path, source, target, FORMER)
        await streamer.apply()
        await streamer.caught_up()
        await streamer.table_state("public.u", "ready")
        assert_same(source, target, "u")
