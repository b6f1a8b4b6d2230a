"""Every type with its edge values, streamed."""

from collections.abc import Iterator

import pytest

from streamer.commands.demo.embedded_servers import Server
from tests.support.postgres import Database, assert_same, contents, role_at
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer
from tests.support.values import ROWS, TYPES, UPDATES

ODD_SETTINGS = """
datestyle = 'German, DMY'; intervalstyle = 'sql_standard'; extra_float_digits = -3; bytea_output = 'escape';
timezone = 'Asia/Kolkata'; timezone_abbreviations = 'India'; lc_monetary = 'C'; xmloption = document;
xmlbinary = hex; array_nulls = off; transform_null_equals = on; standard_conforming_strings = off;
backslash_quote = off; escape_string_warning = on; quote_all_identifiers = on; search_path = 'nowhere';
client_encoding = 'LATIN1'; default_transaction_isolation = 'serializable'; default_transaction_read_only = on;
default_transaction_deferrable = on; row_security = off; plan_cache_mode = 'force_generic_plan';
check_function_bodies = off; synchronous_commit = off; statement_timeout = '300ms'; lock_timeout = '300ms';
idle_in_transaction_session_timeout = '300ms'; max_parallel_workers_per_gather = 0; enable_indexscan = off
"""
"""Defaults that change how values look or are read, and those that end slow statements."""


@pytest.fixture
def odd_role(shared_server: Server, target_server: Server) -> Iterator[str]:
    """A role with different settings, at both servers."""
    with role_at({shared_server, target_server}, "odd", "superuser replication") as name:
        yield name


def set_oddly(db: Database, role: str) -> None:
    """Connect as *role*, with every such default in this database."""
    for setting in ODD_SETTINGS.split(";"):
        db.execute(f'alter role {role} in database "{db.name}" set {setting.strip()}')
    db.url_user = role


@pytest.mark.parametrize("odd", [False, True])
async def test_every_type_arrives(
    odd_role: str,
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    odd: bool,
) -> None:
    """Copied, streamed, and copied again: all three make the same."""
    source.execute(f"{TYPES} {ROWS} create table slow (id int primary key, v text)")
    source.execute("insert into slow select g from generate_series(1, 800) g")
    target.execute(
        """
        create table slow (id int primary key, v text);
        create function wait() returns trigger language plpgsql as
          'begin perform pg_sleep(0.5); return new; end';
        create trigger wait before update on slow for each row execute function wait();
        alter table slow enable always trigger wait
        """
    )
    if odd:
        set_oddly(source, odd_role)
        set_oddly(target, odd_role)
    settings = "sync: {rows_per_second: 1000}"
    async with stream("every:\nslow:", settings=settings) as streamer:
        await streamer.caught_up()
        same(source, target)
        source.execute(UPDATES)
        source.execute("update slow set v = 'x' where id = 7")
        await streamer.caught_up()
        same(source, target)
        source.execute(f"delete from every where id <> 1; {ROWS.replace('(1,', '(6,', 1)}")
        await streamer.caught_up()
        same(source, target)
        # A statement for all rows, and a row at a time, give the same result.
        source.execute("begin; update every set m = 'sad'; update every set id = -id; commit")
        await streamer.caught_up()
        same(source, target)
        assert_same(source, target, "slow")
        target.execute(
            "update every set tx = 'spoilt', d = 0; insert into streamer.request (relation_id, action)"
            " select id, 'resync' from streamer.relation; notify streamer"
        )

        async def is_copied_again() -> bool:
            return bool(target.value("select min(attempt) >= 2 from streamer.relation"))

        await streamer.eventually(is_copied_again)
        await streamer.caught_up()
        same(source, target)
        assert_same(source, target, "slow")


def same(source: Database, target: Database) -> None:
    text = (
        "set datestyle = iso; set timezone = 'UTC'; set extra_float_digits = 1;"
        "select e::text from every e order by id"
    )
    assert source.execute(text) == target.execute(text)


@streams("every: {initial: none}", source=TYPES)
async def test_definitions_are_made_alike(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    definition = (
        "select attname, format_type(atttypid, atttypmod), attnotnull from pg_attribute"
        " where attrelid = 'every'::regclass and attnum > 0 order by attnum"
    )
    assert source.execute(definition) == target.execute(definition)
    key = (
        "select pg_get_constraintdef(oid) from pg_constraint where conrelid = 'every'::regclass"
        " and contype = 'p'"
    )
    assert source.execute(key) == target.execute(key)
    # The domain's own rules came along.
    with pytest.raises(Exception, match="positive_check"):
        target.execute("insert into every (id, pos, la) values (1, -1, '')")


@streams(
    "part: {initial: none}",
    source="""
        create table part (id int, day date, v text, primary key (id, day)) partition by range (day);
        create table part_1 partition of part for values from ('2020-01-01') to ('2021-01-01');
        create table part_2 (v text, day date not null, id int not null);
        alter table part attach partition part_2 for values from ('2021-01-01') to ('2022-01-01');
        """,
)
async def test_a_partitioned_root_becomes_a_plain_table(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("insert into part values (1, '2020-05-05', 'a'), (2, '2021-05-05', 'b')")
    source.execute("update part set day = '2021-06-06' where id = 1")
    source.execute("update part_2 set v = 'bb' where id = 2")
    source.execute(
        "create table part_3 partition of part for values from ('2022-01-01') to ('2023-01-01')"
    )
    source.execute("insert into part values (3, '2022-03-03', 'c'); truncate part_1")
    await shared.caught_up()
    assert contents(source, "part") == contents(target, "part")
    assert target.value("select relkind from pg_class where oid = 'part'::regclass") == "r"


HOSTILE = [
    'x"; drop table y; --',
    "select",
    "with.dot",
    "a,b",
    "100%s",
    "{curly}",
    "$1",
    "back\\slash",
    "emoji 😀",
    "n" * 63,
    "it's",
    "sid",
    "kvsz_start",
    "Case",
    "case",
]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def key_of(name: str) -> str:
    table = quoted(name) if "." in name or '"' in name else name
    return "'" + table.replace("'", "''") + "'"


COLUMNS = ", ".join(f"{quoted(name)} text" for name in HOSTILE if name != "sid")


@streams(
    "\n".join(f"{key_of(name)}: {{initial: none}}" for name in HOSTILE),
    source=";".join(
        f"create table {quoted(name)} (id int primary key, {COLUMNS})" for name in HOSTILE
    ),
)
async def test_hostile_names(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for name in HOSTILE:
        source.execute(
            f"insert into {quoted(name)} (id, \"$1\") values (1, 'a'), (2, '%s {{}}');"
            f"update {quoted(name)} set \"it's\" = 'b' where id = 1;"
            f"update {quoted(name)} set id = 3 where id = 2; delete from {quoted(name)} where id = 1"
        )
    await shared.caught_up()
    for name in HOSTILE:
        assert contents(source, quoted(name)) == contents(target, quoted(name))
