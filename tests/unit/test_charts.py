"""The charts of a source, a table and the fleet: pictures, quantiles, marks."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from streamer.admin.live import table_history
from streamer.admin.live.charts import (
    DRAWN_POINTS,
    FLEET_CHARTS,
    SOURCE_CHARTS,
    Chart,
    Column,
    chart_view,
    marks_of,
    quantile,
    spark,
)
from streamer.admin.live.past_events import PastEvent
from streamer.admin.live.source_history import DelayHistory
from streamer.admin.live.table_history import IDLE_SECONDS, TableHistory
from streamer.decode.pgoutput import from_datetime
from streamer.observability.metrics import Metrics

START = 1_800_000_000
NOW = datetime.fromtimestamp(START, UTC)


def test_pictures_are_small_and_show_gaps_and_single_values() -> None:
    chart = Chart("Lag", {"lag_seconds": ""}, "latency")
    columns: dict[str, Column] = {
        "times": [0.0, 30.0, 60.0],
        "lag_seconds": [None, 1.0, None],
    }
    (picture,) = chart_view([chart], columns, "/api").pictures
    (line,) = picture.lines
    assert (line.parts, line.present, picture.highest) == (["118.5,1.0 121.5,1.0"], None, 1.0)
    long = {
        "times": [float(n) for n in range(1800)],
        **{name: [n % 97.0 for n in range(1800)] for c in SOURCE_CHARTS for name in c.columns},
    }
    for picture in chart_view(SOURCE_CHARTS, long, "/api").pictures:
        points = sum(part.count(",") for part in picture.lines[0].parts)
        assert points <= DRAWN_POINTS + 1
        assert picture.highest == 96.0
        assert ",1.0" in picture.lines[0].parts[0], "a thinned line keeps the highest value"


def test_charts_without_a_point_have_a_box_and_no_line() -> None:
    names = [name for chart in FLEET_CHARTS for name in chart.columns]
    view = chart_view(FLEET_CHARTS, {"times": [], **{name: [] for name in names}}, "/api")
    assert view.seconds == 0.0
    assert [line.parts for picture in view.pictures for line in picture.lines] == [[]] * 5
    assert {picture.highest for picture in view.pictures} == {None}


def test_a_spark_is_short_and_ends_with_the_newest_rate() -> None:
    line = spark([(START + 10 * n, float(n)) for n in range(360)])
    assert len(line) < 200
    assert line.endswith("29,1"), "the newest rate is the highest, at the right"
    assert spark([]) == spark([(START, 1.0)]) == ""
    assert spark([(START, 0.0), (START + 600, 0.0)]) == "24,11 29,11"


BOUNDS = (0.1, 1.0, 10.0, float("inf"))


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((10, 0, 0, 0), 0.5, 0.05),
        ((0, 10, 0, 0), 0.5, 0.55),
        ((0, 10, 0, 0), 1.0, 1.0),
        ((98, 0, 2, 0), 0.99, 5.5),
        ((1, 0, 0, 9), 0.99, 10.0),
        ((5, 5, 0, 0), 0.5, 0.1),
    ],
)
def test_a_quantile_is_spread_evenly_in_its_bucket(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    assert quantile(share, BOUNDS, counts) == (
        None if expected is None else pytest.approx(expected)
    )


def test_quantiles_are_those_of_the_last_10_seconds_over_all_sources() -> None:
    metrics = Metrics()
    history = DelayHistory(SimpleNamespace(metrics=metrics, supervisors=[]))

    def commit(database: str, count: int, seconds: float) -> None:
        at = datetime.now(UTC) - timedelta(seconds=seconds)
        metrics.count_transactions(database, None, [from_datetime(at)] * count)

    history.sample(START)
    commit("shop", 50, 0.7)
    commit("stock", 50, 4.0)
    history.sample(START + 10)
    commit("shop", 10, 0.7)
    history.sample(START + 20)
    points = dict(history.points(by_minute=False, since=0.0))
    p50, p95, p99 = points[START + 10]
    assert p50 is not None
    assert p95 is not None
    assert p99 is not None
    assert p50 == pytest.approx(1.0)
    assert 2.5 < p95 < p99 <= 5.0
    assert list(points[START + 20]) == pytest.approx([0.75, 0.975, 0.995])


def event(seconds: int, source: str | None, table: str | None, state: str, error: str = "") -> Any:
    subject = "table" if table else "source" if source else "target"
    at = NOW + timedelta(seconds=seconds)
    return PastEvent(at, source, table, subject, state, error or None)


def test_marks_are_restarts_errors_and_copies_of_the_chosen_subject() -> None:
    past = [
        event(95, "stock", None, "streaming"),
        event(91, "shop", None, "streaming"),
        event(80, "shop", "public.a", "ready"),
        event(60, "shop", "public.b", "error", "no column"),
        event(40, None, None, "unreachable", "no route"),
        event(20, "shop", "public.a", "copying"),
        event(5, "shop", None, "waiting"),
    ]
    end = NOW + timedelta(seconds=100)

    def marks(**subject: Any) -> list[tuple[int, str, str]]:
        found = marks_of(past, end, NOW, **subject)
        return [(mark["at"] - START, mark["kind"], mark["text"]) for mark in found]

    started = (0, "restart", "this process started")
    copied = (20, "copy", "shop public.a: copying for 60 s")
    away = (40, "error", "target: no route")
    failed = (60, "error", "shop public.b: no column")
    assert marks() == [
        started, copied, away, failed,
        (90, "restart", "stock: streaming for 5.0 s, and 1 more"),
    ]  # fmt: skip
    streams = (90, "restart", "shop: streaming for 9.0 s")
    assert marks(source="shop") == [started, copied, away, failed, streams]
    assert marks(source="shop", table="public.a") == [started, copied, away, streams]
    assert marks(source="stock") == [started, away, (90, "restart", "stock: streaming for 5.0 s")]


class Tables:
    """An engine with a source whose tables change as the test says."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        pipeline = SimpleNamespace(table_figures=lambda name: (0.5, 70))
        source = SimpleNamespace(label="shop")
        self.supervisors: list[Any] = [SimpleNamespace(source=source, pipeline=pipeline)]

    def change(self, table: str) -> None:
        counts = self.metrics.changes_of_tables
        counts["shop", table] = (counts.get(("shop", table), (0, NOW))[0] + 20, NOW)


def test_tables_that_change_have_a_history_and_idle_tables_leave_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_history, "TABLES_MAX", 2)
    engine = Tables()
    history = TableHistory(engine)
    history.sample(START, 10)
    for number in range(1, 4):
        for name in ("a", "b", "c"):
            engine.change(f"public.{name}")
        history.sample(START + 10 * number, 10)

    def known(table: str) -> list[int]:
        return [at - START for at, _ in history.points("shop", f"public.{table}", 0.0)]

    assert history.points("shop", "public.a", START + 20) == [(START + 30, (0.5, 2.0, 70.0))]
    assert [known(name) for name in ("a", "b", "c")] == [[10, 20, 30], [10, 20, 30], []]
    engine.change("public.b")
    engine.change("public.c")
    late = int(IDLE_SECONDS) + 30
    history.sample(START + late, 10)
    assert [known("a"), known("c")] == [[], [late]]
    # A page shows the idle table, in the place of the table that changed first.
    history.follow("shop", "public.a", START + late)
    history.sample(START + late + 10, 10)
    assert known("a") == [late + 10]
    engine.supervisors.clear()
    history.sample(START + late + 20, 10)
    assert not any(map(known, ("a", "b", "c")))
