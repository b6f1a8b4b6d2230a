"""The rules of a source applied to its relations: all problems, not only the first. Pure.

`streamer.mapping.rules.resolve` decides, relation by relation, as for `run`.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from streamer.commands.check.findings import (
    Finding,
    Place,
    at_source,
    error,
    from_error,
    in_words,
    info,
    quote_relation,
    warning,
)
from streamer.errors.command_lines import some_of
from streamer.errors.error_classes import MappingError, TableGoneError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import OnTableDropped
from streamer.mapping.rules import RelationMapping, SourceMapping, TableRule, resolve, same_rows
from streamer.report.problems import Severity

_KINDS: Final = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}


@dataclass(frozen=True, slots=True)
class SeenTable:
    """A relation of a source, replicable or not.

    ``root``: the namespace and name of a partition's root table. ``parents``: tables from
    which the relation inherits. ``extension``: the extension to which the relation belongs.
    """

    namespace: str
    name: str
    kind: str
    persistence: str
    root: list[str] | None
    parents: list[list[str]]
    oid: int = 0
    extension: str | None = None

    @property
    def relation(self) -> RelationName:
        return RelationName(self.namespace, self.name)

    @property
    def root_name(self) -> RelationName | None:
        return RelationName(*self.root) if self.root else None

    @property
    def obstacle(self) -> str | None:
        """The obstacle to replication, in the form "is …"; None without an obstacle."""
        if self.persistence == "t":
            return "a temporary table"
        if self.kind in _KINDS:
            return _KINDS[self.kind]
        if self.root_name is not None:
            return f"a partition of {self.root_name}"
        return "unlogged" if self.persistence == "u" else None


def resolve_rules(
    source: SourceMapping, seen: Iterable[SeenTable], target_namespace: str
) -> tuple[list[RelationMapping], list[Finding]]:
    """Apply the rules of *source* to all relations *seen*; problems become findings.

    A relation that two rules claim is not mapped.
    """
    relations = list(seen)
    findings = [*_check_exclusions(source, relations), *_check_extensions(source, relations)]
    exact = source.exact_names
    possible = [r for r in relations if r.obstacle is None]
    nameable = [r.relation for r in possible if r.extension is None or r.relation in exact]
    mapped, refused = resolve_each(source, nameable, target_namespace)
    findings += refused
    present = {relation.relation for relation in possible}
    for rule in source.rules:
        if rule.pattern.is_pattern:
            findings += _check_pattern(source, rule, relations, mapped)
        elif (name := _name(rule)) not in present:
            findings.append(_missing(source, name, relations, rule.on_table_dropped))
    findings += _check_shared_targets(source, mapped)
    findings += _check_parents(source, possible, {m.source for m in mapped})
    if not mapped and not any(finding.severity is Severity.ERROR for finding in findings):
        problem = "no table matches its rules"
        findings.append(error(Place(source.label), problem, in_words("correct `tables`")))
    return mapped, findings


def _name(rule: TableRule) -> RelationName:
    return RelationName(rule.pattern.namespace, rule.pattern.name)


def resolve_each(
    source: SourceMapping, names: Iterable[RelationName], target_namespace: str
) -> tuple[list[RelationMapping], list[Finding]]:
    """Apply the rules of *source* to each relation of *names*."""
    patterns = tuple(rule for rule in source.rules if rule.pattern.is_pattern)
    exact = {_name(rule): rule for rule in source.rules if not rule.pattern.is_pattern}
    mapped: list[RelationMapping] = []
    findings: list[Finding] = []
    for name in names:
        rules = (exact[name],) if name in exact else ()
        try:
            mapped += resolve(replace(source, rules=patterns + rules), [name], target_namespace)
        except MappingError as exc:
            findings.append(from_error(Place(source.label, str(name)), exc))
    return mapped, findings


def _missing(
    source: SourceMapping,
    name: RelationName,
    relations: list[SeenTable],
    on_table_dropped: OnTableDropped,
) -> Finding:
    """Report why the table of an exact rule is missing."""
    place = Place(source.label, str(name))
    for relation in relations:
        is_meant = relation.relation == name or (
            relation.persistence == "t" and relation.name == name.name
        )
        if not is_meant or relation.obstacle is None:
            continue
        problem = f"is {relation.obstacle} and cannot be replicated"
        if relation.root_name is not None:
            fix = in_words(f"put its root {relation.root_name} into `tables` instead")
            return error(place, problem, fix)
        if relation.persistence == "u" and relation.kind in "rp":
            words = "or remove it from `tables`"
            logged = f"alter table {quote_relation(name)} set logged"
            return error(place, problem, at_source(logged, words=words))
        return error(place, problem, in_words("remove it from `tables`"))
    if on_table_dropped is not OnTableDropped.STOP:  # the operator accepts the loss of the table
        return info(place, "does not exist at the source; streamer copies a new table of that name")
    similar = [
        str(relation.relation)
        for relation in relations
        if relation.name.lower() == name.name.lower() and relation.obstacle is None
    ]
    hint = "create the table there, or correct or remove its name in `tables`"
    if similar:
        hint = (
            f"write {' or '.join(similar)} in `tables` if you mean that table, or remove the name"
        )
    problem = "is in `tables`, but does not exist at the source"
    return error(place, problem, in_words(hint), TableGoneError.code)


def _check_pattern(
    source: SourceMapping,
    rule: TableRule,
    relations: list[SeenTable],
    mapped: list[RelationMapping],
) -> list[Finding]:
    """Name the relations that a pattern matches but streamer does not replicate."""
    findings: list[Finding] = []
    place = Place(source.label, str(rule.pattern))
    matching = [
        relation
        for relation in relations
        if rule.pattern.matches(relation.relation)
        and relation.extension is None
        and not source.excludes(relation.relation)
    ]
    if not any(relation.obstacle is None for relation in matching):
        findings.append(warning(place, "matches no table", in_words("correct `tables`")))
    roots = {mapping.source for mapping in mapped}
    shown: dict[str, list[str]] = defaultdict(list)
    for relation in matching:
        where = Place(source.label, str(relation.relation))
        if relation.persistence == "t":
            shown["temporary tables"].append(relation.name)
        elif relation.kind == "v":
            shown["views"].append(str(relation.relation))
        elif relation.kind in _KINDS:
            findings.append(warning(where, f"is {relation.obstacle}: not replicated"))
        elif relation.root_name is not None:
            if relation.root_name not in roots:
                fix = in_words(f"put {relation.root_name} into `tables`")
                findings.append(warning(where, f"is {relation.obstacle}: not replicated", fix))
        elif relation.obstacle is not None:
            fix = at_source(f"alter table {quote_relation(relation.relation)} set logged")
            findings.append(warning(where, "is unlogged: not replicated", fix))
    for category, names in shown.items():
        findings.append(info(place, f"also matches {category}, not replicated: {some_of(names)}"))
    return findings


def _check_exclusions(source: SourceMapping, relations: list[SeenTable]) -> list[Finding]:
    """Name the tables that `exclude_tables` leaves out."""
    findings = []
    exact = source.exact_names
    names = [r.relation for r in relations if r.obstacle is None and r.relation not in exact]
    for excluded in source.exclude_tables:
        hidden = [str(name) for name in names if excluded.matches(name)]
        effect = f"leaves out {some_of(hidden)}" if hidden else "matches no table"
        findings.append(info(Place(source.label, str(excluded)), f"exclude_tables: {effect}"))
    return findings


def _check_extensions(source: SourceMapping, relations: list[SeenTable]) -> list[Finding]:
    """Name the tables of extensions that patterns would match."""
    patterns = [rule.pattern for rule in source.rules if rule.pattern.is_pattern]
    exact = source.exact_names
    names = [
        f"{relation.relation} ({relation.extension})"
        for relation in relations
        if relation.extension is not None
        and relation.obstacle is None
        and relation.relation not in exact
        and not source.excludes(relation.relation)
        and any(pattern.matches(relation.relation) for pattern in patterns)
    ]
    if not names:
        return []
    problem = f"tables of extensions are not replicated: {some_of(names)}"
    fix = in_words("to replicate such a table, write its exact name into `tables`")
    return [info(Place(source.label), problem, fix)]


def _check_shared_targets(source: SourceMapping, mapped: list[RelationMapping]) -> list[Finding]:
    writers: dict[tuple[RelationName, str | None], list[RelationMapping]] = defaultdict(list)
    for mapping in mapped:
        writers[mapping.rows].append(mapping)
    return [
        from_error(
            Place(source.label, str(several[0].source)),
            same_rows(source, [mapping.source for mapping in several], several[0]),
        )
        for several in writers.values()
        if len(several) > 1
    ]


def _check_parents(
    source: SourceMapping, relations: list[SeenTable], mapped: set[RelationName]
) -> list[Finding]:
    """Find unmapped tables whose rows also appear in a mapped parent table."""
    findings = []
    for relation in relations:
        for parent in (RelationName(*parent) for parent in relation.parents):
            is_excluded = source.excludes(relation.relation)
            if parent in mapped and relation.relation not in mapped and not is_excluded:
                problem = (
                    f"inherits from {parent}, which is replicated without the rows of its children"
                )
                fix = in_words("put it into `tables` too")
                findings.append(warning(Place(source.label, str(relation.relation)), problem, fix))
    return findings
