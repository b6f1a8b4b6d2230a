"""A change in the format of quarantine: JSON of the values' text, by the source's column names.

A stored change includes the part of the relation's definition that a retry needs (`Definition`),
because the target may be altered by then. The JSON is ASCII, with Python's surrogate escapes for
bytes that are not UTF-8. So a target of any encoding can store the JSON. Pure.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.fold import OrderedChange
from streamer.decode.pgoutput import (
    DELETE,
    INSERT,
    KEY_TUPLE,
    NEW_TUPLE,
    OLD_TUPLE,
    UPDATE,
    Column,
    Relation,
)
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import (
    KIND_NULL,
    KIND_TEXT,
    KIND_UNCHANGED,
    NULL,
    NULL_BINARY,
    UNCHANGED,
    Row,
    Value,
)
from streamer.mapping.relation_names import RelationName

OPERATIONS: Final = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}
_KINDS: Final = {operation: kind for kind, operation in OPERATIONS.items()}
Values = dict[str, str | None]
"""Text by the source's name of the column; None is NULL."""
_uint32 = struct.Struct(">I").pack
_uint16 = struct.Struct(">H").pack


@dataclass(frozen=True, slots=True)
class Definition:
    """The part of a relation's definition that a change needs."""

    replica_identity: str
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, plan: ApplyPlan) -> "Definition":
        """Return the definition of a plan without the columns that the target does not get."""
        columns = (plan.relation.columns[position] for position in _stored_positions(plan))
        return cls(plan.relation.replica_identity, tuple(columns))

    def to_json(self) -> str:
        columns = [[c.name, c.type_oid, c.type_modifier, c.is_key] for c in self.columns]
        return json.dumps({"identity": self.replica_identity, "columns": columns})

    @classmethod
    def from_json(cls, text: str) -> "Definition":
        fields = json.loads(text)
        return cls(fields["identity"], tuple(Column(*column) for column in fields["columns"]))

    def relation(self, name: RelationName, without: frozenset[str] = frozenset()) -> Relation:
        """Return the RELATION message of the definition, without the columns in *without*."""
        columns = tuple(column for column in self.columns if column.name not in without)
        return Relation(0, name.namespace, name.name, self.replica_identity, columns)


def _stored_positions(plan: ApplyPlan) -> list[int]:
    """Return the positions of the values that a change needs."""
    used = {column.position for column in plan.source_columns}
    return sorted(used | {source.position for source in plan.inputs})


def key_positions(plan: ApplyPlan) -> list[int]:
    """Return the positions of the values that identify rows."""
    if plan.identity is Identity.KEY:
        return [column.position for column in plan.key]
    return _stored_positions(plan) if plan.identity is Identity.ROW else []


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A change for quarantine. ``place``: the numbers of the transaction and of the change."""

    place: tuple[int, int]
    transaction: Transaction
    operation: str
    old: Values | None
    new: Values | None
    key: Values | None
    definition: Definition
    error: str
    code: str | None


@dataclass(frozen=True, slots=True)
class Emptied:
    """A TRUNCATE of a table that keeps removed rows.

    In a history table, the TRUNCATE ends the versions that earlier changes in quarantine write. If
    the table marks removed rows, each row in quarantine gets a delete.
    """

    transaction: Transaction


@dataclass(slots=True)
class EndedTransaction(Transaction):
    """The transaction of a change in quarantine whose versions ended at ``ended_at``."""

    ended_at: datetime

    @classmethod
    def of(cls, transaction: Transaction, ended_at: datetime) -> Self:
        return cls(
            transaction.xid, transaction.final_lsn, transaction.commit_time, ended_at=ended_at
        )


def quarantined(
    plan: ApplyPlan,
    change: OrderedChange,
    transaction: Transaction,
    place: tuple[int, int],
    error: str,
    code: str | None,
) -> Quarantined:
    """Record a change of text transport."""
    positions = _stored_positions(plan)
    key = key_positions(plan)
    is_whole = plan.relation.replica_identity == "f"
    last = change.new if change.new is not None else change.old
    return Quarantined(
        place,
        transaction,
        OPERATIONS[change.kind],
        _values(plan, change.old, positions if is_whole else key),
        _values(plan, change.new, positions),
        _values(plan, last, key) if key else None,
        Definition.of(plan),
        error,
        code,
    )


def _values(plan: ApplyPlan, row: Row | None, positions: Sequence[int]) -> Values | None:
    if row is None:
        return None
    columns = plan.relation.columns
    return {
        columns[position].name: None if row[position] is NULL else _text(row[position])
        for position in positions
        if row[position] is not UNCHANGED
    }


def binary_text(value: Value) -> Value:
    """Return the text of a binary value of a type whose values are text."""
    if value is UNCHANGED:
        return UNCHANGED
    return NULL if value is NULL_BINARY else bytes(value)[4:]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def from_escaped(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "surrogateescape")


def to_json(values: Values | None) -> str | None:
    return None if values is None else json.dumps(values)


def from_json(text: str | None) -> Values | None:
    if text is None:
        return None
    values: Values = json.loads(text)
    return values


def payload(operation: str, relation: Relation, old: Values | None, new: Values | None) -> bytes:
    """Return the message that the source would send for a change under *relation*."""
    kind = _KINDS[operation]
    parts = [bytes([kind]), _uint32(relation.relid)]
    if old is not None:
        marker = OLD_TUPLE if relation.replica_identity == "f" else KEY_TUPLE
        parts += [bytes([marker]), _tuple(relation, old, absent=KIND_NULL)]
    if new is not None:
        parts += [bytes([NEW_TUPLE]), _tuple(relation, new, absent=KIND_UNCHANGED)]
    return b"".join(parts)


def _tuple(relation: Relation, values: dict[str, Any], *, absent: int) -> bytes:
    parts = [_uint16(len(relation.columns))]
    for column in relation.columns:
        if column.name not in values:
            parts.append(bytes([absent]))
        elif (value := from_escaped(values[column.name])) is None:
            parts.append(bytes([KIND_NULL]))
        else:
            parts += [bytes([KIND_TEXT]), _uint32(len(value)), value]
    return b"".join(parts)
