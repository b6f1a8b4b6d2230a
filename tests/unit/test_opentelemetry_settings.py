"""The section `opentelemetry`, and the log lines of its exporters: no secret is printed."""

import logging
from pathlib import Path

import pytest

from streamer.config import static_mapping
from streamer.config.opentelemetry_section import OpenTelemetrySection
from streamer.errors.error_classes import SettingsError
from streamer.observability.metrics import Metrics
from streamer.observability.opentelemetry_export import TelemetryExport
from streamer.postgres.secret import Secret


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        ("{endpoint: 'http://h?api-key=hidden'}", r"without \? and #.*`headers`"),
        ("{endpoint: 'http://h/#hidden'}", r"without \? and #"),
        ("{headers: {authorization: \"a\\nhidden\"}}", "the value of authorization is empty, or not"),
        ("{headers: {'a b': hidden}}", "'a b' cannot be the name of an HTTP header"),
    ],
)  # fmt: skip
def test_a_fault_is_named_without_the_value(tmp_path: Path, section: str, fault: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"target: {{url: 'host=h'}}\nopentelemetry: {section}\nsources: []\n")
    with pytest.raises(SettingsError, match=fault) as caught:
        static_mapping.load(path)
    assert "hidden" not in str(caught.value)


def test_a_header_loses_the_line_break_of_its_secret() -> None:
    section = OpenTelemetrySection.model_validate({"headers": {"authorization": "Bearer x\n"}})
    assert section.headers["authorization"].reveal() == "Bearer x"


async def test_no_line_of_the_exporters_and_of_the_end_has_a_header(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"authorization": Secret("Bearer\nhidden")}
    export = TelemetryExport("http://127.0.0.1:1", headers, 60, Metrics())
    name = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    logging.getLogger(name).error("bad header %s and %r", "Bearer\nhidden", "Bearer\nhidden")

    def fail() -> None:
        raise ValueError("bad header: 'Bearer\\nhidden'")

    monkeypatch.setattr(export, "_export", fail)
    await export.close()
    assert "hidden" not in caplog.text
    assert "bad header *** and '***'" in caplog.text
    assert "missed the last spans: ValueError: bad header: '***'" in caplog.text
