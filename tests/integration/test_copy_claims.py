"""A part of a copy writes only if the process that planned the part holds the source's lock."""

import asyncio
from typing import Any

import pytest

from streamer.copy.parts.part_copier import CopyEnds, copy_parts
from streamer.copy.spark.launcher import SparkLauncher
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")


async def test_a_task_writes_only_under_its_claim_and_reads_only_from_the_server_of_the_stream(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1), (2)")
    target.execute("create table t (id int primary key)")
    submit = SparkLauncher.submit
    found: dict[str, tuple[str, int]] = {}

    async def copy(job: dict[str, Any], **changed: Any) -> tuple[str, int]:
        ends = CopyEnds.from_json(job["ends"] | changed)
        (task,) = job["tasks"]
        failures = await asyncio.to_thread(lambda: list(copy_parts(task, ends)))
        rows = target.execute("select id from t")
        return ", ".join(failure["kind"] for failure in failures), len(rows)

    async def orphan_first(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Copy like a task that outlived a process, before the valid task."""
        if len(found) < 5:  # the process may look at the token meanwhile, and begin again
            lock_class, source_id, pid, token = job["ends"]["fence"]
            # WHEN a second process has stored a token since the plan of this task
            target.execute("update streamer.source set lock_token = 'another'")
            found["taken over"] = await copy(job)
            target.execute(f"update streamer.source set lock_token = '{token}'")
            # OR a promoted standby has the token, and not the lock
            not_held = (lock_class, source_id, pid + 1, token)
            found["failed over"] = await copy(job, fence=not_held)
            # OR the source's url leads to a different server or timeline
            system_identifier, timeline, started = job["ends"]["server"]
            found["other source"] = await copy(job, server=("1", timeline, started))
            found["promoted source"] = await copy(
                job, server=(system_identifier, timeline + 1, started)
            )
            found["another standby"] = await copy(
                job, server=(system_identifier, timeline, started + 1)
            )
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", orphan_first)
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        # THEN the task writes no row, and the valid task copies all rows
        nothing = ("elsewhere", 0)
        assert found == {
            "taken over": nothing,
            "failed over": nothing,
            "other source": nothing,
            "promoted source": nothing,
            "another standby": nothing,
        }
        assert_same(source, target, "t")


async def test_a_copy_whose_tasks_reach_another_server_shows_that_and_ends_when_they_do_not(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key); insert into t values (1)")
    submit = SparkLauncher.submit
    is_astray = True

    async def lead_astray(self: SparkLauncher, job: dict[str, Any]) -> list[dict[str, Any]]:
        if is_astray:
            job["ends"]["server"] = ("1", 1, 1)
        return await submit(self, job)

    monkeypatch.setattr(SparkLauncher, "submit", lead_astray)
    async with stream("t:") as streamer:

        async def is_shown() -> bool:
            tables = (await streamer.status())["tables"]
            return any("check that the Spark workers reach" in (t["error"] or "") for t in tables)

        await streamer.eventually(is_shown, 60)
        is_astray = False
        await streamer.caught_up(60)
        assert_same(source, target, "t")
