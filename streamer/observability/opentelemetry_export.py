"""Exports metrics and spans with the OpenTelemetry SDK, as OTLP over HTTP.

The export sends the metrics of `/metrics`, with the same names; a summary becomes two sums. A
thread of the SDK sends spans from a queue of limited length. If the receiver is slow or away, the
export loses data points and spans, and never delays the stream. The variables OTEL_* of the
environment apply as the SDK documents.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as points
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric

from streamer import __version__
from streamer.observability.metrics import Metrics
from streamer.observability.spans import Facts
from streamer.postgres.secret import Secret
from streamer.postgres.url_passwords import MASK
from streamer.util.waiting import in_daemon_thread

REQUEST_SECONDS: Final = 10.0
"""The time for a request and all repetitions."""
END_SECONDS: Final = 3.0
"""The time to export the last spans at the end of the process."""
LOG_SECONDS: Final = 600.0
"""The time between two lines about the same failure of an exporter."""
_SCOPE: Final = InstrumentationScope("streamer", __version__)
_NANOSECONDS: Final = 1_000_000_000
_EXPORTERS: Final = "opentelemetry.exporter.otlp.proto.http"


class TelemetryExport:
    """The export of a process: `run` exports metrics, and the methods of `Spans` add spans."""

    def __init__(
        self, endpoint: str, headers: Mapping[str, Secret], interval: float, metrics: Metrics
    ) -> None:
        self._metrics = metrics
        self._interval = interval
        self._resource = _make_resource()
        shown = {name: value.reveal() for name, value in headers.items()} or None
        self._secrets = [value.reveal() for value in headers.values()]
        self._exporter = OTLPMetricExporter(
            f"{endpoint}/v1/metrics", headers=shown, timeout=REQUEST_SECONDS
        )
        self._span_exporter = OTLPSpanExporter(
            f"{endpoint}/v1/traces", headers=shown, timeout=REQUEST_SECONDS
        )
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._span_exporter))
        self._tracer = self._provider.get_tracer(_SCOPE.name, _SCOPE.version)
        self._began_at = time.time_ns()
        for name in ("metric_exporter", "trace_exporter"):
            logging.getLogger(f"{_EXPORTERS}.{name}").addFilter(_LinesOfExporter(self._secrets))

    async def run(self) -> None:
        """Export the metrics until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            await self._metrics.use_registry(self._export, in_daemon_thread)

    async def close(self) -> None:
        """Send the last metrics and spans, for a limited time."""
        self._metrics.spans = None
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._metrics.use_registry(self._export, in_daemon_thread)
                await in_daemon_thread(self._shut_down)
        except Exception as exc:  # noqa: BLE001 the shutdown goes on without the last spans
            self._exporter.shutdown()
            self._span_exporter.shutdown()
            logging.getLogger(__name__).warning(
                "the receiver of OTLP missed the last spans: %s: %s",
                type(exc).__name__,
                _blank(str(exc), self._secrets) or f"no answer for {END_SECONDS:g} s",
            )

    def _export(self) -> None:
        times = self._began_at, time.time_ns()
        families = self._metrics.registry.collect()
        made = [metric for family in families for metric in _metrics_of(family, *times)]
        scope = points.ScopeMetrics(_SCOPE, made, "")
        self._exporter.export(
            points.MetricsData([points.ResourceMetrics(self._resource, [scope], "")])
        )

    def _shut_down(self) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()

    # ---- spans ---------------------------------------------------------------------------------

    def add_window(self, worker: str, seconds: float, facts: Facts) -> None:
        now = time.time_ns()
        self._add("window", now - int(seconds * _NANOSECONDS), now, {"worker": worker, **facts})

    def add_part(self, began_at: datetime, ended_at: datetime, facts: Facts) -> None:
        self._add("copy part", _nanoseconds(began_at), _nanoseconds(ended_at), facts)

    def _add(self, name: str, began: int, ended: int, facts: Facts) -> None:
        attributes = {f"streamer.{fact}": value for fact, value in facts.items()}
        span = self._tracer.start_span(name, Context(), start_time=began, attributes=attributes)
        span.end(ended)


class _LinesOfExporter(logging.Filter):
    """Blanks *secrets* in lines of an exporter, and drops lines that differ only in figures from a
    recent line.
    """

    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__()
        self._secrets = secrets
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = time.monotonic(), str(record.msg)
        if now - self._logged_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            return False
        self._logged_at[kind] = now
        record.msg, record.args = _blank(record.getMessage(), self._secrets), ()
        return True


def _blank(text: str, secrets: Iterable[str]) -> str:
    """Return *text* without *secrets*, also in the form of a literal of Python."""
    for secret in secrets:
        text = text.replace(secret, MASK).replace(repr(secret)[1:-1], MASK)
    return text


def _make_resource() -> Resource:
    attributes = {
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "streamer"
    return Resource.create(attributes)


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * _NANOSECONDS)


# ---- metrics -------------------------------------------------------------------------------------


def _metrics_of(family: Metric, began: int, now: int) -> Iterator[points.Metric]:
    """Yield a metric of Prometheus as metrics of OpenTelemetry."""
    if family.type == "histogram":
        yield points.Metric(family.name, family.documentation, "", _histogram(family, began, now))
        return
    is_sum = family.type in ("counter", "summary")
    by_name: dict[str, list[points.NumberDataPoint]] = {}
    for sample in family.samples:
        name = family.name if family.type == "counter" else sample.name
        point = points.NumberDataPoint(
            sample.labels, began if is_sum else now, now, float(sample.value)
        )
        by_name.setdefault(name, []).append(point)
    for name, data_points in by_name.items():
        data = _sum(data_points) if is_sum else points.Gauge(data_points)
        yield points.Metric(name, family.documentation, "", data)


def _sum(data_points: list[points.NumberDataPoint]) -> points.Sum:
    return points.Sum(data_points, points.AggregationTemporality.CUMULATIVE, is_monotonic=True)


def _histogram(family: Metric, began: int, now: int) -> points.Histogram:
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(labels.items())
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            buckets.setdefault(key, []).append((bound, sample.value))
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    made = [
        _histogram_point(dict(key), counted, sums.get(key, 0.0), began, now)
        for key, counted in buckets.items()
    ]
    return points.Histogram(made, points.AggregationTemporality.CUMULATIVE)


def _histogram_point(
    labels: dict[str, str], counted: Iterable[tuple[float, float]], total: float, *times: int
) -> points.HistogramDataPoint:
    """Return the point of buckets with cumulative counts, the form of Prometheus."""
    ordered = sorted(counted)
    counts = [int(count) for _, count in ordered]
    single = [count - former for former, count in zip([0, *counts], counts, strict=False)]
    unknown: Any = None  # OTLP has optional extremes, Prometheus has none
    return points.HistogramDataPoint(
        labels, *times, counts[-1], total, single, [b for b, _ in ordered[:-1]], unknown, unknown
    )
