"""Folds a window of changes to net changes: at most one change of a key.

Rows of different keys do not depend on each other, so within a target transaction the order between
keys is free. Deletes come first, then updates, then inserts. The fold merges values by column,
because an unchanged TOAST value must not overwrite a value from earlier in the window. A change
that folding would distort raises `NotFoldable`. The worker then applies the window in exact order,
which also finds the faulty change.

A key alone does not prove that a change concerns the pending row of that key. A source with a
deferrable key may have two such rows for a while. With REPLICA IDENTITY FULL the old row must equal
the pending row. With any other identity, the key must not be deferrable.

Pure. The loop over changes is the hot path: about two microseconds for a change of five columns.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.decode.pgoutput import (
    DELETE,
    INSERT,
    KEY_TUPLE,
    NEW_TUPLE,
    OLD_TUPLE,
    TRUNCATE,
    UPDATE,
    restarts_identity,
)
from streamer.decode.tuples import (
    NULL,
    NULL_BINARY,
    UNCHANGED,
    PendingRow,
    Row,
    is_partial,
    merge,
    unchanged_positions,
)
from streamer.errors.error_classes import IdentityError, ProtocolError, SharedTableError
from streamer.mapping.rule_options import TableType

_STEP_MAX: Final = 256
_TUPLE_AT: Final = 6  # after kind, relid and the marker of the tuple
_OLD_TUPLES: Final = (KEY_TUPLE, OLD_TUPLE)
# Errors of truncated tuples, and of tuples wider or narrower than the definition.
_MALFORMED: Final = (IndexError, ValueError, struct.error)


class NotFoldable(Exception):  # no error: the window needs exact order
    """The changes of a window need exact order."""


@dataclass(slots=True)
class Counts:
    """The number of changes that the source made, by operation."""

    insert: int = 0
    update: int = 0
    delete: int = 0
    truncate: int = 0

    @property
    def total(self) -> int:
        return self.insert + self.update + self.delete + self.truncate

    def count_marked(self, payloads: Iterable[bytes]) -> None:
        """Count deletes among *payloads* that were counted as updates."""
        deleted = Counts().count(payloads).delete
        self.update -= deleted
        self.delete += deleted

    def count(self, payloads: Iterable[bytes]) -> "Counts":
        """Count row messages by their first byte; return the counts themselves."""
        for payload in payloads:
            kind = payload[0]
            if kind == INSERT:
                self.insert += 1
            elif kind == UPDATE:
                self.update += 1
            elif kind == DELETE:
                self.delete += 1
            else:
                self.truncate += 1
        return self


@dataclass(slots=True)
class Fold:
    """Net changes of one relation. A key is a value of a row, or a tuple of its values.

    ``restarts``: a TRUNCATE restarts the sequences. ``moves``: rows with a changed key, by new key,
    each with the key at the beginning of the window. ``deletes`` contains this key too, with the
    old row for a mark in a filtered table. ``removed`` lacks such keys.
    """

    plan: ApplyPlan
    truncate: bool = False
    restarts: bool = False
    deletes: dict[Any, Row | None] = field(default_factory=dict)
    updates: dict[Any, PendingRow] = field(default_factory=dict)
    moves: dict[Any, tuple[Any, PendingRow]] = field(default_factory=dict)
    inserts: dict[Any, PendingRow] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)

    @property
    def must_order(self) -> bool:
        """Whether the changes need exact order.

        For example: a staged row is too wide, expressions need values of the target, or a row gets
        the key of a row that moves.
        """
        plan = self.plan
        if self.moves:
            is_fixed = any(column.target.identity_always for column in plan.key)
            if is_fixed or plan.has_expressions or not self.moves.keys().isdisjoint(self._origins):
                return True
        if self.clears_keys and not all(column.target.equality_is_bytewise for column in plan.key):
            return True  # different keys may be equal at the target, where no index refuses them
        if not plan.has_expressions:
            return not plan.fits_stage and self.must_stage
        return (
            not plan.fits_stage
            # An insert outside the filter replaces no row.
            or (self.clears_keys and plan.filter is not None)
            or any(
                plan.needs_missing_value(unchanged_positions(row))
                for row in self.updates.values()
                if is_partial(row)
            )
        )

    @property
    def _origins(self) -> set[Any]:
        return {origin for origin, _ in self.moves.values()}

    @property
    def removed(self) -> Mapping[Any, Row | None]:
        """The part of ``deletes`` without moved rows."""
        if not self.moves:
            return self.deletes
        origins = self._origins
        return {key: row for key, row in self.deletes.items() if key not in origins}

    @property
    def clears_keys(self) -> bool:
        """Whether an insert must first remove an old row with its key, which the target may have.

        With an index on the key, the insert removes no row: the target refuses the insert, and
        exact order replaces the old row.
        """
        plan = self.plan
        if not self.inserts or plan.key_is_indexed or plan.identity is not Identity.KEY:
            return False
        return plan.may_outlive and not plan.marks_in_filter

    @property
    def must_stage(self) -> bool:
        """Whether the fold contains more than inserts, or inserts replace rows."""
        return bool(self.deletes or self.updates or self.moves) or self.clears_keys

    def add(self, payloads: list[bytes]) -> None:
        """Fold changes, in order. Raises NotFoldable, ProtocolError; the fold is then spoilt."""
        add = self._add_keyless if self.plan.identity is Identity.NONE else self._add
        folder = self.plan.folder
        if folder is None:
            add(payloads)
            # A fold of two changes yields fewer rows than changes, and only a move yields more.
            if self.plan.marks_in_filter and self.row_count < self.counts.total:
                raise NotFoldable
            return
        counts = [0, 0, 0]
        done, step = 0, 1
        try:
            while done < len(payloads):
                start, done = (
                    done,
                    folder.fold(
                        payloads, done, self.inserts, self.updates, self.deletes, self.moves, counts
                    ),
                )
                # Changes that the folder does not support often follow each other.
                step = 1 if done > start else min(2 * step, _STEP_MAX)
                add(payloads[done : done + step])
                done += step
        finally:
            self.counts.insert += counts[0]
            self.counts.update += counts[1]
            self.counts.delete += counts[2]

    def _add(self, payloads: Iterable[bytes]) -> None:
        plan = self.plan
        read_row, read_tuple, get_key = plan.read_row, plan.read_tuple, plan.get_key
        inserts, updates, moves = self.inserts, self.updates, self.moves
        counts = self.counts
        width = plan.row_width
        is_full = plan.relation.replica_identity == "f"
        for payload in payloads:
            kind = payload[0]
            row: Row | None = None
            try:
                if kind == INSERT and payload[5] == NEW_TUPLE:
                    row, end = read_row(payload)
                    counts.insert += 1
                    if is_partial(row):  # a row filter may turn an UPDATE into such an INSERT
                        raise NotFoldable
                    key = get_key(row)
                    if key in updates or key in inserts or (moves and key in moves):
                        self._insert_over(key, row)
                    else:
                        inserts[key] = row
                elif kind == UPDATE:
                    counts.update += 1
                    if payload[5] == NEW_TUPLE:
                        row, end = read_row(payload)
                        if is_full:
                            _check_identity(plan, kind, payload[5], None)
                        key = old_key = get_key(row)
                    else:
                        old, position = read_tuple(payload, _TUPLE_AT)
                        _expect(payload[5] in _OLD_TUPLES and payload[position] == NEW_TUPLE, kind)
                        _expect(len(old) == width, kind)
                        row, end = read_tuple(payload, position + 1)
                        _check_identity(plan, kind, payload[5], old)
                        old_key = get_key(old)
                        if is_full:
                            self._check_pending(old_key, old)
                        if is_partial(row):
                            row = _complete(plan, row, old, payload[5])
                        key = get_key(row)
                    if key != old_key:
                        self._move(old_key, key, row)
                    elif key in inserts:
                        inserts[key] = self._over(row, inserts[key])
                    elif key in updates:
                        updates[key] = self._over(row, updates[key])
                    else:
                        self._update(key, row)
                elif kind == DELETE and payload[5] in _OLD_TUPLES:
                    row, end = read_tuple(payload, _TUPLE_AT)
                    counts.delete += 1
                    _check_identity(plan, kind, payload[5], row)
                    key = get_key(row)
                    if is_full:
                        self._check_pending(key, row)
                    self._delete(key, row if plan.marks_in_filter else None)
                else:
                    end = len(payload)
                    self._truncate(payload)
            except _MALFORMED:
                end = -1
            if end != len(payload) or (row is not None and len(row) != width):
                _expect(False, kind)

    def _add_keyless(self, payloads: Iterable[bytes]) -> None:
        """Add inserts in order, each under a new key."""
        read_row, inserts = self.plan.read_row, self.inserts
        for payload in payloads:
            if payload[0] == INSERT:
                try:
                    row, end = read_row(payload)
                except (IndexError, struct.error):
                    end = -1
                _expect(end == len(payload) and len(row) == self.plan.row_width, INSERT)
                if is_partial(row):
                    raise NotFoldable
                self.counts.insert += 1
                inserts[len(inserts)] = row
            elif payload[0] == TRUNCATE:
                self._truncate(payload)
            else:
                raise NotFoldable

    def _check_pending(self, key: Any, old: Row) -> None:
        """Raise NotFoldable if *old* differs from the pending row of *key*."""
        pending: PendingRow | None = self.inserts.get(key) or self.updates.get(key)
        if pending is None and key in self.moves:
            pending = self.moves[key][1]
        # Values that streamer appends are not part of the old row.
        count = len(self.plan.relation.columns)
        if pending is not None and self._read(pending)[:count] != old[:count]:
            raise NotFoldable

    def _over(self, row: Row, older: PendingRow) -> PendingRow:
        """Return *row* with missing values from *older*."""
        return merge(row, self._read(older)) if is_partial(row) else row

    def _read(self, pending: PendingRow) -> Row:
        return self.plan.read_row(pending)[0] if isinstance(pending, bytes) else pending

    def _insert_over(self, key: Any, row: Row) -> None:
        # Only a table that keeps rows removed at the source has a row to overwrite.
        if not self.plan.may_outlive:
            raise NotFoldable
        if key in self.moves or self.plan.marks_in_filter:
            raise NotFoldable
        if self.updates.pop(key, None) is not None:
            self.deletes[key] = None
        self.inserts[key] = row

    def _update(self, key: Any, row: Row) -> None:
        if key in self.moves:
            origin, older = self.moves.pop(key)
            self._place(key, origin, self._over(row, older))
        elif key in self.deletes:
            raise NotFoldable
        else:
            self.updates[key] = row

    def _delete(self, key: Any, facts: Row | None) -> None:
        if self.plan.type is TableType.APPEND:
            return
        if key in self.inserts:
            del self.inserts[key]
            if self.plan.may_outlive:
                # The insert would have replaced a row that outlived a delete.
                self.deletes.setdefault(key)
        elif key in self.moves:
            del self.moves[key]
        elif key in self.deletes:
            raise NotFoldable
        else:
            self.updates.pop(key, None)
            self.deletes[key] = facts

    def _move(self, old_key: Any, key: Any, row: Row) -> None:
        """Move a row from *old_key* to *key*. Raises NotFoldable if a pending row has *key*."""
        if self.plan.marks_in_filter:
            raise NotFoldable
        origin = old_key
        older: PendingRow | None = None
        if old_key in self.inserts:
            older = self.inserts.pop(old_key)
            origin = None
            if self.plan.may_outlive:
                # The insert would have replaced a row that outlived a delete.
                self.deletes.setdefault(old_key)
        elif old_key in self.moves:
            origin, older = self.moves.pop(old_key)
        elif old_key in self.deletes:
            raise NotFoldable
        else:
            older = self.updates.pop(old_key, None)
            self.deletes[old_key] = None
        if key in self.inserts or key in self.updates or key in self.moves:
            raise NotFoldable
        if self.plan.may_outlive:
            # A row that outlived a delete may still have the new key.
            self.deletes.setdefault(key)
        self._place(key, origin, row if older is None else self._over(row, older))

    def _place(self, key: Any, origin: Any, row: PendingRow) -> None:
        """Add a row under a new key; without an *origin*, the target lacks the row."""
        if origin is None:
            self.inserts[key] = row
        elif origin == key:  # the row has its first key again
            del self.deletes[key]
            self.updates[key] = row
        else:
            self.moves[key] = (origin, row)

    def _truncate(self, payload: bytes) -> None:
        _expect(payload[0] == TRUNCATE, payload[0])
        self.counts.truncate += 1
        if self.plan.ignores_truncate:
            return
        refuse_shared_truncate(self.plan)
        if self.plan.marks:
            raise NotFoldable
        self.truncate = True
        self.restarts |= restarts_identity(payload)
        for pending in (self.deletes, self.updates, self.moves, self.inserts):
            pending.clear()

    def removals(self) -> "Fold":
        """Return the part of the fold that removes rows."""
        return Fold(self.plan, self.truncate, self.restarts, self.deletes)

    def additions(self) -> "Fold":
        """Return the part of the fold that inserts and updates rows. Without ``deletes``, ``moves``
        inserts rows under the new keys.
        """
        return Fold(self.plan, updates=self.updates, moves=self.moves, inserts=self.inserts)

    @property
    def row_count(self) -> int:
        return len(self.deletes) + len(self.updates) + len(self.moves) + len(self.inserts)


def _expect(is_so: bool, kind: int) -> None:
    if not is_so:
        raise ProtocolError(f"malformed row message {chr(kind)!r}")


def _check_identity(plan: ApplyPlan, kind: int, marker: int, old: Row | None) -> None:
    """Raise IdentityError if the old values of an update or delete do not identify the row.

    The source publishes the changes of a partition under the root. The replica identity of the
    partition decides which old values the source sends.
    """
    if plan.relation.replica_identity == "f" and marker != OLD_TUPLE:
        raise _lacks(plan, kind, "its old row, although the table has REPLICA IDENTITY FULL")
    if old is None or plan.identity is not Identity.KEY:
        return
    null = NULL_BINARY if plan.binary else NULL
    for column in plan.key:
        if old[column.position] is null:
            raise _lacks(plan, kind, f'the old value of key column "{column.name}"')


def _lacks(plan: ApplyPlan, kind: int, lacks: str) -> IdentityError:
    change = "an update" if kind == UPDATE else "a delete"
    return IdentityError(
        f'source table "{plan.mapping.source}": {change} came without {lacks}',
        hint="give every partition the replica identity of the table with "
        "ALTER TABLE … REPLICA IDENTITY at the source, then resync the table",
    )


def _complete(plan: ApplyPlan, row: Row, old: Row, marker: int) -> Row:
    """Fill unchanged values of *row* from the old tuple: all values, or only the key's."""
    null = NULL_BINARY if plan.binary else NULL
    if marker == OLD_TUPLE and any(
        new is UNCHANGED and old_value is null for new, old_value in zip(row, old, strict=True)
    ):
        # An unchanged TOAST value is never NULL.
        raise _lacks(plan, UPDATE, "an unchanged (TOAST) value of its old row")
    if marker == KEY_TUPLE:
        complete: Row = list(row)
        for column in plan.key:
            complete[column.position] = old[column.position]
        old = complete
    return merge(row, old)


def refuse_shared_truncate(plan: ApplyPlan) -> None:
    """Refuse a TRUNCATE of one of several tables that only their keys distinguish. Raises
    SharedTableError.
    """
    mapping = plan.mapping
    if not mapping.rule.is_disjoint or plan.ignores_truncate:
        return
    raise SharedTableError(
        f'source table "{mapping.source}" was truncated, and target table "{mapping.target}" has '
        "rows of other tables, too",
        hint="to ignore TRUNCATE of this source table, set `skip_truncate: true` in its rule",
    )


@dataclass(frozen=True, slots=True)
class OrderedChange:
    """One change as the source made it. ``old``: the old or key tuple, if the source sent it.

    ``restarts``: the change is a TRUNCATE … RESTART IDENTITY.
    """

    kind: int
    old: Row | None
    new: Row | None
    restarts: bool = False


def read_changes(plan: ApplyPlan, payloads: Iterable[bytes]) -> Iterator[OrderedChange]:
    """Decode changes for exact order. Raises ProtocolError."""
    for payload in payloads:
        kind = payload[0]
        try:
            change, end = _read_change(plan, payload)
        except _MALFORMED:
            end = -1
        _expect(end == len(payload), kind)
        yield change


def _read_change(plan: ApplyPlan, payload: bytes) -> tuple[OrderedChange, int]:
    kind, marker = payload[0], payload[5]
    if kind == TRUNCATE:
        refuse_shared_truncate(plan)
        return OrderedChange(kind, None, None, restarts_identity(payload)), len(payload)
    width = len(plan.relation.columns)
    first, end = plan.read_tuple(payload, _TUPLE_AT)
    _expect(len(first) == width, kind)
    if kind in (UPDATE, DELETE):
        _check_identity(plan, kind, marker, None if marker == NEW_TUPLE else first)
    if kind == DELETE:
        _expect(marker in _OLD_TUPLES, kind)
        return OrderedChange(kind, first, None), end
    _expect(kind in (INSERT, UPDATE), kind)
    if marker == NEW_TUPLE:
        return OrderedChange(kind, None, first), end
    _expect(kind == UPDATE and marker in _OLD_TUPLES and payload[end] == NEW_TUPLE, kind)
    new, end = plan.read_tuple(payload, end + 1)
    _expect(len(new) == width, kind)
    if is_partial(new):
        new = _complete(plan, new, first, marker)
    return OrderedChange(kind, first, new), end
