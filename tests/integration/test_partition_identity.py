"""A partition whose replica identity differs from the root's stops the table: streamer does not
guess.
"""

import asyncio
from typing import Any

import pytest

from streamer.runtime.guards import publications
from streamer.source.slot_and_publications.publication import ensure_publications
from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

# The changes of a partition show a change of its identity during publication.
WHOLE = """
create table whole (id int not null, v text) partition by list (id);
create table whole_1 partition of whole for values in (1, 2);
alter table whole replica identity full; alter table whole_1 replica identity full
"""
KEYED = """
create table keyed (id int primary key, u int not null, v text) partition by list (id);
create table keyed_1 partition of keyed for values in (1, 2);
create unique index keyed_u on keyed_1 (u)
"""
SPOIL = {
    "whole": "alter table whole_1 add primary key (id), replica identity default",
    "keyed": "alter table keyed_1 replica identity using index keyed_u",
}
MEND = {
    "whole": "alter table whole_1 replica identity full",
    "keyed": "alter table keyed_1 replica identity default",
}


async def test_a_partition_that_identifies_rows_otherwise_stops_its_table(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    source.execute(WHOLE)
    source.execute(KEYED)
    source.execute("insert into whole values (1, 'a'), (2, 'b')")
    source.execute("insert into keyed values (1, 10, 'a'), (2, 20, 'b')")
    async with stream("whole:\nkeyed:") as streamer:
        await streamer.caught_up()
        for name, spoil in SPOIL.items():
            before = target.execute(f"select * from {name} order by 1")
            source.execute(f"begin; {spoil}; delete from {name} where id = 1; commit")
            await streamer.table_state(f"public.{name}", "error", 40)
            table = await streamer.table(f"public.{name}")
            assert "replica identity" in table["error"]
            assert target.execute(f"select * from {name} order by 1") == before
        for name, mend in MEND.items():
            source.execute(mend)
            target.execute(
                "insert into streamer.request (relation_id, action) select id, 'resync'"
                f" from streamer.relation where source = 'public.{name}'; notify streamer"
            )
        await streamer.caught_up(40)
        for name in SPOIL:
            source.execute(f"update {name} set v = 'z'")
        await streamer.caught_up(40)
        for name in SPOIL:
            assert_same(source, target, name)


async def test_updates_of_a_leaf_that_had_no_identity_for_a_moment_come_with_a_copy(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaf has an identity again as soon as the publication omits updates of the leaf."""
    source.execute(
        "create table l (id int, part int, v text) partition by list (part);"
        "create table l_1 partition of l for values in (1);"
        "alter table l replica identity full; alter table l_1 replica identity full"
    )
    is_made, was_updated = False, asyncio.Event()

    async def ensure_and_change(*arguments: Any) -> Any:
        result = await ensure_publications(*arguments)
        if is_made and not was_updated.is_set():
            was_updated.set()
            await asyncio.to_thread(
                source.execute,
                "update l set v = 'unpublished' where id < 5; alter table l_2 replica identity full",
            )
        return result

    monkeypatch.setattr(publications, "ensure_publications", ensure_and_change)
    async with stream("l:") as s:
        await s.caught_up()
        source.execute(
            "create table l_2 partition of l for values in (2);"
            " insert into l select g, 2, 'leaf' from generate_series(1, 20) g"
        )
        is_made = True

        async def is_equal() -> bool:
            rows = "select id, v from l order by id"
            return was_updated.is_set() and source.execute(rows) == target.execute(rows)

        await s.eventually(is_equal)
        await s.table_state("public.l", "ready")
