"""Text or binary: decided for a source at each start of its stream.

One column that does not fit makes all values of a source come as text, because pgoutput takes one
option for the stream. The planner notices later changes (`streamer.apply.planner`); the source then
starts again.
"""

from collections.abc import Iterable

import structlog

from streamer.apply.binary import VERSION_MIN, binary_obstacle, binary_types
from streamer.mapping.rules import RelationMapping, RelationName, SourceMapping, Transport
from streamer.source.catalog import SourceRelation, SourceServer
from streamer.sync.tables import published_relation
from streamer.target.catalog import read_relation
from streamer.target.connection import TargetAddress, target_connection

log = structlog.get_logger()

TEXT: frozenset[int] = frozenset()
"""No type travels in binary."""


async def choose_transport(
    source: SourceMapping,
    server: SourceServer,
    address: TargetAddress,
    mappings: Iterable[RelationMapping],
    relations: dict[RelationName, SourceRelation],
    *,
    known_obstacle: str | None = None,
) -> frozenset[int]:
    """Return the OIDs of types that come in binary; none when all is text.

    Logs the reason why a source with `transport: binary` sends text. *known_obstacle*: the reason
    from an earlier attempt.
    """
    if source.transport is Transport.TEXT:
        return TEXT
    obstacle = known_obstacle
    types = TEXT
    if server.version < VERSION_MIN:
        obstacle = f"PostgreSQL {server.major} can send nothing else"
    elif obstacle is None:
        types, obstacle = await _look_for_obstacle(source, server, address, mappings, relations)
    if obstacle is None:
        return types
    log.warning("text transport instead of binary", source=source.label, because=obstacle)
    return TEXT


async def _look_for_obstacle(
    source: SourceMapping,
    server: SourceServer,
    address: TargetAddress,
    mappings: Iterable[RelationMapping],
    relations: dict[RelationName, SourceRelation],
) -> tuple[frozenset[int], str | None]:
    async with target_connection(address, "streamer transport") as target:
        types = binary_types(server.version, target.server_version)
        for mapping in mappings:
            if (relation := relations.get(mapping.source)) is None:
                continue
            obstacle = binary_obstacle(
                published_relation(relation),
                mapping,
                await read_relation(target, mapping.target),
                sid=source.sid,
                types=types,
                type_names={column.name: column.type for column in relation.columns},
            )
            if obstacle is not None:
                return types, obstacle
    return types, None
