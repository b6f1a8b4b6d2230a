"""Tables that a source gets, loses or renames during the stream, without a change of the rules."""

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from streamer.admin.live.events import SeenState, changes_between
from streamer.runtime.guards import source_monitor
from streamer.runtime.guards.publications import Reconciled
from streamer.runtime.guards.table_cases import TableCases
from streamer.runtime.session import reload_mapping
from streamer.source.connection import Connection
from streamer.source.slot_and_publications.guard_query import read_guard_facts
from tests.support.postgres import Database, version_of_tests
from tests.support.runbooks import block
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

SOON = "discovery_interval: 0.5"
CAPTURE = "ddl: capture"


async def tables(streamer: Streamer) -> dict[str, str]:
    return {table["source"]: table["state"] for table in (await streamer.status())["tables"]}


async def are(streamer: Streamer, **states: str) -> None:
    wanted = {f"public.{name}": state for name, state in states.items()}

    async def found() -> bool:
        return await tables(streamer) == wanted

    await streamer.eventually(found)


async def is_equal(streamer: Streamer, source: Database, target: Database, *names: str) -> None:
    """Wait until tables of the source and the targets are equal."""

    async def equal() -> bool:
        for name in names:
            here, _, there = name.partition("=")
            sql = "select * from {} order by id"
            if not target.value(f"select to_regclass('{there or here}') is not null"):
                return False
            mine, its = await asyncio.gather(
                asyncio.to_thread(source.execute, sql.format(here)),
                asyncio.to_thread(target.execute, sql.format(there or here)),
            )
            if mine != its:
                return False
        return True

    await streamer.eventually(equal)


@pytest.mark.parametrize("group", ["", CAPTURE])
async def test_tables_that_match_a_pattern_join_by_themselves(
    group: str, source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table a_old (id int primary key); create table b (id int primary key)")
    # With the capture, tables join at once, without discovery.
    settings = "discovery_interval: 0" if group else SOON
    async with stream('"a_*": {}', group=group, settings=settings) as streamer:
        await streamer.caught_up()
        source.execute(
            "create table a_new (id int primary key, v text default 'x');"
            "insert into a_new select g from generate_series(1, 9) g; create table c (id int)"
        )
        source.execute("alter table a_new add column w int default 7; insert into a_old values (1)")
        await are(streamer, a_old="ready", a_new="ready")
        source.execute("insert into a_new values (10); update a_new set v = 'y' where id = 3")
        await is_equal(streamer, source, target, "a_old", "a_new")


PUBLISHED = "select schemaname || '.' || tablename from pg_publication_tables order by 1"


async def test_tables_are_left_out_and_come_back_by_a_reload(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        "create schema bi; create table bi.r (id int primary key); create table a (id int primary key);"
        "create table tmp_1 (id int primary key); insert into a values (1); insert into bi.r values (1);"
        "insert into tmp_1 values (1); create table b (id int primary key)"
    )
    everything = '"*.*": {target: "*.*"}'
    group = 'exclude_tables: ["bi.*", "*.tmp_*"]'
    async with stream(everything, group=group, settings=SOON) as streamer:
        await are(streamer, a="ready", b="ready")
        assert source.execute(PUBLISHED) == [("public.a",), ("public.b",)]
        source.execute("create table tmp_2 (id int primary key); insert into tmp_2 values (1)")
        source.execute("create table c (id int primary key)")
        await are(streamer, a="ready", b="ready", c="ready")

        # A table that is left out ends like a table that the rules no longer name.
        write_config(
            streamer.path, source, target, everything, settings=SOON, group="exclude_tables: [a]"
        )
        await streamer.apply()
        source.execute("insert into a values (2); insert into bi.r values (2)")
        await is_equal(streamer, source, target, "bi.r", "tmp_1", "tmp_2")
        assert set(await tables(streamer)) == {
            *("bi.r", "public.b", "public.c", "public.tmp_1", "public.tmp_2")
        }
        assert ("public.a",) not in source.execute(PUBLISHED)
        assert target.execute("select id from a") == [(1,)]

        write_config(streamer.path, source, target, everything, settings=SOON)
        await streamer.apply()
        await is_equal(streamer, source, target, "a")
        assert not [table for table in (await streamer.status())["tables"] if table["error"]]


MEMBER = "create table {0} (id int primary key); alter extension plpgsql add table {0}"


def extension(directory: Path, table: str) -> str:
    """Return the statements that create an extension with *table*.

    Servers before 18 find no extension in *directory*; there the table joins another extension.
    """
    if int(version_of_tests()) < 18:
        return MEMBER.format(table)
    files = directory / "extension"
    files.mkdir(exist_ok=True)
    (files / f"with_{table}.control").write_text("default_version = '1'")
    (files / f"with_{table}--1.sql").write_text(f"create table {table} (id int primary key);")
    path = f"set extension_control_path = '{directory}:$system'"
    return f"{path}; create extension with_{table}"


@pytest.mark.parametrize("group", ["", CAPTURE])
async def test_no_pattern_matches_a_table_of_an_extension(
    group: str, source: Database, target: Database, stream: MakeStreamer, server_directory: Path
) -> None:
    source.execute(
        f"create table a (id int primary key); {extension(server_directory, 'config')};"
        f"{MEMBER.format('chosen')}; insert into chosen values (1)"
    )
    async with stream('"*": {}\nchosen: {}', group=group, settings=SOON) as streamer:
        await are(streamer, a="ready", chosen="ready")
        source.execute(
            f"begin; {extension(server_directory, 'later')}; commit;"
            "create table b (id int primary key)"
        )
        await are(streamer, a="ready", chosen="ready", b="ready")
        source.execute("insert into b values (1); alter extension plpgsql add table b")
        await are(streamer, a="ready", chosen="ready")
        await is_equal(streamer, source, target, "chosen")
        assert source.execute(PUBLISHED) == [("public.a",), ("public.chosen",)]


async def test_a_table_that_the_role_may_not_publish_names_the_statement(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    role = f"reader_{source.name}"
    source.execute(
        f"create table a_old (id int primary key); create role {role} login replication;"
        f"alter table a_old owner to {role}; grant create on database {source.name} to {role};"
        f"alter default privileges grant select on tables to {role}"
    )
    source.url_user = role
    try:
        async with stream('"a_*": {}', settings=SOON) as streamer:
            await streamer.caught_up()
            source.execute("create table a_new (id int primary key); insert into a_new values (1)")
            await are(streamer, a_old="ready", a_new="error")
            error = str((await streamer.table("public.a_new"))["error"])
            sql = 'alter publication "streamer_shop" add table only "public"."a_new"'
            assert sql in error
            assert "\n" not in error
            source.execute(f"{sql}; insert into a_old values (1)")
            await are(streamer, a_old="ready", a_new="ready")
            await is_equal(streamer, source, target, "a_old", "a_new")
    finally:
        source.url_user = "postgres"
        source.execute(f"reassign owned by {role} to postgres; drop owned by {role}")
        source.execute(f"drop role {role}")


async def test_dropped_tables_follow_their_policy(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    rules = """
        "k_*": {on_table_dropped: keep}
        h: {type: history, on_table_dropped: close}
        "s_*": {}
        other: {}
    """
    for name in ("k_1", "h", "s_1", "other"):
        source.execute(
            f"create table {name} (id int primary key, v text);"
            f"insert into {name} values (1, 'a'), (2, 'b')"
        )
    current = "select id, v from {} where kvsz_end = '9999-01-01' order by id"
    async with stream(rules, settings=SOON) as streamer:
        await streamer.caught_up()
        source.execute("; ".join(f"insert into {n} values (3, 'c')" for n in ("k_1", "h", "s_1")))
        source.execute("drop table k_1, h, s_1; insert into other values (3, 'c')")
        await are(streamer, s_1="error", other="ready")
        error = str((await streamer.table("public.s_1"))["error"])
        assert "on_table_dropped: keep" in error
        assert target.value("select count(*) from k_1") == 3
        assert not target.execute(current.format("h"))
        assert target.value("select count(*) from h where kvsz_deleted") == 3
        # A table with that name joins again, and its rows replace the rows that streamer wrote.
        source.execute("create table k_1 (id int primary key, v text); insert into k_1 values (7)")
        source.execute("create table h (id int primary key, v text); insert into h values (1, 'z')")
        await are(streamer, s_1="error", other="ready", k_1="ready", h="ready")
        await is_equal(streamer, source, target, "k_1", "other")
        assert target.execute(current.format("h")) == [(1, "z")]
    # A table that goes while no process runs leaves in the same way, with its last changes.
    source.execute("update h set v = 'last'; insert into k_1 values (8)")
    source.execute("drop table h, k_1; insert into other values (4, 'd')")
    async with stream(rules, settings=SOON) as streamer:
        await are(streamer, s_1="error", other="ready")
        await is_equal(streamer, source, target, "other")
        assert target.execute("select id from k_1 order by id") == [(7,), (8,)]
        assert not target.execute(current.format("h"))
        assert target.value("select count(*) from h where v = 'last' and kvsz_deleted") == 1


async def test_a_successor_of_a_dropped_table_joins_without_a_pattern_in_the_rules(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table t (id int primary key); create table other (id int primary key)")
    source.execute("insert into t values (1)")
    async with stream("t: {on_table_dropped: keep}\nother: {}", settings=SOON) as streamer:
        await streamer.caught_up()
        source.execute("drop table t")
        await are(streamer, other="ready")
        source.execute("create table t (id int primary key); insert into t values (2)")
        await are(streamer, other="ready", t="ready")
        await is_equal(streamer, source, target, "t")


async def test_the_event_of_a_dropped_table_counts_its_changes_in_quarantine(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table k_1 (id int primary key); create table other (id int primary key)")
    target.execute("create table k_1 (id int primary key check (id < 5))")
    rules = '"k_*": {on_table_dropped: keep, on_error: quarantine}\nother: {}'
    async with stream(rules, settings=SOON) as streamer:
        await streamer.caught_up()
        (supervisor,) = streamer.engine.supervisors
        earlier = SeenState(states={("shop", "public.k_1"): ("ready", None)})
        source.execute("insert into k_1 values (1), (6), (7)")

        async def are_set_aside() -> bool:
            return bool((await streamer.table("public.k_1"))["quarantined"] == 2)

        await streamer.eventually(are_set_aside)
        source.execute("drop table k_1")
        await are(streamer, other="ready")
        reasons = supervisor.health.removals
        removed = SeenState(removals={("shop", name): why for name, why in reasons.items()})
        ((name, event),) = changes_between(earlier, removed)
        assert (name, event["state"]) == ("state", "removed")
        assert (
            "dropped at the source, and its target keeps the rows; 2 changes in" in event["error"]
        )


async def test_a_new_table_that_clashes_with_another_source_stays_out_alone_and_shows(
    source: Database, second: Database, target: Database, stream: MakeStreamer
) -> None:
    for db, schema in ((source, "ten_1"), (second, "ten_2")):
        db.execute(f"create schema {schema}; create table {schema}.t (id int primary key)")
    rules = '"ten_*.t": {sid: "{schema}", target: t}\n"n_*": {}'
    async with stream(rules, sid="a", others={"b": second}, settings=SOON) as streamer:
        await streamer.caught_up()
        # WHEN source a gets a table whose rows source b writes, and both get further tables
        source.execute("create schema ten_2; create table ten_2.t (id int primary key)")
        source.execute("create table n_1 (id int primary key)")
        second.execute("create table n_2 (id int primary key)")

        async def shown() -> list[tuple[set[str], str]]:
            return [
                ({t["source"] for t in status["tables"]}, status["error"] or "")
                for status in await streamer.statuses()
            ]

        async def have_joined() -> bool:
            (of_a, error), (of_b, well) = await shown()
            return {"public.n_1"} <= of_a and {"public.n_2"} <= of_b and bool(error) and not well

        await streamer.eventually(have_joined)
        (of_a, error), _ = await shown()
        assert "ten_2.t" not in of_a
        assert 'new table "ten_2.t" cannot join: several sources would write the same' in error
        assert "give their urls different sids" in error
        reasons = [r for r in streamer.engine.readiness() if "cannot join" in str(r)]
        assert [reason["source"] for reason in reasons] == ["shop:a"], streamer.engine.readiness()
        # WHEN the source starts again THEN the table still stays out
        (supervisor,) = (s for s in streamer.engine.supervisors if s.source.sid == "a")
        pipeline = supervisor.pipeline
        assert pipeline is not None
        supervisor.begin_anew()
        await supervisor.until_ended(pipeline)
        source.execute("create table n_3 (id int primary key)")

        async def has_joined() -> bool:
            (of_a, again), _ = await shown()
            return {"public.n_3"} <= of_a and again == error

        await streamer.eventually(has_joined)
        (of_a, _), _ = await shown()
        assert "ten_2.t" not in of_a
        # WHEN the table leaves again THEN the problem ends
        source.execute("drop table ten_2.t")

        async def is_well() -> bool:
            return not any(error for _, error in await shown())

        await streamer.eventually(is_well)


async def test_a_renamed_table_follows_a_pattern_without_a_copy(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute("create table a_1 (id int primary key, v text); insert into a_1 values (1, 'a')")
    source.execute("create schema s")
    filled = "select xmin::text from {} where id = 1"
    async with stream('"a_*": {}\n"s.*": {target: "s.*"}', group=CAPTURE) as streamer:
        await streamer.caught_up()
        before = target.value(filled.format("a_1"))
        source.execute("insert into a_1 values (2, 'b')")
        source.execute(
            "begin; insert into a_1 values (3, 'c'); alter table a_1 rename to a_2;"
            "alter table a_2 add column w int default 5; insert into a_2 values (4, 'd', 4); commit"
        )
        source.execute("update a_2 set v = 'z' where id = 2")
        await are(streamer, a_2="ready")
        await is_equal(streamer, source, target, "a_2")
        assert target.value("select to_regclass('a_1') is null")
        source.execute("alter table a_2 set schema s; insert into s.a_2 values (5)")

        async def has_moved() -> bool:
            return await tables(streamer) == {"s.a_2": "ready"}

        await streamer.eventually(has_moved)
        await is_equal(streamer, source, target, "s.a_2")
        assert target.value(filled.format("s.a_2")) == before  # no copy has written the row again
    source.execute("insert into s.a_2 values (6); alter table s.a_2 rename to a_3")
    source.execute("insert into s.a_3 values (7)")
    async with stream('"a_*": {}\n"s.*": {target: "s.*"}', group=CAPTURE) as streamer:
        await streamer.caught_up()
        await is_equal(streamer, source, target, "s.a_3")
        assert target.value(filled.format("s.a_3")) == before


async def test_a_table_renamed_or_dropped_before_its_copy_needs_no_operator(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a_1", "a_2", "a_3"):
        source.execute(f"create table {name} (id int primary key); insert into {name} values (1)")
    known = "select source from streamer.relation order by source"
    with source.connect() as migration, source.connect() as other:
        # The lock keeps the process from publishing the discovered tables.
        migration.execute("begin; lock table a_2, a_3 in share update exclusive mode")
        async with stream('"a_*": {}', group=CAPTURE) as streamer:

            async def has_found() -> bool:
                there = target.value("select to_regclass('streamer.relation') is not null")
                return bool(there) and len(target.execute(known)) == 3

            await streamer.eventually(has_found)
            migration.execute("alter table a_2 rename to a_4; drop table a_3; commit")
            await are(streamer, a_1="ready", a_4="ready")
            # A copy waits for the transactions that run at its begin.
            other.execute("begin; select pg_current_xact_id()")
            source.execute(
                "create table a_5 (id int primary key); insert into a_5 values (1);"
                "create table a_6 (id int primary key); insert into a_6 values (1)"
            )
            source.execute(
                "create table a_x (id int primary key, v text); insert into a_x values (1, 'x');"
                "create table a_y (id int primary key, v text); insert into a_y values (1, 'y')"
            )
            copying = dict.fromkeys(("a_5", "a_6", "a_x", "a_y"), "copying")
            await are(streamer, a_1="ready", a_4="ready", **copying)
            # The engine runs in this thread, and may hold a lock that the commands wait for.
            for command in (
                "alter table a_5 rename to a_7; insert into a_7 values (2)",
                "alter table a_6 rename to b_6; insert into b_6 values (2)",
                *swap("a_x", "a_y"),
            ):
                await asyncio.to_thread(source.execute, command)
            other.execute("commit")
            others = dict.fromkeys(("a_1", "a_4", "a_7", "a_x", "a_y"), "ready")
            await are(streamer, **others, a_6="error")
            await is_equal(streamer, source, target, "a_x", "a_y")
            error = str((await streamer.table("public.a_6"))["error"])
            assert "no rule matches the new name" in error
            source.execute("alter table b_6 rename to a_6; insert into a_6 values (3)")
            await are(streamer, **others, a_6="ready")
            await is_equal(streamer, source, target, "a_1", "a_4", "a_6", "a_7")
            gone = "select to_regclass('a_2'), to_regclass('a_3'), to_regclass('a_5')"
            assert target.execute(gone) == [(None, None, None)]

            def drop(name: str) -> None:
                if name == "join.registered":
                    source.execute("drop table if exists a_8")

            monkeypatch.setattr(reload_mapping, "failpoint", drop)
            source.execute(
                "create table a_8 (id int primary key); create table a_9 (id int primary key)"
            )
            await are(streamer, **others, a_6="ready", a_9="ready")


def swap(one: str, other: str) -> list[str]:
    """Return statements that exchange the names of two tables, with a row for each name after."""
    return [
        f"insert into {one} values (10, 'before'); alter table {one} rename to aside",
        f"alter table {other} rename to {one}",
        f"insert into {one} values (11, '{one}'); alter table aside rename to {other}",
        f"insert into {other} values (12, '{other}')",
    ]


async def test_tables_that_exchange_their_names_go_on_without_a_copy(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for name in ("a_1", "a_2", "x", "y"):
        source.execute(f"create table {name} (id int primary key, v text)")
        source.execute(f"insert into {name} values (1, '{name}')")
    source.execute("alter table a_2 add column own int default 2")
    filled = "select xmin::text from {} where v = '{}'"
    async with stream('"a_*": {}\nx:\ny: {target: z}', group=CAPTURE) as streamer:
        await streamer.caught_up()
        there = {"a_1": "a_1", "a_2": "a_2", "x": "x", "y": "z"}
        before = {n: target.value(filled.format(t, n)) for n, t in there.items()}
        source.execute("; ".join(swap("a_1", "a_2")))  # one transaction
        for statement in swap("x", "y"):  # the names in the rules
            source.execute(statement)
        await is_equal(streamer, source, target, "a_1", "a_2", "x", "y=z")
        await are(streamer, a_1="ready", a_2="ready", x="ready", y="ready")
        for name, other in (("a_1", "a_2"), ("a_2", "a_1"), ("x", "z"), ("y", "x")):
            assert target.value(filled.format(other, name)) == before[name], "a copy wrote it anew"


async def test_a_publication_of_all_tables_lets_a_renamed_table_wait(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """No row of the catalogs names the tables, so no fact shows that the membership lasted."""
    source.execute(
        "create publication streamer_shop for all tables;"
        "create table a_1 (id int primary key, v text); insert into a_1 values (1, 'a')"
    )
    async with stream('"a_*": {}', group=CAPTURE) as streamer:
        await streamer.caught_up()
        source.execute("insert into a_1 values (2, 'b'); alter table a_1 rename to a_2")
        source.execute("insert into a_2 values (3, 'c')")
        await are(streamer, a_1="error")
        error = str((await streamer.table("public.a_1"))["error"])
        assert "no longer exists at the source: a session dropped or renamed it" in error
        assert "streamer resync public.a_1 --database shop" in error
        source.execute("alter table a_2 rename to a_1; insert into a_1 values (4, 'd')")
        await streamer.ask("resync", "public.a_1")
        await are(streamer, a_1="ready")
        await is_equal(streamer, source, target, "a_1")


async def test_a_new_table_that_takes_the_place_of_another_is_copied(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    names = ("k_1", "k_2", "m_1", "s_1", "h_1")
    for name in names:
        source.execute(
            f"create table {name} (id int primary key, v text);"
            f"insert into {name} values (1, 'former'), (2, 'former')"
        )
    history = "h_1: {type: history, on_table_dropped: close}"
    rules = f'"k_*": {{on_table_dropped: keep}}\n"m_*": {{}}\ns_1:\n{history}'
    async with stream(rules, group=CAPTURE) as streamer:
        await streamer.caught_up()
        for name in names:  # in one transaction
            drop = "" if name == "m_1" else f"drop table {name}_old;"
            source.execute(
                f"begin; insert into {name} values (3, 'last');"
                f"create table {name}_new (like {name} including all);"
                f"insert into {name}_new select id, 'new' from {name};"
                f"alter table {name} rename to {name}_old; alter table {name}_new rename to {name};"
                f"insert into {name} values (4, 'behind'); {drop} commit"
            )
        await is_equal(streamer, source, target, "k_1", "k_2", "m_1", "m_1_old")
        versions = (
            "select id, v, kvsz_end = '9999-01-01' and not kvsz_deleted from h_1"
            " order by id, kvsz_start"
        )
        # Former rows have ended, and those of the new table begin.
        ended = [(1, "former", False), (2, "former", False), (3, "last", False)]
        begun = [*((number, "new", True) for number in (1, 2, 3)), (4, "behind", True)]
        wanted = sorted([*ended, *begun], key=lambda row: (row[0], row[2]))

        async def has_all_versions() -> bool:
            return await asyncio.to_thread(target.execute, versions) == wanted

        await streamer.eventually(has_all_versions)
        await streamer.table_state("public.s_1", "error")
        assert "streamer resync public.s_1" in str((await streamer.table("public.s_1"))["error"])
        assert target.value("select count(*) from s_1 where v <> 'new'") == 3
        # A table that streams under its own name takes the place of a second table.
        source.execute("create table k_3 (id int primary key, v text); insert into k_3 values (1)")
        await streamer.table_state("public.k_3", "ready")
        source.execute("insert into k_3 values (2, 'own'); drop table k_1")
        source.execute("alter table k_3 rename to k_1; insert into k_1 values (3, 'behind')")
        await is_equal(streamer, source, target, "k_1", "k_2")
        ready = dict.fromkeys(("k_1", "k_2", "m_1", "m_1_old", "h_1"), "ready")
        await are(streamer, **ready, s_1="error")


@pytest.mark.parametrize("publishes_all", [False, True])
async def test_a_new_table_waits_for_the_last_changes_of_the_one_in_its_place(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    monkeypatch: pytest.MonkeyPatch,
    publishes_all: bool,
) -> None:
    """A copy would lose versions and rows that only the changes of the former table contain."""
    looks = asyncio.Semaphore(0)

    async def counted(*args: Any) -> Any:
        looks.release()
        return await read_guard_facts(*args)

    monkeypatch.setattr(source_monitor, "read_guard_facts", counted)
    monkeypatch.setattr(source_monitor, "GUARD_SECONDS", 0.1)
    replace = (
        "insert into {0} values ({1}, 'last'); delete from {0} where id = 1; drop table {0};"
        "create table {0} (id int primary key, v text); insert into {0} values (3, 'new')"
    )
    rules = """
        h: {type: history, on_table_dropped: close}
        a: {type: append, on_table_dropped: keep}
    """
    for name in ("h", "a"):
        source.execute(f"create table {name} (id int primary key, v text)")
        source.execute(f"insert into {name} values (1, 'one')")
    if publishes_all:
        source.execute("create publication streamer_shop for all tables")

    async def replaces(streamer: Streamer | None) -> None:
        """Replace the tables while sessions keep changes from the target."""
        with target.connect() as locks:
            if streamer is not None:
                locks.execute("begin; lock table h, a in share mode")
            for name in ("h", "a"):
                source.execute(replace.format(name, 2 if streamer else 4))
            if streamer is not None:
                while not looks.locked():
                    await looks.acquire()
                for _ in range(3):
                    await looks.acquire()

    async def have(streamer: Streamer, versions: int) -> None:
        sql = (
            "select (select count(*) from h where v = 'last' and kvsz_end < now()),"
            "       (select count(*) from h where v = 'new' and kvsz_end > now()),"
            "       (select count(*) from a where v = 'last'),"
            "       (select array_agg(distinct v order by v) from a)"
        )

        async def are_there() -> bool:
            found = await asyncio.to_thread(target.execute, sql)
            return found == [(versions, 1, versions, ["last", "new", "one"])]

        await streamer.eventually(are_there)
        await are(streamer, h="ready", a="ready")

    async with stream(rules, settings=SOON) as streamer:
        await streamer.caught_up()
        await replaces(streamer)
        await have(streamer, 1)
    await replaces(None)
    async with stream(rules, settings=SOON) as streamer:
        await have(streamer, 2)


@pytest.mark.follows("runbooks:table-renamed#1")
async def test_a_renamed_table_with_a_rule_of_its_own_waits_for_the_rule(
    source: Database, target: Database, stream: MakeStreamer, tmp_path: Any
) -> None:
    source.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    filled = "select xmin::text from t where id = 1"
    async with stream("t: {}", group=CAPTURE) as streamer:
        await streamer.caught_up()
        before = target.value(filled)
        source.execute("insert into t values (2, 'b')")
        source.execute("alter table t rename to u")
        await streamer.table_state("public.t", "error")
        table = await streamer.table("public.t")
        assert "'public.u': {target: 'public.t'}" in str(table["error"])
        source.execute("insert into u values (3, 'c')")
        await streamer.stop()
        streamer.start()  # a restart has no effect
        await streamer.table_state("public.t", "error")
        source.execute("insert into u values (4, 'd')")
        text = streamer.path.read_text()
        rule = block("table-renamed#1", {"orders_2026": "u", "orders": "t"}).strip()
        streamer.path.write_text(text.replace("t: {}", rule))
        await streamer.apply()
        await are(streamer, u="ready")
        await is_equal(streamer, source, target, "u=t")
        assert target.value(filled) == before
        # The name comes back at the source, and so must the rule.
        source.execute("alter table u rename to w; insert into w values (5)")
        await streamer.table_state("public.u", "error")
        source.execute("alter table w rename to u; insert into u values (6)")
        await are(streamer, u="ready")
        await is_equal(streamer, source, target, "u=t")
        assert target.value(filled) == before


async def test_rows_of_an_attached_partition_come_by_themselves(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    source.execute(
        "create table p (id int primary key, v text) partition by range (id);"
        "create table p1 partition of p for values from (0) to (100);"
        "insert into p values (1, 'a'), (2, 'b')"
    )
    filled = "select xmin::text from p where id = 2"
    group = f"{CAPTURE}\non_ddl: {{detach_partition: apply}}"
    async with stream("p: {}", group=group) as streamer:
        await streamer.caught_up()
        before = target.value(filled)
        source.execute(
            "create table p2 partition of p for values from (100) to (200);"
            "insert into p values (101, 'created');"
            "create table p3 (v text, id int not null); insert into p3 values ('c', 203), ('d', 204);"
            "alter table p attach partition p3 for values from (200) to (300);"
            "insert into p values (205, 'e'); update p set v = 'f' where id in (1, 204)"
        )
        await is_equal(streamer, source, target, "p")
        source.execute("alter table p detach partition p3")
        source.execute("update p3 set v = 'g' where id = 203; delete from p3 where id = 205")
        source.execute("alter table p attach partition p3 for values from (200) to (300)")
        source.execute("insert into p values (3, 'h')")
        await is_equal(streamer, source, target, "p")
        assert target.value(filled) == before, "only rows within the bounds were copied"

        async def is_well() -> bool:
            table = await streamer.table("public.p")
            return (table["state"], table["error"]) == ("ready", None)

        await streamer.eventually(is_well)


async def test_the_work_that_one_look_causes_does_not_delay_the_next_look(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that a session replaced right after that work must stop within seconds."""
    clock, looks = mock.Mock(), asyncio.Semaphore(0)
    clock.monotonic.return_value = 100.0

    async def slow(self: TableCases, plain: Connection) -> Reconciled:
        clock.monotonic.return_value += 100.0
        return await reconcile(self, plain)

    async def counted(*args: Any) -> Any:
        looks.release()
        return await read_guard_facts(*args)

    reconcile = TableCases.reconcile
    monkeypatch.setattr(TableCases, "reconcile", slow)
    monkeypatch.setattr(source_monitor, "read_guard_facts", counted)
    monkeypatch.setattr(source_monitor, "time", clock)
    source.execute("create table a_1 (id int primary key)")
    target.execute("create table a_1 (id int primary key)")
    async with stream("a_1: {initial: none}"):
        async with asyncio.timeout(60):
            for _ in range(3):
                await looks.acquire()
