"""The rendering of metrics."""

import threading
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from streamer.observability.metrics import Metrics


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
