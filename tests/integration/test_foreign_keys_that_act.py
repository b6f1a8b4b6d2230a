"""Foreign keys of the target that fire, because the role may not stop them."""

import asyncio
from collections.abc import Iterable

import pytest

from streamer.mapping.rules import RelationMapping
from streamer.runtime.tables.relations import Relations
from streamer.target.foreign_key_groups import Groups
from tests.support.postgres import Database, assert_same, ordinary_role
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

TABLES = """
create table parent (id int primary key);
create table child (id int primary key, p int references parent{action})
"""


@pytest.mark.follows("apply.write.planner:Planner._check_actions")
@pytest.mark.parametrize("step", ["grant", "drop"])
async def test_a_delete_that_would_take_rows_of_another_table_along_stops_its_table(
    source: Database, target: Database, stream: MakeStreamer, step: str
) -> None:
    """The second table may have rows of the same key again, which the source keeps."""
    for db in (source, target):
        db.execute(TABLES.format(action=" on delete cascade"))
    with ordinary_role(target) as role:
        target.execute(f"alter table parent owner to {role}; alter table child owner to {role}")
        async with stream("parent:\nchild:", settings="workers: 8") as streamer:
            await streamer.caught_up()
            source.execute("insert into parent values (1)")
            words = f'role "{role}" may not set session_replication_role'
            remedy = await remedy_of(streamer, "public.parent", words)
            assert 'foreign key "child_p_fkey"' in (await streamer.table("public.parent"))["error"]
            operator = Operator(streamer.path, source, target)
            await operator.follow(remedy, choose=0 if step == "grant" else 1)
            if step == "grant":
                await streamer.stop()
                streamer.start()
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
    source: Database,
    target: Database,
    stream: MakeStreamer,
    in_one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tables have separate lanes, as tables of two sources have."""

    async def no_groups(self: Relations, mappings: Iterable[RelationMapping]) -> Groups:
        return {}

    monkeypatch.setattr(Relations, "read_groups", no_groups)
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


FAMILY = """
create table grandparent (id int primary key, v text);
create table parent (id int primary key, g int references grandparent, u int unique);
create table child (id int primary key, p int references parent, v varchar(5));
"""
NAMES = ("grandparent", "parent", "child")


@pytest.mark.parametrize("on_error", ["stop", "quarantine"])
async def test_tables_that_foreign_keys_connect_are_written_together(
    source: Database, target: Database, stream: MakeStreamer, on_error: str
) -> None:
    for db in (source, target):
        db.execute(FAMILY)
    source.execute("alter table parent drop constraint parent_g_fkey")
    source.execute(
        "alter table parent add foreign key (g) references grandparent on delete cascade"
        " on update cascade"
    )
    with ordinary_role(target) as role:
        for table in NAMES:
            target.execute(f"alter table {table} owner to {role}")
        rules = "".join(f"{table}: {{on_error: {on_error}}}\n" for table in NAMES)
        async with stream(rules, settings="workers: 8") as streamer:
            await streamer.caught_up(40)
            fill = (
                "insert into grandparent values ({0}, 'a'), ({0} + 1, 'b');"
                "insert into parent values ({0}, {0}, {0}), ({0} + 5, {0} + 1, {0} + 5);"
                "insert into child values ({0}, {0}, 'a'), ({0} + 1, {0} + 5, 'b');"
            )
            together = (
                # New keys in every table.
                f"truncate grandparent, parent, child; {fill.format(100)}",
                f"truncate child, parent, grandparent; {fill.format(104)}",
                # Referenced rows go, and referencing rows move to different parents.
                "insert into grandparent values (1, 'new'); update parent set g = 1",
                """insert into grandparent values (8, 'new'); update parent set g = 8;
                delete from grandparent where id <> 8; update grandparent set id = 1""",
                # The source removes the referenced row first, then the referencing rows.
                "insert into grandparent values (2, 'x'); insert into parent values (2, 2, 2)",
                "delete from grandparent where id = 2; insert into parent values (3, 1, 2)",
                "update grandparent set id = 7 where id = 1",
                "delete from child; delete from parent; delete from grandparent;"
                + fill.format(104),
            )
            source.execute(f"begin; {fill.format(1)} commit")
            for statements in together:
                source.execute(f"begin; {statements}; commit")
            await streamer.caught_up(60)
            for table in NAMES:
                assert_same(source, target, table)

            # A row that the target refuses does not undo earlier transactions.
            target.execute("alter table child alter v type varchar(3)")
            source.execute(
                "begin; delete from child; delete from parent; delete from grandparent; commit"
            )
            source.execute(f"begin; {fill.format(1)} commit")
            source.execute("insert into child values (9, 1, 'long')")
            if on_error == "stop":
                await streamer.table_state("public.child", "error", 40)
                error = (await streamer.table("public.child"))["error"]
                assert "Key (id)=(9)" in error
                assert_same(source, target, "parent")
                target.execute("alter table child alter v type varchar(5)")
            await streamer.caught_up(60)
            assert_same(source, target, "grandparent")
            assert_same(source, target, "parent")
            held = target.value("select count(*) from streamer.quarantine")
            assert held == (on_error == "quarantine")
            assert target.value("select count(*) from child") == 3 - held


@pytest.mark.follows("target.missing_grants:advise_grants")
async def test_a_foreign_key_of_the_target_alone_no_longer_refuses_rows_after_the_grant(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table child (id int primary key, p int)")
    target.execute(TABLES.format(action=""))
    with ordinary_role(target) as role:
        target.execute(f"alter table child owner to {role}")
        async with stream("child:") as streamer:
            await streamer.caught_up()
            source.execute("insert into child values (1, 5)")
            remedy = await remedy_of(streamer, "public.child", "child_p_fkey")
            operator = Operator(streamer.path, source, target)
            await operator.follow(remedy, choose=0)
            await streamer.stop()
            streamer.start()
            await streamer.caught_up(40)
        assert_same(source, target, "child")
