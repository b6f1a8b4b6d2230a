"""Problems that need an operator, as the page shows them. Pure.

A problem has three parts: a headline, details, and the remedy with lines to copy and buttons.
`streamer.report.problems` contains the rules, and a button sends a step of the remedy.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final

from streamer.admin.live.effects_of_target import causes_of, remaining_problems
from streamer.admin.live.status_view import address, table_address
from streamer.errors.remedies import EVERY_TABLE, Command, Remedy, Sql
from streamer.report.problems import Problem, ProblemKind, Severity, Subject, worst_first

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Button:
    """A form of the page. ``fields``: the fields of the form, besides the table."""

    to: str
    action: str
    label: str
    fields: dict[str, str] = field(default_factory=dict)


_TABLE: Final = "/table/act"
_BUTTONS: Final = {
    ("resume", ()): _Button(_TABLE, "resume", "Resume"),
    ("resume", ("--skip-deletes",)): _Button(_TABLE, "skip", "Resume, skip the deletes"),
    ("resync", ()): _Button(_TABLE, "resync", "Resync"),
    ("resync", ("--mode", "diff")): _Button(_TABLE, "resync", "Resync", {"mode": "diff"}),
    ("repair", ()): _Button(_TABLE, "repair", "Repair"),
    ("quarantine retry", ()): _Button("/table/quarantine", "retry", "Retry all", {"which": "all"}),
}
"""The buttons by command and options. A command that accepts a loss has no button."""
_RESYNC_SOURCE: Final = _Button(
    "/sources/act", "resync", "Resync all tables", {"state": "", "mode": "reload"}
)


def problems_for_operator(sources: Iterable[Row], target: Row | None = None) -> list[Row]:
    """Return the problems that need an operator: those of the target, then errors, then warnings.

    Leave out problems of sources that a problem of the target causes.
    """
    causes = causes_of(target)
    problems = [problem for source in sources for problem in remaining_problems(source, causes)]
    name = (target or {}).get("name", "target")
    return [problem_row(problem, name) for problem in [*causes, *worst_first(problems)]]


def problems_of_table(source: Row, name: str, target: Row) -> list[Row]:
    """Return the problems that need an operator, of a table and of its source."""
    tables = [table for table in source["tables"] if table["source"] == name]
    return problems_for_operator([source | {"tables": tables, "sequences": []}], target)


def problem_row(problem: Problem, target: str = "target") -> Row:
    """Return a problem with lines to copy and buttons. *target*: database and host of the target,
    for the SQL to run there.
    """
    # The text of a wait for a lock names the object, and then the sessions.
    separator = ": " if problem.kind is ProblemKind.WAIT else "; "
    headline, _, details = problem.text.partition(separator)
    place = _place(problem)
    places = {"source": problem.subject.source, "target": target.partition(" at ")[0]}
    return {
        "place": place,
        "names_place": headline.lower().startswith(place.lower()),
        "what": problem.sentence,
        "headline": headline,
        "details": details,
        "remedy": list(_parts(problem.remedy, places)),
        "address": _page_address(problem.subject),
        "kind": "bad" if problem.severity is Severity.ERROR else "warning",
        "runbook": problem.runbook,
        "command": _first_command(problem),
        "buttons": list(_buttons(problem)),
    }


def _place(problem: Problem) -> str:
    if problem.kind is ProblemKind.TARGET:
        return "Target"
    name = problem.subject.other
    return name[:1].upper() + name[1:] or str(problem.subject)


def _parts(remedy: Remedy | None, places: dict[str, str | None]) -> Iterable[Row]:
    """Yield texts, and steps as lines to copy. ``at``: the database of the SQL after a text,
    unless the text names a database.
    """
    parts = () if remedy is None else remedy.parts
    for part, following in zip_longest(parts, parts[1:]):
        if isinstance(part, Sql):
            lines = "\n".join(f"{sql};" for sql in part.statements)
            yield {"text": "", "lines": lines, "at": None}
        elif isinstance(part, Command):
            yield {"text": "", "lines": part.line, "at": None}
        else:
            at = None
            if isinstance(following, Sql) and following.database is None:
                at = places[following.side]
            yield {"text": part, "lines": "", "at": at}


def _first_command(problem: Problem) -> str | None:
    commands = () if problem.remedy is None else problem.remedy.commands
    return next((command.line for command in commands), None)


def _buttons(problem: Problem) -> Iterable[Row]:
    subject = problem.subject
    place = {"database": subject.database, "sid": subject.sid}
    for command in problem.commands:
        button = _BUTTONS.get((command.action or "", command.options))
        if button is None or subject.database is None:
            continue
        if command.table == EVERY_TABLE:
            yield _form(_RESYNC_SOURCE, {"pick": subject.source})
        else:
            yield _form(button, place | {"name": command.table})
    for sql in () if problem.remedy is None else problem.remedy.sql:
        for session in sql.ended:
            label, pid = f"End session {session.pid}", str(session.pid)
            end = _Button("/session/end", "end", label, {"pid": pid})
            yield _form(end, place | {"name": subject.table})


def _form(button: _Button, fields: Row) -> Row:
    named = {name: value for name, value in (fields | button.fields).items() if value is not None}
    return {"to": button.to, "do": button.action, "label": button.label, "fields": named}


def _page_address(subject: Subject) -> str | None:
    if subject.database is None:
        return None
    source = {"database": subject.database, "sid": subject.sid}
    if subject.table is None:
        return address("/source", **source)
    return table_address(source, subject.table)
