"""Definitions that `create` asks for, and that a target table cannot have."""

from collections.abc import Iterable

from streamer.commands.check.findings import Finding, Place, at_target, info
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.definitions.planned import TargetPlace
from streamer.definitions.render import Renderer
from streamer.mapping.names import RelationName
from streamer.mapping.rules import RelationMapping


def check_definitions(
    facts: SourceFacts, target: TargetFacts, *, create_tables: bool
) -> Iterable[Finding]:
    """Name the definitions of each missing table that streamer will leave out, with their SQL."""
    if not create_tables:
        return
    by_source = {mapping.source: mapping for mapping in facts.mappings}

    def place_of(name: RelationName) -> TargetPlace | None:
        mapping = by_source.get(name)
        return None if mapping is None else _place(facts, target, mapping)

    for mapping in facts.mappings:
        definition = facts.definitions.get(mapping.source)
        if definition is None or mapping.target in target.tables:
            continue
        renderer = Renderer(definition, _place(facts, target, mapping), place_of)
        for planned in renderer.plan(mapping.rule.create):
            if planned.reason is not None:
                problem = (
                    f'{planned.kind} "{planned.name}" is not created at the target: '
                    f"{planned.reason}"
                )
                place = Place(facts.label, str(mapping.source))
                yield info(place, problem, at_target(planned.sql))


def _place(facts: SourceFacts, target: TargetFacts, mapping: RelationMapping) -> TargetPlace:
    table = target.tables.get(mapping.target)
    there = None if table is None else table.relation
    has_sid = facts.source.sid is not None and (there is None or there.has_sid)
    return TargetPlace(mapping, has_sid, None if there is None else frozenset(there.columns))
