"""clone, append and history, with and without a sid."""

import pytest

from tests.support.postgres import Database, assert_same, contents
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

DDL = "create table t (id int primary key, name text, big text); alter table t alter big set storage external"
HISTORY = (
    "select id, name, kvsz_start = '1900-01-01', kvsz_end = '9999-01-01', kvsz_deleted"
    " from t order by kvsz_id"
)


@pytest.mark.parametrize("sid", [None, "eu"])
@streams("t: {initial: none, type: append}", source=DDL, sid="<sid>")
async def test_append_ignores_deletes_and_truncate(shared: Shared, sid: str | None) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a'), (2, 'b'), (3, 'c')")
    source.execute("update t set name = 'bb' where id = 2; delete from t where id = 1")
    source.execute("truncate t")
    await shared.caught_up()
    assert target.execute("select id, name from t order by 1") == [
        (1, "a"),
        (2, "bb"),
        (3, "c"),
    ]
    # A key whose delete was ignored comes again: the new row takes the place of the old.
    source.execute("insert into t values (1, 'again'); update t set id = 3 where id = 1")
    await shared.caught_up()
    assert target.execute("select id, name from t order by 1") == [(2, "bb"), (3, "again")]
    if sid is not None:
        assert target.execute("select distinct sid from t") == [("eu",)]


@streams("t: {initial: none, type: history}", source=DDL)
async def test_history_keeps_every_version(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a', repeat('x', 5000)), (2, 'b', null)")
    source.execute("update t set name = 'aa' where id = 1")
    source.execute("delete from t where id = 2")
    source.execute("insert into t values (2, 'again')")
    await shared.caught_up()
    assert target.execute(HISTORY) == [
        (1, "a", True, False, False),
        (2, "b", True, False, True),
        (1, "aa", False, True, False),
        (2, "again", False, True, False),
    ]
    assert target.value("select count(*) from t where length(big) = 5000") == 2
    closed = "select kvsz_end from t where name = 'a'"
    assert target.execute(closed) == target.execute("select kvsz_start from t where name = 'aa'")
    # The times are the source's.
    committed = source.value("select pg_xact_commit_timestamp(xmin) from t where id = 1")
    assert target.value("select kvsz_start from t where name = 'aa'") == committed


@streams("t: {initial: none, type: history}", source=DDL, sid="eu")
async def test_versions_of_one_transaction_keep_their_order(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "begin; insert into t values (1, 'a'); update t set name = 'b'; update t set name = 'c';"
        "delete from t; insert into t values (1, 'd'); update t set name = 'e'; commit"
    )
    await shared.caught_up()
    rows = target.execute(
        "select name, kvsz_deleted, kvsz_end = '9999-01-01' from t order by kvsz_id"
    )
    assert rows == [
        ("a", False, False),
        ("b", False, False),
        ("c", True, False),
        ("d", False, False),
        ("e", False, True),
    ]
    overlaps = (
        "select count(*) from t a join t b on a.id = b.id and a.kvsz_id < b.kvsz_id"
        " where a.kvsz_end > b.kvsz_start"
    )
    assert target.value(overlaps) == 0


@streams("t: {initial: none, type: history}", source=DDL)
async def test_history_follows_a_key_that_changes_and_closes_on_truncate(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a', repeat('y', 5000))")
    source.execute("update t set id = 5 where id = 1")
    await shared.caught_up()
    assert target.execute(HISTORY) == [
        (1, "a", True, False, True),
        (5, "a", False, True, False),
    ]
    assert target.value("select count(*) from t where length(big) = 5000") == 2
    # A copy may have closed the versions of a key later than the commit that inserts the key again.
    target.execute("update t set kvsz_end = now() + interval '1 hour' where id = 1")
    source.execute("update t set id = 1 where id = 5")
    await shared.caught_up()
    last = "select max(kvsz_start) = min(kvsz_end) from t where id = 1"
    assert target.value(last) is True
    source.execute("truncate t")
    await shared.caught_up()
    assert target.value("select bool_and(kvsz_end < '9999-01-01' and kvsz_deleted) from t") is True


@streams(
    "t: {initial: none}",
    source=DDL,
    target="create table t (sid text, id int, name text, big text, primary key (sid, id)); insert into t values ('us', 1, 'theirs')",
    sid="eu",
)
async def test_truncate_is_limited_to_the_sid(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'ours'), (2, 'ours')")
    source.execute("begin; truncate t; insert into t values (3, 'after'); commit")
    await shared.caught_up()
    rows = target.execute("select sid, id, name from t order by 1, 2")
    assert rows == [("eu", 3, "after"), ("us", 1, "theirs")]


PARENTS = (
    "create table p (id int primary key); create table c (id int primary key, p int references p)"
)


@streams("p: {initial: none}\nc: {initial: none}", both=PARENTS)
async def test_truncate_of_a_table_that_foreign_keys_point_to(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into p values (1), (2); insert into c values (1, 1)")
    source.execute(
        "begin; insert into c values (2, 2); truncate p, c; insert into p values (9); commit"
    )
    await shared.caught_up()
    assert target.execute("select id from p") == [(9,)]
    assert target.execute("select id from c") == []


@streams(
    "items: {initial: none, target: goods, exclude: [secret], columns: {id: item_id, name: title}}",
    source="create table items (id int primary key, name text, secret text, extra int)",
    target="create table goods (extra int, item_id int primary key, title text, added text default 'dflt')",
)
async def test_columns_are_renamed_and_excluded(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into items values (1, 'a', 's', 7), (2, 'b', 's', 8)")
    source.execute("update items set name = 'aa' where id = 1; delete from items where id = 2")
    await shared.caught_up()
    assert target.execute("select * from goods") == [(7, 1, "aa", "dflt")]


LOG = "create table log (at int, what text)"


@streams("log: {initial: none}", both=LOG)
async def test_keyless_tables_take_inserts_in_order(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into log select 1, 'same' from generate_series(1, 1000)")
    source.execute("update log set what = 'never replicated' where at = 2")
    await shared.caught_up()
    assert_same(source, target, "log")
    source.execute("truncate log; insert into log values (5, 'five')")
    await shared.caught_up()
    assert_same(source, target, "log")


FULL = "create table f (a int, b text, j json, n numeric); alter table f replica identity full"


@pytest.mark.parametrize("index", ["", "create index on f (a)"])
@streams("f: {initial: none}", source=FULL, target=FULL + "; <index>")
async def test_replica_identity_full_changes_exactly_one_of_identical_rows(
    shared: Shared, index: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "insert into f select 1, 'same', '{\"a\": 1}', 1.0 from generate_series(1, 5);"
        "insert into f values (1, 'same', '{\"a\":1}', 1.00), (null, null, null, null), (null, 'x', null, 1)"
    )
    source.execute("delete from f where ctid = (select min(ctid) from f where b = 'same')")
    source.execute(
        "update f set b = 'one' where ctid = (select max(ctid) from f where n::text = '1.0')"
    )
    source.execute("update f set n = 2 where a is null and b is null")
    await shared.caught_up()
    assert_same(source, target, "f")
    source.execute("delete from f where a is null; update f set a = a + 1")
    await shared.caught_up()
    assert_same(source, target, "f")


UNIQUE = (
    "create table u (a int not null, b int not null, c text); create unique index u_key on u (a, b)"
)


@streams(
    "u: {initial: none}",
    source=f"{UNIQUE}; alter table u replica identity using index u_key",
    target=UNIQUE,
)
async def test_replica_identity_using_index(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into u select g / 3, g % 3, 'x' from generate_series(0, 99) g")
    source.execute(
        "update u set c = 'y' where b = 1; delete from u where a = 5; update u set a = -a"
    )
    await shared.caught_up()
    assert_same(source, target, "u")


GENERATED = (
    "create table g (id int generated always as identity primary key, a int,"
    " twice int generated always as (a * 2) stored{})"
)


@streams(
    "g: {initial: none}",
    source=GENERATED.format(""),
    target=GENERATED.format(", thrice int generated always as (a * 3) stored"),
)
async def test_generated_and_identity_columns_on_either_side(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "insert into g (a) select g from generate_series(1, 5) g; update g set a = 10 where id = 2"
    )
    source.execute("delete from g where id = 3")
    await shared.caught_up()
    assert contents(source, "g", "id, a, twice") == contents(target, "g", "id, a, twice")


@streams(
    # The names change places, which a rename word by word must not confuse.
    "r: {initial: none, columns: {id: id, a: b, b: a, both_: both, C: c, d: D}}",
    source="""create table r (id int primary key, a text, b text, both_ text generated always as
        (upper(a) || b) stored, "C" int, d int generated always as ("C" * 2) stored)""",
)
async def test_a_generated_column_follows_renamed_columns(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("""insert into r (id, a, b, "C") values (1, 'x', 'y', 4)""")
    await shared.caught_up()
    found = target.execute('select id, b, a, "both", c, "D" from r')
    assert found == source.execute("select * from r") == [(1, "x", "y", "Xy", 4, 8)]
    await shared.change("r: {initial: none, target: r2, exclude: [b]}")
    await shared.table_state("r", "error")
    error = (await shared.table("r"))["error"]
    assert f'column "both_" of source table "{shared.own("r")}" is generated from "b"' in error
    assert 'exclude "both_"' in error


@streams(
    "a: {initial: none, target: t}",
    source="create table a (id int primary key, v text)",
    target="create table t (sid text, id int, v text, primary key (sid, id))",
    sid="eu",
)
async def test_two_tenants_in_one_table_never_touch_each_others_rows(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("insert into t select 'two', g, 'two' from generate_series(1, 10) g")
    source.execute("insert into a select g, 'one' from generate_series(1, 10) g")
    source.execute(
        "update a set v = 'changed'; update a set id = id + 50; delete from a where id > 57"
    )
    source.execute("truncate a; insert into a values (1, 'last')")
    await shared.caught_up()
    assert target.value("select count(*) from t where sid = 'two' and v = 'two'") == 10
    assert target.execute("select id, v from t where sid = 'eu'") == [(1, "last")]


@streams(
    "t: {initial: none, columns: {a: a, b: b, v: v}}",
    source="create table t (a int, b int, c int generated always as (b * 2) stored, v text, primary key (a, c))",
    target="create table t (a int, b int, c int, v text)",
)
async def test_a_key_that_is_not_sent_whole_folds_nothing(shared: Shared) -> None:
    """Generated columns are not published: the rest of such a key tells no rows apart."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t (a, b, v) values (1, 1, 'x'), (1, 2, 'y'), (1, 3, 'z')")
    source.execute("begin; insert into t values (2, 1); insert into t values (2, 2); commit")
    await shared.caught_up()
    assert target.value("select count(*) from t") == 5


async def test_another_target_or_type_is_filled_anew(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(
            "create table moved (id int primary key); create table kept (id int primary key)"
        )
    target.execute("create table other (id int primary key)")
    async with stream("moved: {initial: none}\nkept: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute("insert into moved values (1); insert into kept values (1)")
        await streamer.caught_up()
    source.execute("insert into moved values (2); insert into kept values (2)")
    changed = "moved: {initial: none, target: other}\nkept: {initial: none, type: append}"
    async with stream(changed) as streamer:
        await streamer.caught_up()
        source.execute("insert into moved values (3); insert into kept values (3)")
        await streamer.caught_up()
        for filled in ("other", "kept"):
            assert {(2,), (3,)} <= set(target.execute(f"select id from {filled}")), filled
        # streamer leaves the old target alone, and the rows that append keeps.
        source.execute("delete from moved; delete from kept")
        await streamer.caught_up()
        for left in ("moved", "kept"):
            assert target.execute(f"select id from {left}") != [], left


@streams("t: {initial: none, type: history}", source=DDL)
async def test_a_key_that_comes_again_opens_no_earlier_than_its_last_version_ended(
    shared: Shared,
) -> None:
    """A resync ends versions at the time of its snapshot; a new primary may have a slow clock."""
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'lost', null)")
    source.execute("delete from t")
    await shared.caught_up()
    target.execute("update t set kvsz_end = '2100-01-01'")
    source.execute("insert into t values (1, 'again', null)")
    await shared.caught_up()
    assert target.execute("select name, kvsz_start::date::text from t order by kvsz_id") == [
        ("lost", "1900-01-01"),
        ("again", "2100-01-01"),
    ]
