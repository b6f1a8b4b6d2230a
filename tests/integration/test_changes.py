"""Inserts, updates and deletes of keyed tables arrive."""

from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

TABLE = "create table t (id int primary key, name text, big text); alter table t alter big set storage external"
FILL = "; insert into t select g, 'n', repeat(g::text, 3000) from generate_series(1, 5) g"
SHARED = streams("t: {initial: none}", source=TABLE, target=TABLE)


@SHARED
async def test_changes_of_a_keyed_table_arrive(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select g, 'name ' || g, null from generate_series(1, 100) g")
    source.execute("update t set name = 'x' where id % 3 = 0; delete from t where id % 7 = 0")
    source.execute("update t set id = id + 1000 where id % 5 = 0")
    await shared.caught_up()
    assert_same(source, target, "t")


@streams("t: {initial: none}", both=TABLE + FILL)
async def test_unchanged_toast_values_are_kept(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("update t set name = 'a' where id = 1")
    source.execute("update t set id = 20 where id = 2")
    source.execute("update t set name = 'c' where id = 3; update t set big = 'short' where id = 3")
    source.execute("update t set name = 'd' where id = 4; delete from t where id = 4")
    source.execute(
        "insert into t values (6, 'e', repeat('e', 5000)); update t set name = 'f' where id = 6"
    )
    await shared.caught_up()
    assert_same(source, target, "t")


@SHARED
async def test_values_with_every_special_character_of_copy_arrive(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as connection:
        for number, text in enumerate(
            [
                "\\N",
                "\\.",
                "a\tb",
                "a\nb",
                "\r",
                "\\",
                "",
                "\\\\N",
                None,
                "\x01",
                "é€😀",
                "t\x7f",
            ]
        ):
            connection.execute("insert into t values (%s, %s, 'x')", (number, text))
            connection.execute("insert into t values (%s, 'x', %s)", (number + 100, text))
    await shared.caught_up()
    assert_same(source, target, "t")
    source.execute("update t set big = name, name = big")
    await shared.caught_up()
    assert_same(source, target, "t")


@SHARED
async def test_several_changes_of_one_key_in_one_transaction(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'b'), (3, 'c')")
    source.execute(
        "begin; delete from t where id = 1; insert into t values (1, 'again');"
        "update t set id = -1 where id = 2; update t set id = 2 where id = 3;"
        "update t set id = 3 where id = -1; insert into t values (4, 'd');"
        "delete from t where id = 4; insert into t values (4, 'dd'); commit"
    )
    await shared.caught_up()
    assert_same(source, target, "t")
