"""One database with a schema for each tenant, whose tables share the tables of the target."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from streamer.bookkeeping.purges import PurgeRecord
from streamer.commands.quarantined_rows import Choice, count_rows
from streamer.commands.status import read_report
from streamer.commands.table_requests import request
from streamer.commands.tenants.purge_rows import purge
from streamer.commands.tenants.tenant_drift import read_drift
from streamer.commands.tenants.tenant_list import read_tenants
from streamer.commands.wait import wait
from streamer.compare.comparison import ComparisonScope
from streamer.errors.error_classes import MappingError
from streamer.errors.remedies import CONTINUES
from streamer.mapping.scope import Scope
from streamer.mapping.sid_and_history_columns import HISTORY_OPEN
from streamer.report.problems import ProblemKind
from streamer.target.connection import TargetAddress
from tests.support.checking import ERROR, Checker
from tests.support.comparing import Compare
from tests.support.postgres import Database
from tests.support.remedies import Operator, are_gone, find_in, read_problems, remedy_of
from tests.support.streamer import MakeStreamer, Streamer, write_config

pytestmark = pytest.mark.usefixtures("without_spark", "short_backoffs")

RULES = """
"tenant_*.*": {sid: "{schema:tenant_(.*)}", on_table_dropped: keep, create: all}
"""
SETTINGS = "discovery_interval: 0.5"
TABLES = """
create schema tenant_{sid};
create table tenant_{sid}.orders (id int primary key, v text, n int unique);
create table tenant_{sid}.items (id int primary key, order_id int references tenant_{sid}.orders);
insert into tenant_{sid}.orders select g, '{sid} ' || g, g from generate_series(1, 5) g;
insert into tenant_{sid}.items select g, g from generate_series(1, 5) g;
"""
NAMES = ("orders", "items")


def add_tenants(source: Database, sids: Iterable[str]) -> None:
    for sid in sids:
        source.execute(TABLES.format(sid=sid))


def rows(db: Database, table: str, condition: str = "true") -> list[tuple[object, ...]]:
    columns = {"orders": "id, v, n", "items": "id, order_id"}[table.rpartition(".")[2]]
    return db.execute(f"select {columns} from {table} where {condition} order by 1")


def assert_equal(source: Database, target: Database, sids: Iterable[str]) -> None:
    for table in NAMES:
        for sid in sids:
            wanted = rows(source, f"tenant_{sid}.{table}")
            assert rows(target, table, f"sid = '{sid}'") == wanted, (sid, table)


async def test_each_schema_is_a_tenant_with_its_own_rows(
    source: Database, target: Database, stream: MakeStreamer, compare: Compare
) -> None:
    add_tenants(source, "ab")
    async with stream(RULES, settings=SETTINGS) as streamer:
        await streamer.caught_up()
        assert_equal(source, target, "ab")
        # A source transaction changes rows with equal keys of both tenants, in one order.
        source.execute(
            "begin; update tenant_a.orders set v = 'x', n = n + 10;"
            "update tenant_b.orders set v = v || '!' where id < 3;"
            "delete from tenant_a.items where id = 1; insert into tenant_b.items values (6, 1);"
            "truncate tenant_a.items; insert into tenant_a.items values (1, 2); commit"
        )
        await streamer.caught_up()
        assert_equal(source, target, "ab")
        # A schema joins by itself, with rows and with changes.
        add_tenants(source, "c")
        await streamer.table_state("tenant_c.orders", "ready")
        await streamer.table_state("tenant_c.items", "ready")
        source.execute("update tenant_c.orders set v = 'joined' where id = 2")
        await streamer.caught_up()
        assert_equal(source, target, "abc")
        # The copy of one tenant's table leaves the rows of the others as they are.
        versions = "select sid, id, xmin::text from orders where sid <> 'a' order by 1, 2"
        before = target.execute(versions)
        target.execute("update orders set v = 'wrong' where sid = 'a'; delete from items")
        await streamer.ask("resync", "tenant_a.orders")
        await streamer.caught_up()
        assert target.execute(versions) == before
        assert rows(target, "orders", "sid = 'a'") == rows(source, "tenant_a.orders")
        # A comparison reads the rows of the tenant, and a repair writes only these.
        target.execute("insert into items values ('a', 99, 1)")
        results = await compare(streamer, repairs=True)
        assert all(result.is_equal for result in results.values())
        assert {result.row_sid for result in results.values()} == {"a", "b", "c"}
        assert_equal(source, target, "abc")
        await commands_choose_a_tenant_by_its_sid(source, target, streamer, compare)
        keys = "select count(*) from pg_constraint where conrelid::regclass::text in {}"
        kinds = target.value(keys.format("('orders', 'items')") + " and contype in ('p', 'u', 'f')")
        assert kinds == 4


async def commands_choose_a_tenant_by_its_sid(
    source: Database, target: Database, streamer: Streamer, compare: Compare
) -> None:
    address = TargetAddress.parse(streamer.settings.target.url)
    tables = {"tenant_b.items", "tenant_b.orders"}
    scope = Scope(sid="b")
    target.execute("update orders set v = 'wrong'; delete from items where id = 3")
    compared = await compare(streamer, ComparisonScope(sid="b"), repairs=True)
    assert {result.source for result in compared.values()} == tables
    assert_equal(source, target, "b")
    assert set(target.execute("select sid, v from orders where sid <> 'b'")) == {
        ("a", "wrong"),
        ("c", "wrong"),
    }
    asked = await request(address, "resync", "*.*", database="shop", sid="a")
    assert set(asked.names) == {"shop tenant_a.items", "shop tenant_a.orders"}
    assert await wait(address, streamer.mapping, 60, Scope(sid="a")) is None
    assert_equal(source, target, "ab")
    (shown,) = (await read_report(address, streamer.mapping, scope=scope)).sources
    assert {table.source for table in shown.tables} == tables
    drift = await read_drift(address, streamer.mapping, scope)
    assert drift.tenants == ["shop:b"]
    assert await count_rows(address, Choice(sid="c")) == 0
    with pytest.raises(MappingError, match="is streamed"):
        await count_rows(address, Choice(sid="none"))
    with pytest.raises(MappingError, match="no rows of a table have this sid"):
        await read_report(address, streamer.mapping, scope=Scope(sid="none"))
    with pytest.raises(MappingError, match="no rows of a table have this sid"):
        await read_drift(address, streamer.mapping, Scope(sid="none"))
    await streamer.ask("resync", "tenant_c.orders")
    await streamer.caught_up()


EVENTS = """
"tenant_b.events":
    {sid: "{schema:tenant_(.*)}", on_table_dropped: keep, type: append,
     partition_by: {column: at, keep: 3}}
"""


async def test_a_dropped_schema_leaves_rows_that_a_purge_deletes(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    add_tenants(source, "ab")
    source.execute(
        "create table tenant_b.events (id int primary key, at timestamptz);"
        "insert into tenant_b.events values (1, now() - interval '2 months'), (2, now())"
    )
    async with stream(RULES + EVENTS, settings=SETTINGS) as streamer:
        await streamer.caught_up()
        address = TargetAddress.parse(streamer.settings.target.url)

        async def listed() -> dict[str, tuple[str, int, str | None]]:
            tenants = await read_tenants(address, streamer.mapping)
            return {
                tenant.label: (tenant.state, tenant.tables, tenant.source) for tenant in tenants
            }

        assert await listed() == {
            "shop": ("streaming", 5, None),
            "shop:a": ("streaming", 2, "shop"),
            "shop:b": ("streaming", 3, "shop"),
        }
        with pytest.raises(MappingError, match="is in the mapping and has rows with sid"):
            await purge(address, streamer.mapping, "shop", "b", actor="test")
        source.execute("drop schema tenant_b cascade")

        async def is_gone() -> bool:
            return (await listed()).get("shop:b") == ("removed", 0, None)

        await streamer.eventually(is_gone)
        assert target.value("select count(*) from orders where sid = 'b'") == 5
        leaves = "select tableoid::regclass::text from events where id = 2"

        def expire(records: list[PurgeRecord]) -> None:
            """Drop a partition after the purge has read the partitions of the table."""
            deleted = {record.target: record.rows_deleted for record in records}
            for (partition,) in target.execute(leaves) if deleted["public.events"] else []:
                target.execute(f"drop table {partition}")

        done = await purge(address, streamer.mapping, "shop", "b", actor="test", report=expire)
        assert {record.target: record.rows_deleted for record in done.records} == {
            "public.orders": 5,
            "public.items": 5,
            "public.events": 1,
        }
        assert done.remaining == [], "tables without a sid have no rows of the tenant"
        assert target.execute("select id from events") == []
        assert "shop:b" not in await listed()
        # A schema of that name is a new tenant.
        add_tenants(source, "b")
        await streamer.table_state("tenant_b.orders", "ready")
        await streamer.table_state("tenant_b.items", "ready")
        await streamer.caught_up()
        assert_equal(source, target, "ab")


async def test_schemas_with_different_columns_share_tables_of_each_type(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """In one round of copies the first table makes the target, and each later table widens it."""
    kinds = {"a": "n int not null", "b": "n bigint, more text", "c": "note text", "d": "n smallint"}
    for sid, columns in kinds.items():
        create = f"create table tenant_{sid}.t (id int primary key, {columns})"
        source.execute(f"create schema tenant_{sid}; {create}")
    source.execute(
        "insert into tenant_a.t values (1, 1); insert into tenant_b.t values (1, 3000000000, 'm');"
        "insert into tenant_c.t values (1, 'x'); insert into tenant_d.t values (1, 4)"
    )
    add_tenants(source, "xy")
    rules = """
    "tenant_*.t": {target: all_of_them, sid: "{schema}"}
    "tenant_*.orders": {type: history, on_table_dropped: close, sid: "{schema:tenant_(.*)}"}
    "tenant_*.items": {type: append, on_table_dropped: keep, sid: "{schema:tenant_(.*)}"}
    """
    is_open = f"kvsz_end = {HISTORY_OPEN}"
    versions = f"select sid, count(*), count(*) filter (where {is_open}) from orders group by 1"
    async with stream(rules, settings=SETTINGS) as streamer:
        await streamer.caught_up()
        source.execute("; ".join(f"update tenant_{sid}.t set id = 2" for sid in kinds))
        source.execute("update tenant_x.orders set v = 'later'; delete from tenant_x.items")
        await streamer.caught_up()
        assert target.execute("select sid, id, n, more, note from all_of_them order by sid") == [
            ("tenant_a", 2, 1, None, None),
            ("tenant_b", 2, 3000000000, "m", None),
            ("tenant_c", 2, None, None, "x"),
            ("tenant_d", 2, 4, None, None),
        ]
        address = TargetAddress.parse(streamer.settings.target.url)
        drift = await read_drift(address, streamer.mapping, Scope(("tenant_*.t",)))
        deviating = {item.name: set(item.deviating) for item in drift.items if not item.is_equal}
        assert deviating["note"] == {"shop:tenant_c"}
        assert deviating["more"] == {"shop:tenant_b"}
        for sid in "xy":
            there = rows(target, "orders", f"sid = '{sid}' and {is_open}")
            assert there == rows(source, f"tenant_{sid}.orders")
        counts = target.execute("select sid, count(*) from items group by 1 order by 1")
        assert counts == [("x", 5), ("y", 5)]
        await streamer.ask("resync", "tenant_x.orders")
        await streamer.caught_up()
        assert sorted(target.execute(versions)) == [("x", 10, 5), ("y", 5, 5)]
        source.execute("drop schema tenant_y cascade")

        async def is_ended() -> bool:
            return sorted(target.execute(versions)) == [("x", 10, 5), ("y", 5, 0)]

        await streamer.eventually(is_ended)


async def test_a_changed_sid_copies_the_rows_again_and_the_former_rows_can_be_purged(
    source: Database, target: Database, tmp_path: Path
) -> None:
    add_tenants(source, "a")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, '"tenant_*.*": {sid: "{schema}"}')
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        write_config(path, source, target, RULES)
        await streamer.apply()
        await streamer.caught_up()
        assert_equal(source, target, "a")
        assert target.value("select count(*) from orders where sid = 'tenant_a'") == 5
        address = TargetAddress.parse(streamer.settings.target.url)
        await purge(address, streamer.mapping, "shop", "tenant_a", actor="test")
        assert target.execute("select distinct sid from orders") == [("a",)]
    finally:
        await streamer.stop()


@pytest.mark.follows("apply.rows.make_plan:missing_sid")
async def test_a_target_without_the_column_stops_the_tables_until_its_statements_ran(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("create schema tenant_a; create table tenant_a.t (id int primary key, v text)")
    source.execute("insert into tenant_a.t values (1, 'x')")
    target.execute("create table t (id int primary key, v text)")
    path = tmp_path / "config.yaml"
    write_config(path, source, target, '"tenant_*.t": {sid: "{schema}"}')
    streamer = Streamer(path)
    streamer.start()
    try:
        remedy = await remedy_of(streamer, "tenant_a.t", "which has no column sid")
        await Operator(path, source, target).follow(remedy)
        await streamer.ask("resume", "tenant_a.t")
        await streamer.caught_up()
        assert target.execute("select sid, id, v from t") == [("tenant_a", 1, "x")]
        # The key has the sid, too.
        target.execute("insert into t values (1, 'y', 'tenant_b')")
    finally:
        await streamer.stop()


async def test_check_names_a_schema_that_has_no_sid(
    source: Database, target: Database, tmp_path: Path
) -> None:
    source.execute("create schema other; create table other.t (id int primary key)")
    checker = Checker(tmp_path / "config.yaml", source, target)
    checker.configure('"*.t": {sid: "{schema:tenant_(.*)}"}')
    finding = await checker.finds(ERROR, "other.t", 'needs a schema that matches "tenant_(.*)"')
    assert "narrow the name of the rule" in str(finding)


async def test_a_schema_without_a_sid_of_its_own_stops_no_tenant(
    source: Database, target: Database, tmp_path: Path
) -> None:
    add_tenants(source, "ab")
    path, columns = tmp_path / "config.yaml", "(id int primary key, v text, n int)"
    rules = '"*.orders": {sid: "{schema:tenant_(.).*}", on_table_dropped: keep}'
    write_config(path, source, target, rules, settings=SETTINGS, group="ddl: capture")
    streamer = Streamer(path)
    streamer.start()

    async def condition() -> str:
        return str((await streamer.status())["error"])

    try:
        await streamer.caught_up()
        for schema, new, problem in (
            ("other", "c", "needs a schema"),
            ("tenant_ab", "d", 'with sid "a"'),
        ):
            source.execute(f"create schema {schema}; create table {schema}.orders {columns}")

            async def is_shown(problem: str = problem) -> bool:
                return problem in await condition()

            await streamer.eventually(is_shown)
            # The tenants stream, new tenants join, and a later attempt streams, too.
            add_tenants(source, new)
            await streamer.table_state(f"tenant_{new}.orders", "ready")
            await streamer.kill()
            streamer.start()
            source.execute(
                "update tenant_a.orders set v = v || '!'; update tenant_b.orders set n = 0 - n"
            )
            await streamer.caught_up()
            for sid in ("a", "b", new):
                assert rows(target, "orders", f"sid = '{sid}'") == rows(
                    source, f"tenant_{sid}.orders"
                )
            await streamer.eventually(is_shown)
            source.execute(f"drop schema {schema} cascade")

            async def is_gone() -> bool:
                return await condition() == "None"

            await streamer.eventually(is_gone)
        # Only the table that loses its sid stops, until it has its former name.
        source.execute("alter schema tenant_b rename to other; insert into other.orders values (9)")
        remedy = await remedy_of(streamer, "tenant_b.orders", "needs a schema that matches")
        assert "narrow the name of the rule" in str(remedy)
        source.execute("update tenant_a.orders set v = 'x'; alter schema other rename to tenant_b")
        await streamer.table_state("tenant_b.orders", "ready")
        await streamer.caught_up()
        for sid in "ab":
            assert rows(target, "orders", f"sid = '{sid}'") == rows(source, f"tenant_{sid}.orders")
    finally:
        await streamer.stop()


async def test_definitions_of_schemas_change_and_schemas_get_new_names(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    for sid in "ab":
        source.execute(f"create schema tenant_{sid}")
        source.execute(f"create table tenant_{sid}.t (id int primary key, v text)")
        source.execute(f"insert into tenant_{sid}.t values (1, '1')")
    rules = '"tenant_*.t": {sid: "{schema}"}'
    group = "ddl: capture\non_ddl: apply"
    async with stream(rules, settings=SETTINGS, group=group) as streamer:
        await streamer.caught_up()
        # The last schema makes the change for all.
        source.execute("alter table tenant_a.t add column w int default 7")
        source.execute("alter table tenant_a.t alter v type int using v::int * 2")
        await remedy_of(streamer, "tenant_a.t", "waits for a decision")
        source.execute("alter table tenant_b.t add column w int default 8")
        source.execute("alter table tenant_b.t alter v type int using v::int * 2")
        source.execute("insert into tenant_a.t values (2, 5); insert into tenant_b.t values (2, 6)")
        await streamer.caught_up()
        assert target.execute("select sid, id, v, w from t order by 1, 2") == [
            ("tenant_a", 1, 2, 7),
            ("tenant_a", 2, 5, 7),
            ("tenant_b", 1, 2, 8),
            ("tenant_b", 2, 6, 8),
        ]
        # The rows of a renamed schema have the former sid, so its tables wait.
        source.execute("alter schema tenant_a rename to tenant_c")
        source.execute("insert into tenant_c.t values (3); insert into tenant_b.t values (3)")
        remedy = await remedy_of(streamer, "tenant_a.t", 'the new name would get sid "tenant_c"')
        assert "rename it back" in str(remedy)
        # The pattern adds the new name, which has no table of its own and leaves with the name.
        await has_relation(streamer, target, "tenant_c.t", True)
        source.execute("alter schema tenant_c rename to tenant_a")
        source.execute("insert into tenant_a.t values (4)")
        await streamer.caught_up()
        assert target.execute("select sid, id from t where id > 2 order by 1, 2") == [
            ("tenant_a", 3),
            ("tenant_a", 4),
            ("tenant_b", 3),
        ]
        await has_relation(streamer, target, "tenant_c.t", False)
        # Two reloads in quick succession leave both names out, and copy the new name.
        source.execute("alter schema tenant_a rename to tenant_c")
        await remedy_of(streamer, "tenant_a.t", 'the new name would get sid "tenant_c"')
        both = 'exclude_tables: ["tenant_a.t", "tenant_c.t"]'
        for lines in (f"{group}\n{both}", group):
            write_config(streamer.path, source, target, rules, settings=SETTINGS, group=lines)
            await streamer.apply()
        await streamer.table_state("tenant_c.t", "ready")
        await streamer.caught_up()
        await has_relation(streamer, target, "tenant_a.t", False)
        copied = "select id from t where sid = 'tenant_c' order by 1"
        assert target.execute(copied) == source.execute("select id from tenant_c.t order by 1")


async def has_relation(streamer: Streamer, target: Database, name: str, is_expected: bool) -> None:
    sql = f"select exists (select from streamer.relation where source = '{name}')"

    async def is_as_expected() -> bool:
        return bool(target.value(sql)) is is_expected

    await streamer.eventually(is_as_expected)


async def test_schemas_come_and_go_while_processes_die(
    source: Database, target: Database, tmp_path: Path
) -> None:
    """In the end the rows of each tenant are those of its schema, whatever the order of events.
    The tables in sync share a lane, which has changes of several tables for one target.
    """
    dice = random.Random(37)
    present, path = set("ab"), tmp_path / "config.yaml"
    add_tenants(source, sorted(present))
    rules = '"tenant_*.*": {sid: "{schema:tenant_(.*)}", on_table_dropped: keep}'
    settings = f"{SETTINGS}\nconsistency: transaction\nworkers: 3"
    write_config(path, source, target, rules, settings=settings)
    streamer = Streamer(path)
    streamer.start()
    try:
        await streamer.caught_up()
        for step in range(12):
            sid = dice.choice(sorted(present))
            table = f"tenant_{sid}.{dice.choice(NAMES)}"
            match dice.randrange(6):
                case 0 if len(present) < 5:
                    new = min(set("abcdef") - present)
                    add_tenants(source, new)
                    present.add(new)
                case 1 if len(present) > 2:
                    source.execute(f"drop schema tenant_{sid} cascade")
                    present.discard(sid)
                case 2:
                    source.execute(f"truncate tenant_{sid}.items, tenant_{sid}.orders")
                case 3:
                    await streamer.kill()
                    streamer.start()
                case 4:
                    target.execute(
                        "insert into streamer.request (relation_id, action, options)"
                        " select id, 'resync', '{}' from streamer.relation"
                        f" where source = '{table}' and snapshot_lsn is not null"
                    )
            source.execute(
                ";".join(
                    f"insert into tenant_{name}.orders values ({100 + step}, 's', {100 + step})"
                    f" on conflict do nothing; update tenant_{name}.orders set v = '{step}'"
                    f" where id % {dice.randrange(2, 5)} = 0"
                    for name in sorted(present)
                )
            )
        for name in sorted(present):
            for table in NAMES:
                await streamer.table_state(f"tenant_{name}.{table}", "ready")
        await streamer.caught_up()
        assert_equal(source, target, sorted(present))
    finally:
        await streamer.stop()


@pytest.mark.follows("apply.write.rejection_advice:_run_at_target")
async def test_a_unique_index_without_the_sid_goes_and_no_copy_is_offered(
    source: Database, target: Database, stream: MakeStreamer
) -> None:
    """A copy of a tenant keeps the rows of the other tenant, so the same rows collide again."""
    for sid in "ab":
        source.execute(
            f"create schema tenant_{sid}; create table tenant_{sid}.t (id int primary key, v int);"
            f"insert into tenant_{sid}.t values (0, {-ord(sid)})"
        )
    async with stream('"tenant_*.*": {sid: "{schema:tenant_(.*)}"}') as streamer:
        operator, find = Operator(streamer.path, source, target), find_in(streamer)
        await streamer.caught_up()
        target.execute("create unique index t_v on t (v)")
        source.execute("insert into tenant_a.t values (1, 1)")
        await streamer.caught_up()
        source.execute("insert into tenant_b.t values (1, 1)")
        problem = await find("tenant_b.t", ProblemKind.TABLE)
        assert 'rows of two sids can collide, because "t_v" lacks column "sid"' in problem.sentence
        assert "rows of one sid collide if the source lacks such a unique" in problem.sentence
        assert "under `tables` in the configuration or on the page" in problem.sentence
        assert [command.action for command in problem.commands] == ["resume"]

        # WHEN a copy fails, too, THEN the problem keeps the statement.
        await streamer.ask("resync", "tenant_b.t")
        remedy = await remedy_of(streamer, "tenant_b.t", "after copying")
        assert problem.remedy is not None
        assert remedy.sql == problem.remedy.sql
        (problem,) = await read_problems(streamer)
        assert [command.action for command in problem.commands] == ["resume"]
        await operator.follow(remedy)
        await streamer.caught_up(60)

        # Without a copy, the stream continues by itself after the statement.
        target.execute("create unique index t_v on t (v) where v > 1")
        source.execute("insert into tenant_a.t values (2, 2)")
        await streamer.caught_up()
        source.execute("insert into tenant_b.t values (2, 2)")
        problem = await find("tenant_b.t", ProblemKind.TABLE)
        assert problem.remedy is not None
        assert CONTINUES in str(problem.remedy)
        await operator.follow(problem.remedy)
        await are_gone(streamer)
        await streamer.caught_up()
        wanted = [("a", 1, 1), ("a", 2, 2), ("b", 1, 1), ("b", 2, 2)]
        assert target.execute("select sid, id, v from t where id > 0 order by 1, 2") == wanted
