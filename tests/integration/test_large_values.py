"""Values of many megabytes: memory, slow networks, and PostgreSQL's limits."""

import asyncio
import time
from pathlib import Path

import pytest

from streamer.apply.rows import copydata
from streamer.errors.error_classes import SourceConnectionError, TargetConnectionError
from streamer.mapping.rules import SourceMapping
from streamer.postgres.secret import Secret
from streamer.source.stream import feedback
from streamer.source.stream.replication_stream import ReplicationStream, StreamOptions
from streamer.target import silent_server as watch
from streamer.util.lsn import INVALID_LSN
from tests.support.postgres import Database, assert_same
from tests.support.process import Process, caught_up
from tests.support.proxy import Proxy
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer, write_config

MEGABYTES = 16
VALUE = "repeat('{letter}', {size} * 1024 * 1024)"


def value(letter: str, megabytes: int = MEGABYTES) -> str:
    return VALUE.format(letter=letter, size=megabytes)


def megabytes_of(pid: int, field: str) -> float:
    """Return a field of a process's memory: VmRSS, or VmHWM, the highest that has been."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def forget_highest(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def test_a_value_passes_through_in_at_most_three_times_its_size(
    tmp_path: Path, source: Database, target: Database
) -> None:
    """Alone, together with others in a streamed transaction, escaped, and in exact order."""
    for table in ("t", "versions"):
        source.execute(f"create table {table} (id int primary key, note int, big text)")
        source.execute(f"alter table {table} alter big set storage external")
    config = tmp_path / "config.yaml"
    write_config(config, source, target, "t:\nversions: {type: history}")
    with Process(config, spark=False) as process:
        caught_up(process)
        source.execute("insert into t values (0); insert into versions values (0)")
        caught_up(process)
        pid = process.process.pid
        idle = megabytes_of(pid, "VmRSS")
        highest = {}
        for statement in (
            f"insert into t values (1, 0, {value('x')})",
            f"update t set big = {value('_')} || chr(10) || 'end' where id = 1",
            f"insert into t select g, 0, {value('y')} from generate_series(2, 4) g",
            f"insert into versions values (1, 0, {value('z')})",
        ):
            forget_highest(pid)
            source.execute(statement)
            caught_up(process, 120)
            highest[statement] = megabytes_of(pid, "VmHWM") - idle
        assert max(highest.values()) < 3 * MEGABYTES, highest
        rows = "select id, note, md5(big), length(big) from {} order by id"
        for table in ("t", "versions"):
            assert source.execute(rows.format(table)) == target.execute(rows.format(table))
        source.execute("update t set note = 1; update t set id = 10 where id = 1")
        caught_up(process)
        assert source.execute(rows.format("t")) == target.execute(rows.format("t"))


@pytest.mark.usefixtures("without_spark")
async def test_a_large_change_on_a_slow_network_is_no_silence(
    source: Database,
    target: Database,
    source_proxy: Proxy,
    target_proxy: Proxy,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feedback, "SILENCE_SECONDS_MIN", 0.2)
    monkeypatch.setattr(watch, "CHECK_SECONDS", 1.0)
    source.parameters = "options=-c%20wal_sender_timeout%3D3s"
    source.execute("create table t (id int primary key, big text)")
    source.execute("alter table t alter big set storage external")
    walsender = "select array_agg(pid) from pg_stat_replication where application_name like '%shop'"
    worker = (
        "select array_agg(pid order by pid) from pg_stat_activity"
        f" where datname = '{target.name}' and application_name ~ 'streamer (worker|drainer)'"
    )
    async with stream("t: {initial: none}", settings="workers: 1") as streamer:
        await streamer.caught_up()
        source.execute(f"insert into t select g, {value('w', 9)} from generate_series(1, 1) g")
        await streamer.caught_up(60)
        before = source.value(walsender), target.value(worker)
        for proxy in (source_proxy, target_proxy):
            proxy.throttle(3_000_000)
        began = time.monotonic()
        source.execute(f"insert into t values (2, {value('x', 24)})")
        await streamer.caught_up(120)
        assert time.monotonic() - began > 8, "the network was to be slow"
        assert (source.value(walsender), target.value(worker)) == before
        assert (await streamer.status())["error"] is None
        assert_same(source, target, "t")


@pytest.mark.follows("runbooks:row-too-large#1")
@pytest.mark.usefixtures("without_spark")
async def test_a_row_beyond_the_target_s_limit_is_named_and_a_copy_brings_the_smaller_row(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copydata, "ROW_BYTES_MAX", 3 * 1024 * 1024)
    for table in ("t", "other"):
        source.execute(f"create table {table} (id int primary key, big text)")
    async with stream("t:\nother:", group="transport: text") as streamer:
        await streamer.caught_up()
        source.execute(f"insert into t values (1, 'small'), (7, {value(chr(92), 2)}), (8, 'more')")
        source.execute("insert into other values (1, 'goes on')")
        await streamer.table_state("public.t", "error")
        error = (await streamer.table("public.t"))["error"]
        assert "a row of 20971" in error
        assert 'target table "public.t", Key (id)=(7)' in error
        await streamer.table_state("public.other", "ready")

        async def goes_on() -> bool:
            return target.value("select count(*) from other") == 1

        await streamer.eventually(goes_on)
        source.execute("update t set big = 'smaller' where id = 7")
        await asyncio.to_thread(run_block, streamer.path, "row-too-large#1", {"documents": "t"})
        await streamer.caught_up(30)
        assert_same(source, target, "t")


@pytest.mark.follows("source.stream.large_rows:name_large_row")
@pytest.mark.usefixtures("without_spark")
async def test_a_row_that_the_source_cannot_send_is_named(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """512 MB of bytea are 1 GB in text. The values are compressed once, and stored 32 times."""
    columns = [f"big{n}" for n in range(512 // MEGABYTES)]
    source.execute(
        f"create table v as select convert_to({value('x')}, 'UTF8') as big;"
        f"create table t (id int primary key, name text, {', '.join(f'{c} bytea' for c in columns)})"
    )
    async with stream("t:", group="transport: text") as streamer:
        await streamer.caught_up()
        await asyncio.to_thread(
            source.execute,
            f"insert into t select 5, 'five', {', '.join(['big'] * len(columns))} from v",
        )

        async def is_named() -> bool:
            try:
                error = (await streamer.status())["error"]
            except TargetConnectionError:  # the row keeps processors and memory busy for seconds
                return False
            return 'table "public.t", Key (id)=(5)' in (error or "")

        await streamer.eventually(is_named, 60)
        status = await streamer.status()
        assert status["state"] == "error"
        assert "1 GB" in status["error"]
        assert "streamer resync '*.*' --database shop" in status["error"]
        size = source.value(f"select 2 * {len(columns)} * octet_length(big) + 4 from v")
        assert f"about {size} bytes" in status["error"]
        source.execute("update t set " + ", ".join(f"{c} = 'small'" for c in columns))
        remedy = await remedy_of(streamer, None, "Key (id)=(5)")
        await Operator(streamer.path, source, target).follow(remedy)
        await streamer.caught_up(60)
        assert_same(source, target, "t")


async def test_a_stream_that_has_ended_sends_no_status(source: Database) -> None:
    """The reader may still look for the cause when the next status update is due."""
    source.execute("create table t (id int primary key); create publication p for table t")
    source.execute("select pg_create_logical_replication_slot('ended', 'pgoutput')")
    mapping = SourceMapping("shop", None, Secret(source.url), ())
    stream = await ReplicationStream.start(mapping, "ended", INVALID_LSN, StreamOptions(("p",)))
    try:
        source.execute(f"select pg_terminate_backend({stream.backend_pid})")
        async with asyncio.timeout(30):
            with pytest.raises(SourceConnectionError):
                await _read_to_end(stream)
        stream.send_status(INVALID_LSN, INVALID_LSN)
    finally:
        await stream.close()


async def _read_to_end(stream: ReplicationStream) -> None:
    while True:
        stream.read()
        await stream.wait_readable()
