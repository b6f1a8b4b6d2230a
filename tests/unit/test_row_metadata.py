"""Values that streamer appends to the source's rows."""

import random
from pathlib import Path

import pytest

from streamer.apply.rows.fold import OrderedChange
from streamer.apply.rows.row_metadata import RowMetadata
from streamer.compiled import choice
from streamer.config.static_mapping import load
from streamer.decode.pgoutput import INSERT, UPDATE
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import NULL, UNCHANGED, is_partial, read_binary_row, read_text_row
from streamer.errors.error_classes import MappingError
from streamer.mapping.rule_options import MetadataKind
from streamer.util.lsn import Lsn
from tests.support.compiled import compiled, needs_compiled

TRANSACTION = Transaction(7, Lsn(0x1_0000_0010), 123_456_789)
KINDS = (MetadataKind.COMMITTED_AT, MetadataKind.LSN, MetadataKind.OPERATION)


def _tuple(*values: bytes | str | None, kind: bytes = b"t") -> bytes:
    parts = [len(values).to_bytes(2, "big")]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, str):
            parts.append(b"u")
        else:
            parts.append(kind + len(value).to_bytes(4, "big") + value)
    return b"".join(parts)


def _message(kind: bytes, *tuples: bytes) -> bytes:
    return kind + bytes(4) + b"".join(tuples)


INSERTED = _message(b"I", b"N" + _tuple(b"1", None))
UPDATED = _message(b"U", b"N" + _tuple(b"1", "unchanged"))
MOVED = _message(b"U", b"K" + _tuple(b"1", None), b"N" + _tuple(b"2", b"b"))
DELETED = _message(b"D", b"K" + _tuple(b"1", None))
TRUNCATED = b"T" + bytes(9)


@pytest.fixture(params=["pure", pytest.param("compiled", marks=needs_compiled)])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "compiled", compiled if request.param == "compiled" else None)


@pytest.mark.usefixtures("implementation")
def test_new_rows_get_the_values_and_old_ones_nulls() -> None:
    metadata = RowMetadata(KINDS, 2, binary=False)
    found = metadata.extend(TRANSACTION, [INSERTED, UPDATED, MOVED, DELETED, TRUNCATED])
    assert found is not None
    row, end = read_text_row(found[0])
    facts = [b"2000-01-01 00:02:03.456789+00:00", b"1/10"]
    assert (list(row)[2:], end) == ([*facts, b"insert"], len(found[0]))
    row, _ = read_text_row(found[1])
    assert is_partial(row)
    assert [row[0], row[1], *row[2:]] == [b"1", UNCHANGED, *facts, b"update"]
    assert found[2].endswith(b"update")
    assert found[3] == _message(b"D", b"K" + _tuple(b"1", None, None, None, None))
    assert found[4] == TRUNCATED


@pytest.mark.usefixtures("implementation")
def test_binary_values_have_the_form_of_their_types() -> None:
    metadata = RowMetadata(KINDS, 1, binary=True)
    found = metadata.extend(TRANSACTION, [_message(b"I", b"N" + _tuple(b"\0\1", kind=b"b"))])
    assert found is not None
    assert list(read_binary_row(found[0])[0]) == [
        b"\0\0\0\2\0\1",
        (8).to_bytes(4, "big") + TRANSACTION.commit_time.to_bytes(8, "big"),
        (8).to_bytes(4, "big") + TRANSACTION.final_lsn.to_bytes(8, "big"),
        b"\0\0\0\6insert",
    ]


@needs_compiled
def test_both_implementations_extend_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken messages stay unchanged, and decoding refuses these messages."""
    chance = random.Random(15)
    whole = [INSERTED, UPDATED, MOVED, DELETED, TRUNCATED]
    broken = []
    for _ in range(500):
        message = bytearray(chance.choice(whole))
        message[chance.randrange(len(message))] = chance.choice(b"NKOtbnu\0\1\2\xff")
        broken.append(bytes(message[: chance.randrange(1, len(message) + 1)]))
    metadata = RowMetadata(KINDS, 2, binary=False)
    marking = RowMetadata(KINDS, 2, binary=False, key=frozenset([0]))
    results = []
    for module in (None, compiled):
        monkeypatch.setattr(choice, "compiled", module)
        messages = [*whole, *broken]
        results.append([each.extend(TRANSACTION, messages) for each in (metadata, marking)])
        assert metadata.extend(TRANSACTION, [INSERTED, memoryview(INSERTED)]) is None  # type: ignore[list-item]
    assert results[0] == results[1]


@pytest.mark.usefixtures("implementation")
def test_a_delete_that_marks_is_an_update_of_the_facts() -> None:
    kinds = (*KINDS, MetadataKind.DELETED_AT)
    metadata = RowMetadata(kinds, 2, binary=False, key=frozenset([0]))
    whole = _message(b"D", b"O" + _tuple(b"1", b"v"))
    found = metadata.extend(TRANSACTION, [DELETED, whole, INSERTED])
    assert found is not None
    time = b"2000-01-01 00:02:03.456789+00:00"
    facts = [time, b"1/10", b"delete", time]
    row, end = read_text_row(found[0])
    assert (found[0][:1], end) == (b"U", len(found[0]))
    assert [row[0], row[1], *row[2:]] == [b"1", UNCHANGED, *facts]
    values = _tuple(b"1", b"v", *facts)
    assert found[1] == _message(
        b"U", b"O" + _tuple(b"1", b"v", None, None, None, None), b"N" + values
    )
    assert read_text_row(found[2])[0][-1] is NULL


@pytest.mark.usefixtures("implementation")
def test_with_a_filter_a_delete_stays_one_and_brings_its_facts() -> None:
    """An update has the time, too: the target decides whether the row leaves the filter."""
    kinds = (MetadataKind.OPERATION, MetadataKind.DELETED_AT)
    metadata = RowMetadata(kinds, 2, binary=False, key=frozenset([0]), is_filtered=True)
    found = metadata.extend(TRANSACTION, [DELETED, MOVED, INSERTED, DELETED[:-1]])
    time = b"2000-01-01 00:02:03.456789+00:00"
    assert found == [
        _message(b"D", b"K" + _tuple(b"1", None, b"delete", time)),
        _message(
            b"U",
            b"K" + _tuple(b"1", None, None, None),
            b"N" + _tuple(b"2", b"b", b"update", time),
        ),
        _message(b"I", b"N" + _tuple(b"1", None, b"insert", None)),
        DELETED[:-1],
    ]
    assert metadata.extend(TRANSACTION, [DELETED, memoryview(DELETED)]) is None  # type: ignore[list-item]


def test_exact_order_gets_the_same_values() -> None:
    metadata = RowMetadata(KINDS, 2, binary=False)
    row, _ = read_text_row(UPDATED)
    change = metadata.extended_change(TRANSACTION, OrderedChange(UPDATE, None, row))
    extended = metadata.extend(TRANSACTION, [UPDATED])
    assert extended is not None
    assert change.new == read_text_row(extended[0])[0]
    assert change.new is not None
    assert is_partial(change.new)
    gone = OrderedChange(INSERT, row, None)
    assert metadata.extended_change(TRANSACTION, gone) is gone


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("{type: history, metadata: {lsn: _lsn}}", "the columns of `history`"),
        ("{metadata: {lsn: x, operation: x}}", "already gets another value"),
        ("{metadata: {lsn: sid}}", "already gets another value"),
        ("{columns: {id: n}, metadata: {lsn: n}}", "already gets another value"),
        ("{set: {n: '1'}, metadata: {lsn: n}}", "already gets another value"),
        ("{metadata: {deleted_at: gone}}", "only `on_delete: mark`"),
        ("{type: append, on_delete: mark}", "for clones"),
        ("{set: {deleted_at: '1'}, on_delete: mark}", "already gets another value"),
    ],
)
def test_columns_that_are_taken_are_refused(rule: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "target: {url: 'host=t'}\n"
        "sources: [{database: shop, urls: [{url: 'host=s'}], tables: {t: " + rule + "}}]\n"
    )
    with pytest.raises(MappingError, match=problem):
        load(path)
