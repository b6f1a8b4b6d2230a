"""The rendering of metrics."""

import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily, Metric

from streamer.bookkeeping.verifications import VerificationRecord
from streamer.config.settings import METRICS_TABLES_MAX
from streamer.observability.metrics import Metrics
from streamer.runtime.health.gauges import ScrapeFacts, SourceGauges, families


async def test_a_scrape_reads_in_the_event_loop_and_renders_in_a_thread() -> None:
    read_in: list[int] = []
    built_in: list[int] = []

    def read() -> float:
        read_in.append(threading.get_ident())
        return 7.0

    def build(fact: float) -> Iterable[Metric]:
        built_in.append(threading.get_ident())
        return [GaugeMetricFamily("streamer_test", "a fact", value=fact)]

    metrics = Metrics()
    metrics.collect_with(read, build)
    text = await metrics.render()
    assert b"streamer_test 7.0" in text
    assert b"streamer_commits_total" in text
    here = threading.get_ident()
    assert read_in == [here]
    assert built_in != [here]


async def test_a_busy_table_has_one_series_for_each_operation() -> None:
    metrics = Metrics()
    counts = {"insert": 1, "update": 2, "delete": 3, "truncate": 0}
    metrics.count_changes(("shop", "", "public.orders"), counts)
    lines = (await metrics.render()).decode().splitlines()
    assert len([line for line in lines if 'table="public.orders"' in line]) == len(counts)


async def test_too_many_tables_share_the_series_of_their_source() -> None:
    metrics = Metrics(tables_max=2)
    tables = ["a", "b"]
    metrics.table_detail.count_tables = lambda: len(tables)
    counts = {"insert": 1, "update": 0, "delete": 0, "truncate": 0}

    def applied(table: str) -> float | None:
        labels = {"database": "shop", "sid": "eu", "table": table, "operation": "insert"}
        return metrics.registry.get_sample_value("streamer_changes_applied_total", labels)

    for table in tables:
        metrics.count_changes(("shop", "eu", table), counts)
    assert (applied("a"), applied("b"), applied("")) == (1, 1, None)
    tables.append("c")
    metrics.count_changes(("shop", "eu", "c"), counts)
    assert (applied("a"), applied("")) == (None, 3)
    tables.clear()  # a series that comes and goes would look like a restart
    assert (applied("a"), applied("")) == (None, 3)


async def test_a_scrape_shows_the_tables_that_take_most_time() -> None:
    metrics = Metrics()
    for number in range(30):
        for _ in range(2):
            metrics.apply_seconds.add(number / 2, ("shop", "", f"public.t{number:02}"))
    lines = (await metrics.render()).decode().splitlines()
    prefix = 'streamer_apply_seconds_sum{database="shop",sid="",table="public.'
    shown = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    assert (len(shown), shown[0], shown[-1]) == (20, 't29"} 29.0', 't10"} 10.0')
    assert 'streamer_apply_seconds_count{database="shop",sid="",table="public.t29"} 2.0' in lines
    assert metrics.apply_seconds.by_source() == {("shop", ""): sum(range(30))}


EARLIER = datetime(2026, 1, 1, tzinfo=UTC)
VERIFIED = VerificationRecord(
    1, EARLIER, datetime(2026, 1, 2, tzinfo=UTC), None, differing_rows=0, undecided_rows=0
)
DIFFERS = replace(VERIFIED, verified_at=EARLIER, differing_rows=1)


def fleet(sources: int, tables: int, tables_max: int | None) -> ScrapeFacts:
    """Return facts of a fleet in which a table of each source is in error."""
    facts = ScrapeFacts(True, 0.0, tables_max)
    for number in range(sources):
        names = [f"public.t_{table}" for table in range(tables)]
        facts.sources.append(
            SourceGauges(
                ("shop", f"s{number}"),
                {"streamer_lag_bytes": 0.0, "streamer_lag_seconds": 0.0},
                "streaming",
                dict.fromkeys(names, "ready") | {names[0]: "error"},
                {names[0]: 2, names[1]: 3},
                dict.fromkeys(names, 1.0) | {names[0]: 7.0},
                dict.fromkeys(names, VERIFIED) | {names[0]: DIFFERS},
            )
        )
    return facts


def test_sixty_tenants_with_200_tables_stay_below_10_000_series_by_default() -> None:
    samples = [
        sample
        for family in families(fleet(60, 200, METRICS_TABLES_MAX))
        for sample in family.samples
    ]
    # Counters and the histogram: 1 + 4 + 2 + 2 of all tables, 20 codes of errors, 17 of delays.
    assert len(samples) + 60 * (9 + 20 + 17) < 10_000

    def value(name: str, **labels: str) -> float | None:
        own = {"database": "shop", "sid": "s7"} | labels
        return next((s.value for s in samples if s.name == name and s.labels == own), None)

    assert value("streamer_tables", state="ready") == 199
    assert value("streamer_table_state", table="public.t_0", state="error") == 1
    assert value("streamer_table_state", table="public.t_1", state="ready") is None
    assert value("streamer_quarantined_rows", table="") == 5
    assert value("streamer_table_lag_seconds", table="") == 7
    assert value("streamer_differing_rows", table="") == 1
    assert value("streamer_verified_timestamp_seconds", table="") == EARLIER.timestamp()


def test_few_tables_have_series_of_their_own() -> None:
    samples = [sample for family in families(fleet(1, 5, None)) for sample in family.samples]
    tables = {s.labels["table"] for s in samples if s.name == "streamer_table_state"}
    assert tables == {f"public.t_{number}" for number in range(5)}


def test_the_delays_of_a_window_are_counted_like_single_delays() -> None:
    delays = Metrics().commit_to_visible
    window, single = delays.labels("window", ""), delays.labels("single", "")
    now = 1_000_000_000_000
    ages = [0, 1, 9_999, 10_000, 10_001, 25_000, 1_000_000, 10_000_000_000, -50]
    window.observe_all(now, [now - age for age in reversed(ages)])
    for age in ages:
        single.observe(max(0, age) / 1_000_000)
    counts = [[bucket.get() for bucket in of._buckets] for of in (window, single)]
    assert counts[0] == counts[1]
    assert sum(counts[0]) == len(ages)
    assert window._sum.get() == single._sum.get() == 10_001.055001
