"""Foreign keys of the target that fire, because the role may not stop them."""

import asyncio

import pytest

from tests.support.postgres import Database, assert_same, ordinary_role
from tests.support.streamer import MakeStreamer

TABLES = """
create table parent (id int primary key);
create table child (id int primary key, p int references parent{action})
"""


async def test_a_delete_that_would_take_rows_of_another_table_along_stops_its_table(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    """The other table may have rows of the same key again, which the source keeps."""
    for db in (source, target):
        db.execute(TABLES.format(action=" on delete cascade"))
    with ordinary_role(target) as role:
        target.execute(f"alter table parent owner to {role}; alter table child owner to {role}")
        async with stream("parent:\nchild:", settings="workers: 8") as streamer:
            await streamer.caught_up()
            source.execute("insert into parent values (1)")
            await streamer.table_state("public.parent", "error", 40)
            error = (await streamer.table("public.parent"))["error"]
            assert "session_replication_role" in error
            assert 'foreign key "child_p_fkey"' in error
            assert f'grant set on parameter session_replication_role to "{role}"' in error
            target.execute("alter table child drop constraint child_p_fkey")
            source.execute("insert into child values (1, 1)")
            source.execute(
                "begin; delete from parent; insert into parent values (1);"
                "insert into child values (1, 1); commit"
            )
            await streamer.caught_up(40)
        assert_same(source, target, "parent")
        assert_same(source, target, "child")


async def ask(target: Database, action: str) -> None:
    target.execute(
        f"insert into streamer.request (relation_id, action) select id, '{action}'"
        " from streamer.relation where source = 'public.parent'; notify streamer"
    )


@pytest.mark.parametrize("in_one", [True, False])
async def test_a_truncate_is_not_stuck_behind_rows_that_refer_to_the_same_keys_again(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None, in_one: bool
) -> None:
    for db in (source, target):
        db.execute(TABLES.format(action=""))
    with ordinary_role(target) as role:
        target.execute(f"alter table parent owner to {role}; alter table child owner to {role}")
        async with stream("parent:\nchild:", settings="workers: 8") as streamer:
            await streamer.caught_up()
            source.execute("insert into parent values (1), (2); insert into child values (1, 1)")
            await streamer.caught_up(40)
            await ask(target, "pause")
            await streamer.table_state("public.parent", "paused")
            changes = (
                "truncate parent, child",
                "insert into parent values (1), (3)",
                "insert into child values (5, 1)",
            )
            source.execute("; ".join(["begin", *changes, "commit"]) if in_one else changes[0])
            for change in () if in_one else changes[1:]:
                source.execute(change)

            async def child_is_ahead() -> bool:
                # The program's transaction holds the table until this process goes on.
                found = await asyncio.to_thread(target.execute, "select id from child")
                return found == [(5,)]

            await streamer.eventually(child_is_ahead, 40)
            await ask(target, "resume")
            await streamer.caught_up(40)
            assert_same(source, target, "parent")
            assert_same(source, target, "child")
