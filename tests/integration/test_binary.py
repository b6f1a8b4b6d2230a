"""Binary transport: the results of text, and text as soon as a type does not fit."""

import pytest
from structlog.testing import capture_logs

from streamer.apply.rows.binary_transfer import BINARY_TYPES, INTERVALS, binary_types
from streamer.postgres.quoting import quote_literal
from tests.support.postgres import (
    Database,
    assert_same,
    drop_database,
    version_of_targets,
    version_of_tests,
)
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.values import ROWS, SAMPLES, TYPES, UPDATES

pytestmark = pytest.mark.usefixtures("without_spark")

BINARY = "transport: binary"
BINARY_ASKED = "binary 'true'"
T = "create table t (id int primary key, v text)"
SAFE = binary_types(int(version_of_tests()) * 1_00_00, int(version_of_targets()) * 1_00_00)
"""OIDs of types that travel in binary between the servers of this run."""


def asked(source: Database) -> str | None:
    """Return the options of START_REPLICATION; None before the stream starts."""
    queries = source.execute(
        "select a.query from pg_stat_activity a join pg_replication_slots s on s.active_pid = a.pid"
        f" where s.database = '{source.name}' and not s.temporary and a.query like 'START_REPL%'"
    )
    return str(queries[0][0]) if queries else None


def is_binary(source: Database) -> bool:
    """Whether START_REPLICATION asked for binary."""
    query = asked(source)
    assert query is not None
    return BINARY_ASKED in query


async def until_text(source: Database, streamer: Streamer) -> None:
    """Wait until the stream has begun again, in text."""

    async def is_text() -> bool:
        pipeline = streamer.engine.supervisors[0].pipeline
        is_up = pipeline is not None and pipeline.health.state == "streaming"
        query = asked(source)
        return is_up and query is not None and BINARY_ASKED not in query

    await streamer.eventually(is_text)


def both_columns(name: str) -> str:
    """Define a column of the type, and a column of its array type."""
    return f'"{name}" pg_catalog."{name}", "{name}s" pg_catalog."{name}"[]'


HAS_XML = "(select setting like '%libxml%' from pg_config where name = 'CONFIGURE')"
NAMES = [name for name, oids in BINARY_TYPES.items() if name != "xml" and {*oids} <= SAFE]
EVERY = f"""
create table t (id int primary key, {", ".join(map(both_columns, NAMES))});
do $$ begin
    if {HAS_XML} then
        alter table t add {both_columns("xml").replace(", ", ", add ")};
    end if;
end $$;
-- FULL sends every column twice.
alter table t replica identity full
"""


@streams("t: {initial: none}", source=EVERY, group=BINARY)
async def test_every_type_of_the_list(shared: Shared) -> None:
    source, target = shared.source, shared.target
    assert set(SAMPLES) == set(BINARY_TYPES)
    names = [*NAMES, *(["xml"] if source.value(f"select {HAS_XML}") else [])]
    await shared.caught_up()
    for number in range(max(map(len, SAMPLES.values())) + 1):
        row = [str(number)]
        for name in names:
            kind, samples = f'pg_catalog."{name}"', SAMPLES[name]
            value = "null" if number == 0 else quote_literal(samples[number % len(samples)])
            all_values = ", ".join(map(quote_literal, samples))
            row += [f"{value}::{kind}", f"array[{all_values}, {value}]::{kind}[]"]
        source.execute(f"insert into t values ({', '.join(row)})")
    await shared.caught_up()
    assert_same(source, target, "t")
    assert is_binary(source)
    source.execute("update t set text = 'u' where id < 3; update t set id = -id where id > 3")
    source.execute("delete from t where id = 0")
    await shared.caught_up()
    assert_same(source, target, "t")
    assert is_binary(source)


LISTED = ",".join(map(str, sorted(SAFE)))
OWN = f"""
select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
where attrelid = 'every'::regclass and attnum > 0 and atttypid = any ('{{{LISTED}}}')
"""
PLAIN = f"""
{TYPES};
do $$ begin execute format('create table plain as select %s from every', ({OWN})); end $$;
alter table plain add primary key (id)
"""


@streams("plain: {initial: none}", source=PLAIN, group=BINARY)
async def test_the_edges_of_values_that_text_is_tested_with(shared: Shared) -> None:
    source, target = shared.source, shared.target
    own = source.value(OWN)
    await shared.caught_up()
    source.execute(f"{ROWS}; insert into plain select {own} from every")
    await shared.caught_up()
    assert_same(source, target, "plain")
    source.execute(UPDATES.replace("every", "plain"))
    await shared.caught_up()
    assert_same(source, target, "plain")
    assert is_binary(source)


KEYS = {
    "numeric": ("1.0", "1.00", "1.000", "2"),
    "float8": ("0", "-0", "NaN", "1"),
    "char(5)": ("a", "b", "c", "d"),
    "interval": ("1 mon", "30 days", "720:00:00", "1 day"),
    "timetz": ("00:00:00+00", "01:00:00+01", "02:00:00+02", "00:00:00+03"),
    "jsonb": ("1.0", "1", "1.00", "[]"),
    "int[]": ("{1}", "[0:0]={1}", "{}", "{1,2}"),
    'text collate "C"': ("", "a", "á", "\\N"),
}
if not INTERVALS <= SAFE:
    del KEYS["interval"]


@pytest.mark.parametrize("transport", ["text", "binary"])
@streams(
    "\n".join(f"t{number}: {{initial: none}}" for number in range(len(KEYS))),
    source="; ".join(
        f"create table t{number} (k {kind} primary key, v text, n int)"
        for number, kind in enumerate(KEYS)
    ),
    group="transport: <transport>",
)
async def test_keys_whose_equality_is_not_that_of_their_bytes(
    shared: Shared, transport: str
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for number, values in enumerate(KEYS.values()):
        a, b, _, d = map(quote_literal, values)
        t = f"t{number}"
        # All in the same window, so that the changes are folded.
        source.execute(
            f"""
            insert into {t} values ({a}, repeat('long ', 5000), 1), ({d}, 'd', 1);
            delete from {t} where k = {a};
            insert into {t} values ({b}, 'b', 2) on conflict do nothing;
            update {t} set k = {a}, n = 3 where k = {b};
            update {t} set n = n + 1;
            update {t} set k = {b}, v = v || '!' where k = {a};
            delete from {t} where k = {b}; insert into {t} values ({a}, 'again', 9);
            update {t} set k = {b} where k = {a};
            """
        )
    await shared.caught_up()
    for number, values in enumerate(KEYS.values()):
        source.execute(f"update t{number} set k = {quote_literal(values[0])} where v = 'again'")
        source.execute(
            f"insert into t{number} values ({quote_literal(values[2])}, 'c', 0) on conflict do nothing"
        )
    await shared.caught_up()
    for number in range(len(KEYS)):
        assert_same(source, target, f"t{number}")
    assert is_binary(source) is (transport == "binary")


@pytest.mark.since(17)  # from a newer to an older server, intervals come as text
@streams(
    "t: {initial: none}",
    source="create table t"
    " (id int primary key, n numeric, ts timestamp, c char(2), b varbit, i interval)",
    target="create table t (id int primary key, n numeric(5, 1), ts timestamp(0), c char(4),"
    " b varbit(4), i interval day to second(0))",
    group=BINARY,
)
async def test_modifiers_of_the_target_hold(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute(
        "insert into t values (1, 1.25, '2020-01-01 00:00:00.5', 'x', '101', '1 day 00:00:01.5')"
    )
    await shared.caught_up()
    source.execute("update t set n = 2.35; insert into t values (2, 99.99)")
    await shared.caught_up()
    assert target.execute("select t::text from t order by id") == [
        ('(1,2.4,"2020-01-01 00:00:01","x   ",101,"1 day 00:00:02")',),
        ("(2,100.0,,,,)",),
    ]
    source.execute("insert into t values (3, 12345)")
    await shared.table_state("public.t", "error")
    source.execute("delete from t where id = 3")
    assert (await shared.table("public.t"))["error"].startswith("target: numeric field overflow")
    assert is_binary(source)


@streams(
    "t: {initial: none, exclude: [acl, m, p, r, ms]}",
    source="""
        create type mood as enum ('sad'); create type pair as (a int, b mood);
        create table t (acl aclitem, id int primary key, m mood, v text, p pair, r regclass, ms mood[], w text);
        alter table t replica identity full
        """,
    target="create table t (w text, id int primary key, v text)",
    group=BINARY,
)
async def test_columns_that_are_not_written_may_be_of_any_type(shared: Shared) -> None:
    source, target = shared.source, shared.target
    row = "'postgres=r/postgres', {}, 'sad', {}, '(1,sad)', 't', '{{sad}}', 'w'"
    await shared.caught_up()
    source.execute(
        f"insert into t values ({row.format(1, 'null')}), ({row.format(2, 'repeat($$x$$, 5000)')})"
    )
    source.execute("insert into t (id, v, acl) values (3, 'only', null)")
    await shared.caught_up()
    source.execute(
        "update t set w = 'ww' where id > 1; update t set id = 10 where id = 1; delete from t where id = 3"
    )
    await shared.caught_up()
    select = "select w, id, v from t order by id"
    assert source.execute(select) == target.execute(select)
    assert is_binary(source)


NO_FIT = {
    ("v mood", "v mood"): "is of public.mood, which is not safe in binary",
    ("v mood[]", "v mood[]"): "is of public.mood[], which is not safe in binary",
    ("v regclass", "v regclass"): "is of regclass, which is not safe in binary",
    ("v int", "v bigint"): "is integer, and bigint at the target",
    ("v int", "v positive"): "is integer, and public.positive at the target",
    ("v positive", "v int"): "is of public.positive, which is not safe in binary",
}
"""The advice about a column, by the definitions at source and target."""


async def test_tables_that_do_not_qualify_for_binary_come_as_text(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for side, db in enumerate((source, target)):
        db.execute(
            "create type mood as enum ('sad'); create domain positive as int check (value > 0);"
            "create table other (id int primary key)"
        )
        for number, columns in enumerate(NO_FIT):
            db.execute(f"create table t{number} (id int primary key, {columns[side]})")
    names = [*(f"t{number}" for number in range(len(NO_FIT))), "other"]
    tables = "\n".join(f"{name}: {{initial: none}}" for name in names)
    with capture_logs() as logs:
        async with stream(tables, group=BINARY) as streamer:
            await streamer.caught_up()
            for number, (here, _) in enumerate(NO_FIT):
                value = {"v mood": "'sad'", "v mood[]": "'{sad}'", "v regclass": "'t0'"}
                source.execute(f"insert into t{number} values (1, {value.get(here, '7')})")
            source.execute("insert into other values (1)")
            await streamer.caught_up()
            for name in names:
                assert_same(source, target, name)
            assert not is_binary(source)
            told = {each["source"]: each for each in (await streamer.status())["tables"]}
    assert {each["transport"] for each in told.values()} == {"text"}
    reasons = [told[f"public.t{number}"]["transport_reason"] for number in range(len(NO_FIT))]
    assert reasons == [
        f'column "v" of table "public.t{number}" {because}'
        for number, because in enumerate(NO_FIT.values())
    ]
    (said,) = [entry for entry in logs if "transport instead" in entry["event"]]
    assert said["because"] in reasons
    assert said["source"] == "shop"
    of_other = f"another table of this source forces text: {said['because']}"
    assert told["public.other"]["transport_reason"] == of_other


async def test_a_column_that_does_not_fit_is_added_while_streaming(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(
            f"{T}; create table other (id int primary key, v text); create type mood as enum ('sad')"
        )
    tables = "t: {initial: none, on_column_added: add}\nother: {initial: none}"
    with capture_logs() as logs:
        async with stream(tables, group=BINARY) as streamer:
            await streamer.caught_up()
            assert is_binary(source)
            source.execute("insert into t select g, 'before' from generate_series(1, 100) g")
            source.execute("insert into other select g, 'o' from generate_series(1, 100) g")
            source.execute("alter table t add m mood")
            source.execute(
                "insert into t values (1000, 'after', 'sad'); update t set v = 'x', m = 'sad' where id < 50"
            )
            source.execute("insert into other select g, 'p' from generate_series(101, 200) g")
            await streamer.caught_up()
            await until_text(source, streamer)
            assert_same(source, target, "t")
            assert_same(source, target, "other")
            # Back to a fitting definition: the transport stays text, as long as the process lives.
            source.execute("alter table t drop m; insert into t values (1001, 'last')")
            target.execute("alter table t drop m")
            await streamer.caught_up()
            assert_same(source, target, "t")
            assert not is_binary(source)
    said = [entry for entry in logs if "transport instead" in entry["event"]]
    assert len(said) == 1, logs
    assert [entry for entry in logs if entry["log_level"] in ("warning", "error")] == said


@pytest.mark.parametrize("kind", ["real", "bigint", "text"])
async def test_a_type_that_changes_at_the_target_is_not_misread(
    kind: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute("create table t (id int primary key, n int)")
    async with stream("t: {initial: none}", group=BINARY) as streamer:
        await streamer.caught_up()
        source.execute("insert into t values (1, 1)")
        await streamer.caught_up()
        assert is_binary(source)
        # Four bytes are four bytes: only the catalog distinguishes a real from an integer.
        target.execute(f"alter table t alter n type {kind}")
        source.execute("insert into t values (2, 2), (3, null)")
        await streamer.caught_up()
        assert_same(source, target, "t")
        await until_text(source, streamer)
        source.execute("update t set n = n + 1")
        await streamer.caught_up()
        assert_same(source, target, "t")


async def test_the_source_sends_binary_changes_again_as_text(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(f"{T}; create table other (id int primary key, n int)")
    request = (
        "insert into streamer.request (relation_id, action) select id, '{}' from streamer.relation"
        " where source = 'public.t'; notify streamer"
    )
    async with stream("t: {initial: none}\nother: {initial: none}", group=BINARY) as streamer:
        await streamer.caught_up()
        target.execute(request.format("pause"))
        await streamer.table_state("public.t", "paused")
        source.execute("insert into t values (1, 'a'), (2, 'b'); update t set v = 'c' where id = 1")
        source.execute(
            "insert into other values (1, 1); alter table other alter n type bigint; insert into other values (2, 2)"
        )
        await until_text(source, streamer)
        source.execute("delete from t where id = 2; insert into t values (3, 'd')")
        assert target.execute("select * from t") == []
        target.execute(request.format("resume"))
        await streamer.caught_up()
        assert_same(source, target, "t")
        assert_same(source, target, "other")


SID_DDL = """
create table t (v text, sid <kind>, id int, primary key (sid, id));
insert into t values ('theirs', '1', 1);
create table h (id int not null, v text, sid <kind>, kvsz_start timestamptz not null,
    kvsz_end timestamptz not null, kvsz_deleted boolean not null)
"""


@pytest.mark.parametrize(
    ("kind", "sid", "binary"),
    [
        ("text", "42", True),
        ("varchar(10)", "42", True),
        ("char(4)", "42", True),
        # A number is a reason for text for all tables of a source, so this test has a separate
        # engine.
        ("int", "43", False),
    ],
)
@streams(
    "t: {initial: none}\nh: {initial: none, type: history}",
    source="create table t (id int primary key, v text); create table h (like t including all)",
    target=SID_DDL,
    group=BINARY,
    sid="'<sid>'",
)
async def test_the_sid_is_written_as_the_target_has_it(
    shared: Shared, kind: str, sid: str, binary: bool
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    assert is_binary(source) is binary
    source.execute(
        "insert into t values (1, 'one'), (2, 'two'); insert into h values (1, 'one'), (2, 'two')"
    )
    await shared.caught_up()
    source.execute(
        "update t set v = 'eins' where id = 1; delete from t where id = 2; insert into t values (3, null)"
    )
    source.execute(
        "update h set v = 'eins' where id = 1; delete from h where id = 2; update h set id = 9"
    )
    await shared.caught_up()
    assert target.execute("select trim(sid::text), id, v from t order by 1, 2") == [
        ("1", 1, "theirs"),
        (sid, 1, "eins"),
        (sid, 3, None),
    ]
    versions = target.execute(
        "select trim(sid::text), id, v, kvsz_deleted, kvsz_end > now() from h order by id, v desc"
    )
    assert versions == [
        (sid, 1, "one", False, False),
        (sid, 1, "eins", True, False),
        (sid, 2, "two", True, False),
        (sid, 9, "eins", False, True),
    ]


async def test_text_of_another_encoding(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    name = f"{source.name}_latin"
    source.server.execute(
        f"create database {name} template template0 encoding latin1 lc_collate 'C' lc_ctype 'C'"
    )
    original, source.name = source.name, name
    try:
        for db in (source, target):
            db.execute(
                "create table t (id int primary key, v text, c char(4), j jsonb, a text[], n name)"
            )
        async with stream("t: {initial: none}", group=BINARY) as streamer:
            await streamer.caught_up()
            source.execute("""insert into t values (1, 'Größe', 'é', '{"ü": "ß"}', '{à,b}', 'ñ')""")
            await streamer.caught_up()
            source.execute("update t set v = v || 'ÿ' where id = 1")
            await streamer.caught_up()
            assert_same(source, target, "t")
            assert is_binary(source)
    finally:
        drop_database(source.server, name)
        source.name = original


async def test_without_a_setting_a_source_comes_in_binary_as_soon_as_all_its_tables_qualify(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for db in (source, target):
        db.execute(f"{T}; create type mood as enum ('sad'); create table other (id int, m mood)")
    both = "t: {initial: none}\nother: {initial: none}"
    async with stream(both, group="transport: auto") as streamer:
        await streamer.caught_up()
        assert not is_binary(source)
        because = (
            'column "m" of table "public.other" is of public.mood, which is not safe in binary'
        )
        for name, reason in (
            ("public.other", because),
            ("public.t", f"another table of this source forces text: {because}"),
        ):
            table = await streamer.table(name)
            assert (table["transport"], table["transport_reason"]) == ("text", reason)
        for db in (source, target):
            db.execute("alter table other alter m type text")
        await streamer.stop()
    async with stream(both, group="transport: auto") as streamer:
        source.execute("insert into t values (1, 'a'); insert into other values (1, 'b')")
        await streamer.caught_up()
        assert is_binary(source)
        assert (await streamer.table("public.t"))["transport"] == "binary"
        assert_same(source, target, "t")
        assert_same(source, target, "other")
