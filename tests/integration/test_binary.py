"""Binary transport: the same as text would say, and text as soon as something does not fit."""

import pytest
from structlog.testing import capture_logs

from streamer.apply.binary import BINARY_TYPES
from streamer.postgres.quoting import quote_literal
from tests.support.postgres import Database, assert_same, drop_database
from tests.support.streamer import MakeStreamer, Streamer
from tests.support.values import ROWS, SAMPLES, TYPES, UPDATES

pytestmark = pytest.mark.usefixtures("without_spark")

BINARY = "transport: binary"
BINARY_ASKED = "binary 'true'"
T = "create table t (id int primary key, v text)"


def asked(source: Database) -> str | None:
    """Return the options of START_REPLICATION; None before it."""
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


async def test_every_type_of_the_list(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    assert set(SAMPLES) == set(BINARY_TYPES)
    has_xml = "libxml" in str(
        source.execute("select setting from pg_config where name = 'CONFIGURE'")
    )
    names = [name for name in BINARY_TYPES if name != "xml" or has_xml]
    columns = [f'"{name}" pg_catalog."{name}", "{name}s" pg_catalog."{name}"[]' for name in names]
    source.execute(f"create table t (id int primary key, {', '.join(columns)})")
    # FULL sends every column twice.
    source.execute("alter table t replica identity full")
    async with stream("t: {initial: none}", group=BINARY) as streamer:
        await streamer.caught_up()
        for number in range(max(map(len, SAMPLES.values())) + 1):
            row = [str(number)]
            for name in names:
                kind, samples = f'pg_catalog."{name}"', SAMPLES[name]
                value = "null" if number == 0 else quote_literal(samples[number % len(samples)])
                all_values = ", ".join(map(quote_literal, samples))
                row += [f"{value}::{kind}", f"array[{all_values}, {value}]::{kind}[]"]
            source.execute(f"insert into t values ({', '.join(row)})")
        await streamer.caught_up()
        assert_same(source, target, "t")
        assert is_binary(source)
        source.execute("update t set text = 'u' where id < 3; update t set id = -id where id > 3")
        source.execute("delete from t where id = 0")
        await streamer.caught_up()
        assert_same(source, target, "t")
        assert is_binary(source)


async def test_the_edges_of_values_that_text_is_tested_with(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TYPES)
    listed = ",".join(str(oid) for oids in BINARY_TYPES.values() for oid in oids)
    own = source.execute(
        "select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute"
        " where attrelid = 'every'::regclass and attnum > 0"
        f" and atttypid = any ('{{{listed}}}')"
    )[0][0]
    source.execute(f"create table plain as select {own} from every")
    source.execute("alter table plain add primary key (id)")
    async with stream("plain: {initial: none}", group=BINARY) as streamer:
        await streamer.caught_up()
        source.execute(f"{ROWS}; insert into plain select {own} from every")
        await streamer.caught_up()
        assert_same(source, target, "plain")
        source.execute(UPDATES.replace("every", "plain"))
        await streamer.caught_up()
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


@pytest.mark.parametrize("transport", ["text", "binary"])
async def test_keys_whose_equality_is_not_that_of_their_bytes(
    transport: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    for number, kind in enumerate(KEYS):
        source.execute(f"create table t{number} (k {kind} primary key, v text, n int)")
    tables = "\n".join(f"t{number}: {{initial: none}}" for number in range(len(KEYS)))
    async with stream(tables, group=f"transport: {transport}") as streamer:
        await streamer.caught_up()
        for number, values in enumerate(KEYS.values()):
            a, b, _, d = map(quote_literal, values)
            t = f"t{number}"
            # All in one window, so that they are folded.
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
        await streamer.caught_up()
        for number, values in enumerate(KEYS.values()):
            source.execute(f"update t{number} set k = {quote_literal(values[0])} where v = 'again'")
            source.execute(
                f"insert into t{number} values ({quote_literal(values[2])}, 'c', 0) on conflict do nothing"
            )
        await streamer.caught_up()
        for number in range(len(KEYS)):
            assert_same(source, target, f"t{number}")
        assert is_binary(source) is (transport == "binary")


async def test_modifiers_of_the_target_hold(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        "create table t (id int primary key, n numeric, ts timestamp, c char(2), b varbit, i interval)"
    )
    target.execute(
        "create table t (id int primary key, n numeric(5, 1), ts timestamp(0), c char(4), b varbit(4), i interval day to second(0))"
    )
    async with stream("t: {initial: none}", group=BINARY) as streamer:
        await streamer.caught_up()
        source.execute(
            "insert into t values (1, 1.25, '2020-01-01 00:00:00.5', 'x', '101', '1 day 00:00:01.5')"
        )
        await streamer.caught_up()
        source.execute("update t set n = 2.35; insert into t values (2, 99.99)")
        await streamer.caught_up()
        assert target.execute("select t::text from t order by id") == [
            ('(1,2.4,"2020-01-01 00:00:01","x   ",101,"1 day 00:00:02")',),
            ("(2,100.0,,,,)",),
        ]
        source.execute("insert into t values (3, 12345)")
        await streamer.table_state("public.t", "error")
        source.execute("delete from t where id = 3")
        assert (await streamer.table("public.t"))["error"].startswith(
            "target: numeric field overflow"
        )
        assert is_binary(source)


async def test_columns_that_are_not_written_may_be_of_any_type(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        """
        create type mood as enum ('sad'); create type pair as (a int, b mood);
        create table t (acl aclitem, id int primary key, m mood, v text, p pair, r regclass, ms mood[], w text);
        alter table t replica identity full;
        """
    )
    target.execute("create table t (w text, id int primary key, v text)")
    row = "'postgres=r/postgres', {}, 'sad', {}, '(1,sad)', 't', '{{sad}}', 'w'"
    async with stream("t: {initial: none, exclude: [acl, m, p, r, ms]}", group=BINARY) as streamer:
        await streamer.caught_up()
        source.execute(
            f"insert into t values ({row.format(1, 'null')}), ({row.format(2, 'repeat($$x$$, 5000)')})"
        )
        source.execute("insert into t (id, v, acl) values (3, 'only', null)")
        await streamer.caught_up()
        source.execute(
            "update t set w = 'ww' where id > 1; update t set id = 10 where id = 1; delete from t where id = 3"
        )
        await streamer.caught_up()
        select = "select w, id, v from t order by id"
        assert source.execute(select) == target.execute(select)
        assert is_binary(source)


@pytest.mark.parametrize(
    ("here", "there", "because"),
    [
        (
            "v mood",
            "v mood",
            'column "v" of table "public.t" is of public.mood, which is not safe in binary',
        ),
        ("v mood[]", "v mood[]", "is of public.mood[], which is not safe in binary"),
        ("v regclass", "v regclass", "is of regclass, which is not safe in binary"),
        (
            "v int",
            "v bigint",
            'column "v" of table "public.t" is integer, and bigint at the target',
        ),
        ("v int", "v positive", "is integer, and public.positive at the target"),
        ("v positive", "v int", "is of public.positive, which is not safe in binary"),
    ],
)
async def test_what_does_not_fit_comes_as_text(
    here: str,
    there: str,
    because: str,
    source: Database,
    target: Database,
    stream: MakeStreamer,
) -> None:
    for db, column in ((source, here), (target, there)):
        db.execute(
            "create type mood as enum ('sad'); create domain positive as int check (value > 0)"
        )
        db.execute(
            f"create table t (id int primary key, {column}); create table other (id int primary key)"
        )
    value = {"v mood": "'sad'", "v mood[]": "'{sad}'", "v regclass": "'t'"}.get(here, "7")
    with capture_logs() as logs:
        async with stream("t: {initial: none}\nother: {initial: none}", group=BINARY) as streamer:
            await streamer.caught_up()
            source.execute(f"insert into t values (1, {value}); insert into other values (1)")
            await streamer.caught_up()
            assert_same(source, target, "t")
            assert_same(source, target, "other")
            assert not is_binary(source)
    (said,) = [entry for entry in logs if "transport instead" in entry["event"]]
    assert because in said["because"]
    assert said["source"] == "shop"


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
            # Back to a fitting definition: text it stays, as long as the process lives.
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
        # Four bytes are four bytes: nothing but a look at the catalog tells a real from an integer.
        target.execute(f"alter table t alter n type {kind}")
        source.execute("insert into t values (2, 2), (3, null)")
        await streamer.caught_up()
        assert_same(source, target, "t")
        await until_text(source, streamer)
        source.execute("update t set n = n + 1")
        await streamer.caught_up()
        assert_same(source, target, "t")


async def test_what_is_held_in_binary_comes_again_as_text(
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


@pytest.mark.parametrize(
    ("kind", "binary"), [("text", True), ("varchar(10)", True), ("char(4)", True), ("int", False)]
)
async def test_the_sid_is_written_as_the_target_has_it(
    kind: str, binary: bool, source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in ("t", "h"):
        source.execute(f"create table {name} (id int primary key, v text)")
    target.execute(
        f"create table t (v text, sid {kind}, id int, primary key (sid, id)); insert into t values ('theirs', '1', 1)"
    )
    target.execute(
        f"""create table h (id int not null, v text, sid {kind}, kvsz_start timestamptz not null,
              kvsz_end timestamptz not null, kvsz_deleted boolean not null)"""
    )
    tables = "t: {initial: none}\nh: {initial: none, type: history}"
    async with stream(tables, group=BINARY, sid="'42'") as streamer:
        await streamer.caught_up()
        assert is_binary(source) is binary
        source.execute(
            "insert into t values (1, 'one'), (2, 'two'); insert into h values (1, 'one'), (2, 'two')"
        )
        await streamer.caught_up()
        source.execute(
            "update t set v = 'eins' where id = 1; delete from t where id = 2; insert into t values (3, null)"
        )
        source.execute(
            "update h set v = 'eins' where id = 1; delete from h where id = 2; update h set id = 9"
        )
        await streamer.caught_up()
        assert target.execute("select trim(sid::text), id, v from t order by 1, 2") == [
            ("1", 1, "theirs"),
            ("42", 1, "eins"),
            ("42", 3, None),
        ]
        versions = target.execute(
            "select trim(sid::text), id, v, kvsz_deleted, kvsz_end > now() from h order by id, v desc"
        )
        assert versions == [
            ("42", 1, "one", False, False),
            ("42", 1, "eins", True, False),
            ("42", 2, "two", True, False),
            ("42", 9, "eins", False, True),
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
            ("public.t", f"another table of the source needs it: {because}"),
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
