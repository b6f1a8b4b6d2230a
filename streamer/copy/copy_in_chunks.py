"""Copies of large tables in chunks: ranges of keys, each with a separate consistent point.

The copy of a large table takes hours, and a lost session invalidates the snapshot. So a chunk is a
copy of the rows between two keys, under the snapshot of a round:

1. the round holds the lane of the table to a point, and takes a snapshot with the consistent point
   P (`streamer.apply.lanes.lane`). The first chunk needs no hold, because the target contains no
   row yet;
2. the drainer applies the changes before P, of rows up to the border of the last chunk. It omits
   changes of later rows (`streamer.apply.lanes.copied_range`), which this or a later chunk
   contains;
3. COPY copies the rows of the chunk. The drainer applies no change of the table meanwhile, so
   neither a TRUNCATE nor a change of a key can affect half a chunk;
4. one statement stores the new border and P as the position. Then the drainer continues.

A process that dies before step 4 leaves rows beyond the border. The next process removes these rows
and repeats the chunk. The stream and the slot treat such a table as a table in sync. So streamer
can continue at the next chunk whenever it can continue a table in sync, also after a fail-over.

Between two chunks the table must stay the same table. After a rewrite or a change of the
definition, or if a new table replaces the target, the copy begins again. Partitions may be attached
and detached, because a chunk reads the partitions of its snapshot.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Final

from psycopg.rows import DictRow

from streamer.control.chunked_copy import CHUNKS_OF_LIMIT, ChunkedCopy, beyond, key_values, up_to
from streamer.copy.copy_query import copy_source
from streamer.copy.parts.ctid_ranges import CopyPart, Heap, cut
from streamer.copy.prepare_copy import TableCopy
from streamer.postgres.key_values import KeyValue
from streamer.postgres.quoting import quote_identifier
from streamer.source.connection import Connection, fetch_all
from streamer.source.tables.bytewise_columns import read_bytewise
from streamer.source.tables.chunk_columns import chunk_columns
from streamer.source.tables.distant_keys import find_distant
from streamer.target.connection import TargetConnection

CHUNK_BYTES_MIN: Final = 8192
ASSUMED_ROW_BYTES: Final = 128
"""The assumed size of a row of a table without statistics."""
PARTS_MAX: Final = 64
OTHER_TARGET: Final = "another table has the name of its target now"
Key = tuple[str, ...]
"""Values of the columns of the borders, as text; empty for no key."""
Values = tuple[KeyValue, ...]
"""The values of a key in a form that sorts as the source sorts them."""


class RewrittenError(Exception):
    """A session renamed or rewrote the table, so the snapshot does not show the rows."""


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """``rows``: the number of rows of a part. ``parts``: the number of parts of a chunk.
    ``part_bytes``: the approximate size of a part.

    ``step``: the number of rows between two sampled keys, in each heap.
    """

    rows: int
    parts: int
    part_bytes: int
    step: int

    @property
    def keys(self) -> int:
        """The number of sampled keys in a chunk."""
        return self.rows * self.parts // self.step


def chunk_bytes(limit: int) -> int:
    """Return the size of the first chunk of a table that is larger than *limit*."""
    return max(CHUNK_BYTES_MIN, limit // CHUNKS_OF_LIMIT)


def size_of_chunk(copy: TableCopy, bytes_max: int, part_bytes: int) -> ChunkSize:
    """Return the size of chunks of *bytes_max*, with parts of about *part_bytes*."""
    counted = [heap for heap in copy.seen.heaps if heap.row_count]
    rows = sum(heap.row_count for heap in counted)
    row_bytes = sum(heap.size_bytes for heap in counted) // rows if rows else ASSUMED_ROW_BYTES
    parts = max(1, min(PARTS_MAX, -(-bytes_max // part_bytes)))
    rows = max(1, bytes_max // max(1, row_bytes) // parts)
    step = max(1, rows // min(PARTS_MAX, len(copy.seen.heaps)))
    return ChunkSize(rows, parts, bytes_max // parts, step)


def _stores(copy: TableCopy) -> tuple[tuple[int, int], ...]:
    return tuple(store for heap in copy.seen.heaps for store in heap.stores)


def fingerprint(copy: TableCopy) -> str:
    """Return a fingerprint of columns and identity, which must not change between chunks."""
    relation, mapping = copy.relation, copy.mapped.mapping
    facts = {
        "columns": [(c.name, c.type, c.number, c.generated, c.collation) for c in relation.columns],
        "written": copy.column_numbers,
        "into": [mapping.target_column(column.name) for column in relation.columns],
        "identity": (relation.oid, relation.replica_identity, relation.key, relation.primary_key),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def find_change(copy: TableCopy, former: ChunkedCopy) -> str | None:
    """Return why *copy* cannot copy the chunk after *former*, or None.

    Partitions may be attached and detached. A partition that stays must keep its storage.
    """
    if former.target_oid != copy.target.oid:
        return OTHER_TARGET
    stores = dict(former.stores)
    is_same = (
        former.definition == fingerprint(copy)
        and copy.seen.can_split
        and all(stores.get(oid, filenode) == filenode for oid, filenode in _stores(copy))
    )
    return None if is_same else "its storage, its columns or their mapping changed"


def begin_chunks(copy: TableCopy, columns: tuple[tuple[str, str], ...], limit: int) -> ChunkedCopy:
    """Return the state before the first chunk. *columns*: the columns of the borders."""
    names, types = zip(*columns, strict=True)
    first = chunk_bytes(limit)
    return ChunkedCopy(
        names, types, (), fingerprint(copy), 0, first, copy.seen.size_bytes, copy.target.oid
    )


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The rows of a heap after ``low``, up to ``high``; each may be empty."""

    heap: Heap
    low: Key
    high: Key

    def condition(self, copied: ChunkedCopy) -> str:
        """Return the condition for the part's rows, over the source's columns."""
        names = [quote_identifier(name) for name in copied.columns]
        return _between(names, copied.types, self.low, self.high)


@dataclass(frozen=True, slots=True)
class TableChunk:
    """A chunk. ``before``, ``after``: the rows of the target before and after the chunk's copy.
    ``after`` is None after the last chunk.
    """

    before: ChunkedCopy
    parts: tuple[ChunkPart, ...]
    after: ChunkedCopy | None


async def choose_columns(
    plain: Connection, target: TargetConnection, copy: TableCopy
) -> tuple[tuple[str, str], ...] | str:
    """Return the columns of the chunks of a table, see `chunk_columns`, or the obstacle."""
    relation = copy.relation
    encoding = await target.fetch_value("select pg_catalog.getdatabaseencoding()::text")
    bytewise: frozenset[str] = frozenset()
    if encoding == "UTF8":
        bytewise = (await read_bytewise(plain, [relation.oid]))[relation.oid]
    distant = await find_distant(plain, [relation])
    return chunk_columns(relation, copy.unchanged, bytewise, is_distant=bool(distant))


class ChunkSearch:
    """Finds the end of the chunk after *copied*, and the ends of the chunk's parts. Pure.

    The caller adds the keys of one heap after another, in the order of the heaps' first keys.
    """

    def __init__(self, copied: ChunkedCopy, size: ChunkSize) -> None:
        self._before = copied
        self._size = size
        self._keys: dict[Heap, tuple[Key, ...]] = {}
        self._least: list[tuple[Values, Key]] = []
        """The smallest keys so far, at most the number of keys in a chunk."""

    @property
    def last(self) -> Key:
        """The last key of the chunk, by the heaps so far; empty if all rows are in the chunk."""
        return self._least[-1][1] if len(self._least) == self._size.keys else ()

    def needs(self, first: Values) -> bool:
        """Whether the chunk needs rows of a heap. *first*: its first key beyond the border."""
        return not self.last or first <= self._least[-1][0]

    def add(self, heap: Heap, keys: Sequence[Key]) -> None:
        """Add the keys of every `ChunkSize.step`-th row of *heap* beyond the border."""
        self._keys[heap] = tuple(keys)
        valued = [(key_values(key, self._before.types), key) for key in keys]
        self._least = sorted([*self._least, *valued])[: self._size.keys]

    def cut(self) -> TableChunk:
        """Return the chunk with at least one part for each heap."""
        copied, last = self._before, self.last
        keys_per_part = self._size.rows // self._size.step
        parts: list[ChunkPart] = []
        for heap, keys in self._keys.items():
            borders = [copied.border]
            for key in keys[keys_per_part - 1 :: keys_per_part]:
                if self.needs(key_values(key, copied.types)) and key not in (borders[-1], last):
                    borders.append(key)
            borders.append(last)
            parts += [ChunkPart(heap, *pair) for pair in pairwise(borders)]
        after = replace(copied, border=last, count=copied.count + 1) if last else None
        return TableChunk(copied, tuple(parts), after)


async def find_chunk(
    plain: Connection, copy: TableCopy, copied: ChunkedCopy, size: ChunkSize
) -> TableChunk:
    """Find the keys where the next chunk and its parts end, under the snapshot of *plain*.

    *copied*: the rows that the target contains; the border is empty before the first chunk. Each
    statement and each lock concerns a single partition, because a table may have thousands.
    Partitions that begin after the chunk are not read. Raises RewrittenError, psycopg.Error.
    """
    firsts = {heap: await _read_first(plain, heap, copied) for heap in copy.seen.heaps}
    begun = [(key_values(key, copied.types), heap) for heap, key in firsts.items() if key]
    search = ChunkSearch(replace(copied, stores=_stores(copy)), size)
    for first, heap in sorted(begun, key=itemgetter(0)):
        if not search.needs(first):
            break
        search.add(heap, await _read_keys(plain, heap, copied, search.last, size))
    if not begun:
        search.add(copy.seen.heaps[0], ())  # the part reads no row
    return search.cut()


def cut_into_parts(
    copy: TableCopy, chunk: TableChunk, size: ChunkSize, source_version: int, target_version: int
) -> list[CopyPart]:
    """Return *chunk* as parts of a copy. Pure."""
    parts: list[CopyPart] = []
    size_bytes = size.part_bytes * size.parts // len(chunk.parts)
    for number, chunk_part in enumerate(chunk.parts):
        condition = chunk_part.condition(chunk.before)
        query_input = replace(
            copy.query_input, heaps=(chunk_part.heap,), scope=condition, can_split=False
        )
        (part,) = cut(copy_source(query_input, source_version, target_version))
        parts.append(replace(part, part=number, size_bytes=size_bytes))
    return parts


async def _read_first(plain: Connection, heap: Heap, copied: ChunkedCopy) -> Key | None:
    """Return the first key of *heap* beyond the border, or None.

    An old snapshot sees no row of a table that was rewritten or renamed since. Without a part of
    the heap, no task would detect the new table.
    """
    if not heap.stores:
        return None  # a table without partitions
    listed, texts = _columns(copied)
    (store,) = heap.stores
    query = (
        f"select (select array[{texts}] from {_escaped(heap.relation_sql)} t"
        f" where {_beyond(copied)} order by {listed} limit 1) as k,"
        " pg_catalog.pg_relation_filenode(%s::oid) is distinct from %s::oid"
        " or pg_catalog.to_regclass(%s)::oid is distinct from %s::int8::oid as is_another"
    )
    (row,) = await _fetch(plain, query, *store, *heap.named)
    if row["is_another"]:
        raise RewrittenError(heap.relation_sql)
    return None if row["k"] is None else tuple(row["k"])


async def _read_keys(
    plain: Connection, heap: Heap, copied: ChunkedCopy, last: Key, size: ChunkSize
) -> tuple[Key, ...]:
    """Return the key of every `ChunkSize.step`-th row. *last*: the chunk ends at this key or
    before; may be empty.
    """
    listed, texts = _columns(copied)
    query = (
        f"select k from (select pg_catalog.row_number() over (order by {listed}) as n,"
        f" array[{texts}] as k from {_escaped(heap.relation_sql)} t"
        f" where {_beyond(copied, last)} order by {listed} limit %s) r"
        " where n %% %s = 0 order by n"
    )
    rows = await _fetch(plain, query, size.rows * size.parts, size.step)
    return tuple(tuple(row["k"]) for row in rows)


async def _fetch(plain: Connection, query: str, *parameters: int | str) -> list[DictRow]:
    await plain.execute("savepoint chunk")
    try:
        return await fetch_all(plain, query, *parameters)
    finally:
        if not (plain.closed or plain.broken):
            await plain.execute("rollback to savepoint chunk")  # releases the lock


def _columns(copied: ChunkedCopy) -> tuple[str, str]:
    """Return the columns of the borders for a query, and the values as text."""
    # Qualified: an output column of the query would hide a key of that name in ORDER BY.
    names = [f"t.{quote_identifier(name)}" for name in copied.columns]
    return _escaped(", ".join(names)), _escaped(", ".join(f"{name}::text" for name in names))


def _beyond(copied: ChunkedCopy, last: Key = ()) -> str:
    names = [f"t.{quote_identifier(name)}" for name in copied.columns]
    return _escaped(_between(names, copied.types, copied.border, last))


def _escaped(sql: str) -> str:
    """Escape the percent sign in a name or a text, which psycopg would read as a parameter."""
    return sql.replace("%", "%%")


def _between(names: Sequence[str], types: Sequence[str], low: Key, high: Key) -> str:
    conditions = []
    if low:
        conditions.append(beyond(names, types, low))
    if high:
        conditions.append(up_to(names, types, high))
    return " and ".join(conditions) or "true"
