"""Reads the definitions of a table on both sides, and returns their differences."""

from collections.abc import Collection

from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.schema.planned_definition import TargetPlace
from streamer.schema.table_difference import (
    DefinitionDifference,
    table_difference,
    type_difference,
)
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.read_definitions import (
    read_at_source,
    read_at_target,
    read_source_types,
    read_target_types,
)
from streamer.source.connection import Connection
from streamer.target.connection import TargetConnection


async def read_differences(
    plain: Connection,
    target: TargetConnection,
    oid: int,
    mapping: RelationMapping,
    table: TargetRelation,
    *,
    others: Collection[RelationMapping],
    is_shared: bool = False,
) -> list[DefinitionDifference]:
    """Return the differences of a table. *others*: the tables of the source, for foreign keys.
    *is_shared*: several sources write to the target table.

    Raises SourceError, TargetError.
    """
    source = (await read_at_source(plain, [oid]))[oid]
    present = (await read_at_target(target, [table.oid]))[table.oid]
    place = TargetPlace.at(mapping, table)
    places = {
        mapped.source: TargetPlace(mapped, place.has_sid and mapped.sid is not None)
        for mapped in others
    }
    differences = table_difference(source, place, places.get, present, is_shared=is_shared)
    ours, theirs = await read_source_types(plain, oid), await read_target_types(target, table)
    keeps_more = is_shared or any(rule.type is TableType.HISTORY for rule in (mapping, *others))
    return type_difference(ours, theirs, keeps_more=keeps_more) + differences
