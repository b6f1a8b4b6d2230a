"""`copy_where`: the first copy reads the rows of a condition, and the stream brings changes of all rows."""

from typing import Any

import pytest

from streamer.compare.comparison import ComparisonScope, TableResult
from streamer.control.resync_options import Mode, Resync, RowScope
from tests.support.comparing import Compare
from tests.support.shared import Shared, streams

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

ROWS = "create table t (id int primary key, v text); insert into t select g, 'v' from generate_series(1, 10) g"
BAG = f"{ROWS}; alter table t drop constraint t_pkey, replica identity full"
TABLES = {"clone": ROWS, "history": ROWS, "append": ROWS, "clone ": BAG}
"""The types, with a key and without."""
CHANGES = """
update t set v = 'x' where id in (2, 7); delete from t where id = 3;
update t set id = 50 where id = 1; insert into t values (0, 'new')
"""
AFTER = {0: "new", 2: "x", 6: "v", 7: "x", 8: "v", 9: "v", 10: "v", 50: "v"}


def current(shared: Shared, kind: str) -> set[tuple[Any, ...]]:
    open_only = "where kvsz_end = '9999-01-01'" if kind == "history" else ""
    return set(shared.target.execute(f"select id, v from t {open_only}"))


async def result(shared: Shared, compare: Compare, **options: Any) -> TableResult:
    (found,) = (await compare(shared, ComparisonScope(shared.tables), **options)).values()
    return found


@pytest.mark.parametrize(("kind", "ddl"), TABLES.items(), ids=["clone", "history", "append", "bag"])
@streams('t: {type: <kind>, copy_where: "id > 5"}', source="<ddl>")
async def test_changes_of_rows_that_no_copy_read_arrive_and_stay(
    shared: Shared, kind: str, ddl: str, compare: Compare
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    assert sorted(id_ for id_, _ in current(shared, kind)) == [6, 7, 8, 9, 10]
    source.execute(CHANGES)
    await shared.caught_up()
    assert dict(sorted(current(shared, kind))) == AFTER
    (table,) = (await shared.status())["tables"]
    assert (table["state"], table["error"]) == ("ready", None)
    conflicts = "select count(*) from streamer.conflict c join streamer.relation r on r.id = relation_id where r.source = '{}'"
    assert target.value(conflicts.format(shared.own("t"))) == 0
    assert not (await result(shared, compare)).is_different

    for number, mode in enumerate(("diff", "reload"), 11):
        # A resync reads all rows, because its snapshot may have changes that the stream drops.
        target.execute("update t set v = 'wrong' where id in (2, 7); delete from t where id = 8")
        found = await result(shared, compare)
        assert found.missing + found.different == 2
        with source.connect() as other:
            other.execute("begin; select pg_current_xact_id()")  # the snapshot waits for its end
            await shared.ask("resync", mode=mode)
            await shared.table_state("t", "copying")
            source.execute(
                f"update t set v = '{mode}' where id = 4; update t set id = {number} where id = 0;"
                f"insert into t values (0, '{mode}')"
            )
            other.execute("commit")
        await shared.caught_up()
        rows = set(source.execute("select id, v from t"))
        assert rows <= current(shared, kind) if kind == "append" else rows == current(shared, kind)
        assert not (await result(shared, compare)).is_different
        target.execute("delete from t where id = 8")
        await result(shared, compare, repairs=True)
        assert not (await result(shared, compare)).is_different


RULE = 't: {initial: keep, copy_where: "id > 5"}'


@streams(
    RULE,
    source=ROWS,
    target="create table t (id int primary key, v text); insert into t values (1, 'own')",
)
async def test_a_table_that_returns_to_the_mapping_is_copied_as_a_whole(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    assert current(shared, "clone") == {(1, "own"), *((number, "v") for number in range(6, 11))}
    await shared.change("{}")
    source.execute("update t set v = 'x' where id = 4")
    await shared.change(RULE)
    await shared.table_state("t", "ready")
    rows = "select id, v from t order by id"
    assert target.execute(rows) == source.execute(rows)


@pytest.mark.follows("apply.write.rejection_advice:_conflict")
@streams(
    't: {copy_where: "id > 1"}',
    source="create table t (id int primary key, v int, big text);"
    "alter table t alter big set storage external;"
    "insert into t select g, 0, repeat('x', 10000) from generate_series(1, 2) g",
)
async def test_a_change_of_such_a_row_without_its_large_values_stops_the_table(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("update t set v = 1; insert into t values (3, 3, 'x')")
    await shared.table_state("t", "error")
    error = str((await shared.table("t"))["error"])
    assert "unchanged values" in error
    assert "replica identity full, and run: streamer resync" in error
    assert target.execute("select id, v from t") == [(2, 0)]
    # The next change sends all values. The copy passes over the change without.
    source.execute("alter table t replica identity full")
    await shared.ask("resync")
    await shared.caught_up()
    source.execute("update t set v = 4 where id = 1")
    await shared.caught_up()
    facts = "select id, v, length(big) from t order by 1"
    assert target.execute(facts) == source.execute(facts)


@pytest.mark.parametrize(
    ("rule", "named"),
    {
        't: {copy_where: "v::int > 0"}': "`copy_where`",
        't: {filter: "v::int > 0"}': "`filter`",
        't: {set: {n: "v::int"}}': "`set` of n",
        't: {filter: "id > 0", copy_where: "100 / (id - 1) > 0"}': "`filter` or `copy_where`",
    }.items(),
    ids=["copy_where", "filter", "set", "both"],
)
@streams("<rule>", source=ROWS)
async def test_the_error_of_an_expression_that_fails_for_a_row_names_the_setting(
    shared: Shared, rule: str, named: str
) -> None:
    await shared.table_state("t", "error")
    error = str((await shared.table("t"))["error"])
    assert f"at the source, {named} fails for a row: correct the expression or the row" in error
    assert "run: streamer resume" in error
    shared.source.execute("delete from t where id = 1; update t set v = id")
    await shared.ask("resume")
    await shared.caught_up()
    assert shared.target.execute("select id from t order by 1") == [(n,) for n in range(2, 11)]


@streams('t: {copy_where: "id > 5"}', source=ROWS)
async def test_a_later_copy_ignores_a_condition_that_the_target_cannot_evaluate(
    shared: Shared, compare: Compare
) -> None:
    await shared.caught_up()
    await shared.change('t: {copy_where: "gone > 5"}')
    await shared.ask("resync")
    await shared.caught_up()
    assert shared.target.execute("select id, v from t order by 1") == shared.source.execute(
        "select id, v from t order by 1"
    )
    found = await result(shared, compare)
    assert 'copy_where uses column "gone"' in str(found.error)


@pytest.mark.parametrize("mode", ["reload", "diff"])
@streams("t:", source=ROWS)
async def test_a_resync_whose_condition_fails_for_a_row_names_the_way_out(
    shared: Shared, mode: str
) -> None:
    await shared.caught_up()
    scope = RowScope(("v::int > 0",))
    await shared.ask("resync", **Resync(Mode(mode), scope=scope).to_json())

    async def is_named() -> bool:
        error = str((await shared.table("t"))["error"])
        return "the condition of the resync" in error and "a resync of the whole table" in error

    await shared.eventually(is_named)
    shared.source.execute("update t set v = 'w' where id = 1")
    await shared.ask("resync")
    await shared.caught_up()
    assert (await shared.table("t"))["error"] is None
    assert shared.target.execute("select v from t where id = 1") == [("w",)]
