"""The cost of many tables and many sources."""

import asyncio
from typing import Any

import psycopg
import pytest

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate
from streamer.bookkeeping.registered_relations import register_relations
from streamer.bookkeeping.requests import CHANNEL, has_requests
from streamer.commands.check import target_facts
from streamer.indexes import foreign_key_indexes
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule
from streamer.postgres.secret import Secret
from streamer.runtime import target_health
from streamer.runtime.process import source_queries
from streamer.source.catalog import read_relations
from streamer.source.connection import Connection, connection
from streamer.source.guarded_identities import IDENTITIES_SQL
from streamer.source.slot_and_publications.guard_query import read_guard_facts
from streamer.source.tables import attached_partitions, rewritten_tables
from streamer.target import catalog, foreign_key_groups, missing_grants
from streamer.target.connection import TargetAddress, TargetConnection
from tests.support.postgres import Database
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until


def mapping(number: int) -> RelationMapping:
    name = RelationName("public", f"t_{number}")
    rule = TableRule(RelationPattern(name.namespace, name.name, False, False))
    return RelationMapping(name, name, rule)


async def test_a_start_asks_as_much_for_many_tables_as_for_one(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []

    def counting(name: str) -> None:
        real = getattr(TargetConnection, name)

        async def run(self: TargetConnection, sql: str, *parameters: Any) -> Any:
            statements.append(sql)
            return await real(self, sql, *parameters)

        monkeypatch.setattr(TargetConnection, name, run)

    bookkeeping = Bookkeeping(TargetAddress.parse(Secret(target.url)))
    try:
        await migrate(bookkeeping)
        target.execute(
            "insert into streamer.source (database, slot, publication) values ('shop', 's', 'p')"
        )
        source_id = int(str(target.value("select id from streamer.source")))
        for name in ("execute", "fetch"):
            counting(name)
        one = await register_relations(bookkeeping, source_id, [mapping(0)])
        for_one = len(statements)
        statements.clear()
        many = [mapping(number) for number in (3, 1, 2, 0, *range(4, 300))]
        found = await register_relations(bookkeeping, source_id, many)
        assert len(statements) == for_one
        assert [record.source for record in found] == [str(each.source) for each in many]
        assert found[3].relation_id == one[0].relation_id
        assert {record.state for record in found} == {"init"}
    finally:
        await bookkeeping.close()


async def test_sources_ask_for_requests_only_if_there_are_any(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_health, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(target_health, "REQUEST_POLL_SECONDS", 0.0)
    polls = 0
    passed: list[bool] = []

    async def counting(connection: TargetConnection) -> bool:
        nonlocal polls
        polls += 1
        return await has_requests(connection)

    monkeypatch.setattr(target_health, "has_requests", counting)
    address = TargetAddress.parse(Secret(target.url))
    watch = target_health.TargetMonitor(
        address, CHANNEL, lambda payload: True, passed.append, lambda error: None, lambda: None
    )
    bookkeeping = Bookkeeping(address)
    watching = asyncio.create_task(watch.run())
    try:
        await until(lambda: polls >= 2)  # before there is any bookkeeping
        await migrate(bookkeeping)
        target.execute(
            "insert into streamer.source (database, slot, publication) values ('shop', 's', 'p')"
        )
        before = polls
        await until(lambda: polls >= before + 3)
        assert passed == []
        source_id = int(str(target.value("select id from streamer.source")))
        await register_relations(bookkeeping, source_id, [mapping(0)])
        # As if the notification had been lost with a connection.
        target.execute(
            "insert into streamer.request (relation_id, action)"
            " select id, 'pause' from streamer.relation"
        )
        await until(lambda: bool(passed))
        assert not any(passed)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await bookkeeping.close()


async def test_tables_that_change_first_at_one_time_are_described_together(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t_{number}" for number in range(20)]
    tables = "; ".join(f"create table {name} (id int primary key, v text)" for name in names)
    source.execute(tables)
    target.execute(tables)
    asked: list[list[str]] = []

    async def asking(plain: Connection, wanted: list[RelationName]) -> Any:
        asked.append([name.name for name in wanted])
        return await read_relations(plain, wanted)

    monkeypatch.setattr(source_queries, "read_relations", asking)
    rules = "\n".join(f"{name}: {{initial: none}}" for name in names)
    async with stream(rules) as streamer:
        await streamer.caught_up()
        source.execute("; ".join(f"insert into {name} values (1, '{name}')" for name in names))
        await streamer.caught_up()
        for name in names:
            assert target.execute(f"select v from {name}") == [(name,)]
    assert sorted(name for some in asked for name in some) == sorted(names)
    # A worker requests all its tables at once, and joins the requests of further workers. On a
    # loaded machine, the reader may receive the transaction in several pieces.
    assert len(asked) <= len(names) // 2


async def test_a_look_of_the_guard_is_one_statement(source: Database) -> None:
    source.execute("create table t_0 (id int primary key)")
    mapped = SourceMapping("shop", None, Secret(source.url), ())
    async with connection(mapped) as plain:
        await plain.execute(
            "select pg_create_logical_replication_slot(%s, 'pgoutput')", [mapped.slot]
        )
        names = [mapping(0).source]
        before = await read_guard_facts(plain, mapped, names, plain.info.server_version)
        assert before.slot is not None
        assert before.slot.name == mapped.slot
        source.execute("alter table t_0 replica identity full")
        statements: list[str] = []
        execute = plain.execute

        async def counting(sql: Any, *parameters: Any, **options: Any) -> Any:
            statements.append(sql)
            return await execute(sql, *parameters, **options)

        plain.execute = counting  # type: ignore[assignment, method-assign]
        after = await read_guard_facts(plain, mapped, names, plain.info.server_version)
        assert len(statements) == 1
        assert after.digest != before.digest
        assert after.flush_lsn >= before.flush_lsn
        await execute("select pg_drop_replication_slot(%s)", [mapped.slot])
        gone = await read_guard_facts(plain, mapped, names, plain.info.server_version)
        assert gone.slot is None


LIKE_NAMED: list[tuple[str, str]] = [
    ("identities", IDENTITIES_SQL),
    ("attached partitions", attached_partitions._LEAVES_SQL),
    ("rewritten tables", rewritten_tables._TABLES_SQL),
    ("foreign keys", foreign_key_groups._KEYS_SQL),
    ("columns of keys", foreign_key_indexes._FOREIGN_KEYS_SQL),
    ("indexes", foreign_key_indexes._LEFTOVERS_SQL.replace("$3", "'none'")),
    ("target", catalog._RELATION_SQL),
    ("check", target_facts._TABLES_SQL),
    ("privileges", missing_grants._TABLES_SQL),
]


def test_like_named_tables_of_many_schemas_are_read_one_by_one(source: Database) -> None:
    """A join by name alone would have a row for each pair of like-named tables."""
    schemas, tables = 120, 5
    source.execute(
        "".join(
            f"create schema s_{n};"
            + "".join(f"create table s_{n}.t_{k} (id int primary key);" for k in range(tables))
            for n in range(schemas)
        )
    )
    namespaces = [f"s_{n}" for n in range(schemas) for _ in range(tables)]
    names = [f"t_{k}" for _ in range(schemas) for k in range(tables)]
    for title, sql in LIKE_NAMED:
        query = sql.replace("{namespaces}", "$1::text[]").replace("{names}", "$2::text[]")
        query = query.replace("%s", "$1", 1).replace("%s", "$2", 1)
        rows = _most_rows(source, query, namespaces, names)
        assert rows <= 10 * len(names), title


def _most_rows(database: Database, sql: str, *arrays: list[str]) -> int:
    """Return the greatest number of rows of a node of the query's plan."""
    with psycopg.connect(database.url, cursor_factory=psycopg.RawCursor) as session:
        answer = session.execute("explain (analyze, timing off, format json) " + sql, arrays)
        row = answer.fetchone()
    assert row is not None
    plans, rows = [row[0][0]["Plan"]], 0
    while plans:
        plan = plans.pop()
        plans += [
            part
            for part in plan.get("Plans", [])
            if part["Parent Relationship"] != "SubPlan"  # reads facts of one table
        ]
        rows = max(rows, round(plan["Actual Rows"] * plan["Actual Loops"]))
    return rows
