"""Digests of a comparison: both servers add up the same binary values, at the same time."""

import threading
from typing import TYPE_CHECKING, Any

import pytest

from streamer.compare import readings, unit_reader
from streamer.compare.comparison import ComparisonScope, TableResult
from streamer.compare.readings import SOURCE, RangeReader
from tests.support.comparing import Compare
from tests.support.shared import Shared, streams

if TYPE_CHECKING:
    from collections.abc import Callable

TYPES = """
create type mood as enum ('sad', 'glad');
create domain positive as int check (value > 0);
create type pair as (a int, b text);
"""
DDL = """
create table kinds (id bigint primary key, s int2, i int, b bigint, n numeric, f float8, r real,
    x text, c char(4), v varchar(10), z bytea, u uuid, d date, t time, at timestamp, tz timestamptz,
    span interval, j json, jb jsonb, bits bit(3), more bit varying, ip inet, m mood, p positive,
    q pair, a int[], am mood[], rg int4range, o oid, cls regclass, "char" "char", l boolean);
"""
ROWS = """
insert into kinds values (1, 1, 2, 3, 1.50, 'infinity', 0.1, '', 'ab', 'cd ', '\\x00ff',
    '00000000-0000-0000-0000-000000000001', 'infinity', '12:00', '-infinity', '2026-01-01 00:00+00',
    '1 mon 2 days', '{"a":  1}', '{"a":  1}', '101', '1', '10.0.0.1', 'glad', 5, '(1,x)',
    '[2:3]={1,2}', '{sad,glad}', '[1,5)', 26, 'pg_class', 'x', true);
insert into kinds select (jsonb_populate_record(k, jsonb_build_object('id', g))).*
    from kinds k, generate_series(2, 20) g;
insert into kinds values (21);
"""
CHANGES = (
    "n = 1.5",
    "f = 'nan'",
    "c = 'ab x'",
    "v = 'cd'",
    "x = null",
    "b = 3 + 4294967296 * 3",
    "tz = tz + interval '1 microsecond'",
    "span = '32 days'",
    """j = '{"a": 1}'""",
    "m = 'sad'",
    "q = '(1,y)'",
    "a = '{1,2}'",
    "am = '{sad,sad}'",
    "cls = 'pg_type'",
    "z = '\\x00fe'",
    "l = false",
)


RULE = "kinds: {initial: none}"
KINDS = f"{TYPES} {DDL} {ROWS}"
CHANGED = "; ".join(
    f"update kinds set {change} where id = {number}" for number, change in enumerate(CHANGES, 1)
)


async def result_of(shared: Shared, compare: Compare, table: str = "kinds") -> TableResult:
    """Compare the only table of a test."""
    await shared.caught_up()
    return (await compare(shared, ComparisonScope(shared.tables)))[shared.own(table)]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables of which a comparison has fetched rows: their digests differed."""
    names: list[str] = []
    fetch: Callable[..., Any] = readings.fetch_rows

    def recorded(table: Any, *arguments: Any) -> Any:
        names.append(table.target_name)
        return fetch(table, *arguments)

    monkeypatch.setattr(unit_reader, "fetch_rows", recorded)
    return names


@streams(RULE, source=KINDS, target=f"create type other as enum ('x'); {KINDS}")
async def test_equal_rows_of_every_kind_of_type_have_equal_digests(
    shared: Shared, compare: Compare, fetched: list[str]
) -> None:
    """Types that users create have different OIDs on both sides."""
    assert (await result_of(shared, compare)).is_equal
    assert fetched == []


@streams(RULE, source=KINDS, target=KINDS + CHANGED)
async def test_a_changed_value_of_any_type_is_a_difference(
    shared: Shared, compare: Compare
) -> None:
    result = await result_of(shared, compare)
    assert (result.missing, result.extra, result.different) == (0, 0, len(CHANGES))


@streams(
    "f: {initial: none}",
    both="create table f (id int primary key, v float8)",
    source="insert into f values (1, float8 'infinity' - float8 'infinity')",
    target="insert into f values (1, 'nan')",
)
async def test_values_with_several_binary_forms_are_no_difference(
    shared: Shared, compare: Compare, fetched: list[str]
) -> None:
    forms = [
        side.value("select float8send(v)::text from f") for side in (shared.source, shared.target)
    ]
    assert (await result_of(shared, compare, "f")).is_equal
    assert bool(fetched) == (forms[0] != forms[1])


@streams(RULE, both=KINDS)
async def test_both_sides_of_a_range_are_read_at_the_same_time(
    shared: Shared, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_target_read = threading.Event()
    add_up: Callable[..., Any] = RangeReader._add_up

    def in_order(self: RangeReader, table: Any, unit: Any, side: int, parts: Any) -> Any:
        if side == SOURCE:
            assert is_target_read.wait(60)
        sums = add_up(self, table, unit, side, parts)
        is_target_read.set()
        return sums

    monkeypatch.setattr(RangeReader, "_add_up", in_order)
    assert (await result_of(shared, compare)).is_equal
