"""Networks that cut, lose, delay and swallow, between the program and either server."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from streamer.errors.error_classes import TargetConnectionError
from streamer.postgres.secret import Secret
from streamer.source.stream import feedback
from streamer.target import silent_server as watch
from streamer.target.connection import TargetAddress, TargetConnection
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database
from tests.support.process import Process, status
from tests.support.proxy import Proxy, Way
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.usefixtures("short_backoffs")


@pytest.fixture(autouse=True)
def tables(source: Database, target: Database) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    target.execute(DDL + HISTORY)


def error_count(streamer: Streamer, code: str) -> float:
    labels = {"database": "shop", "sid": "", "code": code}
    return streamer.engine.metrics.registry.get_sample_value("streamer_errors_total", labels) or 0


async def test_a_source_that_is_cut_anywhere(
    source: Database, target: Database, source_proxy: Proxy, stream: MakeStreamer
) -> None:
    chance = random.Random(1)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        for n in range(12):
            source_proxy.cut_after(chance.randrange(1, 8000), Way.BACK)
            await asyncio.to_thread(write, source, n * 10, n * 10 + 10)
        source_proxy.heal()
        await streamer.caught_up()
        assert error_count(streamer, "source_down") > 0
    assert_equal(source, target)


@pytest.mark.parametrize("consistency", ["table", "transaction"])
async def test_a_target_that_is_cut_in_place_of_its_answer(
    source: Database, target: Database, target_proxy: Proxy, stream: MakeStreamer, consistency: str
) -> None:
    """The target commits, and the answer is lost: for changes and bookkeeping alike."""
    settings = f"consistency: {consistency}\nworkers: 2\ncommit_interval: 0.02"
    first = 0

    async def write_more(count: int) -> None:
        nonlocal first
        await asyncio.to_thread(write, source, first, first + count)
        first += count

    async def loses_no_more() -> bool:
        # A worker may write all these transactions in a commit; some modes need several.
        if not target_proxy.is_answering:
            await write_more(1)
        return target_proxy.is_answering

    async with stream(TABLES, settings=settings) as streamer:
        await streamer.caught_up()
        for n in range(8):
            execute = b"E\0\0\0\x09\0\0\0\0\0"  # of a statement that commits without BEGIN
            target_proxy.lose_answers(b"commit\0" if n % 2 else execute, times=3)
            await write_more(10)
            await streamer.eventually(loses_no_more)
        await streamer.caught_up()
        assert target_proxy.answers_lost >= 20
        assert error_count(streamer, "fenced") == 0
    assert_equal(source, target)


async def test_a_target_that_is_cut_anywhere(
    source: Database, target: Database, target_proxy: Proxy, stream: MakeStreamer
) -> None:
    chance = random.Random(2)
    async with stream(TABLES, settings="commit_interval: 0.02") as streamer:
        await streamer.caught_up()
        for n in range(12):
            target_proxy.cut_after(chance.randrange(1, 20_000), chance.choice(list(Way)))
            await asyncio.to_thread(write, source, n * 10, n * 10 + 10)
        target_proxy.heal()
        await streamer.caught_up()
    assert_equal(source, target)


async def test_a_source_that_swallows_everything_is_noticed(
    source: Database,
    target: Database,
    source_proxy: Proxy,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feedback, "SILENCE_SECONDS_MIN", 0.5)
    monkeypatch.setattr(feedback, "STATUS_SECONDS_MAX", 0.2)
    source.parameters = "connect_timeout=2"
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        source_proxy.blackhole()
        write(source, 0, 20)
        await streamer.eventually(lambda: is_waiting(streamer))
        source_proxy.heal()
        await streamer.caught_up()
    assert_equal(source, target)


async def is_waiting(streamer: Streamer) -> bool:
    return streamer.engine.supervisors[0].health.state == "waiting"


async def test_a_target_that_swallows_everything_is_noticed(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program gives up silent connections and their locks, although no connection is ever
    closed.
    """
    monkeypatch.setattr(watch, "CHECK_SECONDS", 0.3)
    target.parameters = "connect_timeout=2"
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        write(source, 0, 10)
        await streamer.caught_up()
        target_proxy.swallow()  # connections there are now are dead for good
        write(source, 10, 20)
        await streamer.caught_up(40)
    assert_equal(source, target)


@pytest.mark.parametrize("end", ["terminate", "reset"])
async def test_a_copy_that_waits_to_send_ends_with_its_connection(
    target: Database, target_proxy: Proxy, end: str
) -> None:
    """A worker breaks off a slow window, or the network does. Neither leaves the worker waiting."""
    target.execute("create table filled (v text)")
    connection = await TargetConnection.connect(TargetAddress.parse(Secret(target.url)), "copy")

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"v" * 65536 + b"\n"

    target_proxy.blackhole()
    copying = asyncio.create_task(connection.copy_in("filled", ["v"], chunks(), namespace="public"))
    seen = 0

    def is_waiting() -> bool:
        nonlocal seen
        before, seen = seen, connection._watch.progress
        return bool(seen) and seen == before and connection._unsent_bytes() > 0

    await until(is_waiting, "the connection waits")
    if end == "terminate":
        connection.terminate()
    else:
        target_proxy.cut(reset=True)
    async with asyncio.timeout(10):
        with pytest.raises(TargetConnectionError):
            await copying


async def test_keepalives_are_answered_while_the_target_does_not_answer(
    source: Database, target: Database, target_proxy: Proxy, stream: MakeStreamer
) -> None:
    source.parameters = "options=-c%20wal_sender_timeout%3D2s"
    walsender = (
        "select pid from pg_stat_replication where application_name like 'streamer shop%'"
        " and pid in (select active_pid from pg_replication_slots where database = current_database())"
    )

    def outlives_the_timeout() -> Callable[[], Awaitable[bool]]:
        """Return a condition: a walsender had a reply later than twice the timeout from now."""
        (now,) = source.execute("select clock_timestamp()")
        heard = f"select bool_or(reply_time > '{now[0]}'::timestamptz + '4s') from pg_stat_replication where application_name like 'streamer shop%'"

        async def is_heard_of() -> bool:
            return bool(source.value(heard))

        return is_heard_of

    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        before = source.execute(walsender)
        target_proxy.blackhole()
        write(source, 0, 20)
        await streamer.eventually(outlives_the_timeout())
        assert source.execute(walsender) == before
        target_proxy.heal()
        await streamer.caught_up()
        target_proxy.delay(0.1)
        write(source, 20, 40)
        await streamer.eventually(outlives_the_timeout())
        assert source.execute(walsender) == before
        target_proxy.heal()
        await streamer.caught_up()
    assert_equal(source, target)


@pytest.mark.parametrize("side", ["source", "target"])
def test_it_stops_in_time_while_a_server_does_not_answer(
    side: str,
    tmp_path: Path,
    source: Database,
    target: Database,
    source_proxy: Proxy,
    target_proxy: Proxy,
) -> None:
    config = tmp_path / "config.yaml"
    write_config(config, source, target, TABLES)
    with Process(config) as process:
        eventually(lambda: status_is_streaming(config, source_proxy, target_proxy))
        write(source, 0, 10)
        (source_proxy if side == "source" else target_proxy).blackhole()
        write(source, 10, 20)
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert (
            time.monotonic() - began < 25
        )  # the documentation promises ten; this machine may be busy
    source_proxy.heal()
    target_proxy.heal()
    with Process(config) as process:
        eventually(lambda: is_equal(source, target))
        assert process.terminate() == 0
    assert_equal(source, target)


def status_is_streaming(config: Path, *_: Proxy) -> bool:
    return bool(status(config)[0]["state"] == "streaming")


def is_equal(source: Database, target: Database) -> bool:
    try:
        assert_equal(source, target)
    except AssertionError:
        return False
    return True
