"""Unique keys that wander, foreign keys over several workers, triggers of the target."""

from functools import partial

import pytest

from tests.support.postgres import Database, assert_same, ordinary_role
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

SETTINGS = "commit_interval: 0.02"
UNIQUE = """
create table k (id int primary key, u int <unique>, e int, exclude (e with =),
    v text default repeat('x', 100))
"""


@pytest.mark.parametrize("unique", ["unique", "unique deferrable initially deferred"])
@streams("k: {initial: none}", both=UNIQUE, settings=SETTINGS)
async def test_unique_keys_are_handed_from_row_to_row(shared: Shared, unique: str) -> None:
    """In a single transaction and in many, in a window and in several; also in circles."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into k select g, g, g from generate_series(1, 30) g")
    with source.connect() as connection:
        for _ in range(3):
            # In many transactions: each takes the key that the previous transaction has just
            # released.
            connection.execute("update k set u = 0, e = 0 where id = 1")
            for n in range(2, 12):
                connection.execute(f"update k set u = {n - 1}, e = {n - 1} where id = {n}")
                if n % 4 == 0:  # a window ends here
                    sql = f"select exists (select from k where id = {n} and u = {n - 1})"
                    await until(partial(target.value, sql))
            connection.execute("update k set u = id + 1000, e = id + 1000")
            # In one: a key given away, deleted and inserted again, swapped over a third.
            connection.execute(
                """
                begin;
                update k set u = null, e = null where id = 20;
                update k set u = 1020, e = 1020 where id = 21;
                update k set u = 1021, e = 1021 where id = 20;
                delete from k where id = 22; update k set u = 1022, e = 1022 where id = 23;
                insert into k values (22, 1023, 1023, 'again');
                update k set id = 40 + id where id in (24, 25); update k set id = 24 where id = 65;
                update k set id = 25 where id = 64; commit
                """
            )
            connection.execute("update k set u = id, e = id where id > 15")
            connection.execute("update k set u = -id, e = -id; update k set u = id, e = id")
    await shared.caught_up()
    assert_same(source, target, "k")


FAMILY = """
create table parent (id int primary key);
create table child (id int primary key, p int not null references parent on delete cascade);
create table grandchild (id int primary key, c int references child deferrable initially deferred)
"""


@pytest.mark.parametrize("workers", [1, 8])
@streams(
    "{parent:, child:, grandchild:}",
    source=f"{FAMILY}; insert into parent values (0); insert into child values (0, 0)",
    target=FAMILY,
    settings="workers: <workers>",
)
async def test_foreign_keys_between_tables_of_different_workers(
    shared: Shared, workers: int
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as connection:
        for n in range(1, 60):
            connection.execute(
                f"begin; insert into parent values ({n}); insert into child values ({n}, {n});"
                f"insert into grandchild values ({n}, {n}); commit;"
            )
            if n % 3 == 0:
                connection.execute(
                    f"delete from grandchild where c = {n - 1}; delete from parent where id = {n - 1}"
                )
            if n % 10 == 0:  # a window ends here
                sql = f"select exists (select from parent where id = {n})"
                await until(partial(target.value, sql))
    await shared.caught_up()
    for table in ("parent", "child", "grandchild"):
        assert_same(source, target, table)
    assert all(t["state"] == "ready" for t in (await shared.status())["tables"])
    # Together, the rows fulfil the constraints.
    target.execute(
        "alter table child drop constraint child_p_fkey, add foreign key (p) references parent"
    )


TRIGGERS = """
create table t (id int primary key, v text, stamped text);
create table rule (id int primary key, v text);
create table fired (name text, operation text, id int);
create function note() returns trigger language plpgsql set search_path from current as $$ begin
  insert into fired values (tg_name, tg_op, coalesce(new.id, old.id)); return null; end $$;
create function stamp() returns trigger language plpgsql as $$ begin
  new.stamped := tg_op; return new; end $$;
create trigger ordinary after insert or update or delete on t for each row execute function note();
create trigger disabled after insert or update or delete on t for each row execute function note();
create trigger replica after insert or update or delete on t for each row execute function note();
create trigger always_ after insert or update or delete on t for each row execute function note();
create trigger stamp before insert or update on t for each row execute function stamp();
alter table t disable trigger disabled; alter table t enable replica trigger replica;
alter table t enable always trigger always_; alter table t enable always trigger stamp;
create rule kept as on delete to rule do instead nothing
"""


@streams(
    "{t:, rule:}",
    source="create table t (id int primary key, v text); insert into t values (1, 'copied');"
    "create table rule (id int primary key, v text)",
    target=TRIGGERS,
    settings=SETTINGS,
)
async def test_ordinary_triggers_rest_and_others_fire(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    expected = [("always_", "INSERT", 1), ("replica", "INSERT", 1)]
    fired = "select name, operation, id from fired order by 1, 2, 3"
    assert target.execute(fired) == expected
    target.execute("delete from fired")
    source.execute("insert into t values (2, 'a'); update t set v = 'b' where id = 2")
    source.execute("begin; update t set id = 3 where id = 2; delete from t where id = 1; commit")
    source.execute("insert into rule values (1, 'a'); delete from rule where id = 1")
    await shared.caught_up()
    assert target.execute(fired) == [
        (name, operation, id_)
        for name in ("always_", "replica")
        for operation, id_ in (("DELETE", 1), ("INSERT", 2), ("UPDATE", 2), ("UPDATE", 3))
    ]
    assert target.execute("select * from t") == [(3, "b", "UPDATE")]
    assert_same(source, target, "rule")  # an ordinary rule rests as well
    target.execute("delete from fired")
    for table in ("t", "rule"):
        await shared.ask("resync", table)
    await shared.caught_up()
    assert ("always_", "INSERT", 3) in target.execute(fired)
    assert not [row for row in target.execute(fired) if row[0] in ("ordinary", "disabled")]


@pytest.mark.parametrize("consistency", ["table", "transaction"])
async def test_an_ordinary_role_and_foreign_keys_between_workers(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    consistency: str,
    without_spark: None,
) -> None:
    """The role may not switch foreign keys off, so a child may have to wait for the parent."""
    ddl = (
        "create table parent (id int primary key);"
        "create table child (id int primary key, p int references parent)"
    )
    source.execute(ddl)
    target.execute(ddl)
    with ordinary_role(target) as role:
        target.execute(f"alter table parent owner to {role}; alter table child owner to {role}")
        settings = f"workers: 4\nconsistency: {consistency}"
        async with stream("parent:\nchild:", settings=settings) as streamer:
            await streamer.caught_up()
            for n in range(30):
                source.execute(
                    f"begin; insert into parent values ({n}); insert into child values ({n}, {n}); commit"
                )
                if n % 3 == 0:
                    source.execute(
                        f"begin; delete from child where id = {n}; delete from parent where id = {n};"
                        " commit"
                    )
            await streamer.caught_up(50)
        assert_same(source, target, "parent")
        assert_same(source, target, "child")
