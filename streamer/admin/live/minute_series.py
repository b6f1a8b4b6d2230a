"""Lag, rate and retained WAL of each source over the last day, in memory. Pure.

Two rings of slots hold the values of every source: slots of 10 s for an hour, and slots of a minute
for a day. The number of a slot follows from the time, so a stopped process or a restart leaves a
gap. A source takes 22 kB, whatever the number of its tables.
"""

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from streamer.bookkeeping.minutes import Minute, Values

FINE_SECONDS: Final = 10
FINE_SLOTS: Final = 360
COARSE_SECONDS: Final = 60
COARSE_SLOTS: Final = 1440
KEPT_SECONDS: Final = COARSE_SECONDS * COARSE_SLOTS
FIELDS: Final = ("lag_seconds", "changes_per_second", "retained_wal_bytes")
AHEAD_SECONDS: Final = 3600
"""How far the clock of a sibling process may be ahead."""
WIDTH: Final = 240
HEIGHT: Final = 32
DOT: Final = 3
"""The width of a value without a neighbour."""
DRAWN_POINTS: Final = 120
"""The maximum number of points in a small chart."""


class Ring:
    """The newest values of all sources, in slots of *seconds*."""

    def __init__(self, seconds: int, slots: int) -> None:
        self.seconds = seconds
        self._slots = slots
        self._newest: int | None = None
        self._sources: dict[str, array[float]] = {}

    @property
    def newest(self) -> int | None:
        """The number of the newest slot."""
        return self._newest

    @property
    def sources(self) -> Iterable[str]:
        return self._sources.keys()

    def put(self, source: str, slot: int, values: Values) -> None:
        """Store the values of a slot. If *slot* is far behind, somebody has set the clock back, and
        the ring starts over.
        """
        self._advance(slot)
        held = self._sources.get(source)
        if held is None:
            held = self._sources[source] = array("f", [math.nan]) * (self._slots * len(FIELDS))
        for number, value in enumerate(values):
            index = number * self._slots + slot % self._slots
            held[index] = math.nan if value is None else value

    def _advance(self, slot: int) -> None:
        """Empty the slots between the newest and *slot*, for reuse."""
        if self._newest is None or slot <= self._newest - self._slots:
            self._sources.clear()
        elif slot > self._newest:
            passed = range(max(self._newest, slot - self._slots) + 1, slot + 1)
            for held in self._sources.values():
                for passed_slot in passed:
                    for number in range(len(FIELDS)):
                        held[number * self._slots + passed_slot % self._slots] = math.nan
        else:
            return
        self._newest = slot

    def get(self, source: str, slot: int) -> Values:
        """Return the values of a slot that the ring holds."""
        return self._values(self._sources[source], slot)

    def _values(self, held: "array[float]", slot: int) -> Values:
        values = (held[number * self._slots + slot % self._slots] for number in range(len(FIELDS)))
        lag, rate, wal = (None if math.isnan(value) else value for value in values)
        return lag, rate, wal

    def known_values(self, source: str, slot: int) -> Values | None:
        """Return the values of a slot; None without a known value."""
        newest, held = self._newest, self._sources.get(source)
        if newest is None or held is None or not newest - self._slots < slot <= newest:
            return None
        values = self._values(held, slot)
        return values if has_values(values) else None

    def points(self, source: str) -> list[tuple[int, Values]]:
        """Return time and values of each slot of a source, from the first known slot on.

        A thread may call this while the event loop adds values.
        """
        newest, held = self._newest, self._sources.get(source)
        if newest is None or held is None:
            return []
        slots = range(newest - self._slots + 1, newest + 1)
        points = [(slot * self.seconds, self._values(held, slot)) for slot in slots]
        first = next((n for n, (_, values) in enumerate(points) if has_values(values)), len(points))
        return points[first:]

    def known(self, source: str, field: int, since: float) -> list[tuple[int, float]]:
        """Return times and known values of a field after *since*.

        The fleet overview reads many sources, so the method reads a single field.
        """
        newest, held = self._newest, self._sources.get(source)
        if newest is None or held is None:
            return []
        first_slot = max(newest - self._slots, int(since) // self.seconds) + 1
        begin, count, seconds = field * self._slots, self._slots, self.seconds
        return [
            (slot * seconds, value)
            for slot in range(first_slot, newest + 1)
            if not math.isnan(value := held[begin + slot % count])
        ]

    def retain(self, sources: Iterable[str]) -> None:
        """Remove the sources that are not in *sources*."""
        for source in self._sources.keys() - set(sources):
            del self._sources[source]


class Series:
    """The last day of all sources: the last hour in fine slots, older minutes in coarse slots."""

    def __init__(self) -> None:
        self._fine = Ring(FINE_SECONDS, FINE_SLOTS)
        self._coarse = Ring(COARSE_SECONDS, COARSE_SLOTS)

    def merge(self, minutes: Iterable[Minute], now: float) -> None:
        """Add stored minutes, of this or another process, the newest version of a minute last.

        Minutes outside the last day come from a wrong clock, so the method drops them.
        """
        newest = max(int(now) // COARSE_SECONDS, self._coarse.newest or 0)
        last = (int(now) + AHEAD_SECONDS) // COARSE_SECONDS
        for minute in minutes:
            number = minute.at // COARSE_SECONDS
            if newest - COARSE_SLOTS < number <= last:
                self._coarse.put(minute.source, number, minute.values)
                newest = max(newest, number)

    def minute(self, source: str, at: int) -> Minute | None:
        """Return the minute of a source that begins at *at*, if known."""
        values = self._coarse.known_values(source, at // COARSE_SECONDS)
        return None if values is None else Minute(at, source, values)

    def add(self, at: float, samples: dict[str, Values]) -> list[Minute]:
        """Add the values of a moment, in unix time; return the minute that the values complete."""
        slot, latest = int(at) // FINE_SECONDS, self._fine.newest
        completed: list[Minute] = []
        if latest is not None and slot * FINE_SECONDS // COARSE_SECONDS != _minute_of(latest):
            completed = self._complete(_minute_of(latest))
        for source, values in samples.items():
            self._fine.put(source, slot, values)
        return completed

    def _complete(self, number: int) -> list[Minute]:
        """Move a minute to the coarse slots: highest lag and WAL, and mean rate."""
        slots_of_minute = COARSE_SECONDS // FINE_SECONDS
        slots = range(number * slots_of_minute, (number + 1) * slots_of_minute)
        minutes = []
        for source in self._fine.sources:
            values = summary(self._fine.get(source, slot) for slot in slots)
            if has_values(values):
                self._coarse.put(source, number, values)
                minutes.append(Minute(number * COARSE_SECONDS, source, values))
        return minutes

    def points(self, source: str, *, since: float = 0.0) -> list[tuple[int, Values]]:
        """Return times and values of a source after *since*, the oldest first.

        A minute of the last hour in which a sibling process ran the source is a single point.
        """
        fine, coarse = self._fine.points(source), self._coarse.points(source)
        if fine:
            begin = fine[0][0]
            minutes = {at: values for at, values in coarse if has_values(values)}
            coarse = [point for point in coarse if point[0] < begin]
            coarse += _gap(coarse, begin - begin % COARSE_SECONDS)
            fine = list(_filled(fine, minutes))
            # The clock of the process that now runs the source may be ahead.
            end = fine[-1][0]
            fine += [(at, minutes[at]) for at in minutes if end < at <= end + AHEAD_SECONDS]
        return [point for point in (*coarse, *fine) if point[0] > since]

    def rates(self, source: str, since: float) -> list[tuple[int, float]]:
        """Return times and known rates of a source after *since*, the oldest first."""
        field = FIELDS.index("changes_per_second")
        fine = self._fine.known(source, field, since)
        sampled = {at - at % COARSE_SECONDS for at, _ in fine}
        coarse = self._coarse.known(source, field, since)
        return sorted([*(point for point in coarse if point[0] not in sampled), *fine])

    def retain(self, sources: Iterable[str]) -> None:
        """Remove the sources that are not in *sources*."""
        names = list(sources)
        self._fine.retain(names)
        self._coarse.retain(names)


_UNKNOWN: Final[Values] = (None, None, None)


def _filled(
    fine: list[tuple[int, Values]], minutes: dict[int, Values]
) -> Iterator[tuple[int, Values]]:
    """Yield fine points; the points of *minutes* fill the gaps of this process."""
    for at, values in fine:
        begin = at - at % COARSE_SECONDS
        if has_values(values) or begin not in minutes:
            yield at, values
        elif at == begin:
            yield at, minutes[begin]


def _gap(points: list[tuple[int, Values]], begin: int) -> list[tuple[int, Values]]:
    """Return a point without values for a gap before *begin*, so that no line spans the gap."""
    if points and begin - points[-1][0] > COARSE_SECONDS:
        return [(points[-1][0] + COARSE_SECONDS, _UNKNOWN)]
    return []


def _minute_of(slot: int) -> int:
    return slot * FINE_SECONDS // COARSE_SECONDS


def has_values(values: Values) -> bool:
    """Whether any of the values is known."""
    return any(value is not None for value in values)


def summary(several: Iterable[Values]) -> Values:
    """Summarize several moments: the highest lag and WAL, and the mean rate."""
    columns = list(zip(*several, strict=True)) or [(), (), ()]
    lags, rates, sizes = ([v for v in column if v is not None] for column in columns)
    return (
        max(lags, default=None),
        sum(rates) / len(rates) if rates else None,
        max(sizes, default=None),
    )


# ---- small pictures ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trend:
    """A series in the shape of a curve. ``lines``: points of polylines; a gap separates lines."""

    lines: list[str]
    highest: float
    seconds: float


def trends(points: list[tuple[int, Values]]) -> dict[str, Trend]:
    """Return the curves of a source by field; empty with fewer than two points."""
    if len(points) < 2:
        return {}
    few = _thinned(points)
    return {
        name: draw([(at, values[number]) for at, values in few])
        for number, name in enumerate(FIELDS)
    }


def _thinned(points: list[tuple[int, Values]]) -> list[tuple[float, Values]]:
    """Return at most `DRAWN_POINTS` points, each a summary of the points that it replaces."""
    if len(points) <= DRAWN_POINTS:
        return [(float(at), values) for at, values in points]
    begin, width = points[0][0], (points[-1][0] - points[0][0]) / (DRAWN_POINTS - 1)
    parts = groupby(points, key=lambda point: int((point[0] - begin) / width))
    return [
        (begin + number * width, summary(values for _, values in part)) for number, part in parts
    ]


def draw(values: list[tuple[float, float | None]]) -> Trend:
    """Return a series as polylines in a box of WIDTH by HEIGHT; the newest value is at the right.

    The distance of the points determines the width, so that a young process shows a whole line.
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
    """Return a line unchanged; a single value between gaps becomes a short line."""
    if len(line) > 1:
        return line
    x, _, y = line[0].partition(",")
    begin = min(max(0.0, float(x) - DOT / 2), WIDTH - DOT)
    return [f"{begin:.1f},{y}", f"{begin + DOT:.1f},{y}"]


def spark(rates: list[tuple[int, float]], *, slots: int = 30) -> str:
    """Return the rates of the last hour as the points of a polyline, in a box of slots by 12.

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
    return " ".join(f"{x},{11 - round(value / top * 10)}" for x, value in sorted(highest.items()))
