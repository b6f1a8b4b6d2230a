"""`streamer check` at a source: server, role, publications, slot. The printed SQL is the remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from streamer.commands import table_requests as requests_command
from streamer.commands.check import source_facts
from streamer.commands.check.findings import Finding
from streamer.commands.demo.embedded_servers import Server
from streamer.config import static_mapping
from streamer.errors.remedies import Remedy
from streamer.source.slot_and_publications.slot import drop_slot_sql
from streamer.source.stream.replication_stream import ReplicationStream, StreamOptions
from streamer.target.connection import TargetAddress
from streamer.util.lsn import INVALID_LSN
from tests.support.checking import (
    ERROR,
    INFO,
    ITEMS,
    WARNING,
    Checker,
    both,
    matching,
    prepare_bookkeeping,
    prepared,
)
from tests.support.postgres import assert_same, database, running, versions
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import MakeStreamer, Streamer


@pytest.mark.follows("source.catalog:find_unready")
async def test_a_server_that_is_not_set_up(server_directory: Path, tmp_path: Path) -> None:
    settings = {
        "wal_level": "replica",
        "max_replication_slots": "0",
        "max_wal_senders": "0",
        "max_slot_wal_keep_size": "64MB",
        "idle_replication_slot_timeout": "60",
        "wal_sender_timeout": "2s",
        "logical_decoding_work_mem": "64kB",
        "fsync": "on",
        "synchronous_commit": "off",
    }
    with (
        running(server_directory / "bare", versions()["18"], settings) as server,
        database(server, "s") as source,
        database(server, "t") as target,
    ):
        source.execute(ITEMS)
        checker = Checker(tmp_path / "config.yaml", source, target)
        checker.configure("items:")
        findings = await checker.findings()
        for severity, words in (
            (ERROR, "wal_level is replica"),
            (ERROR, "max_replication_slots is 0, of which 0 are free: 1 needed"),
            (ERROR, "max_wal_senders is 0, of which 0 are free: 1 needed"),
            (WARNING, "max_slot_wal_keep_size is 64 MB"),
            (WARNING, "idle_replication_slot_timeout is"),
            (WARNING, "wal_sender_timeout is 2000 ms"),
            (INFO, "logical_decoding_work_mem is 64 kB"),
        ):
            (found,) = matching(findings, severity, words)
            checker.run_fix(found)
        assert matching(findings, INFO, "synchronous_commit is off")
        server.stop()
        server.start()
        findings = await checker.findings()
        assert [f for f in findings if "synchronous_commit" not in f.problem] == []


async def test_a_role_that_may_nothing_at_the_source(role: str, checker: Checker) -> None:
    source = checker.source
    source.server.execute(f"alter role {role} noreplication")
    source.execute(f"{ITEMS}; create schema inner_; create table inner_.t (id int primary key)")
    source.execute("alter table items enable row level security")
    source.url_user = role
    checker.configure("items: {}\ninner_.t: {}")

    await checker.mends(ERROR, "may not replicate")
    published = await checker.finds(ERROR, "cannot publish the tables", "does not own")
    await checker.mends(ERROR, 'schema "inner_"', "may not use it")
    await checker.mends(ERROR, "inner_.t", "cannot be read by role")
    await checker.mends(ERROR, "public.items", "cannot be read by role")
    await checker.mends(ERROR, "row level security would hide rows")
    checker.run_fix(published)
    assert not matching(await checker.findings(), ERROR)
    # A further table is not published: the operator has to run only the SQL for that table.
    source.execute(f"create table later (id int primary key); grant select on later to {role}")
    checker.configure("items: {}\ninner_.t: {}\nlater: {}")
    found = await checker.mends(ERROR, "does not own publication", "does not own public.later")
    assert found.fix is not None
    assert found.fix.sql == ('alter publication "streamer_shop" add table only "public"."later"',)


async def test_a_role_with_publications_and_slot_made_for_it(
    role: str, checker: Checker, stream: MakeStreamer
) -> None:
    """A stream needs only LOGIN and REPLICATION; a copy also needs SELECT."""
    both(checker, ITEMS)
    checker.source.url_user = role
    checker.configure("items: {initial: none}")
    await checker.mends(ERROR, "cannot publish the tables", "lacks CREATE on database")
    checker.source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
    assert await checker.findings() == []
    async with stream("items: {initial: none}") as streamer:
        await streamer.caught_up()
        checker.source.execute("insert into items values (1)")
        await streamer.caught_up()
    assert checker.target.execute("select * from items") == [(1, None)]


@pytest.mark.usefixtures("without_spark")
@pytest.mark.follows("source.identity_advice:IdentityAdvice.remedy")
async def test_a_table_that_lost_its_key_may_stay_in_a_publication_of_an_administrator(
    role: str, checker: Checker, stream: MakeStreamer
) -> None:
    """The source refuses updates of the table until it has an identity; a single statement helps."""
    source, target = checker.source, checker.target
    source.execute(
        f"{ITEMS}; insert into items values (1, 'a'); grant select on items to {role};"
        "create publication streamer_shop for table only items"
        " with (publish_via_partition_root = true);"
        "create publication streamer_shop_ins"
        " with (publish = 'insert, truncate', publish_via_partition_root = true)"
    )
    source.url_user = role
    refused = 'refuses the application\'s UPDATE and DELETE while publication "streamer_shop"'
    update = "update items set name = 'b'"
    async with stream("items:") as streamer:
        await streamer.caught_up()
        source.execute("alter table items drop constraint items_pkey")
        remedy = await remedy_of(streamer, "public.items", refused)
        # `check` names the table once, with the same words and statement.
        found = await checker.finds(ERROR, "items")
        assert found.fix is not None
        assert refused in found.problem
        assert found.fix.sql == remedy.sql[0].statements
        assert not matching(await checker.findings(), WARNING, "items")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            source.execute(update)
        await Operator(streamer.path, source, target).follow(remedy, choose=0)
        source.execute(update)
        await streamer.table_state("public.items", "ready", 60)
        await streamer.caught_up()
        source.execute("update items set name = 'c'")
        await streamer.caught_up()
        assert_same(source, target, "items")


@pytest.mark.since(15)  # WHERE of a publication
async def test_publications_made_beforehand_that_keep_something_back(checker: Checker) -> None:
    checker.source.execute(
        f"{ITEMS}; create table p (id int primary key) partition by range (id);"
        "create publication streamer_shop for table only items, only p with (publish = 'insert');"
        "create publication streamer_shop_ins with (publish = 'truncate')"
    )
    checker.configure("items: {}\np: {}")
    # A single statement mends all options of a publication: each option stops the tables that
    # stream.
    await checker.finds(ERROR, '"streamer_shop": publishes partitions by their own names')
    await checker.finds(ERROR, '"streamer_shop_ins": publishes partitions by their own names')
    await checker.mends(ERROR, "does not publish update, delete, truncate")
    await checker.mends(ERROR, "does not publish insert")
    assert not matching(await checker.findings(), ERROR)

    checker.source.execute(
        "alter publication streamer_shop set table only items where (id > 5), only p"
    )
    await checker.finds(WARNING, "public.items", "omits rows by a row filter")
    checker.source.execute("alter publication streamer_shop set table only items (id), only p")
    await checker.finds(WARNING, "public.items", "omits columns by a column list")
    checker.source.execute("drop publication streamer_shop, streamer_shop_ins")
    assert not matching(await checker.findings(), ERROR)


async def test_transactions_that_a_new_slot_waits_for(
    role: str, checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_facts, "LONG_SECONDS", 0.0)
    checker.source.execute(ITEMS)
    checker.configure("items:")
    with prepared(checker.source, "it's"):
        found = await checker.mends(WARNING, "waits for prepared transaction 'it''s'")
        assert f'in database "{checker.source.name}"' in str(found)
    with checker.source.connect() as connection:
        connection.autocommit = False
        connection.execute("insert into items values (2)")
        pid = connection.info.backend_pid
        # The role may not see the start of foreign transactions.
        checker.source.url_user = role
        checker.configure("items:")
        await checker.finds(WARNING, "a transaction that has been open for a while", f"pid {pid},")
        checker.source.url_user = "postgres"
        checker.configure("items:")
        found = await checker.mends(WARNING, "waits for a transaction that has been", f"pid {pid},")
        assert checker.source.name in str(found)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")


async def streamed(checker: Checker, stream: MakeStreamer) -> None:
    """Let streamer run once, so that slot and progress are there."""
    both(checker, ITEMS)
    async with stream("items: {initial: none}") as streamer:
        await streamer.caught_up()
    checker.configure("items: {initial: none}")
    assert await checker.findings() == []


async def run_resync(checker: Checker, finding: Finding) -> None:
    """Run the command of a finding, with the first steps of `run`."""
    assert finding.fix is not None
    assert finding.fix.sql == ("streamer resync '*.*' --database shop",)
    settings, _ = static_mapping.load(checker.path)
    address = TargetAddress.parse(settings.target.url)
    await requests_command.request(address, "resync", "*.*", database="shop", sid=None)
    checker.target.execute("update streamer.relation set state = 'init', snapshot_lsn = null")


async def test_a_slot_or_a_server_that_is_another(checker: Checker, stream: MakeStreamer) -> None:
    await streamed(checker, stream)
    with prepared(checker.source, "p"):  # no statement waits: slot and rows exist
        assert await checker.findings() == []
    checker.target.execute("update streamer.source set system_identifier = '7'")
    await checker.finds(ERROR, "the source is a different server now", "need a resync")
    checker.target.execute("update streamer.source set system_identifier = null")
    checker.source.execute("select pg_drop_replication_slot('streamer_shop')")
    found = await checker.finds(ERROR, '"streamer_shop" is gone', "need a resync: public.items")
    await run_resync(checker, found)
    assert not matching(await checker.findings(), ERROR)


async def test_a_slot_that_is_ahead_of_the_target(checker: Checker, stream: MakeStreamer) -> None:
    await streamed(checker, stream)
    checker.source.execute("insert into items values (1)")
    checker.source.execute(
        "select pg_replication_slot_advance('streamer_shop', pg_current_wal_lsn())"
    )
    found = await checker.finds(ERROR, "ahead of", "need a resync: public.items")
    await run_resync(checker, found)
    await checker.finds(WARNING, "no table is in sync, so `run` re-creates the slot")


async def test_an_invalidated_slot(server_directory: Path, tmp_path: Path) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    settings |= {"fsync": "on"}
    with (
        running(server_directory / "greedy", versions()["16"], settings) as server,
        database(server, "s") as source,
        database(server, "t") as target,
    ):
        both(checker := Checker(tmp_path / "config.yaml", source, target), ITEMS)
        checker.configure("items: {initial: none}")
        source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
        await checker.mends(WARNING, "max_slot_wal_keep_size is 1 MB")
        source.execute("alter system reset max_slot_wal_keep_size")
        source.execute("select pg_reload_conf()")
        for _ in range(4):
            source.execute("create table x (); drop table x; select pg_switch_wal()")
        source.execute("checkpoint")
        await checker.finds(WARNING, '"streamer_shop" was invalidated')
        record = "insert into streamer.source (database, slot, publication) values ('shop', '', '')"
        await prepare_bookkeeping(checker)
        target.execute(record)
        target.execute(
            "insert into streamer.relation (source_id, source, target, type, state)"
            " select id, 'public.items', 'public.items', 'clone', 'ready' from streamer.source"
        )
        await checker.finds(ERROR, '"streamer_shop" was invalidated', "need a resync")


@pytest.mark.follows("source.slot_and_publications.slot:Slot.misfit")
@pytest.mark.usefixtures("short_backoffs", "without_spark")
async def test_a_slot_of_somebody_else_stops_it_and_stays(
    checker: Checker, stream: MakeStreamer
) -> None:
    both(checker, ITEMS)
    checker.source.execute("select pg_create_physical_replication_slot('streamer_shop')")
    try:
        checker.configure("items: {initial: none}")
        await checker.finds(ERROR, "belongs to plugin", "another name")
        await mended(checker, stream, "belongs to plugin")
        assert not matching(await checker.findings(), ERROR)
    finally:
        checker.source.execute(drop_slot_sql("streamer_shop"))


async def mended(checker: Checker, stream: MakeStreamer, words: str) -> None:
    """Start, be refused with *words*, follow the remedy, and stream."""
    async with stream("items: {initial: none}") as streamer:
        await streamer.source_state("error")  # before, `status` prints a remedy of its own
        remedy = await remedy_of(streamer, None, words)
        slots = "select 1 from pg_replication_slots where slot_name = 'streamer_shop'"
        assert checker.source.execute(slots), "streamer leaves the slot alone"
        if remedy.steps:
            await Operator(streamer.path, checker.source, checker.target).follow(remedy)
        else:
            command = re.search(r"ALTER_REPLICATION_SLOT .* \(TWO_PHASE false\)", str(remedy))
            assert command is not None, remedy
            with psycopg.connect(
                checker.source.url, replication="database", autocommit=True
            ) as replication:
                replication.execute(command[0].encode())
        await streamer.caught_up()
        checker.source.execute("insert into items select coalesce(max(id), 0) + 1 from items")
        await streamer.caught_up()
        assert_same(checker.source, checker.target, "items")


@pytest.mark.follows("source.slot_and_publications.slot:Slot.misfit")
@pytest.mark.usefixtures("short_backoffs", "without_spark")
async def test_a_slot_for_prepared_transactions(checker: Checker, stream: MakeStreamer) -> None:
    both(checker, ITEMS)
    checker.source.execute(TWO_PHASE)
    checker.configure("items: {initial: none}")
    await checker.finds(ERROR, "(two_phase)")
    await mended(checker, stream, "(two_phase)")
    await checker.is_gone(ERROR, "two_phase")


TWO_PHASE = "select pg_create_logical_replication_slot('streamer_shop', 'pgoutput', false, true)"


@pytest.mark.follows("source.slot_and_publications.slot:Slot.misfit")
@pytest.mark.usefixtures("short_backoffs", "without_spark")
async def test_a_slot_that_came_in_the_place_of_ours_costs_a_copy(
    checker: Checker, stream: MakeStreamer
) -> None:
    await streamed(checker, stream)
    with checker.source.connect() as session:
        for words, sql in (
            ("belongs to plugin", "select pg_create_physical_replication_slot('streamer_shop')"),
            ("is temporary", TWO_PHASE.replace("false, true", "true")),
        ):
            checker.source.execute(drop_slot_sql("streamer_shop"))
            session.execute(sql.encode())
            checker.source.execute("insert into items select coalesce(max(id), 0) + 1 from items")
            status = await Streamer(checker.path).status()
            remedy = Remedy.from_json(status["remedy"])
            assert words in status["error"]
            assert remedy is not None
            assert [step.action for step in remedy.commands] == ["resync", "run"]
            await mended(checker, stream, words)


async def test_a_slot_that_goes_with_its_session(checker: Checker, stream: MakeStreamer) -> None:
    both(checker, ITEMS)
    checker.configure("items: {initial: none}")
    with checker.source.connect() as session:
        session.execute(
            "select pg_create_logical_replication_slot('streamer_shop', 'pgoutput', true)"
        )
        async with stream("items: {initial: none}") as streamer:
            await remedy_of(streamer, None, '"streamer_shop" is read by process')
        await checker.mends(ERROR, "is temporary")


async def test_a_publication_of_generated_columns(
    servers: Callable[[str], Server], tmp_path: Path
) -> None:
    server = servers("18")
    with database(server, "s") as source, database(server, "t") as target:
        checker = Checker(tmp_path / "config.yaml", source, target)
        both(checker, ITEMS)
        source.execute(
            "create publication streamer_shop for table items"
            " with (publish_via_partition_root, publish_generated_columns = stored)"
        )
        checker.configure("items:")
        await checker.mends(ERROR, "sends generated columns")


async def test_a_publication_of_inserts_that_publishes_updates(checker: Checker) -> None:
    both(checker, ITEMS)
    checker.source.execute("create publication streamer_shop_ins")
    checker.configure("items:")
    await checker.mends(ERROR, "publishes delete, update")


async def test_a_slot_that_somebody_else_streams_from(checker: Checker) -> None:
    checker.source.execute(f"{ITEMS}; create publication p for table items")
    checker.source.execute("select pg_create_logical_replication_slot('streamer_shop', 'pgoutput')")
    checker.configure("items:")
    await checker.is_gone(ERROR, "slot")
    _, mapping = static_mapping.load(checker.path)
    options = StreamOptions(("p",))
    stream = await ReplicationStream.start(
        mapping.sources[0], "streamer_shop", INVALID_LSN, options
    )
    try:
        await checker.mends(ERROR, '"streamer_shop" is read by process', "not for this target")
    finally:
        await stream.close()
