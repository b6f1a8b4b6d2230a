"""A second installation with a copied configuration does no harm to the first."""

import re
from pathlib import Path

import pytest

from streamer.commands.check.check import check
from streamer.commands.demo.embedded_servers import free_port
from streamer.commands.teardown import teardown
from streamer.report.problems import Severity
from streamer.runtime.process.engine import Engine, StopCondition
from streamer.runtime.wal_retention import backlog_guard
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, database
from tests.support.proxy import Proxy
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import block, start_block
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

SECONDS = 60.0
WITHOUT_SID = {"shop:eu": "shop"}
DDL = "create table t (id int primary key); create table u (id int primary key)"
MEMBERS = "select tablename from pg_publication_tables where pubname = 'streamer_shop' order by 1"


async def refused(streamer: Streamer) -> str:
    """Wait until the engine of *streamer* has the source in error; return the error."""

    async def is_in_error() -> bool:
        supervisors = streamer.engine.supervisors
        return bool(supervisors) and supervisors[0].failure is not None

    await streamer.eventually(is_in_error, SECONDS)
    return str(streamer.engine.supervisors[0].failure)


@pytest.mark.follows("runbooks:second-installation#1")
async def test_the_slot_and_publications_of_the_first_stay_its_own(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    for db in (source, target):
        db.execute(DDL)
    with database(source.server, "other") as other:
        other.execute(DDL)
        (tmp_path / "other").mkdir()
        path = tmp_path / "other" / "config.yaml"
        write_config(path, source, other, "t: {initial: none}")
        second = Streamer(path)
        async with stream("t: {initial: none}\nu: {initial: none}") as first:
            await first.caught_up(SECONDS)
            second.start()
            error = await refused(second)
            assert "belongs to installation" in error
            holder = re.search(r"read by process (\d+) \(\"(streamer[^\"]*)", error)
            assert holder is not None
            readers = source.execute(block("second-installation#1"))
            assert ("streamer_shop", True, int(holder[1]), holder[2]) in [r[:4] for r in readers]
            findings = (await check(second.settings, second.mapping)).findings
            owners = [f for f in findings if "belongs to installation" in f.problem]
            assert [f.severity for f in owners] == [Severity.ERROR]
            assert re.search(r"read by process \d+ \(\"streamer.*--take-over shop", str(owners[0]))
            own = (await check(first.settings, first.mapping)).findings
            assert not [f for f in own if "installation" in f.problem or "slot" in f.problem]
            assert source.execute(MEMBERS) == [("t",), ("u",)]
            source.execute("insert into t values (1); insert into u values (1)")
            await first.caught_up(SECONDS)
        await second.stop()
        source.execute("insert into t values (2); insert into u values (2)")
        second = Streamer(path)
        second.start()
        try:
            assert "streamer run --take-over shop" in await refused(second)
            address = TargetAddress.parse(second.settings.target.url)
            (result,) = await teardown(
                address, list(second.mapping.sources), tmp_path / "none", actor="test"
            )
            assert "so slot and publications stay" in (result.error or "")
        finally:
            await second.stop()
        async with stream("t: {initial: none}\nu: {initial: none}") as first:
            await first.caught_up(SECONDS)
            assert target.execute("select id from t order by 1") == [(1,), (2,)]
            assert target.execute("select id from u order by 1") == [(1,), (2,)]
        # The second target lacks the rows that the slot has passed on.
        second = taking_over(path)
        try:
            error = await refused(second)
            assert "tables with `initial: none` may lack rows" in error
            findings = (await check(second.settings, second.mapping)).findings
            assert any("may lack rows" in finding.problem for finding in findings)
        finally:
            await second.stop()
        write_config(path, source, other, "t: {initial: copy}")  # as the hint says
        second = taking_over(path)
        try:
            await second.caught_up(SECONDS)
            source.execute("insert into t values (3)")
            await second.caught_up(SECONDS)
            assert other.execute("select id from t order by 1") == [(1,), (2,), (3,)]
        finally:
            await second.stop()


@pytest.mark.follows("source.slot_and_publications.ownership:takeover_remedy")
@pytest.mark.follows("source.slot_and_publications.ownership:unproven_rows")
@pytest.mark.follows("runbooks:second-installation#2")
async def test_another_target_with_all_rows_takes_the_place_of_the_first(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    for db in (source, target):
        db.execute(DDL)
    async with stream("t: {initial: none}") as first:
        source.execute("insert into t values (1)")
        await first.caught_up(SECONDS)
    with database(source.server, "other") as other:
        other.execute(f"{DDL}; insert into t values (1)")
        (tmp_path / "other").mkdir()
        path = tmp_path / "other" / "config.yaml"
        write_config(path, source, other, "t: {initial: none}")
        second, operator = Streamer(path), Operator(path, source, other)
        second.start()
        remedy = await remedy_of(second, None, "belongs to installation")
        await second.stop()
        (step,) = remedy.commands
        assert step.line == block("second-installation#2", WITHOUT_SID).strip()
        with start_block(path, "second-installation#2", WITHOUT_SID):
            await operator.follow(await remedy_of(second, None, "may lack rows"))
            await second.source_state("streaming", SECONDS)
            source.execute("insert into t values (2)")

            async def has_arrived() -> bool:
                return other.execute("select id from t order by 1") == [(1,), (2,)]

            await second.eventually(has_arrived, SECONDS)


def taking_over(path: Path) -> Streamer:
    """Start an engine with the slot and publications of a foreign installation."""
    streamer = Streamer(path)
    take_over = ["shop"]
    streamer.engine = Engine(
        streamer.settings, streamer.mapping, StopCondition(), take_over=take_over
    )
    streamer.start()
    return streamer


LIMIT = "max_retained_wal: 1MB\non_max_retained_wal: "


async def test_a_second_installation_without_its_target_leaves_the_slot_alone(
    source: Database,
    target: Database,
    target_proxy: Proxy,
    stream: MakeStreamer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second process uses the same spool directory, and its target does not answer."""
    monkeypatch.setattr(backlog_guard, "MEASURE_SECONDS", 0.2)
    source.execute("create table t (id int primary key, v text)")
    slot = "select confirmed_flush_lsn from pg_replication_slots where slot_name = 'streamer_shop'"

    async def keeps_away(policy: str, reason: str) -> None:
        path = tmp_path / f"second-{policy}.yaml"
        other = Database(target.server, "nowhere")
        other.port = free_port()
        write_config(path, source, other, "t: {initial: none}", group=LIMIT + policy)
        second, before = Streamer(path), source.execute(slot)
        second.start()
        try:

            def is_refused() -> bool:
                assert source.execute(slot) == before
                return any(reason in each.get("error", "") for each in second.engine.readiness())

            await until(is_refused, reason, SECONDS)
            assert source.execute(slot) == before
        finally:
            await second.stop()

    async with stream("t: {initial: none}", group=LIMIT + "spool") as first:
        await first.caught_up(SECONDS)
    source.execute("insert into t select g, repeat('x', 1000) from generate_series(1, 3000) g")
    for policy in ("spool", "drop"):
        await keeps_away(policy, "no installation id")
    # The first process proves its objects with the stored id, and leaves a journal.
    (stored,) = (tmp_path / "spool").glob("installation-*")
    assert stored.stat().st_mode & 0o777 == 0o600
    target_proxy.leave()
    before = source.execute(slot)
    async with stream("t: {initial: none}", group=LIMIT + "spool"):
        await until(lambda: source.execute(slot) != before, "the slot is read", SECONDS)
    source.execute("insert into t select g, repeat('x', 1000) from generate_series(3001, 6000) g")
    await keeps_away("spool", "no installation id")  # and does not continue that journal
    target_proxy.heal()
    async with stream("t: {initial: none}", group=LIMIT + "spool") as first:
        await first.caught_up(SECONDS)
        assert target.value("select count(*) from t") == 6000


async def test_a_slot_that_somebody_has_read_from_is_refused(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute(
        "create publication streamer_shop for table t; create publication streamer_shop_ins"
    )
    source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
    source.execute("insert into t values (1)")
    source.execute(
        "select pg_logical_slot_get_binary_changes('streamer_shop', null, null,"
        " 'proto_version', '1', 'publication_names', 'streamer_shop')"
    )
    async with stream("t: {initial: none}") as streamer:
        assert '"streamer_shop" was read, but not' in await refused(streamer)


@pytest.mark.parametrize(
    "make",
    [
        "pg_create_logical_replication_slot('streamer_shop', 'pgoutput')",
        "pg_create_physical_replication_slot('streamer_shop', true)",
    ],
)
async def test_a_slot_of_another_database_is_not_given_up(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    make: str,
) -> None:
    """The publications in the database of the source are ours, and the slot is not."""
    monkeypatch.setattr(backlog_guard, "MEASURE_SECONDS", 0.2)
    source.execute("create table t (id int primary key, v text)")
    slots = "select slot_type, database::text from pg_replication_slots where slot_name = 'streamer_shop'"
    with database(source.server, "other") as other:
        other.execute(f"select {make}")
        before = other.execute(slots)
        source.execute("insert into t select g, repeat('x', 1000) from generate_series(1, 3000) g")
        async with stream("t: {initial: none}", group=LIMIT + "drop") as first:
            is_logical = "logical" in make
            told = "belongs to database" if is_logical else "belongs to plugin"
            assert told in await refused(first)
            seen = first.engine.supervisors[0].guard
            measured: list[object] = []
            judge = seen._judge

            async def judged(plain: object, retained: object) -> None:
                await judge(plain, retained)  # type: ignore[arg-type]
                measured.append(retained)

            monkeypatch.setattr(seen, "_judge", judged)
            await until(lambda: len(measured) > 3, "several looks", SECONDS)
            assert other.execute(slots) == before
        other.execute("select pg_drop_replication_slot('streamer_shop')")
