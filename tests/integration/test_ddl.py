"""`ddl: capture`: streamer makes changes of definitions at the target, in their place in the
stream.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from streamer.commands import ddl_decisions
from streamer.commands.check.capture_findings import check_capture
from streamer.commands.check.source_facts import read_source
from streamer.commands.demo.embedded_servers import Server
from streamer.drain import drainer
from streamer.postgres.quoting import quote_identifier
from streamer.postgres.secret import Secret
from streamer.schema_changes import definition_builder
from streamer.source.capture import capture_functions, ddl_capture
from streamer.source.slot_and_publications.source_teardown import teardown_source
from streamer.source.timeline_branches import KnownServer
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database, database
from tests.support.streamer import MakeStreamer, Streamer, write_config
from tests.support.waiting import until

pytestmark = pytest.mark.hostile_sessions

CAPTURE = "ddl: capture"
ALL = "ddl: capture\non_ddl: {drop_column: apply, change_type: apply}"
T = "t: {initial: none}"
DDL = "create table t (id int primary key, name varchar(10), amount int)"

DEFINITION = """
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as not_null,
       pg_get_expr(d.adbin, d.adrelid) as default_value
from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = 't'::regclass and a.attnum > 0 and not a.attisdropped
"""


def definition(db: Database) -> list[tuple[object, ...]]:
    return sorted(db.execute(DEFINITION), key=str)


def assert_equal(source: Database, target: Database) -> None:
    """Compare the rows and the definitions, whose columns may have a different order."""
    assert definition(source) == definition(target)
    names = ", ".join(sorted(quote_identifier(str(row[0])) for row in definition(source)))
    read = f"select {names} from t order by id"
    assert source.execute(read) == target.execute(read)


@pytest.fixture(autouse=True)
def _quick_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drainer, "ERROR_RETRY_SECONDS", 0.3)


def both(source: Database, target: Database, sql: str = DDL) -> None:
    source.execute(sql)
    target.execute(sql)


COMMANDS = [
    ("add column plain text", "insert into t values (3, 'c', 3, 'x')"),
    ("add column five int not null default 5", "update t set amount = 4 where id = 1"),
    ("add column at timestamptz default '2020-01-01 00:00+00'", "delete from t where id = 2"),
    ("rename column name to title", "insert into t (id, title) values (4, 'd')"),
    ("alter column title type text", "insert into t (id, title) values (5, repeat('e', 99))"),
    (
        "alter column amount type bigint, alter column amount set default 7",
        "insert into t (id) values (6); update t set amount = coalesce(amount, 1::int8 << 40)",
    ),
    ("alter column amount set not null", "insert into t (id) values (7)"),
    ("drop column plain, add column plain int", "update t set plain = id where id > 5"),
    (
        "alter column amount drop not null, alter column five drop default",
        "insert into t (id, amount, five) values (8, null, 6)",
    ),
    ('add column "we""ird" varchar(5)[] collate "C"', "insert into t (id, five) values (9, 1)"),
    ("drop column at", "update t set five = 2 where id = 9"),
]


async def test_columns_change_in_the_order_of_the_stream(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    both(source, target)
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 'a', 1), (2, 'b', 2)")
        for number, (command, data) in enumerate(COMMANDS):
            together = f"alter table t {command}; {data}"  # a single transaction
            for part in [together] if number % 2 else together.split("; ", 1):
                source.execute(part)
        await streamer.caught_up()
        assert_equal(source, target)
        assert (await streamer.table("public.t"))["error"] is None


async def test_it_stops_exactly_there_until_somebody_decides(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    both(source, target)
    async with stream(T, group=CAPTURE) as streamer:
        await streamer.caught_up()
        address = TargetAddress.parse(streamer.settings.target.url)

        async def stops(statement: str) -> str:
            """Expect a stop at *statement*: the target has all earlier rows and no later row."""
            source.execute("insert into t (id) select coalesce(max(id), 0) + 1 from t")
            source.execute(f"{statement}; insert into t (id) select max(id) + 1 from t")
            await streamer.table_state("public.t", "error")
            assert target.value("select max(id) from t") == source.value(
                "select max(id) - 1 from t"
            )
            return str((await streamer.table("public.t"))["error"])

        async def decides(action: str, sql: list[str] | None = None) -> None:
            decided = await ddl_decisions.store_decision(address, action, "t", "shop", None, sql)
            assert list(decided.values()) == ["shop public.t"]
            await streamer.table_state("public.t", "ready")
            await streamer.caught_up()

        error = await stops("alter table t drop column amount")
        assert "on_ddl is stop for drop_column" in error
        assert 'alter table "public"."t" drop column "amount"' in error
        assert "streamer ddl apply public.t --database shop" in error
        (waiting,) = await ddl_decisions.read_records(address, None, None, with_done=False)
        assert (waiting.state, waiting.changes) == ("waiting", ['drop_column "amount"'])
        await decides("apply")
        assert_equal(source, target)

        await stops("alter table t drop column name, add column note text")
        await decides("skip")  # the table did not stop for the new column
        assert [row[0] for row in definition(target)] == ["id", "name", "note"]

        await stops("alter table t alter column note type int using length(note)")
        await ddl_decisions.store_decision(
            address, "apply", "t", "shop", None, ["alter table t nonsense"]
        )

        async def names_the_error() -> bool:
            return "syntax error" in str((await streamer.table("public.t"))["error"])

        await streamer.eventually(names_the_error)
        sql = [
            "alter table t alter note type int using length(note)",
            "alter table t drop column name",
        ]
        await decides("apply", sql)
        assert_equal(source, target)
        done = await ddl_decisions.read_records(address, "shop", None, with_done=True)
        assert [record.state for record in done] == ["applied", "skipped", "applied"]
        outcomes = "select action, state from streamer.request where actor is not null order by id"
        expected = [("apply", "done"), ("skip", "done"), ("apply", "failed"), ("apply", "done")]
        made = [(f"ddl_{action}", state) for action, state in expected]
        await until(lambda: target.execute(outcomes) == made, "the outcomes of the decisions")


@pytest.mark.usefixtures("without_spark", "short_backoffs")
async def test_values_that_no_statement_gives_are_copied_by_column(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definition_builder, "CHECK_SECONDS", 0.1)
    both(source, target)
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        source.execute("insert into t select g, repeat('x', g), g from generate_series(1, 9) g")

        async def are_equal() -> bool:
            if (await streamer.table("public.t"))["state"] != "ready":
                return False
            query = "select * from t order by id"
            # A thread may wait for a lock; the engine in this loop has to go on meanwhile.
            here, there = [await asyncio.to_thread(db.execute, query) for db in (source, target)]
            return here == there

        for command in (
            "add column token uuid default gen_random_uuid(), add column n serial",
            "alter column amount type bigint using amount * 2",
            # The last plan inside the transaction finds a column that no change brings.
            "add column twice int generated always as (amount * 2) stored",
        ):
            await asyncio.to_thread(
                source.execute,
                f"insert into t (id) select max(id) + 1 from t; alter table t {command};"
                "insert into t (id, amount) select max(id) + 1, 5 from t",
            )
            await streamer.eventually(are_equal)

        async def is_not_null() -> bool:  # as soon as all rows have values
            found = await asyncio.to_thread(definition, target)
            return next(row[2] for row in found if row[0] == "n") is True

        await streamer.eventually(is_not_null)
        address = TargetAddress.parse(streamer.settings.target.url)
        reasons = [
            r.reason for r in await ddl_decisions.read_records(address, None, None, with_done=True)
        ]
        assert reasons[0] is not None
        assert 'own value in new column "token"' in reasons[0]
        assert 'own value in new column "n"' in reasons[0]
        assert reasons[1] is not None
        assert 'column "amount" got another type' in reasons[1]
        assert reasons[2] is None
        source.execute("update t set amount = amount + 1")
        await streamer.eventually(are_equal)
        # No cast leads to the new type, so the column is empty until the values come.
        using = "type date using date '2020-01-01' + n"
        source.execute(f"alter table t alter column n drop default, alter column n {using}")
        await streamer.eventually(are_equal)
        await streamer.eventually(is_not_null)


@pytest.fixture(params=["messages", "rows"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How definitions travel: on PostgreSQL 12 and 13 as rows of a published table."""
    if request.param == "rows":
        for module in (capture_functions, ddl_capture):
            monkeypatch.setattr(module, "MESSAGES_MIN", 99_00_00)
    return str(request.param)


def assert_carried(source: Database, carrier: str) -> None:
    """Check that definitions travelled that way, and that no message stays at the source."""
    published = "select count(*) from pg_publication_tables where tablename = 'message'"
    assert source.value(published) == (carrier == "rows")
    if carrier == "rows":
        assert source.value("select count(*) from streamer_shop.message") == 0


async def streamed(source: Database) -> None:
    """Wait until the source has sent all changes so far."""
    source.execute("create table if not exists flushed (); insert into flushed default values")
    lsn = source.value("select pg_current_wal_flush_lsn()")

    async def is_sent() -> bool:
        sql = f"select bool_or(sent_lsn >= '{lsn}') from pg_stat_replication"
        return bool(source.value(sql))

    await until(is_sent, seconds=60)


@pytest.mark.since(16)  # debug_logical_replication_streaming
async def test_savepoints_and_streamed_transactions(
    carrier: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    both(source, target)
    source.parameters = "options=-c%20debug_logical_replication_streaming%3Dimmediate"
    async with stream(T, group=ALL) as streamer:
        await streamer.caught_up()
        source.execute("begin; alter table t add column gone int; rollback")
        with source.connect() as session:
            session.execute("begin")
            session.execute("insert into t select g from generate_series(1, 50) g")
            for column in ("kept", "undone", "nested", "last"):
                session.execute("savepoint a; savepoint b")
                session.execute(f"alter table t add column {column} int default {len(column)}")
                session.execute(f"update t set {column} = id where id % 2 = 0")
                await streamed(source)
                session.execute("release b")
                if column == "undone":
                    session.execute("rollback to a")
                session.execute("release a")
            session.execute("insert into t (id, last) values (60, 1); commit")
        await streamer.caught_up()
        assert [row[0] for row in definition(target)] == sorted(
            ["id", "name", "amount", "kept", "nested", "last"]
        )
        assert_equal(source, target)
        # The next message would repair an undone change, which was never made.
        address = TargetAddress.parse(streamer.settings.target.url)
        done = await ddl_decisions.read_records(address, None, None, with_done=True)
        assert [change for record in done for change in record.changes] == [
            f'add_column "{name}"' for name in ("kept", "nested", "last")
        ]
        assert_carried(source, carrier)


@pytest.mark.since(17)  # SET EXPRESSION
async def test_two_tenants_share_a_table(
    shared_server: Server, source: Database, second: Database, target: Database, tmp_path: Path
) -> None:
    for db in (source, second):
        db.execute(DDL + "; insert into t values (1, 'x', 1)")
    target.execute(
        "create table t (sid text, id int, name varchar(10), amount int, primary key (sid, id));"
        "insert into t values ('a', 1, 'x', 1), ('b', 1, 'x', 1)"
    )
    path = tmp_path / "config.yaml"
    write_config(path, source, target, T, sid="a", others={"b": second}, group=ALL)
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        for command in (
            "add column note text default 'n'",
            "rename column name to title",
            "alter column amount type bigint",
            "drop column note",
        ):
            for number, db in enumerate((source, second)):
                db.execute(f"alter table t {command}; insert into t (id) select max(id) + 1 from t")
                await streamer.caught_up()
                if command.startswith("add") and not number:
                    assert target.execute("select sid, note from t order by sid, id") == [
                        *[("a", "n")] * 2,
                        ("b", None),
                    ]
        names = "select id, title, amount from t {} order by id"
        for sid, db in (("a", source), ("b", second)):
            own = target.execute(names.format(f"where sid = '{sid}'"))
            assert own == db.execute(names.format(""))
        assert {row[0] for row in definition(target)} == {"sid", "id", "title", "amount"}

        await one_expression_for_both(streamer, source, second, target)
        await rename_at_once(streamer, source, second, target)
        assert {row[0] for row in definition(target)} == {"sid", "id", "headline", "amount"}
        await join_with_a_column_more(shared_server, streamer, source, target)

        source.execute("alter table t add column clash int")
        second.execute("alter table t add column clash text; insert into t (id) values (9)")
        source.execute("insert into t (id, clash) values (9, 9)")

        async def one_stands() -> bool:
            states = {s["sid"]: s["tables"][0]["state"] for s in await streamer.statuses()}
            return sorted(states.values()) == ["error", "ready"]

        await streamer.eventually(one_stands)
    finally:
        await streamer.stop()


async def one_expression_for_both(
    streamer: Streamer, source: Database, second: Database, target: Database
) -> None:
    """An operator decides if the rows of both tenants would get new computed values."""
    if target.value("select current_setting('server_version_num')::int < 170000"):
        return  # without SET EXPRESSION
    for db in (source, second):
        db.execute("alter table t add column twice int generated always as (amount * 2) stored")
    await streamer.caught_up()
    changed = "alter table t alter twice set expression as (id * 3), add column beside int"
    source.execute(changed)

    async def is_in(state: str) -> bool:
        (own,) = [s for s in await streamer.statuses() if s["sid"] == "a"]
        error = str(own["tables"][0]["error"])
        is_told = "in the rows of other sources, too" in error and "set expression as" in error
        return str(own["tables"][0]["state"]) == state and (is_told or state == "ready")

    await streamer.eventually(lambda: is_in("error"))
    address = TargetAddress.parse(streamer.settings.target.url)
    await ddl_decisions.store_decision(address, "apply", "t", "shop", "a")
    await streamer.eventually(lambda: is_in("ready"))
    second.execute(changed)
    await streamer.caught_up()
    assert target.value("select bool_and(twice = id * 3) from t") is True
    for db in (source, second):
        db.execute("alter table t drop column twice, drop column beside")
    await streamer.caught_up()


async def rename_at_once(
    streamer: Streamer, source: Database, second: Database, target: Database
) -> None:
    """Two tenants rename a column, and neither sees the change of the peer before its own change
    ends.
    """
    target.execute("alter table t add column headline varchar(10)")

    async def both_wait() -> bool:
        waiting = target.value(
            "select count(*) from pg_locks l join pg_stat_activity a using (pid)"
            " where not l.granted and a.datname = current_database()"
        )
        return waiting == 2

    with target.connect() as blocker:
        blocker.execute("begin; lock table streamer.ddl in exclusive mode")
        for db in (source, second):
            await asyncio.to_thread(db.execute, "alter table t rename column title to headline")
        await streamer.eventually(both_wait)
        blocker.execute("commit")
    await streamer.caught_up()


async def join_with_a_column_more(
    server: Server, streamer: Streamer, source: Database, target: Database
) -> None:
    """A tenant comes with a column that the remaining tenants get later."""
    with database(server, "third") as third:
        third.execute(
            "create table t (id int primary key, headline varchar(10), amount bigint, early int);"
            " insert into t values (1, 'x', 1, 5)"
        )
        before = streamer.path.read_text()
        one = f'{{url: "{source.url}", sid: a}}'
        there = before.replace(one, f'{one}, {{url: "{third.url}", sid: c}}')
        streamer.path.write_text(there.replace(T, "t:"))
        await streamer.apply()
        await streamer.caught_up()
        assert target.execute("select early from t where sid = 'c'") == [(5,)]
        streamer.path.write_text(before)
        await streamer.apply()


async def test_a_role_without_the_right_gets_the_statements(
    carrier: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    both(source, target)
    role = f"reader_{source.name}"
    source.execute(
        f"create role {role} login replication; alter table t owner to {role};"
        f"grant create on database {source.name} to {role}; grant create on schema public to {role}"
    )
    source.url_user = role
    try:
        async with stream(T, group=CAPTURE) as streamer:
            (mapped,) = streamer.mapping.sources
            await streamer.caught_up()
            source.execute("alter table t add column early int; insert into t values (1)")
            await streamer.table_state("public.t", "error")
            error = str((await streamer.table("public.t"))["error"])
            assert "has no column" in error
            assert "with the capture of definitions" in error

            (finding,) = check_capture(await read_source(mapped, "public"))
            assert "event triggers are missing" in finding.problem
            assert finding.fix is not None
            for statement in finding.fix.sql:
                source.execute(statement)
            assert not list(check_capture(await read_source(mapped, "public")))
            # Now streamer can read the source's definition, without which it cannot write the row.
            await streamer.table_state("public.t", "ready")
            await streamer.caught_up()
        async with stream(T, group=CAPTURE) as streamer:
            await streamer.caught_up()
            source.execute("alter table t add column late int; insert into t values (2)")
            await streamer.caught_up()
            assert_equal(source, target)
            assert_carried(source, carrier)
        # The role may not drop the capture, so teardown prints the statement that does.
        installation = str(target.value("select id from streamer.installation"))
        result = await teardown_source(mapped, installation, KnownServer())
        assert "drop schema" in "; ".join(result.left_sql)
        source.url_user = "postgres"
        mapped = replace(mapped, url=Secret(source.url))
        result = await teardown_source(mapped, installation, KnownServer())
        assert result.error is None
        assert not source.value("select count(*) from pg_event_trigger")
    finally:
        source.execute(f"reassign owned by {role} to postgres; drop owned by {role}")
        source.execute(f"drop role {role}")


async def test_a_pattern_does_not_match_the_capture_and_only_its_messages_count(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    both(source, target)
    async with stream('"*.*": {initial: none}', group=CAPTURE) as streamer:
        await streamer.caught_up()
        columns = '[{"number": 9, "name": "evil", "type": "int"}]'
        oid = source.value("select 't'::regclass::oid")
        relation = f'{{"oid": {oid}, "namespace": "public", '
        forged = f'1 guess {{"tag": "", "query": "", "relation": {relation}"name": "t", "columns": '
        source.execute(
            f"select pg_logical_emit_message(true, 'streamer.ddl', '{forged}{columns}}}}}')"
        )
        source.execute("alter table t add column own int; insert into t values (1)")
        await streamer.caught_up()
        assert_equal(source, target)
    async with stream('"*.*": {initial: none}', group=CAPTURE) as streamer:
        await streamer.caught_up()
        assert [table["source"] for table in (await streamer.status())["tables"]] == ["public.t"]
