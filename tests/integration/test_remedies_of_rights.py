"""Statements that errors print for an administrator give streamer the rights that it lacks.

streamer connects as a role without rights. An operator runs the statements that the errors name.
"""

import asyncio
import shlex
from collections.abc import Iterator

import pytest

from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.remedies import CONTINUES
from tests.support.postgres import Database, assert_same, ordinary_role
from tests.support.process import command
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import run_block
from tests.support.streamer import MakeStreamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark")

SECONDS = 60.0


@pytest.fixture
def reader(source: Database) -> Iterator[str]:
    """A role for the source that may replicate, and owns the tables that streamer publishes."""
    role = f"reader_{source.name}"
    source.execute(
        f"create role {role} login; grant create on database {source.name} to {role};"
        f"grant create on schema public to {role}"
    )
    source.url_user = role
    yield role
    source.url_user = "postgres"
    source.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
        " where slot_name = 'streamer_shop';"
        f"reassign owned by {role} to postgres; drop owned by {role}; drop role {role}"
    )


@pytest.mark.follows("postgres.session_refusals:Refusal.remedy")
@pytest.mark.follows("source.slot_and_publications.publication:administrator_steps")
@pytest.mark.follows("copy.copy_obstacles:find_unreadable")
@pytest.mark.follows("runbooks:source-unreachable#1")
async def test_rights_at_the_source_let_each_table_go_on(
    reader: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in ("hidden", "unreadable", "foreign_one"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    source.execute(
        f"create role {reader}_group; grant {reader}_group to {reader};"
        f"alter table hidden owner to {reader}_group; alter table hidden force row level security;"
        f"alter table hidden enable row level security; alter table unreadable owner to {reader};"
        f"revoke all on unreadable from {reader}; grant select on foreign_one to {reader}"
    )
    try:
        async with stream("hidden:\nunreadable:\nforeign_one:") as streamer:
            operator = Operator(streamer.path, source, target)
            remedy = await remedy_of(streamer, None, " to start ")
            shown = await asyncio.to_thread(
                run_block, streamer.path, "source-unreachable#1", code=1
            )
            assert all(sql in shown for each in remedy.sql for sql in each.statements), shown
            await operator.follow(remedy)
            await operator.follow(
                await remedy_of(streamer, None, "must be owner of table foreign_one")
            )
            for table, words in (("hidden", "row level"), ("unreadable", "cannot be read")):
                await operator.follow(await remedy_of(streamer, f"public.{table}", words))
            for name in ("hidden", "unreadable", "foreign_one"):
                await streamer.table_state(f"public.{name}", "ready", SECONDS)
            await streamer.caught_up(SECONDS)
            for name in ("hidden", "unreadable", "foreign_one"):
                source.execute(f"insert into {name} values (2)")
            await streamer.caught_up(SECONDS)
            for name in ("hidden", "unreadable", "foreign_one"):
                assert_same(source, target, name)
    finally:
        source.execute(f"reassign owned by {reader}_group to postgres; drop role {reader}_group")


async def test_a_table_that_comes_back_names_all_statements_at_once(
    reader: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    """The role owned tables that the application dropped, and gets no right to the new tables."""
    source.execute(f"alter role {reader} replication")
    names = ("kept", "early", "wanted")
    for name in names:
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
        source.execute(f"alter table {name} owner to {reader}")
    again = "create table {0} (id int primary key); insert into {0} values (2)"
    soon = "discovery_interval: 0.5"
    async with stream('"k*": {}\nearly:\nwanted:', settings=soon) as streamer:
        operator = Operator(streamer.path, source, target)
        await streamer.caught_up(SECONDS)
        source.execute("drop table kept, early, wanted")
        for name in names:
            await remedy_of(streamer, f"public.{name}", "no longer exists at the source")
        # WHEN an operator gives up two tables, of which one exists again, and wants the third
        source.execute(again.format("early"))
        back = await remedy_of(streamer, "public.early", "has a table of this name again")
        assert [sql for step in back.sql for sql in step.statements] == _statements("early", reader)
        assert back.has("resync")
        keep = "{on_table_dropped: keep}"
        rules = f'"k*": {keep}\nearly: {keep}\nwanted:'
        write_config(streamer.path, source, target, rules, settings=soon)
        await streamer.apply()

        async def has_left() -> bool:
            tables = (await streamer.status())["tables"]
            return "public.kept" not in [table["source"] for table in tables]

        await streamer.eventually(has_left, SECONDS)
        for name in ("kept", "wanted"):
            source.execute(again.format(name))
        await streamer.ask("resync", "public.wanted")
        # THEN the next error of each table has all statements, as `check` has
        remedies = {}
        for name in names:
            words = f"must be owner of table {name}"
            remedy = remedies[name] = await remedy_of(streamer, f"public.{name}", words)
            given = [sql for step in remedy.sql for sql in step.statements]
            assert given == _statements(name, reader)
        shown = await asyncio.to_thread(run_block, streamer.path, "source-unreachable#1", code=1)
        added = ", ".join(f'only "public"."{name}"' for name in sorted(names))
        assert f'alter publication "streamer_shop" add table {added}' in shown, shown
        assert shown.count("grant select on") == 3, shown
        # THEN each table goes on without a request
        for name, remedy in remedies.items():
            await operator.follow(remedy)
            await streamer.table_state(f"public.{name}", "ready", SECONDS)
            source.execute(f"insert into {name} values (3)")
        await streamer.caught_up(SECONDS)
        for name in names:
            assert_same(source, target, name)


async def test_a_removed_member_names_the_statements_that_the_role_may_not_run(
    reader: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    """At first the role owns no publication, and then both publications."""
    source.execute(
        f"alter role {reader} replication; create table foreign_one (id int primary key);"
        f"create table own (id int primary key); alter table own owner to {reader};"
        f"create table past (id int primary key); grant select on foreign_one, past to {reader};"
        "create publication streamer_shop for table only foreign_one, only own, only past;"
        "create publication streamer_shop_ins with (publish = 'insert, truncate')"
    )
    rules = "foreign_one:\nown:\npast: {type: history}"
    async with stream(rules) as streamer:
        operator = Operator(streamer.path, source, target)
        await streamer.caught_up(SECONDS)
        for owner in ("postgres", reader):
            source.execute(
                f"alter publication streamer_shop owner to {owner};"
                f"alter publication streamer_shop_ins owner to {owner}"
            )
            source.execute("alter publication streamer_shop drop table foreign_one, own, past")
            source.execute(f"revoke select on past from {reader}")
            for name in ("foreign_one", "own", "past"):
                remedy = await remedy_of(streamer, f"public.{name}", "was unpublished for a time")
                given = [sql for step in remedy.sql for sql in step.statements]
                added, select = _statements(name, reader)
                is_forbidden = owner == "postgres" or name != "own"
                assert given == [added] * is_forbidden + [select] * (name == "past")
                await operator.follow(remedy)
            await streamer.caught_up(SECONDS)
            source.execute("insert into foreign_one select count(*) from foreign_one")
            await streamer.caught_up(SECONDS)
            for name in ("foreign_one", "own"):
                assert_same(source, target, name)


def _statements(table: str, role: str) -> list[str]:
    return [
        f'alter publication "streamer_shop" add table only "public"."{table}"',
        f'grant select on "public"."{table}" to "{role}"',
    ]


async def test_lost_publications_name_the_statements_for_an_administrator(
    reader: str,
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source.execute(
        f"alter role {reader} replication; revoke create on database {source.name} from {reader};"
        "create table t (id int primary key); create table past (id int primary key, v int);"
        f"insert into past values (1, 1); grant select on t, past to {reader}"
    )
    async with stream("t:\npast: {type: history}") as streamer:
        operator = Operator(streamer.path, source, target)
        await operator.follow(await remedy_of(streamer, None, "permission denied for database"))
        await streamer.caught_up(SECONDS)
        source.execute("drop publication streamer_shop, streamer_shop_ins")
        remedy = await remedy_of(streamer, None, "dropped by another session")
        assert (await streamer.status())["runbook"] == "/help/runbooks/table-gone"
        created = [sql for step in remedy.sql for sql in step.statements]
        assert [sql.split()[:3] for sql in created] == [
            ["create", "publication", f'"streamer_shop{end}"'] for end in ("", "_ins")
        ]
        assert "the past of history and append tables gets a gap" in str(remedy)
        shown = await asyncio.to_thread(run_block, streamer.path, "table-gone#1", code=1)
        assert all(sql in shown for sql in created), shown
        await operator.follow(remedy)
        await streamer.caught_up(SECONDS)
        source.execute("insert into t values (2); update past set v = 2")
        await streamer.caught_up(SECONDS)
        assert_same(source, target, "t")
        assert target.execute("select v from past order by kvsz_id") == [(1,), (2,)]
        # WHEN the resync of all tables comes before the statements
        source.execute("drop publication streamer_shop, streamer_shop_ins")
        lost = await remedy_of(streamer, None, "dropped by another session")
        prepared: list[SparkLauncher] = []
        monkeypatch.setattr(SparkLauncher, "prepare", lambda self: prepared.append(self))
        (resync,) = lost.commands
        _, *arguments = shlex.split(resync.line)
        waiting = asyncio.create_task(asyncio.to_thread(command, streamer.path, *arguments))
        # THEN the source names its missing publications, and starts no Spark until it has them
        # AND the command prints the statements while the command waits
        remedy = await remedy_of(streamer, None, "has no publications")
        assert (await streamer.status())["runbook"] == "/help/runbooks/table-gone"
        assert not prepared
        await operator.follow(remedy)
        result = await waiting
        assert result.returncode == 0, result.stderr
        assert f"{remedy}; {CONTINUES}" in result.stderr
        await streamer.caught_up(SECONDS)
        assert_same(source, target, "t")


@pytest.mark.parametrize("capture", ["capture", "off"])
@pytest.mark.follows("target.missing_types:refuse_missing")
async def test_a_new_column_waits_for_the_extension_of_its_type(
    source: Database, target: Database, stream: MakeStreamer, capture: str
) -> None:
    available = "select name from pg_available_extensions where name in ('vector', 'citext')"
    extension = source.value(available)
    value = "[1]" if extension == "vector" else "Text"
    tables = ["plain", "composed", "retyped", "narrow"]
    for db in (source, target):
        db.execute("create schema ext")
        for table in tables:
            db.execute(f"create table {table} (id int primary key, v text)")
    source.execute(f"create extension {extension} schema ext")
    if capture == "off":
        tables = ["plain"]
    group = f"ddl: {capture}\non_ddl: {{change_type: apply}}"
    rules = "\n".join(f"{t}: {{initial: none, on_column_added: add}}" for t in tables)
    async with stream(rules, group=group) as streamer:
        operator = Operator(streamer.path, source, target)
        await streamer.caught_up()
        kind = f"ext.{extension}"
        source.execute(
            f"alter table plain add n {kind}; insert into plain values (1, '', '{value}')"
        )
        if capture == "capture":
            source.execute(f"create type pair as (one {kind}, two {kind}[])")
            source.execute("alter table composed add p pair; insert into composed values (1, '')")
            source.execute(f"alter table retyped alter v type {kind} using '{value}'::text::{kind}")
            source.execute(f"create domain strict as {kind} not null")
            source.execute("alter table narrow alter v type strict using v::text::strict")
        for table in tables:
            remedy = await remedy_of(streamer, f"public.{table}", f'no type "{kind}"')
            assert "create extension" in str(remedy)
        await operator.follow(remedy, choose=0)
        await streamer.caught_up(SECONDS)
        for table in tables:
            assert_same(source, target, table)


@pytest.mark.follows("target.missing_types:refuse_missing")
@pytest.mark.follows("copy.finish_copies:_with_resume")
@pytest.mark.follows("schema_changes.create_tables:create_tables")
@pytest.mark.follows("target.add_columns:add_columns")
@pytest.mark.follows("target.missing_grants:MissingGrants.remedy")
async def test_rights_at_the_target_let_each_table_go_on(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """streamer may not make a table, a type of an extension and a column, nor use a sequence."""
    available = "select name from pg_available_extensions where name in ('vector', 'citext')"
    extension = source.value(available)
    value = "[1]" if extension == "vector" else "Text"
    source.execute(
        f"""
        create schema app; create schema ext; create extension {extension} schema ext;
        create type app.mood as enum ('good');
        create table app.made (id int primary key, m app.mood);
        insert into app.made values (1, 'good');
        create table extended (id int primary key, v ext.{extension});
        insert into extended values (1, '{value}');
        create table added (id int primary key); insert into added values (1);
        create table numbered (id int primary key)
        """
    )
    target.execute(
        "create table added (id int primary key); create sequence app_numbers;"
        "create table numbered (id int primary key, n bigint default nextval('app_numbers'))"
    )
    rules = (
        "app.made: {target: app.made}\nextended:\nadded: {on_column_added: add}\n"
        "numbered: {initial: none}"
    )
    with ordinary_role(target) as role:
        target.execute(
            f"alter database {target.name} owner to postgres; grant all on added, numbered to {role};"
            f"grant create on database {target.name} to {role}; create schema app"
        )
        async with stream(rules) as streamer:
            operator = Operator(streamer.path, source, target)
            for table, words in (
                ("app.made", "grant usage on schema"),
                ("app.made", "create type"),
                ("public.extended", "the target has no type"),
            ):
                await operator.follow(await remedy_of(streamer, table, words))
            await streamer.caught_up(SECONDS)
            source.execute("insert into numbered values (1)")
            words = "denied for sequence app_numbers"
            await operator.follow(await remedy_of(streamer, "public.numbered", words))
            source.execute("alter table added add v text; insert into added values (2, 'v')")
            await operator.follow(await remedy_of(streamer, "public.added", "cannot be added"))
            source.execute(f"insert into extended values (2, '{value}')")
            source.execute("insert into app.made values (2, null)")
            await streamer.caught_up(SECONDS)
            for name in ("app.made", "extended", "added"):
                assert_same(source, target, name)
            assert target.execute("table numbered") == [(1, 1)]
