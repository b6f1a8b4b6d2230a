"""Requests of operators, as `streamer resync`, `pause` and `resume` make them."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from streamer.commands import table_requests as requests
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.process import command
from tests.support.streamer import MakeStreamer, Streamer

if TYPE_CHECKING:
    import subprocess


async def test_a_pattern_asks_for_all_of_its_tables_in_one_transaction(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    for name in ("a", "b", "c"):
        source.execute(f"create table {name} (id int primary key)")
        target.execute(f"create table {name} (id int primary key)")
    async with stream('"*": {initial: none}') as streamer:
        await streamer.caught_up(60)
    address = TargetAddress.parse(streamer.settings.target.url)
    asked = await requests.request(address, "resync", "*.*", database="shop", sid=None)
    assert len(asked.names) == 3
    found = target.execute("select count(*), count(distinct xmin::text) from streamer.request")
    assert found == [(3, 1)]


KEYED = "create table t (id int primary key, v text)"


async def run_beside(streamer: Streamer, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command beside the engine, which runs in this thread."""
    return await asyncio.to_thread(command, streamer.path, *arguments)


async def listed(streamer: Streamer, *arguments: str) -> list[dict[str, Any]]:
    result = await run_beside(streamer, "requests", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    requests: list[dict[str, Any]] = json.loads(result.stdout)["requests"]
    return requests


@pytest.mark.usefixtures("without_spark")
async def test_a_command_waits_for_the_outcome_of_its_request(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute(f"{KEYED}; insert into t select g, 'v' from generate_series(1, 9) g")
    async with stream("t:") as streamer:
        await streamer.caught_up()
        # WHEN a table is paused THEN the state is stored once the command ends
        paused = await run_beside(streamer, "pause", "t")
        (request,) = await listed(streamer)
        number = request["id"]
        assert paused.stdout.splitlines() == [
            f"pause requested: shop public.t, request {number}",
            "pause done: shop public.t",
        ]
        assert target.value("select state from streamer.relation") == "paused"
        assert (request["action"], request["state"], request["error"]) == ("pause", "done", None)
        assert request["actor"] == requests.command_actor()
        # AND `resync` ends once the copy has written the rows
        target.execute("update t set v = 'wrong'")
        copied = await run_beside(streamer, "resync", "t", "--json")
        (answer,) = json.loads(copied.stdout)["requests"]
        assert (copied.returncode, answer["state"]) == (0, "done")
        assert target.value("select count(*) from t where v = 'v'") == 9
        # AND `resync` prints the error of a copy that fails
        target.execute("alter table t add check (id < 9) not valid")
        failed = await run_beside(streamer, "resync", "t")
        assert failed.returncode == 4
        assert "resync failed: shop public.t: " in failed.stderr
        assert "t_id_check" in failed.stderr
        (last,) = await listed(streamer, str(answer["id"] + 1))
        assert (last["state"], last["error"] in failed.stderr) == ("failed", True)
        assert last["code"] == target.value("select error_code from streamer.relation")
        shown = (await run_beside(streamer, "requests")).stdout.splitlines()
        assert [line.split()[0] for line in shown[1:]] == [str(number + n) for n in range(3)]
        unknown = await run_beside(streamer, "requests", "999")
        assert (unknown.returncode, "has the number 999" in unknown.stderr) == (2, True)


@pytest.mark.usefixtures("without_spark")
async def test_without_a_process_or_a_wait_the_request_stays(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute(f"{KEYED}; insert into t values (1, 'v')")
    async with stream("t:") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        target.execute("update t set v = 'wrong'")
        # WHEN no process runs the source THEN the command says so, and the request stays
        waits = await run_beside(streamer, "resync", "t")
        assert waits.returncode == 0
        (request,) = await listed(streamer)
        assert request["state"] == "queued"
        assert f"request {request['id']} waits: no process runs source" in waits.stderr
        assert f"streamer requests {request['id']}" in waits.stderr
        streamer.start()

        async def is_done() -> bool:
            return bool((await listed(streamer))[0]["state"] == "done")

        await streamer.eventually(is_done)
        assert target.value("select v from t") == "v"
        # AND --no-wait ends before a process takes the request
        asked = await run_beside(streamer, "resync", "t", "--no-wait")
        (line,) = asked.stdout.splitlines()
        number = line.rpartition(" ")[2]
        assert line == f"resync requested: shop public.t, request {number}"
        await streamer.eventually(lambda: is_state(streamer, number, "done"))


async def is_state(streamer: Streamer, number: str, state: str) -> bool:
    (request,) = await listed(streamer, number)
    return bool(request["state"] == state)


async def test_a_request_that_cannot_be_fulfilled_says_why(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute("create table t (id int primary key, v text)")
    async with stream("t: {type: history}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
        # GIVEN a request that was made before changes were lost
        await run_beside(streamer, "resync", "t")
        target.execute("update streamer.relation set needs_resync = true, state = 'error'")
        streamer.start()

        async def is_refused() -> bool:
            return bool((await listed(streamer))[0]["state"] == "failed")

        await streamer.eventually(is_refused)
        (request,) = await listed(streamer)
        assert "are permanently missing" in request["error"]
        # AND a request about a table that leaves the mapping has failed, too
        await streamer.stop()
        await run_beside(streamer, "pause", "t")
        target.execute("delete from streamer.relation")
        assert (await listed(streamer))[-1]["error"] == "the table is no longer mapped"
