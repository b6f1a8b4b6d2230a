"""The verdict of `check` on expressions, by the facts alone."""

from dataclasses import replace

from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.source_findings import check_expressions
from streamer.mapping.expressions import parse_expression
from streamer.mapping.rule_options import OnError
from streamer.mapping.rules import RelationMapping
from streamer.report.problems import Severity
from tests.unit.build import relation_mapping, source_mapping, source_relation


def masked(on_error: OnError) -> RelationMapping:
    mapping = relation_mapping(exclude=["region"])
    rule = replace(
        mapping.rule,
        set=(("email", parse_expression("md5(email)")),),
        filter=parse_expression("region = 'EU' and id > 1"),
        on_error=on_error,
    )
    return replace(mapping, rule=rule)


def test_whole_rows_are_advised_only_where_the_table_has_large_values() -> None:
    facts = SourceFacts(source_mapping())
    relation = source_relation(columns=("id", "email", "region"), key=("id",))
    email = replace(relation.columns[1], may_be_toasted=True)
    relation = replace(relation, columns=(relation.columns[0], email, relation.columns[2]))
    (so_far,) = check_expressions(facts, masked(OnError.STOP), relation)
    assert (so_far.severity, so_far.fix) == (Severity.INFO, None)
    assert so_far.problem.endswith("the table has no such value so far")

    facts.with_large_values = frozenset({relation.oid})
    (present,) = check_expressions(facts, masked(OnError.STOP), relation)
    assert present.severity is Severity.WARNING
    assert "replica identity full" in str(present.fix)


def problems(on_error: OnError) -> list[str]:
    facts = SourceFacts(source_mapping())
    relation = source_relation(columns=("id", "email", "region"), key=("id",))
    found = check_expressions(facts, masked(on_error), relation)
    return [finding.problem for finding in found]


def test_values_that_are_masked_and_yet_kept_in_quarantine_are_named() -> None:
    (problem,) = problems(OnError.QUARANTINE)
    assert "email" in problem
    assert "region" in problem
    assert "id" not in problem.partition("(")[2].partition(")")[0].split(", ")
    assert problems(OnError.STOP) == []
