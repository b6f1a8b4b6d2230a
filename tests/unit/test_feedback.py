"""How often streamer asks a source for a reply, and when streamer gives up the source."""

import time

import pytest

from streamer.errors.error_classes import SourceConnectionError
from streamer.source.stream.feedback import SILENT_SECONDS, FeedbackTimes


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    return 1000.0


@pytest.mark.parametrize("wal_sender_timeout", [0.0, 2.0, 60.0, 3600.0])
def test_a_source_is_asked_for_a_reply_before_it_counts_as_silent(
    now: float, wal_sender_timeout: float
) -> None:
    asking = FeedbackTimes.of("shop", wal_sender_timeout)
    assert not asking.should_request_reply(now, is_reading=True)
    # At the latest two updates after the last message: before and after the limit.
    assert 1.5 * asking.interval < SILENT_SECONDS
    assert asking.should_request_reply(now - asking.interval, is_reading=True)
    assert not wal_sender_timeout or asking.interval <= wal_sender_timeout / 3


def test_a_source_that_never_replies_is_given_up_unless_we_did_not_listen(now: float) -> None:
    asking = FeedbackTimes.of("shop", 60.0)
    assert asking.should_request_reply(now - 61, is_reading=False)
    with pytest.raises(SourceConnectionError, match="has not answered for 61 s"):
        asking.should_request_reply(now - 61, is_reading=True)
