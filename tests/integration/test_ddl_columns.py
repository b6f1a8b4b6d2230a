"""`ddl: capture`: changes of columns that names and types alone do not show."""

import asyncio

import pytest

from tests.support.postgres import Database, assert_same
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

pytestmark = [
    pytest.mark.usefixtures("without_spark", "short_backoffs"),
    pytest.mark.hostile_sessions,
]

ALL = "ddl: capture\ncreate: all\non_ddl: {change_type: apply, drop_column: apply}"
T = "t: {initial: none}"
COLLATIONS = """
select a.attname, coalesce((select collname from pg_collation c where c.oid = a.attcollation), '')
  from pg_attribute a where a.attrelid = 't'::regclass and a.attnum > 0 and not a.attisdropped
 order by 1
"""


@streams(
    T,
    both='create domain word as text collate "C"; create table t (id int primary key, a text,'
    ' b varchar(9) collate "POSIX", w word); create index t_a on t (a)',
    group=ALL,
)
async def test_a_collation_changes_with_its_column(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a', 'b', 'c')")
    for command in (
        'alter table t alter a type text collate "C"',
        "alter table t alter b type varchar(20)",
        'alter table t alter w type word collate "POSIX"',
        'alter table t alter b type varchar(20) collate "C", alter a type text',
    ):
        source.execute(command)
        source.execute("update t set a = a")
        await shared.caught_up()
        expected = source.execute(COLLATIONS)
        assert await asyncio.to_thread(target.execute, COLLATIONS) == expected
        changes = shared.captured("changes, statements")
        assert all(statements for _, statements in changes)
        assert "change_type" not in str(changes)
    assert_same(source, target, "t")


USING = "alter table t alter b type text using upper(b)"


@pytest.mark.parametrize(
    "commands",
    [
        (USING,),
        (f"select 1; {USING}",),
        (f"do $$ begin {USING}; end $$",),
        ("begin", "alter table t alter amount set not null", USING, "commit"),
        (f"create function m() returns void language sql as $$ {USING} $$", "select m()"),
        (
            f"create function m() returns void language sql as $$ {USING} $$",
            "begin",
            "savepoint a; alter table t alter amount set not null; rollback to a",
            "alter table t alter amount set default 1",
            "alter table t alter amount set not null",
            "do $$ begin perform m(); end $$",
            "commit",
        ),
    ],
)
@streams(
    't: {initial: none, filter: \'"C""x" > 0 and amount > 0\'}',
    # A rewrite at the target writes the row of the last column.
    both="create table t (id int primary key, b text, amount int); insert into t values (1, 'x', 1);"
    'alter table t add column "C""x" int default 5',
    group=ALL,
)
async def test_computed_values_of_one_column_concern_no_other(
    shared: Shared, commands: tuple[str, ...]
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as session:
        for command in commands:
            session.execute(command.encode())
    source.execute("insert into t values (2, 'y', 2)")
    await shared.caught_up()
    assert_same(source, target, "t")
    changes = str(shared.captured())
    assert 'change_type "b"' in changes
    assert changes.count("change_type") == 1


@streams(
    T,
    both="create table t (id int primary key, b text)",
    source=f"create function m() returns void language sql as $$ {USING} $$",
    group=ALL,
)
async def test_a_function_of_language_sql_hides_no_computed_values(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'x')")
    source.execute("select m()")
    source.execute("insert into t values (2, 'y')")
    await shared.caught_up()
    assert_same(source, target, "t")


FUNCTIONS = """
create function one() returns int language sql immutable as 'select 1';
create sequence numbers;
create table t (id int primary key, a int default one(), b int, c int default nextval('numbers'),
                d int, g int generated always as (one()) stored,
                constraint positive check (b > one()));
create index t_b on t ((b + one()))
"""


@streams(T, both=FUNCTIONS, group=ALL)
async def test_dependants_that_cascade_takes_away_go_at_the_target(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("drop function one cascade")
    source.execute("drop sequence numbers cascade")
    source.execute("insert into t (id, b) values (1, -1)")
    await shared.caught_up()
    assert_same(source, target, "t")
    parts = """
        select attname::text, atthasdef::text from pg_attribute
         where attrelid = 't'::regclass and attnum > 0 and not attisdropped
        union all select conname, '' from pg_constraint
         where conrelid = 't'::regclass and contype <> 'n'  -- only since PostgreSQL 18
        union all select indexrelid::regclass::text, '' from pg_index
         where indrelid = 't'::regclass order by 1, 2
    """
    assert target.execute(parts) == source.execute(parts)


@pytest.mark.since(18)  # NOT NULL … NOT VALID
async def test_not_null_that_is_not_valid_waits_for_its_validation(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, b int); insert into t values (1, null)")
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        source.execute("alter table t add constraint filled not null b not valid")
        source.execute("insert into t values (2, 2)")
        await streamer.caught_up()
        assert_same(source, target, "t")
        not_null = (
            "select attnotnull from pg_attribute where attrelid = 't'::regclass and attnum = 2"
        )
        assert target.value(not_null) is False
        source.execute("update t set b = 1 where b is null")
        source.execute("alter table t validate constraint filled")
        source.execute("insert into t values (3, 3)")
        await streamer.caught_up()
        assert target.value(not_null) is True
        assert_same(source, target, "t")


@pytest.mark.since(18)  # NOT NULL … NOT VALID
async def test_a_first_copy_takes_nulls_under_a_constraint_that_is_not_valid(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key, b int); insert into t values (1, null)")
    source.execute("alter table t add constraint filled not null b not valid")
    async with stream("t:", group=ALL) as streamer:
        await streamer.caught_up()
        assert_same(source, target, "t")
        source.execute("update t set b = 1; alter table t validate constraint filled")
        source.execute("insert into t values (3, 3)")
        await streamer.caught_up()
        assert_same(source, target, "t")
        not_null = (
            "select attnotnull from pg_attribute where attrelid = 't'::regclass and attnum = 2"
        )
        assert target.value(not_null) is True
