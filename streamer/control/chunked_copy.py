"""The state of a copy in chunks: the range of keys that the target contains so far.

Servers may order texts differently. So chunks have borders of types with the same order everywhere
(`streamer.postgres.key_values`), and of text that the source orders by bytes. If the key has
further columns, its leading columns of these types form the borders, and rows with equal values
stay together. The bookkeeping stores the state as JSON. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from streamer.postgres.key_values import TEXT_TYPES, KeyValue, read_key_value, without_modifier
from streamer.postgres.quoting import quote_literal

CHUNKS_OF_LIMIT: Final = 10
"""The first chunk has the size of `sync.resumable_above` divided by this number."""
GROWTH: Final = 0.1
"""Each chunk is larger than the chunk before by this share."""


@dataclass(frozen=True, slots=True)
class ChunkedCopy:
    """The rows that the target contains: all rows up to and including ``border``.

    ``columns``, ``types``: the source's columns that order the rows. ``border``: the values of
    these columns in the last copied row, as text. ``definition``: a fingerprint of the table, which
    must stay the same. ``count``: the number of chunks so far. ``chunk_bytes``: the size of the
    first chunk. ``size_bytes``: the size of the table when its copy began. ``stores``: OID and
    filenode of the table, or of each partition, when its last chunk began. ``target_oid``: the
    target table that holds the rows.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    border: tuple[str, ...]
    definition: str
    count: int
    chunk_bytes: int
    size_bytes: int
    target_oid: int
    stores: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        """The approximate number of chunks of the table."""
        planned = math.log1p(GROWTH * self.size_bytes / self.chunk_bytes) / math.log1p(GROWTH)
        return max(self.count + 1, math.ceil(planned))

    @property
    def next_bytes(self) -> int:
        """The approximate size of the next chunk.

        A table can grow by more than a chunk during the copy of a chunk, and each chunk waits for
        the transactions at the source. So later chunks of a large copy are larger.
        """
        return int(self.chunk_bytes * (1 + GROWTH) ** self.count)

    @property
    def last_key(self) -> tuple[KeyValue, ...]:
        """The border, for comparisons with keys."""
        return key_values(self.border, self.types)

    def to_json(self) -> dict[str, Any]:
        return {
            "columns": list(self.columns),
            "types": list(self.types),
            "border": list(self.border),
            "definition": self.definition,
            "count": self.count,
            "chunk_bytes": self.chunk_bytes,
            "size_bytes": self.size_bytes,
            "target_oid": self.target_oid,
            "stores": [list(store) for store in self.stores],
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Self:
        return cls(
            tuple(stored["columns"]),
            tuple(stored["types"]),
            tuple(stored["border"]),
            stored["definition"],
            stored["count"],
            stored["chunk_bytes"],
            stored["size_bytes"],
            stored["target_oid"],
            tuple((oid, filenode) for oid, filenode in stored["stores"]),
        )


def key_values(key: Sequence[str], types: Sequence[str]) -> tuple[KeyValue, ...]:
    """Return the values of *key*, given as text, for comparisons with other keys."""
    return tuple(
        read_key_value(value.encode(), kind, is_text=True)
        for value, kind in zip(key, types, strict=True)
    )


def in_bytes(name: str, kind: str) -> str:
    """Return the SQL of a column in the order of the borders, for any collation of the column.

    An index with a different collation does not help. The source needs no such collation: text
    columns form borders only where the source's collation has this order.
    """
    return f'{name} collate "C"' if without_modifier(kind) in TEXT_TYPES else name


def beyond(names: Sequence[str], types: Sequence[str], border: Sequence[str]) -> str:
    """Return the condition for rows beyond *border*. *names*: SQL of the columns."""
    return f"({', '.join(names)}) > ({_values(types, border)})"


def up_to(names: Sequence[str], types: Sequence[str], border: Sequence[str]) -> str:
    """Return the condition for the rows up to *border*."""
    return f"({', '.join(names)}) <= ({_values(types, border)})"


def _values(types: Sequence[str], border: Sequence[str]) -> str:
    return ", ".join(
        f"{quote_literal(value)}::{kind}" for value, kind in zip(border, types, strict=True)
    )
