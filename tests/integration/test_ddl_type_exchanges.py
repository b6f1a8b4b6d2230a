"""`ddl: capture`: new types replace the types of columns, and columns get values that no cast
gives.
"""

import asyncio
from pathlib import Path

import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.drain import drainer
from streamer.schema_changes import definition_builder
from tests.support.definitions import everything
from tests.support.postgres import Database, contents, database
from tests.support.shared import Shared, streams
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = [
    pytest.mark.usefixtures("without_spark", "short_backoffs"),
    pytest.mark.hostile_sessions,
]

GROUP = "ddl: capture\ncreate: all\non_ddl: {drop_column: apply, change_type: apply}"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition_builder, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(drainer, "ERROR_RETRY_SECONDS", 0.3)


def state(db: Database, tables: list[str]) -> dict[str, list[str]]:
    """Return the definitions and rows of some tables, and all types."""
    return everything(db, tables) | {t: sorted(map(str, contents(db, t))) for t in tables}


async def alike(streamer: Streamer, source: Database, target: Database, tables: list[str]) -> None:
    """Wait until the target has the source's rows, definitions and types."""
    await streamer.caught_up()

    async def are_so() -> bool:
        here, there = [await asyncio.to_thread(state, db, tables) for db in (source, target)]
        return here == there

    try:
        await streamer.eventually(are_so)
    except AssertionError as exc:
        here, there = state(source, tables), state(target, tables)
        differing = {name: (here[name], there[name]) for name in here if here[name] != there[name]}
        records = target.execute("select changes, statements, reason from streamer.ddl order by id")
        lines = [f"{name}: {pair}" for name, pair in differing.items()]
        raise AssertionError("\n".join([*lines, *map(str, records)])) from exc


FINISHED = "(case {c}::text when 'done' then 'finished' else {c}::text end)"
MOVE = (
    "alter table t_{k} alter s drop default, alter s type {to} using "
    + FINISHED.format(c="s")
    + "::{to}, alter s set default 'new'"
)
MOVE_OTHER = "alter table u_{k} alter s type {to}[] using null, alter w type {to} using null"
LABELS = "enum ('new', 'halted', 'finished')"

MIGRATIONS = {
    "through_text": [
        "alter table t_{k} alter s drop default",
        "alter table t_{k} alter s type text using s::text",
        "alter table u_{k} alter s type text[], alter w type text",
        "update t_{k} set s = 'finished' where s = 'done'; update u_{k} set s = null, w = 'new'",
        "drop type st_{k}",
        "create type st_{k} as " + LABELS,
        "alter table t_{k} alter s type st_{k} using s::st_{k}",
        "alter table u_{k} alter s type st_{k}[] using s::st_{k}[]",
        "alter table u_{k} alter w type st_{k} using w::st_{k}",
        "alter table t_{k} alter s set default 'new'",
    ],
    "new_type": [
        "create type new_{k} as " + LABELS,
        MOVE.replace("{to}", "new_{k}"),
        MOVE_OTHER.replace("{to}", "new_{k}"),
        "drop type st_{k}",
        "alter type new_{k} rename to st_{k}",
    ],
    "renamed_last": [
        "create type new_{k} as " + LABELS,
        MOVE.replace("{to}", "new_{k}"),
        MOVE_OTHER.replace("{to}", "new_{k}"),
        "alter type st_{k} rename to old_{k}",
        "alter type new_{k} rename to st_{k}",
        "drop type old_{k}",
    ],
    "renamed_first": [
        "alter type st_{k} rename to old_{k}",
        "create type st_{k} as " + LABELS,
        MOVE.replace("{to}", "st_{k}"),
        MOVE_OTHER.replace("{to}", "st_{k}"),
        "drop type old_{k}",
    ],
}
DDL = """
create type st_{k} as enum ('new', 'open', 'done');
create table t_{k} (id int primary key, s st_{k} not null default 'new', v text);
create table u_{k} (id int primary key, s st_{k}[], w st_{k});
create index by_s_{k} on t_{k} (s, v);
alter table t_{k} add constraint has_s_{k} check (s is not null or v is null);
insert into t_{k} values (1, 'new', 'a'), (2, 'done', 'b');
insert into u_{k} values (1, '{{open,done}}', 'done');
"""
ALL_DDL = "".join(DDL.format(k=kind) for kind in MIGRATIONS)
TABLES = [f"{t}_{kind}" for kind in MIGRATIONS for t in "tu"]


def rules(rule: str = "") -> str:
    """Give each of TABLES the same rule."""
    return "\n".join(f"{table}: {rule}" for table in TABLES)


@pytest.mark.parametrize("together", [False, True])
async def test_an_enum_gets_other_labels_in_each_way_that_migrations_know(
    source: Database, target: Database, stream: MakeStreamer, together: bool
) -> None:
    tables = [f"{t}_{kind}" for kind in MIGRATIONS for t in "tu"]
    for kind in MIGRATIONS:
        source.execute(DDL.format(k=kind))
    async with stream("\n".join(f"{table}:" for table in tables), group=GROUP) as streamer:
        await streamer.caught_up()
        for kind, commands in MIGRATIONS.items():
            before = "insert into t_{k} values (3, 'open', 'c'); delete from t_{k} where id = 3"
            after = "insert into t_{k} values (4, 'finished', 'd'), (5, 'halted', 'e')"
            texts = [text.format(k=kind) for text in (before, *commands, after)]
            for text in ["; ".join(texts)] if together else texts:
                await asyncio.to_thread(source.execute, text)
        await alike(streamer, source, target, tables)


@streams(rules("{truncate_target: true}"), source=ALL_DDL, group=GROUP)
async def test_a_copy_takes_in_types_that_others_have_replaced(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for table in TABLES:
        await shared.ask("pause", table)
    for table in TABLES:
        await shared.table_state(table, "paused")
    for kind, commands in MIGRATIONS.items():
        after = "insert into t_{k} values (4, 'finished', 'd'), (5, 'halted', 'e')"
        for text in (*commands, after):
            await asyncio.to_thread(source.execute, text.format(k=kind))
    for number, table in enumerate(TABLES):
        mode = {"mode": "diff"} if number in (0, 3) else {}
        await shared.ask("resync", table, **mode)
    for table in TABLES:
        await shared.table_state(table, "ready")
    await alike(shared, source, target, TABLES)


COMPUTED_DDL = """
create table j (id int primary key, c text not null, d varchar(9) default 'q');
create table n (id int primary key, c text, d text);
create table e (id int primary key, c text not null default 'low', at int);
create domain email as text constraint at check (value like '%@%');
create table d (id int primary key, m email not null default 'x@y', l email[]);
create type place as (street text, number int);
create table p (id int primary key, p place, q place[]);
create index on j (c); create unique index on n (c, id); create index on e (c, at) where id > 0;
alter table n add constraint long check (length(c) > 0 or c is null);
insert into j values (1, 'hello', 'a'), (2, '7', null);
insert into n values (1, null, ''), (2, '12', null);
insert into e values (1, 'low', 100), (2, 'very high', 200);
insert into d values (1, 'a@b', '{a@b,c@d}'), (2, 'e@f', null);
insert into p values (1, row('x', 1), array[row('y', 2)::place]), (2, null, null);
"""
COMPUTED = [
    (
        "alter table j alter c type jsonb using jsonb_build_object('text', c), alter d drop default,"
        " alter d type jsonb using jsonb_build_object('d', d), alter d set default '{}'"
    ),
    "insert into j values (3, '[1]')",
    (
        "alter table n drop constraint long, alter c type int using coalesce(nullif(c, '')::int, -1),"
        " alter c set not null, alter c set default 5"
    ),
    "alter table n alter d type text using coalesce(d, 'none'), alter d set not null",
    "insert into n (id, d) values (3, 'd')",
    "create type level as enum ('low', 'high')",
    (
        "alter table e alter c drop default, alter c type level using"
        " (case when c = 'low' then 'low' else 'high' end)::level, alter c set default 'high',"
        " alter at type timestamptz using to_timestamp(at)"
    ),
    "insert into e (id) values (3)",
    "alter table d alter m drop default, alter m type text, alter l type text[]",
    "drop domain email; create domain email as text constraint at check (value like '%@%.%')",
    (
        "alter table d alter m type email using m || '.org', alter l type email[]"
        " using array[m || '.org'], alter m set default 'x@y.z'"
    ),
    "insert into d (id) values (3)",
    "create type place_new as (number int, street text, zip text)",
    (
        "alter table p alter p type place_new using row((p).number, (p).street, 'z')::place_new,"
        " alter q type place_new[] using array[row(id, 's', null)::place_new]"
    ),
    "alter type place rename to place_old; alter type place_new rename to place",
    "insert into p values (3, row(3, 'c', 'z'), null); drop type place_old",
]


TOUCH = """
update j set c = c || 'x'; update n set d = 'e' where id = 2; update e set at = 9;
update d set l = l || l; update p set q = q || q, p = row('n', 9)
"""


def staged_types(db: Database) -> set[str]:
    """Return the types of the columns of streamer's staging tables, in all of its sessions."""
    rows = db.execute(
        "select distinct format_type(a.atttypid, null) from pg_attribute a"
        " join pg_class c on c.oid = a.attrelid where c.relname like 'streamer\\_stage\\_%'"
        " and not a.attisdropped"
    )
    return {str(name) for (name,) in rows}


@pytest.mark.parametrize("together", [False, True])
async def test_values_that_using_computes_come_whatever_the_target_can_cast(
    source: Database, target: Database, stream: MakeStreamer, together: bool
) -> None:
    source.execute(COMPUTED_DDL)
    tables = ["j", "n", "e", "d", "p"]
    async with stream("\n".join(f"{table}:" for table in tables), group=GROUP) as streamer:
        await streamer.caught_up()
        source.execute(TOUCH)
        await streamer.caught_up()
        assert staged_types(target) >= {"email[]", "place"}
        for text in ["; ".join(COMPUTED)] if together else COMPUTED:
            await asyncio.to_thread(source.execute, text)
        await alike(streamer, source, target, tables)


SHAPES_DDL = """
create type st as enum ('new', 'open', 'done');
create table h (id int primary key, s st);
create table o (id int primary key, s st not null default 'new');
create table m (id int, at int, s st, primary key (id, at)) partition by range (at);
create table m1 partition of m for values from (0) to (10);
create table m2 partition of m for values from (10) to (20) partition by list (at);
create table m21 partition of m2 default;
insert into h values (1, 'new'), (2, 'open'); insert into o values (1, 'open');
insert into m values (1, 1, 'done'), (2, 12, 'open');
"""
SHAPES = "h: {type: history}\no:\nm: {partitioned: true}"


@streams(SHAPES, source=SHAPES_DDL, group=GROUP)
async def test_types_of_histories_and_partitions_are_replaced(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("update h set s = 'open' where id = 1; delete from h where id = 2")
    await shared.caught_up()
    for command in (
        "create type st2 as enum ('finished', 'open', 'new')",
        "alter table h alter s type st2 using s::text::st2",
        "insert into h values (3, 'finished')",
        "alter table o alter s drop default, alter s type st2 using 'finished'",
        "alter table m alter s type st2 using 'finished'",
        "drop type st; alter type st2 rename to st; insert into m values (3, 3, 'new')",
        "insert into o values (2, 'finished'); insert into h values (4, 'new')",
    ):
        await asyncio.to_thread(source.execute, command)
    await alike(shared, source, target, ["o", "m"])
    versions = "select id, s::text from h order by id, kvsz_start, s"
    assert target.execute(versions) == [
        *((1, "new"), (1, "open"), (2, "open"), (3, "finished"), (4, "new"))
    ]


@pytest.mark.parametrize("together", [False, True])
@streams(rules("{type: history}"), source=ALL_DDL, group=GROUP)
async def test_versions_that_have_ended_keep_their_values_in_each_way_to_exchange_an_enum(
    shared: Shared, together: bool
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    for kind, commands in MIGRATIONS.items():
        before = (
            "insert into t_{k} values (3, 'open', 'c'); delete from t_{k} where id = 3;"
            "update u_{k} set w = 'open', s = '{{done}}'"
        )
        after = "insert into t_{k} values (4, 'finished', 'd'), (5, 'halted', 'e')"
        texts = [text.format(k=kind) for text in (before, *commands, after)]
        for text in ["; ".join(texts)] if together else texts:
            await asyncio.to_thread(source.execute, text)
    await shared.caught_up()
    columns = "where kvsz_end = '9999-01-01 00:00:00+00' order by id"
    for table in TABLES:
        names = "id, s::text, v" if table.startswith("t") else "id, s::text, w::text"
        rows = source.execute(f"select {names} from {table} order by id")

        async def is_equal(read: str = f"select {names} from {table} {columns}") -> bool:
            return await asyncio.to_thread(target.execute, read) == rows  # noqa: B023

        await shared.eventually(is_equal)
    labels = "select e::text from unnest(enum_range(null::st_{k})) e"
    for kind in MIGRATIONS:
        ended = f"select s::text from t_{kind} where kvsz_deleted"
        assert target.execute(ended) == [("open",)]
        wanted, kept = (db.execute(labels.format(k=kind)) for db in (source, target))
        assert kept[:3] == wanted
        assert set(kept[3:]) == {("open",), ("done",)}
    former = (
        "select typname from pg_type where typname similar to '(old|new)%' and typtype = 'e'"
        f" and typnamespace = '{target.schema}'::regnamespace"
    )
    assert target.execute(former) == []


@pytest.mark.parametrize("resyncs", [False, True])
@streams(
    "h: {type: history}\no: {type: history}\nm: {partitioned: true}",
    source=SHAPES_DDL,
    group=GROUP,
)
async def test_an_enum_of_the_target_gets_the_label_of_versions_that_have_ended(
    shared: Shared, resyncs: bool
) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    source.execute("update h set s = 'done' where id = 1; update h set s = 'new' where id = 1")
    source.execute("create type st2 as enum ('new', 'open')")
    source.execute("alter table o alter s drop default, alter s type st2 using s::text::st2")
    await shared.caught_up()
    if resyncs:
        await shared.ask("pause", "h")
        await shared.table_state("h", "paused")
    await asyncio.to_thread(
        source.execute,
        "alter table h alter s type st2 using s::text::st2; insert into h values (3, 'open')",
    )
    if resyncs:
        await shared.ask("resync", "h", mode="diff")
    await shared.caught_up()
    await asyncio.to_thread(source.execute, "alter type st2 add value 'old' before 'open'")
    await asyncio.to_thread(source.execute, "alter type st2 add value 'last'")
    await shared.caught_up()
    labels = "select array_agg(e::text) from unnest(enum_range(null::st2)) e"
    assert target.value(labels) == ["new", "old", "open", "done", "last"]
    assert target.value("select count(*) from h where s = 'open'") == 2
    assert target.value("select count(*) from h where s = 'done'") == 1
    assert ("waiting",) not in shared.captured("state")


@streams("o:", source=SHAPES_DDL, group=GROUP)
async def test_a_type_that_others_use_at_the_target_keeps_its_name(shared: Shared) -> None:
    source, target = shared.source, shared.target
    await shared.caught_up()
    target.execute("create function report (st) returns int language sql as 'select 1'")
    source.execute("create type st2 as enum ('new')")
    source.execute(
        "alter table o alter s drop default, alter s type st2 using 'new';"
        "drop table h, m; drop type st; alter type st2 rename to st"
    )
    await shared.table_state("o", "error")
    error = str((await shared.table("o"))["error"])
    report, st = map(shared.own, ("report", "st"))
    assert f"is still used by function {report}({st})" in error
    target.execute("drop function report")
    await alike(shared, source, target, ["o"])


async def test_two_tenants_exchange_a_type_that_both_have(
    shared_server: Server, source: Database, target: Database, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    with database(shared_server, "second") as second:
        for db in (source, second):
            db.execute(SHAPES_DDL)
        rules = 'o: {target: "{sid}.o"}'
        write_config(path, source, target, rules, sid="a", others={"b": second}, group=GROUP)
        streamer = Streamer(path)
        streamer.start()

        async def states() -> list[str]:
            return [each["tables"][0]["state"] for each in await streamer.statuses()]

        async def one_stands() -> bool:
            return sorted(await states()) == ["error", "ready"]

        def read() -> list[bool]:
            query = "select id, s::text, pg_typeof(s)::text from {} order by id"
            return [
                target.execute(query.format(f"{sid}.o")) == db.execute(query.format("o"))
                for sid, db in (("a", source), ("b", second))
            ]

        async def are_alike() -> bool:
            return all(await asyncio.to_thread(read))

        try:
            await streamer.caught_up()
            for db in (source, second):
                for command in (
                    "create type st2 as enum ('finished')",
                    "alter table o alter s drop default, alter s type st2 using 'finished'",
                    "drop table h, m; drop type st",
                    "alter type st2 rename to st; insert into o values (5, 'finished')",
                ):
                    await asyncio.to_thread(db.execute, command)
                if db is source:
                    await streamer.eventually(one_stands)
            await streamer.eventually(are_alike)
            await streamer.caught_up()
            assert target.value("select count(*) from pg_type where typname like 'st%'") == 1
        finally:
            await streamer.stop()


@pytest.mark.parametrize(
    ("commands", "value"),
    [
        (("alter type st rename value 'done' to 'over'",), "s"),
        (
            (
                "alter type pair add attribute c int",
                "alter type pair rename attribute a to z",
            ),
            "p",
        ),
        (("alter type pair add attribute c int; alter type pair rename attribute a to z",), "p"),
    ],
    ids=["label", "attribute", "attributes_of_one_transaction"],
)
async def test_a_type_of_the_tables_of_two_tenants_changes_for_both_or_waits(
    shared_server: Server,
    source: Database,
    target: Database,
    tmp_path: Path,
    commands: tuple[str, ...],
    value: str,
) -> None:
    path = tmp_path / "config.yaml"
    with database(shared_server, "second") as second:
        for db in (source, second):
            db.execute(
                "create type st as enum ('new', 'done'); create type pair as (a int, b text);"
                "create table o (id int primary key, s st, p pair);"
                "insert into o select n, 'done', row(n, 'x'::text)::pair from generate_series(1, 3) n"
            )
        rules = 'o: {target: "{sid}.o"}'
        write_config(path, source, target, rules, sid="a", others={"b": second}, group=GROUP)
        streamer = Streamer(path)
        streamer.start()

        def read(sid: str) -> list[tuple[object, ...]]:
            return target.execute(f"select id, {value}::text from {sid}.o order by id")

        def expected(db: Database) -> list[tuple[object, ...]]:
            return db.execute(f"select id, {value}::text from o order by id")

        async def has_rows(sid: str, db: Database) -> bool:
            here, there = await asyncio.to_thread(read, sid), await asyncio.to_thread(expected, db)
            return here == there

        async def both_alike() -> bool:
            return await has_rows("a", source) and await has_rows("b", second)

        async def all_ready() -> bool:
            return all(each["tables"][0]["state"] == "ready" for each in await streamer.statuses())

        async def a_is_done() -> bool:
            states = [each["tables"][0]["state"] for each in await streamer.statuses()]
            return states[0] == "error" or await has_rows("a", source)

        try:
            await streamer.caught_up()
            for command in commands:
                await asyncio.to_thread(source.execute, command)
            await asyncio.to_thread(source.execute, "insert into o (id) values (4)")
            await streamer.eventually(a_is_done)
            # The other tenant has not changed its type, and keeps its rows and takes new ones.
            await asyncio.to_thread(second.execute, "insert into o values (5, 'done', row(5, 'y'))")
            await streamer.eventually(lambda: has_rows("b", second))
            for command in commands:
                await asyncio.to_thread(second.execute, command)
            await streamer.eventually(both_alike)
            await streamer.eventually(all_ready)
        finally:
            await streamer.stop()
