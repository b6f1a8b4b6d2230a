"""Reads definitions of tables from the catalogs, on either side.

Both drivers run the same SQL: it has one parameter, the OIDs of tables, and returns JSON as text.
The queries take no lock on the tables. ``pg_get_expr`` and ``pg_get_constraintdef`` need an empty
search_path to write the schemas of names.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from streamer.definitions.model import (
    ColumnDefinition,
    ConstraintDefinition,
    IndexDefinition,
    IndexKey,
    SequenceDefinition,
    StatisticsDefinition,
    TableDefinition,
)
from streamer.mapping.definition import DefinedColumn
from streamer.mapping.names import RelationName
from streamer.mapping.partitions import Partition
from streamer.postgres.describing import (
    COLUMNS,
    CONSTRAINTS,
    INDEXES,
    PARTITIONS,
    STATISTICS,
)

Fetch = Callable[[str, Sequence[int]], Awaitable[list[dict[str, Any]]]]
"""Runs SQL with the placeholder ``{oids}`` filled in, and returns rows by column."""

_DEFINITIONS_SQL: Final = f"""
select c.oid::int8 as oid, n.nspname as namespace, c.relname as name,
       pg_catalog.obj_description(c.oid, 'pg_class') as comment,
       ({COLUMNS})::text as columns, ({INDEXES})::text as indexes,
       ({CONSTRAINTS})::text as constraints, ({STATISTICS})::text as statistics,
       ({PARTITIONS})::text as partitions
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any ({{oids}})
"""  # noqa: S608


def definitions_sql(placeholder: str) -> str:
    """Return the query; *placeholder* is the driver's own, for an array of OIDs."""
    is_psycopg = placeholder.startswith("%")  # which takes a percent sign for its own
    sql = _DEFINITIONS_SQL.replace("%", "%%") if is_psycopg else _DEFINITIONS_SQL
    return sql.replace("{oids}", placeholder)


def definition_of(row: dict[str, Any]) -> TableDefinition:
    """Return the definition in a *row* of that query."""
    return TableDefinition(
        name=RelationName(row["namespace"], row["name"]),
        columns=tuple(map(_column, json.loads(row["columns"] or "[]"))),
        indexes=tuple(map(_index, json.loads(row["indexes"] or "[]"))),
        constraints=tuple(map(_constraint, json.loads(row["constraints"] or "[]"))),
        comment=row["comment"],
        statistics=tuple(StatisticsDefinition(**e) for e in json.loads(row["statistics"] or "[]")),
        partitions=tuple(Partition(**each) for each in json.loads(row["partitions"])),
    )


def objects_of(
    name: RelationName, indexes: Iterable[dict[str, Any]], constraints: Iterable[dict[str, Any]]
) -> TableDefinition:
    """Return a definition without columns, from the JSON of its indexes and constraints."""
    return TableDefinition(
        name=name,
        columns=(),
        indexes=tuple(_index(dict(index)) for index in indexes),
        constraints=tuple(_constraint(dict(constraint)) for constraint in constraints),
    )


def column_of(defined: DefinedColumn) -> ColumnDefinition:
    """Return a column of a message about a table's definition."""
    return ColumnDefinition(
        name=defined.name,
        type=defined.type,
        not_null=defined.not_null,
        default=None if defined.generated else defined.default,
        expression=defined.default if defined.generated else None,
        identity=defined.identity,
        generated=defined.generated,
        collation=defined.collation,
        sequence=_sequence(defined.sequence),
    )


def _column(fields: dict[str, Any]) -> ColumnDefinition:
    return ColumnDefinition(**{**fields, "sequence": _sequence(fields["sequence"])})


def _sequence(found: dict[str, Any] | None) -> SequenceDefinition | None:
    if found is None:
        return None
    name = RelationName(found["namespace"], found["name"])
    return SequenceDefinition(name, found["type"], found["options"], found["is_owned"])


def _index(fields: dict[str, Any]) -> IndexDefinition:
    keys = tuple(
        IndexKey(**{**key, "opclass_options": tuple(key["opclass_options"])})
        for key in fields.pop("keys")
    )
    return IndexDefinition(
        keys=keys,
        included=tuple(fields.pop("included")),
        options=tuple(fields.pop("options")),
        uses=frozenset(fields.pop("uses")),
        **fields,
    )


def _constraint(fields: dict[str, Any]) -> ConstraintDefinition:
    referenced = fields.pop("referenced")
    return ConstraintDefinition(
        columns=tuple(fields.pop("columns")),
        referenced=RelationName(*referenced) if referenced else None,
        referenced_columns=tuple(fields.pop("referenced_columns")),
        on_delete_columns=tuple(fields.pop("on_delete_columns")),
        **fields,
    )
