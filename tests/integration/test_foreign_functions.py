"""An owner of a source's table gets no function run at the target as streamer's role."""

import asyncio

import pytest

from streamer.report.problems import Severity
from streamer.schema_changes import definition_builder
from tests.support.checking import Checker, matching
from tests.support.definitions import described
from tests.support.postgres import Database, assert_same
from tests.support.remedies import Operator, remedy_of
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = [pytest.mark.usefixtures("without_spark"), pytest.mark.hostile_sessions]

MARK = "query_to_xml('create table public.was_here ()', true, false, '')"
"""Makes a table where it runs; without rows it gives an empty document."""
NOTED = "lo_from_bytea(0, '') > 0"
"""Makes a large object wherever it runs."""
ALL = "ddl: capture\ncreate: all"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_builder, "CHECK_SECONDS", 0.1)


def large_objects(database: Database) -> object:
    return database.value("select count(*) from pg_largeobject_metadata")


def definitions(target: Database) -> list[tuple[object, ...]]:
    """Return name, state and reason of the definitions of the tables of *target*'s schema."""
    return target.execute(
        "select name, d.state, reason from streamer.definition d join streamer.relation r"
        f" on r.id = relation_id where starts_with(r.target, '{target.schema}.')"
    )


async def states(streamer: Streamer, target: Database, **wanted: str) -> None:
    """Wait until the named definitions are in the states *wanted*."""

    async def are_so() -> bool:
        rows = await asyncio.to_thread(definitions, target)
        there = {str(name): str(state) for name, state, _ in rows}
        return all(there.get(name) == state for name, state in wanted.items())

    try:
        await streamer.eventually(are_so, 20)
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{definitions(target)}") from exc


@pytest.mark.follows("schema_changes.create_tables:_refuse")
@pytest.mark.parametrize("create", ["columns", "all"])
async def test_a_domain_whose_check_calls_a_function_is_left_to_an_operator(
    source: Database, target: Database, stream: MakeStreamer, create: str
) -> None:
    source.execute(
        f"create domain noted as int constraint runs check ({NOTED});"
        "create table t (id int primary key, n noted); insert into t values (1, null), (2, 5)"
    )
    before = large_objects(target)
    async with stream("t:", group=f"create: {create}") as streamer:
        await streamer.table_state("public.t", "error", 30)
        error = str((await streamer.table("public.t"))["error"])
        assert "calls pg_catalog.lo_from_bytea" in error
        assert target.value("select to_regtype('noted')") is None
        assert large_objects(target) == before

        # The printed statements work for an operator who trusts the expression.
        remedy = await remedy_of(streamer, "public.t", "run at the target: ")
        await Operator(streamer.path, source, target).follow(remedy)
        await streamer.caught_up(30)
        assert_same(source, target, "t")


@streams(
    "t:",
    source="create table t (id int primary key, n int, name text, d text default "
    f"({MARK})::text, s text default pg_read_file('PG_VERSION'));"
    "insert into t values (1, 1, 'a', 'x', 'y');"
    f"alter table t add constraint runs check ({NOTED}) not valid;"
    "create function own(text) returns text immutable language sql as 'select $1';"
    "create index of_own on t (own(name)) where own(name) <> ''",
    # The target has a function of that name, whose author did not ask for a call.
    target="create function own(text) returns text immutable language plpgsql as"
    " $$begin perform pg_catalog.lo_create(78); return $1; end$$",
    group="create: all",
)
async def test_checks_defaults_and_indexes_of_a_copy_call_no_such_function(shared: Shared) -> None:
    source, target = shared.source, shared.target
    before = large_objects(target)
    await shared.caught_up(30)
    await states(shared, target, runs="failed", d="failed", s="failed", of_own="failed")
    reasons = {str(name): str(reason) for name, _, reason in definitions(target)}
    assert "query_to_xml" in reasons["d"]
    assert "pg_read_file" in reasons["s"]
    assert "lo_from_bytea" in reasons["runs"]
    assert f"calls {target.schema}.own(text)" in reasons["of_own"]
    source.execute("insert into t values (2, 2, 'b', '', '')")
    await shared.caught_up()
    assert large_objects(target) == before
    assert target.value("select to_regclass('public.was_here')") is None
    assert_same(source, target, "t")


@streams(
    "t: {initial: none}",
    both="create domain level as int; create table t (id int primary key, n level, d text);"
    "insert into t values (1, 1, 'a')",
    group=ALL,
)
async def test_definitions_in_the_stream_call_no_such_function(shared: Shared) -> None:
    source, target = shared.source, shared.target
    before = large_objects(target)
    await shared.caught_up()
    for command, word in (
        (f"alter table t alter d set default ({MARK})::text", "query_to_xml"),
        (f"alter domain level add constraint runs check ({NOTED})", "lo_from_bytea"),
    ):
        await asyncio.to_thread(source.execute, command)
        await shared.table_state("t", "error", 20)
        assert word in str((await shared.table("t"))["error"])
        assert large_objects(target) == before
        # An operator has read the function.
        await shared.decide("apply")
        await shared.table_state("t", "ready", 20)
    source.execute("alter domain level drop constraint runs")
    await shared.caught_up()
    before = large_objects(target)
    source.execute(f"alter table t add constraint also check ({NOTED}) not valid")
    source.execute("insert into t values (2, 2, 'b')")
    await states(shared, target, also="failed")
    assert large_objects(target) == before
    defaults = "select pg_get_expr(adbin, adrelid) from pg_attrdef where adrelid = 't'::regclass"
    assert "query_to_xml" in str(target.value(defaults))

    # Alternatively, the operator keeps the target unchanged.
    await asyncio.to_thread(
        source.execute, f"alter table t alter n set default ({NOTED})::int::level"
    )
    await shared.table_state("t", "error", 20)
    await shared.decide("skip")
    await shared.table_state("t", "ready", 20)
    await shared.caught_up()
    assert target.value(defaults.replace("pg_get_expr", "count(*) over (), pg_get_expr")) == 1
    assert large_objects(target) == before
    assert_same(source, target, "t")


MEMBER = """
create function member(text) returns text immutable language sql as 'select $1';
alter extension plpgsql add function member(text);
"""
"""An extension of the server has this function."""
ORDINARY = """
create domain email as text check (value ~ '^[^@]+@[^@]+$' and length(value) < 100);
alter domain email add constraint late check (value <> 'x') not valid;
create sequence numbers;
create table t (
    id int primary key default nextval('numbers'), x text check (length(x) > 0 and lower(x) = x),
    e email default 'a@b', at timestamptz default now() + interval '7 days',
    day date default current_date, u uuid default gen_random_uuid(),
    j jsonb default jsonb_build_object('a', 1),
    r tstzrange default tstzrange(now(), null, '[)'), c text check (member(c) <> 'x'),
    role text default current_user, tag text default 'n' || (random() * 9)::int,
    utc timestamp default (now() at time zone 'utc'), p numeric check (coalesce(p, 1) >= 0),
    z text[] default array[]::text[] check (cardinality(z) < 9 and not 'x' = any (z)),
    g text generated always as (upper(x) || '!') stored,
    check (j ? 'a' or j ->> 'b' = any ('{x,y}') or j @> '{"c": 1}'), check (at::date > '1999-01-01')
);
create index i1 on t (lower(x)) where (j ->> 'a') is not null;
create index i2 on t (member(c), (coalesce(p, 0)::int));
insert into t (id, x) values (1, 'a');
"""


@streams("t:", source=MEMBER + ORDINARY, target=MEMBER + "create sequence numbers", group=ALL)
async def test_ordinary_expressions_travel(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up(30)

    async def are_made() -> bool:
        return all(state != "pending" for _, state, _ in definitions(target))

    await shared.eventually(are_made, 20)
    assert [row for row in definitions(target) if row[1] != "made"] == []
    assert described(target, shared.own("t")) == described(source, shared.own("t"))
    for command in (
        "alter table t alter at set default now() - interval '1 day'",
        "alter table t alter x set default 'b' || clock_timestamp()::text",
        "alter table t alter tag set default to_char(now(), 'YYYY')",
        "alter domain email add constraint short check (length(value) < 90)",
        (
            "create domain code as int;"
            "alter domain code add constraint c check (value > 0) not valid;"
            "alter table t add column k code"
        ),
        "alter table t add column h text generated always as (md5(x)) stored",
        "alter table t add constraint named check (x ~ '^[a-z]' or (j -> 'a') is null)",
    ):
        await asyncio.to_thread(source.execute, command)
    source.execute("insert into t (id, x) values (2, 'b')")
    await shared.caught_up(30)

    async def are_alike() -> bool:
        here, there = [
            await asyncio.to_thread(described, db, shared.own("t")) for db in (source, target)
        ]
        return here == there

    await shared.eventually(are_alike, 20)
    assert_same(source, target, "t")


@pytest.mark.parametrize("dropped", ["d", "n"])
@streams(
    "t: {initial: none}",
    both="create table t (id int primary key, n int, d text, e text);"
    "insert into t values (1, 1, 'a', 'b')",
    group=ALL,
)
async def test_skip_leaves_out_a_stopped_change_and_a_foreign_expression_together(
    shared: Shared, dropped: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    command = (
        f"alter table t drop column {dropped}, alter e set default ({MARK})::text,"
        " add column made int default 7"
    )
    await asyncio.to_thread(source.execute, command)
    await shared.table_state("t", "error", 20)
    await shared.decide("skip")
    await shared.table_state("t", "ready", 20)
    source.execute("insert into t (id, e) values (2, 'c')")
    await shared.caught_up()
    columns = (
        "select attname::text from pg_attribute where attrelid = 't'::regclass"
        " and attnum > 0 and not attisdropped order by attnum"
    )
    assert [name for (name,) in target.execute(columns)] == ["id", "n", "d", "e", "made"]
    assert target.value("select count(*) from pg_attrdef where adrelid = 't'::regclass") == 1
    assert target.execute("select id, e, made from t order by 1") == [(1, "b", 7), (2, "c", 7)]


GENERATORS = {
    "pgcrypto": {
        "gen_salt": "create function gen_salt(text) returns text language sql volatile as"
        " 'select $1 || pg_catalog.random()'",
        "pgp_sym_encrypt": "create function pgp_sym_encrypt(text, text) returns bytea"
        " language sql volatile as 'select pg_catalog.convert_to($1, $2)'",
    },
    "uuid-ossp": {
        "uuid_generate_v4": "create function uuid_generate_v4() returns uuid language sql volatile"
        " as 'select pg_catalog.gen_random_uuid()'",
    },
}


def make_extension(db: Database, name: str) -> None:
    """Make an extension, or one of its name with some of its functions where the server lacks it."""
    if db.execute(f"select from pg_available_extensions where name = '{name}'"):
        db.execute(f'create extension "{name}"')
        return
    db.execute(
        "insert into pg_extension select x.oid::int8 + 1, e.n, x.extowner, x.extnamespace, true,"
        f" '1', null, null from pg_extension x, (values ('{name}')) e (n)"
        " order by x.oid desc limit 1"
    )
    for function, sql in GENERATORS[name].items():
        db.execute(sql)
        db.execute(f'alter extension "{name}" add function {function}')


@pytest.mark.parametrize(
    ("extension", "default", "other"),
    [
        ("pgcrypto", "gen_salt('md5')", "pgp_sym_encrypt('a', 'utf8')::text"),
        # The packages of the older servers lack a library of this extension.
        pytest.param("uuid-ossp", "uuid_generate_v4()::text", None, marks=pytest.mark.since(18)),
    ],
)
async def test_generators_of_two_extensions_travel_and_their_other_functions_do_not(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    extension: str,
    default: str,
    other: str | None,
) -> None:
    for db in (source, target):
        make_extension(db, extension)
    source.execute(f"create table t (id int primary key, made text default {default}, o text)")
    if other is not None:
        source.execute(f"alter table t alter o set default {other}")
    async with stream("t:", group=ALL) as streamer:
        await streamer.caught_up(30)
        await states(streamer, target, made="made", **({"o": "failed"} if other else {}))
        source.execute("insert into t (id) values (1)")
        await streamer.caught_up()
        target.execute("insert into t (id) values (2)")
        assert target.value("select count(distinct made) from t") == 2
        # A function of that name in another schema of the target is no member of the extension.
        for db in (source, target):
            db.execute("create schema own; create function own.gen_salt(text) returns text volatile language sql as 'select $1'")  # fmt: skip
        await asyncio.to_thread(
            source.execute, "alter table t alter o set default own.gen_salt('x')"
        )
        await streamer.table_state("public.t", "error", 20)
        assert "calls own.gen_salt" in str((await streamer.table("public.t"))["error"])


async def test_check_foresees_the_expressions_that_wait(
    source: Database, target: Database, stream: MakeStreamer, checker: Checker
) -> None:
    source.execute(
        f"create domain noted as int constraint runs check ({NOTED});"
        "create table stopped (id int primary key, n noted);"
        "create function own(text) returns text immutable language sql as 'select $1';"
        "create table t (id int primary key, v text default now()::text, s text default"
        f" pg_read_file('PG_VERSION'), constraint kept check ({NOTED}));"
        "create index of_own on t (own(v)); create index plain on t (lower(v));"
        "create table made (id int primary key, g text generated always as (own('x')) stored);"
        f"create table columns_only (id int primary key, s text default ({MARK})::text)"
    )
    target.execute("create function own(text) returns text immutable language sql as 'select $1';")
    tables = "stopped:\nt:\nmade:\ncolumns_only: {create: columns}"
    checker.configure(tables, group="create: all")
    found = matching(await checker.findings(), Severity.WARNING, " calls ")
    foreseen = {(each.place.object, each.problem.partition(" calls ")[0]) for each in found}
    assert foreseen == {
        ("public.stopped", 'constraint "runs"'),
        ("public.made", 'default "g"'),
        ("public.t", 'default "s"'),
        ("public.t", 'constraint "kept"'),
        ("public.t", 'index "of_own"'),
    }
    async with stream(tables, group="create: all") as streamer:
        for name in ("stopped", "made"):
            await streamer.table_state(f"public.{name}", "error", 30)
            assert " calls " in str((await streamer.table(f"public.{name}"))["error"])
        await states(streamer, target, s="failed", kept="failed", of_own="failed", plain="made")
