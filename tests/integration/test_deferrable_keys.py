"""A key that the source checks late: two rows may share it for a while within a transaction."""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

TABLE = """
create table {name} (id int primary key deferrable{mode}, v text);
alter table {name} replica identity full
"""
MADE = ("late", "later", "once", "kept")
"""Tables that streamer makes at the target; the last is a history."""
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


async def test_rows_that_share_a_key_for_a_while_are_told_apart(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name, mode in zip(
        MADE, ("", " initially deferred", "", " initially deferred"), strict=True
    ):
        source.execute(TABLE.format(name=name, mode=mode))
        source.execute(f"insert into {name} select g, 'row ' || g from generate_series(1, 6) g")
    rules = "late:\nlater:\nonce: {type: append}\nkept: {type: history}"
    async with stream(rules) as streamer:
        await streamer.caught_up()
        timing = "select condeferrable from pg_constraint where conname = 'late_pkey'"
        assert target.execute(timing) == [(True,)]
        for statement in CHANGES:
            for name in MADE:
                if name != "once" or "delete" not in statement:
                    source.execute(statement.format(t=name))
        await streamer.caught_up()
        for name in ("late", "later", "once"):
            assert_same(source, target, name)
        current = target.execute("select id, v from kept where kvsz_end > now() order by 1, 2")
        assert current == source.execute("select id, v from kept order by 1, 2")
        ends = target.execute("select kvsz_end from kept where kvsz_end < now()")
        assert len(ends) >= len(current)


async def test_a_target_key_that_is_checked_at_once_stops_the_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE.format(name="t", mode=""))
    target.execute("create table t (id int primary key, v text)")
    async with stream("t: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute("insert into t select g, 'row ' || g from generate_series(1, 3) g")
        await streamer.caught_up()
        source.execute("update t set id = id + 1")
        await streamer.table_state("public.t", "error")
        assert target.execute("select id from t order by 1") == [(1,), (2,), (3,)]
        remedy = 'drop constraint "t_pkey", add primary key ("id") deferrable'
        assert remedy in (await streamer.table("public.t"))["error"]
        target.execute("alter table t drop constraint t_pkey, add primary key (id) deferrable")
        await streamer.caught_up()
        assert_same(source, target, "t")
