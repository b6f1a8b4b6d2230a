"""Quarantine stores changes to the byte, and keys identify later changes of the same rows."""

import json

import pytest

from streamer.apply.lanes.blocked_keys import (
    BlockedKeys,
    KeyColumns,
    Quarantine,
    digest,
    values_of_change,
    values_of_stored,
)
from streamer.apply.rows.change_as_json import (
    Definition,
    from_json,
    payload,
    quarantined,
    to_json,
)
from streamer.apply.rows.fold import OrderedChange, read_changes
from streamer.decode.pgoutput import DELETE, INSERT, UPDATE
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import NULL, UNCHANGED, MixedRow, Row
from streamer.util.lsn import Lsn
from tests.support.invoking import invoke
from tests.unit.build import apply_plan

TRANSACTION = Transaction(7, Lsn(100), 0)


def row(*values: bytes) -> Row:
    mixed = MixedRow()
    mixed.extend(values)
    mixed.null_count = sum(value is NULL for value in values)
    mixed.unchanged_count = sum(value is UNCHANGED for value in values)
    return mixed


@pytest.mark.parametrize("identity", ["d", "f"])
@pytest.mark.parametrize(
    "change",
    [
        OrderedChange(INSERT, None, row(b"1", NULL, b"\\N \n\t\"' \xf0\x9f\x98\x80")),
        OrderedChange(INSERT, None, row(b"", b"\xff\xfe no utf-8", b"\\u0041")),
        OrderedChange(UPDATE, None, row(b"1", UNCHANGED, b"x")),
        OrderedChange(UPDATE, row(b"1", NULL, NULL), row(b"2", b"y", NULL)),
        OrderedChange(DELETE, row(b"1", NULL, NULL), None),
    ],
)
def test_a_change_comes_back_as_it_was(change: OrderedChange, identity: str) -> None:
    plan = apply_plan(["id", 'o"dd', "c"], ["id"], identity=identity)
    if identity == "f" and change.kind == UPDATE and change.old is None:
        change = OrderedChange(UPDATE, row(b"1", b"2", b"3"), row(b"1", b"2", b"x"))
    kept = quarantined(plan, change, TRANSACTION, (0, 0), "refused", "23514")

    stored = [to_json(values) for values in (kept.old, kept.new)]
    assert all(text is None or text.isascii() for text in stored)
    definition = Definition.from_json(kept.definition.to_json())
    old, new = map(from_json, stored)
    message = payload(kept.operation, definition.relation(plan.mapping.source), old, new)

    (back,) = read_changes(plan, [message])
    assert (back.kind, back.old) == (change.kind, change.old)
    # With FULL, unchanged values are in the old row.
    assert back.new == change.new
    names = KeyColumns.of(plan).names
    assert dict.fromkeys(values_of_stored(names, old, new)) == dict.fromkeys(
        values_of_change(plan, change)
    )


def test_a_column_that_is_gone_is_left_out() -> None:
    plan = apply_plan(["id", "gone", "c"], ["id"])
    change = OrderedChange(UPDATE, None, row(b"1", b"2", b"3"))
    kept = quarantined(plan, change, TRANSACTION, (0, 0), "refused", None)
    left = kept.definition.relation(plan.mapping.source, frozenset({"gone"}))

    message = payload(kept.operation, left, kept.old, kept.new)

    (back,) = read_changes(apply_plan(["id", "c"], ["id"]), [message])
    assert back.new == [b"1", b"3"]


def test_keys_whose_values_join_to_equal_bytes_stay_different() -> None:
    plan = apply_plan(["a", "b"], ["a", "b"])

    def key(*values: bytes) -> bytes:
        (found,) = values_of_change(plan, OrderedChange(INSERT, None, row(*values)))
        return digest(found, ({b"x": b"ab"}, {}))

    assert key(b"x", b"c") != key(b"ab", b"c")
    assert len({key(b"ab", b"c"), key(b"a", b"bc"), key(b"a", NULL), key(b"a", b"\\N")}) == 4


def test_keys_are_followed_until_they_are_undone_or_truncated() -> None:
    plan = apply_plan(["id", "v"], ["id"])
    columns = KeyColumns(("id",), ("",))
    committed = Quarantine(1, columns, {b"0"})
    blocked = BlockedKeys()
    blocked.use(columns, committed.keys or set())
    blocked.add((b"1", b"2"))
    mark = len(blocked.added)
    blocked.add((b"2", b"3"))
    assert blocked.follows((b"3",))
    blocked.undo(mark)
    assert not blocked.follows((b"3",))
    assert blocked.follows((b"9", b"2"))
    assert blocked.follows((b"0",))

    other = blocked.copy()
    other.truncate(plan, TRANSACTION)
    assert not other.follows((b"0", b"2"))
    assert blocked.follows((b"0",))

    other.add((b"5",))
    other.commit_to(committed)
    assert committed.keys == {b"5"}


@pytest.mark.parametrize("arguments", [["drop", "--yes"], ["drop", "t"], ["drop", "--id", "3"]])
def test_nothing_is_dropped_by_mistake(arguments: list[str]) -> None:
    result = invoke("quarantine", *arguments)

    assert result.exit_code == 2
    assert "add --yes" in result.output or "give a TABLE" in result.output


def test_json_keeps_the_order_of_columns() -> None:
    names = [f"c{n}" for n in range(20, 0, -1)]
    assert list(json.loads(to_json(dict.fromkeys(names)) or "")) == names
