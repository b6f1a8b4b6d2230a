"""Folds the problems of sources into the problem of the target that causes them. Pure."""

from collections.abc import Sequence
from typing import Any, Final

from streamer.errors.connection_limits import TargetConnectionLimitError
from streamer.errors.error_classes import (
    TargetConnectionError,
    TargetPasswordError,
    TargetReadOnlyError,
    TargetRejectedError,
)
from streamer.report.problem_facts import source_of_row, target_of_row
from streamer.report.problems import Problem, ProblemKind, needs_operator, of_source, of_target

Row = dict[str, Any]

WAITS_FOR_TARGET: Final = "waits for the target"
"""The state of a source that only the target stops."""
_CODES: Final = frozenset(
    error.code
    for error in (
        TargetConnectionError,
        TargetConnectionLimitError,
        TargetPasswordError,
        TargetRejectedError,
        TargetReadOnlyError,
    )
)
_STOPS: Final = frozenset(
    {ProblemKind.SOURCE, ProblemKind.PROCESS, ProblemKind.NOT_STARTED, ProblemKind.STOPPED}
)
"""Kinds of problems with which a source does not stream."""
_FROM_BOOKKEEPING: Final = frozenset({ProblemKind.NOT_STARTED, ProblemKind.STOPPED})
"""Kinds of problems about which a process is certain only while it reads the bookkeeping."""


def causes_of(target: Row | None) -> list[Problem]:
    """Return the problems of a target of the status."""
    return [] if target is None else list(of_target(target_of_row(target)))


def remaining_problems(source: Row, causes: Sequence[Problem]) -> list[Problem]:
    """Return the problems of a source that need an operator, without the effects of *causes*."""
    problems = needs_operator(of_source(source_of_row(source)))
    return [p for p in problems if not any(_is_effect(p, cause) for cause in causes)]


def state_of_source(source: Row, causes: Sequence[Problem]) -> str:
    """Return the state of a source as the page shows it."""
    state: str = source["state"]
    if not any(cause.kind is ProblemKind.TARGET for cause in causes):
        return state
    reasons = [problem for problem in remaining_problems(source, causes) if problem.kind in _STOPS]
    return state if reasons else WAITS_FOR_TARGET


def _is_effect(problem: Problem, cause: Problem) -> bool:
    if problem.kind is ProblemKind.HEARTBEAT:
        return True
    if cause.kind is not ProblemKind.TARGET:
        return False
    is_uncertain = problem.kind in _FROM_BOOKKEEPING
    return is_uncertain or problem.code == cause.code or problem.code in _CODES
