"""All sources, one line each: the fleet overview of the page, and `GET /api/sources`. Pure.

A survey reads every table once. Filters, order and pages use the lines of the survey, so the cost
of a request does not depend on the number of tables.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from streamer.admin.live import status_view
from streamer.admin.live.effects_of_target import (
    WAITS_FOR_TARGET,
    causes_of,
    remaining_problems,
    state_of_source,
)
from streamer.admin.live.path_of_change import held_of
from streamer.admin.live.problem_view import problem_row
from streamer.mapping.rules import SourceLabel
from streamer.observability.logs import redact
from streamer.report.problems import Problem

Row = dict[str, Any]

HEALTHS: Final = ("bad", "warning", "busy", "good", "quiet")
"""The health of a source, by urgency: `bad` needs an operator first, `quiet` has no stream."""
SORTS: Final = ("need", "name", "lag", "wal")
PROBLEMS_SHOWN: Final = 2
_FIELDS: Final = ("place", "kind", "runbook", "command", "remedy")
"""The fields of a problem in a line, besides texts."""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A source, as shown in a line.

    ``shown_state``: the state, or that the source waits for the target. ``names``: the names that
    a search compares, of the source, its process, and its tables on both sides.
    """

    row: Row
    """Fields of `FleetSource`."""
    shown_state: str
    names: str = field(repr=False)

    @property
    def label(self) -> str:
        label: str = self.row["label"]
        return label

    @property
    def health(self) -> str:
        health: str = self.row["health"]
        return health

    @property
    def database(self) -> str:
        database: str = self.row["database"]
        return database


@dataclass(frozen=True, slots=True)
class FleetOverview:
    """The result of a survey."""

    lines: list[SourceLine]
    summary: str
    copies: Row | None
    """The copies of all sources together, see `view.copy_progress`."""
    queue: list[Row]
    """Sources that copy or wait for their turn; sources that copy come first."""
    held: tuple[int, int] = (0, 0)
    """The number of tables that hold changes, and the bytes of these changes."""

    @property
    def healths(self) -> dict[str, int]:
        return count_healths(self.lines)

    @property
    def is_shared(self) -> bool:
        """Whether several processes share the sources."""
        return len({line.row["process"] for line in self.lines} - {None}) > 1

    @property
    def databases(self) -> list[str]:
        return sorted({line.database for line in self.lines})


@dataclass(frozen=True, slots=True)
class LineFilter:
    """The lines to show. ``text``: a part of the label or a table name. Empty fields match all."""

    text: str = ""
    health: str = ""
    database: str = ""
    sort: str = "need"
    is_grouped: bool = False


def fleet_overview_of(sources: Sequence[Row], target: Row | None = None) -> FleetOverview:
    """Return all sources, one line each."""
    causes = causes_of(target)
    name = (target or {}).get("name", "target")
    lines = [_line(source, causes, name) for source in sources]
    queue = [line.row for line in lines if line.row["copies"] or line.row["waiting_for"]]
    queue.sort(key=lambda row: (row["copies"] is None, row["seconds_left"] or 0.0))
    return FleetOverview(
        lines,
        status_view.summary(list(sources), target),
        status_view.copy_progress(sources),
        queue,
        held_of(sources),
    )


def _line(source: Row, causes: Sequence[Problem], target: str) -> SourceLine:
    """Return the line of *source*. *target*: the name of the target."""
    tables = source["tables"]
    label = SourceLabel(source["database"], source["sid"])
    problems = [problem_row(problem, target) for problem in remaining_problems(source, causes)]
    shown_state = state_of_source(source, causes)
    copies = status_view.copy_progress([source])
    waiting_for = source.get("waiting_for")
    row = {
        "database": source["database"],
        "sid": source["sid"],
        "label": label,
        "address": status_view.address("/source", database=source["database"], sid=source["sid"]),
        "state": source["state"],
        "health": _health(shown_state, problems, is_busy=bool(copies or waiting_for)),
        "problem_count": len(problems),
        "problems": [
            {name: problem[name] for name in _FIELDS}
            | {name: redact(problem[name]) for name in ("what", "headline", "details")}
            for problem in sorted(problems, key=lambda problem: problem["kind"] != "bad")[
                :PROBLEMS_SHOWN
            ]
        ],
        "lag_seconds": source["lag_seconds"],
        "lag_bytes": source["lag_bytes"],
        "retained_wal_bytes": source["retained_wal_bytes"],
        "waiting_for": waiting_for,
        "process": source.get("process"),
        "table_count": len(tables),
        "states": status_view.count_states([source]),
        "copied_share": copies["share"] if copies else None,
        "seconds_left": copies["seconds_left"] if copies else None,
        "copies": copies,
    }
    names = [
        label,
        source.get("process") or "",
        *(f"{table['source']}\n{table['target'] or ''}" for table in tables),
    ]
    return SourceLine(row, shown_state, "\n".join(names).lower())


def _health(state: str, problems: Sequence[Row], *, is_busy: bool) -> str:
    kinds = {problem["kind"] for problem in problems}
    for kind in ("bad", "warning"):
        if kind in kinds:
            return kind
    if is_busy and state != WAITS_FOR_TARGET:
        return "busy"
    return "good" if state == "streaming" else "quiet"


def choose(fleet: FleetOverview, choice: LineFilter) -> list[SourceLine]:
    """Return the lines of *choice*, in its order."""
    text = choice.text.strip().lower()
    chosen = [
        line
        for line in fleet.lines
        if choice.health in ("", line.health)
        and choice.database in ("", line.database)
        and (not text or text in line.names)
    ]
    chosen.sort(key=lambda line: _rank(line, choice.sort))
    if choice.is_grouped:
        worst: dict[str, int] = {}
        for line in chosen:
            rank = HEALTHS.index(line.health)
            worst[line.database] = min(rank, worst.get(line.database, rank))
        chosen.sort(key=lambda line: (worst[line.database], line.database))
    return chosen


def _rank(line: SourceLine, sort: str) -> tuple[float, float, str]:
    """Return the rank of a line. The label decides ties, so that good lines keep a stable order."""
    if sort == "name":
        return 0.0, 0.0, line.label
    if sort in ("lag", "wal"):
        value = line.row["lag_seconds" if sort == "lag" else "retained_wal_bytes"]
        return (1.0 if value is None else 0.0), -(value or 0.0), line.label
    return HEALTHS.index(line.health), -line.row["problem_count"], line.label


def groups(lines: Iterable[SourceLine]) -> dict[str, dict[str, int]]:
    """Return the number of lines by health of each database."""
    by_database: dict[str, list[SourceLine]] = {}
    for line in lines:
        by_database.setdefault(line.database, []).append(line)
    return {database: count_healths(members) for database, members in by_database.items()}


def count_healths(lines: Iterable[SourceLine]) -> dict[str, int]:
    """Return the number of lines by health, without zeros, the worst first."""
    counts = Counter(line.health for line in lines)
    return {health: counts[health] for health in HEALTHS if counts[health]}
