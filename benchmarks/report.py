"""The results of `make bench`: a table for people, Markdown for pages, JSON for programs."""

import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from benchmarks.cases import Case, Kind
from benchmarks.runner import Measurement, Options, Round
from benchmarks.sides import TRANSPORTS
from benchmarks.usage import Cpu, machine_memory
from streamer import __version__

ROOT: Final = Path(__file__).parents[1]
MARKS: Final = "<!-- benchmark -->", "<!-- /benchmark -->"
_UNITS: Final = {
    "rate": "changes/s",
    "p50": "ms, median",
    "p99": "ms, 99 %",
    "cpu": "% of a core",
    "seconds": "s",
}
_DIGITS: Final = {"rate": 0, "p50": 1, "p99": 1, "cpu": 2, "seconds": 2}


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several rounds, with the extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def to_json(self) -> dict[str, float]:
        return {
            "median": _rounded(self.median),
            "least": _rounded(self.least),
            "most": _rounded(self.most),
        }


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a case, by side. ``ratios``: the factor by which each side is better than native.

    ``cpu``: median of each side, in microseconds a change, or percent of a core. ``memory``: bytes.
    """

    case: Case
    name: str
    values: dict[str, Spread]
    ratios: dict[str, Spread]
    cpu: dict[str, Cpu]
    memory: dict[str, int]
    binary: frozenset[str]
    """The sides of streamer whose values came in binary."""

    @property
    def unit(self) -> str:
        return _UNITS[self.name]

    def limit(self, side: str, cores: int) -> float:
        """Return the changes a second at which the CPU of all processes fills *cores* cores.

        No process uses more than a core, so the busiest process is a further limit.
        """
        cpu = self.cpu[side]
        return 1e6 / max(cpu.total / cores, cpu.busiest)

    def ratio_of_machines(self, side: str) -> float:
        """Return the ratio to native if each process had a separate machine."""
        return self.cpu["native"].busiest / self.cpu[side].busiest

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": self.case.name,
            "title": self.case.title,
            "figure": self.name,
            "unit": self.unit,
            "cpu_unit": "microseconds a change" if self.name == "rate" else "% of a core",
            "sides": {
                side: {
                    **value.to_json(),
                    "cpu": {
                        "program": _rounded(self.cpu[side].program),
                        "target": _rounded(self.cpu[side].target),
                        "walsender": _rounded(self.cpu[side].source),
                    },
                    "memory_bytes": self.memory[side] or None,
                    "is_binary": side in self.binary if side in TRANSPORTS else None,
                    "ratio": self.ratios[side].to_json() if side in self.ratios else None,
                }
                for side, value in self.values.items()
            },
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def figures(case: Case, rounds: Sequence[Round]) -> list[Figure]:
    """Return the figures of a case. Pure."""
    sides = list(rounds[0].sides)
    names = list(next(iter(rounds[0].sides.values())).values)
    return [_figure(case, name, sides, rounds) for name in names]


def _figure(case: Case, name: str, sides: Sequence[str], rounds: Sequence[Round]) -> Figure:
    def over_rounds(side: str, read: Callable[[Measurement], float]) -> list[float]:
        return [read(round_.sides[side]) for round_ in rounds]

    def cpu(side: str, read: Callable[[Cpu], float]) -> float:
        per = [1e6 / round_.changes if round_.changes else 100.0 for round_ in rounds]
        seconds = over_rounds(side, lambda measured: read(measured.cpu))
        return statistics.median(s * p for s, p in zip(seconds, per, strict=True))

    values = {side: over_rounds(side, lambda measured: measured.values[name]) for side in sides}
    ratios = {}
    if "native" in sides and name != "cpu":
        for side in sides:
            if side != "native":
                pairs = zip(values[side], values["native"], strict=True)
                ratios[side] = Spread.of(
                    [ours / ref if name == "rate" else ref / max(ours, 1e-9) for ours, ref in pairs]
                )
    return Figure(
        case,
        name,
        {side: Spread.of(figures) for side, figures in values.items()},
        ratios,
        {
            side: Cpu(
                cpu(side, lambda used: used.program),
                cpu(side, lambda used: used.target),
                cpu(side, lambda used: used.source),
            )
            for side in sides
        },
        {side: int(max(over_rounds(side, lambda measured: measured.memory))) for side in sides},
        frozenset(side for side in sides if all(r.sides[side].is_binary for r in rounds)),
    )


# ---- columns -----------------------------------------------------------------------------------


def _column_of(figure: Figure, side: str) -> str:
    """Return the column of a side, which for transports depends on the format of the values."""
    if side in TRANSPORTS and figure.case.kind is not Kind.COPY:
        return "binary" if side in figure.binary else "text"
    return "binary" if side in TRANSPORTS else side


def _cells(figure: Figure, columns: Sequence[str]) -> dict[str, str]:
    cells = {"profile": figure.case.title, "unit": figure.unit}
    digits = _DIGITS[figure.name]
    for side, value in figure.values.items():
        column = _column_of(figure, side)
        cells[column] = f"{value.median:,.{digits}f}"
        if side in figure.ratios:
            ratio = figure.ratios[side]
            cells[f"{column} ratio"] = f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
        used = figure.cpu[side]
        if figure.name == "rate" and used.total:
            limit = figure.limit(side, os.cpu_count() or 1)
            cells[f"{column} limit"] = f"{limit:,.0f} ({value.median / limit:.0%})"
            if "native" in figure.values and side != "native":
                cells[f"{column} machines"] = f"{figure.ratio_of_machines(side):.2f}"
        if figure.case.kind is not Kind.COPY:
            parts = [used.target, used.source]
            if side in TRANSPORTS:
                parts.insert(0, used.program)
            cells[f"{column} cpu"] = " + ".join(f"{part:.1f}" for part in parts)
        if figure.memory[side]:
            cells["memory"] = f"{figure.memory[side] / 1e6:.0f}"
    return {column: cells.get(column, "") for column in columns}


def _note(figures: Sequence[Figure], *, has_cpu: bool = True) -> str:
    """Return the note under the table; it names a side that was not measured. Pure."""
    sides = {side for figure in figures for side in figure.values}
    parts = [NOTE, *([CPU_NOTE] if has_cpu else [])]
    return " ".join([*parts, *([] if "pglogical" in sides else [WITHOUT_PGLOGICAL])])


def _columns(figures: Sequence[Figure]) -> dict[str, str]:
    """Return the columns that have values, with their headings."""
    headings = {
        "profile": "profile",
        "unit": "unit",
        "binary": "streamer, binary",
        "text": "streamer, text",
        "native": "native, binary",
        "pglogical": "pglogical",
        "binary ratio": "binary / native",
        "binary limit": "CPU limit of this machine (reached)",
        "binary machines": "binary / native on a machine each",
        "text ratio": "text / native",
        "pglogical ratio": "pglogical / native",
        "binary cpu": "CPU binary: streamer + target + walsender",
        "text cpu": "CPU text: streamer + target + walsender",
        "native cpu": "CPU native: apply worker + walsender",
        "memory": "streamer's peak memory, MB",
    }
    used: set[str] = set()
    for figure in figures:
        used |= {column for column, cell in _cells(figure, list(headings)).items() if cell}
    return {name: heading for name, heading in headings.items() if name in used}


def table(figures: Sequence[Figure], title: str) -> Table:
    """Return the table for a terminal."""
    columns = _columns(figures)
    made = Table(title=title, caption=_note(figures), caption_justify="left")
    for name, heading in columns.items():
        made.add_column(heading, justify="left" if name in ("profile", "unit") else "right")
    for figure in figures:
        made.add_row(*_cells(figure, list(columns)).values())
    return made


def markdown(figures: Sequence[Figure], title: str, only: Sequence[str] = ()) -> str:
    """Return the table in Markdown. *only*: the columns to show."""
    columns = {n: heading for n, heading in _columns(figures).items() if not only or n in only}
    lines = [
        title,
        "",
        "| " + " | ".join(columns.values()) + " |",
        "|" + "|".join("---" if name in ("profile", "unit") else "---:" for name in columns) + "|",
    ]
    lines += ["| " + " | ".join(_cells(f, list(columns)).values()) + " |" for f in figures]
    note = _note(figures, has_cpu=any(name.endswith("cpu") for name in columns))
    return "\n".join([*lines, "", note, ""])


NOTE: Final = (
    "A ratio above 1 means that streamer was faster. Figures are medians of all rounds; brackets "
    "hold the least and the greatest ratio of a round."
)
CPU_NOTE: Final = (
    "CPU is in microseconds a change, or in percent of a core where the load is fixed. The limit "
    "is the rate at which the processes of streamer use every core. On a machine each, the "
    "busiest process sets the rate."
)
WITHOUT_PGLOGICAL: Final = "pglogical was not measured: the server does not have it."


@dataclass(frozen=True, slots=True)
class Page:
    """A page with a table. ``profiles``: the figures of the table, as ``(profile, figure)``; all
    figures if empty.
    """

    path: Path
    columns: tuple[str, ...]
    profiles: tuple[tuple[str, str], ...] = ()

    def write(self, figures: Sequence[Figure], title: str) -> None:
        """Write the table of *figures* to the page."""
        by_name = {(figure.case.name, figure.name): figure for figure in figures}
        chosen = [by_name[key] for key in self.profiles if key in by_name] or figures
        insert_markdown(self.path, markdown(chosen, title, self.columns))


PAGES: Final = (
    Page(
        ROOT / "docs" / "internals" / "speed.md",
        (
            *("profile", "unit", "binary", "text", "native", "binary ratio"),
            *("binary limit", "binary machines", "binary cpu", "native cpu", "memory"),
        ),
    ),
    Page(
        ROOT / "README.md",
        ("profile", "unit", "binary", "native", "binary ratio", "binary limit"),
        (
            *(("insert", "rate"), ("update", "rate"), ("pgbench", "rate"), ("history", "rate")),
            *(("latency", "p50"), ("copy-rows", "seconds")),
        ),
    ),
)


def insert_markdown(path: Path, text: str) -> None:
    """Write *text* to a file: between the two marks, or as the content of a new file."""
    check_marks(path)
    if path.exists():
        start, end = MARKS
        head, _, following = path.read_text(encoding="utf-8").partition(start)
        tail = following.partition(end)[2]
        text = f"{head}{start}\n\n{text}\n{end}{tail}"
    path.write_text(text, encoding="utf-8")


def check_marks(path: Path) -> None:
    """Refuse a page without the two marks, because the table would replace the page. Raises
    SystemExit.
    """
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if not all(mark in text for mark in MARKS):
            raise SystemExit(f"{path} lacks the marks {MARKS[0]} and {MARKS[1]}")


# ---- results -----------------------------------------------------------------------------------


def describe(version: str, options: Options) -> dict[str, Any]:
    """Return the facts about a run: the program, the machine, and the size of the benchmark."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "streamer": __version__,
        "postgresql": version,
        "python": platform.python_version(),
        "machine": {
            "cores": os.cpu_count(),
            "memory_bytes": machine_memory(),
            "architecture": platform.machine(),
        },
        "changes": options.changes,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }


def title_of(facts: dict[str, Any]) -> str:
    """Return a line about a run."""
    machine = facts["machine"]
    return (
        f"{facts['date'][:10]}, commit {facts['commit']}, PostgreSQL {facts['postgresql']}, "
        f"{machine['cores']} cores, {machine['memory_bytes'] / 1e9:.0f} GB; "
        f"{facts['changes']:,} changes, {facts['rounds']} rounds"
    )


def to_json(facts: dict[str, Any], figures: Iterable[Figure]) -> dict[str, Any]:
    return {**facts, "profiles": [figure.to_json() for figure in figures]}


def result_path(facts: dict[str, Any]) -> Path:
    """Return the path for the result of a full run."""
    major = facts["postgresql"].partition(".")[0]
    name = f"{facts['date'][:10]}-{facts['commit']}-postgresql{major}.json"
    return ROOT / "benchmarks" / "results" / name


def _commit() -> str:
    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True
        )
        return process.stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return f"{commit}+" if git("status", "--porcelain", "--untracked-files=no") else commit
