"""The way of changes from the sources to the target, and where the time goes when lag grows. Pure.

A change waits in the WAL of its source until the walsender sends the change, and in a lane until a
worker takes the change. Then a worker writes, and the worker's session may wait in the target. The
first place that explains the lag is slow.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.util.quantities import format_duration

Row = dict[str, Any]

LAG_SECONDS_MIN: Final = 1.0
"""Less lag is the ordinary rhythm of reading and committing."""
BUSY: Final = 0.9
"""A worker that writes for this share of the time is the limit of its lanes."""


class WayStage(enum.StrEnum):
    """A part of the way."""

    SOURCE = "source"
    LANES = "lanes"
    WORKERS = "workers"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class WayFacts:
    """What this process knows about changes on their way.

    ``undelivered_bytes``: WAL that the sources have not sent. ``undelivered_seconds``: its age,
    without sources whose reader waits for room in the queues. ``is_full``: such a source exists.
    ``held_tables``: tables whose changes wait for a copy, an operator or the target. ``waits``: for
    what the workers wait at the target.
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
class Way:
    """The way of changes. ``slow``: where the time goes; ``text``: why."""

    facts: WayFacts
    slow: WayStage | None = None
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


def way_of(facts: WayFacts) -> Way:
    """Return the way of changes with the slow stage, if changes wait."""
    stage, text = _slow(facts)
    return Way(facts, stage, text)


def _slow(facts: WayFacts) -> tuple[WayStage | None, str]:
    if facts.target_error is not None:
        return WayStage.TARGET, "the target accepts no changes"
    if facts.lag_seconds < LAG_SECONDS_MIN:
        return None, ""
    if facts.waits is not None:
        return WayStage.TARGET, f"the workers wait for {facts.waits}"
    busiest = max(facts.use, default=0.0)
    if facts.is_full or busiest >= BUSY:
        share = f"{busiest * 100:.0f} %"
        return WayStage.WORKERS, f"the busiest worker writes {share} of the time"
    if facts.undelivered_seconds >= LAG_SECONDS_MIN:
        age = format_duration(facts.undelivered_seconds)
        return WayStage.SOURCE, f"a source has not sent the changes of the last {age}"
    if facts.held_tables:
        noun = "1 table holds" if facts.held_tables == 1 else f"{facts.held_tables} tables hold"
        return WayStage.LANES, f"{noun} changes for a copy, an operator or the target"
    return None, ""
