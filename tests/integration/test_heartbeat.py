"""Heartbeats: the delay of a commit until it is visible, also at an idle source."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from streamer.commands.check.check import check
from streamer.commands.table_requests import request
from streamer.report.problems import Severity
from streamer.runtime import heartbeat as heartbeats
from streamer.runtime.session import stored_position
from tests.support.postgres import Database, database, running, versions
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

TABLE = "t: {initial: none}"
FAST = "heartbeat_interval: 0.2"


@pytest.fixture
def role(source: Database) -> Iterator[str]:
    """A role that may replicate."""
    name = f"beatless_{os.getpid()}"
    source.execute(f"create role {name} login replication")
    yield name
    source.execute(f"drop owned by {name} cascade; drop role {name}")


@pytest.fixture(autouse=True)
def table(source: Database, target: Database) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key)")


def heartbeat(s: Streamer) -> float | None:
    for supervisor in s.engine.supervisors:
        if supervisor.pipeline is not None:
            return supervisor.pipeline.heartbeat.seconds
    return None


async def test_an_idle_source_tells_how_long_a_commit_takes(
    stream: MakeStreamer, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_position, "STORE_SECONDS", 0.5)
    async with stream(TABLE, settings=FAST) as s:
        await s.caught_up()

        async def beats() -> bool:
            return 0 < (heartbeat(s) or 0) < 5

        await s.eventually(beats)

        async def is_told() -> bool:
            return (await s.status())["heartbeat_seconds"] is not None

        await s.eventually(is_told, 30)
        status = await s.status()
        assert 0 <= status["heartbeat_seconds"] < 5
        metrics = {
            (sample.name, sample.labels.get("state")): sample.value
            for metric in s.engine.metrics.registry.collect()
            for sample in metric.samples
        }
        assert metrics["streamer_heartbeat_seconds", None] < 5
        assert metrics["streamer_source_state", "streaming"] == 1
        assert metrics["streamer_source_state", "error"] == 0


async def test_a_position_moved_only_by_heartbeats_is_stored_rarely_and_counts_as_caught_up(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    async with stream(TABLE, settings=FAST) as s:
        await s.caught_up()
        pipeline = s.engine.supervisors[0].pipeline
        assert pipeline is not None
        assert pipeline.session is not None
        stored = pipeline.session.position
        await until(lambda: not stored.is_due_soon, "nobody waits for a position any more")
        seen: set[object] = set()
        beats: set[float | None] = set()

        async def has_beaten_often() -> bool:
            seen.add(stored.stored_at)
            beats.add(s.engine.supervisors[0].pipeline.heartbeat.arrived_seconds)  # type: ignore[union-attr]
            return len(beats) > 12

        await s.eventually(has_beaten_often, 60)
        # Further tests use the server as well, so streamer stores some positions, but far from all.
        assert len(seen) <= len(beats) / 2
        await s.caught_up()  # `wait` still answers
        status = await s.status()
        assert status["lag_bytes"] < 100_000
        source.execute("insert into t values (1)")
        await s.caught_up()


async def test_a_stream_that_stands_still_shows_for_how_long_and_is_not_written_to(
    stream: MakeStreamer, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_position, "STORE_SECONDS", 0.5)
    monkeypatch.setattr(heartbeats, "OVERDUE_SECONDS", 2.0)
    async with stream(TABLE, settings=FAST) as s:
        await s.caught_up()
        await request(s.engine._address, "pause", "t", database=None, sid=None)
        await s.table_state("public.t", "paused")
        source.execute("insert into t values (1)")

        async def is_overdue() -> bool:
            return bool(((await s.status())["heartbeat_seconds"] or 0) > 3)

        await s.eventually(is_overdue)
        assert (heartbeat(s) or 0) > 3
        await request(s.engine._address, "resume", "t", database=None, sid=None)

        async def is_well() -> bool:
            return bool((await s.status())["heartbeat_seconds"] < 3)

        await s.eventually(is_well)
        await s.caught_up()


@pytest.mark.parametrize(
    ("settings", "group"),
    [("heartbeat_interval: 0", ""), (FAST, "heartbeat_interval: 0")],
)
async def test_heartbeats_can_be_off(
    stream: MakeStreamer, source: Database, settings: str, group: str
) -> None:
    async with stream(TABLE, settings=settings, group=group) as s:
        await s.caught_up()
        source.execute("insert into t values (1)")
        await s.caught_up()
        assert heartbeat(s) is None
        assert (await s.status())["heartbeat_seconds"] is None


async def test_a_role_without_the_privilege_streams_without_heartbeats(
    role: str, stream: MakeStreamer, source: Database, target: Database
) -> None:
    signature = "boolean, text, text"
    if int(str(source.value("show server_version_num"))) >= 17_00_00:
        signature += ", boolean"
    source.execute(
        f"revoke execute on function pg_logical_emit_message({signature}) from public;"
        f"grant create on database {source.name} to {role}; alter table t owner to {role}"
    )
    source.url_user = role
    with capture_logs() as logs:
        async with stream(TABLE, settings=FAST) as s:
            await s.caught_up()
            source.execute("insert into t values (1)")
            await s.caught_up()
            assert heartbeat(s) is None
    (line,) = [line for line in logs if line["event"] == "heartbeats are off"]
    assert line["source"] == "shop"
    (finding,) = [f for f in (await check(s.settings, s.mapping)).findings if "emit" in str(f)]
    assert finding.severity is Severity.INFO
    assert finding.fix is not None
    source.execute(";".join(finding.fix.sql))
    async with stream(TABLE, settings=FAST) as s:

        async def beats() -> bool:
            return heartbeat(s) is not None

        await s.eventually(beats)


async def test_a_source_with_heartbeats_stops_fast(
    tmp_path: Path, server_directory: Path, target: Database
) -> None:
    """A fast stop waits until all is acknowledged, heartbeats included."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(server_directory / "heartbeat", versions()["16"]))
        source = stack.enter_context(database(server, "source"))
        source.execute("create table t (id int primary key)")
        path = tmp_path / "config.yaml"
        write_config(path, source, target, TABLE, settings=FAST)
        s = Streamer(path)
        s.start()
        try:
            await s.caught_up()

            async def beats() -> bool:
                return heartbeat(s) is not None

            await s.eventually(beats)
            began = asyncio.get_running_loop().time()
            await asyncio.to_thread(server.stop, "fast")
            assert asyncio.get_running_loop().time() - began < 10
            server.start()
            source.execute("insert into t values (1)")
            await s.caught_up(40)
        finally:
            await s.stop()
    assert target.value("select count(*) from t") == 1
