"""A key that the source checks late: two rows may share it for a while within a transaction."""

import pytest

from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

TABLE = """
create table {name} (id int primary key deferrable{mode}, v text);
alter table {name} replica identity full
"""
MADE = {"late": "", "later": " initially deferred", "once": "", "kept": " initially deferred"}
"""The clauses of the keys of tables that streamer makes at the target; the last is a history."""
LATE = "begin; set constraints all deferred;"
CHANGES = (
    "update {t} set id = id + 1",
    "update {t} set id = id - 1",
    LATE + "update {t} set id = 8 - id; commit",
    # An insert repeats a key before the former row goes.
    LATE + "insert into {t} values (3, 'b'); delete from {t} where id = 3 and v <> 'b'; commit",
    LATE + "insert into {t} values (4, 'x'); update {t} set id = 40 where id = 4 and v <> 'x';"
    "update {t} set v = 'y' where id = 4; commit",
    LATE + "insert into {t} values (5, 'b'); delete from {t} where id = 5 and v = 'b'; commit",
)


@streams(
    "late:\nlater:\nonce: {type: append}\nkept: {type: history}",
    source=";".join(
        f"{TABLE.format(name=name, mode=mode)};"
        f"insert into {name} select g, 'row ' || g from generate_series(1, 6) g"
        for name, mode in MADE.items()
    ),
)
async def test_rows_that_share_a_key_for_a_while_are_distinguished(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    timing = (
        "select condeferrable from pg_constraint"
        " where conrelid = 'late'::regclass and contype = 'p'"
    )
    assert target.execute(timing) == [(True,)]
    for statement in CHANGES:
        for name in MADE:
            if name != "once" or "delete" not in statement:
                source.execute(statement.format(t=name))
    await shared.caught_up()
    for name in ("late", "later", "once"):
        assert_same(source, target, name)
    current = target.execute("select id, v from kept where kvsz_end > now() order by 1, 2")
    assert current == source.execute("select id, v from kept order by 1, 2")
    ends = target.execute("select kvsz_end from kept where kvsz_end < now()")
    assert len(ends) >= len(current)


@streams(
    "t: {initial: none}",
    source=TABLE.format(name="t", mode=""),
    target="create table t (id int primary key, v text)",
)
async def test_a_target_key_that_is_checked_at_once_stops_the_table(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select g, 'row ' || g from generate_series(1, 3) g")
    await shared.caught_up()
    source.execute("update t set id = id + 1")
    await shared.table_state("t", "error")
    assert target.execute("select id from t order by 1") == [(1,), (2,), (3,)]
    remedy = 'drop constraint "t_pkey", add primary key ("id") deferrable'
    assert remedy in (await shared.table("t"))["error"]
    target.execute("alter table t drop constraint t_pkey, add primary key (id) deferrable")
    await shared.caught_up()
    assert_same(source, target, "t")
