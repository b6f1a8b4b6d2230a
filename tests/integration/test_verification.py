"""`verify_interval`: the process that runs compares tables in turn, without Spark."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamer.admin.live.events import SeenState, changes_between
from streamer.compare.comparison import Comparison, ComparisonScope, Options
from streamer.compare.local_launcher import LocalProcess
from streamer.errors.error_classes import ComparisonError
from tests.support.comparing import compare_in_thread
from tests.support.postgres import Database
from tests.support.process import Process, caught_up
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.usefixtures("without_spark")

DDL = """
create table t (id int primary key, v text);
insert into t select g, 'v' || g from generate_series(1, 5000) g;
create table words (word text primary key, n int);
insert into words select 'word ' || g, g from generate_series(1, 300) g;
create table bag (a int, b text);
insert into bag select g % 5, 'same' from generate_series(1, 50) g;
create table log (id int primary key, v text);
insert into log select g, 'line' from generate_series(1, 20) g;
create table unwatched (id int primary key);
"""
TABLES = """
t:
words:
bag:
log: {type: append}
unwatched: {verify_interval: 0}
"""
SESSIONS = "select count(*) from pg_stat_activity where application_name like 'streamer verify%'"
BLOCKED = f"{SESSIONS} and wait_event_type = 'Lock'"


async def found(streamer: Streamer, field: str) -> dict[str, Any]:
    tables = (await streamer.status())["tables"]
    return {table["source"].removeprefix("public."): table[field] for table in tables}


@pytest.mark.timeout(300)
async def test_each_table_is_verified_in_turn_and_differences_show_everywhere(
    stream: MakeStreamer, source: Database, target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process for each verification takes ten times the CPU; the tests below use processes.
    monkeypatch.setattr(LocalProcess, "submit", compare_in_thread)
    source.execute(DDL)
    async with stream(TABLES, settings="verify_interval: 1") as streamer:
        await streamer.caught_up()

        async def all_are_verified() -> bool:
            verified = await found(streamer, "verified_at")
            return {name for name, at in verified.items() if at is None} == {"unwatched"}

        await streamer.eventually(all_are_verified)
        before = await found(streamer, "verified_at")
        target.execute(
            "update t set v = 'other' where id in (7, 4900); delete from t where id = 9;"
            " insert into t values (9000, 'extra');"
            " delete from words where n = 3; insert into bag values (1, 'same');"
            " insert into log values (100, 'more')"
        )
        wanted = {"t": 4, "words": 1, "bag": 1, "log": 0, "unwatched": None}

        async def all_are_found() -> bool:
            return await found(streamer, "differing_rows") == wanted

        await streamer.eventually(all_are_found)
        (supervisor,) = streamer.engine.supervisors

        async def is_shown() -> bool:
            records = supervisor.health.verifications
            return records["public.t"].differing_rows == 4

        await streamer.eventually(is_shown)
        label = 'database="shop",sid="",table="public.t"'
        metrics = (await streamer.engine.metrics.render()).decode()
        assert f"streamer_differing_rows{{{label}}} 4.0" in metrics
        assert f"streamer_verified_timestamp_seconds{{{label}}}" in metrics
        assert 'table="public.unwatched"} ' not in metrics.partition("streamer_differing_rows")[2]
        now = SeenState(
            verified={("shop", "public.t"): supervisor.health.verifications["public.t"]}
        )
        ((name, data),) = changes_between(SeenState(), now)
        assert (name, data["table"], data["differing_rows"]) == ("verified", "public.t", 4)

        target.execute(
            "update t set v = 'v' || id where id in (7, 4900); delete from t where id = 9000;"
            " insert into t values (9, 'v9'); insert into words values ('word 3', 3);"
            " delete from bag where ctid = (select max(ctid) from bag)"
        )

        async def all_are_equal_again() -> bool:
            rows = await found(streamer, "differing_rows")
            verified = await found(streamer, "verified_at")
            return not any(rows.values()) and all(
                verified[name] > before[name] for name in ("t", "words", "bag", "log")
            )

        await streamer.eventually(all_are_equal_again)


@pytest.mark.timeout(300)
async def test_a_table_that_is_read_as_a_whole_keeps_to_the_rate_within_its_statement(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    source.execute("create table words (word text primary key, n int)")
    # All rows on a page: streamer reads several pages one by one, and sleeps in between.
    source.execute("insert into words select 'word ' || g, g from generate_series(1, 150) g")
    assert source.value("select pg_relation_size('words')") == 8192
    async with stream("words:") as streamer:
        await streamer.caught_up()
        comparison = Comparison(
            streamer.settings.target.url,
            streamer.mapping,
            LocalProcess(is_background=True),
            Options(1, rows_per_second=40),
        )
        comparing = asyncio.create_task(comparison.run(ComparisonScope()))
        await until(
            lambda: source.value(f"{SESSIONS} and wait_event = 'PgSleep'"), "the server sleeps"
        )
        (result,) = await comparing
    assert (result.is_equal, result.rows_source, result.rows_target) == (True, 150, 150)


async def test_a_defect_of_the_process_is_reported_with_its_place() -> None:
    with capture_logs() as logs, pytest.raises(ComparisonError, match="KeyError: 'ends'"):
        await LocalProcess().submit({})
    (entry,) = [entry for entry in logs if entry["event"] == "defect in a comparison"]
    assert "local_program.py" in entry["traceback"]


@pytest.mark.timeout(300)
def test_a_verification_ends_with_the_process_and_goes_on_after_it(
    tmp_path: Path, source: Database, target: Database
) -> None:
    """A statement that waits for a lock is cancelled: on SIGTERM, and when `run` is killed."""
    source.execute("create table t (id int primary key, v text); insert into t values (1, 'v')")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t:")
    with Process(config, spark=False) as process:
        caught_up(process)
        assert process.terminate() == 0
    environment = {"STREAMER_VERIFY_INTERVAL": "1"}
    for end in (Process.terminate, Process.kill):
        with target.connect() as other:
            other.execute("begin; lock table t in access exclusive mode")
            with Process(config, spark=False, environment=environment) as process:
                eventually(lambda: target.value(BLOCKED), what="a verification waits")
                end(process)
                eventually(lambda: not target.value(SESSIONS), what="its sessions are gone")
                eventually(lambda: not source.value(SESSIONS), what="its sessions are gone")
    with Process(config, spark=False, environment=environment) as process:
        verified = "select count(*) from streamer.verification where verified_at is not null"
        eventually(lambda: target.value(verified), what="the table is verified")
        assert process.terminate() == 0
