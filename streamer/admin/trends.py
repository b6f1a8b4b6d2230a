"""Lag, rate and retained WAL of each source over the last hours, in memory. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

POINT_SECONDS: Final = 30.0
TREND_SECONDS: Final = 6 * 3600.0
POINTS_MAX: Final = int(TREND_SECONDS / POINT_SECONDS)
WIDTH: Final = 240
HEIGHT: Final = 32
DOT: Final = 3
"""The width of a value that has no neighbour."""


@dataclass(frozen=True, slots=True)
class Point:
    """A source at one moment; None: not known then."""

    at: float
    lag_seconds: float | None
    retained_wal_bytes: float | None
    changes: int
    """Since the process began."""


class Trends:
    """One point in half a minute of each source, for six hours."""

    def __init__(self) -> None:
        self._points: dict[str, deque[Point]] = {}

    def is_due(self, source: str, now: float) -> bool:
        """Whether the newest point of a source is old enough for another one."""
        points = self._points.get(source)
        return not points or now - points[-1].at >= POINT_SECONDS

    def add(self, source: str, point: Point) -> None:
        self._points.setdefault(source, deque(maxlen=POINTS_MAX)).append(point)

    def keep_only(self, sources: Iterable[str]) -> None:
        """Forget sources that are gone."""
        for source in self._points.keys() - set(sources):
            del self._points[source]

    def of(self, source: str) -> dict[str, "Trend"]:
        """Return the points to draw for a source; nothing with fewer than two points."""
        points = list(self._points.get(source, ()))
        if len(points) < 2:
            return {}
        rates = [
            (b.at, max(0, b.changes - a.changes) / max(b.at - a.at, 1.0))
            for a, b in pairwise(points)
        ]
        series: dict[str, list[tuple[float, float | None]]] = {
            "lag": [(point.at, point.lag_seconds) for point in points],
            # The first rate is that of the time since the first point.
            "rate": [(points[0].at, rates[0][1]), *rates],
            "wal": [(point.at, point.retained_wal_bytes) for point in points],
        }
        return {name: draw(values) for name, values in series.items()}


@dataclass(frozen=True, slots=True)
class Trend:
    """A series in the shape of its curve. ``lines``: points of polylines; a gap is where nothing is
    known.
    """

    lines: list[str]
    highest: float
    seconds: float


def draw(values: list[tuple[float, float | None]]) -> Trend:
    """Return a series as polylines in a box of WIDTH by HEIGHT; the newest value is at the right.

    The box is as wide as the points are apart, so that a young process shows a whole line.
    """
    begin, end = values[0][0], values[-1][0]
    seconds = max(end - begin, 1.0)
    highest = max((value for _, value in values if value is not None), default=0.0)
    top = highest or 1.0
    lines: list[list[str]] = [[]]
    for at, value in values:
        if value is None:
            lines.append([])
            continue
        x, y = (at - begin) / seconds * WIDTH, HEIGHT - 1 - value / top * (HEIGHT - 2)
        lines[-1].append(f"{x:.1f},{y:.1f}")
    return Trend([" ".join(_visible(line)) for line in lines if line], highest, seconds)


def _visible(line: list[str]) -> list[str]:
    """Return a line as it is; one value between gaps gets a short line of its own."""
    if len(line) > 1:
        return line
    x, _, y = line[0].partition(",")
    begin = min(max(0.0, float(x) - DOT / 2), WIDTH - DOT)
    return [f"{begin:.1f},{y}", f"{begin + DOT:.1f},{y}"]
