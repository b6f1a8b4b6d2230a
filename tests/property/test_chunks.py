"""A copy in chunks against a model of both tables. At each position, the target has the source's
rows up to the border.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from streamer.apply.lanes.copied_range import CopiedRange, UnknownRowError
from streamer.control.chunked_copy import ChunkedCopy, key_values
from streamer.copy.copy_in_chunks import ChunkSearch, ChunkSize, TableChunk
from streamer.copy.parts.ctid_ranges import Heap
from streamer.decode.tuples import UNCHANGED, read_binary_tuple, read_text_tuple
from streamer.postgres.key_values import read_key_value
from tests.property import encode
from tests.support import properties  # noqa: F401  # the number of examples
from tests.support.key_values import ASCENDING
from tests.unit.build import relation

RELID = 16385
Key = tuple[int, uuid.UUID]
Row = tuple[bytes, bytes]
"""A short value, and a value that an update may leave out."""
Table = dict[Key, Row]
KINDS = sorted(kind for kind, values in ASCENDING.items() if len(values) == 7)
NUMBERS = {
    (kind, is_binary): [
        bytes.fromhex(data) if is_binary else text.encode() for text, data in values
    ]
    for kind, values in ASCENDING.items()
    for is_binary in (False, True)
}

KEYS = st.tuples(
    st.integers(0, 6), st.sampled_from([uuid.UUID(int=n << 100) for n in (0, 7, 2**27)])
)


@dataclass
class Source:
    """The source's table after each transaction, and the messages of each."""

    identity: str
    kind: str
    """The type of the first column of the key, with the value number *n* of `ASCENDING`."""
    is_binary: bool
    states: list[Table] = field(default_factory=lambda: [{}])
    sent: list[list[bytes]] = field(default_factory=list)

    def cells(self, key: Key, row: Sequence[encode.Cell]) -> list[encode.Cell]:
        number, unique = key
        first = NUMBERS[self.kind, self.is_binary][number]
        return [first, unique.bytes if self.is_binary else str(unique).encode(), *row]

    def key(self, key: Key) -> list[encode.Cell] | None:
        return self.cells(key, [None, None]) if self.identity == "d" else None

    def old(self, key: Key, row: Row) -> list[encode.Cell] | None:
        return self.cells(key, row) if self.identity == "f" else None

    def change(self, table: Table, action: str, key: Key, to: Key, value: bytes) -> bytes | None:
        """Make a change that *table* allows, and return the message."""
        binary = self.is_binary
        if action == "truncate":
            table.clear()
            return encode.truncate([RELID])
        if action == "insert":
            if key in table:
                return None
            table[key] = (value, b"large " + value)
            return encode.insert(RELID, self.cells(key, table[key]), binary=binary)
        if key not in table:
            return None
        before = table[key]
        if action == "delete":
            del table[key]
            return encode.delete(RELID, key=self.key(key), old=self.old(key, before), binary=binary)
        keeps = action.endswith("kept")
        if action.startswith("update"):
            to = key
        elif to in table:
            return None
        del table[key]
        table[to] = (value, before[1] if keeps else b"large " + value)
        sent = self.cells(to, [value, encode.TOAST if keeps else table[to][1]])
        return encode.update(
            RELID,
            sent,
            key=self.key(key) if to != key else None,
            old=self.old(key, before),
            binary=binary,
        )


ACTIONS = st.sampled_from(
    ["insert"] * 6
    + ["update", "update kept", "move", "move", "move kept", "delete", "delete", "truncate"]
)
TRANSACTIONS = st.lists(
    st.lists(st.tuples(ACTIONS, KEYS, KEYS, st.binary(min_size=1, max_size=2)), max_size=6),
    min_size=1,
    max_size=8,
)


def write(
    identity: str,
    kind: str,
    is_binary: bool,
    transactions: list[list[tuple[str, Key, Key, bytes]]],
) -> Source:
    source = Source(identity, kind, is_binary)
    for transaction in transactions:
        table = dict(source.states[-1])
        made = (source.change(table, *each) for each in transaction)
        source.sent.append([message for message in made if message is not None])
        source.states.append(table)
    return source


@dataclass
class Target:
    """The durable state: rows, position, and the border of the chunks; None for all rows."""

    source: Source
    rows: Table = field(default_factory=dict)
    position: int = 0
    chunks: ChunkedCopy | None = None

    def apply(self, through: int) -> None:
        """Apply transactions, each as a whole. Raises UnknownRowError."""
        message = relation(["a", "u", "v", "large"], ["a", "u"], identity=self.source.identity)
        while self.position < through:
            rows, copied = dict(self.rows), None
            if self.chunks is not None:
                copied = CopiedRange(self.chunks, message)
            for payload in self.source.sent[self.position]:
                taken = payload if copied is None else copied.effect_of(payload)
                if taken is not None:
                    self._change(rows, taken)
            self.rows, self.position = rows, self.position + 1

    def _change(self, rows: Table, payload: bytes) -> None:
        """Make a change that has to fit exactly."""
        kind = chr(payload[0])
        if kind == "T":
            rows.clear()
            return
        read = read_binary_tuple if self.source.is_binary else read_text_tuple
        first, end = read(payload, 6)
        if kind == "I":
            assert self._key(first) not in rows
            rows[self._key(first)] = self._row(first)
        elif kind == "D":
            del rows[self._key(first)]
        else:
            new = first if chr(payload[5]) == "N" else read(payload, end + 1)[0]
            before = rows.pop(self._key(first))
            assert self._key(new) not in rows
            row = self._row(new)
            rows[self._key(new)] = (row[0], before[1] if new[3] is UNCHANGED else row[1])

    def _value(self, item: bytes) -> bytes:
        return bytes(item[4:]) if self.source.is_binary else bytes(item)

    def _key(self, items: list[bytes]) -> Key:
        number, unique = map(self._value, items[:2])
        first = NUMBERS[self.source.kind, self.source.is_binary].index(number)
        if self.source.is_binary:
            return first, uuid.UUID(bytes=unique)
        return first, uuid.UUID(unique.decode())

    def _row(self, items: list[bytes]) -> Row:
        return self._value(items[2]), self._value(items[3])

    # ---- the copy ------------------------------------------------------------------------------

    def copy_chunk(
        self,
        point: int,
        rows_max: int,
        left_behind: int | None,
        parts_max: int = 1,
        heap_count: int = 1,
    ) -> bool:
        """Copy the next chunk as of *point*; return whether the chunk is the last.

        *left_behind*: the process dies after that many rows. *parts_max*, of *rows_max* rows: so
        many parts in a chunk, at least. *heap_count*: the partitions of the table.
        """
        types = (self.source.kind, "uuid")
        chunks = self.chunks or ChunkedCopy(("a", "u"), types, (), "", 0, 1, 1, 0)
        self.rows = {k: row for k, row in self.rows.items() if chunks.border and has(chunks, k)}
        if self.chunks is None:
            self.position = point  # no row could change
        self.apply(point)
        there = sorted(k for k in self.source.states[point] if not has(chunks, k))
        texts = ASCENDING[self.source.kind]
        size = ChunkSize(rows_max, parts_max, 1, max(1, rows_max // heap_count))
        rows: list[Keyed] = [
            ((texts[a][0], str(u)), HEAPS[(a if heap_count < 4 else u.int) % heap_count])
            for a, u in there
        ]
        chunk = search(rows, chunks, size)
        is_last = chunk.after is None
        wanted = [k for k in there if is_last or has(chunk.after or chunks, k)]
        assert rows_of(chunk, rows) == list(range(len(wanted))), "each row is in one part"
        count = rows_max * parts_max
        assert is_last or count <= len(wanted) <= count + rows_max
        for key in wanted[:left_behind]:
            self.rows[key] = self.source.states[point][key]
        if left_behind is not None:
            return False
        self.chunks = chunk.after
        return is_last

    def check(self, *, is_whole: bool) -> None:
        there = self.source.states[self.position]
        if not is_whole:
            assert self.chunks is not None
            there = {key: row for key, row in there.items() if has(self.chunks, key)}
        assert self.rows == there


HEAPS = [Heap(f"only p{number}", 1, 1) for number in range(4)]
Keyed = tuple[tuple[str, ...], Heap]
"""The key of a row as text, and the partition of the row."""


def search(rows: list[Keyed], before: ChunkedCopy, size: ChunkSize) -> TableChunk:
    """Look for the next chunk in *rows*, which are in order."""
    found = ChunkSearch(before, size)
    for heap in dict.fromkeys(heap for _, heap in rows):
        its = [key for key, where in rows if where is heap]
        if found.needs(key_values(its[0], before.types)):
            its = [key for key in its if found.needs(key_values(key, before.types))]
            found.add(heap, its[: size.rows * size.parts][size.step - 1 :: size.step])
    return found.cut()


def rows_of(chunk: TableChunk, rows: list[Keyed]) -> list[int]:
    """The numbers of the rows that the parts of *chunk* bring, in order."""

    def is_within(key: tuple[str, ...], low: tuple[str, ...], high: tuple[str, ...]) -> bool:
        low_value, value, high_value = (
            key_values(each, chunk.before.types) if each else () for each in (low, key, high)
        )
        return (not low or low_value < value) and (not high or value <= high_value)

    return sorted(
        number
        for part in chunk.parts
        for number, (key, heap) in enumerate(rows)
        if heap is part.heap and is_within(key, part.low, part.high)
    )


def has(chunks: ChunkedCopy, key: Key) -> bool:
    if not chunks.border:
        return False
    first, unique = chunks.border
    number = [text for text, _ in ASCENDING[chunks.types[0]]].index(first)
    return key <= (number, uuid.UUID(unique))


STEPS = st.lists(
    st.tuples(
        *(st.integers(0, 3), st.integers(1, 4), st.none() | st.integers(0, 3)),
        *(st.integers(1, 3), st.integers(1, 4)),
    ),
    max_size=12,
)


@given(st.sampled_from("df"), st.sampled_from(KINDS), st.booleans(), TRANSACTIONS, STEPS)
def test_chunks_and_changes_between_them_make_the_table_of_the_source(
    identity: str,
    kind: str,
    is_binary: bool,
    transactions: list[list[tuple[str, Key, Key, bytes]]],
    steps: list[tuple[int, int, int | None, int, int]],
) -> None:
    source = write(identity, kind, is_binary, transactions)
    target, last = Target(source), len(source.sent)
    is_whole = False
    try:
        for later, rows_max, left_behind, parts_max, heap_count in steps:
            point = min(last, target.position + later)
            is_whole = target.copy_chunk(point, rows_max, left_behind, parts_max, heap_count)
            if is_whole:
                break
            if target.chunks is not None and left_behind is None:
                target.check(is_whole=False)
        while not is_whole:
            is_whole = target.copy_chunk(last, 2, None)
        target.check(is_whole=True)
        target.chunks = None
        target.apply(last)
    except UnknownRowError:
        assert identity == "d", "the old row has all values"
        event("copied in one piece")
        return
    assert target.rows == source.states[-1]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.sampled_from(HEAPS)), min_size=20, max_size=60),
    *(st.integers(1, 8), st.integers(1, 3)),
)
def test_rows_with_equal_keys_are_in_one_chunk_whatever_their_partitions(
    drawn: list[tuple[int, Heap]], rows_max: int, parts_max: int
) -> None:
    rows: list[Keyed] = [((f"{n:02}",), heap) for n, heap in sorted(drawn, key=lambda row: row[0])]
    before = ChunkedCopy(("id",), ("integer",), (), "", 0, 1, 1, 0)
    size = ChunkSize(rows_max, parts_max, 1, max(1, rows_max // len(HEAPS)))
    while True:
        chunk = search(rows, before, size)
        row_count = len(rows_of(chunk, rows))
        assert rows_of(chunk, rows) == list(range(row_count))
        if chunk.after is None:
            assert row_count == len(rows)
            return
        border, most = chunk.after.border, rows_max * (parts_max + 1)
        assert sum(key < border for key, _ in rows) <= most
        assert size.keys * size.step <= row_count
        assert rows[row_count - 1][0] == border
        assert not rows[row_count:] or rows[row_count][0] > border
        rows, before = rows[row_count:], chunk.after


@pytest.mark.parametrize("kind", sorted(ASCENDING))
def test_keys_are_in_the_order_of_the_server_in_text_and_in_binary(kind: str) -> None:
    read = [
        [read_key_value(value, kind, is_text=not is_binary) for value in NUMBERS[kind, is_binary]]
        for is_binary in (False, True)
    ]
    assert read[0] == read[1]
    assert all((one,) < (other,) for one, other in pairwise(read[0]))


@given(st.dates(), st.dates())
def test_dates_are_days_since_2000(one: date, other: date) -> None:
    days = [read_key_value(str(day).encode(), "date", is_text=True) for day in (one, other)]
    assert days == [(day - date(2000, 1, 1)).days for day in (one, other)]


@given(st.decimals(allow_nan=False, allow_infinity=False), st.sampled_from(["", "+00", "-05:30"]))
def test_equal_values_in_other_words_are_equal(number: Decimal, offset: str) -> None:
    text = f"{number:f}"
    longer = f"{text}0" if "." in text else f"{text}.0"
    values = [read_key_value(t.encode(), "numeric(9,3)", is_text=True) for t in (text, longer)]
    assert values[0] == values[1] == (0, number)
    kind = "timestamp with time zone"
    there = read_key_value(f"2000-01-01 12:00:00{offset}".encode(), kind, is_text=True)
    shift = {"-05:30": 5.5}.get(offset, 0)
    assert there == int((12 + shift) * 3600_000_000)


def test_a_chunk_ends_at_the_key_of_its_last_row_and_the_last_chunk_nowhere() -> None:
    before = ChunkedCopy(("a", "b"), ("bigint", "text"), ("7", "x"), "", 2, 10, 100, 0)
    size = ChunkSize(5, 2, 5, 5)

    def cut(keys: list[tuple[str, ...]], before: ChunkedCopy = before) -> TableChunk:
        search = ChunkSearch(before, size)
        search.add(HEAPS[0], keys)
        return search.cut()

    some = cut([("8", "x"), ("9", "y")])

    assert [part.condition(before) for part in some.parts] == [
        """("a", "b") > ('7'::bigint, 'x'::text) and ("a", "b") <= ('8'::bigint, 'x'::text)""",
        """("a", "b") > ('8'::bigint, 'x'::text) and ("a", "b") <= ('9'::bigint, 'y'::text)""",
    ]
    assert some.after == replace(before, border=("9", "y"), count=3)

    rest = cut([("8", "x")])

    assert rest.parts[1].condition(before) == """("a", "b") > ('8'::bigint, 'x'::text)"""
    assert rest.after is None
    nothing = replace(before, border=(), count=0)
    assert [part.condition(before) for part in cut([], nothing).parts] == ["true"]
    # Rows with equal values of the first columns stay together.
    assert len(cut([("8", "x"), ("8", "x")]).parts) == 1
