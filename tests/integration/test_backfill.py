"""A backfill brings the columns that existing rows of the target lack, and only these."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from streamer.commands.table_requests import request
from streamer.control.resync_options import Mode, Resync
from streamer.errors.error_classes import MappingError
from streamer.target.connection import TargetAddress
from tests.support.postgres import Database
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer

pytestmark = [
    pytest.mark.usefixtures("without_spark", "short_backoffs"),
    pytest.mark.timeout(180),
]

DDL = "create table t (id int primary key, v text, secret text)"
TABLE = f"{DDL}; insert into t select g, 'v', 'secret ' || g from generate_series(1, 100) g"
ADD = "on_column_added: add"


@contextmanager
def writing(source: Database, *tables: str) -> Iterator[None]:
    """Change rows all the while: hot rows, new rows, deleted rows and keys."""
    ended = threading.Event()

    def write() -> None:
        n = 1000
        while not ended.wait(0.05):
            n += 1
            for table in tables:
                source.execute(
                    f"begin; insert into {table} (id, v) values ({n}, 'new');"
                    f"update {table} set v = v || '.' where id in (3, 4);"
                    f"update {table} set id = id + 100000 where id = {n} - 3;"
                    f"delete from {table} where id = 100000 + {n} - 6; commit"
                )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()


async def equal(streamer: Streamer, source: Database, target: Database, query: str) -> None:
    """Wait until both sides are equal, and all tables are ready."""

    async def is_so() -> bool:
        states = {table["state"] for table in (await streamer.status())["tables"]}
        return states == {"ready"} and source.execute(query) == target.execute(query)

    await streamer.eventually(is_so)


@streams(
    f"t: {{{ADD}}}\nh: {{type: history, {ADD}}}\nbag: {{{ADD}}}",
    source=f"{TABLE}; {TABLE.replace(' t ', ' h ')};"
    "create table bag (a int); insert into bag select g % 5 from generate_series(1, 20) g;"
    "alter table bag replica identity full",
)
async def test_a_column_with_a_volatile_default_gets_the_values_of_existing_rows(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("update h set v = 'second' where id <= 10")
    await shared.caught_up()
    with writing(source, "t"):
        source.execute(
            "alter table t add column token uuid default gen_random_uuid(), add column n serial;"
            "update t set token = null where id = 5; update t set n = -1 where id = 6"
        )
        source.execute("alter table h add column token uuid default gen_random_uuid()")
        source.execute("insert into h (id, v) values (200, 'later')")
        source.execute("alter table bag add column n serial; insert into bag (a) values (7)")

        async def has_token() -> bool:
            has = "select exists (select from t where id = 1 and {0} is not null)"
            columns = target.value(
                "select count(*) from pg_attribute where attrelid = 't'::regclass"
                " and attname in ('token', 'n')"
            )
            return columns == 2 and bool(target.value(has.format("token")))

        await shared.eventually(has_token)
    await shared.caught_up()
    await equal(shared, source, target, "select * from t order by id")
    await equal(shared, source, target, "select a, n from bag order by n")
    is_open = "kvsz_end = '9999-01-01 00:00:00+00'"
    rows = "select id, v, secret, token from {0} order by id"
    await shared.eventually(
        lambda: _true(
            target.execute(rows.format(f"(select * from h where {is_open}) h"))
            == source.execute(rows.format("h"))
        )
    )
    # Versions that ended before keep no value, and no version begins for the column.
    assert target.value("select count(token) from h where v = 'v' and id <= 10") == 0
    assert target.value("select count(*) from h") == 111


async def _true(value: bool) -> bool:
    return value


async def test_a_tenant_gets_its_own_values_in_a_shared_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TABLE)
    target.execute(
        "create table t (sid text, id int, v text, secret text, n int, primary key (sid, id));"
        "insert into t select 'us', g, 'theirs', null, -1 from generate_series(1, 50) g"
    )
    async with stream("t: {truncate_target: true}", sid="eu") as streamer:
        await streamer.caught_up()
        # The target has the column already, from the source of a second tenant.
        source.execute("alter table t add column n int default 7; update t set n = 8 where id = 2")
        source.execute("insert into t values (300, 'new', null, null)")

        async def is_there() -> bool:
            found = target.execute("select id, v, secret, n from t where sid = 'eu' order by id")
            return found == source.execute("select id, v, secret, n from t order by id")

        await streamer.eventually(is_there)
        await streamer.caught_up()
        assert target.value("select count(*) from t where sid = 'us' and n = -1") == 50


@streams("t: {exclude: [secret]}", source=TABLE, target=DDL)
async def test_a_column_that_the_mapping_lets_in_or_an_operator_names_is_copied(
    shared: Shared,
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    assert target.value("select count(secret) from t") == 0
    await shared.change("t: {}")
    with writing(source, "t"):
        source.execute("update t set v = 'first change' where id = 50")

        async def is_there() -> bool:
            return target.value("select count(secret) from t where id between 5 and 90") == 86

        await shared.eventually(is_there)
    await shared.caught_up()
    await equal(shared, source, target, "select * from t order by id")
    # A foreign session changes rows of the target: the run restores only the named column.
    target.execute("update t set v = 'theirs', secret = 'theirs' where id in (8, 9)")
    address = TargetAddress.parse(shared.settings.target.url)
    options = Resync(Mode.DIFF, columns=("secret",)).to_json()
    table, where = shared.own("t"), {"database": None, "sid": None}
    await request(address, "resync", table, **where, options=options)
    await shared.eventually(
        lambda: _true(target.value("select count(*) from t where secret = 'theirs'") == 0)
    )
    await shared.caught_up()
    assert target.value("select count(*) from t where v = 'theirs'") == 2
    options = Resync(Mode.DIFF, columns=("sekret",)).to_json()
    with pytest.raises(MappingError, match='no column "sekret"'):
        await request(address, "resync", table, **where, options=options)


@streams("t: {}", source=TABLE)
async def test_a_column_that_an_operator_adds_to_the_target_is_copied(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("alter table t add column n serial; update t set v = 'x' where id = 1")
    await shared.table_state("t", "error")
    assert "copies the values" in (await shared.table("t"))["error"]
    target.execute("alter table t add column n int")
    await equal(shared, source, target, "select * from t order by id")
    # An operator dropped a column at the target by mistake: the run restores the column.
    target.execute("alter table t drop column secret")
    source.execute("update t set v = 'y' where id = 2")
    await shared.table_state("t", "error")
    target.execute("alter table t add column secret text")
    query = "select id, v, secret, n from t order by id"
    await equal(shared, source, target, query)


@streams("t: {exclude: [secret]}", source=TABLE)
async def test_a_column_of_set_that_the_target_lacked_is_copied_once_it_is_there(
    shared: Shared,
) -> None:
    """Without changes, `resume` starts the backfill; a table that a change stopped needs no
    command.
    """
    source, target = shared.source, shared.target

    def is_filled(here: str, there: str) -> bool:
        return source.execute(f"select id, v, {here} from t order by id") == (
            target.execute(f"select id, v, {there} from t order by id")
        )

    await shared.caught_up()

    async def error_has(text: str) -> None:
        async def is_there() -> bool:
            found = await shared.table("t")
            return found["state"] == "ready" and text in str(found["error"])

        await shared.eventually(is_there)

    rule = "t: {{exclude: [secret], set: {{a: upper(v){}}}}}"
    await shared.change(rule.format(""))
    await error_has('no column "a"')
    await error_has(f"run: streamer resume {shared.own('t')} --database")
    target.execute("alter table t add column a text")
    address = TargetAddress.parse(shared.settings.target.url)
    await request(address, "resume", shared.own("t"), database=None, sid=None)
    await shared.eventually(lambda: _true(is_filled("upper(v)", "a")))

    await shared.change(rule.format(", b: 'v || id'"))
    await error_has('no column "b"')
    source.execute("update t set v = 'first change' where id = 50")
    await shared.table_state("t", "error")
    target.execute("alter table t add column b text")
    await shared.eventually(lambda: _true(is_filled("upper(v), v || id", "a, b")))
    await shared.caught_up()
    assert (await shared.table("t"))["error"] is None
    unfilled = f"select unfilled from streamer.relation where source = '{shared.own('t')}'"
    assert target.value(unfilled) == []
