"""The findings of a check: place, problem, and the exact command or SQL that fixes it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from streamer.errors.error_classes import (
    GUIDES,
    SourceConnectionError,
    StreamerError,
    TargetConnectionError,
)
from streamer.errors.error_reports import runbook_address
from streamer.errors.remedies import Remedy, Sql
from streamer.mapping.relation_names import RelationName
from streamer.observability.logs import redact
from streamer.postgres.quoting import quote_qualified, without_line_breaks
from streamer.postgres.secret import Secret
from streamer.report.problems import Problem, ProblemKind, Severity

if TYPE_CHECKING:
    from streamer.commands.check.planned_copies import PlannedCopies


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a problem.

    ``source``: the label of the source; None for the target, or for *other*. ``object``: a table,
    for example; None for the server as a whole.
    """

    source: str | None = None
    object: str | None = None
    other: str = "target"

    def __str__(self) -> str:
        return " ".join(part for part in (self.source or self.other, self.object) if part)


TARGET = Place()
SPARK = Place(other="Spark")


@dataclass(frozen=True, slots=True)
class Fix:
    """A fix: statements to run at one side or commands to run here, and words.

    ``words``: the text after the statements, or the whole fix without statements. ``is_choice``:
    the statements end sessions or remove objects that may belong to other programs.
    ``introduction``: the text before the statements, if more than the place to run them.
    ``sentence``: the remedy of a problem, with the same text as `status`, the page and `/readyz`.
    """

    at: Literal["source", "target", "here"] | None = None
    sql: tuple[str, ...] = ()
    words: str | None = None
    is_choice: bool = False
    introduction: str | None = None
    sentence: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, remedy: Remedy) -> Self:
        """Return the fix for a remedy: the first step, and the text before and after the step.

        A step within a sentence stays there.
        """
        if not remedy.steps:
            return cls(words=str(remedy))
        step = remedy.steps[0]
        number = remedy.parts.index(step)
        before = "".join(map(str, remedy.parts[:number]))
        if not before.endswith(": "):
            return cls(words=str(remedy))
        words = "".join(map(str, remedy.parts[number + 1 :])).removeprefix("; ") or None
        if isinstance(step, Sql):
            fix = cls(step.side, step.statements, words, step.is_choice)
        else:
            fix = cls("here", (step.line,), words)
        introduction = before.removesuffix(": ")
        is_usual = introduction in ("run", fix.usual_introduction)
        return fix if is_usual else replace(fix, introduction=introduction)

    @property
    def usual_introduction(self) -> str:
        return "run here" if self.at == "here" else f"run at the {self.at}"

    def __str__(self) -> str:
        if self.sentence is not None:
            return self.sentence
        parts = []
        if self.sql:
            usual = "run" if self.at == "here" else self.usual_introduction
            parts.append(f"{self.introduction or usual}: {'; '.join(self.sql)}")
        if self.words:
            parts.append(self.words)
        return "; ".join(parts)


def at_source(*sql: str, words: str | None = None, is_choice: bool = False) -> Fix:
    return Fix("source", sql, words, is_choice)


def at_target(*sql: str, words: str | None = None, is_choice: bool = False) -> Fix:
    return Fix("target", sql, words, is_choice)


def run_here(*commands: str) -> Fix:
    return Fix("here", commands)


def in_words(words: str) -> Fix:
    return Fix(words=words)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, and its fix. Printed as one line of a check."""

    severity: Severity
    place: Place
    problem: str
    fix: Fix | None = None
    code: str | None = None
    """The code of the error with which `run` would stop, if the check met that error."""
    page: str | None = None
    """The path of the manual page to read, if neither code nor place decides."""

    @property
    def runbook(self) -> str | None:
        """The path of the manual page to read; None for mere information.

        A guide shows how to prepare a server or a rule; a runbook belongs to an error.
        """
        if self.page is not None:
            return self.page
        if self.severity is Severity.INFO and self.code is None:
            return None
        return runbook_address(self.code) or f"{GUIDES}/{self._guide}"

    @property
    def _guide(self) -> str:
        if self.place == SPARK:
            return "spark-cluster"
        side = None if self.fix is None else self.fix.at
        if side == "target" or self.place.source is None:
            return "prepare-target"
        is_of_rule = side != "source" and self.place.object is not None
        return "choose-tables" if is_of_rule else "prepare-source"

    def __str__(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return one_line(f"{self.severity:<7} {self.place}: {self.problem}{fix}")

    def lines(self) -> list[str]:
        """Return the finding for people, with each statement or command below, ready to paste."""
        return found_lines(f"{self.severity:<7} {self.place}: {self.problem}", self.fix)

    def to_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity.value,
            "source": self.place.source,
            "object": self.place.object,
            "problem": redact(self.problem),
            "fix": redact(str(self.fix)) if self.fix else None,
            "at": self.fix.at if self.fix else None,
            "sql": [redact(sql) for sql in self.fix.sql] if self.fix else [],
            "introduction": _redacted(self.fix.introduction if self.fix else None),
            "words": _redacted(self.fix.words if self.fix else None),
            "code": self.code,
            "runbook": self.runbook,
        }


def found_lines(text: str, fix: Fix | None, indent: str = "  ") -> list[str]:
    """Return *text* and the fix, each statement or command on separate lines. Pure."""
    if fix is None:
        return [one_line(text)]
    if not fix.sql:
        return [one_line(f"{text}; {fix.words}" if fix.words else text)]
    introduction = one_line(fix.introduction or fix.usual_introduction)
    end = "" if fix.at == "here" else ";"
    lines = [one_line(text), f"{indent}{introduction}:"]
    pasted = one_line if fix.at == "here" else _pasted
    lines += [pasted(f"{indent}  {statement}") + end for statement in fix.sql]
    return [*lines, f"{indent}{one_line(fix.words)}"] if fix.words else lines


def _redacted(text: str | None) -> str | None:
    return redact(text) if text else None


def _pasted(indented: str) -> str:
    """Return a statement as psql reads it; a statement of several lines unchanged."""
    statement = redact(without_line_breaks(indented))
    return statement.lstrip() if "\n" in statement else statement


def one_line(text: str) -> str:
    """Return *text* as one line without passwords: a name may contain line breaks."""
    return redact(text.replace("\n", "\\n").replace("\r", "\\r"))


def error(place: Place, problem: str, fix: Fix | None = None, code: str | None = None) -> Finding:
    return Finding(Severity.ERROR, place, problem, fix, code)


def warning(place: Place, problem: str, fix: Fix | None = None, code: str | None = None) -> Finding:
    return Finding(Severity.WARNING, place, problem, fix, code)


def info(place: Place, problem: str, fix: Fix | None = None) -> Finding:
    return Finding(Severity.INFO, place, problem, fix)


def from_error(place: Place, exc: StreamerError) -> Finding:
    """Return a finding for the error that stopped the check of *place*."""
    side = f'source "{place.source}"' if place.source else "target"
    remedy = exc.remedy
    if remedy is None and isinstance(exc, SourceConnectionError | TargetConnectionError):
        remedy = Remedy.of("check its url, and that its server is running and reachable from here")
    problem = exc.message.removeprefix(f"{side}: ")
    return error(place, problem, Fix.of(remedy) if remedy else None, exc.code)


def from_problem(problem: Problem) -> Finding:
    """Return a problem of the status as a finding."""
    other = "mapping" if problem.kind is ProblemKind.MAPPING else "target"
    place = Place(problem.subject.source, problem.subject.object, other)
    remedy = problem.remedy
    fix = None if remedy is None else replace(Fix.of(remedy), sentence=str(remedy))
    page = None if problem.severity is Severity.INFO else problem.runbook
    return Finding(problem.severity, place, problem.text, fix, problem.code, page)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once, the worst first."""
    worst = list(Severity)
    return sorted(dict.fromkeys(findings), key=lambda finding: worst.index(finding.severity))


def quote_relation(name: RelationName) -> str:
    """Quote the name of a relation or a type."""
    return quote_qualified(name.namespace, name.name)


@dataclass(slots=True)
class CheckReport:
    """The findings of a check. ``is_reachable``: all servers answer and accept streamer."""

    findings: list[Finding] = field(default_factory=list)
    source_count: int = 0
    table_count: int = 0
    is_reachable: bool = True
    copies: "list[PlannedCopies]" = field(default_factory=list)
    """The copies that `run` would begin or continue without a further request, in order."""
    roles: dict[str, str | None] = field(default_factory=dict)
    """The role of each source's server: 'primary' or 'standby'; None without an answer."""
    urls: dict[str | None, Secret] = field(default_factory=dict)
    """The databases, by the label of the source; None: the target."""

    def count(self, severity: Severity) -> int:
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def is_ready(self) -> bool:
        return not self.count(Severity.ERROR)

    @property
    def exit_code(self) -> int:
        if self.is_ready:
            return 0
        return 1 if self.is_reachable else 3

    @property
    def summary(self) -> str:
        errors, warnings = self.count(Severity.ERROR), self.count(Severity.WARNING)
        counted = [_count(errors, "error"), _count(warnings, "warning")]
        listed = " and ".join(text for text in counted if text)
        tables = f"{_count(self.table_count, 'table')} of {_count(self.source_count, 'source')}"
        if not self.is_ready:
            return f"not ready: {listed}; each finding has its fix"
        return f"ready, with {listed}: {tables}" if listed else f"everything is ready: {tables}"

    def to_json(self) -> dict[str, Any]:
        return {
            "ready": self.is_ready,
            "sources": self.source_count,
            "tables": self.table_count,
            "roles": self.roles,
            "findings": [finding.to_json() for finding in self.findings],
            "copies": [copy.to_json() for copy in self.copies],
        }


def _count(number: int, noun: str) -> str:
    if number == 0:
        return ""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
