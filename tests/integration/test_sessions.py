"""The costs and the pinned settings of a session, on every version."""

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import asyncpg
import psycopg
import pytest

from streamer.commands.demo.embedded_servers import Server
from streamer.errors.error_classes import StreamerError
from streamer.postgres import session_settings
from streamer.postgres.secret import Secret
from streamer.source.connection import connection, fetch_one
from streamer.target.array_types import OWN_ARRAYS, own_array
from streamer.target.connection import TargetAddress, target_connection
from tests.support.hostile_sessions import hostile
from tests.support.postgres import Database, versions
from tests.unit.build import source_mapping


@pytest.mark.parametrize("major", sorted(versions()))
def test_only_the_named_settings_need_a_superuser(
    servers: Callable[[str], Server], major: str
) -> None:
    with Database(servers(major), "postgres").connect() as connection:
        rows = connection.execute("select lower(name), context from pg_settings").fetchall()
    known = {str(name): context for name, context in rows}
    pinned = {name: known[name] for name in session_settings.PINNED if name in known}
    assert {name for name in pinned if pinned[name] == "superuser"} == session_settings.SUPERUSER
    assert set(pinned.values()) == {"superuser", "user"}


@pytest.mark.parametrize("major", sorted(versions()))
def test_every_setting_that_the_server_knows_is_pinned(
    servers: Callable[[str], Server], major: str
) -> None:
    shown = "select lower(name), setting from pg_settings where lower(name) = any (%s)"
    server = servers(major)
    cases = itertools.product(("postgres", "pg_read_all_stats"), (True, False))
    for role, is_told in cases:
        with Database(server, "postgres").connect() as connection:
            connection.execute(f"set role {role}".encode())
            version = connection.info.server_version
            is_superuser = "on" if role == "postgres" else "off"
            told: dict[str, Any] = (
                {"version": version, "is_superuser": is_superuser} if is_told else {}
            )
            connection.execute(session_settings.pin_sql(**told).encode())
            found = connection.execute(shown, (list(session_settings.PINNED),)).fetchall()
            values = {str(name): str(value) for name, value in found}
        wanted = {name: value for name, value in session_settings.PINNED.items() if name in values}
        # The server of the tests has this value anyway; pg_settings shows times without units.
        values["search_path"] = values["search_path"].strip('"')
        assert values == wanted


async def test_an_error_ends_no_session(source: Database, target: Database) -> None:
    """streamer tries statements that a server may refuse, and goes on in the same session."""
    with hostile({"exit_on_error": "on"}, source), hostile({"exit_on_error": "on"}, target):
        async with connection(source_mapping(url=Secret(source.url))) as plain:
            with pytest.raises(psycopg.errors.DivisionByZero):
                await plain.execute("select 1 / 0")
            assert await fetch_one(plain, "select 1 as one") == {"one": 1}
        address = TargetAddress.parse(Secret(target.url))
        async with target_connection(address, "streamer test") as connected:
            with pytest.raises(StreamerError, match="division by zero"):
                await connected.execute("select 1 / 0")
            assert await connected.fetch_value("select 1") == 1


async def test_the_driver_asks_for_no_array_of_ours_and_for_others_in_every_session(
    target: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[int]] = []
    told: list[dict[str, Any]] = []
    ask = asyncpg.Connection._introspect_types

    async def count(self: Any, typeoids: Any, *rest: Any) -> Any:
        asked.append(set(typeoids))
        rows, statement = await ask(self, typeoids, *rest)
        told.extend(dict(row) for row in rows)
        return rows, statement

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", count)
    target.execute("create type mood as enum ('sad'); create table t (m mood[])")
    oid = target.value("select 'mood[]'::regtype::oid")
    target.execute("insert into t values ('{sad}')")
    address = TargetAddress.parse(Secret(target.url))
    since = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    arrays = {
        "bool": [True, None],
        "int2": [1, -2],
        "int4": [3, None],
        "int8": [2**40],
        "float4": [0.25, None],
        "float8": [0.5, None],
        "timestamptz": [since],
    }
    assert {name for name, _ in OWN_ARRAYS.values()} == arrays.keys()
    columns = ", ".join(f"${n}::{name}[] as {name}" for n, name in enumerate(arrays, 1))
    for _ in range(2):
        async with target_connection(address) as connection:
            rows = await connection.fetch(f"select {columns}", *arrays.values())
            assert [dict(row) for row in rows] == [arrays]
            (row,) = await connection.fetch("select m from public.t")
            assert row["m"] == ["sad"]
    assert asked == [{oid}, {oid}]
    # A server says the same about our arrays as we do.
    raw = await asyncpg.connect(target.url)
    try:
        told.clear()
        await raw._introspect_types([*OWN_ARRAYS], 10)
    finally:
        await raw.close()
    by_oid = {row["oid"]: row for row in told}
    for oid in OWN_ARRAYS:
        own = own_array(oid)
        known = {name: by_oid[oid][name] for name in own.keys() - {"elemtype_name", "elemdelim"}}
        assert known == {name: own[name] for name in known}
        assert by_oid[oid]["elemdelim"] in (",", b",")
