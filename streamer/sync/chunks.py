"""Copies of large tables in chunks: ranges of keys, each with a consistent point of its own.

The copy of a large table takes hours, and a session that is lost takes its snapshot along. So a
chunk is a copy of the rows between two keys, under the snapshot of its round:

1. the round holds the lane of the table to a point, and takes a snapshot with the consistent point
   P (`streamer.apply.lane`). The first chunk needs no hold, because the target has no row yet;
2. the drainer applies the changes before P, of rows up to the border of the chunk before. It
   leaves out the others (`streamer.apply.copied_range`): this chunk or a later one has them;
3. COPY brings the rows of the chunk. The drainer applies nothing of the table meanwhile, so a
   TRUNCATE or a key that moves cannot meet half a chunk;
4. one statement stores the new border and P as the position. Then the drainer continues.

A process that dies before step 4 leaves rows behind the border. The next one removes them, and
begins with the same chunk. Stream and slot are those of any table in sync. So streamer continues at
the next chunk wherever it could continue a table in sync, after a fail-over of the source, too.

Between two chunks the table must stay as it is. After a rewrite, or with another definition, the
copy begins again with the first chunk.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from streamer.mapping.chunks import CHUNKS_OF_LIMIT, ChunkedCopy, beyond, up_to
from streamer.postgres.quoting import quote_identifier
from streamer.source.connection import Connection, fetch_all
from streamer.sync.copy_query import copy_source
from streamer.sync.plan import CopyPart, cut
from streamer.sync.prepare import TableCopy

CHUNK_BYTES_MIN: Final = 8192
ASSUMED_ROW_BYTES: Final = 128
"""Of a table without statistics."""
PARTS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """``rows``: those of one part; ``parts``: of a chunk; ``part_bytes``: about the size of one."""

    rows: int
    parts: int
    part_bytes: int


def chunk_bytes(limit: int) -> int:
    """Return the size of the chunks of tables that are larger than *limit*."""
    return max(CHUNK_BYTES_MIN, limit // CHUNKS_OF_LIMIT)


def size_of_chunk(copy: TableCopy, bytes_max: int, part_bytes: int) -> ChunkSize:
    """Return how to cut chunks of *bytes_max*, with parts of about *part_bytes*."""
    size = sum(heap.size_bytes for heap in copy.heaps)
    known = copy.relation.row_count_estimate
    row_bytes = max(1, size // known) if known > 0 else ASSUMED_ROW_BYTES
    parts = max(1, min(PARTS_MAX, -(-bytes_max // part_bytes)))
    return ChunkSize(max(1, bytes_max // row_bytes // parts), parts, bytes_max // parts)


def fingerprint(copy: TableCopy) -> str:
    """Return a fingerprint of storage, columns and identity: they stay from chunk to chunk."""
    relation, mapping = copy.relation, copy.mapped.mapping
    facts = {
        "stores": [heap.stores for heap in copy.heaps],
        "columns": [(c.name, c.type, c.number, c.generated, c.collation) for c in relation.columns],
        "written": copy.column_numbers,
        "into": [mapping.target_column(column.name) for column in relation.columns],
        "identity": (relation.oid, relation.replica_identity, relation.key, relation.primary_key),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def begin_chunks(copy: TableCopy, columns: tuple[tuple[str, str], ...], limit: int) -> ChunkedCopy:
    """Return the state in front of the first chunk. *columns*: those of the borders."""
    names, types = zip(*columns, strict=True)
    size = sum(heap.size_bytes for heap in copy.heaps)
    return ChunkedCopy(names, types, (), fingerprint(copy), 0, chunk_bytes(limit), size)


@dataclass(frozen=True, slots=True)
class TableChunk:
    """A chunk. ``conditions``: those of its parts, over the source's columns. ``after``: the rows
    that the target has with it; None if these are all.
    """

    conditions: tuple[str, ...]
    after: ChunkedCopy | None


async def find_chunk(
    plain: Connection, copy: TableCopy, before: ChunkedCopy, size: ChunkSize
) -> TableChunk:
    """Find the keys where the next chunk and its parts end, under the snapshot of *plain*.

    *before*: the rows that the target has; its border is empty in front of the first chunk.
    """
    # Qualified: a name of the query's own columns would hide that of a key in ORDER BY.
    names = [f"t.{quote_identifier(name)}" for name in before.columns]
    listed = ", ".join(names)
    keys = ", ".join(f"{name}::text" for name in names)
    (heap,) = copy.heaps
    rest = f" where {beyond(names, before.types, before.border)}" if before.border else ""
    rest = rest.replace("%", "%%")  # a text may have the mark of a parameter
    query = (
        f"select k from (select pg_catalog.row_number() over (order by {listed}) as n,"
        f" array[{keys}] as k from {heap.relation_sql} t{rest}"
        f" order by {listed} limit %s) r where n %% %s = 0 order by n"
    )
    await plain.execute("savepoint chunk")
    rows = await fetch_all(plain, query, size.rows * size.parts, size.rows)
    await plain.execute("rollback to savepoint chunk")  # lets go of the lock
    return cut_chunk([tuple(row["k"]) for row in rows], before, size)


def cut_chunk(keys: Sequence[tuple[str, ...]], before: ChunkedCopy, size: ChunkSize) -> TableChunk:
    """Return the chunk behind *before*. *keys*: the last one of each full part. Pure."""
    names = [quote_identifier(name) for name in before.columns]
    borders = list(dict.fromkeys([before.border, *keys]))
    conditions = [_between(names, before, low, high) for low, high in pairwise(borders)]
    if len(keys) == size.parts:
        count = before.count + 1
        return TableChunk(tuple(conditions), replace(before, border=borders[-1], count=count))
    conditions.append(_between(names, before, borders[-1], ()))
    return TableChunk(tuple(conditions), None)


def cut_into_parts(
    copy: TableCopy, chunk: TableChunk, size: ChunkSize, source_version: int, target_version: int
) -> list[CopyPart]:
    """Return the parts of *chunk*, one for each of its conditions. Pure."""
    parts: list[CopyPart] = []
    for number, condition in enumerate(chunk.conditions):
        order = replace(copy.order, scope=condition, can_split=False)
        (part,) = cut(copy_source(order, source_version, target_version))
        parts.append(replace(part, part=number, size_bytes=size.part_bytes))
    return parts


def _between(
    names: list[str], copied: ChunkedCopy, low: tuple[str, ...], high: tuple[str, ...]
) -> str:
    conditions = []
    if low:
        conditions.append(beyond(names, copied.types, low))
    if high:
        conditions.append(up_to(names, copied.types, high))
    return " and ".join(conditions) or "true"
