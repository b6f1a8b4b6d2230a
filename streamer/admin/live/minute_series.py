"""Three values of each source, of each table or of the process over the last day, in memory. Pure.

Two rings of slots hold the values of a subject: slots of 10 s for an hour, and slots of a minute
for a day. The number of a slot follows from the time, so a stopped process or a restart leaves a
gap. A subject takes 22 kB.
"""

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from streamer.bookkeeping.minutes import Minute, Values

FINE_SECONDS: Final = 10
FINE_SLOTS: Final = 360
COARSE_SECONDS: Final = 60
COARSE_SLOTS: Final = 1440
KEPT_SECONDS: Final = COARSE_SECONDS * COARSE_SLOTS
FIELDS: Final = ("lag_seconds", "changes_per_second", "retained_wal_bytes")
AHEAD_SECONDS: Final = 3600
"""How far the clock of a sibling process may be ahead."""

S = TypeVar("S", bound=Hashable)
"""The subject of values: a source, a table or the process."""
Point = tuple[int, Values]


class Ring(Generic[S]):
    """The newest values of all subjects, in slots of *seconds*."""

    def __init__(self, seconds: int, slots: int) -> None:
        self.seconds = seconds
        self._slots = slots
        self._newest: int | None = None
        self._subjects: dict[S, array[float]] = {}
        self._totals: dict[int, Values] = {}
        self._outdated: set[int] = set()
        """The slots whose totals the ring must compute again."""

    @property
    def newest(self) -> int | None:
        """The number of the newest slot."""
        return self._newest

    @property
    def subjects(self) -> Iterable[S]:
        return self._subjects.keys()

    def put(self, subject: S, slot: int, values: Values) -> None:
        """Put the values of a slot into the ring.

        A slot that is far behind means that the clock was set back: the ring drops all values.
        """
        self._advance(slot)
        stored = self._subjects.get(subject)
        if stored is None:
            stored = self._subjects[subject] = array("f", [math.nan]) * (self._slots * len(FIELDS))
        for number, value in enumerate(values):
            index = number * self._slots + slot % self._slots
            stored[index] = math.nan if value is None else value
        self._outdated.add(slot)

    def _advance(self, slot: int) -> None:
        """Empty the slots between the newest and *slot*, for reuse."""
        if self._newest is None or slot <= self._newest - self._slots:
            self._subjects.clear()
            self._totals.clear()
            self._outdated.clear()
        elif slot > self._newest:
            passed = range(max(self._newest, slot - self._slots) + 1, slot + 1)
            for stored in self._subjects.values():
                for passed_slot in passed:
                    for number in range(len(FIELDS)):
                        stored[number * self._slots + passed_slot % self._slots] = math.nan
            for passed_slot in passed:
                self._totals.pop(passed_slot - self._slots, None)
                self._outdated.discard(passed_slot - self._slots)
        else:
            return
        self._newest = slot

    def get(self, subject: S, slot: int) -> Values:
        """Return the values of a slot that the ring holds."""
        return self._values(self._subjects[subject], slot)

    def _values(self, stored: "array[float]", slot: int) -> Values:
        values = (
            stored[number * self._slots + slot % self._slots] for number in range(len(FIELDS))
        )
        first, second, third = (None if math.isnan(value) else value for value in values)
        return first, second, third

    def known_values(self, subject: S, slot: int) -> Values | None:
        """Return the values of a slot; None without a known value."""
        newest, stored = self._newest, self._subjects.get(subject)
        if newest is None or stored is None or not newest - self._slots < slot <= newest:
            return None
        values = self._values(stored, slot)
        return values if has_values(values) else None

    def points(self, subject: S) -> list[Point]:
        """Return time and values of each slot of a subject, from the first known slot on.

        A thread may call this while the event loop adds values.
        """
        stored = self._subjects.get(subject)
        return [] if stored is None else self._from_first(lambda slot: self._values(stored, slot))

    def totals(self) -> list[Point]:
        """Return time and total of each slot, from the first known slot on.

        The total of a slot is the maximum of the first values of all subjects, and the sums of the
        second and third values. The ring keeps the totals, so a call reads only the slots that
        changed. A thread may call this while the event loop adds values, and while another thread
        calls this.
        """
        totals = self._totals
        while (slot := self._pop_outdated()) is not None:
            if self._newest is not None and slot > self._newest - self._slots:
                totals[slot] = self._total(slot)
        return self._from_first(lambda slot: totals.get(slot, UNKNOWN))

    def _pop_outdated(self) -> int | None:
        try:
            return self._outdated.pop()
        except KeyError:  # also after another thread has taken the last slot
            return None

    def _total(self, slot: int) -> Values:
        subjects = list(self._subjects.values())
        begins = (number * self._slots + slot % self._slots for number in range(len(FIELDS)))
        lags, rates, sizes = (_known_at(subjects, begin) for begin in begins)
        return max(lags, default=None), _sum(rates), _sum(sizes)

    def _from_first(self, read: Callable[[int], Values]) -> list[Point]:
        if self._newest is None:
            return []
        slots = range(self._newest - self._slots + 1, self._newest + 1)
        points = [(slot * self.seconds, read(slot)) for slot in slots]
        first = next((n for n, (_, values) in enumerate(points) if has_values(values)), len(points))
        return points[first:]

    def values_of_field(self, subject: S, field: int, since: float) -> list[tuple[int, float]]:
        """Return times and known values of a field after *since*.

        The fleet overview reads many sources, so the method reads a single field.
        """
        newest, stored = self._newest, self._subjects.get(subject)
        if newest is None or stored is None:
            return []
        first_slot = max(newest - self._slots, int(since) // self.seconds) + 1
        begin, count, seconds = field * self._slots, self._slots, self.seconds
        return [
            (slot * seconds, value)
            for slot in range(first_slot, newest + 1)
            if not math.isnan(value := stored[begin + slot % count])
        ]

    def retain(self, subjects: Iterable[S]) -> None:
        """Remove the subjects that are not in *subjects*."""
        for subject in self._subjects.keys() - set(subjects):
            del self._subjects[subject]


def summary(samples: Iterable[Values]) -> Values:
    """Combine several samples: the maximum of the first and the third value, and the mean of the
    second.
    """
    firsts, seconds, thirds = _known_columns(samples)
    mean = sum(seconds) / len(seconds) if seconds else None
    return max(firsts, default=None), mean, max(thirds, default=None)


def highest(samples: Iterable[Values]) -> Values:
    """Combine several samples: the maximum of each value."""
    columns = _known_columns(samples)
    firsts, seconds, thirds = (max(column, default=None) for column in columns)
    return firsts, seconds, thirds


def _known_columns(samples: Iterable[Values]) -> Iterator[list[float]]:
    columns = list(zip(*samples, strict=True)) or [(), (), ()]
    return ([value for value in column if value is not None] for column in columns)


class Series(Generic[S]):
    """The last day of all subjects: the last hour in fine slots, older minutes in coarse slots."""

    def __init__(self, summarize: Callable[[Iterable[Values]], Values] = summary) -> None:
        """*summarize* combines the samples of a minute."""
        self._fine: Ring[S] = Ring(FINE_SECONDS, FINE_SLOTS)
        self._coarse: Ring[S] = Ring(COARSE_SECONDS, COARSE_SLOTS)
        self._summarize = summarize

    def merge(self: "Series[str]", minutes: Iterable[Minute], now: float) -> None:
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

    def minute(self: "Series[str]", source: str, at: int) -> Minute | None:
        """Return the minute of a source that begins at *at*, if known."""
        values = self._coarse.known_values(source, at // COARSE_SECONDS)
        return None if values is None else Minute(at, source, values)

    def add(self, at: float, samples: dict[S, Values]) -> list[tuple[int, S, Values]]:
        """Add the values of a moment, in unix time; return the minutes that the values complete,
        each with the time of its beginning.
        """
        slot, latest = int(at) // FINE_SECONDS, self._fine.newest
        completed: list[tuple[int, S, Values]] = []
        if latest is not None and slot * FINE_SECONDS // COARSE_SECONDS != _minute_of(latest):
            completed = self._complete(_minute_of(latest))
        for subject, values in samples.items():
            self._fine.put(subject, slot, values)
        return completed

    def _complete(self, number: int) -> list[tuple[int, S, Values]]:
        """Move a minute to the coarse slots."""
        slots_of_minute = COARSE_SECONDS // FINE_SECONDS
        slots = range(number * slots_of_minute, (number + 1) * slots_of_minute)
        minutes = []
        for subject in self._fine.subjects:
            values = self._summarize(self._fine.get(subject, slot) for slot in slots)
            if has_values(values):
                self._coarse.put(subject, number, values)
                minutes.append((number * COARSE_SECONDS, subject, values))
        return minutes

    def points(self, subject: S, *, by_minute: bool = False, since: float = 0.0) -> list[Point]:
        """Return times and values of a subject after *since*, the oldest first.

        The last hour has several points a minute. But a minute in which a sibling process ran the
        source is a single point.
        *by_minute*: return only minutes.
        """
        fine = [] if by_minute else self._fine.points(subject)
        return _joined(fine, self._coarse.points(subject), since)

    def totals(self, *, by_minute: bool, since: float = 0.0) -> list[Point]:
        """Return times and totals of all subjects after *since*, the oldest first.

        *by_minute*: return only minutes, as sibling processes store no shorter intervals.
        """
        fine = [] if by_minute else self._fine.totals()
        return _joined(fine, self._coarse.totals(), since)

    def rates(self, subject: S, since: float) -> list[tuple[int, float]]:
        """Return times and known rates of a subject after *since*, the oldest first."""
        field = FIELDS.index("changes_per_second")
        fine = self._fine.values_of_field(subject, field, since)
        sampled = {at - at % COARSE_SECONDS for at, _ in fine}
        coarse = self._coarse.values_of_field(subject, field, since)
        return sorted([*(point for point in coarse if point[0] not in sampled), *fine])

    def retain(self, subjects: Iterable[S]) -> None:
        """Remove the subjects that are not in *subjects*."""
        kept = list(subjects)
        self._fine.retain(kept)
        self._coarse.retain(kept)


UNKNOWN: Final[Values] = (None, None, None)


def _joined(fine: list[Point], coarse: list[Point], since: float) -> list[Point]:
    """Return the points after *since*: minutes before the first fine point, and fine points."""
    if fine:
        begin = fine[0][0]
        minute = begin - begin % COARSE_SECONDS
        minutes = {at: values for at, values in coarse if has_values(values)}
        # Without values in the previous minute, no process ran at the start of this minute.
        end = begin if minute - COARSE_SECONDS in minutes else minute
        coarse = [point for point in coarse if point[0] < end]
        coarse += _gap(coarse, minute)
        fine = list(_filled(fine, minutes))
        # The clock of the process that now runs the source may be ahead.
        end = fine[-1][0]
        fine += [(at, minutes[at]) for at in minutes if end < at <= end + AHEAD_SECONDS]
    return [point for point in (*coarse, *fine) if point[0] > since]


def _filled(fine: list[Point], minutes: dict[int, Values]) -> Iterator[Point]:
    """Yield fine points; the points of *minutes* fill the gaps of this process."""
    for at, values in fine:
        begin = at - at % COARSE_SECONDS
        if has_values(values) or begin not in minutes:
            yield at, values
        elif at == begin:
            yield at, minutes[begin]


def _gap(points: list[Point], begin: int) -> list[Point]:
    """Return a point without values for a gap before *begin*, so that no line spans the gap."""
    if points and begin - points[-1][0] > COARSE_SECONDS:
        return [(points[-1][0] + COARSE_SECONDS, UNKNOWN)]
    return []


def _minute_of(slot: int) -> int:
    return slot * FINE_SECONDS // COARSE_SECONDS


def has_values(values: Values) -> bool:
    """Whether any of the values is known."""
    return any(value is not None for value in values)


def _known_at(subjects: "list[array[float]]", index: int) -> list[float]:
    # An unknown value is NaN, which does not equal itself.
    return [value for stored in subjects if (value := stored[index]) == value]


def _sum(values: list[float]) -> float | None:
    return sum(values) if values else None
