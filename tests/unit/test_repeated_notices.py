"""A notice that many sources give comes once, with all of them."""

import asyncio

import pytest
import structlog
from structlog.testing import capture_logs

from streamer.util import repeated_notices
from streamer.util.repeated_notices import end_notice, gather_notices, give_notice
from tests.support.waiting import until

log = structlog.get_logger()


async def test_sources_share_a_line_and_no_attempt_repeats_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeated_notices, "GATHER_SECONDS", 0.01)
    with capture_logs() as logs:
        notices = gather_notices()
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
