"""Tables as wide as PostgreSQL allows, and rows as long as a page allows; and tables without columns."""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

WIDTH_MAX = 1600
EXTERNAL = "alter table t alter big set storage external"


def wide(table: str, count: int, kind: str, key: str = "id int primary key, big text, ") -> str:
    """Return the statement that creates *table* with *count* columns."""
    names = [f"c{n}" for n in range(1, count - key.count(","))]
    columns = ", ".join(f"{name} {kind}" for name in names)
    return f"create table {table} ({key}{columns}, last text)"


def insert(table: str, first: int, last: int) -> str:
    return (
        f"insert into {table} (id, c1, c700, last)"
        f" select g, g % 3, g % 5, 'last' || g from generate_series({first}, {last}) g"
    )


CHANGES = """
begin;
update {t} set c2 = 2, last = 'a' where id % 7 = 0; update {t} set c699 = 3 where id % 14 = 0;
delete from {t} where id % 11 = 0; update {t} set id = id + 1000 where id % 13 = 0;
commit;
update {t} set big = repeat(md5(id::text), 300) where id % 5 = 0;
update {t} set c3 = 3 where id % 10 = 0;
update {t} set id = id + 2000 where id % 10 = 0;
"""


async def test_1600_columns_with_a_key(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in ("t", "log"):
        source.execute(wide(name, WIDTH_MAX, "smallint"))
        source.execute(f"alter table {name} alter big set storage external")
        source.execute(insert(name, 1, 60))
    count = "select count(*) from pg_attribute where attrelid = 't'::regclass and attnum > 0"
    assert source.value(count) == WIDTH_MAX
    async with stream("t:\nlog: {type: append}") as streamer:
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        assert_same(source, target, "log")
        for name in ("t", "log"):
            source.execute(insert(name, 61, 120))
        source.execute(CHANGES.format(t="t"))
        source.execute("update log set c1500 = 1 where id < 9")
        source.execute("delete from log where id = 120")
        await streamer.caught_up(60)
        assert_same(source, target, "t")
        source.execute("insert into log (id, c1, c700, last) values (120, 0, 0, 'last120')")
        await streamer.caught_up(60)
        assert_same(source, target, "log")
        target.execute(
            "update t set last = 'spoilt'; insert into streamer.request (relation_id, action)"
            " select id, 'resync' from streamer.relation where source = 'public.t'; notify streamer"
        )

        async def is_copied_again() -> bool:
            attempt = "select attempt from streamer.relation where source = 'public.t'"
            return target.value(attempt) == 2

        await streamer.eventually(is_copied_again)
        source.execute("update t set c4 = 4 where id % 2 = 0; truncate log")
        await streamer.caught_up(60)
        assert_same(source, target, "t")


@streams(
    "t: {filter: c1 > 0, set: {last: upper(last) || c700}}",
    source="; ".join([wide("t", WIDTH_MAX, "smallint"), EXTERNAL, insert("t", 1, 60)]),
)
async def test_filter_and_set_of_wide_rows(shared: Shared) -> None:
    """The target computes the columns once both halves of a row are together."""
    source, target = shared.source, shared.target
    columns = "id, big, c1, c2, c3, c699, c700"
    wanted = f"select ({columns}, upper(last) || c700)::text from t where c1 > 0 order by id"
    found = f"select ({columns}, last)::text from t order by id"
    await shared.caught_up(60)
    assert target.execute(found) == source.execute(wanted)
    source.execute(insert("t", 61, 120))
    source.execute(CHANGES.format(t="t"))
    await shared.caught_up(60)
    assert target.execute(found) == source.execute(wanted)
    # Rows with a TOAST value would be refused: an entering row must be whole.
    source.execute("update t set c1 = (c1 + 1) % 3 where id % 2 = 0 and id % 5 <> 0")
    await shared.caught_up(60)
    assert target.execute(found) == source.execute(wanted)


@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_old_and_new_values_that_together_are_too_wide(
    source: Database, target: Database, stream: MakeStreamer, transport: str
) -> None:
    """REPLICA IDENTITY FULL: twice the columns, and twice the bytes of a row that fills a page."""
    tables = {"many": ("smallint", 900), "long": ("bigint", 900), "few": ("name", 110)}
    for table, (kind, count) in tables.items():
        source.execute(wide(table, count, kind, key="id int, big text, "))
        source.execute(f"alter table {table} replica identity full")
        names = ", ".join(f"c{n}" for n in range(1, count - 2))
        values = ", ".join(["'1'"] * (count - 3))
        source.execute(
            f"insert into {table} (id, {names}, last) select g / 2, {values}, 'x' from generate_series(1, 8) g"
        )
    group = f"transport: {transport}"
    async with stream("\n".join(f"{table}:" for table in tables), group=group) as streamer:
        await streamer.caught_up(60)
        for table in tables:
            source.execute(f"update {table} set c1 = '2', last = 'y' where id = 1")
            source.execute(
                f"delete from {table} where ctid = (select min(ctid) from {table} where id = 2)"
            )
            source.execute(f"update {table} set big = repeat(md5('x'), 300) where id = 3")
            source.execute(
                f"update {table} set last = null where id = 3; delete from {table} where id = 4"
            )
        await streamer.caught_up(60)
        for table in tables:
            assert_same(source, target, table)


@streams(
    "t: {type: history}",
    source="; ".join(
        [
            wide("t", 300, "integer"),
            EXTERNAL,
            "insert into t (id, big, c1, c290) values (1, repeat('x', 9000), 1, 1)",
        ]
    ),
)
async def test_versions_of_wide_rows(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("update t set c290 = 2; update t set id = 2; update t set c1 = null, c290 = 3")
    source.execute("insert into t (id, last) values (3, 'three'); delete from t where id = 3")
    await shared.caught_up()
    assert target.execute(
        "select id, length(big), c1, c290, last, kvsz_deleted from t order by kvsz_id"
    ) == [
        (1, 9000, 1, 1, None, False),
        (1, 9000, 1, 2, None, True),
        (2, 9000, 1, 2, None, False),
        (2, 9000, None, 3, None, False),
        (3, None, None, None, "three", True),
    ]


@pytest.mark.parametrize("rule", ["type: history", "type: clone"])
@streams(
    "t: {<rule>}\nother:",
    source=f"{wide('t', WIDTH_MAX, 'boolean')};"
    " create table other (id int primary key); insert into other values (1)",
    sid="eu",
)
async def test_columns_that_streamer_adds_find_no_place(shared: Shared, rule: str) -> None:
    target = shared.target
    await shared.table_state("t", "error")
    table = await shared.table("t")
    total = 1605 if "history" in rule else 1601
    assert f"would have {total} columns" in table["error"]
    assert "exclude" in table["error"]
    await shared.table_state("other", "ready")
    assert target.execute("select sid, id from other") == [("eu", 1)]


@streams(
    "t:",
    source="create table t (); alter table t replica identity full;"
    " insert into t default values; insert into t default values",
)
async def test_no_columns(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t default values")
    await shared.caught_up()
    assert target.value("select count(*) from t") == 3
    source.execute(
        "alter table t replica identity full; delete from t where ctid = (select min(ctid) from t)"
    )
    await shared.caught_up()
    assert target.value("select count(*) from t") == 2
