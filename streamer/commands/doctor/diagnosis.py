"""Problems as sentences: the problems of the status, and the findings of a check.

`streamer doctor` has no rules: `streamer.report.problems` judges the status, and a check judges
servers and configuration.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.commands.check.check import Examination, examine
from streamer.commands.check.findings import Finding, found_lines, from_problem, one_line
from streamer.commands.status import MappingState, StatusReport, read_report
from streamer.config.settings import Settings
from streamer.config.static_mapping import require_sources
from streamer.errors.error_classes import MappingError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import Mapping
from streamer.report.problems import Problem, ProblemKind, Severity, of_mapping
from streamer.runtime.session_needs import address_of_target


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The facts, and the problems among them, the worst first."""

    findings: list[Finding]
    status: StatusReport
    examination: Examination

    @property
    def is_well(self) -> bool:
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"well": self.is_well, "findings": [f.to_json() for f in self.findings]}


async def diagnose(
    settings: Settings, mapping: Mapping, state: MappingState | None = None
) -> Diagnosis:
    """Read all facts. Raises ConfigurationError; all other errors are part of the diagnosis."""
    address = address_of_target(settings)
    examination, status = await asyncio.gather(
        examine(settings, mapping), read_report(address, mapping, state)
    )
    checked = [f for f in examination.report.findings if f.severity is not Severity.INFO]
    problems = [
        *_empty_mapping(settings, mapping, status.problems),
        *status.problems,
        *(problem for source in status.sources for problem in source.problems),
    ]
    return Diagnosis(merged(problems, checked), status, examination)


def _empty_mapping(
    settings: Settings, mapping: Mapping, problems: Sequence[Problem]
) -> Iterable[Problem]:
    """Yield the problem of an empty mapping, unless *problems* name the reason.

    Raises MappingError if there is no other problem. The target names a mapping that was lost.
    """
    if any(problem.kind is ProblemKind.MAPPING for problem in problems):
        return
    try:
        require_sources(settings, mapping)
    except MappingError as exc:
        if not problems:
            raise
        yield of_mapping(ErrorReport.of(exc))


def merged(problems: Sequence[Problem], checked: Sequence[Finding]) -> list[Finding]:
    """Return the problems of the status, and the problems that only a check finds; the worst first.

    A check also finds the cause of a stopped source or table. All views show the text and the
    remedy of the status for that cause. Pure.
    """
    reported = {problem: from_problem(problem) for problem in problems}
    new: list[Finding] = []
    for finding in checked:
        if any(_has_statements(problem, finding) for problem in problems):
            continue
        at_place = [p for p, shown in reported.items() if shown.place == finding.place]
        if finding.code is not None and finding.code in {problem.code for problem in at_place}:
            continue
        new.append(finding)
    worst = list(Severity)
    return sorted([*reported.values(), *new], key=lambda finding: worst.index(finding.severity))


def _has_statements(problem: Problem, finding: Finding) -> bool:
    """Whether *problem* contains all statements of *finding*, for the same database.

    A check judges schemas and the target as a whole, where a problem names the table that stopped.
    """
    remedy, fix = problem.remedy, finding.fix
    if remedy is None or fix is None or not fix.sql:
        return False
    if fix.at != "target" and problem.subject.source != finding.place.source:
        return False
    steps = [sql for sql in remedy.sql if sql.side == fix.at]
    return {statement for sql in steps for statement in sql.statements}.issuperset(fix.sql)


def sentences(
    diagnosis: Diagnosis, address_of: Callable[[str], str] = lambda page: page
) -> Iterable[str]:
    """Return the diagnosis as lines for people, ordered by severity.

    *address_of*: returns the whole address of a page under ``/help``.
    """
    titles = {
        Severity.ERROR: "Problems:",
        Severity.WARNING: "Warnings:",
        Severity.INFO: "In progress:",
    }
    for severity, title in titles.items():
        selected = [f for f in diagnosis.findings if f.severity is severity]
        if selected:
            yield title
        for finding in selected:
            yield from _sentence(finding, address_of)
    if not diagnosis.is_well:
        return
    has_warnings = any(f.severity is Severity.WARNING for f in diagnosis.findings)
    yield "No errors found, only warnings." if has_warnings else "No problems found."


def _sentence(finding: Finding, address_of: Callable[[str], str]) -> Sequence[str]:
    place = finding.place
    where = f"The {place.other}" if place.source is None else f"Source {place.source}"
    if place.object is not None:
        where += f", {place.object}"
    fix = finding.fix
    # The message of a server begins with the place, which stands before the message here.
    side = "target: " if place.source is None else f'source "{place.source}": '
    lines = [f"  {one_line(where)}: {one_line(finding.problem.removeprefix(side))}."]
    if fix is not None and not fix.sql:
        lines.append(f"    To do: {one_line(str(fix))}.")
    else:
        lines += found_lines("", fix, "    ")[1:]
    if finding.runbook is not None:
        lines.append(f"    Read: {address_of(finding.runbook)}")
    return lines
