"""Unchanged TOAST values are not sent: the target's values stay, and none is made up."""

import pytest

from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

DDL = """
create table {0} (id int primary key, v text, big text, big2 text);
alter table {0} alter big set storage external, alter big2 set storage external
"""
WITH = {
    "default": DDL,
    "full": f"{DDL}; alter table {{0}} replica identity full",
    "no key": f"{DDL}; alter table {{0}} replica identity full, drop constraint {{0}}_pkey",
}
T = DDL.format("t")
BIG = "repeat(chr(97 + g % 26), 9000 + g)"
ROWS = f"insert into t select g, 'v', {BIG}, {BIG} from generate_series(1, 12) g"
WINDOWS = [
    # In sequence: in a transaction, in a window, and over several.
    "update t set v = 'a' where id = 1",
    "begin; update t set v = 'b' where id = 2; update t set big = 'short' where id = 2; commit",
    "update t set big = repeat('new', 4000) where id = 3; update t set v = 'c' where id = 3",
    "update t set big2 = null where id = 3; update t set v = 'cc' where id = 3",
    "update t set id = 104 where id = 4",
    "update t set v = 'd' where id = 5; update t set id = 105 where id = 5; update t set v = 'dd' where id = 105",
    "begin; update t set id = 106 where id = 6; update t set id = 6 where id = 106; commit",
    # Keys rotate, and each key takes the big values along.
    (
        "begin; update t set id = -1 where id = 7; update t set id = 7 where id = 8;"
        "update t set id = 8 where id = -1; commit"
    ),
    "delete from t where id = 9; update t set id = 9 where id = 10; update t set big2 = 'short' where id = 9",
    (
        f"begin; insert into t select g, 'born', {BIG}, {BIG} from generate_series(20, 21) g;"
        "update t set v = 'moved', id = 22 where id = 20; update t set v = 'e' where id = 21; commit"
    ),
    (
        "update t set v = 'f' where id = 22; delete from t where id = 22;"
        "insert into t values (22, 'again', repeat('y', 9000), null); update t set v = 'g' where id = 22"
    ),
]


def identities(*tables: str) -> pytest.MarkDecorator:
    """Run a test with each replica identity; ``<ddl>`` makes *tables* with the identity."""
    found = WITH if len(tables) == 1 else [name for name in WITH if name != "no key"]
    made = {name: "; ".join(WITH[name].format(table) for table in tables) for name in found}
    return pytest.mark.parametrize("ddl", made.values(), ids=made)


@pytest.mark.parametrize("apart", [False, True])
@identities("t")
@streams("t: {initial: none}", both="<ddl>")
async def test_a_clone_keeps_them(shared: Shared, ddl: str, apart: bool) -> None:
    """Changes in a common window, or in a window each."""
    await change(shared, apart, "t")
    assert_same(shared.source, shared.target, "t")


async def change(shared: Shared, apart: bool, *tables: str) -> None:
    """Make all windows of changes in *tables*; *apart*: wait after each."""
    await shared.caught_up()
    for table in tables:
        shared.source.execute(ROWS.replace(" t ", f" {table} "))
    await shared.caught_up()
    for window in WINDOWS:
        for table in tables:
            shared.source.execute(window.replace(" t ", f" {table} "))
        if apart:
            await shared.caught_up()
    await shared.caught_up()


COLUMNS = "id, v, big, big2"


@pytest.mark.parametrize("apart", [False, True])
@identities("h", "l")
@streams("h: {initial: none, type: history}\nl: {initial: none, type: append}", source="<ddl>")
async def test_a_history_and_an_append_keep_them(shared: Shared, ddl: str, apart: bool) -> None:
    source, target = shared.source, shared.target
    await change(shared, apart, "h", "l")
    live = f"select {COLUMNS} from h where kvsz_end > '9000-01-01' order by 1"
    rows = source.execute(f"select {COLUMNS} from h order by 1")
    assert target.execute(live) == rows
    # An ended version, too, has all values of its row.
    ended = "select count(*) from h where big is null"
    assert target.value(ended) == 0
    appended = target.execute(f"select {COLUMNS} from l order by 1")
    for row in rows:
        assert row in appended


LARGE_KEYS = """
create table k (a text, b int, v text, big text, primary key (a, b));
alter table k alter a set storage external, alter big set storage external
"""


@streams("k: {initial: none}", both=LARGE_KEYS)
async def test_keys_that_are_large_themselves(shared: Shared) -> None:
    """A key in TOAST storage is sent as the old key when it or another part of the key changes."""
    source, target = shared.source, shared.target
    key = "(select string_agg(md5(i::text), '') from generate_series(g, g + 75) i)"
    await shared.caught_up()
    source.execute(
        f"insert into k select {key}, g, 'v', repeat('x', 9000) from generate_series(1, 6) g"
    )
    await shared.caught_up()
    assert_same(source, target, "k")
    for window in (
        "update k set v = 'a' where b = 1; update k set b = 101 where b = 2",
        "update k set a = 'short' where b = 3; update k set v = 'c' where b = 3",
        (
            "delete from k where b = 4; begin; update k set b = -b where b > 4;"
            "update k set v = 'd' where b < 0; commit"
        ),
    ):
        source.execute(window)
        await shared.caught_up()
        assert_same(source, target, "k")


@pytest.mark.parametrize("rule", ["type: clone", "type: append", "type: history"])
@pytest.mark.parametrize("change", ["v = 'new'", "id = 100"])
@streams("t: {initial: none, <rule>}", source=f"{T}; {ROWS}")
async def test_a_missing_row_is_reported_and_never_made_up(
    shared: Shared, rule: str, change: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (50, 'whole', 'x', 'y')")
    source.execute(f"update t set {change} where id = 3")
    await shared.table_state("t", "error")
    error = (await shared.table("t"))["error"]
    assert "missing" in error
    assert target.value("select count(*) from t where id <> 50") == 0
    target.execute("insert into t (id, v, big, big2) values (3, 'v', 'kept', 'kept')")
    await shared.caught_up()
    assert target.value("select count(*) from t where big = 'kept' and big2 = 'kept'") == (
        2 if "history" in rule else 1
    )
