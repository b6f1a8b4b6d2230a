"""Definitions that `create` asks for and that a target table cannot have."""

from collections.abc import Iterable
from typing import Final

from streamer.commands.check.findings import Finding, Place, at_target, in_words, info, warning
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Create
from streamer.mapping.rules import RelationMapping
from streamer.schema.planned_definition import TargetPlace
from streamer.schema.render_definitions import Renderer


def check_definitions(
    facts: SourceFacts, target: TargetFacts, *, create_tables: bool
) -> Iterable[Finding]:
    """Name the definitions that streamer will omit from each missing table, with the SQL."""
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


_MADE_BY: Final = {
    "index": (Create.KEYS, Create.ALL),
    "default": (Create.ALL,),
    "constraint": (Create.ALL,),
    "extended statistics": (Create.ALL,),
}
"""The values of `create` that include an object with an expression."""


def check_calls(
    facts: SourceFacts, target: TargetFacts, *, create_tables: bool
) -> Iterable[Finding]:
    """Name the expressions for whose calls missing tables and types need an operator's consent.

    The facts come from the source. The target checks the expressions again, with its own functions.
    """
    if not create_tables:
        return
    for mapping, relation in facts.mapped():
        if mapping.target in target.tables:
            continue
        place = Place(facts.label, str(mapping.source))
        types = {
            k.oid for k in facts.types.get(mapping.source, ()) if k.full_name not in target.types
        }
        for call in facts.calls:
            stops = call.owner in types or (
                call.owner == relation.oid and call.name in relation.identity.generated
            )
            is_left = call.owner == relation.oid and mapping.rule.create in _MADE_BY.get(
                call.kind, ()
            )
            if stops:
                words = (
                    "read the function; the table's error has the statements that allow the call"
                )
                problem = f"{call}, so the table stops before its copy"
                yield warning(place, problem, in_words(words))
            elif is_left:
                words = "read the function; `streamer status` then prints the statement to run"
                problem = f"{call}, so the target table begins without this {call.kind}"
                yield warning(place, problem, in_words(words))


def _place(facts: SourceFacts, target: TargetFacts, mapping: RelationMapping) -> TargetPlace:
    table = target.tables.get(mapping.target)
    return TargetPlace.at(mapping, None if table is None else table.relation)
