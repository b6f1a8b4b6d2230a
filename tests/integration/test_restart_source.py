"""`streamer sources restart`: a source begins again, by itself."""

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.process import command
from tests.support.streamer import MakeStreamer, Streamer

if TYPE_CHECKING:
    import subprocess

TABLE = "create table t (id int primary key, v text)"


async def restart(
    streamer: Streamer, source: str, *options: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command beside the engine, which runs in this thread."""
    return await asyncio.to_thread(command, streamer.path, "sources", "restart", source, *options)


def walsender(source: Database) -> int:
    pid = source.value(
        "select active_pid from pg_replication_slots where database = current_database()"
    )
    assert isinstance(pid, int)
    return pid


async def test_one_source_begins_again_and_the_other_continues(
    stream: MakeStreamer, source: Database, second: Database, target: Database
) -> None:
    for db in (source, second):
        db.execute(TABLE)
    target.execute("create table t (sid text, id int, v text, primary key (sid, id))")
    async with stream("t: {initial: none}", sid="a", others={"b": second}) as streamer:
        await streamer.caught_up()
        sessions = walsender(source), walsender(second)
        source.execute("insert into t values (1, 'before')")
        # WHEN the command ends THEN the source streams over new sessions
        done = await restart(streamer, "shop:a")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1] == "restart done: shop:a"
        assert walsender(source) != sessions[0]
        assert walsender(second) == sessions[1], "the other source continues"
        for db in (source, second):
            db.execute("insert into t values (2, 'after')")
        await streamer.caught_up()
        rows = target.execute("select sid, id, v from t order by 1, 2")
        assert rows == [("a", 1, "before"), ("a", 2, "after"), ("b", 2, "after")]
        # AND a name that is no source names the sources
        unknown = await restart(streamer, "shop")
        assert unknown.returncode == 2
        assert 'no source "shop" is streamed' in unknown.stderr
        assert "shop:a, shop:b" in unknown.stderr
        listed = await restart(streamer, "shop:b", "--json")
        (request,) = json.loads(listed.stdout)["requests"]
        assert (request["action"], request["table"], request["state"]) == (
            "restart",
            "shop:b",
            "done",
        )


async def test_a_start_that_fails_is_the_outcome(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(TABLE)
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        ((slot,),) = source.execute(
            "select slot_name from pg_replication_slots where database = current_database()"
        )
        source.execute(f"select pg_drop_replication_slot('{slot}')")
        streamer.start()
        await streamer.source_state("error")
        failed = await restart(streamer, "shop")
        assert failed.returncode == 4
        assert "restart failed: shop: " in failed.stderr
        assert str(slot) in failed.stderr


@pytest.mark.follows("commands.request_outcomes:_withdraw_restarts")
async def test_without_a_process_nothing_stays_queued(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(TABLE)
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        absent = await restart(streamer, "shop")
        assert absent.returncode == 4
        assert 'restart failed: shop: no process runs source "shop"; to stream it' in absent.stderr
        remedy = str(target.value("select error_remedy from streamer.request"))
        assert "streamer run" in remedy
        # GIVEN a restart whose process was killed before the next attempt
        target.execute(
            "update streamer.request set state = 'taken', error = null, error_code = null"
        )
        source.execute("insert into t values (1, 'while stopped')")
        streamer.start()
        await streamer.caught_up()

        async def is_done() -> bool:
            return target.value("select state from streamer.request") == "done"

        await streamer.eventually(is_done)
        assert_same(source, target, "t")


async def test_a_source_whose_start_waits_says_so_at_once(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    for db in (source, target):
        db.execute(TABLE)
    with source.connect() as application:
        application.execute("begin; insert into t values (1, 'open')")
        async with stream("t: {initial: none}") as streamer:

            async def waits() -> bool:
                (status,) = await streamer.statuses()
                return bool(status["waiting_for"])

            await streamer.eventually(waits)
            late = await restart(streamer, "shop")
            assert late.returncode == 1
            assert 'source "shop" is starting, and waits for pid' in late.stderr
            # WHEN the start ends THEN the request has ended, too
            application.execute("commit")
            await streamer.caught_up()

            async def is_done() -> bool:
                return target.value("select state from streamer.request") == "done"

            await streamer.eventually(is_done)
