"""Reads definitions of tables from the catalogs, on either side.

Both drivers run the same SQL, with the OIDs of tables as its only parameter and JSON text as its
result. The queries take no lock on the tables. ``pg_get_expr`` and ``pg_get_constraintdef`` need an
empty search_path to write the schemas of names.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.postgres.describing import COLUMNS, PARTITIONS, STATISTICS, USED_TYPES, objects_sql
from streamer.schema.definition_message import DefinitionMessage
from streamer.schema.indexes_constraints_types import DefinedType, object_of
from streamer.schema.partitions import Partition
from streamer.schema.planned_definition import Places, TargetPlace
from streamer.schema.source_definition import DefinedColumn
from streamer.schema.table_definition import StatisticsDefinition, TableDefinition
from streamer.schema.target_relation import TargetRelation
from streamer.source.connection import Connection, fetch_all
from streamer.target.catalog import read_relations
from streamer.target.connection import TargetConnection

_DEFINITIONS_SQL: Final = f"""
select c.oid::int8 as oid, n.nspname as namespace, c.relname as name,
       pg_catalog.obj_description(c.oid, 'pg_class') as comment,
       ({COLUMNS})::text as columns, ({objects_sql(with_texts=True)})::text as objects,
       ({STATISTICS})::text as statistics, ({PARTITIONS})::text as partitions
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any ({{oids}})
"""

_TYPES_SQL: Final = f"select ({USED_TYPES})::text as types from pg_catalog.pg_class c where c.oid ="


def definitions_sql(placeholder: str) -> str:
    """Return the query; *placeholder* is the driver's own, for an array of OIDs."""
    is_psycopg = placeholder.startswith("%")  # psycopg reads a single percent sign as a placeholder
    sql = _DEFINITIONS_SQL.replace("%", "%%") if is_psycopg else _DEFINITIONS_SQL
    return sql.replace("{oids}", placeholder)


async def read_at_source(plain: Connection, oids: Sequence[int]) -> dict[int, TableDefinition]:
    """Return the definitions of the existing tables among *oids*, by OID."""
    rows = await fetch_all(plain, definitions_sql("%s::oid[]"), oids) if oids else []
    return {row["oid"]: definition_of(row) for row in rows}


async def read_at_target(
    target: TargetConnection, oids: Sequence[int]
) -> dict[int, TableDefinition]:
    """Return the definitions of the existing tables among *oids*, by OID."""
    rows = await target.fetch(definitions_sql("$1::oid[]"), oids)
    return {row["oid"]: definition_of(dict(row)) for row in rows}


async def read_places(target: TargetConnection, mappings: Sequence[RelationMapping]) -> Places:
    """Return the target tables of a source's tables, to translate references of foreign keys."""
    relations = await read_relations(target, [mapping.target for mapping in mappings])
    return {m.source: TargetPlace.at(m, relations.get(m.target)) for m in mappings}.get


def definition_of(row: dict[str, Any]) -> TableDefinition:
    """Return the definition in a result *row* of `definitions_sql`."""
    columns = tuple(map(DefinedColumn.of, json.loads(row["columns"] or "[]")))
    names = {column.number: column.name for column in columns}
    return TableDefinition(
        name=RelationName(row["namespace"], row["name"]),
        columns=columns,
        objects=tuple(object_of(fields, names) for fields in json.loads(row["objects"] or "[]")),
        comment=row["comment"],
        statistics=tuple(StatisticsDefinition(**e) for e in json.loads(row["statistics"] or "[]")),
        partitions=tuple(Partition(**fields) for fields in json.loads(row["partitions"])),
    )


def objects_of(message: DefinitionMessage) -> TableDefinition:
    """Return the indexes and constraints that *message* describes with their texts."""
    objects = () if message.definition is None else message.definition.objects or ()
    described = tuple(o for o in objects if o.has_texts)
    return TableDefinition(message.relation_name, columns=(), objects=described)


async def read_source_types(plain: Connection, oid: int) -> list[DefinedType]:
    """Return the types of the columns of a source's table, and their parts."""
    (row,) = await fetch_all(plain, f"{_TYPES_SQL} %s", oid)
    return _types(row["types"])


async def read_target_types(target: TargetConnection, table: TargetRelation) -> list[DefinedType]:
    """Return the types of the columns of a target table, and their parts."""
    return _types(await target.fetch_value(f"{_TYPES_SQL} $1", table.oid))


def _types(text: str | None) -> list[DefinedType]:
    return [DefinedType.of(fields) for fields in json.loads(text or "[]")]
