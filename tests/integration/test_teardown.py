"""Teardown removes streamer's objects, and only these."""

import re

import pytest

from streamer.commands.teardown import teardown
from streamer.source.journal.journal_files import Journal, directory_of, has_journal
from streamer.source.journal.journal_records import JournalIdentity
from streamer.source.timeline_branches import Branch
from streamer.target.connection import TargetAddress
from streamer.util.lsn import Lsn
from tests.support.postgres import Database, database
from tests.support.streamer import MakeStreamer, Streamer

SCHEMA = "select to_regnamespace('streamer') is not null"


async def tear_down(streamer: Streamer) -> None:
    address = TargetAddress.parse(streamer.settings.target.url)
    spools = streamer.settings.spool.path
    results = await teardown(address, list(streamer.mapping.sources), spools, actor="test")
    assert [result.error for result in results] == [None]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_tables_of_others_in_our_schema_stay(
    source: Database, target: Database, stream: MakeStreamer, is_shared: bool
) -> None:
    source.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        if is_shared:
            target.execute("create table streamer.precious as select 1 as one")
        await streamer.stop()
    journal = directory_of(streamer.settings.spool.path, "streamer_shop")
    Journal.create(journal, JournalIdentity("1", "streamer_shop"), Lsn(1), Branch(1)).close()
    await tear_down(streamer)
    await tear_down(streamer)
    assert list(journal.parent.iterdir()) == []

    assert target.value("select to_regclass('streamer.source') is null")
    assert target.value("select to_regclass('streamer.migration') is null")
    assert target.value(SCHEMA) is is_shared
    if is_shared:
        assert target.execute("select one from streamer.precious") == [(1,)]
    assert source.value("select count(*) from pg_publication") == 0

    # The remains do not stand in the way of a new beginning.
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()


async def test_indexes_that_a_copy_has_put_off_are_made_again(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
    target.execute(
        "insert into streamer.deferred_index (target, definition)"
        " values ('public.t', 'create index put_off on public.t (id)');"
        # The bookkeeping stays for a second source, and so does the audit.
        "insert into streamer.source (database, slot, publication) values ('other', 's', 'p')"
    )
    await tear_down(streamer)

    acts = target.execute("select actor, action, label, state from streamer.request")
    assert acts == [("test", "teardown", "shop", "done")]
    assert target.value("select to_regclass('put_off') is not null")


@pytest.mark.parametrize(
    "make",
    [
        "pg_create_logical_replication_slot('streamer_shop', 'pgoutput')",
        "pg_create_physical_replication_slot('streamer_shop')",
    ],
)
async def test_a_slot_of_another_database_or_program_stays(
    source: Database, target: Database, stream: MakeStreamer, make: str
) -> None:
    """Slots of all databases of a server share one name space, and publications do not."""
    source.execute("create table t (id int primary key)")
    with database(source.server, "other") as other:
        other.execute(f"select {make}")
        slots = "select slot_name::text from pg_replication_slots where slot_name = 'streamer_shop'"
        async with stream("t: {initial: none}") as streamer:
            await streamer.source_state("error")
            await streamer.stop()
        assert source.value("select count(*) from pg_publication") == 2
        address = TargetAddress.parse(streamer.settings.target.url)
        (result,) = await teardown(
            address, list(streamer.mapping.sources), streamer.settings.spool.path, actor="test"
        )
        assert re.search(
            'replication slot "streamer_shop" (is one of|belongs to)', str(result.error)
        )
        assert result.left_sql == ()
        assert other.execute(slots) == [("streamer_shop",)]
        assert source.value("select count(*) from pg_publication") == 0
        other.execute("select pg_drop_replication_slot('streamer_shop')")


async def test_a_journal_of_another_installation_stays(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """The journal may have the only copy of changes."""
    source.execute("create table t (id int primary key)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        await streamer.stop()
    target.execute("update streamer.installation set id = 'another'")
    journal = directory_of(streamer.settings.spool.path, "streamer_shop")
    Journal.create(journal, JournalIdentity("1", "streamer_shop"), Lsn(1), Branch(1)).close()
    address = TargetAddress.parse(streamer.settings.target.url)
    (result,) = await teardown(
        address, list(streamer.mapping.sources), streamer.settings.spool.path, actor="test"
    )
    assert "so slot and publications stay" in str(result.error)
    assert has_journal(journal)
