"""The source fails over to a standby: streaming continues, or stops before a gap."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from streamer.bookkeeping.scripts import ScriptSide, ScriptState
from streamer.commands import execute_script
from streamer.commands.check.capture_findings import check_capture
from streamer.commands.check.check import examine
from streamer.commands.check.source_facts import read_source
from streamer.config import static_mapping
from streamer.copy.finish_copies import _with_resume
from streamer.errors.error_classes import (
    SlotWaitError,
    SourceRejectedError,
    SourceStandbyError,
    SourceUnreadyError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy
from streamer.mapping.rule_options import DdlCapture
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.runtime.guards import timeline_monitor
from streamer.source.catalog import check_ready, read_server
from streamer.source.connection import connection
from streamer.source.slot_and_publications import slot
from streamer.source.slot_and_publications.publication import WantedMembers, ensure_publications
from streamer.source.slot_and_publications.slot import create_slot
from streamer.source.slot_and_publications.source_teardown import teardown_source
from streamer.source.timeline_branches import KnownServer
from streamer.target.connection import TargetAddress
from tests.support import chunk_case
from tests.support.postgres import Database, running, versions
from tests.support.runbooks import run_block
from tests.support.standby import OnEither, Standby, standby
from tests.support.streamer import Streamer, write_config
from tests.unit.build import mapped_relation

SECONDS = 60.0
DDL = "create table t (id int primary key)"


@pytest.fixture
def pair(
    tmp_path: Path, server_directory: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[OnEither, Standby]]:
    own = server_directory / tmp_path.name
    major = getattr(request, "param", "18")
    # An asynchronous commit stays in memory.
    with running(own / "first", versions()[major], {"wal_writer_delay": "10s"}) as first:
        first.execute("create database shop")
        first.execute(DDL, "shop")
        with standby(first, own / "second", major) as second:
            yield OnEither(first, second, "shop"), second


def configured(
    directory: Path,
    source: Database,
    target: Database,
    group: str = "",
    tables: str = "t: {initial: none}",
) -> Streamer:
    path = directory / "config.yaml"
    write_config(path, source, target, tables, group=group)
    return Streamer(path)


@pytest.mark.follows("runbooks:failover#1")
async def test_a_failover_slot_lets_streaming_go_on(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    """The primary dies as soon as the target has a row, which the standby has by then."""
    source, second = pair
    target.execute(DDL)
    # A slot without failover becomes a failover slot.
    streamer = configured(tmp_path, source, target)
    streamer.start()
    await streamer.caught_up(SECONDS)
    await streamer.stop()
    is_failover = "select failover from pg_replication_slots where slot_name = 'streamer_shop'"
    assert source.value(is_failover) is False
    streamer = configured(tmp_path, source, target, "failover: true")
    assert "synchronized_standby_slots lacks standby" in await found(tmp_path)
    source.execute("alter system set synchronized_standby_slots = 'standby'")
    source.execute("select pg_reload_conf()")
    streamer.start()
    try:
        source.execute("set synchronous_commit = off; insert into t values (1)")
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t") == [(1,)], "flushed by the wait"
        assert source.value(is_failover) is True
        async with asyncio.timeout(SECONDS):
            while not await asyncio.to_thread(second.has_slot, "streamer_shop"):
                source.execute("select pg_log_standby_snapshot()")
                await streamer.caught_up(SECONDS)
        findings = await asyncio.to_thread(run_block, streamer.path, "failover#1")
        assert "ready for failover" in findings
        assert "synchronized_standby_slots" not in findings
        source.execute("insert into t values (2)")
        await streamer.caught_up(SECONDS)
        source.server.kill()
        await asyncio.to_thread(second.promote)
        second.execute("insert into t values (3)", "shop")
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t order by 1") == [(1,), (2,), (3,)]
        assert target.value("select count(*) from streamer.conflict") == 0
        assert target.value("select state from streamer.relation") == "ready"
    finally:
        await streamer.stop()
    # The old primary died with the transaction of this script.
    target.execute(
        "insert into streamer.script (source_id, id, script, side, source_xid, system_identifier,"
        " timeline) select id, 'lost', 'select 1', 'both', 2000000000, system_identifier, 1"
        " from streamer.source"
    )
    streamer = configured(tmp_path, source, target, "failover: false")
    streamer.start()

    async def names_script() -> bool:
        return "different history" in str((await streamer.status())["error"])

    await streamer.eventually(names_script)
    address = TargetAddress.parse(streamer.settings.target.url)
    await execute_script.change(address, streamer.mapping.sources, "lost", None)
    await streamer.caught_up(SECONDS)
    await streamer.stop()
    assert second.execute(is_failover) == [(False,)]


# The oldest version that decodes on a standby.
@pytest.mark.follows("source.server.primary_of_standby:primary_hint")
@pytest.mark.parametrize("pair", ["16"], indirect=True)
async def test_a_standby_is_a_source_with_its_primary_among_the_hosts_of_the_url(
    pair: tuple[OnEither, Standby],
    target: Database,
    tmp_path: Path,
    server_directory: Path,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeline_monitor, "CHECK_SECONDS", 3600.0)  # only the reader checks
    source, _ = pair
    source.execute("insert into t select generate_series(1, 3)")
    source.options = "target_session_attrs=standby"
    group = "heartbeat_interval: 1\nddl: capture"
    streamer = configured(tmp_path, source, target, group, tables="t:")
    assert "event triggers" not in await found(tmp_path), "the run makes them at the primary"
    streamer.start()
    try:
        await streamer.caught_up(SECONDS)
        assert source.value("select array_agg(pubname order by 1) from pg_publication") == [
            "streamer_shop",
            "streamer_shop_ins",
        ]
        assert (
            source.execute("select 1 from pg_replication_slots where slot_type = 'logical'") == []
        )
        source.execute("insert into t values (4); update t set id = 5 where id = 1")
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t order by 1") == [(2,), (3,), (4,), (5,)]
        source.execute("alter table t add column note text; update t set note = 'x' where id = 2")
        await streamer.caught_up(SECONDS)
        assert target.execute("select note from t where id = 2") == [("x",)]

        async def beats() -> bool:
            return (await streamer.status())["heartbeat_seconds"] is not None

        await streamer.eventually(beats, SECONDS)
        assert (await streamer.status())["role"] == "standby"
        report = (await examine(streamer.settings, streamer.mapping)).report
        assert report.to_json()["roles"] == {"shop": "standby"}
        assert "publications and heartbeats at its primary" in await found(tmp_path)
        await the_source_follows_another_primary(streamer, pair, target, server_directory)
    finally:
        await streamer.stop()


async def the_source_follows_another_primary(
    streamer: Streamer, pair: tuple[OnEither, Standby], target: Database, directory: Path
) -> None:
    """A second standby becomes the primary while streamer reads, and then the source itself."""
    source, second = pair
    keys = "select string_agg(id::text, ' ' order by id) from t"

    async def arrived(expected: str) -> None:
        async def is_there() -> bool:
            return target.value(keys) == expected

        await streamer.eventually(is_there, SECONDS)

    third = standby(source.server, directory / "third", "16", "third")
    with third as new:
        await asyncio.to_thread(second.cut)
        await asyncio.to_thread(new.wait)  # the standby must not be ahead of the new primary
        source.server.kill()
        await asyncio.to_thread(new.promote)
        await asyncio.to_thread(second.follow, new)
        source.server = new
        new.execute("insert into t values (6)", "shop")

        async def is_followed() -> bool:
            return target.value("select timeline from streamer.source") == 2

        await streamer.eventually(is_followed, SECONDS)
        # A kill may come at any time, so streamer stores the timeline before its first change.
        assert target.value(keys) == "2 3 4 5"
        await streamer.stop()
        await the_standby_alone(second)
        source.options = "target_session_attrs=prefer-standby"
        streamer = configured(streamer.path.parent, source, target, tables="t:")
        streamer.start()
        try:
            new.execute("insert into t values (7)", "shop")
            await arrived("2 3 4 5 6 7")
            assert (await streamer.status())["role"] == "standby"
            await asyncio.to_thread(second.wait)
            new.kill()
            await asyncio.to_thread(second.promote)
            second.execute("insert into t values (8)", "shop")
            await arrived("2 3 4 5 6 7 8")
            assert target.value("select timeline from streamer.source") == 3
            await streamer.stop()
            second.execute("insert into t values (9)", "shop")
            streamer.start()
            await streamer.caught_up(SECONDS)
            assert target.value(keys) == "2 3 4 5 6 7 8 9"
            assert (await streamer.status())["role"] == "primary"
        finally:
            await streamer.stop()


def at_primary(second: Standby, remedy: Remedy) -> None:
    """Run the SQL of *remedy* at the primary of a standby."""
    for sql in remedy.sql:
        for statement in sql.statements:
            second.primary.execute(statement, "shop")


async def the_standby_alone(second: Standby) -> None:
    """If the url lacks the primary, streamer prints the SQL for the primary."""
    alone = SourceMapping("alone", None, Secret(second.url("shop")), (), ddl=DdlCapture.CAPTURE)
    (captures,) = check_capture(await read_source(alone, "public"))
    assert captures.fix is not None
    assert "at its primary" in str(captures.fix.words)
    left = await teardown_source(alone, None, KnownServer())
    assert "run the statements on its primary" in str(left.error)
    assert [sql.partition(" ")[0] for sql in left.left_sql] == ["drop"] * 3
    async with connection(alone, replication=True) as replication:
        server = await read_server(replication)
    async with connection(alone) as plain:
        with pytest.raises(SourceRejectedError) as refused:
            await ensure_publications(plain, alone, WantedMembers(), server.version)
        assert refused.value.hint is not None
        assert 'run on its primary: create publication "streamer_alone"' in refused.value.hint
    told: list[str] = []

    async def tell(awaited: str) -> None:
        told.append(awaited)
        second.primary.execute("begin; create table noise (); rollback")

    make = partial(create_slot, alone, "alone", server, temporary=True, report=tell)
    with mock.patch.object(slot, "WAIT_SECONDS", 1.0), pytest.raises(SlotWaitError) as late:
        await make()
    remedy = late.value.remedy
    assert remedy is not None
    report = _with_resume(mapped_relation(), ErrorReport.of(late.value), "once more, run: ")
    assert report.remedy is not None
    assert report.remedy.steps == (*report.remedy.commands, *remedy.steps), (
        "the record has to follow the second attempt"
    )
    told.clear()
    making = asyncio.ensure_future(make())
    async with asyncio.timeout(SECONDS):
        while not (told and making.done()):
            await asyncio.wait([making], timeout=1)
            if told:
                at_primary(second, remedy)
    await making.result().close()
    assert "pg_log_standby_snapshot() writes there" in told[0]
    with pytest.raises(SourceUnreadyError, match="which PostgreSQL 16 lacks"):
        check_ready(server, replace(alone, failover=True))
    with pytest.raises(SourceStandbyError):
        check_ready(replace(server, version=17_00_00), replace(alone, failover=True))


async def found(directory: Path) -> str:
    """Return the findings of `streamer check`."""
    report = (await examine(*static_mapping.load(directory / "config.yaml"))).report
    return "\n".join(map(str, report.findings))


async def test_a_copy_in_chunks_goes_on_at_the_new_primary(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path, without_spark: None
) -> None:
    """The snapshot is lost with the old primary; the new copy omits the finished chunk."""
    source, second = pair
    source.execute(chunk_case.DDL.partition("insert")[0])
    path = tmp_path / "config.yaml"
    settings = chunk_case.SETTINGS.replace("400kB", "400kB, rows_per_second: 600")
    write_config(path, source, target, "big:", settings=settings, group="failover: true")
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up(SECONDS)
        async with asyncio.timeout(SECONDS):
            while not await asyncio.to_thread(second.has_slot, "streamer_shop"):
                source.execute("select pg_log_standby_snapshot()")
                await streamer.caught_up(SECONDS)
        source.execute("insert" + chunk_case.DDL.partition("insert")[2])
        await streamer.caught_up(SECONDS)
        target.execute("truncate big")
        chunk_case.request(target, "resync")

        async def has_chunk() -> bool:
            tables = [each for its in await streamer.statuses() for each in its["tables"]]
            return any(table["chunks_copied"] for table in tables)

        await streamer.eventually(has_chunk)
        chunk_case.request(target, "pause")
        await streamer.table_state("public.big", "paused")
        place = "select xmin || ' ' || ctid from big where id = 97"
        before = target.value(place)
        chunk_case.write(source, 1)
        await asyncio.to_thread(second.wait)
        source.server.kill()
        await asyncio.to_thread(second.promote)
        chunk_case.request(target, "resume")
        await streamer.caught_up(SECONDS)
        rows = "select * from big order by id"
        assert second.execute(rows, "shop") == target.execute(rows)
        assert target.value(place) == before
    finally:
        await streamer.stop()


async def test_a_source_stops_if_its_slot_was_created_after_the_fork(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    """Keepalives moved the acknowledged position to the start of the new primary's slot."""
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


async def test_a_script_that_only_the_target_still_has_stops_the_source(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    """No table of the target has a change from after the fork."""
    source, second = pair
    target.execute(DDL)
    streamer = configured(tmp_path, source, target, "failover: true")
    streamer.start()
    await streamer.caught_up(SECONDS)

    async def run(name: str) -> None:
        (result,) = await execute_script.execute(
            TargetAddress.parse(streamer.settings.target.url),
            list(streamer.mapping.sources),
            execute_script.Script(name, f"create table {name} (id int)", ScriptSide.BOTH),
            seconds=SECONDS,
            target_namespace="public",
        )
        assert result.record.state is ScriptState.DONE

    await run("kept")
    async with asyncio.timeout(SECONDS):
        while not await asyncio.to_thread(second.has_slot, "streamer_shop"):
            source.execute("select pg_log_standby_snapshot()")
            await streamer.caught_up(SECONDS)
    await asyncio.to_thread(second.cut)
    await run("lost")
    await streamer.stop()
    source.server.kill()
    second.promote()
    second.execute("insert into t values (1)", "shop")
    streamer = configured(tmp_path, source, target, "failover: true")
    streamer.start()
    try:

        async def is_told() -> bool:
            supervisors = streamer.engine.supervisors
            return bool(supervisors) and supervisors[0].failure is not None

        await streamer.eventually(is_told, SECONDS)
        error = str(streamer.engine.supervisors[0].failure)
        assert 'script "lost" has run at the target only' in error
        assert "streamer execute --database shop --id lost --skip" in error
        states = "select id, state from streamer.script order by id"
        assert target.execute(states) == [("kept", "done"), ("lost", "missed")]
        assert target.execute("select id from t") == []
        second.execute("create table lost (id int)", "shop")
        address = TargetAddress.parse(streamer.settings.target.url)
        await execute_script.change(address, streamer.mapping.sources, "lost", None)
        await streamer.caught_up(SECONDS)
        assert target.execute("select id from t") == [(1,)]
        assert target.execute(states) == [("kept", "done"), ("lost", "skipped")]
    finally:
        await streamer.stop()


async def test_two_standbys_that_became_the_same_timeline_are_two_histories(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path, server_directory: Path
) -> None:
    """Both standbys call their timelines 2."""
    source, second = pair
    target.execute(DDL)
    with standby(source.server, server_directory / tmp_path.name / "third", "18", "third") as third:
        streamer = configured(tmp_path, source, target, "failover: true")
        streamer.start()
        await streamer.caught_up(SECONDS)
        source.execute("insert into t values (1)")
        await streamer.caught_up(SECONDS)
        async with asyncio.timeout(SECONDS):
            for each in (second, third):
                while not await asyncio.to_thread(each.has_slot, "streamer_shop"):
                    source.execute("select pg_log_standby_snapshot()")
                    await streamer.caught_up(SECONDS)
        await streamer.stop()
        await asyncio.to_thread(second.cut)
        source.execute("create table unmapped ()")  # not the fork of the second
        await asyncio.to_thread(third.cut)
        source.server.kill()
        for each in (second, third):
            await asyncio.to_thread(each.promote)
        keys = "select string_agg(id::text, ' ' order by id) from t"

        # The target has no change from after the fork, so either server will do.
        for server in (second, third):
            streamer = configured(tmp_path, Database(server, "shop"), target, "failover: true")
            streamer.start()
            await streamer.caught_up(SECONDS)
            assert target.value("select timeline from streamer.source") == 2
            if server is third:
                server.execute("insert into t values (3)", "shop")
                await streamer.caught_up(SECONDS)
            await streamer.stop()
        assert target.value(keys) == "1 3"

        # This server lacks a row, and its own row is in front of its slot.
        second.execute("insert into t values (2)", "shop")
        (row,) = second.execute("select pg_current_wal_lsn()::text", "shop")
        second.execute(f"select pg_replication_slot_advance('streamer_shop', '{row[0]}')", "shop")
        target.execute(f"update streamer.source set acknowledged_lsn = '{row[0]}'")
        streamer = configured(tmp_path, Database(second, "shop"), target, "failover: true")
        streamer.start()
        try:

            async def is_told() -> bool:
                supervisors = streamer.engine.supervisors
                return bool(supervisors) and supervisors[0].failure is not None

            await streamer.eventually(is_told, SECONDS)
            error = str(streamer.engine.supervisors[0].failure)
            assert "failed over to timeline 2, which forked at" in error
            assert "the target has changes after that point: public.t" in error
            assert target.value(keys) == "1 3"
        finally:
            await streamer.stop()
