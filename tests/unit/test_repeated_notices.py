"""A notice that many sources give comes once, with all of them."""

import asyncio
import contextvars
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from streamer.config import static_mapping
from streamer.runtime.process.engine import Engine, StopCondition
from streamer.util import repeated_notices
from streamer.util.repeated_notices import RepeatedNotices, end_notice, give_notice
from tests.support.waiting import until

log = structlog.get_logger()

SOURCES = "sources: [{database: shop, urls: [{url: postgresql://x@localhost/eu}], tables: {t: }}]"


async def test_sources_share_a_line_and_no_attempt_repeats_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated_notices, "GATHER_SECONDS", 0.01)
    with capture_logs() as logs:
        notices = RepeatedNotices()
        notices.gather()
        running = asyncio.create_task(notices.run())
        for label in ("eu", "us", "eu"):
            give_notice(log.warning, "heartbeats are off", label, reason="no privilege")
        give_notice(log.info, "text transport", "eu", because="a")
        await until(lambda: len(logs) == 2)
        give_notice(log.warning, "heartbeats are off", "us", reason="no privilege")
        give_notice(log.info, "text transport", "eu", because="b")
        end_notice("heartbeats are off", "eu")
        give_notice(log.warning, "heartbeats are off", "eu", reason="no privilege")
        running.cancel()
        notices.flush()
    assert logs == [
        {
            "event": "heartbeats are off", "log_level": "warning", "sources": ["eu", "us"],
            "reason": "no privilege",
        },
        {"event": "text transport", "log_level": "info", "source": "eu", "because": "a"},
        {"event": "text transport", "log_level": "info", "source": "eu", "because": "b"},
        {
            "event": "heartbeats are off", "log_level": "warning", "source": "eu",
            "reason": "no privilege",
        },
    ]  # fmt: skip


async def test_a_condition_that_ends_and_returns_while_its_notice_waits_is_a_single_notice() -> (
    None
):
    notices = RepeatedNotices()
    with capture_logs() as logs:
        for _ in range(2):
            notices.add(log.warning, "heartbeats are off", "eu", {})
            notices.forget("heartbeats are off", "eu")
        notices.flush()
    assert logs == [{"event": "heartbeats are off", "log_level": "warning", "source": "eu"}]


async def test_the_task_of_a_reload_gathers_notices_for_the_sources_that_join(
    tmp_path: Path,
) -> None:
    """A signal handler has the context of the time before the engine."""
    path = tmp_path / "config.yaml"
    path.write_text("target: {url: postgresql://x@localhost/dw}\n" + SOURCES)
    engine = Engine(*static_mapping.load(path), StopCondition())

    async def reload() -> None:
        await engine.apply(static_mapping.load(path)[1])
        give_notice(log.warning, "heartbeats are off", "eu")

    with capture_logs() as logs:
        await asyncio.create_task(reload(), context=contextvars.Context())
        assert logs == []
