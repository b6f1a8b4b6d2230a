"""Metrics and spans go to a receiver of OTLP, and nothing of it without the setting."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import streamer
from streamer.errors.error_classes import SettingsError
from streamer.observability import opentelemetry_export
from streamer.observability.metrics import Metrics
from streamer.observability.telemetry import open_telemetry
from tests.support.postgres import Database
from tests.support.receiver import Receiver, receiving
from tests.support.streamer import MakeStreamer
from tests.support.waiting import until


def spans(receiver: Receiver) -> list[tuple[str, dict[str, Any], int]]:
    """Return name, attributes and nanoseconds of each span."""
    requests = [
        ExportTraceServiceRequest.FromString(each.body)
        for each in receiver.accepted
        if each.path == "/v1/traces"
    ]
    return [
        (
            span.name,
            {a.key: a.value.string_value or a.value.int_value for a in span.attributes},
            span.end_time_unix_nano - span.start_time_unix_nano,
        )
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def metrics(receiver: Receiver) -> dict[str, Any]:
    """Return the newest metrics by name."""
    newest = [each for each in receiver.accepted if each.path == "/v1/metrics"]
    if not newest:
        return {}
    request = ExportMetricsServiceRequest.FromString(newest[-1].body)
    (resource,) = request.resource_metrics
    return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


@pytest.mark.usefixtures("without_spark")
async def test_windows_parts_and_metrics_reach_the_receiver(
    source: Database, target: Database, stream: MakeStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setattr(opentelemetry_export, "REQUEST_SECONDS", 0.5)
    source.execute("create table t (id int primary key); insert into t select generate_series(1,5)")
    async with receiving() as receiver:
        settings = (
            f"opentelemetry: {{endpoint: '{receiver.url}/', interval: 0.1,"
            " headers: {authorization: Bearer x}}"
        )
        async with stream("t:", settings=settings) as streamer:
            await streamer.caught_up()
            source.execute("insert into t values (6)")
            await streamer.caught_up()

            def has_all() -> bool:
                names = [name for name, _, _ in spans(receiver)]
                return {"window", "copy part"} <= set(names) and bool(metrics(receiver))

            await until(has_all)
            parts = [item for item in spans(receiver) if item[0] == "copy part"]
            ((_, part, part_time),) = parts
            assert part["streamer.table"] == "public.t"
            assert part["streamer.rows"] == 5
            assert part_time > 0
            window, *_ = [facts for name, facts, _ in spans(receiver) if name == "window"]
            assert window["streamer.changes"] == 1
            assert window["streamer.sources"] == "shop"
            assert receiver.accepted[0].headers["authorization"] == "Bearer x"

            await until(lambda: "streamer_changes_applied" in metrics(receiver))
            applied = metrics(receiver)["streamer_changes_applied"].sum
            assert applied.is_monotonic
            by_operation = {
                next(
                    a.value.string_value for a in p.attributes if a.key == "operation"
                ): p.as_double
                for p in applied.data_points
            }
            assert by_operation["insert"] == 1
            (delays,) = metrics(receiver)[
                "streamer_commit_to_visible_seconds"
            ].histogram.data_points
            assert delays.count == sum(delays.bucket_counts) == 1
            assert len(delays.bucket_counts) == len(delays.explicit_bounds) + 1
            assert "streamer_apply_seconds_sum" in metrics(receiver)

            receiver.status = None  # a receiver without an answer delays no change
            source.execute("insert into t values (7)")
            await streamer.caught_up()
            receiver.status = 503
            source.execute("insert into t values (8)")
            await streamer.caught_up()
            receiver.status = 200
        assert streamer.engine.metrics.spans is None


def test_without_the_packages_the_setting_is_refused_with_their_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "streamer.observability.opentelemetry_export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(
        SettingsError, match=r"not installed.*install --upgrade 'pg-streamer\[otel\]'"
    ):
        open_telemetry("http://localhost:4318", {}, 60, Metrics())


def test_without_the_setting_no_process_imports_the_packages() -> None:
    """`tests/test_tidy.py` checks which module imports the packages."""
    users = {
        path.stem: ast.parse(text)
        for path in Path(streamer.__file__).parent.rglob("*.py")
        if "opentelemetry_export" in (text := path.read_text())
    }
    assert users.keys() == {"telemetry"}
    at_import = [n.module for n in users["telemetry"].body if isinstance(n, ast.ImportFrom)]
    assert "streamer.observability.opentelemetry_export" not in at_import
