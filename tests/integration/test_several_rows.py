"""A key that finds several rows of the target stops the table before any commit."""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until

CHANGES = {
    "removed": "delete from removed where id = 1",
    "changed": "update changed set v = 'new' where id = 1",
    # The right number of rows, but the wrong rows.
    "mixed": "update mixed set v = 'new' where id in (1, 2)",
    "moved": "update moved set id = 9 where id = 1",
    "once": "update once set v = 'new' where id = 1",
}
EMPTIED = """
create table emptied (id int primary key, grp int not null,
                      twice int generated always as (id * 2) stored)
"""
# The key gets a part that the stream omits. From 18 on, the source refuses that.
GENERATED = (
    "begin; alter table emptied drop constraint emptied_pkey, add primary key (grp, twice);"
    "delete from emptied where id = 2; commit"
)


def counts(streamer: Streamer) -> dict[str, float]:
    (conflicts,) = streamer.engine.metrics.conflicts.collect()
    return {s.labels["kind"]: s.value for s in conflicts.samples if s.name.endswith("_total")}


@pytest.mark.since(18)  # generated columns in publications
@pytest.mark.parametrize("on_error", ["stop", "quarantine"])
@streams(
    "\n".join(
        f"{name}: {{initial: none, on_error: <on_error>"
        + (", type: append}" if name == "once" else "}")
        for name in (*CHANGES, "emptied")
    ),
    both=EMPTIED,
    source=";".join(f"create table {name} (id int primary key, v text)" for name in CHANGES),
    target=";".join(f"create table {name} (id int, v text)" for name in CHANGES),
)
async def test_more_rows_than_were_asked_for_are_a_conflict_before_the_commit(
    shared: Shared, on_error: str
) -> None:
    source, target = shared.source, shared.target
    changes = dict(CHANGES)
    if int(str(source.value("show server_version_num"))) < 180000:
        changes["emptied"] = GENERATED
    await shared.caught_up()
    for name in CHANGES:
        source.execute(f"insert into {name} select g, 'old' from generate_series(1, 3) g")
    source.execute("insert into emptied (id, grp) select g, 1 from generate_series(1, 3) g")
    await shared.caught_up()
    for name in CHANGES:
        target.execute(f"insert into {name} values (1, 'another')")
    target.execute("delete from mixed where id = 2")
    before = {name: target.execute(f"select * from {name} order by 1, 2") for name in changes}
    for statement in changes.values():
        source.execute(statement)
    for name in changes:
        if on_error == "stop":
            await shared.table_state(name, "error", 40)
            error = (await shared.table(name))["error"]
            assert "several rows" in error
            assert f'create unique index on "{source.schema}"."{name}"' in error
            assert target.execute(f"select * from {name} order by 1, 2") == before[name]
    if on_error == "quarantine":
        await shared.caught_up(40)
        held = target.execute(
            "select r.source from streamer.quarantine q join streamer.relation r"
            " on r.id = q.relation_id where q.error like '%several rows%' order by 1"
        )
        assert held == [(shared.own(name),) for name in sorted(changes)]
    assert all(value >= 0 for value in counts(shared).values())
    if on_error == "stop":
        target.execute("truncate removed, changed, mixed, moved, once")
        for name in CHANGES:
            target.execute(f"insert into {name} values (1, 'old'), (2, 'old'), (3, 'old')")
            target.execute(f"create unique index on {name} (id)")
        target.execute("delete from emptied where id <> 2")
        await shared.caught_up(40)
        for name in CHANGES:
            assert_same(source, target, name)


HELD = """
begin; lock table t in share row exclusive mode;
insert into t values (1, 'another'); delete from t where id = 2
"""


@streams(
    "t: {initial: none}",
    source="create table t (id int primary key, v text)",
    target="create table t (id int, v text)",
)
async def test_rows_that_appear_while_streamer_waits_stop_the_table(shared: Shared) -> None:
    """The statement touches the right number of rows, and an earlier statement saw no key twice."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'old'), (2, 'old')")
    await shared.caught_up()
    with target.connect() as user:
        user.execute(HELD)
        source.execute("update t set v = 'new'")
        waits = "select exists (select from pg_locks where not granted)"
        await until(lambda: target.value(waits), "streamer waits for the table")
        user.execute("commit")
    await shared.table_state("t", "error", 40)
    assert "several rows" in (await shared.table("t"))["error"]
    assert target.execute("select v from t order by v") == [("another",), ("old",)]


OUTLIVES = {
    "appends": "type: append",
    "marks": "on_delete: mark",
    "marks_in": "on_delete: mark, filter: \"v <> 'out'\"",
    "computes": "type: append, set: {v: \"v || ''\"}",
    "keeps": "skip_truncate: true",
    "keeps_in": "skip_truncate: true, filter: \"v <> 'out'\"",
}


@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_a_key_that_is_inserted_again_has_one_row_without_a_unique_index(
    source: Database, target: Database, stream: MakeStreamer, transport: str
) -> None:
    """A copy that defers indexes leaves the target without an index for a while, too."""
    for name in OUTLIVES:
        source.execute(f"create table {name} (id int primary key, v text)")
        target.execute(f"create table {name} (id int, v text, deleted_at timestamptz)")
    rules = "\n".join(f"{name}: {{initial: none, {rule}}}" for name, rule in OUTLIVES.items())

    def change(statements: str) -> None:
        source.execute("; ".join(statements.format(name) for name in OUTLIVES))

    def rows(name: str, columns: str = "id, v") -> list[tuple[object, ...]]:
        return target.execute(f"select {columns} from {name} order by 1")

    async with stream(rules, group=f"transport: {transport}") as streamer:
        await streamer.caught_up()
        # GIVEN rows that the target keeps although the source has removed them
        change("insert into {0} select g, 'old' from generate_series(1, 5) g")
        await streamer.caught_up()
        source.execute("truncate keeps, keeps_in")
        change("delete from {0}")
        await streamer.caught_up()
        # WHEN the keys come again: alone, with further changes, and by an update of the key
        change("insert into {0} values (1, 'new')")
        await streamer.caught_up()
        change(
            "insert into {0} values (2, 'new'), (3, 'new'), (9, 'new'); update {0} set v = 'newer' "
            "where id in (1, 2); update {0} set id = 4 where id = 9"
        )
        await streamer.caught_up()
        # THEN each key has only the new row
        expected = [(1, "newer"), (2, "newer"), (3, "new"), (4, "new"), (5, "old")]
        for name in OUTLIVES:
            assert rows(name) == expected, name
        assert rows("marks", "id, deleted_at is null")[3:] == [(4, True), (5, False)]
        # A row outside the filter replaces none.
        source.execute("insert into keeps_in values (5, 'out')")
        await streamer.caught_up()
        assert rows("keeps_in") == expected
