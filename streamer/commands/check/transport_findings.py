"""Whether streamer will use `transport: binary`. Pure."""

from collections.abc import Iterable

from streamer.apply.rows.binary_transfer import VERSION_MIN, binary_obstacle, binary_types
from streamer.commands.check.findings import Finding, Place, in_words, info
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.mapping.rule_options import Transport
from streamer.schema_changes.create_tables import published_relation


def check_transport(facts: SourceFacts, target: TargetFacts) -> Iterable[Finding]:
    """Name the reason why all values of a source come as text."""
    if facts.source.transport is not Transport.BINARY or facts.server is None:
        return
    obstacle = _find_obstacle(facts, facts.server.version, target)
    if obstacle is not None:
        yield info(
            Place(facts.label),
            f"changes come as text, although transport is binary: {obstacle}",
            in_words("set transport: text, or change that table"),
        )


def _find_obstacle(facts: SourceFacts, version: int, target: TargetFacts) -> str | None:
    if version < VERSION_MIN:
        return f"PostgreSQL {version // 1_00_00} cannot send binary values"
    types = binary_types(version, target.server.version)
    for mapping, relation in facts.mapped():
        table = target.tables.get(mapping.target)
        obstacle = binary_obstacle(
            published_relation(relation),
            mapping,
            None if table is None else table.relation,
            types=types,
            type_names={column.name: column.type for column in relation.columns},
        )
        if obstacle is not None:
            return obstacle
    return None
