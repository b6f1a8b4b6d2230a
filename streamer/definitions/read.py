"""Reads definitions of tables from the catalogs, on either side.

Both drivers run the same SQL: it has one parameter, the OIDs of tables, and returns JSON as text.
The queries take no lock on the tables. ``pg_get_expr`` and ``pg_get_constraintdef`` need an empty
search_path to write the schemas of names.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from streamer.definitions.model import (
    ConstraintDefinition,
    IndexDefinition,
    IndexKey,
    StatisticsDefinition,
    TableDefinition,
)
from streamer.definitions.planned import Places, TargetPlace
from streamer.mapping.definition import DefinedColumn
from streamer.mapping.definition_message import DefinitionMessage
from streamer.mapping.names import RelationName
from streamer.mapping.partitions import Partition
from streamer.mapping.rules import RelationMapping
from streamer.postgres.describing import (
    COLUMNS,
    CONSTRAINTS,
    INDEXES,
    PARTITIONS,
    STATISTICS,
)
from streamer.source.connection import Connection, fetch_all
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetConnection

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


async def read_at_source(plain: Connection, oids: Sequence[int]) -> dict[int, TableDefinition]:
    """Return the definitions of tables by their OIDs, of those that are there."""
    rows = await fetch_all(plain, definitions_sql("%s::oid[]"), oids) if oids else []
    return {row["oid"]: definition_of(row) for row in rows}


async def read_at_target(
    target: TargetConnection, oids: Sequence[int]
) -> dict[int, TableDefinition]:
    """Return the definitions of tables by their OIDs, of those that are there."""
    rows = await target.fetch(definitions_sql("$1::oid[]"), oids)
    return {row["oid"]: definition_of(dict(row)) for row in rows}


async def read_places(
    target: TargetConnection, mappings: Sequence[RelationMapping], sid: str | None
) -> Places:
    """Return where the tables of a source go, for the foreign keys that refer to them."""
    there = await read_relations(target, [mapping.target for mapping in mappings])
    return {m.source: TargetPlace.at(m, sid, there.get(m.target)) for m in mappings}.get


def definition_of(row: dict[str, Any]) -> TableDefinition:
    """Return the definition in a *row* of that query."""
    columns = tuple(map(DefinedColumn.of, json.loads(row["columns"] or "[]")))
    names = {column.number: column.name for column in columns}
    indexes, constraints = (json.loads(row[name] or "[]") for name in ("indexes", "constraints"))
    return TableDefinition(
        name=RelationName(row["namespace"], row["name"]),
        columns=columns,
        indexes=tuple(_index(index, names) for index in indexes),
        constraints=tuple(_constraint(constraint, names) for constraint in constraints),
        comment=row["comment"],
        statistics=tuple(StatisticsDefinition(**e) for e in json.loads(row["statistics"] or "[]")),
        partitions=tuple(Partition(**each) for each in json.loads(row["partitions"])),
    )


def objects_of(message: DefinitionMessage) -> TableDefinition:
    """Return the indexes and constraints that *message* describes."""
    columns = () if message.definition is None else message.definition.columns
    names = {column.number: column.name for column in columns}
    indexes, constraints = message.described["indexes"], message.described["constraints"]
    return TableDefinition(
        name=message.relation_name,
        columns=(),
        indexes=tuple(_index(index, names) for index in indexes),
        constraints=tuple(_constraint(constraint, names) for constraint in constraints),
    )


def _index(fields: Mapping[str, Any], names: Mapping[int, str]) -> IndexDefinition:
    """Return an index; *names*: of the table's columns, by their numbers."""
    keys = [
        {
            **key,
            "column": names.get(key["column"]),
            "opclass_options": tuple(key["opclass_options"]),
        }
        for key in fields["keys"]
    ]
    return IndexDefinition(
        **{
            **fields,
            "keys": tuple(IndexKey(**key) for key in keys),
            "included": _named(fields["included"], names),
            "options": tuple(fields["options"]),
            "uses": frozenset(_named(fields["uses"], names)),
        }
    )


def _constraint(fields: Mapping[str, Any], names: Mapping[int, str]) -> ConstraintDefinition:
    referenced = fields["referenced"]
    return ConstraintDefinition(
        **{
            **fields,
            "columns": _named(fields["columns"], names),
            "referenced": RelationName(*referenced) if referenced else None,
            "referenced_columns": tuple(fields["referenced_columns"] or ()),
            "on_delete_columns": _named(fields["on_delete_columns"], names),
        }
    )


def _named(numbers: Iterable[int] | None, names: Mapping[int, str]) -> tuple[str, ...]:
    # An expression of an exclusion constraint has the number 0, and system columns have negative
    # numbers.
    return tuple(names[number] for number in numbers or () if number > 0)
