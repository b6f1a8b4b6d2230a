"""The columns of a table that can order the chunks of its copy. Pure."""

from collections.abc import Iterable

from streamer.postgres.key_values import ORDERED_TYPES, without_modifier
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
        is_ordered = without_modifier(column.type) in ORDERED_TYPES
        if name not in known or column.generated or not is_ordered:
            break
        found.append((name, column.type))
    if found:
        return tuple(found)
    first = columns[key[0]]
    begins = f'its key begins with "{first.name}" of type {first.type}'
    if without_modifier(first.type) in ORDERED_TYPES:
        return f"{begins}, which is computed or not copied as it is"
    return f"{begins}, whose order may differ between servers"
