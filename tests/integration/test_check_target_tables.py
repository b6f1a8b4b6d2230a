"""`streamer check` and the tables of the target: columns, types, keys, rows in the way."""

import itertools
from typing import Any

import psycopg
import pytest

from streamer.commands.check.type_conversion import type_risk
from streamer.commands.demo.embedded_servers import Server
from streamer.source.slot_and_publications.slot import drop_slot_sql
from tests.support.checking import ERROR, INFO, ITEMS, WARNING, Checker, both
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.waiting import until


async def test_missing_tables(checker: Checker) -> None:
    checker.source.execute("create type mood as enum ('sad', 'glad')")
    checker.source.execute("create table feelings (id int primary key, m mood)")
    for more in ("metadata: {lsn: _lsn}", "type: history", "set: {twice: id + id}"):
        checker.configure(f"feelings: {{target: deep.feelings, {more}}}")
        assert await checker.findings() == []
    checker.configure("feelings: {target: deep.feelings}")
    assert await checker.findings() == []
    checker.path.write_text(
        checker.path.read_text().replace("target: {url", "target: {create_tables: false, url")
    )
    await checker.mends(ERROR, 'target table "deep.feelings" does not exist', "create type")
    assert await checker.findings() == []

    checker.source.execute("create collation mine (provider = libc, locale = 'C')")
    checker.source.execute("create table sorted (id text collate mine primary key)")
    checker.configure("sorted:")
    await checker.finds(ERROR, "the target has no collation public.mine", 'column "id"')
    checker.target.execute("create collation mine (provider = libc, locale = 'C')")
    assert await checker.findings() == []


@pytest.mark.usefixtures("without_spark")
async def test_run_refuses_targets_in_the_words_of_check(checker: Checker) -> None:
    """A copy would replace the rows of a table that is its own target by rows of a snapshot."""
    source = checker.source
    source.execute(f"{ITEMS}; create table copied (id int primary key)")
    source.execute("create table seen (id int primary key); create view sight as table seen")
    source.execute("insert into items values (1); insert into copied values (1)")
    looped = Checker(checker.path, source, source)
    looped.configure(
        "items: {truncate_target: true}\ncopied: {target: copy_of_it}\nseen: {target: sight}"
    )
    own = await looped.finds(ERROR, "public.items", "is its own target")
    view = await looped.finds(ERROR, 'target "public.sight" is a view', "another `target`")
    streamer = Streamer(looped.path)
    streamer.start()
    try:
        await streamer.table_state("public.copied", "ready")
        for table, finding in (("public.items", own), ("public.seen", view)):
            await streamer.table_state(table, "error")
            assert finding.problem in (await streamer.table(table))["error"]
        source.execute("insert into items values (2, 'new'); insert into copied values (2)")
        await until(lambda: source.value("select count(*) from copy_of_it") == 2)
        assert source.execute("table items") == [(1, None), (2, "new")]
    finally:
        await streamer.stop()
        source.execute(drop_slot_sql("streamer_shop"))


async def test_missing_columns_are_added_with_their_types(checker: Checker) -> None:
    checker.source.execute("create schema types; create type types.mood as enum ('sad', 'glad')")
    checker.source.execute(
        'create table t (id int primary key, "a ""b" numeric(10, 2), m types.mood, n int)'
    )
    checker.target.execute("create table t (id int primary key, n int)")
    checker.configure("t:")
    found = await checker.mends(ERROR, "has no column", "create type", "add column")
    assert 'add column "a ""b" numeric(10,2), add column "m" types.mood' in str(found)
    assert "or exclude the column in the mapping" in str(found)
    assert await checker.findings() == []


async def test_missing_columns_that_run_adds_or_ignores(checker: Checker) -> None:
    checker.source.execute("create type mood as enum ('sad', 'glad')")
    checker.source.execute("create table t (id int primary key, n numeric(3, 1), m mood)")
    checker.target.execute("create table t (id int primary key)")
    checker.configure("t: {on_column_added: ignore}")
    assert await checker.findings() == []
    checker.configure("t: {on_column_added: add}")
    await checker.mends(ERROR, 'the target lacks the type of "m"', "create type")
    await checker.finds(INFO, "lacks columns", 'add column "n" numeric(3,1)')


async def test_columns_that_cannot_be_written(checker: Checker) -> None:
    checker.source.execute(
        "create table t (id int primary key, n int, g int generated always as (1) stored)"
    )
    checker.target.execute(
        "create table t (id int primary key, n int generated always as identity,"
        " extra int not null, g int not null)"
    )
    checker.configure("t:")
    await checker.mends(ERROR, 'column "extra"', "NOT NULL", "drop not null")
    await checker.mends(ERROR, 'column "g"', "NOT NULL", "generated always as (1) stored")
    await checker.mends(
        ERROR, 'column "n"', "GENERATED ALWAYS AS IDENTITY", "set generated by default"
    )
    assert await checker.findings() == []


async def test_generated_columns_are_not_delivered(checker: Checker) -> None:
    checker.source.execute(
        "create table t (id int primary key, a text, big text generated always as (upper(a)) stored)"
    )
    checker.target.execute("create table t (id int primary key, a text, big text)")
    checker.configure("t:")
    await checker.mends(WARNING, '"big" is generated, so the source does not send its values')
    checker.target.execute("alter table t drop column big")
    await checker.mends(INFO, '"big" is generated, and the target has no column')
    checker.configure("t: {exclude: [big]}")
    assert await checker.findings() == []
    checker.target.execute("drop table t; create table t (id int primary key, b text)")
    checker.configure("t: {columns: {id: id, a: b, big: up}}")
    await checker.mends(INFO, '"big" is generated, and the target has no column')
    assert checker.target.value("insert into t values (1, 'x') returning up") == "X"


async def test_a_key_that_is_not_written(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.configure("items: {exclude: [id]}")
    await checker.finds(ERROR, 'key column "id"', "is not written to the target")
    checker.target.execute("create table items (name text)")
    await checker.finds(ERROR, 'key column "id"', "do not exclude it")


async def test_columns_named_sid(checker: Checker) -> None:
    checker.source.execute("create table t (id int primary key, sid text)")
    checker.configure("t:", sid="eu")
    await checker.finds(ERROR, 'column "sid"', "has the name of the column for the sid")
    checker.configure("t: {columns: {id: id, sid: session}}", sid="eu")
    assert await checker.findings() == []
    checker.source.execute(ITEMS)
    checker.target.execute(
        "create table items (sid text, id int, name text, primary key (sid, id))"
    )
    checker.configure("items:")
    await checker.finds(
        ERROR, 'has a column "sid" but this source has no sid', "give a sid to its url"
    )


async def test_history_tables_and_keys_without_an_index(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute("create table items (id int, name text)")
    checker.configure("items: {type: history}")
    await checker.mends(ERROR, 'has no column "kvsz_start"')
    await checker.mends(WARNING, "has no index on (id), so changes are slow")
    assert await checker.findings() == []
    checker.target.execute("drop table items; create table items (sid text, id int, name text)")
    checker.configure("items:", sid="eu")
    found = await checker.mends(WARNING, "no unique index on (sid, id), so changes are slow")
    assert 'create unique index on "public"."items" ("sid", "id")' in str(found)


async def test_rows_in_the_way_of_a_copy(checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute(
        "create table items (sid text, id int, name text, primary key (sid, id));"
        "insert into items values ('us', 1)"
    )
    checker.configure("items:", sid="it's")
    assert await checker.findings() == []
    checker.target.execute("insert into items values ('it''s', 1)")
    for option in ("truncate_target: true", "initial: none"):
        checker.configure(f"items: {{{option}}}", sid="it's")
        assert await checker.findings() == []
    checker.configure("items:", sid="it's")
    found = await checker.mends(ERROR, "already holds rows of this source")
    assert "`truncate_target: true`" in str(found)
    assert "`initial: none`" in str(found)
    assert checker.target.execute("select sid from items") == [("us",)]

    checker.target.execute("drop table items")
    checker.target.execute(f"{ITEMS}; insert into items values (1)")
    checker.configure("items:")
    await checker.mends(ERROR, "already holds rows of this source", "truncate")


async def test_a_locked_target_table_is_not_waited_for(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(checker, ITEMS)
    checker.configure("items:")
    monkeypatch.setattr("streamer.commands.check.target_facts.STATEMENT_SECONDS", 1)
    with checker.target.connect() as connection:
        connection.autocommit = False
        connection.execute("lock table items")
        await checker.finds(WARNING, "cannot tell whether", "statement timeout")


async def test_unlogged_and_hidden_target_tables(role: str, checker: Checker) -> None:
    checker.source.execute(ITEMS)
    checker.target.execute("create unlogged table items (id int primary key, name text)")
    checker.configure("items:")
    await checker.mends(ERROR, "is unlogged; after a crash PostgreSQL empties such a table")
    checker.target.execute(
        "drop table items; create table items (id int primary key, name text)"
        " partition by range (id); create unlogged table few partition of items"
        " for values from (0) to (9); create table many partition of items default"
    )
    await checker.mends(ERROR, "has unlogged partitions: public.few;")
    checker.target.execute(
        f"alter table items enable row level security; grant all on items to {role};"
        f'grant create on database "{checker.target.name}" to {role}'
    )
    checker.target.url_user = role
    checker.configure("items:")
    await checker.mends(ERROR, "row level security hides rows")


async def test_enum_labels_that_the_target_lacks(checker: Checker) -> None:
    checker.source.execute("create type mood as enum ('a', 'b', 'c''c', 'd')")
    checker.target.execute("create type mood as enum ('b', 'd')")
    both(checker, "create table t (id int primary key, m mood)")
    checker.configure("t:")
    await checker.mends(WARNING, "type public.mood", 'lacks "a", "c\'c"')
    labels = "select enum_range(null::mood)::text"
    assert checker.target.value(labels) == checker.source.value(labels)


async def test_types_of_extensions(checker: Checker) -> None:
    # Packaged servers and servers of a distribution come with different extensions.
    available = (
        "select name from pg_available_extensions where name in ('vector', 'citext') limit 1"
    )
    name = checker.source.value(available)
    assert name is not None, "install the package postgresql-contrib"
    checker.source.execute(f"create schema e; create extension {name} schema e")
    checker.source.execute(f"create table t (id int primary key, v e.{name})")
    checker.configure("t:")
    found = await checker.mends(ERROR, f'the target has no type "e.{name}"', "create extension")
    assert f'create schema if not exists "e"; create extension "{name}" schema "e"' in str(found)
    checker.target.execute(f"create schema x; alter extension {name} set schema x")
    await checker.mends(ERROR, f'the target has no type "e.{name}"', "alter extension")


async def test_types_into_which_not_every_value_fits(checker: Checker) -> None:
    checker.source.execute("create table t (id bigint primary key, a text, b int[], c timestamptz)")
    checker.target.execute(
        "create domain short as varchar(3);"
        "create table t (id int primary key, a short, b smallint[], c text)"
    )
    checker.configure("t:")
    await checker.mends(
        WARNING,
        'column "id" has type bigint, but integer at the target: the target rejects large values',
    )
    await checker.mends(WARNING, 'column "a" has type text', "longer than 3 characters")
    await checker.mends(WARNING, 'column "b" has type integer[], but smallint[] at the target')
    assert await checker.findings() == []


VALUES = {
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "numeric": ["0.12345678901234567890", "1e40", "NaN"],
    "numeric(5,0)": ["-99999"],
    "numeric(12,3)": ["999999999.999"],
    "numeric(20,0)": ["99999999999999999999"],
    "real": ["3.4028235e+38", "1.1", "NaN"],
    "double precision": ["1.7976931348623157e+308", "0.1", "0.30000000000000004"],
    "text": ["", "x" * 40, "  padded  "],
    "character varying": ["", "y" * 40],
    "character varying(2)": ["ab", "é€"],
    "character varying(12)": ["abcdefghijkl", ""],
    "character(3)": ["a  ", "abc"],
    "character(12)": ["abcdefghijkl"],
    "date": ["2024-02-29", "infinity", "4713-01-01 BC"],
    "timestamp without time zone": ["2024-02-29 23:59:59.999999", "-infinity"],
    "timestamp(0) without time zone": ["2024-02-29 23:59:59"],
    "timestamp with time zone": ["2024-02-29 23:59:59.999999+00"],
    "time without time zone": ["23:59:59.999999"],
    "time(3) without time zone": ["23:59:59.999"],
    "time with time zone": ["23:59:59.999999+05:30"],
    "boolean": ["t"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"b": 1, "a":  2, "a": 3}'],
    "jsonb": ['{"a": 2, "b": 1}'],
    "bytea": ["\\x00ff"],
    "integer[]": ["{1,2147483647}"],
    "bigint[]": ["{1,9223372036854775807}"],
}


def _is_kept(connection: "psycopg.Connection[Any]", value: str, source: str, target: str) -> bool:
    """Whether a value, written to *target* as text, comes back unchanged as *source*."""
    try:
        row = connection.execute(
            f"select (v::text::{target})::{source}::text = v::text"
            f" from (select %s::{source} as v) x".encode(),
            (value,),
        ).fetchone()
    except psycopg.Error:
        return False
    return bool(row and row[0])


def test_types_said_to_be_safe_are(shared_server: Server) -> None:
    with psycopg.connect(shared_server.url(), autocommit=True) as connection:
        connection.execute("set timezone = 'UTC'")
        for source, target in itertools.product(VALUES, repeat=2):
            if type_risk(source, target) is None:
                for value in VALUES[source]:
                    assert _is_kept(connection, value, source, target), (source, target, value)


async def test_a_source_column_sid(checker: Checker, stream: MakeStreamer) -> None:
    """The constant takes the place of the url's sid."""
    checker.source.execute("create table t (sid text, id int, v text, primary key (sid, id))")
    checker.configure("t:", sid="eu")
    await checker.finds(ERROR, 'column "sid" of source table "public.t"', "column for the sid")
    async with stream("t:", sid="eu") as streamer:
        await streamer.table_state("public.t", "error")
        (table,) = (await streamer.status())["tables"]
        assert 'column "sid" of source table "public.t" has the name' in table["error"]
