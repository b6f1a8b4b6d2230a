"""The capture of definitions (`ddl: capture`) does no harm to a source, and reveals no secrets."""

import asyncio
import os
import time
from collections.abc import Iterator

import psycopg
import pytest

from streamer.commands.check.capture_findings import check_capture
from streamer.commands.check.source_facts import read_source
from streamer.commands.demo.embedded_servers import Server
from streamer.source.capture import capture_functions, ddl_capture
from streamer.source.capture.capture_functions import LOCK_TIMEOUT_MS
from streamer.source.catalog import CAPTURE_MARK
from streamer.source.slot_and_publications.source_teardown import teardown_source
from streamer.source.timeline_branches import KnownServer
from tests.support.definitions import described
from tests.support.postgres import Database, drop_database
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer

pytestmark = pytest.mark.usefixtures("without_spark")

CAPTURE = "ddl: capture"
ALL = "ddl: capture\non_ddl: {drop_column: apply, change_type: apply}"
T = "t: {initial: none}"
DDL = "create table t (id int primary key, name text)"


@streams(T, both=DDL, group=ALL)
async def test_no_role_becomes_another_by_a_type_of_its_own(shared: Shared) -> None:
    source = shared.source
    role = f"mallory_{source.name}"
    source.execute(f"create role {role} login; create schema own authorization {role}")
    try:
        await shared.caught_up()
        notices: list[str] = []
        with psycopg.connect(source.server.url(source.name, role), autocommit=True) as session:
            session.add_notice_handler(lambda told: notices.append(told.message_primary or ""))
            session.execute(
                "create function pg_temp.trap(pg_catalog.text) returns bool language plpgsql as"
                " $$ begin raise warning 'trapped %', current_user; return true; end $$"
            )
            for name in ("text", "int8", "jsonb", "oid"):
                session.execute(
                    f"create domain pg_temp.{name} as pg_catalog.{name}"
                    " check (pg_temp.trap(value::pg_catalog.text))"
                )
            session.execute("create table own.x (a int default 1)")
            session.execute("alter table own.x add column b int default 5")
            session.execute("drop table own.x")
        assert notices == []
    finally:
        source.execute(f"drop owned by {role}; drop role {role}")


@streams(T, both=DDL, group=ALL)
async def test_a_session_without_ordinary_triggers_is_captured(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a')")
    source.execute(
        "set session_replication_role = replica; alter table t add column c int default 5;"
        " alter table t rename column name to title; insert into t values (2, 'b', 3)"
    )
    await shared.caught_up()
    rows = [(1, "a", 5), (2, "b", 3)]
    assert target.execute("select id, title, c from t order by id") == rows


@pytest.mark.parametrize("mark", ["", CAPTURE_MARK])
async def test_a_schema_of_another_program_is_left_alone(
    source: Database, target: Database, stream: MakeStreamer, mark: str
) -> None:
    for db in (source, target):
        db.execute(DDL)
    role = f"owner_{source.name}"
    source.execute(
        f"create role {role} login; create schema streamer_shop authorization {role};"
        f"set role {role}; create table streamer_shop.secret (token text not null);"
        f" comment on schema streamer_shop is '{mark}'"
    )
    try:
        async with stream(T, group=CAPTURE) as streamer:
            await streamer.caught_up()
            source.execute("insert into t values (1, 'a')")
            await streamer.caught_up()
            (mapped,) = streamer.mapping.sources
            (finding,) = check_capture(await read_source(mapped, "public"))
            assert 'schema "streamer_shop" is not streamer\'s' in finding.problem
        assert source.value("select count(*) from pg_event_trigger") == 0
        assert (
            source.value(
                "select count(*) from pg_proc where pronamespace::regnamespace::text = 'streamer_shop'"
            )
            == 0
        )
        result = await teardown_source(
            mapped, str(target.value("select id from streamer.installation")), KnownServer()
        )
        assert result.error is None
        assert source.execute("select * from streamer_shop.secret") == []
    finally:
        source.execute(f"drop owned by {role} cascade; drop role {role}")


@pytest.mark.parametrize("command", ["add value 'third'", "rename value 'sad' to 'blue'"])
@streams(
    "t: {initial: none}\nu: {initial: none}",
    both="create type mood as enum ('sad', 'ok'); create table t (id int primary key,"
    " m mood default 'ok', check (m <> 'sad')); create table u (id int primary key, m mood)",
    group=ALL,
)
async def test_alter_type_waits_for_no_table(shared: Shared, command: str) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as holder:
        holder.execute("begin; lock table t in access exclusive mode")
        with source.connect() as other:
            began = time.monotonic()
            await asyncio.to_thread(other.execute, f"alter type mood {command}".encode())
            assert time.monotonic() - began < 2 + LOCK_TIMEOUT_MS / 1000
        holder.execute("rollback")
    await shared.caught_up()
    labels = "select enum_range(null::mood)::text"  # copied with u
    assert target.execute(labels) == source.execute(labels)


USING = "alter table t alter amount type bigint using amount * 100"


@pytest.mark.parametrize(
    ("before", "command"),
    [
        (
            f"create function m() returns void language plpgsql as $$ begin {USING}; end $$",
            "select m()",
        ),
        (f"create function m() returns void language sql as $$ {USING} $$", "select m()"),
        (
            f"create function m() returns void language sql as $$ {USING} $$",
            "do $$ begin perform m(); alter table t add column more int; end $$",
        ),
        ("select", f"do $$ begin {USING}; end $$"),
        ("select", f"/* {'long' * 5000} */ {USING}"),
    ],
)
@streams(T, both="create table t (id int primary key, amount int)", source="<before>", group=ALL)
async def test_values_that_a_command_computes_are_copied_however_it_runs(
    shared: Shared, before: str, command: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 7)")
    await shared.caught_up()
    source.execute(command)
    source.execute("insert into t values (2, 8)")
    await shared.caught_up()
    assert target.execute("select id, amount from t order by id") == [(1, 700), (2, 8)]


COLUMNS = "(id int primary key, name text, more int)"
UPPER = "alter table t alter name type text using upper(name)"


@pytest.mark.parametrize(
    ("table", "command"),
    [
        (COLUMNS, UPPER),
        (COLUMNS, f"do $$ begin {UPPER}; end $$"),
        (
            COLUMNS,
            f"begin; savepoint a; {UPPER}; savepoint b; alter table t alter more set default 1; commit",
        ),
        (
            f"{COLUMNS} partition by range (id); create table t_1 partition of t default",
            UPPER,
        ),
    ],
)
@streams(T, both="create table t <table>", group=ALL)
async def test_values_that_a_command_computes_are_copied_although_the_type_stays(
    shared: Shared, table: str, command: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into t values (1, 'a')")
    await shared.caught_up()
    source.execute(command)
    source.execute("insert into t (id, name, more) values (2, 'b', 2)")
    await shared.caught_up()
    rows = [(1, "A", None), (2, "b", 2)]
    assert source.execute("select * from t order by id") == rows
    assert target.execute("select id, name, more from t order by id") == rows
    changes = shared.captured()
    assert str(changes[0]).startswith('([\'change_type "name" to ')
    assert len([each for each in changes if "change_type" in str(each)]) == 1


@streams(
    T,
    both="create table t (id int not null, a int, b int); create unique index i on t (id);"
    "alter table t replica identity using index i",
    group=ALL,
)
async def test_a_command_without_computed_values_has_nothing_copied(shared: Shared) -> None:
    source = shared.source
    await shared.caught_up()
    source.execute("insert into t values (1, 1, 1)")
    source.execute("alter table t alter a set not null, add primary key using index i")
    source.execute("alter table t alter b type bigint, alter a drop not null")
    source.execute("alter table t set (fillfactor = 50)")
    await shared.caught_up()
    changes = str(shared.captured())
    assert "widen_type" in changes
    assert "change_type" not in changes


@streams(T, both=DDL, group=ALL)
async def test_other_statements_of_the_client_stay_at_the_source(shared: Shared) -> None:
    source = shared.source
    await shared.caught_up()
    for statement in (
        "alter table t add column a int;",
        "select 'hidden'; alter table t add column b int",
        "alter table t add column c int; select 'hidden'",
        "do $$ begin perform 'hidden'; alter table t add column d int; end $$",
    ):
        with source.connect() as connection:
            connection.execute(statement.encode())
    await shared.caught_up()
    ran = [row[0] for row in shared.captured("query")]
    assert ran == ["alter table t add column a int;", *["ALTER TABLE ..."] * 3]


@pytest.fixture
def ascii_source(shared_server: Server) -> Iterator[Database]:
    name = f"source_ascii_{os.getpid()}"
    shared_server.execute(
        f"create database {name} encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'"
        " template template0"
    )
    try:
        yield Database(shared_server, name)
    finally:
        drop_database(shared_server, name)


class TestUntranslatable:
    @pytest.fixture
    def source(self, ascii_source: Database) -> Database:
        return ascii_source

    async def test_a_default_that_is_not_utf8_stops_its_table_only(
        self, source: Database, target: Database, stream: MakeStreamer
    ) -> None:
        for db in (source, target):
            db.execute(DDL)
            db.execute("create table u (id int primary key)")
        async with stream("t: {initial: none}\nu: {initial: none}", group=CAPTURE) as streamer:
            await streamer.caught_up()
            source.execute(r"alter table t add column c text default E'caf\xe9'")
            source.execute("insert into t values (1, 'a', 'b')")
            source.execute("alter table u add column c int; insert into u values (1, 2)")
            await streamer.table_state("public.t", "error")

            async def has_row() -> bool:
                found = await asyncio.to_thread(target.execute, "select to_jsonb(u) from u")
                return found == [({"id": 1, "c": 2},)]

            await streamer.eventually(has_row)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions travel as rows of a published table, as on PostgreSQL 12 and 13."""
    for module in (capture_functions, ddl_capture):
        monkeypatch.setattr(module, "MESSAGES_MIN", 99_00_00)


@pytest.mark.usefixtures("rows")
async def test_commands_of_an_older_server_keep_to_the_number_of_their_transaction(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(f"{DDL}; create table gone (id int primary key)")
    async with stream(f"{T}\ngone: {{initial: none}}", group=ALL) as streamer:
        await streamer.caught_up()
        with source.connect() as session:
            session.execute("begin")
            (first,) = session.execute("select txid_current()").fetchall()
            session.execute("alter table t add column c int; create table n (id int)")
            session.execute("alter table t rename c to d; drop table n")
            session.execute("commit")
        assert source.execute(f"select txid_current() - {first[0]}") == [(1,)]
        await streamer.caught_up()
        assert described(target, "public.t") == described(source, "public.t")


@streams(
    f"{T}\ngone: {{initial: none}}",
    both=f"{DDL}; create table gone (id int primary key)",
    group=ALL,
)
async def test_a_hundred_commands_in_one_transaction_keep_to_its_own_number(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    with source.connect() as session:
        session.execute("begin")
        (first,) = session.execute("select txid_current()").fetchall()
        for number in range(100):
            session.execute(f"alter table t add column c{number} int".encode())
            session.execute(f"create table n{number} (id int)".encode())
            session.execute(f"drop table n{number}".encode())
        session.execute("commit")
    # No subtransaction took a number; a heartbeat of streamer takes a few on a slow machine.
    assert source.value(f"select txid_current() - {first[0]} < 50")
    await shared.caught_up()
    columns = "select count(*) from pg_attribute where attrelid = 't'::regclass"
    assert target.value(f"{columns} and attname ~ '^c[0-9]+$'") == 100


async def test_commands_after_a_released_savepoint_are_captured(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """The capture functions' subtransactions are older than the subtransaction of the savepoint."""
    for db in (source, target):
        db.execute(f"{DDL}; insert into t values (1, 'a')")
    async with stream(T, group=f"{ALL}\ncreate: all") as streamer:
        await streamer.caught_up()
        source.execute(
            "begin; alter table t add column a int default 1; savepoint one;"
            " alter table t add column b int default 2; create index i on t (b);"
            " savepoint two; alter table t rename column name to title; release two; release one;"
            " alter table t add column c int default 3; alter table t drop column a;"
            " savepoint three; alter table t add column wrong int; drop index i;"
            " rollback to three; alter table t rename column b to d;"
            " insert into t (id, title) values (2, 'b'); commit"
        )
        await streamer.caught_up()
        assert target.execute("select id, title, d, c from t order by id") == [
            (1, "a", 2, 3),
            (2, "b", 2, 3),
        ]

        async def is_there() -> bool:
            return target.value("select to_regclass('i')::text") == "i"

        await streamer.eventually(is_there, 20)
        assert described(target, "public.t") == described(source, "public.t")


HARM_TO_MESSAGES = [
    "create trigger a before delete on streamer_shop.message execute function refuse()",
    "create rule refuse as on insert to streamer_shop.message do also select 1 / 0",
    "alter table streamer_shop.message add check (length(content) < 0)",
    "alter table streamer_shop.message add column more int not null",
    "alter table streamer_shop.message replica identity nothing",
    "drop table streamer_shop.message cascade",
]


@pytest.mark.usefixtures("rows")
async def test_a_table_of_messages_that_its_owner_changes_fails_no_command(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'refused'; end $$"
    )
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        for harm in HARM_TO_MESSAGES:
            notices: list[str | None] = []
            with source.connect() as session:
                session.execute("begin")  # the end of the transaction repairs the table
                session.execute(harm.encode())
                session.add_notice_handler(lambda told, to=notices: to.append(told.message_primary))  # type: ignore[misc]
                session.execute("alter table t add column c int")
                session.execute("create table other (id int)")
                session.execute("alter table t drop column c")
                session.execute("rollback")
            assert len([notice for notice in notices if "was not captured" in str(notice)]) >= 3, (
                harm
            )


async def test_a_table_that_streamer_does_not_publish_costs_one_short_message(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(DDL)
    source.execute("create table other (id int); create index on other (id)")
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        # Without the slow path, the capture fails for each command that needs the path.
        source.execute(
            "drop function streamer_shop.follow, streamer_shop.follow_drop; drop table streamer_shop.place"
        )
        notices: list[str] = []
        with source.connect() as session:
            session.add_notice_handler(lambda told: notices.append(told.message_primary or ""))
            for command in (
                "alter table other add column more int",
                "alter table other rename more to least",
                "create index i on other (least)",
                "alter index i rename to j",
                "create table fresh (id serial primary key)",
                "create temp table t (id int)",
                "alter table pg_temp.t add column name text",
                "drop table pg_temp.t",
                "create view v as select 1",
                "drop view v",
            ):
                session.execute(command.encode())
            assert notices == []
            session.execute("alter table public.t add column more int")
            assert len(notices) == 1


@pytest.mark.parametrize(
    "harm",
    [
        "drop table {}.place",
        "drop materialized view {}.secret cascade",
        "drop function {}.messages cascade",
        "drop function {}.state cascade",
        "drop function {}.follow",
        "drop function {}.follow_drop",
    ],
)
@streams(T, both=DDL, group=ALL)
async def test_a_damaged_capture_fails_no_command(shared: Shared, harm: str) -> None:
    await shared.caught_up()
    notices: list[str] = []
    with shared.source.connect() as session:
        session.execute("begin")  # the end of the transaction repairs the capture
        session.execute(harm.format(shared.capture).encode())
        session.add_notice_handler(lambda told: notices.append(told.message_primary or ""))
        session.execute("alter table t add column c int")
        session.execute("alter table t drop column c")
        session.execute("rollback")
    assert any("was not captured" in notice for notice in notices)


@streams(T, both=DDL, group=ALL)
async def test_a_locked_place_delays_a_command_by_the_patience_only(shared: Shared) -> None:
    source = shared.source
    await shared.caught_up()
    with source.connect() as holder:
        holder.execute(f"begin; lock table {shared.capture}.place in share mode".encode())
        with source.connect() as other:
            began = time.monotonic()
            await asyncio.to_thread(other.execute, b"alter table t add column c int")
            assert time.monotonic() - began < 2 + LOCK_TIMEOUT_MS / 1000
        holder.execute("rollback")
