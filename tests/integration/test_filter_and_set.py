"""`filter` and `set`: the copy and the stream write the same rows, with every replica identity.

The source computes the target's expected rows: the same expressions, in a SELECT there.
"""

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark")

BIG = "(select string_agg(md5(g::text || {seed}), '') from generate_series(1, 300) g)"
"""Some 10 kB that do not compress, and so are stored out of line."""

DDL = """
create type mood as enum ('sad', 'ok', 'happy');
create table t (
    id int primary key, u int not null unique, region text, amount numeric(10, 2), email text,
    big text, feels mood, "Odd ""name" int);
alter table t alter big set storage external
"""
RULE = (
    "t: {{ {more} exclude: [region], columns: {{id: id, u: u, amount: amount, email: email, big: big}},"
    " filter: \"region = 'EU' and amount >= 10 and coalesce(feels <> 'sad', true)\","
    ' set: {{email: "md5(email)", doubled: \'amount * 2\', label: "\'from \' || region", odd: \'"Odd ""name" % 2 = 1\'}} }}'
)
EXPECTED = (
    'select (id, u, amount, md5(email), md5(big), amount * 2, \'from \' || region, "Odd ""name" % 2 = 1)::text from t'
    " where region = 'EU' and amount >= 10 and coalesce(feels <> 'sad', true) order by 1"
)
FOUND = "select (id, u, amount, email, md5(big), doubled, label, odd)::text from t order by 1"


def insert(ids: str, region: str = "EU", amount: str = "20") -> str:
    return (
        f"insert into t select g, g + 1000, '{region}', {amount}, 'a' || g || '@x',"
        f" {BIG.format(seed='g')}, 'ok', g from unnest(array[{ids}]) g"
    )


def assert_filtered(source: Database, target: Database) -> None:
    rows = source.execute(EXPECTED)
    assert target.execute(FOUND) == rows


IDENTITIES = {
    "default": "alter table t replica identity default",
    "index": "alter table t replica identity using index t_u_key",
    "full": "alter table t replica identity full",
    "full without a key": "alter table t drop constraint t_pkey, drop constraint t_u_key;"
    "alter table t replica identity full",
}
COPIED = f"{insert('101, 102')}; {insert('103', 'US')}; {insert('104', amount='9')}"
CHANGES = [
    insert("1, 2, 3") + ";" + insert("4, 5", "US") + ";" + insert("6", amount="1"),
    "update t set amount = 30 where id = 1",  # stays in
    "update t set region = 'US' where id = 2",  # leaves
    "update t set region = 'EU', big = 'short' where id = 4",  # enters
    "update t set email = 'new', region = null where id = 3",  # leaves: the filter is null
    "update t set amount = 5 where id = 5; update t set amount = 6 where id = 5",  # stays out
    "delete from t where id = 6; delete from t where id = 1",
    "begin;" + insert("7, 8") + "; update t set amount = 1 where id = 7;"
    "update t set amount = 99 where id = 7; update t set amount = 2 where id = 8; commit",
    "update t set id = 70, u = 70 where id = 7",  # the key changes
    "begin; delete from t where id = 70; " + insert("70", "US") + "; commit",
    "begin; update t set id = 40, u = 40, amount = 3 where id = 4; update t set amount = 50 where id = 40; commit",
    "update t set feels = 'sad' where id = 40; update t set feels = null where id = 40",
    "begin; truncate t;"
    + insert("1, 2")
    + "; commit; update t set amount = amount - 15 where id = 2",
]


@pytest.mark.parametrize("sid", [None, "eu"])
@pytest.mark.parametrize(("identity", "alter"), IDENTITIES.items(), ids=IDENTITIES)
@streams(RULE.format(more=""), source=f"{DDL}; <alter>; {COPIED}", sid="<sid>")
async def test_rows_enter_stay_and_leave(
    shared: Shared, identity: str, alter: str, sid: str | None
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    assert_filtered(source, target)
    for change in CHANGES:
        # Whole rows: with a key, unchanged values of rows that enter are not sent.
        if "full" not in identity:
            change = change.replace("set amount", "set big = 'x' || id, amount")
            change = change.replace("set feels", "set big = 'y' || id, feels")
            change = change.replace("set id =", "set big = 'z' || id, id =")
        source.execute(change)
        await shared.caught_up()
        assert_filtered(source, target)
    assert (await shared.table("t"))["error"] is None


TWO = "create table t (id int primary key, v int, name text)"


@streams(
    "t: {filter: 'v > 10', set: {name: 'upper(name)', twice: 'v::bigint * 2'}}",
    source="create table t (v int, name text); insert into t values (1, 'a'), (20, 'b')",
)
async def test_a_table_without_identity_brings_the_inserts_that_pass(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t select g, 'n' || g from generate_series(5, 15) g")
    source.execute("update t set v = 100; insert into t values (null, 'x'), (11, null)")
    await shared.caught_up()
    assert target.execute("select v, name, twice from t order by v, name") == [
        (11, "N11", 22),
        (11, None, 22),
        *[(v, f"N{v}", 2 * v) for v in (12, 13, 14, 15)],
        (20, "B", 40),
    ]
    twice = "select format_type(atttypid, -1) from pg_attribute where attname = 'twice'"
    assert target.value(twice) == "bigint"


@pytest.mark.parametrize("identity", ["default", "full"])
@streams(
    "t: {initial: none, type: history, filter: 'v > 10', set: {name: 'upper(name)'}}",
    source=f"{TWO}; alter table t replica identity <identity>",
)
async def test_history_ends_versions_that_leave_and_begins_those_that_enter(
    shared: Shared, identity: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 20, 'a'), (2, 1, 'b')")
    source.execute("update t set v = 5 where id = 1")  # leaves
    source.execute("update t set v = 30 where id = 2")  # enters for the first time
    source.execute(
        "begin; update t set v = 40 where id = 1; update t set v = 41, name = 'aa' where id = 1; commit"
    )
    source.execute("update t set id = 3 where id = 2")
    source.execute("delete from t where id = 3")
    await shared.caught_up()
    assert target.execute(
        "select id, v, name, kvsz_start = '1900-01-01', kvsz_end = '9999-01-01', kvsz_deleted"
        " from t order by kvsz_id"
    ) == [
        (1, 20, "A", True, False, True),
        (2, 30, "B", True, False, True),
        (1, 40, "A", False, False, False),
        (1, 41, "AA", False, True, False),
        (3, 30, "B", False, False, True),
    ]


@streams("t: {initial: none, type: append, filter: 'v > 10'}", source=TWO)
async def test_append_keeps_rows_that_leave_the_filter_with_their_last_values(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 20, 'a'), (2, 1, 'b')")
    source.execute(
        "begin; update t set v = 21 where id = 1; update t set v = 0 where id = 1; commit"
    )
    source.execute("update t set v = 22 where id = 2; delete from t where id = 2")
    source.execute(
        "begin; insert into t values (3, 30, 'c'); update t set v = 3 where id = 3; commit"
    )
    await shared.caught_up()
    rows = target.execute("select id, v, name from t order by id")
    assert rows == [(1, 21, "a"), (2, 22, "b"), (3, 30, "c")]


# ---- unchanged values --------------------------------------------------------------------------

TOAST = (
    "create table t (id int primary key, v int, big text, large text);"
    "alter table t alter big set storage external, alter large set storage external"
)
VALUES = f"{BIG.format(seed='1')}, {BIG.format(seed='2')}"


@streams(
    't: {initial: none, filter: "v > 10 and length(big) > 5",'
    " set: {digest: 'md5(large)', joined: 'v || md5(big)'}}",
    source=TOAST,
)
async def test_unchanged_values_are_taken_from_the_target_where_it_has_them(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(f"insert into t select g, 20, {VALUES} from generate_series(1, 4) g")
    await shared.caught_up()
    source.execute("update t set v = v + 1")  # all inputs: from the target
    source.execute("update t set v = 5 where id = 2")  # out, with any `big`
    source.execute("update t set v = 6 where id = 2; update t set id = 20 where id = 2")
    source.execute("update t set big = 'x' where id = 3")
    source.execute("update t set id = 40, v = 50 where id = 4")
    source.execute("update t set large = 'changed' where id = 40")
    await shared.caught_up()
    expected = (
        "select (id, v, md5(big), md5(large), md5(large), v || md5(big))::text from t"
        " where v > 10 and length(big) > 5 order by 1"
    )
    found = "select (id, v, md5(big), md5(large), digest, joined)::text from t order by 1"
    assert target.execute(found) == source.execute(expected)
    assert target.value("select count(*) from t") == 2


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        # The row enters, and the rest of the row does not come.
        ("filter: 'v > 10'", "update t set v = 20"),
        # The row is not at the target, so streamer cannot decide whether the row enters.
        ("filter: 'v > 10 or length(big) < 9'", "update t set v = 2"),
        # The target has the digest, not the input.
        ("set: {big: 'v || md5(big)'}", "update t set v = 2"),
    ],
)
@streams("t: {initial: none, truncate_target: true, <rule>}", source=TOAST)
async def test_a_value_that_was_not_sent_stops_the_table_with_a_remedy(
    shared: Shared, rule: str, change: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(f"insert into t select 1, 1, {VALUES}")
    source.execute("insert into t values (7, 7, 'small', 'small')")
    await shared.caught_up()
    before = target.execute("select id, v from t order by 1")
    source.execute(change)
    await shared.table_state("t", "error")
    error = (await shared.table("t"))["error"]
    assert "unchanged value" in error
    assert target.execute("select id, v from t order by 1") == before


# ---- larger things -----------------------------------------------------------------------------


@streams(
    "t: {initial: none, filter: 'v % 3 = 0', set: {name: 'left(name, 4)'}}",
    source=TWO,
)
async def test_a_large_transaction(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "begin; insert into t select g, g, repeat(md5(g::text), 8) from generate_series(1, 40000) g;"
        "update t set v = v + 1 where id <= 20000; delete from t where id % 100 = 0; commit"
    )
    await shared.caught_up(60)
    digest = "select count(*), md5(string_agg((id, v, {})::text, ',' order by id)) from t {}"
    expected = source.execute(digest.format("left(name, 4)", "where v % 3 = 0"))
    assert target.execute(digest.format("name", "")) == expected


# ---- the publication ---------------------------------------------------------------------------


def published(source: Database, table: str) -> object:
    """Return the filter of a table in the publication."""
    return source.value(
        "select coalesce(pg_get_expr(r.prqual, r.prrelid), 'all') from pg_publication_rel r"
        f" where r.prrelid = '{table}'::regclass"
    )


def filtered(source: Database, condition: str) -> str:
    """Return *condition*, or ``all`` for a source whose publications cannot filter rows."""
    version = source.value("select current_setting('server_version_num')::int")
    return condition if isinstance(version, int) and version >= 150000 else "all"


PUBLISHED = {
    # Not in the replica identity: the application's updates would fail.
    "outside": ("v > 3", "default", "all"),
    # In the filter, by the key.
    "in_key": ("id > 3", "default", "(id > 3)"),
    # By FULL; and a filter that can fail.
    "in_row": ("v > 2", "full", "(v > 2)"),
    "fails": ("10 / v > 2", "full", "all"),
    "unlike": ("v <> 2", "full", "(v <> 2)"),
}
"""Filter, replica identity and the filter of the publication, by table."""
OF_PUBLISHED = "; ".join(
    f"create table {name} (id int primary key, v int, name text);"
    f"alter table {name} replica identity {identity};"
    f"insert into {name} select g, g, 'n' || g from generate_series(1, 5) g"
    for name, identity in {
        **{name: identity for name, (_, identity, _) in PUBLISHED.items()},
        "whole": "full",
    }.items()
)


@pytest.mark.since(15)  # row filters of publications
@streams(
    "\n".join(
        [*(f"{name}: {{filter: '{rule}'}}" for name, (rule, _, _) in PUBLISHED.items()), "whole:"]
    ),
    source=OF_PUBLISHED,
    sid="own",  # the server refuses filters of earlier tests, and then no table has a filter
)
async def test_the_publication_filters_where_that_is_safe(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for name, (_, _, condition) in PUBLISHED.items():
        assert published(source, name) == filtered(source, condition), name
    assert published(source, "whole") == "all"
    for name in (*PUBLISHED, "whole"):
        source.execute(
            f"update {name} set id = 30 where id = 3; update {name} set id = -5 where id = 5;"
            f"update {name} set name = 'x'; delete from {name} where id = 1;"
            f"delete from {name} where id = 4; insert into {name} values (3, 3, 'c')"
        )
        source.execute(
            f"update {name} set v = v + 1; update {name} set v = v - 1; update {name} set v = v"
        )
    await shared.caught_up()
    kept = "select array_agg(id order by id) from {} where {}"
    for name, (rule, _, _) in PUBLISHED.items():
        assert target.value(kept.format(name, "true")) == source.value(kept.format(name, rule)), (
            name
        )
    assert target.value(kept.format("in_key", "true")) == [30]
    in_whole = "(id, v, name)::text from whole order by 1"
    assert target.execute(f"select {in_whole}") == source.execute(f"select {in_whole}")


@pytest.mark.since(15)  # row filters of publications
async def test_another_filter_copies_the_table_again(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        f"{TWO}; alter table t replica identity full;"
        " insert into t select g, g, 'n' || g from generate_series(1, 20) g"
    )
    ids = "select array_agg(id order by id) from t"
    async with stream("t: {filter: 'v > 15'}") as streamer:
        await streamer.caught_up()
        assert target.value(ids) == [16, 17, 18, 19, 20]
        assert published(source, "t") == filtered(source, "(v > 15)")
    async with stream("t: {filter: 'v > 15'}") as streamer:
        await streamer.caught_up()
        assert target.value("select attempt from streamer.relation") == 1
        assert published(source, "t") == filtered(source, "(v > 15)")
    # While streamer is stopped.
    source.execute("insert into t values (21, 3, 'x')")
    async with stream("t: {filter: 'v < 4', set: {name: 'upper(name)'}}") as streamer:
        await streamer.caught_up()
        assert target.value(ids) == [1, 2, 3, 21]
        assert target.value("select string_agg(name, ',' order by id) from t") == "N1,N2,N3,X"
        assert published(source, "t") == filtered(source, "(v < 4)")
        # While streamer runs: a filter that the source does not apply, a new filter, and no filter.
        write_config(streamer.path, source, target, "t: {filter: '8 / v = 2'}")
        await streamer.apply()
        await streamer.caught_up()
        assert target.value(ids) == [3, 4, 21]
        assert published(source, "t") == "all"
        write_config(streamer.path, source, target, "t: {filter: 'v = 4'}")
        await streamer.apply()
        source.execute("update t set v = 4 where id = 1; update t set v = 5 where id = 4")
        await streamer.caught_up()
        assert target.execute("select id, name from t") == [(1, "n1")]
        assert published(source, "t") == filtered(source, "(v = 4)")
        write_config(streamer.path, source, target, "t:")
        await streamer.apply()
        await streamer.caught_up()
        assert_same(source, target, "t")
        assert published(source, "t") == "all"


@pytest.mark.since(15)  # row filters of publications
@streams(
    "t: {filter: \"m = 'ok'\"}",
    source="create type mood as enum ('sad', 'ok');"
    " create table t (m mood primary key); insert into t values ('sad'), ('ok')",
)
async def test_a_filter_that_the_publication_refuses_is_left_to_the_target(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    assert published(source, "t") == "all"
    assert target.value("select array_agg(m::text) from t") == ["ok"]


# ---- errors -------------------------------------------------------------------------------------


PROBLEMS = {
    "filter: 'colour = 1'": 'uses column "colour", which the source does not send',
    "filter: 'name'": "must be type boolean",
    "filter: 'doubled > 1'": "does not send",
    "filter: 'v = name'": "is refused by the source: operator does not exist",
    "set: {id: 'v'}": "part of the key",
}


@streams(
    "other:",
    source="create table other (id int primary key);"
    + ";".join(
        f"create table t{n} (id int primary key, v int, name text,"
        " doubled int generated always as (v * 2) stored);"
        f" insert into t{n} values (1, 1, 'a')"
        for n in range(len(PROBLEMS))
    ),
)
async def test_a_rule_that_does_not_fit_stops_its_table_with_the_reason(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    rules = "\n".join(f"t{n}: {{{rule}}}" for n, rule in enumerate(PROBLEMS))
    await shared.change(f"{rules}\nother:")
    for n, (rule, problem) in enumerate(PROBLEMS.items()):
        await shared.table_state(f"t{n}", "error")
        assert problem in (await shared.table(f"t{n}"))["error"], rule
    source.execute("insert into other values (1)")
    await shared.table_state("other", "ready")

    async def has_arrived() -> bool:
        return target.value("select count(*) from other") == 1

    await shared.eventually(has_arrived)


@streams(
    "t: {initial: none, set: {v: 'v / 2.0', name: 'name || 1', flag: 'v > 1',"
    " day: \"'2020-02-03 04:05'::timestamp\"}}",
    source=TWO,
    target="create table t (id int primary key, v smallint, name varchar(5), flag text, day date)",
)
async def test_values_are_cast_to_the_columns_type_and_refused_where_they_do_not_fit(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 5, 'abc'), (2, null, null)")
    await shared.caught_up()
    assert target.execute("select v, name, flag, day::text from t order by id") == [
        (3, "abc1", "true", "2020-02-03"),
        (None, None, None, "2020-02-03"),
    ]
    source.execute("update t set name = 'abcde' where id = 1")
    await shared.table_state("t", "error")
    assert "too long" in (await shared.table("t"))["error"]


WIDE = (
    "create table t (v int, name text, " + ", ".join(f"c{n} int" for n in range(150)) + ");"
    " alter table t replica identity full"
)


@streams("t: {initial: none, filter: 'v > 10', set: {name: 'name || c149'}}", source=WIDE)
async def test_wide_rows_without_a_key(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "insert into t (v, name, c149) values (20, 'a', 1), (20, 'a', 2), (5, 'a', 1), (30, 'b', 3);"
        "update t set c0 = 1 where v = 5; update t set v = 6 where v = 30;"
        "update t set v = 40 where v = 5; delete from t where v = 20 and c149 = 1"
    )
    await shared.caught_up()
    rows = target.execute("select v, name, c0, c149 from t order by v")
    assert rows == [(20, "a2", None, 2), (40, "a1", 1, 1)]
