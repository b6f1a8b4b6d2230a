"""The problems of a status: what needs an operator, in one line each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from streamer.commands.scope import Scope
from streamer.commands.status import SourceStatus, StatusReport, TableStatus, read_report
from streamer.hints import command
from streamer.mapping.rules import Mapping
from streamer.observability.logs import redact
from streamer.target.connection import TargetAddress


@dataclass(frozen=True, slots=True)
class StatusProblem:
    """One problem of a source. ``table``: the source's table that has it; None for the source.

    ``state``: that of the source or table, if the problem is the reason for it.
    """

    text: str
    table: str | None = None
    state: str | None = None
    sequence: str | None = None


def find_problems(status: SourceStatus) -> list[StatusProblem]:
    """Return the problems of a source and its tables, those of the source first."""
    found = []
    if trouble := "; ".join(filter(None, (status.error, status.hint))):
        found.append(StatusProblem(redact(trouble), state=status.state))
    for row in in_order_of_need(status.tables):
        found += (replace(problem, table=row.source) for problem in _of_table(status, row))
    for each in status.sequences:
        if each.error is not None:
            text = f"{each.target} cannot follow: {redact(each.error)}"
            found.append(StatusProblem(text, sequence=each.source))
    return found


def in_order_of_need(tables: Iterable[TableStatus]) -> list[TableStatus]:
    """Return tables with an error first, then those that are not ready, then by name."""
    return sorted(tables, key=lambda t: (not t.error, t.state == "ready", t.source))


def only_problems(report: StatusReport) -> StatusReport:
    """Return a report without sources and tables that are fine; it still counts the sources."""
    left = []
    for status in report.sources:
        if problems := find_problems(status):
            names = {problem.table for problem in problems}
            tables = [table for table in status.tables if table.source in names]
            left.append(replace(status, tables=tables))
    return replace(report, sources=left, fine=report.fine + len(report.sources) - len(left))


async def troubled(address: TargetAddress, mapping: Mapping, scope: Scope) -> Scope:
    """Return the sources of *scope* that have a problem now."""
    report = only_problems(await read_report(address, mapping, scope=scope))
    return replace(scope, labels=frozenset(status.label for status in report.sources))


def summarize(report: StatusReport) -> dict[str, object]:
    """Return the ``summary`` of ``status --json``: how many sources are fine, and the others."""
    troubled = [(status, find_problems(status)) for status in report.sources]
    problems = [
        {
            "database": status.database,
            "sid": status.sid,
            "table": problem.table,
            "problem": problem.text,
        }
        for status, found in troubled
        for problem in found
    ]
    fine = report.fine + sum(not found for _, found in troubled)
    return {"sources": report.fine + len(troubled), "fine": fine, "problems": problems}


def _of_table(status: SourceStatus, row: TableStatus) -> Iterator[StatusProblem]:
    database, sid = status.database, status.sid
    if row.error:
        yield StatusProblem(redact(row.error), state=row.state)
    if row.waiting_for:
        yield StatusProblem(f"waits for {redact(row.waiting_for)}")
    if not row.error and row.identity == "none":
        yield StatusProblem("only inserts are replicated; streamer check tells why")
    if not row.error and row.state == "paused":
        resume = command("resume", row.source, database=database, sid=sid)
        yield StatusProblem(f"resume it with: {resume}", state=row.state)
    if row.quarantined:
        yield StatusProblem(
            f"{row.quarantined} changes are in quarantine; streamer quarantine list shows them"
        )
    if row.differing_rows:
        repair = command("repair", row.source, database=database, sid=sid)
        rows = f"{row.differing_rows:,} rows differ from the source"
        yield StatusProblem(f"{rows}; correct them with: {repair}")
    elif row.verification_error:
        yield StatusProblem(f"cannot be compared: {redact(row.verification_error)}")
    for lacks in row.definitions:
        if lacks.is_given_up:
            yield StatusProblem(f"{lacks.label} is not created: {redact(lacks.reason or '')}")
