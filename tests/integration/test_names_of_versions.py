"""`history` names the columns of versions: for the table, its stream, copies and comparisons."""

import pytest

from streamer.compare.comparison import ComparisonScope
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

NAMES = 'history: {start: valid_from, end: "valid to", deleted: is_deleted, id: version_id}'
NEW_NAMES = {"kvsz_start": "valid_from", "kvsz_end": "valid to", "kvsz_deleted": "is_deleted"}
NEW_NAMES |= {"kvsz_id": "version_id"}
VERSIONS = (
    "select id, v, valid_from = '1900-01-01', \"valid to\" = '9999-01-01', is_deleted"
    " from {} order by id, version_id"
)
ROWS = "create table {0} (id int {1}, v text); insert into {0} values (1, 'a'), (2, 'b'), (3, 'c')"


@streams(
    f"keyed: {{type: history, {NAMES}}}\nbag: {{type: history, {NAMES}}}",
    source=f"{ROWS.format('keyed', 'primary key')}; {ROWS.format('bag', '')};"
    " alter table bag replica identity full",
)
@pytest.mark.parametrize("table", ["keyed", "bag"])
async def test_versions_are_written_and_corrected_in_columns_of_these_names(
    shared: Shared, table: str, compare: Compare
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(f"update {table} set v = 'x' where id = 1; delete from {table} where id = 2")
    source.execute(
        f"insert into {table} values (2, 'again'); update {table} set id = 4 where id = 3"
    )
    await shared.caught_up()
    is_bag = table == "bag"  # without a key, a row that comes begins a first version
    written = [
        (1, "a", True, False, False),
        (1, "x", False, True, False),
        (2, "b", True, False, True),
        (2, "again", is_bag, True, False),
        (3, "c", True, False, not is_bag),
        (4, "c", False, True, False),
    ]
    assert target.execute(VERSIONS.format(table)) == written
    target.execute(f"update {table} set v = 'wrong' where \"valid to\" > now() and id = 1")
    scope = ComparisonScope((shared.own(table),))
    (found,) = (await compare(shared, scope)).values()
    assert found.is_different
    await shared.ask("resync", table)
    await shared.caught_up()
    (found,) = (await compare(shared, scope)).values()
    assert not found.is_different
    current = f'select id, v from {table} where "valid to" > now() order by 1'
    assert target.execute(current) == [(1, "x"), (2, "again"), (4, "c")]


async def test_new_names_wait_until_the_columns_have_them(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(ROWS.format("t", "primary key"))
    async with stream("t: {type: history}") as streamer:
        await streamer.caught_up()
        source.execute("update t set v = 'x' where id = 1")
        await streamer.caught_up()
        write_config(
            streamer.path,
            source,
            target,
            "t: {type: history, on_table_dropped: close}",
            settings=NAMES,
        )
        await streamer.apply()
        source.execute("update t set v = 'y' where id = 1")
        await streamer.table_state("public.t", "error")
        error = str((await streamer.table("public.t"))["error"])
        assert "add column" not in error
        for old, new in NEW_NAMES.items():
            statement = f'alter table "public"."t" rename "{old}" to "{new}"'
            assert statement in error
            target.execute(statement)
        await streamer.caught_up()
        assert target.execute(VERSIONS.format("t"))[:3] == [
            (1, "a", True, False, False),
            (1, "x", False, False, False),
            (1, "y", False, True, False),
        ]
        source.execute("drop table t")

        async def are_closed() -> bool:
            return bool(target.value("select bool_and(\"valid to\" < '9999-01-01') from t"))

        await streamer.eventually(are_closed)
        assert target.value("select count(*) from t where is_deleted") == 3
