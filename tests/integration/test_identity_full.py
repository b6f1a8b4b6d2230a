"""REPLICA IDENTITY FULL: exactly the right row changes, even if `=` finds other values equal."""

from tests.support.postgres import assert_same
from tests.support.shared import Shared, streams

FEW = "create table t (a int, b numeric, c text); alter table t replica identity full"
KEYED = "create table t (id int primary key, u int not null unique, v text)"
DDL = """
create table t (n numeric, b box, c circle, j json, p point, f float8, v text);
alter table t replica identity full
"""


@streams("t: {initial: none}", both=DDL)
async def test_types_whose_equality_lies_or_is_missing(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        """
        insert into t values
          (1.0, '(1,1),(0,0)', '<(0,0),1>', '{"a":1}', '(1,2)', 0, 'one'),
          (1.00, '(2,0.5),(0,0)', '<(5,5),1>', '{"a": 1}', '(2,1)', '-0', 'other'),
          (null, null, null, null, null, 'NaN', null),
          (null, null, null, null, null, 'NaN', null),
          (null, null, null, 'null', null, null, null)
        """
    )
    await shared.caught_up()
    assert_same(source, target, "t")
    # Rows that differ only where `=` sees no difference: streamer finds the right row.
    source.execute("update t set b = '(9,9),(8,8)' where v = 'other'")
    source.execute("update t set v = 'changed' where n::text = '1.00'")
    source.execute("delete from t where ctid = (select min(ctid) from t where f = 'NaN')")
    source.execute("update t set n = 7 where j is not null and v is null")
    await shared.caught_up()
    assert_same(source, target, "t")


@streams("t: {initial: none}", both=FEW)
async def test_one_of_several_identical_rows(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select 1, 1.0, 'x' from generate_series(1, 5)")
    source.execute("insert into t values (1, 1.00, 'x'), (1, 1.000, 'x'), (1, null, 'x')")
    for statement in (
        "update t set c = 'y' where ctid = (select min(ctid) from t where b::text = '1.0')",
        "delete from t where ctid = (select min(ctid) from t where b::text = '1.00')",
        "update t set b = 1.0 where b::text = '1.000'",
        "begin; update t set a = 2; delete from t where b is null; commit",
    ):
        source.execute(statement)
        await shared.caught_up()
        assert_same(source, target, "t")


@streams("t: {initial: none}", both=KEYED)
async def test_the_identity_changes_while_streaming(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select g, g, 'v' from generate_series(1, 10) g")
    source.execute("alter table t replica identity full")
    source.execute("update t set v = 'full' where id = 1; update t set id = 20 where id = 2")
    source.execute("alter table t replica identity using index t_u_key")
    source.execute("update t set v = 'index' where id = 3; update t set u = 40 where id = 4")
    source.execute(
        "begin; alter table t replica identity default; delete from t where id = 5;"
        "update t set id = 60 where id = 6; commit"
    )
    await shared.caught_up()
    assert_same(source, target, "t")
