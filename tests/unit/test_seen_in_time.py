"""Every screen shows a server that stops answering within 15 s, by constants and not by luck."""

from streamer.admin.live import events, status_reader
from streamer.runtime import target_health
from streamer.source.stream import feedback

BOUND_SECONDS = 12.0
"""The rest of the 15 s is for the work itself, on a busy machine."""
PAGE_SECONDS = events.CHECK_SECONDS + status_reader.WAIT_SECONDS


def test_a_target_that_stops_answering_is_shown_in_time() -> None:
    known = target_health.CHECK_SECONDS + target_health.ANSWER_SECONDS
    assert known + PAGE_SECONDS < BOUND_SECONDS


def test_a_source_that_stops_answering_is_shown_in_time() -> None:
    assert feedback.SILENT_SECONDS + PAGE_SECONDS < BOUND_SECONDS
    assert 1.5 * feedback.STATUS_SECONDS_MAX < feedback.SILENT_SECONDS
