"""The source's disk is not filled by a target that is away, and nothing is lost by what prevents that."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamer.runtime import backlog
from tests.fault.test_kills import DDL, HISTORY, TABLES, assert_history, write
from tests.support.postgres import Database, assert_same
from tests.support.proxy import Proxy
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.timeout(180)

SPOOL = "max_retained_wal: 2MB\non_max_retained_wal: spool"


@pytest.fixture(autouse=True)
def tables(source: Database, target: Database) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    source.execute("create table filler (a text)")
    target.execute(DDL + HISTORY)


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MEASURE_SECONDS", 0.2)


@pytest.fixture
def target_proxy(target: Database) -> Iterator[Proxy]:
    with Proxy(target.server) as proxy:
        target.port = proxy.port
        yield proxy


def assert_equal(source: Database, target: Database) -> None:
    for table in ("keyed", "keyless", "whole"):
        assert_same(source, target, table)
    assert_history(source, target)


def fill(source: Database, megabytes: int = 1) -> None:
    """Make the source write WAL that is nobody's business."""
    for _ in range(megabytes):
        source.execute("insert into filler select repeat('x', 1000) from generate_series(1, 1000)")


def unconfirmed_bytes(source: Database) -> int:
    return int(
        str(
            source.value(
                "select pg_current_wal_flush_lsn() - confirmed_flush_lsn from pg_replication_slots"
                " where slot_name = 'streamer_shop'"
            )
        )
    )


def retained_bytes(source: Database) -> int:
    source.execute(
        "checkpoint"
    )  # where running transactions are written down, so the slot can move
    return int(
        str(
            source.value(
                "select pg_current_wal_flush_lsn() - restart_lsn from pg_replication_slots"
                " where slot_name = 'streamer_shop'"
            )
        )
    )


def journal_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "spool" / "journal").glob("*/*.journal"))


async def fill_until_spooling(streamer: Streamer, source: Database, tmp_path: Path) -> None:
    async def is_spooling() -> bool:
        if journal_files(tmp_path) and unconfirmed_bytes(source) < 1024 * 1024:
            return True
        await asyncio.to_thread(fill, source)
        return False

    for _ in range(300):
        if await is_spooling():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no journal is written")


async def done_with_journal(streamer: Streamer, tmp_path: Path) -> None:
    for _ in range(300):
        if not journal_files(tmp_path):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the journal stays\n{await streamer.dump()}")


async def test_the_source_keeps_little_while_the_target_is_away(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
) -> None:
    async with stream(TABLES, group=SPOOL) as streamer:
        await streamer.caught_up()
        await asyncio.to_thread(write, source, 0, 20)
        target_proxy.leave()
        await asyncio.to_thread(write, source, 20, 60)
        await fill_until_spooling(streamer, source, tmp_path)
        for n in range(60, 160, 20):
            await asyncio.to_thread(write, source, n, n + 20)
            await asyncio.to_thread(fill, source, 2)
        for _ in range(100):
            if retained_bytes(source) < 2 * 1024 * 1024:
                break
            await asyncio.sleep(0.2)
        assert retained_bytes(source) < 2 * 1024 * 1024

        target_proxy.heal()
        await streamer.caught_up(60)
        assert_equal(source, target)
        await done_with_journal(streamer, tmp_path)
        await asyncio.to_thread(write, source, 200, 220)
        await streamer.caught_up(60)
    assert_equal(source, target)
