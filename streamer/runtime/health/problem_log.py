"""Logs the beginning and the end of each problem, with the same text as `status`, the page and
`/readyz`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.stored_problems import read_stored_facts
from streamer.errors.error_classes import TargetError
from streamer.report.problems import Problem, ProblemKind, Severity, Subject, needs_operator
from streamer.runtime.check_pace import pause_after
from streamer.runtime.target_health import TargetHealth

if TYPE_CHECKING:
    from streamer.report.problem_facts import StoredFacts

log = structlog.get_logger()

CHECK_SECONDS: Final = 10.0


class ProblemLog:
    """Keeps facts in memory that only the bookkeeping records (``stored``), and logs problems."""

    def __init__(self, read_problems: Callable[[], Sequence[Problem]]) -> None:
        self.stored: dict[str, StoredFacts] = {}
        self._read_problems = read_problems
        self._logged: dict[tuple[ProblemKind, Subject], Problem] = {}

    async def run(
        self,
        bookkeeping: Bookkeeping,
        target: TargetHealth,
        on_checked: Callable[[Sequence[Problem]], None],
    ) -> None:
        """Check until cancelled; *on_checked* gets the problems of each check."""
        pause = CHECK_SECONDS
        while True:
            await asyncio.sleep(pause)
            if target.is_well:
                await self.read(bookkeeping)
            began = time.thread_time()
            problems = self._read_problems()
            pause = pause_after(time.thread_time() - began, CHECK_SECONDS)
            self.log_changes(problems)
            on_checked(problems)

    async def read(self, bookkeeping: Bookkeeping) -> None:
        """Read the stored facts; after a failure, keep the former facts."""
        try:
            self.stored = await read_stored_facts(bookkeeping)
        except TargetError as exc:  # the state of the target shows the failure
            log.debug("the stored problems cannot be read", reason=str(exc))

    def log_changes(self, problems: Sequence[Problem]) -> None:
        """Log new problems, and the end of problems."""
        current = {problem.key: problem for problem in needs_operator(problems)}
        for key, problem in current.items():
            former = self._logged.get(key)
            if former is None or former.code != problem.code:
                write = log.error if problem.severity is Severity.ERROR else log.warning
                write("problem", **log_fields(problem))
        for key in self._logged.keys() - current.keys():
            problem = self._logged[key]
            log.info("problem gone", subject=str(problem.subject), kind=problem.kind.value)
        self._logged = current


def log_fields(problem: Problem) -> dict[str, str]:
    """Return a problem as the fields of its line."""
    fields = {
        "subject": str(problem.subject),
        "kind": problem.kind.value,
        "problem": problem.text,
        "hint": "" if problem.remedy is None else str(problem.remedy),
        "code": problem.code or "",
        "runbook": problem.runbook,
    }
    return {name: value for name, value in fields.items() if value}
