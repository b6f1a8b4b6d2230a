"""TRUNCATE: of several tables at once, mapped or not, with foreign keys, rolled back, of
partitions.
"""

import re

import pytest

from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

DDL = """
create table a (id serial primary key, v text);
create table b (id int primary key, a int references a);
create table c (id int primary key, b int references b);
create table unmapped (id int primary key, a int references a);
create table log (line text);
"""
TABLES = """
a: {initial: none}
b: {initial: none}
c: {initial: none, type: append}
log: {initial: none}
"""


@pytest.mark.parametrize(
    "ddl", [DDL, re.sub(r" references \w+", "", DDL)], ids=["as here", "no keys"]
)
@pytest.mark.parametrize("settings", ["workers: 8", "workers: 1", "consistency: transaction"])
@streams(TABLES, source=DDL, target="<ddl>", settings="<settings>")
async def test_several_tables(shared: Shared, ddl: str, settings: str) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into a select g, 'x' from generate_series(1, 50) g")
    source.execute("insert into b select g, g from generate_series(1, 50) g")
    source.execute("insert into c select g, g from generate_series(1, 5) g")
    source.execute("insert into unmapped values (1, 1); insert into log values ('before')")
    source.execute(
        """
        begin; insert into a values (100, 'gone'); insert into log values ('in it');
        update b set a = 100 where id = 1;
        truncate a, b, c, unmapped, log restart identity;
        insert into a (v) values ('first'), ('second'); insert into b values (1, 1);
        insert into log values ('after'); commit
        """
    )
    source.execute("insert into a (v) values ('third'); insert into b values (2, 3)")
    await shared.caught_up()
    for table in ("a", "b", "log"):
        assert_same(source, target, table)
    assert target.value("select count(*) from c") == 5, "append keeps what it got"
    # Rolled back, as a whole and in part.
    source.execute("begin; truncate a cascade; insert into a (v) values ('never'); rollback")
    source.execute(
        "begin; insert into log values ('kept'); savepoint s; truncate log, b cascade;"
        "insert into log values ('never'); rollback to s; insert into log values ('kept too'); commit"
    )
    await shared.caught_up()
    for table in ("a", "b", "log"):
        assert_same(source, target, table)
    source.execute(
        "insert into c values (9, 1); truncate a cascade; insert into a (v) values ('end')"
    )
    await shared.caught_up()
    for table in ("a", "b"):
        assert_same(source, target, table)


@streams(
    "p: {initial: none}\nh: {initial: none, type: history}",
    source="""
    create table p (id int primary key, v text) partition by range (id);
    create table p1 partition of p for values from (0) to (100);
    create table p2 partition of p for values from (100) to (200);
    create table h (id int primary key, v text)
    """,
    settings="workers: 8",
)
async def test_partitions_and_versions(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "insert into p values (1, 'a'), (101, 'b'); insert into h values (1, 'a'), (2, 'a')"
    )
    source.execute("truncate p, h; insert into p values (102, 'c'); insert into h values (2, 'b')")
    await shared.caught_up()
    assert_same(source, target, "p")
    versions = "select id, v, kvsz_deleted, kvsz_end > '9000-01-01' from h order by kvsz_id"
    assert target.execute(versions) == [
        (1, "a", True, False),
        (2, "a", True, False),
        (2, "b", False, True),
    ]
    # PostgreSQL sends no message about a single partition, and all else stays equal.
    source.execute("insert into p values (3, 'd'); truncate p1; insert into p values (103, 'e')")
    await shared.caught_up()
    assert target.execute("select id from p order by 1") == [(3,), (102,), (103,)]
    source.execute("truncate p")
    await shared.caught_up()
    assert_same(source, target, "p")
