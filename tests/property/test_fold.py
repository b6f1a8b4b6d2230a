"""Folding a window and writing the result equals applying its changes one by one.

Two models stand in for the target, both dictionaries from key to row. `apply_in_order` works like
the statements for exact order, `apply_fold` like those for sets. The test tries every window with
several plans: text and binary, one key column or two, key tuples or whole old rows.
"""

import contextlib
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.fold import Fold, NotFoldable, read_changes
from streamer.decode.pgoutput import DELETE, INSERT, TRUNCATE, UPDATE
from streamer.decode.tuples import NULL, NULL_BINARY, UNCHANGED, Row, read_rows
from streamer.errors.error_classes import IdentityError, ProtocolError
from streamer.mapping.rule_options import TableType
from tests.property import encode
from tests.property.encode import TOAST, Cell, OldTuple
from tests.support.implementations import implementation  # noqa: F401
from tests.unit.build import apply_plan

RELID = 16385
COLUMNS = ("a", "b", "c", "d")

Key = tuple[Cell, ...]
Table = dict[Key, list[Cell]]


class Refused(Exception):
    """The target rejects this: a key that exists already, or a value that no row has."""


@dataclass(frozen=True)
class Flavour:
    """A plan, and how the source sends changes to it."""

    name: str
    key: tuple[str, ...]
    identity: str = "d"
    binary: bool = False
    table_type: TableType = TableType.CLONE

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(COLUMNS.index(name) for name in self.key)

    def plan(self) -> ApplyPlan:
        return apply_plan(
            COLUMNS,
            self.key,
            identity=self.identity,
            binary=self.binary,
            table_type=self.table_type,
        )

    def key_of(self, row: list[Cell]) -> Key:
        return tuple(row[position] for position in self.positions)


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("text", ("a",)),
        Flavour("binary", ("a",), binary=True),
        Flavour("composite", ("a", "c")),
        Flavour("composite binary", ("b", "c"), binary=True),
        Flavour("full", ("c", "a"), identity="f"),
        Flavour("full binary", ("b",), identity="f", binary=True),
    )
}
PLANS = {name: flavour.plan() for name, flavour in FLAVOURS.items()}
APPEND = {
    name: Flavour(name, f.key, f.identity, f.binary, TableType.APPEND)
    for name, f in FLAVOURS.items()
}
APPEND_PLANS = {name: flavour.plan() for name, flavour in APPEND.items()}


@dataclass
class Sender:
    """Turns changes into payloads, as a source with a table of this identity does."""

    flavour: Flavour
    payloads: list[bytes] = field(default_factory=list)

    def _old(self, row: list[Cell]) -> OldTuple:
        if self.flavour.identity == "f":
            return {"old": row}
        positions = self.flavour.positions
        return {"key": [cell if n in positions else None for n, cell in enumerate(row)]}

    def insert(self, row: list[Cell]) -> None:
        self.payloads.append(encode.insert(RELID, row, binary=self.flavour.binary))

    def update(self, old: list[Cell], new: list[Cell]) -> None:
        """*new* may lack values; the key of the row is sent when it changes, or always."""
        changed = self.flavour.key_of(old) != self.flavour.key_of(new)
        is_sent = changed or self.flavour.identity == "f"
        sent: OldTuple = self._old(old) if is_sent else {}
        self.payloads.append(encode.update(RELID, new, **sent, binary=self.flavour.binary))

    def delete(self, row: list[Cell]) -> None:
        payload = encode.delete(RELID, **self._old(row), binary=self.flavour.binary)
        self.payloads.append(payload)

    def truncate(self) -> None:
        self.payloads.append(encode.truncate([RELID]))


# ---- the two ways to apply ---------------------------------------------------------------------


def to_cells(row: Row, binary: bool) -> list[Cell]:
    """Turn a row of the program's back into values."""
    cells: list[Cell] = []
    for item in row:
        if item is NULL or item is NULL_BINARY:
            cells.append(None)
        elif item is UNCHANGED:
            cells.append(TOAST)
        elif binary:
            assert struct.unpack(">I", item[:4])[0] == len(item) - 4
            cells.append(item[4:])
        else:
            cells.append(item)
    return cells


def filled(row: list[Cell], older: list[Cell] | None) -> list[Cell]:
    if TOAST not in row:
        return row
    if older is None:
        raise Refused
    return [old if new == TOAST else new for new, old in zip(row, older, strict=True)]


def put_new(table: Table, key: Key, row: list[Cell]) -> None:
    if key in table:
        raise Refused
    table[key] = row


def apply_in_order(plan: ApplyPlan, flavour: Flavour, table: Table, payloads: list[bytes]) -> None:
    is_append = flavour.table_type is TableType.APPEND
    for change in read_changes(plan, payloads):
        new = [] if change.new is None else to_cells(change.new, flavour.binary)
        old = new if change.old is None else to_cells(change.old, flavour.binary)
        if change.kind == INSERT:
            if is_append:
                table.pop(flavour.key_of(new), None)
            put_new(table, flavour.key_of(new), new)
        elif change.kind == UPDATE:
            old_key, key = flavour.key_of(old), flavour.key_of(new)
            if is_append and key != old_key:
                table.pop(key, None)
            row = filled(new, table.pop(old_key, None))
            put_new(table, key, row)
        elif change.kind == DELETE:
            if not is_append:
                table.pop(flavour.key_of(old), None)
        else:
            assert change.kind == TRUNCATE
            if not is_append:
                table.clear()


def apply_fold(flavour: Flavour, table: Table, fold: Fold) -> None:
    binary = flavour.binary

    def as_key(key: Any) -> Key:
        return tuple(to_cells([key] if len(flavour.key) == 1 else list(key), binary))

    if fold.truncate:
        table.clear()
    moved = []
    for key, (origin, kept) in fold.moves.items():
        (row,) = read_rows([kept], binary)
        moved.append((as_key(key), filled(to_cells(row, binary), table.get(as_key(origin)))))
    for key in fold.removed:
        table.pop(as_key(key), None)
    for origin, _ in fold.moves.values():
        table.pop(as_key(origin), None)
    for key, kept in fold.updates.items():
        (row,) = read_rows([kept], binary)
        assert as_key(key) == flavour.key_of(to_cells(row, binary))
        table[as_key(key)] = filled(to_cells(row, binary), table.get(as_key(key)))
    for key, cells in moved:
        assert key == flavour.key_of(cells)
        put_new(table, key, cells)
    for key, kept in fold.inserts.items():
        (row,) = read_rows([kept], binary)
        assert as_key(key) == flavour.key_of(to_cells(row, binary))
        assert TOAST not in to_cells(row, binary)
        put_new(table, as_key(key), to_cells(row, binary))


# ---- windows -----------------------------------------------------------------------------------

key_values = st.sampled_from([b"1", b"2", b"3", b"\\N"])
other_values: st.SearchStrategy[Cell] = st.one_of(
    st.sampled_from([b"x", b"y", b"", b"\\U"]), st.none(), st.sampled_from([b"big1", b"big2"])
)


@st.composite
def table_rows(draw: st.DrawFn, flavour: Flavour) -> list[Cell]:
    return [
        draw(key_values) if n in flavour.positions else draw(other_values)
        for n in range(len(COLUMNS))
    ]


@st.composite
def tables(draw: st.DrawFn, flavour: Flavour) -> Table:
    rows = draw(st.lists(table_rows(flavour), max_size=4))
    return {flavour.key_of(row): row for row in rows}


def as_sent(draw: st.DrawFn, flavour: Flavour, old: list[Cell], new: list[Cell]) -> list[Cell]:
    """Leave out large values that did not change; those of the key are sent when it changes."""
    sent = list(new)
    for n, (before, after) in enumerate(zip(old, new, strict=True)):
        is_large = isinstance(after, bytes) and after.startswith(b"big")
        if is_large and before == after and n not in flavour.positions and draw(st.booleans()):
            sent[n] = TOAST
    return sent


@st.composite
def windows(draw: st.DrawFn, flavour: Flavour) -> tuple[Table, list[bytes], Table]:
    """A table, changes that its source makes, and the table after them."""
    before = draw(tables(flavour))
    table, sender = dict(before), Sender(flavour)
    for _ in range(draw(st.integers(0, 12))):
        kinds = ["insert"] + (["update", "update", "move", "delete"] if table else [])
        kind = draw(st.sampled_from(kinds))
        row = draw(table_rows(flavour))
        if kind == "insert":
            if flavour.key_of(row) not in table:
                table[flavour.key_of(row)] = row
                sender.insert(row)
            continue
        key = draw(st.sampled_from(sorted(table)))
        old = table[key]
        if kind == "delete":
            del table[key]
            sender.delete(old)
            continue
        kept = draw(st.sets(st.integers(0, len(COLUMNS) - 1)))
        new = [old[n] if n in kept else row[n] for n in range(len(COLUMNS))]
        if kind == "update":
            new = [old[n] if n in flavour.positions else new[n] for n in range(len(COLUMNS))]
        new_key = flavour.key_of(new)
        if new_key == key or new_key not in table:
            sender.update(old, as_sent(draw, flavour, old, new))
            del table[key]
            table[new_key] = new
    if draw(st.integers(0, 9)) == 0:
        table = {}
        sender.truncate()
    return before, sender.payloads, table


names = st.sampled_from(sorted(FLAVOURS))


@given(names.flatmap(lambda name: st.tuples(st.just(name), windows(FLAVOURS[name]))))
def test_a_window_of_a_clone_gives_the_sources_table(
    case: tuple[str, tuple[Table, list[bytes], Table]],
) -> None:
    name, (before, payloads, after) = case
    flavour, plan = FLAVOURS[name], PLANS[name]
    in_order = dict(before)
    apply_in_order(plan, flavour, in_order, payloads)
    assert in_order == after
    fold = Fold(replace(plan))
    try:
        fold.add(payloads)
    except NotFoldable:
        return
    folded = dict(before)
    apply_fold(flavour, folded, fold)
    assert folded == after
    assert fold.counts == type(fold.counts)().count(payloads)


@given(names.flatmap(lambda name: st.tuples(st.just(name), windows(FLAVOURS[name]))))
def test_a_window_that_only_inserts_updates_and_deletes_is_folded(
    case: tuple[str, tuple[Table, list[bytes], Table]],
) -> None:
    """NotFoldable is for failures; it must not become the normal case."""
    name, (_, payloads, _) = case
    flavour, plan = FLAVOURS[name], PLANS[name]
    changes = list(read_changes(plan, payloads))
    for change in changes:
        if change.old is not None and change.new is not None:
            old, new = to_cells(change.old, flavour.binary), to_cells(change.new, flavour.binary)
            if flavour.key_of(old) != flavour.key_of(new):
                return
    Fold(replace(plan)).add(payloads)


# ---- keys that the source checks late ----------------------------------------------------------

LATE = [name for name, flavour in FLAVOURS.items() if flavour.identity == "f"]


def apply_to_rows(rows: list[list[Cell]], flavour: Flavour, payloads: list[bytes]) -> None:
    """Work like exact order without a key: find each row by all its values."""
    for change in read_changes(PLANS[flavour.name], payloads):
        if change.old is not None:
            rows.remove(to_cells(change.old, flavour.binary))
        if change.new is not None:
            rows.append(to_cells(change.new, flavour.binary))


def by_cells(row: list[Cell]) -> list[bytes]:
    return [b"null" if cell is None else str(cell).encode() for cell in row]


@st.composite
def late_windows(draw: st.DrawFn, flavour: Flavour) -> tuple[Table, list[bytes], list[list[Cell]]]:
    """A table whose key is deferrable, changes that its source makes, and its rows after them.

    Rows may share a key until the end: shifts, swaps, and a key inserted before its row goes.
    """
    before = draw(tables(flavour))
    rows, sender = [list(row) for row in before.values()], Sender(flavour)
    for _ in range(draw(st.integers(0, 10))):
        kind = draw(st.sampled_from(["insert", "delete", "move", "move"])) if rows else "insert"
        row = draw(table_rows(flavour))
        if kind == "insert":
            rows.append(row)
            sender.insert(row)
            continue
        old = draw(st.sampled_from(rows))
        rows.remove(old)
        if kind == "delete":
            sender.delete(old)
            continue
        kept = draw(st.sets(st.integers(0, len(COLUMNS) - 1)))
        new = [old[n] if n in kept else row[n] for n in range(len(COLUMNS))]
        sender.update(old, as_sent(draw, flavour, old, new))
        rows.append(new)
    seen: set[Key] = set()
    for row in list(rows):  # by the commit each key is there once
        if flavour.key_of(row) in seen:
            rows.remove(row)
            sender.delete(row)
        seen.add(flavour.key_of(row))
    return before, sender.payloads, rows


@given(
    st.sampled_from(LATE).flatmap(
        lambda name: st.tuples(st.just(name), late_windows(FLAVOURS[name]))
    )
)
@example(
    (
        "full",
        (
            {
                (b"x", b"1"): [b"1", b"first", b"x", None],
                (b"x", b"2"): [b"2", b"second", b"x", None],
            },
            [
                encode.update(
                    RELID, [b"2", b"first", b"x", None], old=[b"1", b"first", b"x", None]
                ),
                encode.update(
                    RELID, [b"3", b"second", b"x", None], old=[b"2", b"second", b"x", None]
                ),
            ],
            [[b"2", b"first", b"x", None], [b"3", b"second", b"x", None]],
        ),
    )
)
def test_rows_that_share_a_key_for_a_while_are_not_confused(
    case: tuple[str, tuple[Table, list[bytes], list[list[Cell]]]],
) -> None:
    """A folded window has the outcome of the source; the rest is left to exact order."""
    name, (before, payloads, after) = case
    flavour = FLAVOURS[name]
    in_order = [list(row) for row in before.values()]
    apply_to_rows(in_order, flavour, payloads)
    assert sorted(in_order, key=by_cells) == sorted(after, key=by_cells)
    fold, folded = Fold(replace(PLANS[name])), dict(before)
    try:
        fold.add(payloads)
        apply_fold(flavour, folded, fold)
    except (NotFoldable, Refused):
        return
    assert sorted(folded.values(), key=by_cells) == sorted(after, key=by_cells)


def some_changes(draw: st.DrawFn, flavour: Flavour) -> list[bytes]:
    """Changes that no source makes in this order, each of them well formed."""
    sender = Sender(flavour)
    for _ in range(draw(st.integers(0, 8))):
        kind = draw(
            st.sampled_from(["insert", "insert", "update", "move", "move", "delete", "truncate"])
        )
        row, other = draw(table_rows(flavour)), draw(table_rows(flavour))
        match kind:
            case "insert":
                sender.insert(row)
            case "update":
                same = [row[n] if n in flavour.positions else other[n] for n in range(len(row))]
                sender.update(row, as_sent(draw, flavour, same, same))
            case "move":
                sender.update(row, as_sent(draw, flavour, other, other))
            case "delete":
                sender.delete(row)
            case _:
                sender.truncate()
    return sender.payloads


@st.composite
def strange_windows(
    draw: st.DrawFn, flavours: dict[str, Flavour]
) -> tuple[str, Table, list[bytes]]:
    name = draw(names)
    flavour = flavours[name]
    return name, draw(tables(flavour)), some_changes(draw, flavour)


def check_strange_window(
    flavour: Flavour, plan: ApplyPlan, before: Table, payloads: list[bytes]
) -> None:
    """Where both ways end without an error they end the same."""
    fold = Fold(replace(plan))
    in_order, folded = dict(before), dict(before)
    try:
        fold.add(payloads)
        apply_in_order(plan, flavour, in_order, payloads)
        apply_fold(flavour, folded, fold)
    except (NotFoldable, Refused, IdentityError):
        return
    assert folded == in_order


@given(strange_windows(FLAVOURS))
def test_changes_that_do_not_fit_together_are_never_folded_to_something_else(
    window: tuple[str, Table, list[bytes]],
) -> None:
    name, before, payloads = window
    check_strange_window(FLAVOURS[name], PLANS[name], before, payloads)


@given(strange_windows(APPEND))
@example(
    # A row whose delete was ignored is in the way of an insert, which then moves on.
    (
        "text",
        {(b"1",): [b"1", b"old", None, None]},
        [
            encode.insert(RELID, [b"1", b"new", None, None]),
            encode.update(RELID, [b"2", b"new", None, None], key=[b"1", None, None, None]),
        ],
    )
)
def test_a_window_of_an_append_table_gives_what_exact_order_gives(
    window: tuple[str, Table, list[bytes]],
) -> None:
    name, before, payloads = window
    check_strange_window(APPEND[name], APPEND_PLANS[name], before, payloads)


@given(names.flatmap(lambda name: st.tuples(st.just(name), windows(APPEND[name]))))
def test_an_append_table_keeps_rows_that_the_source_deletes(
    case: tuple[str, tuple[Table, list[bytes], Table]],
) -> None:
    name, (before, payloads, after) = case
    flavour, plan = APPEND[name], APPEND_PLANS[name]
    fold = Fold(replace(plan))
    folded = dict(before)
    try:
        fold.add(payloads)
        apply_fold(flavour, folded, fold)
    except (NotFoldable, Refused):
        return
    assert not fold.truncate
    if payloads and payloads[-1][:1] != b"T":
        assert folded.items() >= after.items()


# ---- bytes that are no changes -----------------------------------------------------------------


def fold_all(plan: ApplyPlan, payloads: list[bytes]) -> None:
    Fold(replace(plan)).add(payloads)


def read_all(plan: ApplyPlan, payloads: list[bytes]) -> None:
    for _ in read_changes(plan, payloads):
        pass


USES = (fold_all, read_all)


@given(
    st.sampled_from(sorted(FLAVOURS)),
    st.lists(
        st.tuples(st.sampled_from([b"I", b"U", b"D", b"T", b"X"]), st.binary(max_size=40)),
        max_size=3,
    ),
)
def test_any_bytes_are_changes_or_a_protocol_error(
    name: str, messages: list[tuple[bytes, bytes]]
) -> None:
    payloads = [kind + rest for kind, rest in messages]
    for use in USES:
        with contextlib.suppress(ProtocolError, NotFoldable):
            use(PLANS[name], payloads)


@given(
    names.flatmap(lambda name: st.tuples(st.just(name), windows(FLAVOURS[name]))),
    st.integers(0, 2**16),
    st.one_of(st.none(), st.integers(0, 255)),
    st.integers(0, 200),
)
def test_damaged_changes_are_refused_or_read_but_never_crash(
    case: tuple[str, tuple[Table, list[bytes], Table]], which: int, byte: int | None, place: int
) -> None:
    """A byte is changed, or everything from there on is missing."""
    name, (_, payloads, _) = case
    if not payloads:
        return
    payload = payloads[which % len(payloads)]
    position = place % len(payload)
    if byte is None:
        damaged = payload[: max(position, 1)]
    else:
        damaged = payload[:position] + bytes([byte]) + payload[position + 1 :]
    payloads = [damaged if p is payload else p for p in payloads]
    for use in USES:
        with contextlib.suppress(ProtocolError, NotFoldable):
            use(PLANS[name], payloads)


@given(names.flatmap(lambda name: st.tuples(st.just(name), windows(FLAVOURS[name]))), st.data())
def test_a_truncated_change_is_refused(
    case: tuple[str, tuple[Table, list[bytes], Table]], data: st.DataObject
) -> None:
    name, (_, payloads, _) = case
    rows = [payload for payload in payloads if payload[:1] != b"T"]
    if not rows:
        return
    payload = data.draw(st.sampled_from(rows))
    cut = payload[: data.draw(st.integers(1, len(payload) - 1))]
    for use in USES:
        with pytest.raises(ProtocolError):
            use(PLANS[name], [cut])
