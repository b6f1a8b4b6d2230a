"""Rows that ALTER TABLE changed without a change in the stream are reported as a gap."""

import asyncio
from unittest import mock

import pytest

from streamer.copy import gap_reports
from streamer.runtime.guards import source_monitor as watch
from streamer.runtime.session import source_checks as survey
from streamer.source.slot_and_publications import guard_query
from tests.support.postgres import Database, assert_same
from tests.support.remedies import Operator, remedy_of
from tests.support.runbooks import block, run_block
from tests.support.streamer import MakeStreamer, Streamer

FILL = "select g, g from generate_series(1, 300) g"
TABLES = {
    "toasted": f"create table toasted (id int primary key, n int, v text);"
    f" insert into toasted {FILL}",
    "plain": f"create table plain (id int primary key, n int); insert into plain {FILL}",
    "parts": "create table parts (id int primary key, n int, v text) partition by range (id);"
    " create table part partition of parts for values from (0) to (1000);"
    f" insert into parts {FILL}",
}
GAP = "gap#1"
ERROR = "select error from streamer.relation where source = 'public.{}'"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "CHECK_SECONDS", 0.2)


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard makes its first check only after the test."""
    monkeypatch.setattr(watch, "GUARD_SECONDS", 3600.0)


def leaf(table: str) -> str:
    return "part" if table == "parts" else table


def unlogged_for_a_while(table: str) -> str:
    """Return a single message, and so a single transaction: no check sees the table between two
    statements.
    """
    name = leaf(table)
    return (
        f"alter table {name} set unlogged; update {name} set n = -n where id = 7;"
        f" delete from {name} where id = 8; alter table {name} set logged"
    )


async def knows_storage(streamer: Streamer, source: Database, target: Database, table: str) -> None:
    """Wait until the guard has stored the present file of *table* as known."""

    async def is_known() -> bool:
        file = source.value(f"select relfilenode from pg_class where relname = '{leaf(table)}'")
        known = target.execute(
            "select (s.value->>1)::int8 from streamer.relation, jsonb_each(storage) s"
            f" where source = 'public.{table}'"
        )
        return known == [(file,)]

    await streamer.eventually(is_known, 60)


async def knows_partitions(streamer: Streamer, source: Database, target: Database) -> None:
    """Wait until a search has seen all partitions."""

    async def is_known() -> bool:
        oids = source.execute(
            "select inhrelid::int8 from pg_inherits where inhparent = 'parts'::regclass"
        )
        sql = "select k::int8 from streamer.relation, jsonb_object_keys(storage) k"
        return sorted(oids) == sorted(target.execute(sql))

    await streamer.eventually(is_known, 60)


async def follow_the_remedy(streamer: Streamer, target: Database, table: str) -> None:
    """Run the command of the runbook, with which the message ends."""
    names = {"orders": f"public.{table}"}
    assert str(target.value(ERROR.format(table))).endswith(block(GAP, names).strip())
    await asyncio.to_thread(run_block, streamer.path, GAP, names)

    async def is_well() -> bool:
        state = target.execute(
            f"select state, error from streamer.relation where source = 'public.{table}'"
        )
        return state == [("ready", None)]

    await streamer.eventually(is_well, 60)


async def told(streamer: Streamer, target: Database, table: str) -> None:
    """Wait until the gap of *table* is reported."""

    async def is_told() -> bool:
        return "ALTER TABLE rewrote" in str(target.value(ERROR.format(table)))

    await streamer.eventually(is_told, 60)


ALL_TABLES = (
    f"{'; '.join(TABLES.values())}; create publication streamer_shop for all tables"
    " with (publish_via_partition_root = true)"
)
RULES = "\n".join(f"{table}:" for table in TABLES)


@pytest.mark.parametrize("when", ["running", "down"])
@pytest.mark.follows("copy.gap_reports:_describe")
@pytest.mark.follows("runbooks:gap#1")
async def test_a_table_that_was_unlogged_for_a_while_reports_a_gap(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    unguarded: None,
    when: str,
) -> None:
    source.execute(ALL_TABLES)
    async with stream(RULES) as streamer:
        await streamer.caught_up(60)
        if when == "running":
            for table in TABLES:
                await asyncio.to_thread(source.execute, unlogged_for_a_while(table))
            for table in TABLES:
                await told(streamer, target, table)
    if when == "down":
        for table in TABLES:
            source.execute(unlogged_for_a_while(table))
    async with stream(RULES) as streamer:
        for table in TABLES:
            await told(streamer, target, table)
            assert f'"public.{leaf(table)}"' in str(target.value(ERROR.format(table)))
            assert source.value(f"select count(*) from {table}") == 299
            assert target.value(f"select count(*) from {table}") == 300, (
                "nothing told of the delete"
            )
            await follow_the_remedy(streamer, target, table)
            assert_same(source, target, table)
            # The copy has recorded the storage, so the next rewrite shows again.
            await knows_storage(streamer, source, target, table)
            alter = f"alter table {table} alter n type int using n + 1"
            await asyncio.to_thread(source.execute, alter)
            await told(streamer, target, table)
            await follow_the_remedy(streamer, target, table)
            assert_same(source, target, table)


LOAD = "insert into parts select g, g from generate_series(1001, 1300) g"


NEGATED = "alter table parts alter n type int using -n"


@pytest.mark.parametrize(
    ("ddl", "persistence", "alter", "has_gap"),
    [
        ("off", "unlogged", "alter table late set logged", True),
        ("capture", "unlogged", "alter table late set logged", True),
        ("off", "unlogged", "alter table late set logged; grant select on late to public", True),
        ("off", "", NEGATED, True),
        ("capture", "", NEGATED, False),  # the stream sends the new values
        *((ddl, "", "alter table parts alter n type bigint", False) for ddl in ("off", "capture")),
        *((ddl, "", "vacuum full late", False) for ddl in ("off", "capture")),
    ],
)
async def test_a_rewrite_of_a_new_partition_reports_a_gap(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    ddl: str,
    persistence: str,
    alter: str,
    has_gap: bool,
) -> None:
    # GIVEN a partition that a session creates, fills and rewrites between two searches
    source.execute(TABLES["parts"])
    async with stream("parts:", group=f"ddl: {ddl}") as streamer:
        await streamer.caught_up(60)
    bounds = "partition of parts for values from (1000) to (2000)"
    for statement in (f"create {persistence} table late {bounds}", LOAD, *alter.split("; ")):
        source.execute(statement)
    source.execute("insert into parts (id, n) values (1900, 1)")  # the stream sends this row

    # WHEN streamer searches again
    async with stream("parts:", group=f"ddl: {ddl}") as streamer:
        await knows_partitions(streamer, source, target)

        # THEN the status shows the gap, and the remedy fills the gap
        if has_gap:
            await told(streamer, target, "parts")
            await follow_the_remedy(streamer, target, "parts")
        await streamer.caught_up(60)

        async def is_equal() -> bool:
            rows = "select id, n, v from parts order by id"
            return source.execute(rows) == target.execute(rows)

        await streamer.eventually(is_equal, 60)
        assert target.value(ERROR.format("parts")) is None


async def test_a_rewrite_that_the_stream_shows_or_that_changes_no_row_reports_no_gap(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None
) -> None:
    source.execute("; ".join(TABLES.values()))
    async with stream(
        "\n".join(f"{table}: {{on_column_added: add}}" for table in TABLES)
    ) as streamer:
        await streamer.caught_up(60)
        for number in range(7):
            for table in TABLES:
                name = leaf(table)
                refill = f"begin; truncate {table}; insert into {table} {FILL}; commit"
                statement = (
                    f"vacuum full {name}",
                    f"cluster {name} using {name}_pkey",
                    refill,
                    f"{refill[:-7]} alter table {table} add check (n is not null); commit",
                    f"truncate {table}; insert into {table} {FILL}",
                    f"alter table {table} add x float default random()",
                    f"vacuum full {name}",
                )[number]
                for command in [statement] if "begin" in statement else statement.split("; "):
                    await asyncio.to_thread(source.execute, command)
            for table in TABLES:
                await knows_storage(streamer, source, target, table)
                error = target.value(ERROR.format(table))
                assert error is None or "rewrote" not in str(error), (table, number)
        for table in TABLES:
            await asyncio.to_thread(source.execute, f"insert into {table} (id, n) values (900, 1)")
        await streamer.caught_up(60)
        for table in TABLES:
            assert_same(source, target, table)


CASTS = {
    # name: before, after, type of the target, whether the target gets the new type first, a gap
    "rounds": ("numeric(12,4)", "numeric(10,2)", "numeric(12,4)", False, True),
    "follows": ("numeric(12,4)", "numeric(10,2)", "numeric(12,4)", True, False),
    "as_text": ("timestamp(6)", "timestamp(0)", "text", False, True),
    "widens": ("int", "bigint", "text", False, False),
}


@pytest.mark.parametrize("initial", ["copy", "none"])
async def test_a_type_that_rounds_values_reports_a_gap_unless_the_target_rounds_them_too(
    source: Database, target: Database, stream: MakeStreamer, without_spark: None, initial: str
) -> None:
    for name, (before, _, there, _, _) in CASTS.items():
        source.execute(f"create table {name} (id int primary key, v {before})")
        target.execute(f"create table {name} (id int primary key, v {there})")
    rules = "\n".join(f"{name}: {{initial: {initial}}}" for name in CASTS)
    values = {"rounds": "1.2345", "follows": "1.2345", "widens": "5"}
    async with stream(rules) as streamer:
        await streamer.caught_up(60)
        for name in CASTS:
            value = values.get(name, "'2024-01-01 00:00:00.123456'")
            source.execute(f"insert into {name} select g, {value} from generate_series(1, 9) g")
        await streamer.caught_up(60)
        for name, (_, after, _, is_first, has_gap) in CASTS.items():
            await knows_storage(streamer, source, target, name)
            alter = f"alter table {name} alter v type {after}"
            if is_first:
                target.execute(alter)
            await asyncio.to_thread(source.execute, alter)

            if has_gap:
                await told(streamer, target, name)
                await follow_the_remedy(streamer, target, name)
            else:
                await knows_storage(streamer, source, target, name)
                assert target.value(ERROR.format(name)) is None
            cast = f"select id, v::{after} from {name} order by id"
            assert target.execute(cast) == source.execute(cast)


async def test_capture_explains_a_rewrite_of_columns_but_not_one_of_the_persistence(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    unguarded: None,
) -> None:
    source.execute(ALL_TABLES)
    async with stream(RULES, group="ddl: capture") as streamer:
        await streamer.caught_up(60)
        for table in TABLES:
            alter = f"alter table {table} alter n type int using n + 1"
            await asyncio.to_thread(source.execute, alter)
        for table in TABLES:
            await knows_storage(streamer, source, target, table)
        await streamer.caught_up(60)
        for table in TABLES:
            rows = f"select id, n from {table} order by id"

            async def is_equal(rows: str = rows) -> bool:
                return source.execute(rows) == target.execute(rows)

            await streamer.eventually(is_equal, 60)
            assert "rewrote" not in str(target.value(ERROR.format(table)))
            await asyncio.to_thread(source.execute, unlogged_for_a_while(table))
            await told(streamer, target, table)
            await follow_the_remedy(streamer, target, table)
            assert_same(source, target, table)


async def test_a_search_follows_each_change_of_the_catalogs_and_no_search_otherwise(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "GUARD_SECONDS", 0.2)
    calls: list[str] = []
    for module, name, function in (
        (survey, "report_gaps", gap_reports.report_gaps),
        (watch, "read_guard_facts", guard_query.read_guard_facts),
    ):

        def record(*_: object, name: str = name, **__: object) -> object:
            calls.append(name)
            return mock.DEFAULT  # the mock then calls the function

        monkeypatch.setattr(module, name, mock.AsyncMock(wraps=function, side_effect=record))
    source.execute(ALL_TABLES)
    source.execute("create table strays (like parts including all); insert into strays values (-1)")

    async def rests() -> bool:
        """Whether ten checks of the guard caused no search."""
        return calls[-10:] == ["read_guard_facts"] * 10

    async with stream(RULES) as streamer:
        await streamer.caught_up(60)
        await streamer.eventually(rests, 60)
        for change in (
            "vacuum full plain",  # a new file
            "create table more partition of parts for values from (1000) to (2000)",
            "alter table plain alter n type bigint",
        ):
            calls.clear()
            await asyncio.to_thread(source.execute, change)

            async def has_searched() -> bool:
                return "report_gaps" in calls

            await streamer.eventually(has_searched, 60)
            await streamer.eventually(rests, 60)
            assert not target.execute("select from streamer.relation where error is not null")
        attach = "alter table parts attach partition strays for values from (-9) to (0)"
        await asyncio.to_thread(source.execute, attach)

        async def is_reported() -> bool:
            return "attached as a partition" in str(target.value(ERROR.format("parts")))

        await streamer.eventually(is_reported, 60)
        calls.clear()

        async def repeats() -> bool:  # because an operator may act
            return calls.count("report_gaps") > 3

        await streamer.eventually(repeats, 60)


@pytest.mark.parametrize("scope", ["all tables", "tables in schema public"])
@pytest.mark.parametrize("when", ["running", "down"])
async def test_a_detour_of_a_table_over_a_root_outside_the_mapping_reports_a_gap(
    source: Database,
    target: Database,
    stream: MakeStreamer,
    without_spark: None,
    scope: str,
    when: str,
) -> None:
    """The publication contains the root, so it sends the changes in between as the root's."""
    source.execute(
        "create table t (id int primary key, v text); alter table t alter v set statistics 1;"
        "create table root (id int primary key, v text) partition by range (id);"
        f"create publication streamer_shop for {scope} with (publish_via_partition_root = true);"
        "create publication streamer_shop_ins with (publish = 'insert')"
    )
    detour = (
        "alter table root attach partition t for values from (0) to (100);"
        "insert into root values ({0}); alter table root detach partition t"
    )
    async with stream("t:") as streamer:
        await streamer.caught_up(60)
        for number in (1, 2):  # the copy of the first remedy forgets the first detour
            if when == "down":
                await streamer.stop()
            await asyncio.to_thread(source.execute, detour.format(number))
            if when == "down":
                streamer.start()
            remedy = await remedy_of(streamer, "public.t", "to a table outside the mapping")
            await Operator(streamer.path, source, target).follow(remedy)
            await streamer.caught_up(60)
            assert_same(source, target, "t")
            assert (await streamer.table("public.t"))["error"] is None
        storage = "select storage::text from streamer.relation"
        former = target.value(storage)
        source.execute("alter table t alter v set statistics 2, set (fillfactor = 90)")

        async def is_checked() -> bool:
            return bool(target.value(storage) != former)

        await streamer.eventually(is_checked)
        assert (await streamer.table("public.t"))["error"] is None
