"""The snapshot of a copy ends at the source with the last part that reads there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamer.bookkeeping import deferred_indexes
from streamer.copy import finish_copies, reach_point
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes", "short_backoffs")

TABLE = "create table t (id int primary key, v int);"
FILL = "insert into t select g, g from generate_series(1, 100) g"


async def is_released(source: Database) -> bool:
    """Whether no copy holds a snapshot at the source."""
    return not source.value(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'streamer snapshot'"
    )


@contextlib.asynccontextmanager
async def locked(target: Database, mode: str = "share") -> AsyncIterator[None]:
    """Hold a lock on the target table meanwhile."""
    with target.connect() as connection, connection.transaction():
        connection.execute(f"lock table t in {mode} mode".encode())
        yield


async def test_the_snapshot_ends_before_indexes_are_built_at_the_target(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute(TABLE + FILL)
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    restore = deferred_indexes.restore_indexes

    async def restore_late(*arguments: Any, **options: Any) -> None:
        begun.set()
        await may_go_on.wait()
        await restore(*arguments, **options)

    monkeypatch.setattr(finish_copies, "restore_indexes", restore_late)
    async with stream("t:") as streamer:
        await asyncio.wait_for(begun.wait(), 60)
        await streamer.eventually(lambda: is_released(source))
        may_go_on.set()
        await streamer.caught_up()
        assert_same(source, target, "t")


async def waits_at(streamer: Streamer, target: Database) -> None:
    """Wait until the exchange waits for a lock."""

    async def is_so() -> bool:
        return bool(
            target.value(
                "select count(*) from pg_locks l join pg_stat_activity a using (pid)"
                " where not granted and application_name ~ '^streamer (sync|copy)'"
            )
        )

    await streamer.eventually(is_so)


async def test_the_snapshot_ends_before_an_exchange_waits_for_a_lock(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE + FILL)
    async with stream("t:") as streamer:
        await streamer.caught_up()
        async with locked(target):
            await streamer.ask("resync")
            await waits_at(streamer, target)
            await streamer.eventually(lambda: is_released(source))
        await streamer.caught_up()
        assert_same(source, target, "t")


@pytest.mark.parametrize("options", [{"mode": "diff"}, {"scope": {"where": ["id < 50"]}}])
async def test_a_snapshot_does_not_wait_long_for_changes_that_the_target_cannot_take(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    options: Any,
) -> None:
    monkeypatch.setattr(reach_point, "SNAPSHOT_SECONDS", 0.5)
    source.execute(TABLE + FILL)
    async with stream("t:") as streamer:
        await streamer.caught_up()
        async with locked(target):
            source.execute("update t set v = 0 where id = 7")
            await streamer.ask("resync", **options)

            async def is_left() -> bool:
                return "begins again" in str((await streamer.table("public.t"))["error"])

            await streamer.eventually(is_left)
        target.execute("update t set v = -1 where id = 9")
        await streamer.caught_up()
        assert_same(source, target, "t")
