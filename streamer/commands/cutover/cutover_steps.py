"""The steps of a cut-over, in order, in words. Pure."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamer.bookkeeping.cutovers import CutoverRecord
from streamer.commands.check.findings import Fix, found_lines
from streamer.errors.remedies import Remedy
from streamer.source.stop_writes import stop_sql


class Step(enum.StrEnum):
    """A step; stored as ``streamer.cutover.step``."""

    CHECK = "check"
    STOP_WRITES = "stop_writes"
    DRAIN = "drain"
    COMPARE = "compare"
    SEQUENCES = "sequences"
    REVERSE = "reverse"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class StepObstacle:
    """The reason why a step would fail, and the remedy."""

    step: Step
    problem: str
    remedy: Remedy | None = None

    def lines(self) -> list[str]:
        """Return the obstacle for people, with each statement below, ready to paste."""
        return found_lines(self.problem, None if self.remedy is None else Fix.of(self.remedy))

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step.value,
            "problem": self.problem,
            "remedy": None if self.remedy is None else self.remedy.to_json(),
        }


class StopWrites(enum.StrEnum):
    """Who stops the programs that write at the source."""

    READ_ONLY = "read-only"
    OPERATOR = "operator"


class FinalComparison(enum.StrEnum):
    """The comparison of the rows once writes have stopped."""

    CHANGES = "changes"
    FULL = "full"
    COUNTS = "counts"


@dataclass(frozen=True, slots=True)
class CutoverOptions:
    """The options of the command. An interrupted cut-over continues with the stored options.

    ``reverse``: the configuration file of the reverse stream; None without such a stream.
    ``seconds``: the limit for each step after the check.
    """

    stop_writes: StopWrites = StopWrites.READ_ONLY
    comparison: FinalComparison = FinalComparison.CHANGES
    reverse: Path | None = None
    seconds: float = 60.0

    def to_json(self) -> dict[str, Any]:
        return {
            "stop_writes": self.stop_writes.value,
            "comparison": self.comparison.value,
            "reverse": None if self.reverse is None else str(self.reverse.absolute()),
        }

    def begun_with(self, record: CutoverRecord | None) -> "CutoverOptions":
        """Return these options or, for a cut-over that has begun, the stored options."""
        if record is None:
            return self
        stored = record.details
        return CutoverOptions(
            StopWrites(stored["stop_writes"]),
            FinalComparison(stored["comparison"]),
            None if stored["reverse"] is None else Path(stored["reverse"]),
            self.seconds,
        )


def steps(options: CutoverOptions, record: CutoverRecord | None) -> list[Step]:
    """Return the remaining steps, in order, starting with the last step that began."""
    chosen = [step for step in Step if step is not Step.REVERSE or options.reverse is not None]
    if record is None:
        return chosen
    if record.is_finished:
        return []
    begun = Step(record.step)
    order = list(Step)
    return [step for step in chosen if order.index(step) >= order.index(begun)]


def describe(step: Step, options: CutoverOptions, label: str, database: str) -> str:
    """Return the description of a step."""
    match step:
        case Step.CHECK:
            return (
                "check that every table is ready and equal, and that the target has every sequence"
            )
        case Step.STOP_WRITES if options.stop_writes is StopWrites.OPERATOR:
            return f"check that no session writes to {label}; you have stopped the programs"
        case Step.STOP_WRITES:
            return f"stop writes to {label}: {stop_sql(database)}; end the programs' sessions"
        case Step.DRAIN:
            return "wait until the target has all changes committed at the source"
        case Step.COMPARE if options.comparison is FinalComparison.COUNTS:
            return "count the rows of every table on both sides"
        case Step.COMPARE if options.comparison is FinalComparison.FULL:
            return "compare every table again"
        case Step.COMPARE:
            return "compare again every table that has changed since the check"
        case Step.SEQUENCES:
            return "set every sequence of the target to the source's value"
        case Step.REVERSE:
            return f"prepare the reverse stream; its configuration is {options.reverse}"
        case Step.FINISH:
            return "check that nothing was written in the meantime, and allow writes at the target"


def marked(step: Step, obstacles: Sequence[StepObstacle]) -> str:
    """Return the mark of a checked step."""
    return "fails" if any(obstacle.step is step for obstacle in obstacles) else "ok"
