"""Problems as sentences: findings of a check, and deviations in the status.

It has no rules of its own: a check judges servers and configuration, and the process reported why
it stopped. Errors stop something; warnings are worth knowing, and stop nothing now.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamer import hints
from streamer.commands.check.command import Examination, examine
from streamer.commands.check.findings import (
    Finding,
    Place,
    Severity,
    at_target,
    error,
    found_lines,
    in_words,
    info,
    one_line,
    run_here,
    warning,
)
from streamer.commands.status import SourceStatus, TableStatus, read_status
from streamer.config.settings import Settings
from streamer.config.static import require_sources
from streamer.errors import ComparisonError, StreamerError
from streamer.mapping.rules import Mapping
from streamer.progress.bookkeeping import Bookkeeping
from streamer.quantities import format_latency
from streamer.runtime.heartbeat import OVERDUE_SECONDS
from streamer.target.connection import TargetAddress


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The facts, and the problems among them, the worst first."""

    findings: list[Finding]
    statuses: list[SourceStatus]
    examination: Examination

    @property
    def is_well(self) -> bool:
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"well": self.is_well, "findings": [f.to_json() for f in self.findings]}


async def diagnose(settings: Settings, mapping: Mapping) -> Diagnosis:
    """Look at everything. Raises ConfigurationError; all else is part of the diagnosis."""
    require_sources(settings, mapping)
    address = TargetAddress.parse(settings.target.url)
    examination, statuses = await asyncio.gather(
        examine(settings, mapping), _statuses(address, mapping)
    )
    checked = [f for f in examination.report.findings if f.severity is not Severity.INFO]
    told = [finding for status in statuses for finding in judge_status(status)]
    # A check finds the cause of a stopped source too, and names the fix.
    new = [finding for finding in told if not any(_is_same(finding, each) for each in checked)]
    worst = list(Severity)
    findings = sorted([*new, *checked], key=lambda finding: worst.index(finding.severity))
    return Diagnosis(findings, statuses, examination)


async def _statuses(address: TargetAddress, mapping: Mapping) -> list[SourceStatus]:
    bookkeeping = Bookkeeping(address, "streamer status")
    try:
        return await read_status(bookkeeping, mapping)
    except StreamerError:
        return []  # a check says that the target is away
    finally:
        await bookkeeping.close()


def _is_same(told: Finding, checked: Finding) -> bool:
    is_error = checked.severity is Severity.ERROR
    return is_error and checked.place == told.place and checked.problem in told.problem


def judge_status(status: SourceStatus) -> Iterable[Finding]:
    """Return the problems of a source. Pure."""
    place, reason = Place(status.label), f": {status.error}" if status.error else ""
    match status.state:
        case "not started":
            yield error(place, "has never been started", run_here("streamer run"))
        case "stopped":
            problem = "no process streams from it, so it retains its WAL"
            yield error(place, problem, run_here("streamer run"))
        case "starting":
            words = "wait a moment, then run this command again"
            yield warning(place, f"is starting{reason}", in_words(words), status.error_code)
        case "waiting":
            words = "streamer retries; remove the cause of the wait"
            yield error(place, f"is not streaming{reason}", in_words(words), status.error_code)
        case "error" | "unreachable":
            words = "fix the problem that the message names; streamer retries"
            yield error(place, f"is not streaming{reason}", in_words(words), status.error_code)
    for table in status.tables:
        yield from _judge_table(status, table)
    heartbeat = status.heartbeat_seconds
    if heartbeat is not None and heartbeat > OVERDUE_SECONDS:
        problem = f"commits have not become visible for {format_latency(heartbeat)}"
        words = "see the messages about its tables; if there are none, the target is too slow"
        yield warning(place, problem, in_words(words))


def _judge_table(status: SourceStatus, table: TableStatus) -> Iterable[Finding]:
    place = Place(status.label, table.source)

    def command(action: str) -> str:
        return hints.command(action, table.source, database=status.database, sid=status.sid)

    held = f", and holds changes ({table.held_changes:,})" if table.held_changes else ""
    match table.state:
        case "error":
            words = (
                "remove the cause; streamer then continues within seconds, or at once with: "
                f"{command('resume')}"
            )
            problem = f"has stopped{held}: {table.error}"
            yield error(place, problem, in_words(words), table.error_code or StreamerError.code)
        case "paused":
            if table.waits_before is not None:
                words = f"apply it with: {command('resume')}"
                code = table.error_code or StreamerError.code
                yield error(place, f"waits{held}: {table.error}", in_words(words), code)
            else:
                yield warning(place, f"is paused{held}", run_here(command("resume")))
        case "init" | "copying" | "catching_up":
            left = table.seconds_left
            pace = f", {format_latency(left)} left" if left is not None else ""
            waits = f"; it waits: {table.error}" if table.error else ""
            yield info(place, f"is being copied{pace}{waits}")
    for lacks in table.definitions:
        if lacks.is_given_up:
            problem = f"its target lacks {lacks.label}, which cannot be created: {lacks.reason}"
            yield warning(place, problem, at_target(lacks.sql))
        else:
            yield info(place, f"{lacks.label} of its target is yet to be created")
    if table.quarantined:
        problem = f"{table.quarantined:,} changes are in quarantine, so the target lacks them"
        yield error(place, problem, run_here(command("quarantine list --table")))
    if table.differing_rows:
        problem = (
            f"{table.differing_rows:,} rows differ from the source, according to the "
            "last comparison"
        )
        yield error(place, problem, run_here(command("repair")), ComparisonError.code)
    elif table.verification_error:
        problem = f"cannot be compared with its source: {table.verification_error}"
        words = "follow the message; the next comparison clears this"
        yield warning(place, problem, in_words(words))


def sentences(diagnosis: Diagnosis) -> Iterable[str]:
    """Say it to people, one finding after the other."""
    titles = {
        Severity.ERROR: "Problems:",
        Severity.WARNING: "Warnings:",
        Severity.INFO: "In progress:",
    }
    for severity, title in titles.items():
        found = [f for f in diagnosis.findings if f.severity is severity]
        if found:
            yield title
        for finding in found:
            yield from _sentence(finding)
    if diagnosis.is_well:
        yield "No problems found."


def _sentence(finding: Finding) -> Sequence[str]:
    place, where = finding.place, "The target"
    if place.source is not None:
        where = f"Source {place.source}"
    if place.object is not None:
        where += f", {place.object}"
    fix = finding.fix
    lines = [f"  {one_line(where)}: {one_line(finding.problem)}."]
    if fix is not None and not fix.sql:
        lines.append(f"    To do: {one_line(str(fix))}.")
    else:
        lines += found_lines("", fix, "    ")[1:]
    if finding.runbook is not None:
        lines.append(f"    Runbook: {finding.runbook}")
    return lines
