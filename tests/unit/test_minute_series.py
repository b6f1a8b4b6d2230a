"""The history of sources in memory: bounds, minutes, gaps, small pictures."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamer.admin.live.minute_series import (
    COARSE_SECONDS,
    COARSE_SLOTS,
    DRAWN_POINTS,
    FINE_SECONDS,
    FINE_SLOTS,
    KEPT_SECONDS,
    Series,
    draw,
    spark,
    trends,
)
from streamer.admin.live.source_history import SourceHistory
from streamer.bookkeeping.minutes import Minute, Values

START = 1_800_000_000
"""The beginning of a minute."""


def filled(seconds: int) -> Series:
    series = Series()
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
    series = Series()
    for number, lag in enumerate((1.0, 9.0, None, 2.0)):
        values: Values = (lag, float(number), 100.0 * number)
        assert series.add(START + number * FINE_SECONDS, {"shop": values}) == []
    (minute,) = series.add(START + COARSE_SECONDS, {"shop": (0.0, 0.0, 0.0)})
    assert minute == Minute(START, "shop", (9.0, 1.5, 300.0))


def test_a_process_that_stood_still_leaves_a_gap_and_a_clock_that_goes_back_begins_again() -> None:
    series = filled(60)
    series.add(START + 600, {"shop": (2.0, 2.0, None)})
    known = [at for at, values in series.points("shop") if values[0] is not None]
    assert known == [*range(START, START + 60, FINE_SECONDS), START + 600]
    series.add(START - 10 * KEPT_SECONDS, {"shop": (3.0, None, None)})
    assert [values for _, values in series.points("shop")][-1] == (3.0, None, None)
    series.retain([])
    assert series.points("shop") == []


def test_only_what_is_newer_is_returned() -> None:
    points = filled(600).points("shop", since=START + 570)
    assert [at for at, _ in points] == [START + 580, START + 590]


def test_pictures_are_small_and_show_gaps_and_single_values() -> None:
    lines = draw([(0.0, None), (30.0, 1.0), (60.0, None)]).lines
    assert lines == ["118.5,1.0 121.5,1.0"]
    points = filled(KEPT_SECONDS).points("shop")
    for trend in trends(points).values():
        assert sum(line.count(",") for line in trend.lines) <= DRAWN_POINTS + 1
    assert trends(points[:1]) == {}
    series = filled(KEPT_SECONDS)
    line = spark(series.rates("shop", START + KEPT_SECONDS - 3600))
    assert len(line) < 200
    assert line.endswith("29,1"), "the newest rate is the highest, at the right"
    assert spark([]) == spark([(START, 1.0)]) == ""
    assert spark([(START, 0.0), (START + 600, 0.0)]) == "24,11 29,11"
    stored = Series()
    stored.merge([Minute(START, "shop", (None, 4.0, None))], START)
    stored.add(START + 600, {"shop": (None, 2.0, None)})
    assert stored.rates("shop", START - 1) == [(START, 4.0), (START + 600, 2.0)]


class Engine:
    """An engine with a source that applies 20 changes in each 10 s."""

    def __init__(self) -> None:
        self.metrics: Any = SimpleNamespace(changes_of_sources={"shop": 0})
        self.bookkeeping: Any = None
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
    held = series._fine._sources["shop t0"], series._coarse._sources["shop t0"]
    assert sum(len(each) * each.itemsize for each in held) < 22_000
