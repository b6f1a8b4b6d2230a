"""A copy that a key or a constraint of the target refuses, and the mend that its error names."""

import re

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

REFUSED = {
    "a": 'violates unique constraint "a_v_key": Key (v)=(7) already exists; unless the source',
    "b": 'create unique index "b_v"": Key (v)=(7) is duplicated; remove the duplicates at the source',
    "c": 'create unique index "c_pkey"": Key (v)=(7) is duplicated; remove the duplicates at the',
    "d": 'violates check constraint "d_v_check"; unless the source',
    "f": 'null value in column "v" of relation "f" violates not-null constraint; run at the target',
    "e": 'violates exclusion constraint "e_v_excl": Key (v)=(7) conflicts with existing key (v)=(7);',
}
"""By table; `b` and `c` fail when streamer restores their indexes after the rows are copied."""


@pytest.mark.follows("copy.refused_values:_remedy_for_null")
@pytest.mark.follows("apply.write.rejection_advice:_run_at_target")
@pytest.mark.follows("bookkeeping.deferred_indexes:_give_up")
async def test_a_constraint_that_refuses_a_copy_is_named_with_its_key_and_its_sql(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in REFUSED:
        source.execute(f"create table {name} (id int primary key, v int)")
        source.execute(f"insert into {name} values (1, 7), (2, {'null' if name == 'f' else 7})")
    target.execute(
        "create table a (id int primary key, v int unique);"
        "create table b (id int primary key, v int); create unique index b_v on b (v);"
        "create table c (id int, v int primary key);"
        "create table d (id int primary key, v int check (v > 8));"
        "create table f (id int primary key, v int not null);"
        "create table e (id int primary key, v int, exclude (v with =))"
    )
    async with stream("\n".join(f"{name}:" for name in REFUSED)) as streamer:
        for name, words in REFUSED.items():
            await streamer.table_state(f"public.{name}", "error", 60)
            error = str((await streamer.table(f"public.{name}"))["error"])
            assert words in error
            assert error.count("is duplicated") <= 1
            # WHEN the operator runs the SQL and the command of the error
            sql = re.search(r"run at the target: ([^;]*);.* run: streamer resume", error)
            assert sql is not None, error
            target.execute(sql[1])
            await streamer.ask("resume", table=f"public.{name}")
        # THEN the copies reach the target
        await streamer.caught_up(60)
        for name in REFUSED:
            assert_same(source, target, name)
