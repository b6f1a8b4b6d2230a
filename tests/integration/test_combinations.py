"""Settings that must not matter do not: changes of many kinds, with every combination of settings.

`make matrix` runs all tests with some combinations; this test always runs with all.
"""

import psycopg
import pytest

from tests.support.postgres import Database, assert_same, contents
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.combinations

KEYED = """
create table {} (a int, b text, n numeric, f float8, at timestamptz, big text, primary key (a, b));
alter table {} alter big set storage external;
"""
DDL = (
    KEYED.format("clone", "clone") + KEYED.format("append", "append") + KEYED.format("hist", "hist")
)
KEYLESS = """
create table whole (a int, v text); alter table whole replica identity full;
create table log (a int, v text);
"""
TABLES = """
clone: {initial: none}
append: {initial: none, type: append}
hist: {initial: none, type: history}
whole: {initial: none}
log: {initial: none}
"""
CHANGES = r"""
insert into {0} select g, 'k' || g % 3, g * 1.10, g / 7.0, '2020-01-01', repeat(g::text, 1500)
  from generate_series({1}, {1} + 30) g;
insert into {0} values ({1} + 31, E'tab\tand \\ and \\N', 'NaN', '-0', 'infinity', null);
update {0} set n = n + 1, at = null where a % 3 = 0 and a >= {1};
update {0} set b = 'moved' where a % 5 = 0 and a >= {1};
update {0} set a = a + 1000, big = 'short' where a = {1} + 7;
delete from {0} where a % 4 = 0 and a >= {1};
"""
KEYLESS_CHANGES = """
insert into log select g, 'x' from generate_series(1, 20) g;
insert into whole select g % 3, nullif('v' || g % 2, 'v1') from generate_series(1, 20) g;
update whole set v = 'new' where ctid = (select min(ctid) from whole where a = 1);
delete from whole where ctid in (select ctid from whole where a = 2 limit 2);
"""
VALUES = "select (a, b, n, f, at, big)::text from hist"
OPEN = f"{VALUES} where kvsz_end = '9999-01-01' order by 1"
OVERLAPS = """
select count(*) from hist x join hist y on (x.a, x.b) = (y.a, y.b) and x.kvsz_id < y.kvsz_id
 where x.kvsz_start < y.kvsz_end and y.kvsz_start < x.kvsz_end
"""


async def test_a_bit_of_everything(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    is_new = int(str(source.value("show server_version_num"))) >= 160000
    setting = "debug_logical_replication_streaming%3Dimmediate"
    source.parameters = f"options=-c%20{setting if is_new else 'logical_decoding_work_mem%3D64kB'}"
    source.execute(DDL + KEYLESS)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        # Small transactions, a large transaction with a rolled back part, and transactions in
        # between.
        for table in ("clone", "append", "hist"):
            source.execute(CHANGES.format(table, 0))
        with psycopg.connect(source.server.url(source.name)) as large:
            for table in ("clone", "append", "hist"):
                large.execute(CHANGES.format(table, 100).encode())
            large.execute("savepoint s")
            large.execute(
                "delete from clone; insert into hist select 5000 + g, 'gone' from generate_series(1, 500) g"
            )
            source.execute(KEYLESS_CHANGES)
            large.execute("rollback to s")
            large.execute(CHANGES.format("clone", 200).encode())
        await streamer.caught_up()
        await streamer.kill()
        source.execute(KEYLESS_CHANGES)
        source.execute(CHANGES.format("clone", 300) + CHANGES.format("hist", 300))
        source.execute("begin; truncate log; insert into log values (1, 'first'); commit")
        source.execute("delete from append where a < 10")
        streamer.start()
        await streamer.caught_up()
    for table in ("clone", "whole", "log"):
        assert_same(source, target, table)
    kept = contents(target, "append")
    assert set(contents(source, "append")) < set(kept)
    assert len(kept) > len(contents(source, "append"))
    assert target.execute(OPEN) == source.execute(f"{VALUES} order by 1")
    assert target.value(OVERLAPS) == 0
    assert target.value("select count(*) from hist where b = 'gone'") == 0
