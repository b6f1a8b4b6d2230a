"""The declaration of bookkeeping tables: statements and codecs, without a server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import pytest

from streamer.bookkeeping.bookkeeping_table import ELSEWHERE, BookkeepingTable, Codec, fields_of
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.errors.remedies import Remedy, run
from streamer.mapping.relation_names import RelationName
from streamer.util.lsn import Lsn


class State(StrEnum):
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Example:
    number: Annotated[int, Codec("e.id")]
    name: RelationName
    state: State
    lsn: Lsn | None
    details: dict[str, Any]
    wait: TableWait | None
    error: ErrorReport | None
    labels: tuple[str, ...]
    statements: tuple[str, ...] | None
    is_ended: Annotated[bool, Codec("e.ended_at is not null")]
    has_returned: Annotated[bool, ELSEWHERE] = False


EXAMPLES = BookkeepingTable("example", "e", Example, "join streamer.other o using (id)")
REMEDY = Remedy.of("run: ", run("resume", "public.t"))
ROW = {
    "number": 1,
    "name": "public.t",
    "state": "ready",
    "lsn": "16/B374D848",
    "details": '{"a": [1]}',
    "wait": None,
    "error": json.dumps(["it failed", "value", REMEDY.to_json()]),
    "labels": ["a", "b"],
    "statements": '["create index", "analyze"]',
    "is_ended": True,
}


class Recorder:
    """Records statements in place of running them."""

    def __init__(self, rows: Sequence[Any] = ()) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._rows = rows

    async def execute(self, sql: str, /, *parameters: Any) -> int:
        self.calls.append((sql, parameters))
        return 1

    async def fetch(self, sql: str, /, *parameters: Any) -> Sequence[Any]:
        self.calls.append((sql, parameters))
        return self._rows

    async def fetch_value(self, sql: str, /, *parameters: Any) -> Any:
        raise AssertionError(sql)


def test_a_query_names_every_column_with_its_table() -> None:
    assert EXAMPLES.select == (
        "select e.id as number, e.name as name, e.state as state, e.lsn::text as lsn,"
        " e.details as details, e.wait as wait, case when e.error is not null then"
        " pg_catalog.jsonb_build_array(e.error, e.error_code, e.error_remedy) end::text as error,"
        " e.labels as labels, e.statements as statements, e.ended_at is not null as is_ended"
        " from streamer.example e join streamer.other o using (id)"
    )


async def test_a_row_becomes_a_record_with_the_types_of_its_fields() -> None:
    (record,) = await EXAMPLES.read(Recorder([ROW]), "where e.id = $1", 1)
    assert record == Example(
        number=1,
        name=RelationName("public", "t"),
        state=State.READY,
        lsn=Lsn.parse("16/B374D848"),
        details={"a": [1]},
        wait=None,
        error=ErrorReport("it failed", "value", REMEDY),
        labels=("a", "b"),
        statements=("create index", "analyze"),
        is_ended=True,
    )


def test_a_null_stays_none() -> None:
    record = EXAMPLES.record(dict.fromkeys(ROW))
    assert [record.lsn, record.error, record.statements, record.name] == [None] * 4


async def test_the_first_record_is_found_or_none() -> None:
    assert await EXAMPLES.find(Recorder(), "where false") is None
    found = await EXAMPLES.find(Recorder([ROW, ROW | {"number": 2}]), "")
    assert found is not None
    assert found.number == 1


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (Lsn.parse("0/10"), "0/10"),
        (RelationName("public", "t"), "public.t"),
        (State.READY, "ready"),
        (frozenset({"b", "a"}), ["a", "b"]),
        (TableWait("a lock"), {"text": "a lock", "remedy": None, "is_turn": False}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
        ("größer", "größer"),
        (("a", None), ["a", None]),
        (1.5, 1.5),
        (None, None),
    ],
)
async def test_a_value_travels_as_the_json_that_its_column_reads(value: Any, stored: Any) -> None:
    session = Recorder()
    await EXAMPLES.update(session, {"value": value}, "where id = $2", 7)
    ((sql, (values, number)),) = session.calls
    assert sql == (
        "update streamer.example e set (value) = (select value from"
        " pg_catalog.json_populate_record(null::streamer.example, $1::text::json)) where id = $2"
    )
    assert (json.loads(values), number) == ({"value": stored}, 7)


async def test_an_error_fills_its_three_columns_and_none_clears_them() -> None:
    session = Recorder()
    await EXAMPLES.update(session, {"error": ErrorReport("it failed", "value", REMEDY)}, "")
    await EXAMPLES.update(session, {"error": None}, "", also="changed_at = now()")
    (first, (values,)), (second, (cleared,)) = session.calls
    assert (
        "set (error, error_code, error_remedy) = (select error, error_code, error_remedy" in first
    )
    assert json.loads(values) == {
        "error": "it failed",
        "error_code": "value",
        "error_remedy": REMEDY.to_json(),
    }
    assert set(json.loads(cleared).values()) == {None}
    assert second.endswith("), changed_at = now() ")


async def test_several_rows_travel_in_one_statement() -> None:
    session = Recorder()
    await EXAMPLES.insert(
        session, [{"id": 1, "lsn": Lsn(1)}, {"id": 2, "lsn": None}], "on conflict"
    )
    await EXAMPLES.update_each(session, [{"id": 1, "lsn": Lsn(1)}], "and e.lsn < v.lsn")
    (inserted, (rows,)), (updated, _) = session.calls
    assert inserted == (
        "insert into streamer.example as e (id, lsn) select v.id, v.lsn from"
        " pg_catalog.json_populate_recordset(null::streamer.example, $1::text::json) v on conflict"
    )
    assert json.loads(rows) == [{"id": 1, "lsn": "0/1"}, {"id": 2, "lsn": None}]
    assert updated == (
        "update streamer.example e set lsn = v.lsn from"
        " pg_catalog.json_populate_recordset(null::streamer.example, $1::text::json) v"
        " where e.id = v.id and e.lsn < v.lsn"
    )


async def test_no_rows_need_no_statement() -> None:
    session = Recorder()
    assert await EXAMPLES.insert(session, []) == await EXAMPLES.update_each(session, []) == 0
    assert session.calls == []


def test_the_fields_of_a_record_are_the_values_of_its_row() -> None:
    record = EXAMPLES.record(ROW)
    values = fields_of(record, "has_returned", "wait")
    assert list(values) == [name for name in ROW if name != "wait"]
    assert values["lsn"] is record.lsn
