"""Unchanged TOAST values are not sent: the target's values stay, and none is made up."""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

DDL = """
create table t (id int primary key, v text, big text, big2 text);
alter table t alter big set storage external, alter big2 set storage external
"""
BIG = "repeat(chr(97 + g % 26), 9000 + g)"
ROWS = f"insert into t select g, 'v', {BIG}, {BIG} from generate_series(1, 12) g"
WINDOWS = [
    # One after the other: in one transaction, one window, and over several.
    "update t set v = 'a' where id = 1",
    "begin; update t set v = 'b' where id = 2; update t set big = 'short' where id = 2; commit",
    "update t set big = repeat('new', 4000) where id = 3; update t set v = 'c' where id = 3",
    "update t set big2 = null where id = 3; update t set v = 'cc' where id = 3",
    "update t set id = 104 where id = 4",
    "update t set v = 'd' where id = 5; update t set id = 105 where id = 5; update t set v = 'dd' where id = 105",
    "begin; update t set id = 106 where id = 6; update t set id = 6 where id = 106; commit",
    # Keys rotate, and each takes its big values along.
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


@pytest.mark.parametrize("identity", ["default", "full", "nothing but full"])
@pytest.mark.parametrize("apart", [False, True])
async def test_every_combination(
    source: Database, target: Database, stream: MakeStreamer, identity: str, apart: bool
) -> None:
    """As a clone, in a history, and appended; changes in one window, or each in its own."""
    for db in (source, target):
        db.execute(DDL)
    for table in ("h", "l"):
        source.execute(DDL.replace(" t ", f" {table} "))
    for table in ("t", "h", "l"):
        if identity != "default":
            source.execute(f"alter table {table} replica identity full")
        if identity == "nothing but full":
            source.execute(f"alter table {table} drop constraint {table}_pkey")
    if identity == "nothing but full":
        target.execute("alter table t drop constraint t_pkey")
    tables = (
        "t: {initial: none}\nh: {initial: none, type: history}\nl: {initial: none, type: append}"
    )
    if identity == "nothing but full":
        tables = "t: {initial: none}"
    async with stream(tables) as streamer:
        await streamer.caught_up()
        source.execute(ROWS)
        if identity != "nothing but full":
            source.execute(
                f"{ROWS.replace('into t', 'into h')}; {ROWS.replace('into t', 'into l')}"
            )
        await streamer.caught_up()
        for window in WINDOWS:
            source.execute(window)
            if identity != "nothing but full":
                source.execute(window.replace(" t ", " h "))
                source.execute(window.replace(" t ", " l "))
            if apart:
                await streamer.caught_up()
        await streamer.caught_up()
        assert_same(source, target, "t")
        if identity == "nothing but full":
            return
        columns = "id, v, big, big2"
        live = f"select {columns} from h where kvsz_end > '9000-01-01' order by 1"
        assert target.execute(live) == source.execute(f"select {columns} from t order by 1")
        # Of a version that ended, too, no value is missing that its row had.
        ended = "select count(*) from h where big is null"
        assert target.value(ended) == 0
        appended = target.execute(f"select {columns} from l order by 1")
        for row in source.execute(f"select {columns} from t order by 1"):
            assert row in appended


async def test_keys_that_are_large_themselves(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A key in TOAST storage is sent as the old key when it or another part of the key changes."""
    ddl = """
        create table k (a text, b int, v text, big text, primary key (a, b));
        alter table k alter a set storage external, alter big set storage external
        """
    key = "(select string_agg(md5(i::text), '') from generate_series(g, g + 75) i)"
    for db in (source, target):
        db.execute(ddl)
    async with stream("k: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute(
            f"insert into k select {key}, g, 'v', repeat('x', 9000) from generate_series(1, 6) g"
        )
        await streamer.caught_up()
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
            await streamer.caught_up()
            assert_same(source, target, "k")


@pytest.mark.parametrize("rule", ["type: clone", "type: append", "type: history"])
@pytest.mark.parametrize("change", ["v = 'new'", "id = 100"])
async def test_a_missing_row_is_reported_and_never_made_up(
    source: Database, target: Database, stream: MakeStreamer, rule: str, change: str
) -> None:
    source.execute(f"{DDL}; {ROWS}")
    async with stream(f"t: {{initial: none, {rule}}}") as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (50, 'whole', 'x', 'y')")
        source.execute(f"update t set {change} where id = 3")
        await streamer.table_state("public.t", "error")
        error = (await streamer.table("public.t"))["error"]
        assert "missing" in error
        assert target.value("select count(*) from t where id <> 50") == 0
        target.execute("insert into t (id, v, big, big2) values (3, 'v', 'kept', 'kept')")
        await streamer.caught_up()
        assert target.value("select count(*) from t where big = 'kept' and big2 = 'kept'") == (
            2 if "history" in rule else 1
        )
