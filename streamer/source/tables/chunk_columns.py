"""The columns of a table that can order the chunks of its copy. Pure."""

from collections.abc import Collection, Iterable

from streamer.postgres.key_values import ORDERED_TYPES, TEXT_TYPES, without_modifier
from streamer.schema.source_definition import DefinedColumn
from streamer.source.catalog import SourceRelation


def chunk_columns(
    relation: SourceRelation,
    names: Iterable[str],
    bytewise: Collection[str],
    *,
    is_distant: bool = False,
) -> tuple[tuple[str, str], ...] | str:
    """Return the columns with their types that can order the chunks of a table, or the obstacle.

    *names*: the columns whose values the target contains. *bytewise*: the text columns that are
    ordered by bytes (`streamer.source.tables.bytewise_columns`). *is_distant*: each chunk would
    read most pages (`streamer.source.tables.distant_keys`).
    """
    key = relation.key
    if relation.replica_identity == "f":
        key = relation.primary_key
    if not key:
        return "it has no key"
    if not relation.has_usable_identity:
        return f"its updates are not published ({relation.identity.obstacle})"
    copied = set(names)
    columns = {column.name: column for column in relation.columns}
    ordered: list[tuple[str, str]] = []
    for name in key:
        column = columns[name]
        if name not in copied or column.generated or not _is_ordered(column, bytewise):
            break
        ordered.append((name, column.type))
    if ordered and is_distant:
        return "neighbouring keys are in distant pages, so each chunk would read the whole table"
    if ordered:
        return tuple(ordered)
    first = columns[key[0]]
    begins = f'its key begins with "{first.name}" of type {first.type}'
    if _is_ordered(first, bytewise):
        return f"{begins}, which is computed, or copied with a different value"
    if without_modifier(first.type) in TEXT_TYPES:
        return f"{begins}, whose order is not that of its bytes in UTF-8"
    return f"{begins}, whose order may differ between servers"


def _is_ordered(column: DefinedColumn, bytewise: Collection[str]) -> bool:
    kind = without_modifier(column.type)
    return kind in ORDERED_TYPES or (kind in TEXT_TYPES and column.name in bytewise)
