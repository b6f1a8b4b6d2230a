"""The keys of a relation's rows in quarantine, which later changes of the same rows follow there.

`BlockedKeys` holds the old and new keys of the changes in quarantine. A later change of one of
these keys goes into quarantine as well. Pure.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from streamer.apply.fold import OrderedChange
from streamer.apply.plan import ApplyPlan, Identity
from streamer.apply.quarantine.stored_change import (
    Emptied,
    Quarantined,
    Values,
    from_escaped,
    key_positions,
)
from streamer.decode.large_values import LargeValue
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import (
    NULL,
    UNCHANGED,
)
from streamer.mapping.options import TableType

FOLLOWS: Final = "an earlier change of this row is in quarantine"
TRUNCATED: Final = "a TRUNCATE came while changes of this row were in quarantine"
Keys = tuple[bytes, ...]
_length = struct.Struct(">i").pack


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


def key_names(plan: ApplyPlan) -> tuple[str, ...]:
    """Return the source's names of the columns that rows of *plan* are told by."""
    return tuple(plan.relation.columns[position].name for position in key_positions(plan))


def keys_of_change(plan: ApplyPlan, change: OrderedChange) -> Keys:
    """Return the keys of a change in text transport: its row's before and after, where known."""
    positions = key_positions(plan)
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
        _digest(from_escaped(values[name]) for name in names)
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
