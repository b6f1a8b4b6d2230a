"""Tables and sources that come and go while everything else streams."""

from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamer.errors import MappingError
from streamer.source import slot
from tests.support.postgres import Database, assert_same, contents, waits_for_lock
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark")


@pytest.fixture
def change(tmp_path: Path, source: Database, target: Database):
    """Write other tables into the configuration and apply it."""

    async def write_and_apply(streamer: Streamer, tables: str, **options: Any) -> None:
        write_config(streamer.path, source, target, tables, **options)
        await streamer.apply()

    return write_and_apply


def slot_pid(source: Database) -> int:
    rows = source.execute(
        "select active_pid from pg_replication_slots where slot_name = 'streamer_shop'"
    )
    (pid,) = rows[0]
    assert isinstance(pid, int)
    return pid


async def test_tables_join_and_leave_while_others_stream(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key); create table b (v int)")
    source.execute("insert into a values (1); insert into b values (1), (1)")
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        pid = slot_pid(source)
        await change(streamer, "{a: {}, b: {}}")
        source.execute("insert into a values (2); insert into b values (2)")
        await streamer.caught_up()
        assert_same(source, target, "a")
        assert_same(source, target, "b")
        assert len((await streamer.status())["tables"]) == 2

        await change(streamer, "{b: {}}")
        source.execute("insert into a values (3); insert into b values (3)")
        await streamer.caught_up()
        assert contents(target, "a") == [("(1)",), ("(2)",)]
        assert_same(source, target, "b")
        published = "select tablename from pg_publication_tables where pubname like 'streamer%'"
        assert source.execute(published) == [("b",)]

        # Again, from the existing rows: its rows in the target are streamer's.
        await change(streamer, "{a: {truncate_target: true}, b: {}}")
        source.execute("delete from a where id = 2; insert into b values (4)")
        await streamer.caught_up()
        assert_same(source, target, "a")
        assert_same(source, target, "b")
        assert slot_pid(source) == pid, "the stream was not interrupted"
    leftovers = "select slot_name from pg_replication_slots where database = current_database()"
    assert source.execute(leftovers) == [("streamer_shop",)]


async def test_an_idle_source_and_a_table_without_rows(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key); create table b (id int primary key)")
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        await change(streamer, "{a: {}, b: {}}")
        await streamer.table_state("public.b", "ready")


async def test_another_target_type_or_rule(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key, v int); insert into a values (1, 1)")
    source.execute("create table b (id int primary key); insert into b values (1)")
    async with stream("{a: {}, b: {}}") as streamer:
        await streamer.caught_up()
        pid = slot_pid(source)
        await change(streamer, "{a: {target: other}, b: {}}")
        source.execute("insert into a values (2, 2); update a set v = 7 where id = 1")
        await streamer.caught_up()
        assert_same(source, target, "a", "other")
        assert contents(target, "a") == [("(1,1)",)]

        await change(streamer, "{a: {target: other, type: append}, b: {}}")
        await streamer.caught_up()
        source.execute("delete from a where id = 2")
        await streamer.caught_up()
        assert len(contents(target, "other")) == 2

        # Only the way to apply it: no copy.
        target.execute("delete from other where id = 1")
        await change(streamer, "{a: {target: other, type: append, exclude: [v]}, b: {}}")
        source.execute("insert into a values (3, 3); insert into b values (2)")
        await streamer.caught_up()
        assert contents(target, "other") == [("(2,2)",), ("(3,)",)]
        assert_same(source, target, "b")
        assert slot_pid(source) == pid


async def test_a_rule_that_mends_a_table_in_error(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key)")
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        source.execute("alter table a add column v int; insert into a values (1, 1)")
        await streamer.table_state("public.a", "error")
        await change(streamer, "{a: {exclude: [v]}}")
        await streamer.caught_up()
        assert contents(target, "a") == [("(1)",)]


async def test_a_pattern_matches_what_is_new(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create schema log; create table log.a (v int)")
    async with stream('{"log.*": {}}') as streamer:
        await streamer.caught_up()
        source.execute("create table log.b (v int); insert into log.b values (1)")
        await streamer.apply()
        await streamer.caught_up()
        assert_same(source, target, "log.b", "b")


async def test_a_mapping_that_cannot_be_changes_nothing(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key); create table ab (id int primary key)")
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        mapping = streamer.mapping
        with pytest.raises(MappingError, match="ab"):
            await change(streamer, '{a: {}, "a*": {}, "*b": {}}')
        streamer.mapping = mapping
        source.execute("insert into a values (1)")
        await streamer.caught_up()
        assert_same(source, target, "a")


async def test_a_table_that_is_missing_stops_alone_as_it_does_at_a_start(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (id int primary key)")
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        pid = slot_pid(source)
        await change(streamer, "{a: {}, nowhere: {}}")
        await streamer.table_state("public.nowhere", "error", 60)
        error = (await streamer.table("public.nowhere"))["error"]
        assert 'table "public.nowhere" is not in the source; create it there' in error
        source.execute("insert into a values (1)")
        source.execute("create table nowhere (id int primary key); insert into nowhere values (1)")
        await streamer.caught_up(60)
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

            async def is_brought() -> bool:
                return contents(target, "a") == [("(1)",)]

            await streamer.eventually(is_brought, 60)
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


async def test_a_table_that_is_removed_while_it_is_copied(
    source: Database, target: Database, stream: MakeStreamer, change
) -> None:
    source.execute("create table a (v int); create table b (v int)")
    source.execute("insert into a values (1); insert into b values (1)")
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        with psycopg.connect(target.url) as lock:
            target.execute("create table b (v int)")
            lock.execute("lock table b")
            await change(streamer, "{a: {}, b: {}}")
            await until(lambda: waits_for_lock(target), "the copy waits for the lock")
            await change(streamer, "{a: {}}")
            source.execute("insert into a values (2)")
            await streamer.caught_up()
            assert_same(source, target, "a")
        assert [t["source"] for t in (await streamer.status())["tables"]] == ["public.a"]
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


async def test_a_transaction_from_before_is_waited_for_and_named(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    change,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute("create table a (v int); create table b (v int)")
    monkeypatch.setattr(slot, "LOOK_SECONDS", 0.2)
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        with psycopg.connect(source.url) as open_transaction:
            open_transaction.execute("insert into b values (1)")
            pid = open_transaction.info.backend_pid
            await change(streamer, "{a: {}, b: {}}")

            async def names_it() -> bool:
                table = await streamer.table("public.b")
                return f"pid {pid}" in (table["waiting_for"] or "") and table["state"] == "copying"

            await streamer.eventually(names_it)
            source.execute("insert into a values (1)")
            await streamer.eventually(lambda: has_rows(target, "a", 1))
        await streamer.caught_up()  # committed by leaving the block
        assert_same(source, target, "b")
        assert (await streamer.table("public.b"))["error"] is None

        monkeypatch.setattr(slot, "WAIT_SECONDS", 1.0)
        with psycopg.connect(source.url) as open_transaction:
            open_transaction.execute("insert into b values (2)")
            await change(streamer, "{a: {}}")
            await change(streamer, "{a: {}, b: {truncate_target: true}}")
            await streamer.table_state("public.b", "error")
            walsenders = "select count(*) from pg_stat_activity where backend_type = 'walsender' and datname = current_database()"

            async def is_gone() -> bool:
                return source.execute(walsenders) == [(1,)]

            await streamer.eventually(is_gone)
            assert source.execute(
                "select count(*) from pg_replication_slots where temporary and database = current_database()"
            ) == [(0,)]


async def has_rows(db: Database, table: str, count: int) -> bool:
    return len(contents(db, table)) == count


async def test_stopped_while_the_first_slot_waits(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table a (v int)")
    monkeypatch.setattr(slot, "LOOK_SECONDS", 0.2)
    with psycopg.connect(source.url) as open_transaction:
        open_transaction.execute("insert into a values (1)")
        for _ in range(2):  # killed, then stopped
            async with stream("{a: {}}") as streamer:

                async def says_so(streamer: Streamer = streamer) -> bool:
                    return any("waits for" in (s["error"] or "") for s in await streamer.statuses())

                await streamer.eventually(says_so)
                await streamer.kill()
                streamer.start()
                await streamer.eventually(says_so)
    async with stream("{a: {}}") as streamer:
        await streamer.caught_up()
        assert_same(source, target, "a")
