"""The history of sources in memory: bounds, minutes, gaps, totals."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamer.admin.live.minute_series import (
    COARSE_SECONDS,
    COARSE_SLOTS,
    FINE_SECONDS,
    FINE_SLOTS,
    KEPT_SECONDS,
    Ring,
    Series,
)
from streamer.admin.live.source_history import SourceHistory
from streamer.bookkeeping.minutes import Minute, Values
from streamer.observability.metrics import Metrics

START = 1_800_000_000
"""The beginning of a minute."""


def filled(seconds: int) -> Series[str]:
    series: Series[str] = Series()
    for number in range(seconds // FINE_SECONDS):
        series.add(START + number * FINE_SECONDS, {"shop": (1.0, float(number), None)})
    return series


def test_an_hour_is_kept_by_ten_seconds_and_a_day_by_the_minute_and_nothing_more() -> None:
    points = filled(2 * KEPT_SECONDS).points("shop")
    end = START + 2 * KEPT_SECONDS
    times = [at for at, _ in points]
    assert times == sorted(set(times))
    fine = [at for at in times if at > end - FINE_SLOTS * FINE_SECONDS]
    assert len(fine) == FINE_SLOTS - 1
    assert times[0] >= end - KEPT_SECONDS - 2 * COARSE_SECONDS
    assert len(times) <= FINE_SLOTS + COARSE_SLOTS


def test_a_minute_has_the_highest_lag_and_wal_and_the_mean_rate() -> None:
    series: Series[str] = Series()
    for number, lag in enumerate((1.0, 9.0, None, 2.0)):
        values: Values = (lag, float(number), 100.0 * number)
        assert series.add(START + number * FINE_SECONDS, {"shop": values}) == []
    (minute,) = series.add(START + COARSE_SECONDS, {"shop": (0.0, 0.0, 0.0)})
    assert minute == (START, "shop", (9.0, 1.5, 300.0))


def test_a_process_that_stood_still_leaves_a_gap_and_a_clock_that_goes_back_begins_again() -> None:
    series = filled(60)
    series.add(START + 600, {"shop": (2.0, 2.0, None)})
    known = [at for at, values in series.points("shop") if values[0] is not None]
    assert known == [*range(START, START + 60, FINE_SECONDS), START + 600]
    series.add(START - 10 * KEPT_SECONDS, {"shop": (3.0, None, None)})
    assert [values for _, values in series.points("shop")][-1] == (3.0, None, None)
    series.retain([])
    assert series.points("shop") == []


def test_a_curve_begins_with_the_first_sample_and_not_with_the_minute_of_the_sample() -> None:
    series: Series[str] = Series()
    first = START + 3 * FINE_SECONDS
    times = range(first, first + COARSE_SECONDS + FINE_SECONDS, FINE_SECONDS)
    for at in times:
        series.add(at, {"shop": (1.0, 200.0, None)})
    assert [at for at, _ in series.points("shop")] == [*times]
    assert [at for at, _ in series.totals(by_minute=False)] == [*times]


def test_only_newer_values_are_returned() -> None:
    points = filled(600).points("shop", since=START + 570)
    assert [at for at, _ in points] == [START + 580, START + 590]


def test_rates_of_minutes_and_moments_are_a_single_series() -> None:
    stored: Series[str] = Series()
    stored.merge([Minute(START, "shop", (None, 4.0, None))], START)
    stored.add(START + 600, {"shop": (None, 2.0, None)})
    assert stored.rates("shop", START - 1) == [(START, 4.0), (START + 600, 2.0)]


def test_totals_have_the_highest_lag_and_sums_and_follow_every_change() -> None:
    ring: Ring[str] = Ring(10, 6)
    ring.put("a", 1, (1.0, 2.0, None))
    ring.put("b", 1, (3.0, 4.0, None))
    assert ring.totals() == [(10, (3.0, 6.0, None))]
    ring.put("b", 1, (0.5, 1.0, 7.0))  # a minute that a process stored twice
    ring.put("b", 3, (None, 1.0, None))
    assert ring.totals() == [
        (10, (1.0, 3.0, 7.0)), (20, (None, None, None)), (30, (None, 1.0, None))
    ]  # fmt: skip
    ring.put("a", 8, (1.0, 1.0, 1.0))
    assert ring.totals() == [(30, (None, 1.0, None)), *((n, (None,) * 3) for n in (40, 50, 60, 70)),
                             (80, (1.0, 1.0, 1.0))]  # fmt: skip
    ring.put("a", 1, (1.0, 1.0, 1.0))  # a clock that was set back
    assert ring.totals() == [(10, (1.0, 1.0, 1.0))]


def test_totals_by_the_minute_leave_out_the_moments_of_this_process() -> None:
    series = filled(70)
    series.merge([Minute(START, "other", (5.0, 1.0, 9.0))], START + 70)
    assert series.totals(by_minute=True) == [(START, (5.0, 3.5, 9.0))]
    assert len(series.totals(by_minute=False)) == 7


class Engine:
    """An engine with a source that applies 20 changes in each 10 s."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.metrics.changes_of_sources["shop"] = 0
        self.bookkeeping: Any = None
        self.workers: list[Any] = []
        pipeline = SimpleNamespace(lag_seconds=lambda: 0.25)
        source = SimpleNamespace(label="shop")
        self.supervisors: list[Any] = [
            SimpleNamespace(
                source=source, pipeline=pipeline, retained_wal_bytes=7, runs_elsewhere=False
            )
        ]


class Clock:
    """Ten seconds later after each sample."""

    def __init__(self) -> None:
        self.now = float(START)

    def __call__(self) -> float:
        return self.now


def sample(history: SourceHistory, engine: Engine, clock: Clock, count: int) -> None:
    for _ in range(count):
        history.sample()
        clock.now += FINE_SECONDS
        engine.metrics.changes_of_sources["shop"] += 20


def test_samples_give_rates_from_the_second_on() -> None:
    engine, clock = Engine(), Clock()
    history = SourceHistory(engine, lambda: ["shop"], clock)
    sample(history, engine, clock, 14)
    columns = history.columns("shop")
    assert len(columns["times"]) == 14
    assert columns["changes_per_second"][:3] == [None, 2.0, 2.0]
    assert columns["lag_seconds"][0] == 0.25
    assert len({len(column) for column in columns.values()}) == 1


@pytest.mark.parametrize("count", [200])
async def test_a_source_takes_22_kb_of_memory(count: int) -> None:
    series = filled(60)
    series.add(START + 60, {f"shop t{number}": (0.0, 0.0, 0.0) for number in range(count)})
    series.add(START + 120, {f"shop t{number}": (0.0, 0.0, 0.0) for number in range(count)})
    held = series._fine._subjects["shop t0"], series._coarse._subjects["shop t0"]
    assert sum(len(each) * each.itemsize for each in held) < 22_000


def test_a_thread_that_takes_the_last_outdated_slot_disturbs_no_other_thread() -> None:
    class Outdated(set[int]):
        """A second thread empties the set after the check of its length."""

        def __bool__(self) -> bool:
            return True

    ring: Ring[str] = Ring(FINE_SECONDS, FINE_SLOTS)
    ring._outdated = Outdated()
    ring.put("shop", START // FINE_SECONDS, (1.0, 2.0, 3.0))
    assert ring.totals() == [(START, (1.0, 2.0, 3.0))]
