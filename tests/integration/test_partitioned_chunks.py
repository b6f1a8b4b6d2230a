"""Copies in chunks of partitioned tables, whose partitions change between two chunks."""

import asyncio
from collections.abc import Iterable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from streamer.control.chunked_copy import ChunkedCopy
from streamer.copy.copy_in_chunks import ChunkSize, RewrittenError, find_chunk
from streamer.copy.copy_snapshot import read_table_seen
from streamer.copy.parts.ctid_ranges import Heap
from streamer.mapping.relation_names import RelationName
from tests.integration.test_chunks import until_it_has
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

SETTINGS = "sync: {resumable_above: 400kB, rows_per_second: 2000}"
"""A table of 1200 rows has four chunks, which take a while."""
APPLY = "ddl: capture\non_ddl: {detach_partition: apply}"


def create(name: str, partitions: str, *, more: str = "") -> str:
    """Make a table whose partitions have rows on both sides of each border."""
    made = partitions.replace("{}", name)
    return f"""
    create table {name} (g numeric, r int, large text, v int default 0, primary key (g, r))
        partition by list (r);
    alter table {name} alter large set storage external; {made}; {more};
    insert into {name} select g, g % 4, case when g % 5 = 0 then repeat('large', 420) end
    from generate_series(1, 1200) g;
    """


LISTED = """
    create table {}_0 (r int not null, gone int, v int, large text, g numeric not null);
    alter table {}_0 drop gone, alter v set default 0, alter large set storage external;
    alter table {} attach partition {}_0 for values in (0);
    create table {}_1 partition of {} for values in (1);
    create table {}_2 partition of {} for values in (2) partition by range (g);
    create table {}_2_low partition of {}_2 for values from (minvalue) to (500);
    create table {}_2_high partition of {}_2 for values from (500) to (maxvalue);
    create table {}_rest partition of {} default
"""
FULL = ";".join(
    f"alter table {name} replica identity full"
    for name in ("moved", "moved_0", "moved_1", "moved_2_low", "moved_2_high", "moved_rest")
)
CHANGES = """
    update {0} set r = (r + 1) % 4 where g % 7 = 0;
    update {0} set g = g + 5000, large = 'moved up' where g between 2 and 9;
    update {0} set g = -g, large = null, r = 3 where g between 1190 and 1199;
    delete from {0} where g % 11 = 0;
    insert into {0} select g, r from (values (-0.5), (6000.5)) g (g), generate_series(0, 4) r;
    update {0} set v = v + 1 where g % 3 = 0
"""


async def test_partitions_are_chunked_and_come_and_go_between_two_chunks(
    stream: MakeStreamer, source: Database, target: Database
) -> None:
    tables = ("changed", "emptied", "moved")
    for table in tables:
        source.execute(create(table, LISTED, more=FULL if table == "moved" else ""))
    partitions = ";".join(
        f'create table "%{n}" partition of "to 100%s" for values with (modulus 9, remainder {n})'
        for n in range(9)
    )
    source.execute(
        'create table "to 100%s" ("a%b" bigint primary key, v int default 0, pad text)'
        f' partition by hash ("a%b"); {partitions};'
        """insert into "to 100%s" select g, 0, repeat('x', 400) from generate_series(1, 1200) g"""
    )
    names = "".join(f"{table}:\n" for table in tables)
    async with stream(f'{names}"to 100%s":', settings=SETTINGS, group=APPLY) as streamer:
        for table in (*tables, "to 100%s"):
            await until_it_has(streamer, f"public.{table}", 1)
        place = "select xmin || ' ' || ctid from changed where g = 10"
        before = target.value(place)
        for table in tables:
            await asyncio.to_thread(source.execute, CHANGES.format(table))
        # The engine runs in this thread, and may hold a lock that a command waits for.
        await asyncio.to_thread(
            source.execute,
            """
            alter table changed detach partition changed_rest; drop table changed_1;
            create table changed_7 (like changed including all);
            insert into changed_7 select g, 7 from generate_series(2, 1200, 100) g;
            alter table changed attach partition changed_7 for values in (7);
            create table changed_8 partition of changed for values in (8);
            insert into changed select g, 8 from generate_series(1, 1200, 100) g;
            update changed set r = 8 where r = 7 and g > 600;
            update "to 100%s" set v = v + 1 where "a%b" % 10 = 3;
            update "to 100%s" set "a%b" = -"a%b" where "a%b" > 1195
            """,
        )
        truncate = "truncate emptied_1; insert into emptied values (3, 1), (1000, 1)"
        await asyncio.to_thread(source.execute, truncate)
        await streamer.caught_up()
        for table in (*tables, "to 100%s"):

            async def is_equal(table: str = table) -> bool:
                rows = f'select * from "{table}" order by 1, 2'
                return source.execute(rows) == target.execute(rows)

            await streamer.eventually(is_equal)
        assert target.value(place) == before, "a chunk that is there is not copied again"
        await streamer.caught_up()
    assert target.execute("select * from streamer.conflict") == []


async def test_a_partition_rewritten_after_the_snapshot_does_not_count_as_empty(
    source: Database,
) -> None:
    source.execute(create("parts", LISTED))
    name = RelationName("public", "parts")
    nothing = ChunkedCopy(("g", "r"), ("numeric", "integer"), (), "", 0, 1, 1, 0)
    size = ChunkSize(100, 2, 1, 20)
    async with await psycopg.AsyncConnection.connect(source.url, row_factory=dict_row) as plain:
        await plain.execute("begin isolation level repeatable read; savepoint look")
        seen = await read_table_seen(plain, name, is_partitioned=True)
        await plain.execute("rollback to savepoint look")
        assert seen is not None
        copy: Any = SimpleNamespace(seen=seen)
        chunk = await find_chunk(plain, copy, nothing, size)
        assert {part.heap for part in chunk.parts} == set(seen.heaps) - {high_of(seen.heaps)}
        assert chunk.after is not None
        assert 200 <= Decimal(chunk.after.border[0]) < 400
        aside = (
            "begin; alter table parts_1 rename to aside; create table parts_1 (like aside); commit"
        )
        source.execute(aside)
        with pytest.raises(RewrittenError, match="parts_1"):
            await find_chunk(plain, copy, nothing, size)
        source.execute("drop table parts_1; alter table aside rename to parts_1")
        source.execute("truncate parts_rest")
        with pytest.raises(RewrittenError, match="parts_rest"):
            await find_chunk(plain, copy, nothing, size)


def high_of(heaps: Iterable[Heap]) -> Heap:
    """Return the partition whose keys are all higher than the keys of the first chunk."""
    (heap,) = [heap for heap in heaps if "_high" in heap.relation_sql]
    return heap
