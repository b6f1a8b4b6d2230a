"""`ddl: capture`: enums, domains and composite types change in their place in the stream."""

import asyncio
from pathlib import Path

import psycopg
import pytest

from streamer.commands import ddl_decisions
from streamer.commands.demo.embedded_servers import Server
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, assert_same, database
from tests.support.shared import Shared, streams
from tests.support.streamer import Streamer, write_config

pytestmark = [pytest.mark.usefixtures("without_spark"), pytest.mark.hostile_sessions]

GROUP = "ddl: capture\non_ddl: {drop_column: apply, drop_attribute: apply}"
STOPS = "ddl: capture\non_ddl: {rename_enum_value: stop}"
TYPES = """
create type mood as enum ('sad', 'happy');
create type place as (street text, number int);
create domain positive as int constraint above check (value > 0);
create table a (id int primary key, m mood, p place, d positive, list mood[]);
create table b (id int primary key, m mood, p place);
insert into a values (1, 'sad', row('x', 1), 1, '{sad,happy}'); insert into b values (1, 'happy');
"""
STATE = """
with own as (select * from pg_type
              where typnamespace in (current_schema()::regnamespace, 'other'::regnamespace))
select t.typname, e.enumlabel, null, null from pg_enum e join own t on t.oid = e.enumtypid
union all
select t.typname, a.attname, format_type(a.atttypid, a.atttypmod), null
  from pg_attribute a join own t on t.typrelid = a.attrelid join pg_class c on c.oid = t.typrelid
 where c.relkind = 'c' and not a.attisdropped
union all
select t.typname, k.conname, pg_get_constraintdef(k.oid), null
  from pg_constraint k join own t on t.oid = k.contypid where k.contype = 'c'
union all
select typname, format_type(typbasetype, typtypmod), typdefault, typnotnull::text
  from own where typtype = 'd'
"""

COMMANDS = [
    "alter type mood add value 'calm' before 'happy'",
    "insert into a (id, m) values (2, 'calm'); insert into b values (2, 'calm')",
    "alter type mood add value 'elated'",
    # Both tables get rows before and after, in separate transactions.
    "update a set m = 'happy'; update b set m = 'happy'",
    "alter type mood rename value 'happy' to 'glad'",
    "insert into a (id, m) values (3, 'glad'); update b set m = 'elated' where id = 1",
    # A type of its own transaction has all of its values at once.
    (
        "create type colour as enum ('red'); alter table a add column c colour default 'red';"
        "insert into a (id, c) values (4, 'red'); alter type colour add value 'green'"
    ),
    "insert into a (id, c) values (5, 'green')",
    "update a set p = row('y', 2); update b set p = row('z', 3)",
    "alter type place add attribute zip text",
    "update a set p = row('y', 2, 'z') where id = 1; update b set p = row('q', 4, 'r')",
    "alter type place rename attribute number to no",
    "alter type place drop attribute street",
    "update a set p = row(5, 's'); update b set p = row(6, 't')",
    "alter domain positive drop constraint above; insert into a (id, d) values (6, -1)",
    (
        "update a set d = 6 where id = 6; alter domain positive add constraint high check (value > 5)"
        " not valid"
    ),
    "alter domain positive set default 7",
    (
        "create domain email as text not null check (value like '%@%');"
        "alter table b add column e email default 'a@b'; update b set e = 'c@d' where id = 2"
    ),
    "create schema other; alter type mood set schema other",
    "alter type other.mood rename to feeling; insert into b (id, m) values (7, 'calm')",
    (
        "alter table b add column range int4range; create type span as range (subtype = numeric);"
        "alter table b add column s span; update b set s = '[1.5,2)'"
    ),
]


@streams("a: {initial: none}\nb: {initial: none}", both=TYPES, group=GROUP)
async def test_types_change_in_their_place(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for command in COMMANDS:
        await asyncio.to_thread(source.execute, command)
    await shared.caught_up()
    for table in ("a", "b"):
        assert_same(source, target, table)
    assert sorted(target.execute(STATE), key=str) == sorted(source.execute(STATE), key=str)
    labels = "select array_agg(e::text) from unnest(enum_range(null::other.feeling)) e"
    assert target.value(labels) == source.value(labels) == ["sad", "calm", "glad", "elated"]


@streams("a: {initial: none}\nb: {initial: none}", both=TYPES, group=STOPS)
async def test_a_type_that_waits_for_a_decision(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("alter type mood rename value 'sad' to 'blue'")
    source.execute("insert into a (id, m) values (8, 'blue')")
    for table in ("a", "b"):
        await shared.table_state(table, "error")
    error = str((await shared.table("a"))["error"])
    assert "on_ddl is stop for rename_enum_value" in error
    assert "rename value 'sad' to 'blue'" in error
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        target.execute("select 'blue'::mood")
    for table in ("a", "b"):
        await shared.decide("apply", table)
    for table in ("a", "b"):
        await shared.table_state(table, "ready")
    await shared.caught_up()
    assert_same(source, target, "a")


@streams("a: {initial: none}\nb: {initial: none}", both=TYPES, group=GROUP)
async def test_a_transaction_that_began_before_a_label_was_renamed(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as one, source.connect() as other:
        for number, session in ((8, one), (9, other)):
            row = f"({number}, 'sad', '{{{{sad,NULL}},{{happy,sad}}}}')"
            session.execute(f"begin; insert into a (id, m, list) values {row}".encode())
        source.execute("alter type mood rename value 'sad' to 'low'")
        source.execute("alter type mood rename value 'low' to 'the \"blues\", so'")
        source.execute("insert into a (id, m) values (10, 'the \"blues\", so')")
        one.execute("commit")
        other.execute("alter table a add column z int default 7; commit")
    source.execute("update a set m = 'happy' where id = 9; insert into a (id) values (11)")
    await shared.caught_up()
    assert_same(source, target, "a")
    assert target.value("select count(*) from a where list[1][1]::text like 'the%'") == 2


@streams("a: {initial: none}\nb: {truncate_target: true}", both=TYPES, group=GROUP)
async def test_a_transaction_that_began_before_attributes_were_changed(shared: Shared) -> None:
    """Its values have the attributes as of the transaction, without the names of the attributes."""
    source, target = shared.source, shared.target
    await shared.caught_up()

    async def meanwhile(number: int, command: str) -> None:
        with source.connect() as session:
            session.execute(f"begin; insert into b (id, p) values ({number}, row('x', 1))")
            source.execute(command)
            session.execute("commit")

    async def are_equal() -> bool:
        query = "select id, p::text from b order by id"
        # A thread may wait for a lock; the engine in this loop has to go on meanwhile.
        here, there = [await asyncio.to_thread(db.execute, query) for db in (source, target)]
        return here == there

    await meanwhile(20, "alter type place drop attribute number, add attribute zip int")
    await shared.eventually(are_equal)  # the backfill has taken the 1 from attribute "zip"
    await meanwhile(21, "alter type place add attribute more text")
    await shared.table_state("b", "error")
    error = str((await shared.table("b"))["error"])
    assert 'in column "p"' in error
    assert "began before ALTER TYPE changed the attributes" in error
    assert f"streamer resync {shared.own('b')} --database" in error
    await shared.ask("resync", "b")
    await shared.table_state("b", "ready")
    await shared.eventually(are_equal)


JOINING = """
create type mood as enum ('sad', 'happy');
create domain positive as int constraint above check (value > 0);
create type place as (street text, number int);
create table t (id int primary key, m mood not null, d positive, name varchar(5));
create table u (id int primary key, p place);
insert into t values (1, 'sad', 1, 'short'); insert into u values (1, row('x', 1));
"""
OF_JOINER = """
create type mood as enum ('calm', 'sad', 'elated', 'happy', 'last');
create domain positive as int;
create type place as (street text, number int, zip text);
create type colour as enum ('red');
create table t (id int primary key, m mood, d positive, name varchar(50), c colour);
create table u (id int primary key, p place);
insert into t values (1, 'calm', -1, 'a long name', 'red'), (2, 'elated', 2, 'x', null),
                     (3, 'last', null, null, null), (4, null, 1, 'y', 'red');
insert into u values (1, row('x', 1, 'z'));
"""
OF_LAST = """
create type mood as enum ('happy', 'odd', 'sad');
create domain positive as int constraint above check (value > 0);
create type place as (street text, number int);
create table t (id int primary key, m mood, d positive, name varchar(5));
create table u (id int primary key, p place);
insert into t values (1, 'odd', 1, 'x');
"""


async def test_a_tenant_joins_whose_types_have_values_that_the_others_lack(
    shared_server: Server, source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute(JOINING)
    path = tmp_path / "config.yaml"
    write_config(path, source, target, "t:\nu:", sid="a", group="ddl: capture")
    streamer = Streamer(path)
    streamer.start()
    mine = f'{{url: "{source.url}", sid: a}}'

    async def states() -> dict[str, dict[str, str]]:
        return {
            each["sid"]: {t["source"]: t["state"] for t in each["tables"]}
            for each in await streamer.statuses()
        }

    async def error(sid: str, table: str) -> str:
        async def is_in_error() -> bool:
            return (await states()).get(sid, {}).get(f"public.{table}") == "error"

        await streamer.eventually(is_in_error, 60)
        shown = {each["sid"]: each["tables"] for each in await streamer.statuses()}[sid]
        return str(next(each["error"] for each in shown if each["source"] == f"public.{table}"))

    try:
        await streamer.caught_up(60)
        with database(shared_server, "joiner") as joiner, database(shared_server, "last") as last:
            joiner.execute(OF_JOINER)
            last.execute(OF_LAST)
            text = path.read_text()
            path.write_text(text.replace(mine, f'{mine}, {{url: "{joiner.url}", sid: b}}'))
            await streamer.apply()
            # A composite value has all attributes in order, so the peers refuse a further
            # attribute.
            assert "another source still has the old type" in await error("b", "u")
            assert (await states())["a"] == {"public.t": "ready", "public.u": "ready"}

            async def is_copied() -> bool:
                return (await states())["b"]["public.t"] == "ready"

            await streamer.eventually(is_copied, 60)
            rows = "select id, m::text, d, name, c::text from t {} order by id"
            assert target.execute(rows.format("where sid = 'b'")) == joiner.execute(rows.format(""))
            labels = "select array_agg(e::text) from unnest(enum_range(null::mood)) e"
            assert target.value(labels) == joiner.value(labels)
            source.execute("insert into t values (9, 'happy', 1, 'on')")
            joiner.execute("insert into t (id, m) values (9, 'happy')")

            # The peers' type lists the values in a different order.
            path.write_text(text.replace(mine, f'{mine}, {{url: "{last.url}", sid: c}}'))
            await streamer.apply()
            told = await error("c", "t")
            assert "add value if not exists 'odd' before 'sad'" in told
            assert "in a different order" in told
            address = TargetAddress.parse(streamer.settings.target.url)
            await ddl_decisions.store_decision(address, "apply", "t", "shop", "c")
            await streamer.caught_up(60)
            assert target.execute("select m::text from t where sid = 'c'") == [("odd",)]

            # Without capture, the error of the copy names the statements.
            joiner.execute("alter type mood add value 'worst' before 'calm'")
            joiner.execute("insert into t (id, m) values (10, 'worst')")
            other = text.replace("ddl: capture", "ddl: off").replace("sid: a", "sid: d")
            path.write_text(other.replace(source.url, joiner.url).replace("    u:", ""))
            await streamer.apply()
            told = await error("d", "t")
            assert 'alter type "public"."mood" add value if not exists \'worst\' before' in told
            assert "then run `streamer resync public.t --database shop --sid d`" in told
    finally:
        await streamer.stop()
