"""Tables of every kind, work on all tables at once, and the expected rows of both sides."""

from tests.support.postgres import Database, assert_same

TABLES = """
keyed: {initial: none}
keyless: {initial: none}
whole: {initial: none}
hist: {initial: none, type: history}
"""
DDL = """
create table keyed (id int primary key, v text);
create table keyless (a int, b text);
create table whole (a int, b text); alter table whole replica identity full;
"""
HISTORY = """
create table hist (id int, v text, kvsz_start timestamptz not null, kvsz_end timestamptz not null,
                   kvsz_deleted boolean not null);
create index on hist (id)
"""


def write(source: Database, first: int, last: int) -> None:
    with source.connect() as connection:
        for n in range(first, last):
            connection.execute(
                f"""
                begin;
                insert into keyed values ({n}, 'new'); update keyed set v = v || '.' where id % 5 = {n % 5};
                delete from keyed where id = {n - 7};
                insert into keyless values ({n % 3}, 'row'), ({n % 3}, 'row');
                insert into whole values ({n % 4}, 'x');
                update whole set b = b || 'y' where ctid = (select min(ctid) from whole where a = {n % 4});
                insert into hist values ({n}, 'first'); update hist set v = 'next' where id in ({n}, {n - 2});
                delete from hist where id = {n - 5};
                commit
                """.encode()
            )


def assert_equal(source: Database, target: Database) -> None:
    for table in ("keyed", "keyless", "whole"):
        assert_same(source, target, table)
    assert_history(source, target)


def assert_history(source: Database, target: Database) -> None:
    open_rows = (
        "select id, v from hist where kvsz_end = '9999-01-01' and not kvsz_deleted order by 1"
    )
    assert target.execute(open_rows) == source.execute("select id, v from hist order by 1")
    overlapping = """
        select count(*) from hist a join hist b on a.id = b.id and a.ctid <> b.ctid
        where (a.kvsz_start, a.kvsz_end) overlaps (b.kvsz_start, b.kvsz_end)
    """
    assert target.value(overlapping) == 0
