"""The path of a change from source to target, and where the time goes when lag grows. Pure.

A change waits in the WAL of its source until the walsender sends the change, and in a lane until a
worker takes the change. Then a worker writes, and the worker's session may wait in the target. The
page marks the first of these stages that explains the lag as slow.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.util.quantities import format_duration

Row = dict[str, Any]

LAG_SECONDS_MIN: Final = 1.0
"""Ordinary pauses between reads and commits cause less lag."""
BUSY: Final = 0.9
"""A worker that writes for this share of the time limits its lanes."""


class PathStage(enum.StrEnum):
    """A stage of the path."""

    SOURCE = "source"
    LANES = "lanes"
    WORKERS = "workers"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class PathFacts:
    """The facts of this process about changes that the target lacks.

    ``undelivered_bytes``: WAL that the sources have not sent. ``undelivered_seconds``: the age of
    that WAL, except WAL of sources whose reader waits for room in the queues. ``is_full``: whether
    the reader of a source waits for such room. ``held_tables``: tables whose changes wait for a
    copy, an operator or the target.
    ``waits``: what the workers wait for at the target.
    """

    lag_seconds: float = 0.0
    undelivered_bytes: int = 0
    undelivered_seconds: float = 0.0
    is_full: bool = False
    queued_bytes: int = 0
    held_bytes: int = 0
    held_tables: int = 0
    use: Sequence[float] = ()
    commits_per_second: float | None = None
    waits: str | None = None
    target_error: str | None = None


@dataclass(frozen=True, slots=True)
class ChangePath:
    """The path of a change. ``slow``: the stage that takes the most time; ``text``: the reason in
    words.
    """

    facts: PathFacts
    slow: PathStage | None = None
    text: str = ""

    @property
    def mean_use(self) -> float:
        use = self.facts.use
        return sum(use) / len(use) if use else 0.0


def held_of(sources: Iterable[Row]) -> tuple[int, int]:
    """Return the number of tables that hold changes, and the bytes of these changes."""
    sizes = [
        table.get("held_bytes") or 0
        for source in sources
        for table in source["tables"]
        if table.get("held_changes")
    ]
    return len(sizes), sum(sizes)


def path_of(facts: PathFacts) -> ChangePath:
    """Return the path of a change with the slow stage, if changes wait."""
    stage, text = _slow(facts)
    return ChangePath(facts, stage, text)


def _slow(facts: PathFacts) -> tuple[PathStage | None, str]:
    if facts.target_error is not None:
        return PathStage.TARGET, "the target accepts no changes"
    if facts.lag_seconds < LAG_SECONDS_MIN:
        return None, ""
    if facts.waits is not None:
        return PathStage.TARGET, f"the workers wait for {facts.waits}"
    busiest = max(facts.use, default=0.0)
    if facts.is_full or busiest >= BUSY:
        share = f"{busiest * 100:.0f} %"
        return PathStage.WORKERS, f"the busiest worker writes {share} of the time"
    if facts.undelivered_seconds >= LAG_SECONDS_MIN:
        age = format_duration(facts.undelivered_seconds)
        return PathStage.SOURCE, f"a source has not sent the changes of the last {age}"
    if facts.held_tables:
        noun = "1 table holds" if facts.held_tables == 1 else f"{facts.held_tables} tables hold"
        return PathStage.LANES, f"{noun} changes for a copy, an operator or the target"
    return None, ""
