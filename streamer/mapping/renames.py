"""Whether a relation can follow its table to another name at the source. Pure.

The publication and the stream know a table by its OID, so a rename breaks neither. The rules know
it by its name. It follows where a rule gives the new name a target without a decision:

- the rule for the new name has the same target as before;
- that rule has another target, or a pattern derives one, and `on_ddl` applies `rename_table`. The
  target table then gets its new name, too.
"""

from dataclasses import dataclass

from streamer.mapping.names import RelationName
from streamer.mapping.options import DdlKind, OnDdl
from streamer.mapping.rules import RelationMapping, SourceMapping, find_rules, target_of


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why a relation cannot follow, and the next step."""

    problem: str
    hint: str


def follow(
    source: SourceMapping,
    former: RelationName,
    target: RelationName,
    now: RelationName,
    target_namespace: str,
) -> RelationMapping | Obstacle:
    """Return the mapping of table *former*, written to *target*, under its name *now*.

    Raises MappingError if the rules contradict each other there.
    """
    rule = find_rules(source, [now]).get(now)
    given = rule_hint(now, target)
    if rule is None:
        return Obstacle("no rule names the table now", given)
    there = target_of(source, rule, now, target_namespace)
    if there == target:
        return RelationMapping(now, target, rule)
    if source.on_ddl[DdlKind.RENAME_TABLE] is not OnDdl.APPLY:
        return Obstacle(
            f'its target would be renamed to "{there}", and on_ddl is not apply for rename_table',
            f"{given}, or set `on_ddl: {{rename_table: apply}}`",
        )
    return RelationMapping(now, there, rule)


def rule_hint(now: RelationName, target: RelationName) -> str:
    """Return the advice to write table *now* to *target*, where its rows are."""
    return f"write in `tables` its new name with its target: {{'{now}': {{target: '{target}'}}}}"
