"""Keys of changes in quarantine: equal if the types of the columns treat the keys as equal.

For some types the bytes of a key do not decide: 12 equals 12.0, and with citext 'a' equals 'A'. For
such columns the target computes a name for each value.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Final

from streamer.apply.lanes.blocked_keys import KeyColumns, Keys, KeyValues, digest
from streamer.apply.write.target_transaction import TargetTransaction

NAMED_MAX: Final = 1000
"""Maximum number of values for which one statement computes names."""

_NAME_SQL: Final = "select streamer.name_values($1, $2)"


class EqualKeys:
    """Makes keys. The server names values, in *transaction*."""

    def __init__(self, transaction: TargetTransaction) -> None:
        self._transaction = transaction

    async def keys(self, columns: KeyColumns, changes: Iterable[Sequence[KeyValues]]) -> list[Keys]:
        """Return the keys of each change, from the values of *columns* in the rows."""
        changes = list(changes)
        names: list[dict[bytes, bytes]] = []
        for position, kind in enumerate(columns.kinds):
            values = (row[position] for rows in changes for row in rows) if kind else ()
            names.append(await self._name(kind, [v for v in values if isinstance(v, bytes)]))
        return [tuple(dict.fromkeys(digest(row, names) for row in rows)) for rows in changes]

    async def _name(self, kind: str, values: Iterable[bytes]) -> dict[bytes, bytes]:
        """Return the server's name for each valid value of the type *kind*."""
        names: dict[bytes, bytes] = {}
        distinct = list(dict.fromkeys(values))
        for start in range(0, len(distinct), NAMED_MAX):
            batch = distinct[start : start + NAMED_MAX]
            documents = [_document(kind, value) for value in batch]
            stored_names = await self._transaction.target.fetch_value(_NAME_SQL, kind, documents)
            for value, name in zip(batch, stored_names, strict=True):
                if name is not None:
                    names[value] = name.encode()
        return names


def _document(kind: str, value: bytes) -> str:
    """Return *value* as a field of JSON, in ASCII for a target of any encoding."""
    text = value.decode("utf-8", "surrogateescape")
    return f'{{"v": {text if kind == "jsonb" else json.dumps(text)}}}'
