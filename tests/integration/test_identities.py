"""Replica identities of roots and leaves: the application's own statements never fail because of us."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamer.commands.check.check import check
from streamer.config import static_mapping
from streamer.errors.error_classes import (
    SourceConnectionError,
    SourceContentionError,
    StreamerError,
)
from streamer.runtime.guards import publications
from streamer.runtime.session import source_checks as looking
from streamer.source.slot_and_publications.publication import ensure_publications
from tests.support.postgres import Database, assert_same
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import MakeStreamer, write_config
from tests.support.waiting import until

LOST = "updates and deletes are not replicated"
ROOTS = """
create table p (id int not null, day date not null, v text) partition by range (day);
create table p1 partition of p for values from ('2021-01-01') to ('2022-01-01');
alter table p replica identity full;
create table q (id int not null, v text) partition by range (id);
create table q1 partition of q for values from (0) to (10);
create table q2 partition of q for values from (10) to (20) partition by range (id);
create table q21 partition of q2 for values from (10) to (20);
create unique index q_id on q (id);
alter table q replica identity using index q_id;
insert into p values (1, '2021-05-05', 'copied'); insert into q values (1, 'copied'), (11, 'copied')
"""


async def test_a_leaf_without_the_identity_of_its_root_does_not_stop_the_application(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    tmp_path: Path,
) -> None:
    source.execute(ROOTS)
    write_config(tmp_path / "check.yaml", source, target, "p:\nq:")
    settings, mapping = static_mapping.load(tmp_path / "check.yaml")
    report = await check(settings, mapping)
    problems = {str(f.place): f for f in report.findings if LOST in f.problem}
    assert 'its partition "public.p1"' in problems["shop public.p"].problem
    assert 'its partition "public.q1"' in problems["shop public.q"].problem
    async with stream("p:\nq:") as streamer:
        await streamer.caught_up(60)
        source.execute("update p set v = 'updated'; delete from q where id = 1")
        source.execute("insert into p values (2, '2021-06-06', 'new')")
        await streamer.caught_up(60)
    # The fix of `check` works: then both are published whole.
    for finding in (problems["shop public.p"], problems["shop public.q"]):
        assert finding.fix is not None
        for sql in finding.fix.sql:
            source.execute(sql)
    report = await check(settings, mapping)
    assert not [f for f in report.findings if LOST in f.problem]
    # The fix of `check` works: then both are published whole, after a copy.
    for finding in (problems["shop public.p"], problems["shop public.q"]):
        assert finding.fix is not None
        for sql in finding.fix.sql:
            source.execute(sql)
    report = await check(settings, mapping)
    assert not [f for f in report.findings if LOST in f.problem]
    source.execute("update p set v = 'while nobody runs'")
    async with stream("p:\nq:") as streamer:
        await streamer.caught_up(60)
        source.execute("update p set v = 'again' where id = 1; update q set v = 'again'")
        await streamer.caught_up(60)
        assert_same(source, target, "p")
        assert_same(source, target, "q")


async def works(source: Database, sql: str) -> bool:
    """Whether the application's statement succeeds by now."""
    try:
        await asyncio.to_thread(source.execute, sql)
    except psycopg.errors.ObjectNotInPrerequisiteState:
        return False
    except psycopg.errors.InvalidColumnReference:
        return False
    return True


async def test_identities_that_change_while_streaming(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    source.execute(
        """
        create table keyless (id int, v text);
        create table p (id int not null, v text) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        alter table p replica identity full; alter table p1 replica identity full;
        create table f (id int, region text, v text, primary key (id, region));
        create table plain (id int primary key, v text);
        insert into keyless values (1, 'a'), (2, 'b'); insert into p values (1, 'a');
        insert into f values (1, 'EU', 'a'), (2, 'US', 'b'); insert into plain values (1, 'a')
        """
    )
    tables = "keyless:\np:\nf: {filter: \"region = 'EU'\"}\nplain:"
    attempt = "select attempt from streamer.relation where source = 'public.{}'"
    async with stream(tables) as streamer:
        await streamer.caught_up(60)
        before = {name: target.value(attempt.format(name)) for name in ("keyless", "p", "plain")}

        # Gained: only inserts were published, so rows may differ until the table is copied.
        source.execute("update keyless set v = 'lost' where id = 1")
        source.execute("alter table keyless replica identity full")

        async def is_copied_again(table: str = "keyless") -> bool:
            return bool(target.value(attempt.format(table)) != before[table])

        await streamer.eventually(is_copied_again, 60)
        await streamer.caught_up(60)
        source.execute("update keyless set v = 'kept' where id = 2")

        # A plain table goes on with a new key, which the stream announces in order.
        source.execute("alter table plain replica identity full; update plain set v = 'full'")
        source.execute("alter table plain replica identity default; update plain set id = 2")

        # A column that a published filter uses leaves the key.
        source.execute("alter table f drop constraint f_pkey, add primary key (id)")
        update = "update f set v = v || '!'"
        await streamer.eventually(lambda: works(source, update), 60)
        await streamer.caught_up(60)
        assert target.execute("select * from f") == [(1, "EU", "a!")]

        # A new leaf does not inherit FULL, and the application's statements must work all the same.
        source.execute("create table p2 partition of p for values from (10) to (20)")
        source.execute("insert into p values (11, 'new')")
        await streamer.eventually(lambda: works(source, "update p set v = 'updated'"), 60)
        await streamer.table_state("public.p", "error", 60)
        error = (await streamer.table("public.p"))["error"]
        assert 'its partition "public.p2" has no primary key' in error
        assert "streamer resync public.p --database shop" in error
        source.execute("insert into plain values (3, 'others go on')")
        source.execute("alter table p2 replica identity full")
        await streamer.eventually(lambda: is_copied_again("p"), 60)
        await streamer.caught_up(60)
        source.execute("delete from p where id = 1")
        await streamer.caught_up(60)
        for table in ("keyless", "p", "plain"):
            assert_same(source, target, table)
        assert not await is_copied_again("plain")


@pytest.mark.follows("copy.gap_reports:_describe")
async def test_streamer_reports_a_partition_that_was_detached_for_a_while(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a single transaction, too: the stream lacks the changes between detaching and attaching."""
    monkeypatch.setattr(looking, "CHECK_SECONDS", 0.5)
    source.execute(
        """
        create table p (id int primary key, v text) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        insert into p values (1, 'copied')
        """
    )
    async with stream("p:") as streamer:
        await streamer.caught_up(60)
        await asyncio.to_thread(
            source.execute,
            "begin; alter table p detach partition p1; update p1 set v = 'changed';"
            " alter table p attach partition p1 for values from (0) to (10); commit",
        )
        remedy = await remedy_of(streamer, "public.p", "was detached and attached again")
        assert "--mode diff" in str(remedy)
        await Operator(streamer.path, source, target).follow(remedy)

        async def is_equal() -> bool:
            table = await streamer.table("public.p")
            equal = target.execute("select * from p") == [(1, "changed")]
            return equal and table["state"] == "ready" and table["error"] is None

        await streamer.eventually(is_equal, 60)


@pytest.mark.parametrize("error", [SourceContentionError, SourceConnectionError])
async def test_a_key_that_returns_before_the_publication_changes_is_noticed(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    without_spark: None,
    error: type[StreamerError],
) -> None:
    """streamer stores the table's stop first, and a failure may come before the next fact is
    stored.
    """
    source.execute("create table t (id int primary key, v int)")
    failures: list[type[StreamerError]] = []

    async def fail_once(*arguments: Any) -> Any:
        sql = "select count(*) from streamer.relation where state = 'error'"
        if not failures and (await asyncio.to_thread(target.execute, sql)) != [(0,)]:
            failures.append(error)
            await asyncio.to_thread(source.execute, "alter table t add primary key (id)")
            raise error("staged")
        return await ensure_publications(*arguments)

    monkeypatch.setattr(publications, "ensure_publications", fail_once)
    async with stream("t:") as streamer:
        await streamer.caught_up()
        await asyncio.to_thread(source.execute, "alter table t drop constraint t_pkey")
        await until(lambda: failures)
        await streamer.table_state("public.t", "ready")
        source.execute("insert into t values (1, 1); update t set v = 2")
        await streamer.caught_up()
        assert_same(source, target, "t")
