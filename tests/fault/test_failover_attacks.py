"""Failovers that lose changes, or lead to a wrong server.

In each case, streaming goes on without a gap, or the source stops and names the remedy.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamer.commands.check.check import examine
from streamer.commands.demo.embedded_servers import Server
from streamer.copy.copy_context import CopyContext
from streamer.errors.error_classes import SourceConnectionError
from streamer.runtime.session import open_session
from streamer.runtime.wal_retention import backlog_guard as backlog
from tests.support import chunk_case
from tests.support.postgres import Database, running, versions
from tests.support.proxy import Proxy
from tests.support.remedies import Operator, remedy_of
from tests.support.standby import OnEither, Standby, standby
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

SECONDS = 60.0
DDL = "create table t (id int primary key); create table log (id int)"
TABLES = "t: {initial: none}\nlog: {initial: none, type: append}"
KEYS = "select string_agg(id::text, ' ' order by id) from t"


@pytest.fixture
def pair(
    target: Database, tmp_path: Path, server_directory: Path
) -> Iterator[tuple[OnEither, Standby]]:
    own = server_directory / tmp_path.name
    settings = {"logical_decoding_work_mem": "64kB"}
    with running(own / "first", versions()["18"], settings) as first:
        # The server of the target has a database with this name, too.
        first.execute(f"create database {target.name}")
        first.execute(DDL, target.name)
        with standby(first, own / "second") as second:
            yield OnEither(first, second, target.name), second


def configured(
    directory: Path,
    source: Database,
    target: Database,
    group: str = "failover: true",
    tables: str = TABLES,
) -> Streamer:
    path = directory / "config.yaml"
    write_config(path, source, target, tables, group=group)
    return Streamer(path)


async def synchronized(streamer: Streamer, source: Database, second: Standby) -> None:
    """Wait until the standby keeps the slot for a failover."""
    async with asyncio.timeout(SECONDS):
        while not await asyncio.to_thread(second.has_slot, "streamer_shop"):
            source.execute("select pg_log_standby_snapshot()")
            await streamer.caught_up(SECONDS)


@pytest.mark.parametrize("reads", ["primary", "standby"])
async def test_a_journal_goes_on_at_the_new_primary(
    reads: str,
    pair: tuple[OnEither, Standby],
    target: Database,
    target_proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target is unreachable meanwhile, so its bookkeeping still has the former timeline.

    A standby that is the source becomes the primary in the middle of the stream.
    """
    monkeypatch.setattr(backlog, "MEASURE_SECONDS", 0.2)
    source, second = pair
    target.execute(DDL)
    source.execute("create table filler (a text)")
    fill = "insert into filler select repeat('x', 1000) from generate_series(1, 1000)"
    spool = "max_retained_wal: 2MB"
    if reads == "primary":
        spool += "\nfailover: true"
    else:
        source.options = "target_session_attrs=prefer-standby"
    streamer = configured(tmp_path, source, target, spool)
    streamer.start()
    try:
        await streamer.caught_up(SECONDS)
        source.execute("insert into t values (1)")
        await streamer.caught_up(SECONDS)
        if reads == "primary":
            await synchronized(streamer, source, second)
        target_proxy.leave()
        source.execute("insert into t values (2)")
        journaling = next(iter(streamer.engine.supervisors)).guard.journaling

        async def has_journal() -> bool:
            source.execute(fill)
            return journaling.journal is not None

        await until(has_journal, "a journal is begun", seconds=SECONDS)

        async def holds_all(server: Server) -> bool:
            (row,) = server.execute("select pg_current_wal_flush_lsn()::text")
            end = str(journaling.journal and journaling.journal.end_lsn)
            return bool(server.execute(f"select '{end}'::pg_lsn >= '{row[0]}'")[0][0])

        await until(lambda: holds_all(source.server), "the journal has it", seconds=SECONDS)
        await asyncio.to_thread(second.wait)
        source.server.kill()
        await asyncio.to_thread(second.promote)
        second.execute("insert into t values (3)", target.name)
        await until(lambda: holds_all(second), "the journal goes on", seconds=SECONDS)
        target_proxy.heal()
        await streamer.caught_up(SECONDS)
        assert target.value(KEYS) == "1 2 3"
        assert target.value("select timeline from streamer.source") == 2
    finally:
        await streamer.stop()


async def test_a_promotion_inside_a_streamed_transaction_ends_it(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    """The new primary lacks the transaction. Its slot is older, so the primary sends changes again."""
    source, second = pair
    target.execute(DDL)
    streamer = configured(tmp_path, source, target)
    streamer.start()
    large = "insert into t select generate_series(1000, 9000)"
    try:
        await streamer.caught_up(SECONDS)
        await synchronized(streamer, source, second)
        second.execute("alter system set sync_replication_slots = off")
        second.execute("select pg_reload_conf()")
        source.execute("insert into t values (1); insert into log values (1)")
        await streamer.caught_up(SECONDS)
        with contextlib.closing(psycopg.connect(source.url)) as writer:
            writer.execute(large.encode())

            async def is_streamed() -> bool:
                return bool(source.value("select sum(stream_txns) from pg_stat_replication_slots"))

            await until(is_streamed, "the transaction is streamed", seconds=SECONDS)
            source.execute("insert into t values (2); insert into log values (2)")
            await streamer.caught_up(SECONDS)
            await asyncio.to_thread(second.wait)
            source.server.kill()
        await asyncio.to_thread(second.promote)
        second.execute("insert into t values (3); insert into log values (3)", target.name)
        await streamer.caught_up(SECONDS)
        assert target.value(KEYS) == "1 2 3"
        second.execute(large, target.name)
        await streamer.caught_up(SECONDS)
        assert target.value("select count(*) from t") == 3 + 8001
        assert target.value(KEYS.replace("from t", "from log")) == "1 2 3"
        assert target.value("select count(*) from streamer.conflict") == 0
    finally:
        await streamer.stop()


async def test_a_promotion_inside_a_first_copy_begins_it_again(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path, without_spark: None
) -> None:
    """The slot of the copy was on the old primary, and on no standby."""
    source, second = pair
    source.execute("insert into t select generate_series(1, 100); insert into log values (1)")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:\nlog:", settings="sync: {rows_per_second: 20}")
    streamer = Streamer(path)
    streamer.start()
    try:

        async def is_copying() -> bool:
            found = "select exists (select from streamer.relation where state = 'copying')"
            exists = "select to_regclass('streamer.relation') is not null"
            return bool(target.value(exists)) and bool(target.value(found))

        await streamer.eventually(is_copying, SECONDS)
        await asyncio.to_thread(second.wait)
        source.server.kill()
        await asyncio.to_thread(second.promote)
        second.execute("insert into t values (101); insert into log values (2)", target.name)
        await streamer.stop()
        streamer = configured(tmp_path, source, target, "", "t:\nlog:")
        streamer.start()
        await streamer.caught_up(SECONDS)
        assert target.value("select count(*) from t") == 101
        assert target.value("select count(*) from log") == 2
        second.execute("insert into t values (102); insert into log values (3)", target.name)
        await streamer.caught_up(SECONDS)
        assert target.value("select count(*) from t") == 102
        assert target.value("select count(*) from log") == 3
    finally:
        await streamer.stop()


async def test_changes_missing_on_the_new_primary_stop_the_source(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    source, second = pair
    name = target.name
    target.execute(DDL)
    streamer = configured(tmp_path, source, target, "")
    streamer.start()
    await streamer.caught_up(SECONDS)
    source.execute("insert into t values (1); insert into log values (1)")
    await streamer.caught_up(SECONDS)
    await streamer.stop()
    bookkeeping = "select id, state, end_lsn from streamer.relation order by 1"
    before = target.execute(bookkeeping)

    async def refused(source: Database) -> str:
        streamer = configured(tmp_path, source, target, "")
        streamer.start()
        try:

            async def is_told() -> bool:
                supervisors = streamer.engine.supervisors
                return bool(supervisors) and supervisors[0].failure is not None

            await streamer.eventually(is_told, SECONDS)
            assert target.execute(bookkeeping) == before
            return str(streamer.engine.supervisors[0].failure)
        finally:
            await streamer.stop()

    resync = "streamer resync '*.*' --database shop"
    # A foreign server has the address of the url, and a database of the same name.
    stranger = Database(target.server, name)
    error = await refused(stranger)
    assert "a different server now: system identifier" in error
    assert resync in error
    assert target.value("select count(*) from pg_publication") == 0

    source.execute("insert into t values (2); insert into log values (2)")
    await asyncio.to_thread(second.wait)
    source.server.kill()
    await asyncio.to_thread(second.promote)
    error = await refused(source)
    assert 'replication slot "streamer_shop" is gone' in error
    assert resync in error

    make = "select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')"
    second.execute(make, name)
    error = await refused(source)
    assert "ahead of" in error
    assert resync in error

    second.execute("alter system set max_slot_wal_keep_size = '1MB'")
    second.execute("select pg_reload_conf()")
    lost = "select wal_status = 'lost' from pg_replication_slots where slot_name = 'streamer_shop'"

    async def is_lost() -> bool:
        second.execute("insert into log values (9); select pg_switch_wal()", name)
        second.execute("checkpoint")
        return bool(second.execute(lost)[0][0])

    await until(is_lost, "the slot is lost", seconds=SECONDS)
    error = await refused(source)
    assert "max_slot_wal_keep_size" in error
    assert resync in error
    assert target.value(KEYS) == "1"


@pytest.mark.follows("source.server.primaries_after_failover:require_successor")
async def test_the_old_primary_that_runs_again_is_never_followed(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path
) -> None:
    """The url names the old primary first, and no table has changed between the fork and the
    reconnection.
    """
    source, second = pair
    target.execute(DDL)
    streamer = configured(tmp_path, source, target)
    streamer.start()
    end_sessions = (
        "select pg_terminate_backend(pid) from pg_stat_activity"
        f" where application_name like 'streamer%' and datname = '{target.name}'"
    )
    try:
        await streamer.caught_up(SECONDS)
        await synchronized(streamer, source, second)
        source.execute("insert into t values (1)")
        await streamer.caught_up(SECONDS)
        await asyncio.to_thread(second.wait)
        source.server.kill()
        await asyncio.to_thread(second.promote)

        async def has_followed() -> bool:
            return bool(target.value("select timeline = 2 from streamer.source"))

        await streamer.eventually(has_followed, SECONDS)
        await asyncio.to_thread(source.server.start)
        source.execute("insert into t values (90)")
        second.execute(end_sessions)
        second.execute("insert into t values (2)", target.name)

        async def has_row() -> bool:
            return target.value(KEYS) == "1 2"

        await streamer.eventually(has_row, SECONDS)
        findings = (await examine(streamer.settings, streamer.mapping)).report.findings
        assert "two primaries" in "\n".join(map(str, findings))

        await asyncio.to_thread(second.stop)

        async def waits() -> bool:
            return str((await streamer.status())["error_code"]) == "old_primary"

        await streamer.eventually(waits, SECONDS)
        error = str((await streamer.status())["error"])
        assert "it is the old primary" in error
        assert "resync" not in error
        findings = (await examine(streamer.settings, streamer.mapping)).report.findings
        assert "old primary" in "\n".join(map(str, findings))
        await asyncio.to_thread(second.start)
        second.execute("insert into t values (3)", target.name)

        async def goes_on() -> bool:
            return target.value(KEYS) == "1 2 3"

        await streamer.eventually(goes_on, SECONDS)

        # WHEN an operator gives the new primary up THEN the target gets the rows of the old
        # primary.
        await asyncio.to_thread(second.stop)
        remedy = await remedy_of(streamer, None, "it is the old primary")
        await streamer.stop()
        operator = Operator(streamer.path, source, target)
        with operator.start(remedy):
            await operator.follow(await remedy_of(streamer, None, "resync"))

            async def is_back() -> bool:
                return target.value(KEYS) == "1 90"

            await streamer.eventually(is_back, SECONDS)
            source.execute("insert into t values (91)")

            async def streams_on() -> bool:
                return target.value(KEYS) == "1 90 91"

            await streamer.eventually(streams_on, SECONDS)
    finally:
        await streamer.stop()


async def test_a_source_stops_if_a_chunk_holds_rows_from_after_the_fork(
    pair: tuple[OnEither, Standby], target: Database, tmp_path: Path, without_spark: None
) -> None:
    """The first chunk holds rows that the standby never received."""
    source, second = pair
    source.execute(chunk_case.DDL.partition("insert")[0])
    path = tmp_path / "config.yaml"
    settings = chunk_case.SETTINGS.replace("400kB", "400kB, rows_per_second: 600")
    write_config(path, source, target, "big:", settings=settings, group="failover: true")
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up(SECONDS)
        await synchronized(streamer, source, second)
        await asyncio.to_thread(second.cut)
        chunk_case.request(target, "pause")  # only the copy brings the rows
        await streamer.table_state("public.big", "paused")
        source.execute("insert" + chunk_case.DDL.partition("insert")[2])
        chunk_case.request(target, "resync")
        chunk_case.request(target, "resume")

        async def has_chunk() -> bool:
            return int(str(target.value(chunk_case.CHUNKS))) > 0

        await streamer.eventually(has_chunk)
        chunk_case.request(target, "pause")
        await streamer.table_state("public.big", "paused")
        source.server.kill()
        await asyncio.to_thread(second.promote)
        chunk_case.request(target, "resume")

        async def is_told() -> bool:
            failure = streamer.engine.supervisors[0].failure
            return failure is not None and "streamer resync" in str(failure)

        await streamer.eventually(is_told, SECONDS)

        # The request to resume came during the failed attempt, so a second attempt follows at once.
        async def is_diverged() -> bool:
            return "diverged" in str((await streamer.status())["error_code"])

        await streamer.eventually(is_diverged)
    finally:
        await streamer.stop()


async def test_a_snapshot_that_a_standby_took_while_it_switched_is_taken_again(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The position of the copy would be stored before the timeline. Here the switch is a model."""
    source.execute("create table t (id int primary key); insert into t values (1)")
    looks: list[object] = []

    async def look() -> None:
        copied = target.value("select to_regclass('t')") and target.value(KEYS)
        looks.append(copied)
        if len(looks) == 1:
            raise SourceConnectionError("the server switched from timeline 1 to 2")

    def watching(*arguments: Any, **others: Any) -> CopyContext:
        return CopyContext(*arguments, **others | {"check_timeline": look})

    monkeypatch.setattr(open_session, "CopyContext", watching)
    async with stream("t:") as streamer:
        await streamer.caught_up(SECONDS)
        assert target.value(KEYS) == "1"
    assert looks == [None, None]


@pytest.mark.follows("source.slot_and_publications.standbys:judge_standby_wait")
async def test_a_standby_that_holds_changes_back_is_named_and_the_sql_lets_them_go(
    target: Database, tmp_path: Path, server_directory: Path
) -> None:
    """The server always sends keepalives with the time of its clock."""
    target.execute(DDL)
    with running(server_directory / tmp_path.name / "held", versions()["18"]) as server:
        server.execute(f"create database {target.name}")
        source = Database(server, target.name)
        source.execute(DDL)
        streamer = configured(tmp_path, source, target)
        streamer.start()
        try:
            await streamer.caught_up(SECONDS)
            source.execute("select pg_create_physical_replication_slot('standby', true)")
            source.execute("alter system set synchronized_standby_slots = 'standby'")
            source.execute("select pg_reload_conf()")
            source.execute("insert into t values (1)")

            async def is_named() -> bool:
                return str((await streamer.status())["error_code"]) == "standby_wait"

            await streamer.eventually(is_named, SECONDS)
            status = await streamer.status()
            assert status["lag_seconds"] > 3
            (reason,) = streamer.engine.readiness()
            assert 'no standby uses slot "standby"' in reason["error"]
            metrics = streamer.engine.metrics.registry
            lag = metrics.get_sample_value("streamer_lag_seconds", {"database": "shop", "sid": ""})
            assert lag is not None
            assert lag > 3
            report = streamer.engine.supervisors[0].condition[1]
            assert report is not None
            assert report.remedy is not None
            for statement in report.remedy.sql[0].statements:
                source.execute(statement)
            await streamer.caught_up(SECONDS)
            assert target.value(KEYS) == "1"

            async def streams() -> bool:
                status = await streamer.status()
                return bool(status["state"] == "streaming" and status["error"] is None)

            await streamer.eventually(streams, SECONDS)
        finally:
            await streamer.stop()
