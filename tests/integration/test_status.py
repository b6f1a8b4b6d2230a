"""The status of copies and of held changes, from the databases alone."""

import asyncio
from typing import Any

import pytest

from streamer.bookkeeping.requests import Request
from streamer.bookkeeping.taken_requests import take_requests
from streamer.commands.table_requests import request
from streamer.runtime.session import operator_requests as requests_task
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer


async def ask(s: Streamer, action: str, table: str) -> None:
    address = s.engine._address
    await request(address, action, table, database=None, sid=None)


def the(table: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(table[name] for name in names)


async def test_a_copy_shows_how_far_it_is_while_its_rows_are_not_yet_committed(
    stream: MakeStreamer, without_spark: None, source: Database
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("insert into t select n, repeat('x', 100) from generate_series(1, 6000) n")
    source.execute("analyze t")

    async with stream("t:", settings="sync: {rows_per_second: 4000, jobs: 4}") as s:

        async def is_half_way() -> bool:
            tables = (await s.status())["tables"]
            return bool(tables) and 0 < tables[0]["rows_copied"] < 6000

        await s.eventually(is_half_way)
        table = await s.table("public.t")
        assert the(table, "state", "rows_total") == ("copying", 6000)
        assert 0 < table["bytes_copied"] <= table["bytes_total"]
        assert table["rows_per_second"] > 0
        assert table["seconds_left"] > 0

        await s.table_state("public.t", "ready")
        table = await s.table("public.t")
        assert the(table, "rows_copied", "rows_total") == (6000, 6000)
        assert table["bytes_copied"] == table["bytes_total"] > 600_000
        assert the(table, "rows_per_second", "seconds_left") == (None, None)


async def test_held_changes_of_a_paused_table_are_shown_until_it_is_resumed(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, v text)")
        db.execute("create table u (id int primary key)")
    async with stream("t: {initial: none}\nu: {initial: none}") as s:
        await s.caught_up()
        await ask(s, "pause", "t")
        await s.table_state("public.t", "paused")
        source.execute("insert into t select n, repeat('x', 1000) from generate_series(1, 50) n")
        source.execute("insert into u select generate_series(1, 5)")

        async def is_held() -> bool:
            return bool((await s.table("public.t"))["held_changes"] == 50)

        await s.eventually(is_held)
        table = await s.table("public.t")
        assert 50_000 < table["held_bytes"] < 60_000
        assert table["retained_wal_bytes"] > 50_000
        assert the(await s.table("public.u"), "held_changes", "retained_wal_bytes") == (0, 0)
        # Unchanged values are not written again.
        written = target.value("select xmin::text from streamer.held")
        source.execute("insert into u values (6)")

        async def is_there() -> bool:
            return target.value("select count(*) from u") == 6

        await s.eventually(is_there)
        assert target.value("select xmin::text from streamer.held") == written

        # Without a process, no change is held, despite the last report.
        await s.kill()

        async def is_gone() -> bool:
            return bool((await s.table("public.t"))["held_changes"] == 0)

        await s.eventually(is_gone)
        assert target.value("select changes from streamer.held") == 50

        s.start()
        await ask(s, "resume", "t")
        await s.caught_up()

        async def is_forgotten() -> bool:
            return target.value("select count(*) from streamer.held") == 0

        await s.eventually(is_forgotten)
    assert target.value("select count(*) from t") == 50


async def test_a_commit_after_the_state_paused_is_shown_is_held(
    stream: MakeStreamer, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the program takes to go on from having said so."""
    for db in (source, target):
        db.execute("create table t (id int primary key); create table u (id int primary key)")
    may_go_on = asyncio.Event()

    async def slow(*arguments: Any) -> list[Request]:
        requests = await take_requests(*arguments)
        if requests:
            await may_go_on.wait()
        return requests

    monkeypatch.setattr(requests_task, "take_requests", slow)
    async with stream("t: {initial: none}\nu: {initial: none}") as s:
        await s.caught_up()
        await ask(s, "pause", "t")
        await s.table_state("public.t", "paused")
        source.execute("insert into t values (1); insert into u values (1)")

        async def is_there() -> bool:
            return target.value("select count(*) from u") == 1

        await s.eventually(is_there)
        assert target.value("select count(*) from t") == 0
        may_go_on.set()
        await ask(s, "resume", "t")
        await s.caught_up()
        assert target.value("select count(*) from t") == 1


@pytest.mark.parametrize("state", ["starting", "waiting"])
async def test_a_process_that_was_killed_while_it_waited_is_shown_as_stopped(
    state: str, stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as s:
        await s.caught_up()
        await s.kill()
        target.execute(
            f"update streamer.source set state = '{state}', waiting_for = 'a password',"
            " error = 'no answer', error_code = 'source_down'"
        )

        async def is_stopped() -> bool:
            return bool((await s.status())["state"] == "stopped")

        await s.eventually(is_stopped)
        status = await s.status()
        assert the(status, "error", "error_code", "waiting_for") == (None, None, None)
