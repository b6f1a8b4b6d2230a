"""Foreign keys of the target that fire, because the role may not stop them."""

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


async def test_a_truncate_that_a_foreign_key_refuses_says_what_helps(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    for db in (source, target):
        db.execute(TABLES.format(action=""))
    with ordinary_role(target) as role:
        target.execute(f"alter table parent owner to {role}; alter table child owner to {role}")
        async with stream("parent:\nchild:", settings="workers: 8") as streamer:
            await streamer.caught_up()
            target.execute(
                "insert into parent values (1); insert into child values (1, 1)"
            )  # as the child's lane leaves it when it comes first
            source.execute("truncate parent, child; insert into parent values (1)")
            await streamer.caught_up(40)
            target.execute("insert into child values (2, 1)")
            source.execute("delete from parent")
            await streamer.table_state("public.parent", "error", 40)
            error = (await streamer.table("public.parent"))["error"]
            assert "session_replication_role" in error
            target.execute("delete from child")
            await streamer.caught_up(40)
        assert_same(source, target, "parent")
