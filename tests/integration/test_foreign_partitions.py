"""Partitions that are foreign tables: the WAL of the source lacks their changes."""

import asyncio

import pytest

from streamer.errors.remedies import Remedy
from streamer.runtime.session import source_checks
from tests.support.postgres import Database, assert_same
from tests.support.remedies import Operator
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("without_spark", "comparing_in_threads")

TABLES = """
create foreign data wrapper w; create server s foreign data wrapper w;
create table p (id int, v text) partition by range (id);
create table near partition of p for values from (0) to (10);
alter table p replica identity full; alter table near replica identity full;
create table filled (id int, v text); alter table filled replica identity full;
insert into filled values (21, 'before'); insert into p values (1, 'a')
"""
FOREIGN = "create foreign table far partition of p for values from (10) to (20) server s"


@pytest.mark.follows("copy.gap_reports:_describe")
async def test_status_names_a_foreign_partition_and_its_table_goes_on(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_checks, "CHECK_SECONDS", 0.5)
    source.execute(TABLES)
    async with stream("p:") as streamer:
        await streamer.caught_up()

        def told() -> str:
            return str(target.value("select error from streamer.relation"))

        async def change(statement: str) -> None:
            await asyncio.to_thread(source.execute, statement)

        # WHEN a foreign table becomes a partition THEN the status names the partition, and changes
        # go on
        await change(FOREIGN)
        await until(lambda: 'changes of "public.far" are not replicated' in told())
        await change("update p set v = 'b' where id = 1; insert into p values (2, 'c')")
        await streamer.caught_up()
        assert target.execute("select * from p order by id") == [(1, "b"), (2, "c")]
        assert (await streamer.table("public.p"))["state"] == "ready"
        # This gap does not hide a later gap.
        await change("alter table p attach partition filled for values from (20) to (30)")
        await until(lambda: '"public.filled" was attached as a partition' in told())
        assert '"public.far"' in told()
        # WHEN an operator detaches the partition and runs the command THEN the error is gone
        stored = target.value("select error_remedy from streamer.relation")
        await change("alter table p detach partition far")
        remedy = Remedy.from_json(stored)
        assert remedy is not None
        await Operator(streamer.path, source, target).follow(remedy)
        await until(lambda: target.value("select error is null from streamer.relation"))
        await streamer.caught_up()
        assert_same(source, target, "p")


async def test_a_foreign_partition_does_not_keep_rows_of_attached_ones_back(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_checks, "CHECK_SECONDS", 0.5)
    source.execute(TABLES)
    async with stream("p:", group="ddl: capture") as streamer:
        await streamer.caught_up()

        def told() -> str:
            return str(target.value("select error from streamer.relation"))

        await asyncio.to_thread(source.execute, FOREIGN)
        await until(lambda: 'changes of "public.far" are not replicated' in told())
        await asyncio.to_thread(
            source.execute, "alter table p attach partition filled for values from (20) to (30)"
        )
        # The wrapper of this test cannot read the foreign table, so the copy fails visibly.
        await until(lambda: "has no handler" in told())
