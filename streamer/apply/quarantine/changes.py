"""Rejected changes in the form of quarantine, and the later changes that follow them.

The quarantine stores a change as JSON of its values' text, by the source's column names. With it
comes the part of the relation's definition that a retry needs (`Definition`), because the target
may be altered by then. The JSON is ASCII, with bytes that are not UTF-8 as the surrogates that
Python escapes them to. So a target of any encoding can store it.

`BlockedKeys` holds the old and new keys of the changes of a relation in quarantine. A later change
of one of these keys goes into quarantine as well. Pure.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamer.apply.fold import OrderedChange
from streamer.apply.plan import ApplyPlan, Identity
from streamer.decode.large_values import LargeValue
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
from streamer.mapping.rules import RelationName, TableType

OPERATIONS: Final = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}
_KINDS: Final = {operation: kind for kind, operation in OPERATIONS.items()}

FOLLOWS: Final = "an earlier change of this row is in quarantine"
TRUNCATED: Final = "a TRUNCATE came while changes of this row were in quarantine"

Values = dict[str, str | None]
"""Text by the source's name of the column; None is NULL."""
Keys = tuple[bytes, ...]

_length = struct.Struct(">i").pack
_uint32 = struct.Struct(">I").pack
_uint16 = struct.Struct(">H").pack


@dataclass(frozen=True, slots=True)
class Definition:
    """The part of a relation's definition that applying its changes needs."""

    replica_identity: str
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, plan: ApplyPlan) -> "Definition":
        """Take it from a plan, without the columns that the target does not get."""
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
        """Return the RELATION message for it, without some columns."""
        columns = tuple(column for column in self.columns if column.name not in without)
        return Relation(0, name.namespace, name.name, self.replica_identity, columns)


def _stored_positions(plan: ApplyPlan) -> list[int]:
    """Return where the values are that applying a change needs."""
    used = {column.position for column in plan.source_columns}
    return sorted(used | {source.position for source in plan.inputs})


def _key_positions(plan: ApplyPlan) -> list[int]:
    """Return where the values are that tell rows apart."""
    if plan.identity is Identity.KEY:
        return [column.position for column in plan.key]
    return _stored_positions(plan) if plan.identity is Identity.ROW else []


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A change that goes into quarantine. ``place``: in the window it came in: share, change."""

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
    """For a TRUNCATE of a history table: rows in quarantine end then, as those in the table do."""

    transaction: Transaction


@dataclass(slots=True)
class Quarantine:
    """The committed quarantine of a relation.

    ``keys``: those of its changes, made of the source's columns ``names``; without ``names`` they
    have not been read.
    """

    count: int = 0
    names: tuple[str, ...] | None = None
    keys: set[bytes] = field(default_factory=set)

    def forget(self, count: int = 0) -> None:
        """There are *count* changes now, whichever they are."""
        self.count = count
        self.names = None
        self.keys = set()


class BlockedKeys:
    """Keys whose changes must go into quarantine because an earlier change of the same row did.

    They belong to one relation and to one transaction at the target.
    """

    __slots__ = (
        "added",
        "base",
        "change_count",
        "is_cleared",
        "is_to_clear",
        "names",
        "pending",
        "reason",
    )

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        self.base: set[bytes] = set()
        """Keys in quarantine before this transaction; read-only here."""
        self.added: dict[bytes, None] = {}
        self.pending: list[Quarantined | Emptied] = []
        """The changes still to write to the table, in order."""
        self.is_cleared = False
        """Nothing that was there before this transaction counts any more."""
        self.is_to_clear = False
        self.change_count = 0
        """By how much the number of rows in quarantine has changed."""
        self.reason: Quarantined | None = None
        """The first change that the target refused."""

    def copy(self) -> "BlockedKeys":
        other = BlockedKeys()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.added = dict(self.added)
        other.pending = list(self.pending)
        return other

    def follows(self, keys: Keys) -> bool:
        """Whether a change with these keys must follow one in quarantine."""
        added, base = self.added, self.base
        return any(key in added or key in base for key in keys)

    def add(self, keys: Keys) -> None:
        for key in keys:
            self.added[key] = None

    def undo(self, count: int) -> None:
        """Forget the keys added after the first *count*."""
        while len(self.added) > count:
            self.added.popitem()

    def put(self, change: Quarantined) -> None:
        """Record a change for quarantine; the caller has added its keys."""
        self.pending.append(change)
        if self.reason is None and change.code is not None:
            self.reason = change

    def truncate(self, plan: ApplyPlan, transaction: Transaction) -> None:
        """Record a TRUNCATE at this place in the order."""
        if plan.ignores_truncate:
            return
        if plan.type is TableType.HISTORY and plan.identity is not Identity.NONE:
            self.pending.append(Emptied(transaction))
            return
        self.pending.clear()
        self.added.clear()
        self.base = set()
        self.is_cleared = self.is_to_clear = True

    def use(self, names: tuple[str, ...], base: set[bytes]) -> None:
        """Make keys of the columns *names* from now on; *base*: those of all rows in the table."""
        self.names = names
        self.base = base
        self.added = {}
        for change in self.pending:
            if isinstance(change, Quarantined):
                self.add(keys_of_values(names, change.old, change.new))

    def commit_to(self, quarantine: Quarantine) -> None:
        """The transaction has committed."""
        quarantine.count += self.change_count
        if self.names is not None:
            quarantine.names, quarantine.keys = self.names, self.base
            quarantine.keys.update(self.added)


# ---- keys --------------------------------------------------------------------------------------


def key_names(plan: ApplyPlan) -> tuple[str, ...]:
    """Return the source's names of the columns that rows of *plan* are told by."""
    return tuple(plan.relation.columns[position].name for position in _key_positions(plan))


def keys_of_change(plan: ApplyPlan, change: OrderedChange) -> Keys:
    """Return the keys of a change in text transport: its row's before and after, where known."""
    positions = _key_positions(plan)
    if not positions:
        return ()
    rows = [row for row in (change.old, change.new) if row is not None]
    found = []
    for row in rows:
        values = [row[position] for position in positions]
        if not any(value is UNCHANGED for value in values):
            found.append(_digest(None if value is NULL else value for value in values))
    return tuple(dict.fromkeys(found))


def keys_of_values(names: tuple[str, ...], old: Values | None, new: Values | None) -> Keys:
    """Return the keys of a change in quarantine, as far as its values tell them."""
    if not names:
        return ()
    found = [
        _digest(_bytes(values[name]) for name in names)
        for values in (old, new)
        if values is not None and all(name in values for name in names)
    ]
    return tuple(dict.fromkeys(found))


def _digest(values: Iterable[bytes | None]) -> bytes:
    # Whole rows may be keys, and there may be many: sixteen bytes tell them apart.
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        if value is None:
            digest.update(_length(-1))
        else:
            digest.update(_length(len(value)))
            for piece in value.pieces() if isinstance(value, LargeValue) else (value,):
                digest.update(piece)
    return digest.digest()


# ---- values ------------------------------------------------------------------------------------


def quarantined(
    plan: ApplyPlan,
    change: OrderedChange,
    transaction: Transaction,
    place: tuple[int, int],
    error: str,
    code: str | None,
) -> Quarantined:
    """Take down a change of text transport."""
    positions = _stored_positions(plan)
    key = _key_positions(plan)
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
    """Return the text of a value in binary, of a type whose values are text."""
    if value is UNCHANGED:
        return UNCHANGED
    return NULL if value is NULL_BINARY else bytes(value)[4:]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode("utf-8", "surrogateescape")


def to_json(values: Values | None) -> str | None:
    return None if values is None else json.dumps(values)


def from_json(text: str | None) -> Values | None:
    if text is None:
        return None
    values: Values = json.loads(text)
    return values


# ---- applying again ----------------------------------------------------------------------------


def payload(operation: str, relation: Relation, old: Values | None, new: Values | None) -> bytes:
    """Return the message that the source would send of a change under *relation*."""
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
        elif (value := _bytes(values[column.name])) is None:
            parts.append(bytes([KIND_NULL]))
        else:
            parts += [bytes([KIND_TEXT]), _uint32(len(value)), value]
    return b"".join(parts)
