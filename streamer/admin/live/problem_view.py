"""Problems that need an operator, as the page shows them. Pure.

`streamer.report.problems` has the rules.
"""

from collections.abc import Iterable
from typing import Any, Final

from streamer.admin.live.effects_of_target import causes_of, remaining_problems
from streamer.admin.live.status_view import address, table_address
from streamer.errors.remedies import Sql, Step
from streamer.report.problems import Action, Problem, ProblemKind, Severity, Subject

Row = dict[str, Any]

_FORMS: Final = {
    Action.RESUME: ("/table/act", "Resume"),
    Action.RESYNC: ("/table/act", "Resync"),
    Action.SKIP_DELETES: ("/table/act", "Resume without its deletes"),
    Action.RETRY: ("/table/quarantine", "Retry all"),
}


def problems_for_operator(sources: Iterable[Row], target: Row | None = None) -> list[Row]:
    """Return the problems that need an operator, the target first and without its effects."""
    causes = causes_of(target)
    problems = list(causes)
    for source in sources:
        problems += remaining_problems(source, causes)
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
        "text": problem.text,
        "remedy": [] if problem.remedy is None else [_part(part) for part in problem.remedy.parts],
        "address": _page(subject),
        "kind": "bad" if problem.severity is Severity.ERROR else "warning",
        "runbook": problem.runbook,
        "command": next((step["line"] for step in steps if step["at"] is None), None),
        "steps": steps,
        "actions": [_action(action) for action in problem.actions],
        "fields": {name: value for name, value in fields.items() if value is not None},
    }


def _part(part: str | Step) -> Row:
    return {"text": str(part), "is_code": not isinstance(part, str)}


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
