"""Tables of the target that inherit from each other: each has only the rows of its source table."""

import pytest

from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

KINDS = ["clone", "history", "append"]
PAIR = """
create table {0} (id int primary key, v text, big text);
create table {0}_child (more int, primary key (id)) inherits ({0});
"""
HISTORY = """
create table history (id int, v text, big text, kvsz_start timestamptz not null,
                      kvsz_end timestamptz not null, kvsz_deleted boolean not null);
create table history_child (more int) inherits (history);
"""


async def test_changes_of_a_parent_leave_the_rows_of_its_children_alone(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """PostgreSQL's own subscription writes to a single table as well."""
    source.execute("".join(map(PAIR.format, KINDS)))
    target.execute("".join(PAIR.format(kind) for kind in KINDS if kind != "history") + HISTORY)
    rules = "".join(f"{k}: {{type: {k}}}\n{k}_child: {{type: {k}}}\n" for k in KINDS)

    def rows(table: str) -> list[tuple[object, ...]]:
        where = " where not kvsz_deleted and kvsz_end > '9000-01-01'" if "history" in table else ""
        return target.execute(f"select id, v from only {table}{where} order by 1")

    def source_rows(table: str) -> list[tuple[object, ...]]:
        return source.execute(f"select id, v from only {table} order by 1")

    def change(statement: str) -> None:
        source.execute("; ".join(statement.format(kind) for kind in KINDS))

    # GIVEN rows of both that have the same keys, which inheritance allows
    change("insert into {0}_child values (1, 'child', 'x'), (2, 'child', 'x'), (3, 'child', 'x')")
    change("insert into {0} values (1, 'parent'), (2, 'parent'), (4, 'parent')")
    async with stream(rules) as streamer:
        for kind in KINDS:
            await streamer.table_state(f"public.{kind}", "ready", 60)
            await streamer.table_state(f"public.{kind}_child", "ready", 60)

        async def check(*kinds: str) -> None:
            await streamer.caught_up()
            for table in [name for kind in kinds for name in (kind, f"{kind}_child")]:
                assert rows(table) == source_rows(table), table

        await check(*KINDS)
        # WHEN the parent's rows change, as sets and row by row
        change("update only {0} set v = v || '!'")
        await check(*KINDS)
        change(
            "begin; update only {0} set id = 3 where id = 4; delete from only {0} where id = 1; commit"
        )
        await check("clone", "history")
        change("delete from only {0} where id = 2; insert into {0} values (2, 'again')")
        await check("clone", "history")
        # AND a copy replaces the rows of the parent
        await streamer.ask("resync", "public.clone")
        await streamer.ask("resync", "public.history", mode="diff")
        await streamer.table_state("public.clone", "ready", 60)
        await streamer.table_state("public.history", "ready", 60)
        await check("clone", "history")
        # THEN the children keep all rows, even when the parent is emptied
        change("truncate only {0}")
        await check("clone", "history")
        assert rows("append_child") == source_rows("append_child")
