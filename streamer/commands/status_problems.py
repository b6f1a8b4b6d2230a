"""The problems of a status, as the commands show them: see `streamer.report.problems`."""

from dataclasses import replace

from streamer.commands.status import SourceStatus, StatusReport, TableStatus, read_report
from streamer.mapping.rules import Mapping
from streamer.mapping.scope import Scope
from streamer.observability.logs import redact
from streamer.report.problems import Problem, needs_operator
from streamer.target.connection import TargetAddress


def find_problems(status: SourceStatus) -> list[Problem]:
    """Return the problems of a source and its tables that need an operator."""
    return needs_operator(status.problems)


def in_order_of_need(status: SourceStatus) -> list[TableStatus]:
    """Return tables with an error, then tables that are not ready, then the rest, by name."""

    def rank(table: TableStatus) -> tuple[bool, bool, str]:
        return not table.error, status.state_of_table(table) == "ready", table.source

    return sorted(status.tables, key=rank)


def only_problems(report: StatusReport) -> StatusReport:
    """Return a report without the sources and tables that are fine, but with full counts."""
    shown = []
    for status in report.counted:
        if problems := find_problems(status):
            names = {problem.subject.table for problem in problems}
            tables = [table for table in status.tables if table.source in names]
            shown.append(replace(status, tables=tables))
    return replace(report, sources=shown, unfiltered=report.counted)


async def sources_with_problems(address: TargetAddress, mapping: Mapping, scope: Scope) -> Scope:
    """Return the sources of *scope* with a problem now."""
    report = only_problems(await read_report(address, mapping, scope=scope))
    return replace(scope, labels=frozenset(status.label for status in report.sources))


def summarize(report: StatusReport) -> dict[str, object]:
    """Return the ``summary`` of ``status --json``: how many sources are fine, and the problems."""
    by_source = [find_problems(status) for status in report.counted]
    fine = sum(not problems for problems in by_source)
    shown = [*report.problems, *(problem for problems in by_source for problem in problems)]
    return {
        "sources": len(by_source),
        "fine": fine,
        "problems": [_redacted(problem) for problem in shown],
    }


def _redacted(problem: Problem) -> dict[str, object]:
    fields = problem.to_json()
    texts = {name: redact(fields[name]) for name in ("problem", "remedy") if fields[name]}
    return fields | texts
