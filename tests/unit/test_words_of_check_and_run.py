"""Errors of `check` have the words of `run`, because both call the same judge."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.remedies import ROOT

RIGHTS = "the server refuses the role, in its own words; the error of `run` has the same statements"
SETTING = "the server refuses its first statement, in its own words"
HERE = "of this machine: no process begins a copy on Spark"
FORESEEN = "no refusal: a later event would cost a copy, or stop a table by a row"
PLACES_OF_RULES = "`run` knows the tables that it can publish, and no others"

OWN_WORDS = {
    "failover_findings:_check_primaries": FORESEEN,
    "failover_findings:_check_candidate": FORESEEN,
    "publication_findings:check_publications": RIGHTS,
    "rule_findings:resolve_rules": PLACES_OF_RULES,
    "rule_findings:_missing": PLACES_OF_RULES,
    "shared_table_findings:check_common_types": FORESEEN,
    "source_findings:check_server": RIGHTS,
    "source_findings:check_usage": RIGHTS,
    "spark_findings:check_driver": HERE,
    "spark_findings:check_spark": HERE,
    "target_findings:check_server": SETTING,
    "target_findings:check_bookkeeping": RIGHTS,
    "target_findings:check_namespaces": RIGHTS,
    "target_findings:_check_writers": FORESEEN,
    "target_table_findings:check_collations": SETTING,
    "target_table_findings:check_added_types": SETTING,
    "target_table_findings:check_partitions": RIGHTS,
    "target_table_findings:check_rights": RIGHTS,
    "target_table_findings:check_triggers": FORESEEN,
}
"""The functions of `check` with separate sentences, and why `run` has none. This list only becomes
shorter.
"""


def own_words() -> Iterator[str]:
    for path in sorted((ROOT / "streamer/commands/check").glob("*.py")):
        if path.stem == "findings":
            continue
        for function in functions(path):
            shared = names_of_shared_words(function)
            for call in calls_of(function, "error"):
                words = call.args[1]
                if not (is_shared(words) or (isinstance(words, ast.Name) and words.id in shared)):
                    yield f"{path.stem}:{function.name}"


def functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def calls_of(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            yield call


def is_shared(words: ast.AST) -> bool:
    """Whether *words* are those of an error, or of a judge that `run` has, too."""
    judges = (call for name in ("obstacle",) for call in calls_of(words, name))
    attributes = (node.attr for node in ast.walk(words) if isinstance(node, ast.Attribute))
    return any(judges) or not {"message", "problem"}.isdisjoint(attributes)


def names_of_shared_words(function: ast.FunctionDef) -> set[str]:
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and is_shared(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_every_error_of_check_has_the_words_of_run_or_a_reason() -> None:
    assert set(own_words()) == OWN_WORDS.keys()
