"""Reads the definitions of a table on both sides, and returns their differences."""

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

from streamer.definitions.difference import (
    DefinitionDifference,
    table_difference,
    type_difference,
)
from streamer.definitions.planned import TargetPlace
from streamer.definitions.read import definition_of, definitions_sql
from streamer.mapping.objects import DefinedType
from streamer.mapping.options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.postgres.describing import USED_TYPES
from streamer.source.connection import Connection, fetch_all
from streamer.target.catalog import TargetRelation
from streamer.target.connection import TargetConnection

if TYPE_CHECKING:
    from streamer.mapping.names import RelationName

_TYPES_SQL = f"select ({USED_TYPES})::text as types from pg_catalog.pg_class c where c.oid = "


async def read_differences(
    plain: Connection,
    target: TargetConnection,
    oid: int,
    mapping: RelationMapping,
    table: TargetRelation,
    *,
    sid: str | None,
    others: Collection[RelationMapping],
    is_shared: bool = False,
) -> list[DefinitionDifference]:
    """Return the differences of a table. *others*: the tables of the source, for foreign keys.
    *is_shared*: further sources write to the target table, too.

    Raises SourceError, TargetError.
    """
    (source_row,) = await fetch_all(plain, definitions_sql("%s::oid[]"), [oid])
    (row,) = await target.fetch(definitions_sql("$1::oid[]"), [table.oid])
    source, present = definition_of(source_row), definition_of(dict(row))
    has_sid = sid is not None and table.has_sid
    places: dict[RelationName, TargetPlace] = {
        mapped.source: TargetPlace(mapped, has_sid) for mapped in others
    }
    place = TargetPlace(
        mapping, has_sid, frozenset(table.columns), is_partitioned=table.is_partitioned
    )
    differences = table_difference(source, place, places.get, present, is_shared=is_shared)
    (ours,) = await fetch_all(plain, _TYPES_SQL + "%s", oid)
    target_types = await target.fetch_value(_TYPES_SQL + "$1", table.oid)
    keeps_more = is_shared or any(rule.type is TableType.HISTORY for rule in (mapping, *others))
    types = type_difference(_types(ours["types"]), _types(target_types), keeps_more=keeps_more)
    return types + differences


def _types(text: str | None) -> list[DefinedType]:
    return [DefinedType.of(fields) for fields in json.loads(text or "[]")]
