"""An unreachable target does not fill the source's disk, and the journal loses no change."""

import asyncio
import errno
import json
import os
import re
import shutil
import stat
from pathlib import Path

import psycopg
import pytest
import yaml

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.bookkeeping.requests import make_request
from streamer.copy import copy_query
from streamer.copy.parts import part_copier
from streamer.copy.parts.part_copier import Pace
from streamer.errors.remedies import Remedy
from streamer.report.problem_facts import source_of_row
from streamer.report.problems import ProblemKind, of_source
from streamer.runtime.wal_retention import backlog_guard as backlog
from streamer.target.connection import TargetAddress
from tests.support.mixed import DDL, HISTORY, TABLES, assert_equal, write
from tests.support.postgres import Database, assert_same
from tests.support.proxy import Proxy
from tests.support.remedies import Operator
from tests.support.runbooks import block, run_block
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

SPOOL = "max_retained_wal: 2MB"
"""A journal, because the source has a limit and streamer a directory."""
WARN = f"{SPOOL}\non_max_retained_wal: warn"


def settings_of(place: str, directory: Path) -> str:
    """Return the settings of the source in a block of a runbook, with a limit of 2 MB."""
    names = {"10GB": "2MB", "/var/lib/streamer": str(directory)}
    settings = yaml.safe_load(block(place, names))
    assert settings["spool"] == {"directory": str(directory / "spool")}, "as `write_config` writes"
    (source,) = settings["sources"]
    assert source.pop("database") == "shop"
    return yaml.safe_dump(source)


async def relation_of(bookkeeping: Bookkeeping, name: str) -> RelationRecord:
    """Return the record of a table by the name at the source."""
    (found,) = [r for r in await read_relation_records(bookkeeping) if r.source == name]
    return found


@pytest.fixture(autouse=True)
def tables(source: Database, target: Database) -> None:
    source.execute(DDL + "create table hist (id int primary key, v text)")
    source.execute("create table filler (a text)")
    target.execute(DDL + HISTORY)


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "MEASURE_SECONDS", 0.2)


def fill(source: Database, megabytes: int = 1) -> None:
    """Make the source write WAL of a table that is not mapped."""
    for _ in range(megabytes):
        source.execute("insert into filler select repeat('x', 1000) from generate_series(1, 1000)")


def unconfirmed_bytes(source: Database) -> int:
    return int(
        str(
            source.value(
                "select pg_current_wal_flush_lsn() - confirmed_flush_lsn from pg_replication_slots"
                " where slot_name = 'streamer_shop'"
            )
        )
    )


def measured_ratio(streamer: Streamer) -> float:
    registry = streamer.engine.metrics.registry
    labels = {"database": "shop", "sid": ""}
    return registry.get_sample_value("streamer_backlog_ratio", labels) or 0.0


def retained_bytes(source: Database) -> int:
    source.execute("checkpoint")  # where the source logs running transactions, so the slot can move
    return int(
        str(
            source.value(
                "select pg_current_wal_flush_lsn() - restart_lsn from pg_replication_slots"
                " where slot_name = 'streamer_shop'"
            )
        )
    )


def journal_files(tmp_path: Path) -> list[Path]:
    found = os.walk(tmp_path / "spool" / "journal")  # ignores a directory that is removed meanwhile
    return [
        Path(folder, name) for folder, _, names in found for name in names if ".journal" in name
    ]


async def fill_until_spooling(streamer: Streamer, source: Database, tmp_path: Path) -> None:
    async def is_spooling() -> bool:
        if journal_files(tmp_path) and unconfirmed_bytes(source) < 1024 * 1024:
            return True
        await asyncio.to_thread(fill, source)
        return False

    await until(is_spooling, "a journal is written")


async def done_with_journal(streamer: Streamer, tmp_path: Path) -> None:
    await streamer.eventually(lambda: is_gone(tmp_path))


async def is_gone(tmp_path: Path) -> bool:
    return not journal_files(tmp_path)


def slot_is_there(source: Database) -> bool:
    return (
        source.value("select count(*) from pg_replication_slots where slot_name = 'streamer_shop'")
        == 1
    )


@pytest.mark.follows("runbooks:target-away#2")
@pytest.mark.follows("runbooks:source-disk-fills#4")
async def test_the_source_keeps_little_while_the_target_is_away(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
) -> None:
    assert block("target-away#2") == block("source-disk-fills#4")
    async with stream(TABLES, group=settings_of("target-away#2", tmp_path)) as streamer:
        await streamer.caught_up()
        await asyncio.to_thread(write, source, 0, 20)
        target_proxy.leave()
        await asyncio.to_thread(write, source, 20, 60)
        await fill_until_spooling(streamer, source, tmp_path)
        for n in range(60, 160, 20):
            await asyncio.to_thread(write, source, n, n + 20)
            await asyncio.to_thread(fill, source, 2)
        await until(lambda: retained_bytes(source) < 2 * 1024 * 1024, "WAL is released")

        target_proxy.heal()
        await streamer.caught_up(60)
        assert_equal(source, target)
        await done_with_journal(streamer, tmp_path)
        await asyncio.to_thread(write, source, 200, 220)
        await streamer.caught_up(60)
        status = await streamer.status()
        assert status["backlog"]["policy"] == "spool"
        assert status["backlog"]["limit_bytes"] == 2 * 1024 * 1024
    assert_equal(source, target)
    assert stat.S_IMODE((tmp_path / "spool" / "journal").stat().st_mode) == 0o700


async def test_a_process_that_starts_while_the_target_is_away_guards_the_source(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
) -> None:
    async with stream(TABLES, group=SPOOL) as streamer:
        await streamer.caught_up()
    target_proxy.leave()
    await asyncio.to_thread(write, source, 0, 20)
    await asyncio.to_thread(fill, source, 3)
    async with stream(TABLES, group=SPOOL) as streamer:
        await until(lambda: unconfirmed_bytes(source) < 1024 * 1024, "the slot moves")
        await asyncio.to_thread(write, source, 20, 40)
        (file,) = journal_files(tmp_path)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        began = asyncio.get_running_loop().time()
        await streamer.stop()
        assert asyncio.get_running_loop().time() - began < 10
    await asyncio.to_thread(write, source, 40, 60)
    async with stream(TABLES, group=SPOOL) as streamer:
        await asyncio.to_thread(write, source, 60, 80)
        target_proxy.heal()
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)
    assert_equal(source, target)


async def test_transactions_in_progress_when_a_journal_is_begun_come_whole(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
) -> None:
    source.execute(f"alter database {source.name} set logical_decoding_work_mem = '64kB'")
    large = "insert into keyless select n, repeat('x', 100) from generate_series(1, 3000) n"
    async with stream(TABLES, group=f"{SPOOL}\nstreaming: true") as streamer:
        await streamer.caught_up()
        with (
            source.connect() as committed,
            source.connect() as rolled_back,
            source.connect() as late,
        ):
            for connection in (committed, rolled_back, late):
                connection.execute("begin")
                connection.execute(large)
                connection.execute("savepoint s")
                connection.execute(large)
            committed.execute("rollback to s")
            target_proxy.leave()
            await asyncio.to_thread(write, source, 0, 20)
            await fill_until_spooling(streamer, source, tmp_path)
            for connection in (committed, rolled_back, late):
                connection.execute(large)
            await asyncio.to_thread(write, source, 20, 40)
            committed.execute("commit")
            rolled_back.execute("rollback")
            await asyncio.to_thread(write, source, 40, 60)
            await streamer.kill()
            late.execute("commit")
    async with stream(TABLES, group=SPOOL) as streamer:
        target_proxy.heal()
        await asyncio.to_thread(write, source, 60, 80)
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)
    assert source.value("select count(*) from keyless where length(b) = 100") == 15_000
    assert_equal(source, target)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_lost_or_damaged_journal_is_a_hole_and_a_resync_heals_it(
    is_lost: bool,
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
    without_spark: None,
) -> None:
    async with stream("keyed: {initial: none}", group=SPOOL) as streamer:
        await streamer.caught_up()
        target_proxy.leave()
        await asyncio.to_thread(write, source, 0, 20)
        await fill_until_spooling(streamer, source, tmp_path)
        await until(lambda: unconfirmed_bytes(source) < 100_000, "the slot moves")
    for file in journal_files(tmp_path):
        if is_lost:
            shutil.rmtree(file.parent)
        else:
            file.write_bytes(b"\0" * 100 + file.read_bytes()[100:])
            file.with_name("no number.journal").touch()
    target.port = None  # blocking copies in threads leave no room for a proxy in this process
    async with stream("keyed:", group=SPOOL) as streamer:

        async def is_told() -> bool:
            status = await streamer.status()
            error = status["error"] or ""
            is_said = "need a resync: public.keyed" in error and (is_lost or "is damaged" in error)
            return status["state"] == "error" and is_said

        await streamer.eventually(is_told, 60)
        assert target.value("select count(*) from keyed") == 0
        await resync(streamer)
        await streamer.caught_up(60)
    assert_same(source, target, "keyed")
    assert journal_files(tmp_path) == []


async def resync(streamer: Streamer) -> None:
    """The request of `streamer resync '*.*'`."""
    bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
    try:
        for relation in await read_relation_records(bookkeeping):
            await make_request(bookkeeping, relation.relation_id, "resync")
    finally:
        await bookkeeping.close()


async def test_drop_gives_the_slot_up_and_a_resync_heals_it(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
    without_spark: None,
) -> None:
    drop = f"{SPOOL}\non_max_retained_wal: drop"
    async with stream("keyed: {initial: none}", group=drop) as streamer:
        await streamer.caught_up()
        target_proxy.leave()
        await asyncio.to_thread(write, source, 0, 20)
        await asyncio.to_thread(fill, source, 3)
        await until(lambda: not slot_is_there(source), "the slot is dropped")
        await asyncio.to_thread(write, source, 20, 40)
        target_proxy.heal()

        async def is_told() -> bool:
            status = await streamer.status()
            (table,) = status["tables"]
            return (
                status["state"] == table["state"] == "error"
                and "gave up replication slot" in status["error"]
                and "streamer resync" in table["error"]
            )

        await streamer.eventually(is_told, 60)
        assert target.value("select count(*) from keyed") == 0
    target.port = None
    async with stream("keyed:", group=drop) as streamer:
        await resync(streamer)
        await streamer.caught_up(60)
        assert_same(source, target, "keyed")
        assert slot_is_there(source)
    assert journal_files(tmp_path) == []


@pytest.mark.follows("runbooks:source-disk-fills#1")
@pytest.mark.follows("runbooks:source-disk-fills#3")
async def test_warn_only_says_and_an_operator_drops_the_slot(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
    without_spark: None,
) -> None:
    async with stream("keyed: {initial: none}", group=WARN) as streamer:
        await streamer.caught_up()
        target_proxy.leave()
        await asyncio.to_thread(write, source, 0, 20)
        await asyncio.to_thread(fill, source, 3)
        await until(lambda: measured_ratio(streamer) > 1, "the ratio is shown")
        slots = {str(row[0]): row for row in source.execute(block("source-disk-fills#1"))}
        _, _, retained = slots["streamer_shop"]
        assert re.fullmatch(r"\d{4,} kB|\d+ MB", str(retained)), retained
        target_proxy.heal()
        await streamer.caught_up(60)
        await until(lambda: retained_bytes(source) < 1024 * 1024, "WAL is released")
        assert (await streamer.status())["backlog"]["state"] in ("ok", "warning")

        # The disk is almost full, and no milder policy helps.
        drop = block("source-disk-fills#3", {"streamer_shop_eu": "streamer_shop"})
        with pytest.raises(psycopg.errors.ObjectInUse):
            await asyncio.to_thread(source.execute, drop)
        await streamer.stop()
        source.execute(drop)
        await asyncio.to_thread(write, source, 20, 40)
        streamer.start()
        await streamer.source_state("error")
        await asyncio.to_thread(run_block, streamer.path, "slot-lost#1", {"--sid eu": ""})
        await streamer.caught_up(60)
        assert_same(source, target, "keyed")
    assert journal_files(tmp_path) == []


@pytest.mark.follows("report.problems:_wal_problems")
@pytest.mark.follows("runbooks:source-disk-fills#2")
async def test_the_command_for_retained_wal_names_the_table_that_keeps_the_wal(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    tables = "keyed: {initial: none}\nkeyless: {initial: none}"
    async with stream(tables, group=WARN) as streamer:
        await streamer.caught_up()
        await streamer.ask("pause", "public.keyed")
        await streamer.table_state("public.keyed", "paused")
        await asyncio.to_thread(write, source, 0, 20)
        await asyncio.to_thread(fill, source, 3)
        kept = list[Remedy]()

        async def is_told() -> bool:
            problems = of_source(source_of_row(await streamer.status()))
            kept[:] = [p.remedy for p in problems if p.kind is ProblemKind.WAL and p.remedy]
            return bool(kept)

        await streamer.eventually(is_told)
        lines = list[str]()

        async def is_named() -> bool:  # the process stores the bytes of a table once a second
            shown = await Operator(streamer.path, source, target).follow(kept[0])
            lines[:] = [
                each for each in shown.splitlines() if "of WAL" in each and "public." in each
            ]
            return bool(lines)

        await streamer.eventually(is_named)
        (line,) = lines
        assert "public.keyed" in line
        shown = await asyncio.to_thread(run_block, streamer.path, "source-disk-fills#2")
        (row,) = json.loads(shown)["sources"]
        held = {table["source"]: table["retained_wal_bytes"] or 0 for table in row["tables"]}
        assert held["public.keyed"] == max(held.values()) > held["public.keyless"]
        await streamer.ask("resume", "public.keyed")
        await streamer.caught_up(60)
        await until(lambda: retained_bytes(source) < 1024 * 1024, "WAL is released")

        async def is_over() -> bool:
            return not await is_told()

        await streamer.eventually(is_over)


async def test_a_full_disk_stops_the_journal_and_loses_nothing(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_full, written = False, os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if is_full and ".journal" in os.readlink(f"/proc/self/fd/{descriptor}"):
            if len(data) < 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(
                descriptor, data[: len(data) // 2], offset
            )  # half of the record still fits
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    async with stream(TABLES, group=SPOOL) as streamer:
        await streamer.caught_up()
        target_proxy.leave()
        await asyncio.to_thread(write, source, 0, 20)
        await fill_until_spooling(streamer, source, tmp_path)
        is_full = True
        before = unconfirmed_bytes(source)
        await asyncio.to_thread(write, source, 20, 60)
        await asyncio.to_thread(fill, source, 2)
        journaling = next(iter(streamer.engine.supervisors)).guard.journaling
        await until(lambda: "No space left" in str(journaling.error), "it is said")
        assert any("No space" in reason.get("error", "") for reason in streamer.engine.readiness())
        await asyncio.to_thread(write, source, 60, 80)
        assert unconfirmed_bytes(source) > before + 1024 * 1024
        is_full = False
        await until(lambda: unconfirmed_bytes(source) < 1024 * 1024, "the slot moves")
        target_proxy.heal()
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)
    assert_equal(source, target)


async def test_a_paused_table_does_not_keep_wal_and_goes_on_over_a_restart(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    async with stream(TABLES, group=SPOOL) as streamer:
        await streamer.caught_up()
        bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
        relation = await relation_of(bookkeeping, "public.keyed")
        await make_request(bookkeeping, relation.relation_id, "pause")
        await streamer.table_state("public.keyed", "paused")
        await asyncio.to_thread(write, source, 0, 20)
        await fill_until_spooling(streamer, source, tmp_path)
        await asyncio.to_thread(write, source, 20, 40)
        await until(
            lambda: target.value("select count(*) from keyless") == 80, "other tables go on"
        )
        status = await streamer.status()
        assert status["lag_bytes"] > 1024 * 1024
        await until(lambda: retained_bytes(source) < 2 * 1024 * 1024, "WAL is released")
        await streamer.kill()
    async with stream(TABLES, group=SPOOL) as streamer:
        await asyncio.to_thread(write, source, 40, 60)
        assert target.value("select count(*) from keyed") == 0
        await make_request(bookkeeping, relation.relation_id, "resume")
        await bookkeeping.close()
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)
    assert_equal(source, target)


async def test_tables_come_and_are_copied_again_while_a_journal_is_there(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    tmp_path: Path,
    without_spark: None,
) -> None:
    source.execute(
        "create table late (id int primary key); insert into late select generate_series(1, 500)"
    )
    async with stream(TABLES, group=SPOOL) as streamer:
        await streamer.caught_up()
        bookkeeping = Bookkeeping(TargetAddress.parse(streamer.settings.target.url))
        relation = await relation_of(bookkeeping, "public.keyed")
        await make_request(bookkeeping, relation.relation_id, "pause")
        await streamer.table_state("public.keyed", "paused")
        await asyncio.to_thread(write, source, 0, 20)
        await fill_until_spooling(streamer, source, tmp_path)
        write_config(streamer.path, source, target, f"late:\n{TABLES}", group=SPOOL)
        await streamer.apply()
        await asyncio.to_thread(write, source, 20, 40)
        source.execute("insert into late values (1000)")
        await streamer.table_state("public.late", "ready", 60)
        target.execute("delete from whole")
        whole = await relation_of(bookkeeping, "public.whole")
        await make_request(bookkeeping, whole.relation_id, "resync")
        await make_request(bookkeeping, relation.relation_id, "resume")
        await bookkeeping.close()
        await asyncio.to_thread(write, source, 40, 60)
        await until(lambda: target.execute("select 1 from whole") != [], "it is copied")
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)
    assert_equal(source, target)
    assert_same(source, target, "late")


async def test_a_journal_goes_by_a_changed_configuration(
    source: Database,
    target: Database,
    source_proxy: Proxy,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
) -> None:
    """A limit, a policy and a url that change while the target is away."""
    async with stream(TABLES, group="max_retained_wal: 1GB") as streamer:

        async def configure(group: str) -> None:
            write_config(streamer.path, source, target, TABLES, group=group)
            await streamer.apply()

        await streamer.caught_up()
        target_proxy.leave()
        await asyncio.to_thread(write, source, 0, 20)
        before = measured_ratio(streamer)
        await asyncio.to_thread(fill, source, 4)
        await until(lambda: measured_ratio(streamer) > before, "the guard has measured again")
        assert not journal_files(tmp_path)

        await configure(SPOOL)
        await until(lambda: unconfirmed_bytes(source) < 1024 * 1024, "it is spooled")
        assert journal_files(tmp_path)

        source_proxy.leave()
        source.port = None
        await configure(SPOOL)
        await asyncio.to_thread(write, source, 20, 40)
        await asyncio.to_thread(fill, source, 4)
        await until(lambda: unconfirmed_bytes(source) < 1024 * 1024, "over the new url")

        await configure("on_max_retained_wal: warn")
        await asyncio.to_thread(write, source, 40, 60)
        target_proxy.heal()
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)

        async def is_unguarded() -> bool:
            return (await streamer.status())["backlog"] is None

        await streamer.eventually(is_unguarded)
    assert_equal(source, target)


async def test_two_processes_with_one_configuration(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
) -> None:
    other_config = tmp_path / "other" / "config.yaml"
    other_config.parent.mkdir()
    write_config(other_config, source, target, TABLES, group=SPOOL)
    async with stream(TABLES, group=SPOOL) as streamer:
        await streamer.caught_up()
        other = Streamer(other_config)
        other.start()
        try:
            target_proxy.leave()
            await asyncio.to_thread(write, source, 0, 20)
            await asyncio.to_thread(fill, source, 3)
            await until(lambda: all_journals(tmp_path) and moved(source), "one reads the slot")
            assert len(all_journals(tmp_path)) == 1
            await asyncio.to_thread(write, source, 20, 40)
            target_proxy.heal()
            await streamer.caught_up(60)
            assert_equal(source, target)
            await until(lambda: not all_journals(tmp_path), "the journal is done with")
            errors = target.value("select count(*) from streamer.source where state = 'error'")
            assert errors == 0
        finally:
            await other.stop()


def all_journals(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.journal"))


def moved(source: Database) -> bool:
    return unconfirmed_bytes(source) < 1024 * 1024


async def test_a_copy_that_takes_long_does_not_keep_wal(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    tmp_path: Path,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    throttled: list[bool] = []
    begin = Pace.begin

    def recorded(self: Pace, *, is_throttled: bool, rounds: int = 1) -> None:
        throttled.append(is_throttled)
        begin(self, is_throttled=is_throttled, rounds=rounds)

    monkeypatch.setattr(Pace, "begin", recorded)
    monkeypatch.setattr(part_copier, "THROTTLED_TIMES", 1)
    monkeypatch.setattr(copy_query, "PART_BYTES_MIN", 64 * 1024)
    monkeypatch.setattr(copy_query, "PART_BYTES", 64 * 1024)
    source.execute("insert into keyed select n, 'old' from generate_series(1000, 9000) n")
    tables = "keyed:\nkeyless: {initial: none}"
    options = {"group": SPOOL, "settings": "sync: {rows_per_second: 800}"}
    async with stream(tables, **options) as streamer:
        await streamer.table_state("public.keyed", "copying")
        await asyncio.to_thread(write, source, 0, 20)
        await fill_until_spooling(streamer, source, tmp_path)
        await asyncio.to_thread(write, source, 20, 40)
        assert (await streamer.table("public.keyed"))["state"] in ("init", "copying")
        await until(lambda: target.value("select count(*) from keyless") == 80, "others go on")
        await streamer.caught_up(60)
        await done_with_journal(streamer, tmp_path)
        await asyncio.to_thread(write, source, 40, 60)
        await streamer.caught_up(60)
    assert_same(source, target, "keyed")
    assert_same(source, target, "keyless")
    assert True in throttled
