"""Reads the definitions of a table on both sides, and returns their differences."""

from collections.abc import Collection
from typing import Final

from streamer.apply.object_changes import read_used_types
from streamer.definitions.difference import (
    DefinitionDifference,
    table_difference,
    type_difference,
)
from streamer.definitions.planned import TargetPlace
from streamer.definitions.read import read_at_source, read_at_target
from streamer.mapping.objects import DefinedType
from streamer.mapping.options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.postgres.describing import USED_TYPES
from streamer.source.connection import Connection, fetch_all
from streamer.target.catalog import TargetRelation
from streamer.target.connection import TargetConnection

_TYPES_SQL: Final = f"select ({USED_TYPES}) as types from pg_catalog.pg_class c where c.oid = %s"


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
    source = (await read_at_source(plain, [oid]))[oid]
    present = (await read_at_target(target, [table.oid]))[table.oid]
    place = TargetPlace.at(mapping, sid, table)
    places = {mapped.source: TargetPlace(mapped, place.has_sid) for mapped in others}
    differences = table_difference(source, place, places.get, present, is_shared=is_shared)
    (row,) = await fetch_all(plain, _TYPES_SQL, oid)
    ours = list(map(DefinedType.of, row["types"] or ()))
    target_types = await read_used_types(target, table)
    keeps_more = is_shared or any(rule.type is TableType.HISTORY for rule in (mapping, *others))
    return type_difference(ours, target_types, keeps_more=keeps_more) + differences
