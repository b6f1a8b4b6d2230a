"""Every type and its edges, streamed."""

import pytest

from tests.support.postgres import Database, contents
from tests.support.streamer import MakeStreamer
from tests.support.values import ROWS, TYPES, UPDATES

ODD_SETTINGS = """
set datestyle = 'German, DMY'; set intervalstyle = 'sql_standard'; set extra_float_digits = -3;
set bytea_output = 'escape'; set timezone = 'Asia/Kolkata'; set statement_timeout = '1h';
set idle_in_transaction_session_timeout = '300ms'; set lock_timeout = '1h'; set search_path = 'nowhere';
set transaction_read_only = off; set xmloption = document; set standard_conforming_strings = on
"""


def set_oddly(db: Database) -> None:
    """Give the database every default that changes how values look."""
    for statement in ODD_SETTINGS.split(";"):
        db.execute(statement.strip().replace("set ", f'alter database "{db.name}" set ', 1))


@pytest.mark.parametrize("odd", [False, True])
async def test_every_type_arrives(
    source: Database, target: Database, stream: MakeStreamer, odd: bool
) -> None:
    source.execute(TYPES)
    if odd:
        set_oddly(source)
        set_oddly(target)
    async with stream("every: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute(f"set search_path = public; {ROWS}")
        await streamer.caught_up()
        same(source, target)
        source.execute(f"set search_path = public; {UPDATES}")
        await streamer.caught_up()
        same(source, target)
        # One statement for all rows, and one row at a time, say the same.
        source.execute("set search_path = public; begin; update every set m = 'sad'; commit")
        await streamer.caught_up()
        same(source, target)


def same(source: Database, target: Database) -> None:
    text = (
        "set search_path = public; set datestyle = iso; set timezone = 'UTC'; set extra_float_digits = 1;"
        "select e::text from every e order by id"
    )
    assert source.execute(text) == target.execute(text)


async def test_definitions_are_made_alike(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(TYPES)
    async with stream("every: {initial: none}") as streamer:
        await streamer.caught_up()
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


async def test_a_partitioned_root_becomes_a_plain_table(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        """
        create table part (id int, day date, v text, primary key (id, day)) partition by range (day);
        create table part_1 partition of part for values from ('2020-01-01') to ('2021-01-01');
        create table part_2 (v text, day date not null, id int not null);
        alter table part attach partition part_2 for values from ('2021-01-01') to ('2022-01-01');
        """
    )
    async with stream("part: {initial: none}") as streamer:
        await streamer.caught_up()
        source.execute("insert into part values (1, '2020-05-05', 'a'), (2, '2021-05-05', 'b')")
        source.execute("update part set day = '2021-06-06' where id = 1")
        source.execute("update part_2 set v = 'bb' where id = 2")
        source.execute(
            "create table part_3 partition of part for values from ('2022-01-01') to ('2023-01-01')"
        )
        source.execute("insert into part values (3, '2022-03-03', 'c'); truncate part_1")
        await streamer.caught_up()
        assert contents(source, "part") == contents(target, "part")
        assert target.value("select relkind from pg_class where relname = 'part'") == "r"


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


async def test_hostile_names(source: Database, target: Database, stream: MakeStreamer) -> None:
    def quoted(name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    def key(name: str) -> str:
        table = quoted(name) if "." in name or '"' in name else name
        return "'" + table.replace("'", "''") + "'"

    columns = ", ".join(f"{quoted(name)} text" for name in HOSTILE if name != "sid")
    for name in HOSTILE:
        source.execute(f"create table {quoted(name)} (id int primary key, {columns})")
    mapping = "\n".join(f"{key(name)}: {{initial: none}}" for name in HOSTILE)
    async with stream(mapping) as streamer:
        await streamer.caught_up()
        for name in HOSTILE:
            source.execute(
                f"insert into {quoted(name)} (id, \"$1\") values (1, 'a'), (2, '%s {{}}');"
                f"update {quoted(name)} set \"it's\" = 'b' where id = 1;"
                f"update {quoted(name)} set id = 3 where id = 2; delete from {quoted(name)} where id = 1"
            )
        await streamer.caught_up()
        for name in HOSTILE:
            assert contents(source, quoted(name)) == contents(target, quoted(name))
