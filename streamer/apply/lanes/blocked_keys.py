"""The keys of a relation's changes in quarantine.

`BlockedKeys` holds the old and new keys of the changes in quarantine. A later change of such a key
goes into quarantine as well. Pure.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamer.apply.rows.apply_plan import ApplyPlan, Identity, PlanColumn
from streamer.apply.rows.change_as_json import (
    Emptied,
    Quarantined,
    Values,
    from_escaped,
    key_positions,
)
from streamer.apply.rows.fold import OrderedChange
from streamer.decode.large_values import LargeValue
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import (
    NULL,
    UNCHANGED,
)
from streamer.mapping.rule_options import TableType

FOLLOWS: Final = "an earlier change of this row is in quarantine"
TRUNCATED: Final = "a TRUNCATE came while changes of this row were in quarantine"
Keys = tuple[bytes, ...]
KeyValues = tuple[bytes | LargeValue | None, ...]
_length = struct.Struct(">i").pack


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """The columns that identify rows.

    ``names``: the source's names of the columns. ``kinds``: the type that decides whether two
    values are equal, if comparing bytes is not enough; else an empty string.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, plan: ApplyPlan, names: tuple[str, ...] | None = None) -> "KeyColumns":
        """Return the key columns of *plan*, or the columns *names*."""
        columns = plan.relation.columns
        if names is None:
            names = tuple(columns[position].name for position in key_positions(plan))
        # A row without a key is identified by the text of its values.
        keyed = plan.key if plan.identity is Identity.KEY else ()
        kinds = {columns[column.position].name: _kind(plan, column) for column in keyed}
        return cls(names, tuple(kinds.get(name, "") for name in names))


def _kind(plan: ApplyPlan, column: PlanColumn) -> str:
    target = column.target
    is_same = plan.relation.columns[column.position].type_oid == target.base_oid
    return "" if is_same and target.equality_is_bytewise else target.staged_type


@dataclass(slots=True)
class Quarantine:
    """The committed quarantine of a relation.

    ``keys``: the keys of the changes in quarantine, made of ``columns``; both are None until
    streamer has read the keys.
    """

    count: int = 0
    columns: KeyColumns | None = None
    keys: set[bytes] | None = None

    def forget(self, count: int = 0) -> None:
        """Set the number of changes in quarantine to *count*, and discard the keys."""
        self.count = count
        self.columns = self.keys = None


class BlockedKeys:
    """The old and new keys of the changes of a relation in quarantine, in a target transaction."""

    __slots__ = (
        "added",
        "base",
        "change_count",
        "columns",
        "first_rejected",
        "is_emptied",
        "is_outdated",
        "pending",
    )

    def __init__(self) -> None:
        self.columns: KeyColumns | None = None
        self.base: set[bytes] = set()
        """Keys in quarantine before this transaction; read-only here."""
        self.added: dict[bytes, None] = {}
        self.pending: list[Quarantined | Emptied] = []
        """The changes still to write to the table, in order."""
        self.is_outdated = False
        """The keys of `Quarantine` are out of date: this transaction changed rows in quarantine."""
        self.is_emptied = False
        """A TRUNCATE makes the next flush delete the changes that the table contains."""
        self.change_count = 0
        """The net change of the number of rows in quarantine."""
        self.first_rejected: Quarantined | None = None
        """The first change that the target refused."""

    def copy(self) -> "BlockedKeys":
        copied = BlockedKeys()
        for name in self.__slots__:
            setattr(copied, name, getattr(self, name))
        copied.added = dict(self.added)
        copied.pending = list(self.pending)
        return copied

    def follows(self, keys: Keys) -> bool:
        """Whether a change with these keys must follow a change in quarantine."""
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
        """Record a change for quarantine; the caller has added the keys."""
        self.pending.append(change)
        if self.first_rejected is None and change.code is not None:
            self.first_rejected = change

    def truncate(self, plan: ApplyPlan, transaction: Transaction) -> None:
        """Record a TRUNCATE at this place in the order."""
        if plan.ignores_truncate:
            return
        if plan.type is TableType.HISTORY or plan.marks:
            self.pending.append(Emptied(transaction))
            return
        self.pending.clear()
        self.added.clear()
        self.base = set()
        self.is_outdated = self.is_emptied = True

    def discard_keys(self, count: int) -> None:
        """Add *count* to the number of changes, and discard the keys until the next `use`."""
        self.change_count += count
        self.columns, self.base, self.added = None, set(), {}
        self.is_outdated = True

    def use(self, columns: KeyColumns, base: set[bytes], pending: Iterable[Keys] = ()) -> None:
        """Compute keys from *columns* from now on.

        *base*: the keys of the rows in ``streamer.quarantine``. *pending*: the keys of the changes
        still to write there.
        """
        self.columns = columns
        self.base = base
        self.added = {}
        for keys in pending:
            self.add(keys)

    def commit_to(self, quarantine: Quarantine) -> None:
        """Store the count and the keys in *quarantine* after the transaction has committed."""
        quarantine.count += self.change_count
        if self.columns is not None:
            self.base.update(self.added)
            quarantine.columns, quarantine.keys = self.columns, self.base
        elif self.is_outdated:
            quarantine.columns = None


def values_of_change(plan: ApplyPlan, change: OrderedChange) -> list[KeyValues]:
    """Return the key values of a change in text transport: of its old and its new row, if known."""
    positions = key_positions(plan)
    if not positions:
        return []
    rows = [row for row in (change.old, change.new) if row is not None]
    keys = ([row[position] for position in positions] for row in rows)
    return [
        tuple(None if value is NULL else value for value in values)
        for values in keys
        if not any(value is UNCHANGED for value in values)
    ]


def values_of_stored(
    names: tuple[str, ...], old: Values | None, new: Values | None
) -> list[KeyValues]:
    """Return the key values of a change in quarantine."""
    if not names:
        return []
    return [
        tuple(from_escaped(values[name]) for name in names)
        for values in (old, new)
        if values is not None and all(name in values for name in names)
    ]


def digest(values: KeyValues, names: Sequence[Mapping[bytes, bytes]]) -> bytes:
    """Return a key of *values*.

    *names*: for each column, the server's names of values, see `EqualKeys`.
    """
    # A key may be a whole row, and a relation may have many keys, so keep a digest of 16 bytes.
    hasher = hashlib.blake2b(digest_size=16)
    for value, of_column in zip(values, names, strict=True):
        if value is None:
            hasher.update(_length(-1))
        elif isinstance(value, LargeValue):
            hasher.update(_length(len(value)))
            for piece in value.pieces():
                hasher.update(piece)
        elif (name := of_column.get(value)) is not None:
            hasher.update(_length(-2) + _length(len(name)) + name)
        else:
            hasher.update(_length(len(value)) + value)
    return hasher.digest()
