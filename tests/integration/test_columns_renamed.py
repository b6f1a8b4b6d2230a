"""Columns are renamed, filled by a default, or dropped and added again, and every row gets the
right value.
"""

import re

import pytest

from tests.support.postgres import Database, contents
from tests.support.remedies import Operator, remedy_of
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = pytest.mark.usefixtures("without_spark")

CHANGES = {
    "renamed": "alter table renamed rename v to w",
    "renamed_add": "alter table renamed_add rename v to w",
    "filled": "alter table filled add w text not null default 'it''s'",
    "filled_add": "alter table filled_add add w text not null default 'it''s', add x int[] default '{1,2}'",
    "computed": "alter table computed add w serial",
    "computed_add": "alter table computed_add add w serial",
    "domain_add": "alter table domain_add add w seven",
    "again": "alter table again drop v; alter table again add v text",
}


async def error_of(streamer: Streamer, table: str) -> str:
    """Wait until a table shows an error, and return the error."""
    found: list[str] = []

    async def is_said() -> bool:
        found[:] = [(await streamer.table(f"public.{table}"))["error"] or ""]
        return bool(found[0])

    await streamer.eventually(is_said, 60)
    return found[0]


def same(source: Database, target: Database, table: str, columns: str) -> bool:
    return contents(source, table, columns) == contents(target, table, columns)


@pytest.mark.follows("copy.gap_reports:_describe")
@pytest.mark.follows("apply.rows.make_plan:missing_error")
async def test_rows_from_before_get_the_values_that_no_change_brings_or_the_error_says_how(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    # GIVEN tables in sync, and a domain with a default only at the source
    source.execute("create domain seven as int default 7")
    target.execute("create domain seven as int")
    for name in CHANGES:
        source.execute(f"create table {name} (id int primary key, v text)")
        source.execute(f"insert into {name} values (1, 'one'), (2, 'two')")
    tables = [n + (": {on_column_added: add}" if n.endswith("_add") else ":") for n in CHANGES]
    async with stream("\n".join(tables)) as streamer:
        await streamer.caught_up(60)

        # WHEN columns of the tables change, and then a row
        for name, statement in CHANGES.items():
            source.execute(f"{statement}; update {name} set id = 3 where id = 2")

        # THEN a rename is offered, and no column is added
        for name in ("renamed", "renamed_add"):
            error = await error_of(streamer, name)
            (statement,) = re.findall(r"run at the target: ([^;]*);", error)
            assert statement.endswith('rename column "v" to "w"')
            target.execute(statement)
        # AND a value that all rows got is added with the column
        (statement,) = re.findall(
            r"run at the target: ([^;]*);", await error_of(streamer, "filled")
        )
        target.execute(statement)
        # AND values that differ by row come without a request, once the target has the column
        error = await error_of(streamer, "computed")
        assert "copies the values of the existing rows" in error
        target.execute(re.findall(r"run at the target: ([^;]*);", error)[0])
        # AND a column of the same name is noticed
        error = await error_of(streamer, "again")
        assert "dropped and added again, or renamed" in error
        assert "streamer resync public.again --database shop --mode diff" in error
        remedy = await remedy_of(streamer, "public.again", "dropped and added again, or renamed")
        await Operator(streamer.path, source, target).follow(remedy)

        async def are_equal() -> bool:
            return all(
                same(source, target, name, "id, v" if name == "again" else "id, w")
                for name in CHANGES
            ) and same(source, target, "filled_add", "id, v, w, x")

        await streamer.eventually(are_equal, 60)
        await streamer.caught_up(60)
        assert (await streamer.table("public.again"))["error"] is None
        defaults = "select count(*) from pg_attrdef where adrelid = 'filled_add'::regclass"
        assert target.value(defaults) == 0


SWAP = "alter table {0} rename v to x; alter table {0} rename w to v; alter table {0} rename x to w"


@pytest.mark.follows("apply.write.planner:_changed_columns")
async def test_columns_that_had_each_others_names_stop_the_table_also_once_they_have_their_own(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """PostgreSQL's own subscription writes the values to the wrong columns then."""
    for name in ("swapped", "again"):
        for db in (source, target):
            db.execute(f"create table {name} (id int primary key, v int, w int)")
        source.execute(f"insert into {name} values (1, 10, 20)")
    async with stream("swapped:\nagain:") as streamer:
        await streamer.caught_up(60)
        row = "insert into {0} values (2, 30, 40)"
        for name, statements in (("swapped", (SWAP, row)), ("again", (SWAP, row, SWAP))):
            source.execute(f"begin; {'; '.join(statements).format(name)}; commit")
        for name in ("swapped", "again"):
            await streamer.table_state(f"public.{name}", "error", 60)  # after the report of a gap
            assert 'columns "w", "v"' in await error_of(streamer, name)
            assert target.value(f"select count(*) from {name}") == 1
            remedy = await remedy_of(streamer, f"public.{name}", "swapped names")
            await Operator(streamer.path, source, target).follow(remedy)

        async def are_equal() -> bool:
            return all(same(source, target, name, "id, v, w") for name in ("swapped", "again"))

        await streamer.eventually(are_equal, 60)
        await streamer.caught_up(60)
