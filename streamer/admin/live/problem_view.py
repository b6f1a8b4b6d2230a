"""Problems that need an operator, as the page shows them. Pure.

`streamer.report.problems` has the rules.
"""

from collections.abc import Iterable
from typing import Any, Final

from streamer.admin.live.status_view import address, table_address
from streamer.errors.remedies import Sql, Step
from streamer.report.problem_facts import source_of_row, target_of_row
from streamer.report.problems import (
    Action,
    Problem,
    ProblemKind,
    Severity,
    Subject,
    needs_operator,
    of_source,
    of_target,
)

Row = dict[str, Any]

_FORMS: Final = {
    Action.RESUME: ("/table/act", "Resume"),
    Action.RESYNC: ("/table/act", "Resync"),
    Action.SKIP_DELETES: ("/table/act", "Resume without its deletes"),
    Action.RETRY: ("/table/quarantine", "Retry all"),
}


def problems_for_operator(sources: Iterable[Row], target: Row | None = None) -> list[Row]:
    """Return the problems that need an operator, the target first."""
    problems = [] if target is None else list(of_target(target_of_row(target)))
    for source in sources:
        problems += needs_operator(of_source(source_of_row(source)))
    return [shown(problem) for problem in problems]


def shown(problem: Problem) -> Row:
    """Return a problem with lines to paste and buttons."""
    subject = problem.subject
    steps = [] if problem.remedy is None else [_step(step) for step in problem.remedy.steps]
    fields = {"database": subject.database, "sid": subject.sid, "name": subject.table}
    if problem.kind is ProblemKind.QUARANTINE:
        fields["which"] = "all"
    return {
        "place": "Target" if problem.kind is ProblemKind.TARGET else str(subject),
        "what": problem.sentence,
        "address": _page(subject),
        "kind": "bad" if problem.severity is Severity.ERROR else "warning",
        "runbook": problem.runbook,
        "command": next((step["line"] for step in steps if step["at"] is None), None),
        "steps": steps,
        "actions": [_action(action) for action in problem.actions],
        "fields": {name: value for name, value in fields.items() if value is not None},
    }


def _step(step: Step) -> Row:
    if isinstance(step, Sql):
        return {"at": step.side, "line": "\n".join(f"{sql};" for sql in step.statements)}
    return {"at": None, "line": step.line}


def _action(action: Action) -> Row:
    to, label = _FORMS[action]
    return {"to": to, "do": action.value, "label": label}


def _page(subject: Subject) -> str | None:
    if subject.database is None:
        return None
    source = {"database": subject.database, "sid": subject.sid}
    if subject.table is None:
        return address("/source", **source)
    return table_address(source, subject.table)
