"""A change of a key is a single UPDATE at the target, in sets as in exact order."""

import re

import pytest

from tests.support.postgres import Database, assert_same, contents, ordinary_role
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

ORDERS = ["sets", "exact order"]
FORCE = """
create function nothing() returns trigger language plpgsql as 'begin return new; end';
create trigger nothing before update on {0} for each row execute function nothing();
alter table {0} enable always trigger nothing
"""
"""A trigger for replicated changes makes streamer write in exact order."""
IDENTITY = "id int generated always as identity primary key"


@pytest.mark.parametrize("order", ORDERS)
async def test_rows_that_refer_to_the_key_follow_it_and_values_of_the_target_stay(
    source: Database, target: Database, stream: MakeStreamer, order: str
) -> None:
    source.execute(
        "create table t (id int primary key, v text, big text);"
        "alter table t alter big set storage external"
    )
    target.execute(
        "create table t (id int primary key, v text, big text, note text default 'none');"
        "create table refers (id int primary key references t on update cascade on delete cascade)"
    )
    with ordinary_role(target) as role:
        target.execute(f"alter table t owner to {role}; alter table refers owner to {role}")
        if order == "exact order":
            target.execute(FORCE.format("t"))
        async with stream("t: {initial: none}") as streamer:
            await streamer.caught_up()
            source.execute(
                "insert into t select n, 'v', repeat('b', 3000) from generate_series(1, 6) n"
            )
            await streamer.caught_up()
            target.execute("update t set note = 'n' || id; insert into refers select id from t")
            source.execute(
                "begin; update t set id = id + 10 where id < 4; update t set id = 20 where id = 11;"
                "update t set id = 30, v = 'w', big = 'whole' where id = 4;"
                "insert into t values (4, 'new'); update t set id = 3 where id = 13; commit"
            )
            await streamer.caught_up()
            assert contents(source, "t", "id, v, big") == contents(target, "t", "id, v, big")
            assert target.execute("select id, note from t order by 1") == [
                (3, "n3"),
                (4, "none"),
                (5, "n5"),
                (6, "n6"),
                (12, "n2"),
                (20, "n1"),
                (30, "n4"),
            ]
            referring = target.execute("select id from refers order by 1")
            assert referring == [(3,), (5,), (6,), (12,), (20,), (30,)]


@pytest.mark.parametrize("force", ["", FORCE.format("t")], ids=ORDERS)
@streams(
    "t: {initial: none}",
    source="create table t (id int primary key, v text)",
    target="create table t (id int primary key, v text, note text); <force>",
)
async def test_keys_that_go_from_row_to_row_keep_values_of_the_target(
    shared: Shared, force: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'b'), (3, 'c')")
    await shared.caught_up()
    target.execute("update t set note = v")
    source.execute(
        "begin; update t set id = 0 where id = 1; update t set id = 1 where id = 2;"
        "update t set id = 2 where id = 0; update t set id = id + 2 where id > 2; commit"
    )
    await shared.caught_up()
    assert target.execute("select * from t order by 1") == [
        (1, "b", "b"),
        (2, "a", "a"),
        (5, "c", "c"),
    ]


@pytest.mark.parametrize("force", ["", FORCE.format("t")], ids=ORDERS)
@streams(
    "t: {initial: none}",
    source=f"create table t ({IDENTITY}, v text, big text);"
    " alter table t alter big set storage external",
    target=f"create table t ({IDENTITY}, v text, big text, note text default 'none',"
    " twice text generated always as (v || v) stored); <force>",
)
async def test_a_key_that_is_always_generated_changes(shared: Shared, force: str) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "insert into t (v, big) select n, repeat('b', 3000) from generate_series(1, 3) n"
    )
    await shared.caught_up()
    target.execute("update t set note = 'n' || id")
    source.execute("update t set id = default where id = 2; update t set v = 'x' where id = 3")
    await shared.caught_up()
    source.execute("update t set v = 'later' where id = 4")
    await shared.caught_up()
    assert contents(source, "t", "id, v, big") == contents(target, "t", "id, v, big")
    assert target.execute("select id, note, twice from t order by 1") == [
        (1, "n1", "11"),
        (3, "n3", "xx"),
        (4, "n2", "laterlater"),
    ]


@pytest.mark.follows("apply.rows.make_plan:_check_identity_columns")
async def test_a_key_that_is_always_generated_stops_the_table_where_rows_refer_to_it(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A foreign key would take the DELETE for the end of the row."""
    source.execute("create table t (id int generated always as identity primary key, v text)")
    target.execute(
        "create table t (id int generated always as identity primary key, v text);"
        "create table refers (id int references t on update cascade on delete cascade)"
    )
    with ordinary_role(target) as role:
        target.execute(f"alter table t owner to {role}; alter table refers owner to {role}")
        async with stream("t: {initial: none}") as streamer:
            await streamer.caught_up()
            source.execute("insert into t (v) values ('a'), ('b')")
            await streamer.caught_up()
            target.execute("insert into refers select id from t")
            source.execute("update t set id = default where id = 1")
            await streamer.table_state("public.t", "error")
            error = (await streamer.table("public.t"))["error"]
            remedy = re.search(
                r"run at the target: (alter table .* set generated by default)", error
            )
            assert remedy is not None, error
            target.execute(remedy[1])
            await streamer.caught_up()
            assert_same(source, target, "t")
            assert target.execute("select id from refers order by 1") == [(2,), (3,)]


@streams("t: {initial: none}", both="create table t (id int primary key)")
async def test_an_update_brings_a_missing_row_of_a_table_that_is_its_key(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1), (2)")
    await shared.caught_up()
    target.execute("delete from t where id = 1")
    source.execute("update t set id = id")
    await shared.caught_up()
    assert_same(source, target, "t")


async def test_a_key_follows_the_source_where_foreign_keys_connect_replicated_tables(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """The source's key takes referring rows along. That of the target only looks."""
    for db in (source, target):
        db.execute(
            "create table parent (id int primary key, v text, big text);"
            "create table child (id int primary key, p int references parent)"
        )
    source.execute(
        "alter table child drop constraint child_p_fkey;"
        "alter table child add foreign key (p) references parent on update cascade;"
        "alter table parent alter big set storage external"
    )
    target.execute("alter table parent add note text default 'none'")
    with ordinary_role(target) as role:
        target.execute(f"alter table parent owner to {role}; alter table child owner to {role}")
        async with stream("parent:\nchild:") as streamer:
            await streamer.caught_up()
            source.execute(
                "insert into parent select n, 'v', repeat('b', 3000) from generate_series(1, 4) n;"
                "insert into child select n, n from generate_series(1, 3) n"
            )
            await streamer.caught_up()
            target.execute("update parent set note = 'n' || id")
            source.execute("update parent set id = 7 where id = 1")
            await streamer.caught_up()
            source.execute("update parent set id = id + 10, v = 'w', big = 'whole' where id < 4")
            source.execute(
                "update parent set id = id + 20 where id > 10; delete from child where id = 2"
            )
            await streamer.caught_up()
            assert contents(source, "parent", "id, v, big") == contents(
                target, "parent", "id, v, big"
            )
            assert_same(source, target, "child")
            notes = target.execute("select id, note from parent order by 1")
            assert notes == [(4, "n4"), (7, "n1"), (32, "n2"), (33, "n3")]
