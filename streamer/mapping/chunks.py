"""The state of a copy in chunks: the range of keys that the target has so far.

Servers may order texts differently. So the borders of chunks are keys of types with one order
everywhere (`streamer.postgres.key_values`), and of text that the source orders by bytes. Where the
key has further columns, its first ones of these types form the borders, and rows with equal values
stay together. The bookkeeping keeps the state as JSON. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from streamer.postgres.key_values import TEXT_TYPES, KeyValue, read_key_value, without_modifier
from streamer.postgres.quoting import quote_literal

CHUNKS_OF_LIMIT: Final = 10
"""A chunk has this part of `sync.resumable_above`."""
CHUNKS_OF_TABLE: Final = 100
"""And at least this part of its table."""
_DOUBLINGS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class ChunkedCopy:
    """The rows that the target has: those up to ``border``, with it.

    ``columns``, ``types``: those of the source that order the rows. ``border``: their values as
    text. ``definition``: a fingerprint of the table, which has to stay the same. ``count``: the
    chunks so far. ``size_bytes``: the size of the table when its copy began. ``stores``: OID and
    filenode of the table, or of each partition, when its last chunk began.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    border: tuple[str, ...]
    definition: str
    count: int
    chunk_bytes: int
    size_bytes: int
    stores: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        """About how many chunks the table has."""
        return max(self.count + 1, self._planned)

    @property
    def _planned(self) -> int:
        return max(1, -(-self.size_bytes // max(1, self.chunk_bytes)))

    @property
    def next_bytes(self) -> int:
        """About the size of the next chunk.

        A table can grow by more than a chunk while one is copied. So chunks are twice as large
        after the planned number of them, and after each such number again.
        """
        return self.chunk_bytes << min(_DOUBLINGS_MAX, self.count // self._planned)

    @property
    def last_key(self) -> tuple[KeyValue, ...]:
        """The border, to compare keys with."""
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
            tuple((oid, filenode) for oid, filenode in stored["stores"]),
        )


def key_values(key: Sequence[str], types: Sequence[str]) -> tuple[KeyValue, ...]:
    """Return the values of *key*, which has them as text, to compare it with others."""
    return tuple(
        read_key_value(value.encode(), kind, is_text=True)
        for value, kind in zip(key, types, strict=True)
    )


def in_bytes(name: str, kind: str) -> str:
    """Return the SQL of a column in the order of the borders, whatever collation it has there.

    An index of another collation does not help. The source needs none of this, because text makes
    borders only where its own collation is of that order.
    """
    return f'{name} collate "C"' if without_modifier(kind) in TEXT_TYPES else name


def beyond(names: Sequence[str], types: Sequence[str], border: Sequence[str]) -> str:
    """Return the condition for rows behind *border*. *names*: SQL of the columns."""
    return f"({', '.join(names)}) > ({_values(types, border)})"


def up_to(names: Sequence[str], types: Sequence[str], border: Sequence[str]) -> str:
    """Return the condition for the other rows."""
    return f"({', '.join(names)}) <= ({_values(types, border)})"


def _values(types: Sequence[str], border: Sequence[str]) -> str:
    return ", ".join(
        f"{quote_literal(value)}::{kind}" for value, kind in zip(border, types, strict=True)
    )
