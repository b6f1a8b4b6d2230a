"""The declaration of a bookkeeping table: a record whose fields name columns and their codecs.

The module of a table declares the table and contains all statements that write its rows. Simple
statements come from the declaration; a statement that makes a decision is SQL in that module.

Values travel as a single JSON object, which the server converts to a row of the table. So only the
migration states the types of columns.
"""

import enum
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Generic,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
)

from streamer.errors.error_classes import StreamerError
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
Values = Mapping[str, Any]


class Executor(Protocol):
    """Runs statements on the bookkeeping: a connection, or `Bookkeeping` over its connection."""

    async def execute(self, sql: str, /, *parameters: Any) -> int: ...

    async def fetch(self, sql: str, /, *parameters: Any) -> Sequence[Any]: ...

    async def fetch_value(self, sql: str, /, *parameters: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Codec:
    """The way to read a field. ``sql``: an expression in which ``{}`` stands for the qualified
    column.
    """

    sql: str = "{}"
    decode: Callable[[Any], Any] | None = None


ELSEWHERE: Final = Codec("")
"""Marks a field without a column in the table: the field keeps its default."""


def _error(stored: str) -> ErrorReport:
    text, code, remedy = json.loads(stored)
    return ErrorReport(text, code or StreamerError.code, Remedy.from_json(remedy))


_COLUMNS: Final[dict[Any, Codec]] = {
    Lsn: Codec("{}::text", Lsn.parse),
    RelationName: Codec(decode=parse_name),
    ErrorReport: Codec(
        "case when {0} is not null then"
        " pg_catalog.jsonb_build_array({0}, {0}_code, {0}_remedy) end::text",
        _error,
    ),
    dict: Codec(decode=json.loads),
}


def _column(hint: Any) -> Codec:
    """Return the way to read a field of the type *hint*."""
    declared: Codec = Codec()
    if get_origin(hint) is Annotated:
        hint, declared = get_args(hint)
        if declared.decode is not None:
            return declared
    if isinstance(hint, types.UnionType) or get_origin(hint) is typing.Union:
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    kind = get_origin(hint) or hint
    column = _COLUMNS.get(kind) or Codec(decode=_decoder(kind))
    return column if declared == Codec() else Codec(declared.sql, column.decode)


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    if kind in (tuple, frozenset):  # from an array or a JSON array
        return lambda stored: kind(json.loads(stored) if isinstance(stored, str) else stored)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if (from_json := getattr(kind, "from_json", None)) is not None:
        return lambda stored: from_json(json.loads(stored))
    return None


def plain(value: Any) -> Any:
    """Return *value* in its JSON form."""
    if isinstance(value, Lsn | RelationName):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    if hasattr(value, "to_json"):
        stored = value.to_json()
        return json.loads(stored) if isinstance(stored, str) else stored
    return value if isinstance(value, dict | list | tuple) or value is None else _scalar(value)


def _scalar(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else value.isoformat()


def to_json(values: Any) -> str:
    """Return *values* as a parameter in JSON."""
    return json.dumps(values, ensure_ascii=False)


def fields_of(record: Any, *left_out: str) -> dict[str, Any]:
    """Return the values of *record*, for `BookkeepingTable.insert`."""
    names = (field.name for field in fields(record))
    return {name: getattr(record, name) for name in names if name not in left_out}


class BookkeepingTable(Generic[R]):
    """A table of the schema `streamer`, whose rows become objects of *record*.

    *alias*: its name in statements. *joined*: the tables from which records have additional fields.
    """

    def __init__(self, name: str, alias: str, record: type[R], joined: str = "") -> None:
        self.name = f"streamer.{name}"
        self.alias = alias
        self._record = record
        self._from = f"{self.name} {alias} {joined}"

    @cached_property
    def columns(self) -> dict[str, Codec]:
        """The way to read each field of the record, by field name."""
        hints = typing.get_type_hints(self._record, include_extras=True)
        names = [field.name for field in fields(self._record)]
        columns = {name: _column(hints[name]) for name in names}
        return {name: column for name, column in columns.items() if column.sql}

    @cached_property
    def listed(self) -> str:
        """The columns of a record, as a query or RETURNING lists them."""
        return ", ".join(
            f"{column.sql.format(f'{self.alias}.{name}')} as {name}"
            for name, column in self.columns.items()
        )

    @cached_property
    def select(self) -> str:
        """The query of all records, to which a caller may add a condition."""
        return f"select {self.listed} from {self._from}"

    def record(self, row: Any) -> R:
        """Return the record of a row of `select`."""
        return self._record(
            **{
                name: column.decode(row[name])
                if column.decode is not None and row[name] is not None
                else row[name]
                for name, column in self.columns.items()
            }
        )

    async def read(self, session: Executor, clause: str = "", *parameters: Any) -> list[R]:
        """Return records; *clause*: condition and order."""
        rows = await session.fetch(f"{self.select} {clause}", *parameters)
        return [self.record(row) for row in rows]

    async def find(self, session: Executor, clause: str, *parameters: Any) -> R | None:
        """Return the first record, if any."""
        return next(iter(await self.read(session, clause, *parameters)), None)

    async def insert(self, session: Executor, rows: Iterable[Values], clause: str = "") -> int:
        """Store *rows* with the same columns. *clause*: ON CONFLICT, or a join that limits
        the rows, which are called ``v``.
        """
        return await self._insert(session, [self._stored(row) for row in rows], clause)

    async def put(
        self,
        session: Executor,
        rows: Iterable[Values],
        key: str,
        clause: str = "",
        computed: Mapping[str, str] = types.MappingProxyType({}),
    ) -> int:
        """Store *rows* as `insert` does, in place of rows with the same *key*.

        *computed*: SQL expressions for columns of a replaced row, where the new row is called
        ``excluded``.
        """
        stored = [self._stored(row) for row in rows]
        names = [name for row in stored[:1] for name in row if name not in key.split(", ")]
        values = {name: f"excluded.{name}" for name in names} | dict(computed)
        assigned = ", ".join(f"{name} = {value}" for name, value in values.items())
        return await self._insert(
            session, stored, f"{clause} on conflict ({key}) do update set {assigned}"
        )

    async def _insert(self, session: Executor, stored: list[dict[str, Any]], clause: str) -> int:
        if not stored:
            return 0
        names = ", ".join(stored[0])
        values = ", ".join(f"v.{name}" for name in stored[0])
        return await session.execute(
            f"insert into {self.name} as {self.alias} ({names}) select {values}"
            f" from pg_catalog.json_populate_recordset(null::{self.name}, $1::text::json) v"
            f" {clause}",
            to_json(stored),
        )

    async def update(
        self,
        session: Executor,
        values: Values,
        clause: str,
        *parameters: Any,
        also: str = "",
    ) -> int:
        """Set columns to *values* in the rows of *clause*, whose parameters begin at ``$2``.

        *also*: assignments that the server computes. Returns the number of updated rows.
        """
        stored = self._stored(values)
        names = ", ".join(stored)
        return await session.execute(
            f"update {self.name} {self.alias} set ({names}) = (select {names}"
            f" from pg_catalog.json_populate_record(null::{self.name}, $1::text::json))"
            f"{also and ', '}{also} {clause}",
            to_json(stored),
            *parameters,
        )

    async def set(
        self,
        session: Executor,
        row_id: int,
        values: Values,
        clause: str = "",
        *parameters: Any,
        also: str = "",
    ) -> bool:
        """Set columns of the row with an ``id``, under the condition *clause*, whose parameters
        begin at ``$3``; return whether the statement updated the row.
        """
        where = f"where id = $2 {clause}"
        return bool(await self.update(session, values, where, row_id, *parameters, also=also))

    async def update_each(
        self,
        session: Executor,
        rows: Iterable[Values],
        clause: str = "",
        computed: Mapping[str, str] = types.MappingProxyType({}),
    ) -> int:
        """Set columns of the row with the ``id`` of each of *rows*, which are called ``v``.

        *clause*: an additional condition. *computed*: expressions of the server, by column.
        """
        stored = [self._stored(row) for row in rows]
        if not stored:
            return 0
        values = {name: f"v.{name}" for name in stored[0] if name != "id"} | dict(computed)
        assigned = ", ".join(f"{name} = {value}" for name, value in values.items())
        return await session.execute(
            f"update {self.name} {self.alias} set {assigned}"
            f" from pg_catalog.json_populate_recordset(null::{self.name}, $1::text::json) v"
            f" where {self.alias}.id = v.id {clause}",
            to_json(stored),
        )

    async def delete(self, session: Executor, clause: str, *parameters: Any) -> int:
        """Remove rows; return their number."""
        return await session.execute(f"delete from {self.name} {self.alias} {clause}", *parameters)

    def _stored(self, values: Values) -> dict[str, Any]:
        stored: dict[str, Any] = {}
        for name, value in values.items():
            if name in self.columns and self.columns[name].decode is _error:
                stored[name] = value and value.text
                stored[f"{name}_code"] = value and value.code
                stored[f"{name}_remedy"] = value and plain(value.remedy)
            else:
                stored[name] = plain(value)
        return stored
