"""Indexes, triggers and foreign keys of the target that come or go while a plan is in use."""

import pytest

from tests.support.postgres import Database, assert_same, ordinary_role
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark")

T = "create table t (id int not null, v text)"
NOTE = """
create table notes (n serial, v text);
create function note() returns trigger language plpgsql as $$ begin
    execute format('insert into %I.notes (v) values ($1)', tg_table_schema)
      using tg_op || ' ' || new.v;
    return new;
end $$
"""
ALWAYS = """
create trigger note before insert or update on t for each row execute function note();
alter table t enable always trigger note
"""
INDEXED = f"{T}; create unique index t_id on t (id); {NOTE}"


@pytest.mark.parametrize("is_met", [False, True])
@streams(
    "t: {initial: none}",
    source=f"{T}; alter table t replica identity full",
    target=f"{INDEXED}; {ALWAYS}",
)
async def test_exact_order_trusts_no_index_that_is_gone(shared: Shared, is_met: bool) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'); update t set v = 'b'")
    await shared.caught_up()
    with target.connect() as session:
        session.execute("begin; drop index t_id")
        source.execute("insert into t values (1, 'c')")
        if is_met:  # then streamer has a snapshot, and waits for the lock
            waits = "select exists (select from pg_stat_activity where wait_event_type = 'Lock')"
            await until(lambda: target.value(waits), "streamer waits for the table")
        session.execute("commit")
    await shared.caught_up()
    source.execute("update t set v = 'd' where v = 'c'")
    await shared.caught_up()
    assert_same(source, target, "t")


@pytest.mark.parametrize("transport", ["text", "binary"])
@streams(
    "t: {initial: none}",
    source="create table t (id int primary key, v text)",
    target=INDEXED,
    group="transport: <transport>",
)
async def test_a_trigger_that_comes_sees_each_change(shared: Shared, transport: str) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'a')")
    source.execute("update t set v = 'b'; delete from t where id = 2")
    await shared.caught_up()
    target.execute(ALWAYS)
    source.execute(
        "begin; insert into t values (2, 'c'); update t set v = 'd' where id = 2; commit"
    )
    await shared.caught_up()
    source.execute(
        "begin; update t set v = 'e' where id = 1; update t set v = 'f' where id = 1; commit"
    )
    await shared.caught_up()
    assert_same(source, target, "t")
    notes = [note for (note,) in target.execute("select v from notes order by n")]
    assert notes == ["INSERT c", "UPDATE d", "UPDATE e", "UPDATE f"]


async def test_a_foreign_key_that_comes_loses_no_row_of_its_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A key that is GENERATED ALWAYS changes by DELETE and INSERT, which ON DELETE follows."""
    source.execute("create table t (id int primary key, v text)")
    target.execute(
        "create table t (id int primary key generated always as identity, v text);"
        "create table of_t (id int)"
    )
    with ordinary_role(target) as role:
        target.execute(f"grant all on all tables in schema public to {role}")
        async with stream("t: {initial: none}") as streamer:
            await streamer.caught_up()
            source.execute("insert into t values (1, 'a'); update t set id = 2")
            await streamer.caught_up()
            target.execute(
                "alter table of_t add foreign key (id) references t on delete cascade;"
                "insert into of_t values (2)"
            )
            source.execute("update t set id = 3")

            async def stopped() -> bool:
                assert target.execute("select id from of_t") == [(2,)]
                return "GENERATED ALWAYS" in ((await streamer.table("public.t"))["error"] or "")

            await streamer.eventually(stopped, 40)
            assert target.execute("select id from of_t") == [(2,)]
