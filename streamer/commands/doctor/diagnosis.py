"""Problems as sentences: the findings of a check, and the problems of the status.

`streamer doctor` has no rules: a check judges servers and configuration, and
`streamer.report.problems` judges the status.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.commands.check.check import Examination, examine
from streamer.commands.check.findings import Finding, found_lines, from_problem, one_line
from streamer.commands.status import SourceStatus, read_status
from streamer.config.settings import Settings
from streamer.config.static_mapping import require_sources
from streamer.errors.error_classes import StreamerError
from streamer.mapping.rules import Mapping
from streamer.report.problems import Severity
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
    """Read all facts. Raises ConfigurationError; the remaining errors are part of the diagnosis."""
    require_sources(settings, mapping)
    address = TargetAddress.parse(settings.target.url)
    examination, statuses = await asyncio.gather(
        examine(settings, mapping), _statuses(address, mapping)
    )
    checked = [f for f in examination.report.findings if f.severity is not Severity.INFO]
    reported = [from_problem(problem) for status in statuses for problem in status.problems]
    return Diagnosis(merged(reported, checked), statuses, examination)


def merged(reported: Sequence[Finding], checked: Sequence[Finding]) -> list[Finding]:
    """Return the problems of the status, and the problems that only a check finds; the worst first.

    A check also meets the error of a stopped source or table. For that error, all screens use the
    words and the remedy of the status. Pure.
    """
    codes = {(finding.place, finding.code) for finding in reported if finding.code is not None}
    new = [finding for finding in checked if (finding.place, finding.code) not in codes]
    worst = list(Severity)
    return sorted([*reported, *new], key=lambda finding: worst.index(finding.severity))


async def _statuses(address: TargetAddress, mapping: Mapping) -> list[SourceStatus]:
    bookkeeping = Bookkeeping(address, "streamer status")
    try:
        return await read_status(bookkeeping, mapping)
    except StreamerError:
        return []  # the check reports an unreachable target
    finally:
        await bookkeeping.close()


def sentences(diagnosis: Diagnosis) -> Iterable[str]:
    """Return the diagnosis as lines for people, ordered by severity."""
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
