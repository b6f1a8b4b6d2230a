"""The charts of a source, a table and the fleet: what each draws, and small pictures. Pure.

The script of the page draws the charts on canvases. The pictures stand in the same boxes before the
script has loaded, and without the script.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from streamer.admin.live.minute_series import FINE_SECONDS, FINE_SLOTS
from streamer.admin.live.past_events import PastEvent, TimedEvent, with_durations
from streamer.util.quantities import format_duration

Row = dict[str, Any]
Column = Sequence[float | None]

WIDTH: Final = 240
HEIGHT: Final = 120
DOT: Final = 3
"""The length of the short line for a value between two gaps."""
DRAWN_POINTS: Final = 120
"""The maximum number of points in a line of a picture."""
SPARK_HEIGHT: Final = 12
MARKS_MAX: Final = 200
MARK_TEXT_MAX: Final = 160
RESTART: Final = "restart"
ERROR: Final = "error"
COPY: Final = "copy"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. ``columns``: the lines, by column of the history, with their names; a single line
    needs no name. ``form``: the filter that writes the values. ``live``: the attribute by which the
    script of the page finds the present value in events.
    """

    title: str
    columns: Mapping[str, str]
    form: str
    remark: str = ""
    live: str = ""


SOURCE_CHARTS: Final = (
    Chart("Lag", {"lag_seconds": ""}, "latency", live="data-lag-seconds"),
    Chart("Changes", {"changes_per_second": ""}, "rate", live="data-rate"),
    Chart("WAL retained", {"retained_wal_bytes": ""}, "size"),
)
TABLE_CHARTS: Final = (
    Chart("Lag", {"lag_seconds": ""}, "latency"),
    Chart("Changes", {"changes_per_second": ""}, "rate"),
    Chart("Held changes", {"held_bytes": ""}, "size"),
)
DELAY_COLUMNS: Final = ("p50_seconds", "p95_seconds", "p99_seconds")
QUANTILES: Final = (0.5, 0.95, 0.99)
FLEET_CHARTS: Final = (
    Chart("Lag", {"lag_seconds": ""}, "latency", "of the slowest source"),
    Chart("Changes", {"changes_per_second": ""}, "rate", "of all sources"),
    Chart("WAL retained", {"retained_wal_bytes": ""}, "size", "in total"),
    Chart("Commit to visible", {"p50_seconds": "p50", "p99_seconds": "p99"}, "latency"),
)


# ---- pictures ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a picture: ``name`` of ``column``. ``present``: the newest value, if known.
    ``parts``: the points of polylines, which a gap separates.
    """

    name: str
    column: str
    present: float | None
    parts: list[str]


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart in a box of WIDTH by HEIGHT."""

    chart: Chart
    lines: list[Line]
    highest: float | None


@dataclass(frozen=True, slots=True)
class ChartView:
    """The charts of a page. ``history``: the address of the columns. ``seconds``: the length of the
    pictures.
    """

    history: str
    pictures: list[Picture]
    seconds: float
    label: str = ""
    """The source whose events have the present values."""


def chart_view(
    charts: Iterable[Chart], columns: Mapping[str, Column], history: str, label: str = ""
) -> ChartView:
    """Return the charts of *columns*: the column ``times``, and columns of equal length."""
    times = [at or 0.0 for at in columns["times"]]
    pictures = [_picture(chart, times, columns) for chart in charts]
    return ChartView(history, pictures, times[-1] - times[0] if times else 0.0, label)


def _picture(chart: Chart, times: list[float], columns: Mapping[str, Column]) -> Picture:
    values = (value for column in chart.columns for value in columns[column])
    highest = max((value for value in values if value is not None), default=None)
    lines = [
        Line(
            name,
            column,
            columns[column][-1] if times else None,
            _parts(times, columns[column], highest),
        )
        for column, name in chart.columns.items()
    ]
    return Picture(chart, lines, highest)


def _parts(times: list[float], values: Column, highest: float | None) -> list[str]:
    """Return a line as polylines; the newest value is at the right, the highest at the top."""
    if len(times) < 2:
        return []
    begin, seconds = times[0], max(times[-1] - times[0], 1.0)
    top = highest or 1.0
    parts: list[list[str]] = [[]]
    for at, value in _thinned(times, values):
        if value is None:
            parts.append([])
            continue
        x, y = (at - begin) / seconds * WIDTH, HEIGHT - 1 - value / top * (HEIGHT - 2)
        parts[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(_visible(part)) for part in parts if part]


def _thinned(times: list[float], values: Column) -> list[tuple[float, float | None]]:
    """Return at most `DRAWN_POINTS` points, each with the highest of the values around."""
    if len(times) <= DRAWN_POINTS:
        return list(zip(times, values, strict=True))
    begin, width = times[0], (times[-1] - times[0]) / (DRAWN_POINTS - 1)
    parts: dict[int, float | None] = {}
    for at, value in zip(times, values, strict=True):
        number = int((at - begin) / width)
        former = parts.get(number)
        parts[number] = former if value is None else max(value, former or value)
    return [(begin + number * width, value) for number, value in parts.items()]


def _visible(part: list[str]) -> list[str]:
    """Return a line unchanged; a single value between gaps becomes a short line."""
    if len(part) > 1:
        return part
    x, _, y = part[0].partition(",")
    begin = min(max(0.0, float(x) - DOT / 2), WIDTH - DOT)
    return [f"{begin:.1f},{y}", f"{begin + DOT:.1f},{y}"]


def spark(rates: list[tuple[int, float]], *, slots: int = 30) -> str:
    """Return the rates of the last hour as the points of a polyline, in a box of slots by
    SPARK_HEIGHT.

    The numbers are whole, because the fleet overview shows many curves. Empty with fewer than two
    known values.
    """
    if not rates:
        return ""
    end, width = rates[-1][0], FINE_SECONDS * FINE_SLOTS / slots
    highest: dict[int, float] = {}
    for at, rate in rates:
        place = slots - 1 - int((end - at) / width)
        if place >= 0:
            highest[place] = max(highest.get(place, 0.0), rate)
    if len(highest) < 2:
        return ""
    top = max(highest.values()) or 1.0
    bottom = SPARK_HEIGHT - 1
    return " ".join(
        f"{x},{bottom - round(value / top * (bottom - 1))}" for x, value in sorted(highest.items())
    )


# ---- quantiles ---------------------------------------------------------------------------------


def quantile(share: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a quantile of a histogram; None without an observation.

    *bounds*: the upper bounds of the buckets, the last may be infinite. Inside a bucket the values
    count as evenly spread. For the last bucket, the quantile is its lower bound.
    """
    total = sum(counts)
    if total <= 0:
        return None
    rank, passed, lower = share * total, 0.0, 0.0
    for bound, count in zip(bounds[:-1], counts[:-1], strict=True):
        if count and passed + count >= rank:
            return lower + (bound - lower) * (rank - passed) / count
        passed, lower = passed + count, bound
    return lower


# ---- marks -------------------------------------------------------------------------------------


def marks_of(
    past: Sequence[PastEvent],
    now: datetime,
    started_at: datetime | None,
    *,
    source: str | None = None,
    table: str | None = None,
) -> list[Row]:
    """Return the restarts, errors and copies to mark in charts, the oldest first.

    *past*: stored events, the newest first. *started_at*: the start of this process. *source*: the
    only source; *table*: the only table of the source, next to events of the source as a whole.
    Events of a kind within 10 s share a mark.
    """
    marks: dict[tuple[int, str], list[str]] = {}
    if started_at is not None:
        marks[_slot(started_at), RESTART] = ["this process started"]
    for timed in with_durations(past, now):
        event = timed.event
        kind = _kind_of(event)
        is_chosen = source is None or event.source in (source, None)
        if kind is not None and is_chosen and (table is None or event.table in (table, None)):
            marks.setdefault((_slot(event.at), kind), []).append(_mark_text(timed))
        if len(marks) > MARKS_MAX:
            break
    return [
        {"at": at, "kind": kind, "text": texts[0] + _more(len(texts) - 1)}
        for (at, kind), texts in sorted(marks.items())
    ]


def _slot(at: datetime) -> int:
    return int(at.timestamp()) // FINE_SECONDS * FINE_SECONDS


def _kind_of(event: PastEvent) -> str | None:
    if event.error is not None:
        return ERROR
    if event.subject == "table":
        return COPY if event.state == "copying" else None
    return RESTART if event.subject == "source" and event.state == "streaming" else None


def _mark_text(timed: TimedEvent) -> str:
    event = timed.event
    subject = " ".join(part for part in (event.source, event.table) if part) or event.subject
    seconds = timed.seconds
    duration = "" if seconds is None else f" for {format_duration(seconds)}"
    if event.error is not None:
        return f"{subject}: {event.error[:MARK_TEXT_MAX]}"
    return f"{subject}: {event.state}{duration}"


def _more(count: int) -> str:
    return f", and {count} more" if count else ""
