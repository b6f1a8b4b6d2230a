"""The columns of a table that can order the chunks of its copy. Pure."""

from collections.abc import Iterable

from streamer.mapping.chunks import ORDERED_TYPES
from streamer.source.catalog import SourceRelation


def chunk_columns(
    relation: SourceRelation, names: Iterable[str]
) -> tuple[tuple[str, str], ...] | str:
    """Return the columns with their types that can order the chunks of a table, or the obstacle.

    *names*: the columns of which the target has the values.
    """
    if relation.is_partitioned:
        return "it is partitioned"
    key = relation.key
    if relation.replica_identity == "f":
        key = relation.primary_key
    if not key:
        return "it has no key"
    known = set(names)
    columns = {column.name: column for column in relation.columns}
    found: list[tuple[str, str]] = []
    for name in key:
        column = columns[name]
        if name not in known or column.generated or column.type not in ORDERED_TYPES:
            break
        found.append((name, column.type))
    if found:
        return tuple(found)
    first = columns[key[0]]
    return f'its key begins with "{first.name}" of type {first.type}'
