"""Tables and sources that come and go while the rest streams."""

from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamer.commands.table_requests import request
from streamer.errors.error_classes import MappingError
from streamer.source.slot_and_publications import slot
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same, contents, waits_for_lock
from tests.support.remedies import Operator, remedy_of
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.fixture
def change(tmp_path: Path, source: Database, target: Database):
    """Write new tables into the configuration, and apply the configuration."""

    async def write_and_apply(streamer: Streamer, tables: str, **options: Any) -> None:
        write_config(streamer.path, source, target, tables, **options)
        await streamer.apply()

    return write_and_apply


def slot_pid(source: Database) -> int:
    rows = source.execute(
        "select active_pid from pg_replication_slots"
        " where database = current_database() and not temporary"
    )
    (pid,) = rows[0]
    assert isinstance(pid, int)
    return pid


@streams(
    "{a: {}}",
    source="create table a (id int primary key); create table b (v int);"
    " insert into a values (1); insert into b values (1), (1)",
)
async def test_tables_join_and_leave_while_others_stream(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    pid = slot_pid(source)
    await shared.change("{a: {}, b: {}}")
    source.execute("insert into a values (2); insert into b values (2)")
    await shared.caught_up()
    assert_same(source, target, "a")
    assert_same(source, target, "b")
    assert len((await shared.status())["tables"]) == 2

    await shared.change("{b: {}}")
    source.execute("insert into a values (3); insert into b values (3)")
    await shared.caught_up()
    assert contents(target, "a") == [("(1)",), ("(2)",)]
    assert_same(source, target, "b")
    published = (
        "select tablename from pg_publication_tables where pubname like 'streamer%'"
        f" and schemaname = '{source.schema}'"
    )
    assert source.execute(published) == [("b",)]

    # The table joins again: a copy replaces the rows of the target, which streamer wrote.
    await shared.change("{a: {truncate_target: true}, b: {}}")
    source.execute("delete from a where id = 2; insert into b values (4)")
    await shared.caught_up()
    assert_same(source, target, "a")
    assert_same(source, target, "b")
    assert slot_pid(source) == pid, "the stream was not interrupted"
    left = "select count(*) from pg_replication_slots where database = current_database()"
    assert source.execute(left) == [(1,)]


@streams(
    "{a: {}}", source="create table a (id int primary key); create table b (id int primary key)"
)
async def test_an_idle_source_and_a_table_without_rows(shared: Shared) -> None:
    await shared.caught_up()
    await shared.change("{a: {}, b: {}}")
    await shared.table_state("public.b", "ready")


@streams(
    "{a: {}, b: {}}",
    source="create table a (id int primary key, v int); insert into a values (1, 1);"
    "create table b (id int primary key); insert into b values (1)",
)
async def test_another_target_type_or_rule(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    pid = slot_pid(source)
    await shared.change("{a: {target: other}, b: {}}")
    source.execute("insert into a values (2, 2); update a set v = 7 where id = 1")
    await shared.caught_up()
    assert_same(source, target, "a", "other")
    assert contents(target, "a") == [("(1,1)",)]

    await shared.change("{a: {target: other, type: append}, b: {}}")
    await shared.caught_up()
    source.execute("delete from a where id = 2")
    await shared.caught_up()
    assert len(contents(target, "other")) == 2

    # Only the way to write changes differs, so no copy is due.
    target.execute("delete from other where id = 1")
    await shared.change("{a: {target: other, type: append, exclude: [v]}, b: {}}")
    source.execute("insert into a values (3, 3); insert into b values (2)")
    await shared.caught_up()
    assert contents(target, "other") == [("(2,2)",), ("(3,)",)]
    assert_same(source, target, "b")
    assert slot_pid(source) == pid


@streams("{a: {}}", source="create table a (id int primary key)")
async def test_a_rule_that_mends_a_table_in_error(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("alter table a add column v int; insert into a values (1, 1)")
    await shared.table_state("public.a", "error")
    await shared.change("{a: {exclude: [v]}}")
    await shared.caught_up()
    assert contents(target, "a") == [("(1)",)]


@streams("{'*': {}}", source="create table a (v int)")
async def test_a_pattern_matches_new_tables(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("create table b (v int); insert into b values (1)")
    await shared.apply()
    await shared.caught_up()
    assert_same(source, target, "b")


@streams(
    "{a: {}}", source="create table a (id int primary key); create table ab (id int primary key)"
)
async def test_a_mapping_that_cannot_be_changes_nothing(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with pytest.raises(MappingError, match=r"\.ab\b"):
        await shared.change('{a: {}, "a*": {}, "*b": {}}')
    source.execute("insert into a values (1)")
    await shared.caught_up()
    assert_same(source, target, "a")


@streams("{a: {}}", source="create table a (id int primary key)")
async def test_a_table_that_is_missing_stops_alone_as_it_does_at_a_start(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    pid = slot_pid(source)
    await shared.change("{a: {}, nowhere: {}}")
    await shared.table_state("public.nowhere", "error", 60)
    error = (await shared.table("public.nowhere"))["error"]
    assert (
        f'table "{shared.own("nowhere")}" does not exist at the source; create the table there'
        in error
    )
    source.execute("insert into a values (1)")
    source.execute("create table nowhere (id int primary key); insert into nowhere values (1)")
    await shared.caught_up(60)
    assert_same(source, target, "a")
    assert_same(source, target, "nowhere")
    assert slot_pid(source) == pid


async def test_a_table_that_the_source_refuses_to_publish_stops_alone(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key); create table b (id int primary key)")
    role = f"reader_{source.name}"
    source.execute(
        f"create role {role} login replication; grant create on database {source.name} to {role};"
        f"grant select on all tables in schema public to {role}; alter table a owner to {role}"
    )
    source.url_user = role
    try:
        async with stream("{a: {}}") as streamer:
            await streamer.caught_up()
            await change(streamer, "{a: {}, b: {}}")
            await streamer.table_state("public.b", "error", 60)
            error = (await streamer.table("public.b"))["error"]
            assert "must be owner of table b" in error
            source.execute("insert into a values (1)")

            async def is_copied() -> bool:
                return contents(target, "a") == [("(1)",)]

            await streamer.eventually(is_copied, 60)
            await streamer.stop()
            streamer.start()  # a start judges alike
            source.execute("insert into a values (2)")
            await streamer.table_state("public.b", "error", 60)
            assert error in (await streamer.table("public.b"))["error"]
    finally:
        source.url_user = "postgres"
        source.execute(
            "select pg_drop_replication_slot('streamer_shop');"
            f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}"
        )


async def test_with_one_lane_for_all_tables(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (v int); create table b (v int); create table c (v int)")
    one_lane = "consistency: transaction"
    async with stream("{a: {}, b: {}}", settings=one_lane) as streamer:
        await streamer.caught_up()
        source.execute("insert into a values (1); insert into b values (1)")
        await change(streamer, "{a: {}, c: {}}", settings=one_lane)
        source.execute("insert into a values (2); insert into c values (2)")
        await streamer.caught_up()
        assert_same(source, target, "a")
        assert_same(source, target, "c")
        assert contents(target, "b") == [("(1)",)]


@streams(
    "{a: {}}",
    source="create table a (v int); create table b (v int);"
    " insert into a values (1); insert into b values (1)",
)
async def test_a_table_that_is_removed_while_it_is_copied(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("create table b (v int)")
    with target.connect() as lock, lock.transaction():
        lock.execute("lock table b")
        await shared.change("{a: {}, b: {}}")
        await until(lambda: waits_for_lock(target), "the copy waits for the lock")
        await shared.change("{a: {}}")
        source.execute("insert into a values (2)")
        await shared.caught_up()
        assert_same(source, target, "a")
    assert [t["source"] for t in (await shared.status())["tables"]] == [shared.own("a")]
    temporary = "select slot_name from pg_replication_slots where temporary and database = current_database()"
    assert source.execute(temporary) == []


async def test_sources_come_and_go(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    source.execute("create table a (id int primary key); insert into a values (1)")
    async with stream("{a: {}}", sid="eu") as streamer:
        await streamer.caught_up()
        written = streamer.path.read_text()
        url = f'{{url: "{source.url}", sid: eu}}'
        assert url in written
        both = written.replace(url, f"{url}, {url.replace('sid: eu', 'sid: us')}")
        streamer.path.write_text(both)
        await streamer.apply()
        await streamer.caught_up()
        assert sorted(contents(target, "a")) == [("(eu,1)",), ("(us,1)",)]

        streamer.path.write_text(written)
        await streamer.apply()
        source.execute("insert into a values (2)")
        await streamer.caught_up()
        assert sorted(contents(target, "a")) == [("(eu,1)",), ("(eu,2)",), ("(us,1)",)]
        slots = "select slot_name from pg_replication_slots where database = current_database()"
        assert source.execute(slots) == [("streamer_shop_eu",)]
        publications = "select pubname from pg_publication where pubname like '%us%'"
        assert source.execute(publications) == []
        assert target.execute("select sid from streamer.source") == [("eu",)]


@pytest.mark.follows("copy.finish_copies:_with_resume")
@streams("{a: {}}", source="create table a (v int); create table b (v int)")
async def test_a_transaction_from_before_is_waited_for_and_named(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = shared.source, shared.target
    monkeypatch.setattr(slot, "CHECK_SECONDS", 0.2)
    await shared.caught_up()
    with source.connect() as open_transaction, open_transaction.transaction():
        open_transaction.execute("insert into b values (1)")
        pid = open_transaction.info.backend_pid
        await shared.change("{a: {}, b: {}}")

        async def names_it() -> bool:
            table = await shared.table("public.b")
            return f"pid {pid}" in (table["waiting_for"] or "") and table["state"] == "copying"

        await shared.eventually(names_it)
        source.execute("insert into a values (1)")
        await shared.eventually(lambda: has_rows(target, "a", 1))
    await shared.caught_up()  # committed by leaving the block
    assert_same(source, target, "b")
    assert (await shared.table("public.b"))["error"] is None

    monkeypatch.setattr(slot, "WAIT_SECONDS", 1.0)
    with source.connect() as open_transaction, open_transaction.transaction():
        open_transaction.execute("insert into b values (2)")
        await shared.change("{a: {}}")
        await shared.change("{a: {}, b: {truncate_target: true}}")
        remedy = await remedy_of(shared, shared.own("b"), "has waited too long for")
        walsenders = "select count(*) from pg_stat_activity where backend_type = 'walsender' and datname = current_database()"

        async def is_gone() -> bool:
            return source.execute(walsenders) == [(1,)]

        await shared.eventually(is_gone)
        assert source.execute(
            "select count(*) from pg_replication_slots where temporary and database = current_database()"
        ) == [(0,)]
    monkeypatch.undo()
    address = TargetAddress.parse(shared.settings.target.url)
    await request(address, "pause", shared.own("a"), database=None, sid=None)
    await shared.table_state(shared.own("a"), "paused")
    await Operator(shared.path, source, target).follow(remedy)
    await shared.table_state(shared.own("b"), "ready")
    assert (await shared.table(shared.own("a")))["state"] == "paused"
    await request(address, "resume", shared.own("a"), database=None, sid=None)
    await shared.caught_up()
    assert_same(source, target, "b")
    await shared.change("{a: {}}")


async def has_rows(db: Database, table: str, count: int) -> bool:
    return len(contents(db, table)) == count


async def test_stopped_while_the_first_slot_waits(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table a (v int)")
    monkeypatch.setattr(slot, "CHECK_SECONDS", 0.2)
    async with stream("{a: {}}") as streamer:

        async def says_so() -> bool:
            return any("waits for" in (s["error"] or "") for s in await streamer.statuses())

        with psycopg.connect(source.url) as open_transaction:
            open_transaction.execute("insert into a values (1)")
            await streamer.eventually(says_so)
            for end in (streamer.kill, streamer.stop):
                await end()
                target.execute("update streamer.source set error = null")
                streamer.start()
                await streamer.eventually(says_so)
        await streamer.caught_up()
        assert_same(source, target, "a")
