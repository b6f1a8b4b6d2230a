"""`create` gives the tables that streamer creates the definitions of the source's tables."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamer.copy import finish_copies
from streamer.copy.prepare_copy import TableCopy
from streamer.errors.error_classes import MappingError
from streamer.report.problem_facts import source_of_row
from streamer.report.problems import ProblemKind, of_source
from streamer.schema_changes import definition_builder, target_definitions
from streamer.target.connection import TargetConnection
from tests.support.definitions import described
from tests.support.postgres import Database, assert_same
from tests.support.process import command
from tests.support.remedies import Operator
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "deferred_indexes")

SHOP = """
create table people (id int primary key, email text not null unique, boss int references people);
create table orders (
    id serial primary key, person int not null references people on delete cascade,
    "total " numeric check ("total " > 0), note text default 'it''s', at timestamptz default now()
);
create index "or""ders_note" on orders (lower(note) desc) where note <> 'x';
create index other_schema on orders (at);
comment on table orders is 'it''s ours';
create statistics "st at" (ndistinct, mcv) on note, "total ", lower(note) from orders;
create statistics of_one on extract(year from at at time zone 'utc') from orders;
alter statistics of_one set statistics 7;
comment on statistics of_one is 'ON a, b FROM here';
insert into people values (1, 'a@b', null), (2, 'b@c', 1);
insert into orders (person, "total ", note) select 1, g, 'n' || g from generate_series(1, 100) g;
"""
TABLES = "people:\norders:"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_builder, "CHECK_SECONDS", 0.1)
    monkeypatch.setenv("STREAMER_TARGET__CREATE", "all")


def states(target: Database) -> dict[str, str]:
    rows = target.execute("select kind || ' ' || name, state from streamer.definition order by 1")
    return {str(name): str(state) for name, state in rows}


async def until_made(streamer: Streamer, target: Database) -> None:
    async def is_made() -> bool:
        return "pending" not in states(target).values()

    await streamer.eventually(is_made)


async def test_tables_get_all_definitions_and_stay_in_step(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(SHOP)
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        await until_made(streamer, target)
        assert set(states(target).values()) == {"made"}
        for table in ("public.people", "public.orders"):
            assert described(target, table) == described(source, table)
        # Changes go on meanwhile, also changes of foreign keys and unique keys.
        source.execute("update people set email = 'c@d' where id = 1")
        source.execute(
            "insert into people values (3, 'a@b', 2); delete from people where id = 1 and false"
        )
        source.execute("insert into orders (person, note) values (3, 'y')")
        await streamer.caught_up()
        source.execute("truncate people, orders")
        source.execute("insert into people values (9, 'z', 9)")
        await streamer.caught_up()
        for table in ("people", "orders"):
            assert_same(source, target, table)


async def test_definitions_that_cannot_be_created_are_named_and_stop_no_table(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Path
) -> None:
    source.execute(SHOP)
    source.execute(
        "create function mine(text) returns text immutable language sql as 'select $1';"
        "create index of_mine on people (mine(email))"
    )
    write_config(tmp_path / "check.yaml", source, target, "people: {exclude: [boss]}")
    checked = command(tmp_path / "check.yaml", "check").stdout
    assert 'foreign key "people_boss_fkey" is not created at the target' in checked
    assert 'alter table "public"."people" add constraint "people_boss_fkey"' in checked
    async with stream("people: {exclude: [boss]}") as streamer:
        await streamer.caught_up()
        await until_made(streamer, target)
        found = states(target)
        assert found.pop("index of_mine") == "failed"
        assert found.pop("foreign key people_boss_fkey") == "unmade"
        assert set(found.values()) == {"made"}
        status: dict[str, Any] = await streamer.status()
        (table,) = status["tables"]
        assert [(d["name"], d["state"]) for d in table["definitions"]] == [
            ("of_mine", "failed"),
            ("people_boss_fkey", "unmade"),
        ]
        assert "mine(" in table["definitions"][0]["sql"]
        assert "mine" in table["definitions"][0]["reason"]
        assert table["state"] == "ready"
        said = command(streamer.path, "doctor").stdout
        assert 'lacks index "of_mine": target: function public.mine(text) does not' in said
        assert 'lacks foreign key "people_boss_fkey": ' in said


async def test_tenants_share_a_table_and_its_definitions_under_other_names(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    both = {"eu": source, "us": second}
    for each in both.values():
        each.execute(SHOP)
    tables = """
    people: {target: crm.persons, columns: {id: number, email: mail, boss: boss}}
    orders: {target: crm."or""ders"}
    """
    path = tmp_path / "config.yaml"
    write_config(path, source, target, tables, sid="eu", others={"us": second})
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        await until_made(streamer, target)
        found = described(target, 'crm."or""ders"')
        assert found["constraints"] == [
            'or"ders_pkey PRIMARY KEY (sid, id)',
            "orders_person_fkey FOREIGN KEY (sid, person) REFERENCES crm.persons(sid, number) ON DELETE CASCADE",
            'orders_total _check CHECK (("total " > (0)::numeric))',
        ]
        assert "id nextval('crm.orders_id_seq'::regclass)  -" in found["columns"]
        assert described(target, "crm.persons")["constraints"] == [
            "people_boss_fkey FOREIGN KEY (sid, boss) REFERENCES crm.persons(sid, number)",
            "people_email_key UNIQUE (sid, mail)",
            "persons_pkey PRIMARY KEY (sid, number)",
        ]
        assert set(states(target).values()) == {"made"}
        # A resync finds the definitions; streamer makes dropped definitions again beside the
        # stream.
        before = described(target, 'crm."or""ders"'), described(target, "crm.persons")
        target.execute(
            'drop index crm."or""ders_note";'
            "alter table crm.persons drop constraint people_email_key;"
            'alter table crm."or""ders" drop constraint "orders_total _check",'
            " drop constraint orders_person_fkey;"
            "update pg_index set indisvalid = false where indexrelid = 'crm.other_schema'::regclass;"
            "insert into streamer.request (relation_id, action)"
            " select id, 'resync' from streamer.relation; notify streamer"
        )

        async def is_whole() -> bool:
            now = described(target, 'crm."or""ders"'), described(target, "crm.persons")
            return now == before

        await streamer.eventually(is_whole)
        await streamer.caught_up()
        assert target.value("select count(*) from crm.persons") == 4
    finally:
        await streamer.stop()


async def test_keys_are_less_than_all_and_a_rule_overrides(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(SHOP)
    tables = "people: {create: columns}\norders: {type: append}"
    async with stream(tables, group="create: keys") as streamer:
        await streamer.caught_up()
        await until_made(streamer, target)
        assert states(target) == {'index or"ders_note': "made", "index other_schema": "made"}
        assert described(target, "public.people")["constraints"] == ["people_pkey PRIMARY KEY (id)"]
        waits = await asyncio.to_thread(command, streamer.path, "wait", "--timeout", "30")
        assert waits.returncode == 0, waits.stderr


async def test_each_source_may_have_a_schema_of_its_own(
    source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    for each in (source, second):
        each.execute(
            'create schema "A ""b"; create table "A ""b".t (id int primary key);'
            'create table t (id int primary key); insert into t values (1); insert into "A ""b".t values (2)'
        )
    path = tmp_path / "config.yaml"
    tables = '"*.*": {target: "{database}_{sid} {schema}.{table}"}'
    write_config(path, source, target, tables, sid="eu", others={"us": second})
    both = path.read_text()
    path.write_text(both.replace("{sid} ", ""))
    checked = await asyncio.to_thread(command, path, "check")
    assert checked.returncode == 0, checked.stdout  # one schema, and sid tells the rows apart
    path.write_text(both)
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        found = target.execute(
            "select n.nspname, c.relname from pg_class c join pg_namespace n on n.oid = relnamespace"
            " where nspname like 'shop%' and relkind = 'r' order by 1"
        )
        assert found == [
            ('shop_eu A "b', "t"),
            ("shop_eu public", "t"),
            ('shop_us A "b', "t"),
            ("shop_us public", "t"),
        ]
        assert target.execute('select sid, id from "shop_us A ""b".t') == [("us", 2)]
        # streamer refuses a second group whose names give the same table, and the running group
        # stays.
        group = both[both.index("- database") :].replace(
            "database: shop", "database: shop_us public"
        )
        group = (
            group.replace("{database}_{sid} {schema}", "{database}")
            .replace('"*.*":', '"public.*":')
            .replace(', {url: "' + second.url + '", sid: us}', "")
        )
        path.write_text(both + "\n" + group.replace("sid: eu", "sid: us"))
        with pytest.raises(MappingError, match="would write the same rows"):
            await streamer.apply()
    finally:
        await streamer.stop()


async def test_a_copy_goes_on_without_the_lock_timeout_of_its_role(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement would begin again after a short wait for a lock."""
    source.execute("create table t (id int primary key, v text); create index on t (v)")
    target.execute(f"alter database {target.name} set lock_timeout = '1234ms'")
    analyze, found = finish_copies._analyze, list[Any]()

    async def look(connection: TargetConnection, copy: TableCopy) -> None:
        found.append(await connection.fetch_value("show lock_timeout"))
        await analyze(connection, copy)

    monkeypatch.setattr(finish_copies, "_analyze", look)
    async with stream("t: {create: all}") as streamer:
        await streamer.caught_up()
    assert target.value("select to_regclass('t_v_idx') is not null"), "made before the end"
    assert found == ["0"]


@pytest.mark.follows("report.problems:_TableRules._of_definitions")
async def test_a_foreign_key_that_can_never_be_made_is_given_up_once_that_is_certain(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target lacks a unique index for the first. Rows that a session of the source let in
    refuse the second.
    """
    monkeypatch.setattr(target_definitions, "FOREIGN_KEY_ATTEMPTS", 1000)
    source.execute(
        "create table people (id int primary key, email text unique);"
        "create table orders (id int primary key, person int references people,"
        " mail text references people (email));"
        "set session_replication_role = replica; insert into orders values (1, 99, null)"
    )
    target.execute("create table people (id int primary key, email text)")
    async with stream(TABLES) as streamer:
        await streamer.caught_up()
        await until_made(streamer, target)
        found = states(target)
        assert found["foreign key orders_mail_fkey"] == "failed"
        assert found["foreign key orders_person_fkey"] == "failed"
        # An operator removes the causes, and makes both keys.
        target.execute("alter table people add unique (email); insert into people values (99)")
        problems = of_source(source_of_row(await streamer.status()))
        lacking = [each.remedy for each in problems if each.kind is ProblemKind.DEFINITION]
        assert len(lacking) == 2
        for remedy in lacking:
            assert remedy is not None
            await Operator(streamer.path, source, target).follow(remedy)

        async def are_made() -> bool:
            return set(states(target).values()) == {"made"}

        await streamer.eventually(are_made)
        assert not of_source(source_of_row(await streamer.status()))
