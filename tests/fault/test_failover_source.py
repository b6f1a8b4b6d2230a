"""The source fails over to a standby: streaming goes on, or stops where a hole would be."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import Database, running, versions
from tests.support.standby import OnEither, Standby, standby
from tests.support.streamer import Streamer, write_config

SECONDS = 60.0
DDL = "create table t (id int primary key)"


@pytest.fixture
def pair(tmp_path: Path, server_directory: Path) -> Iterator[tuple[OnEither, Standby]]:
    own = server_directory / tmp_path.name
    with running(own / "first", versions()["18"]) as first:
        first.execute("create database shop")
        first.execute(DDL, "shop")
        with standby(first, own / "second") as second:
            yield OnEither(first, second, "shop"), second


def configured(directory: Path, source: Database, target: Database, group: str = "") -> Streamer:
    path = directory / "config.yaml"
    write_config(path, source, target, "t: {initial: none}", group=group)
    return Streamer(path)


async def test_a_failover_slot_lets_streaming_go_on(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    source, second = pair
    target.execute(DDL)
    # A slot that was made without it becomes one.
    streamer = configured(tmp_path, source, target)
    streamer.start()
    await streamer.caught_up(SECONDS)
    await streamer.stop()
    is_failover = "select failover from pg_replication_slots where slot_name = 'streamer_shop'"
    assert source.value(is_failover) is False
    streamer = configured(tmp_path, source, target, "failover: true")
    streamer.start()
    try:
        source.execute("insert into t values (1)")
        await streamer.caught_up(SECONDS)
        assert source.value(is_failover) is True
        async with asyncio.timeout(SECONDS):
            while not await asyncio.to_thread(second.has_slot, "streamer_shop"):
                source.execute("select pg_log_standby_snapshot()")
                await streamer.caught_up(SECONDS)
        source.execute("insert into t values (2)")
        await asyncio.to_thread(second.wait)
        source.server.kill()
        await asyncio.to_thread(second.promote)
        second.execute("insert into t values (3)", "shop")
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t order by 1") == [(1,), (2,), (3,)]
    finally:
        await streamer.stop()


async def test_a_slot_that_was_made_behind_the_fork_is_no_way_on(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    """The acknowledged position followed keepalives to where the new primary's slot begins."""
    source, second = pair
    target.execute(DDL)
    streamer = configured(tmp_path, source, target)
    streamer.start()
    await streamer.caught_up(SECONDS)
    source.execute("insert into t values (1)")
    await streamer.caught_up(SECONDS)
    await asyncio.to_thread(second.cut)
    source.execute("select pg_switch_wal(); create table unmapped (); select pg_switch_wal()")
    await streamer.caught_up(SECONDS)
    await streamer.stop()
    source.server.kill()
    second.promote()
    second.execute("insert into t values (2)", "shop")
    second.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')", "shop")
    for _ in range(4):
        second.execute("insert into t select max(id) + 1 from t; select pg_switch_wal()", "shop")
    streamer = configured(tmp_path, source, target)
    streamer.start()
    try:

        async def is_told() -> bool:
            supervisors = streamer.engine.supervisors
            return bool(supervisors) and supervisors[0].failure is not None

        await streamer.eventually(is_told, SECONDS)
        error = str(streamer.engine.supervisors[0].failure)
        assert "ahead of" in error
        assert "streamer resync '*.*' --database shop" in error
        assert target.execute("select id from t") == [(1,)]
    finally:
        await streamer.stop()
