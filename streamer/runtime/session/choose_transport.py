"""Text or binary: decided for a source at each start of its stream.

A single unsuitable column makes all values of a source come as text, because pgoutput has one
option for the whole stream. The planner detects later changes (`streamer.apply.write.planner`); the
source then begins a new attempt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import structlog

from streamer.apply.rows.binary_transfer import VERSION_MIN, binary_obstacle, binary_types
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Transport
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.schema_changes.create_tables import published_relation
from streamer.source.catalog import SourceRelation, SourceServer
from streamer.target.catalog import read_relations
from streamer.util.repeated_notices import end_notice, give_notice

log = structlog.get_logger()

TEXT: frozenset[int] = frozenset()
"""No type travels in binary."""
_TEXT_SETTING: Final = "the setting `transport` is text"
_QUALIFIES: Final = "every written column has the same built-in type on both sides"
_INSTEAD: Final = "text transport instead of binary"
_READ_TABLES: Final = 500
"""The number of definitions to hold in memory at a time."""


@dataclass(frozen=True, slots=True)
class ChosenTransport:
    """The format in which a source sends values, and the reason.

    ``types``: OIDs of types that come in binary; none when all values are text. ``obstacle``: the
    reason for text. ``of_tables``: the reasons by table that needs text.
    """

    types: frozenset[int]
    obstacle: str | None = None
    of_tables: dict[RelationName, str] = field(default_factory=dict)

    @property
    def is_binary(self) -> bool:
        return self.types != TEXT

    def transport_of(self, table: RelationName) -> tuple[str, str]:
        """Return the transport of a table, and the reason in words."""
        if self.obstacle is None:
            return Transport.BINARY.value, _QUALIFIES
        reason = self.of_tables.get(table)
        if reason is None and self.of_tables:
            reason = f"another table of this source forces text: {self.obstacle}"
        return Transport.TEXT.value, reason or self.obstacle


async def choose_transport(
    source: SourceMapping,
    server: SourceServer,
    bookkeeping: Bookkeeping,
    mappings: Iterable[RelationMapping],
    relations: dict[RelationName, SourceRelation],
    *,
    known_obstacle: str | None = None,
) -> ChosenTransport:
    """Return the transport of the source's values.

    Logs why streamer does not use requested binary transport. *known_obstacle*: why binary
    transport failed before.
    """
    if source.transport is Transport.TEXT:
        return ChosenTransport(TEXT, _TEXT_SETTING)
    if server.version < VERSION_MIN:
        chosen = ChosenTransport(TEXT, f"PostgreSQL {server.major} cannot send binary values")
    elif known_obstacle is not None:
        chosen = ChosenTransport(TEXT, known_obstacle)
    else:
        present = [m for m in mappings if m.source in relations]
        chosen = await _find_obstacles(source, server, bookkeeping, present, relations)
    if chosen.obstacle is None:
        end_notice(_INSTEAD, source.label)
    else:
        say = log.warning if source.transport is Transport.BINARY else log.info
        give_notice(say, _INSTEAD, source.label, because=chosen.obstacle)
    return chosen


async def _find_obstacles(
    source: SourceMapping,
    server: SourceServer,
    bookkeeping: Bookkeeping,
    mappings: Sequence[RelationMapping],
    relations: dict[RelationName, SourceRelation],
) -> ChosenTransport:
    obstacles: dict[RelationName, str] = {}
    async with bookkeeping.connection() as target:
        types = binary_types(server.version, target.server_version)
    for batch in _batches(mappings):
        async with bookkeeping.connection() as target:
            targets = await read_relations(target, [mapping.target for mapping in batch])
        for mapping in batch:
            relation = relations[mapping.source]
            obstacle = binary_obstacle(
                published_relation(relation),
                mapping,
                targets.get(mapping.target),
                types=types,
                type_names={column.name: column.type for column in relation.columns},
            )
            if obstacle is not None:
                obstacles[mapping.source] = obstacle
    if not obstacles:
        return ChosenTransport(types)
    return ChosenTransport(TEXT, next(iter(obstacles.values())), obstacles)


def _batches(mappings: Sequence[RelationMapping]) -> Iterator[list[RelationMapping]]:
    remaining = iter(mappings)
    while batch := list(islice(remaining, _READ_TABLES)):
        yield batch
