"""Labels that ended versions of a history contain and that the new enum of the column lacks.

An ended version keeps its value. So the target's enum gets these labels, after the labels of the
source. An existing enum gets the labels in a transaction before the change.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from streamer.mapping.rule_options import DdlKind
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.indexes_constraints_types import DefinedType, base_type
from streamer.schema.source_definition import ColumnChange
from streamer.schema.target_relation import TargetRelation
from streamer.target.connection import TargetConnection

_LABELS_MAX: Final = 100
"""A text column with more distinct values does not hold the labels of an enum."""
_LABEL_BYTES: Final = 63
_ENUM_SQL: Final = """
select e.enumlabel::text as label from pg_catalog.pg_enum e
where e.enumtypid = pg_catalog.to_regtype($1)
"""


async def read_kept_labels(
    target: TargetConnection,
    mapping: RelationMapping,
    relation: TargetRelation,
    types: Iterable[DefinedType],
    changes: Sequence[ColumnChange],
) -> dict[str, list[str]]:
    """Return the labels to keep, by the names of the new enums of columns of a history."""
    enums = {t.quoted: {text for _, text in t.labels} for t in types if t.kind == "e"}
    by_type: dict[str, list[str]] = {}
    for change in changes:
        column = change.after
        if change.kind is not DdlKind.CHANGE_TYPE or column is None:
            continue
        labels = enums.get(base_type(column.type))
        name = mapping.target_column(column.name)
        present = None if name is None else relation.columns.get(name)
        is_array = column.type.endswith("[]")
        if labels is None or present is None or present.type.endswith("[]") is not is_array:
            continue
        table = quote_qualified(relation.name.namespace, relation.name.name)
        value = quote_identifier(present.name)
        rows = await target.fetch(
            f"select distinct {f'unnest({value})' if is_array else value}::text as label"
            f" from {table} order by 1 limit {_LABELS_MAX + len(labels) + 2}"
        )
        values = [row["label"] for row in rows if row["label"] is not None]
        missing = [text for text in values if text not in labels]
        if len(missing) <= _LABELS_MAX and all(len(e.encode()) <= _LABEL_BYTES for e in missing):
            collected = by_type.setdefault(base_type(column.type), [])
            collected += [text for text in missing if text not in collected]
    return {name: labels for name, labels in by_type.items() if labels}


async def add_labels_sql(
    target: TargetConnection, needed: Mapping[str, Sequence[str]], created: Collection[str]
) -> list[str]:
    """Return the statements that add the labels that versions need to enums of the target.

    *created*: enums that the change itself creates with these labels. An existing enum needs an
    earlier transaction, because no transaction can use a label that it adds.
    """
    statements = []
    for name, labels in needed.items():
        if name not in created:
            present = {row["label"] for row in await target.fetch(_ENUM_SQL, name)}
            add = f"alter type {name} add value if not exists"
            missing = [label for label in labels if present and label not in present]
            statements += [f"{add} {quote_literal(label)}" for label in missing]
    return statements
