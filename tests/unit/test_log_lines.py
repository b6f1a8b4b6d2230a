"""Lines of the log name values in words, without the notation of Python."""

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog

from streamer.observability import logs

EVENT = {
    "file": Path("/etc/streamer/config.yaml"),
    "absent": None,
    "ready": True,
    "tables": ["a", "b"],
    "at": datetime(2026, 11, 26, 12, tzinfo=UTC),
    "counts": {"a": 1},
}


@pytest.fixture
def root() -> Iterator[None]:
    """Restores the handlers of the tests."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    structlog.reset_defaults()


def line(log_format: logs.LogFormat, capsys: pytest.CaptureFixture[str]) -> str:
    logs.configure("info", log_format)
    structlog.get_logger().info("starting", **EVENT)
    return capsys.readouterr().err


def test_a_line_of_text_has_words(root: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = line("text", capsys)
    _, _, fields = text.partition("starting")
    assert sorted(fields.split()) == sorted(
        [
            "absent=none",
            "at=2026-11-26T12:00:00+00:00",
            "counts='a:",
            "1'",
            "file=/etc/streamer/config.yaml",
            "ready=true",
            "tables='a,",
            "b'",
        ]
    )


def test_a_line_of_json_has_values(root: None, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(line("json", capsys))
    assert {name: values[name] for name in EVENT} == {
        "file": "/etc/streamer/config.yaml",
        "absent": None,
        "ready": True,
        "tables": ["a", "b"],
        "at": "2026-11-26T12:00:00+00:00",
        "counts": {"a": 1},
    }
