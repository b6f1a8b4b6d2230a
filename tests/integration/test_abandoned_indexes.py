"""streamer restores the deferred indexes of several copies, although one copy never ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamer.copy.spark.launcher import SparkLauncher
from streamer.indexes import index_restorer
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

INDEXES = "select indexname::text from pg_indexes where tablename = 't' order by 1"
STATES = "select sid, r.state from streamer.relation r join streamer.source s on s.id = r.source_id"
PUT_OFF = "select count(*) from streamer.deferred_index"


def read_states(target: Database) -> dict[str, str]:
    return {str(sid): str(state) for sid, state in target.execute(STATES)}


async def drop_the_table(streamer: Streamer, source: Database) -> None:
    await asyncio.to_thread(source.execute, "drop table t")


async def unmap_the_source(streamer: Streamer, source: Database) -> None:
    await streamer.apply()


@pytest.mark.parametrize("give_up", [drop_the_table, unmap_the_source])
async def test_a_copy_that_is_given_up_leaves_no_table_without_indexes(
    give_up: Any,
    tmp_path: Path,
    source: Database,
    second: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_restorer, "CHECK_SECONDS", 0.3)
    sources = {"eu": source, "us": second}
    for each in sources.values():
        each.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    target.execute(
        "create table t (sid text, id int, v text, primary key (sid, id)); create index on t (v)"
    )
    submit, jobs, may_go_on = SparkLauncher.submit, list[int](), asyncio.Event()

    async def submit_late(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Let the first source copy as both fill the table, and the second source later."""
        jobs.append(len(jobs))
        if jobs[-1]:
            await may_go_on.wait()
        await until(lambda: len(jobs) > 1)
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", submit_late)
    async with stream("t:", sid="eu", others={"us": second}) as streamer:
        await until(lambda: "ready" in read_states(target).values())
        states = read_states(target)
        ready = min(states, key=lambda sid: states[sid] != "ready")
        (other,) = states.keys() - {ready}
        assert states[other] == "copying"
        assert target.value(PUT_OFF) == 3, "the indexes and autovacuum wait for the other source"
        # WHEN the second source's copy is given up
        write_config(tmp_path / "config.yaml", sources[ready], target, "t:", sid=ready)
        await give_up(streamer, sources[other])
        may_go_on.set()
        # THEN the table has all indexes
        await until(lambda: target.value(PUT_OFF) == 0)
        assert target.execute(INDEXES) == [("t_pkey",), ("t_v_idx",)]
