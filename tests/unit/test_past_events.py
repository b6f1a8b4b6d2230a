"""The filter of past events, and the durations of states."""

from datetime import UTC, datetime, timedelta

import pytest

from streamer.admin.live.past_events import EventFilter, PastEvent, past_event, with_durations

BEGIN = datetime(2026, 1, 2, tzinfo=UTC)


def event(
    second: int,
    state: str,
    *,
    source: str | None = "shop",
    table: str | None = "t",
    error: str = "",
) -> PastEvent:
    subject = "target" if source is None else "source" if table is None else "table"
    at = BEGIN + timedelta(seconds=second)
    return PastEvent(at, source, table, subject, state, error or None)


def test_a_state_lasts_until_the_next_state_of_its_subject() -> None:
    past = [
        event(0, "copying"),
        event(5, "streaming", table=None),
        event(30, "ready"),
        event(40, "differs"),
        event(70, "removed"),
    ]
    timed = list(with_durations(past[::-1], BEGIN + timedelta(seconds=100)))[::-1]
    assert [entry.seconds for entry in timed] == [30, 95, 40, None, None]
    assert [entry.is_present for entry in timed] == [False, True, False, False, False]
    assert [entry.event for entry in timed] == past


def test_an_applied_mapping_has_no_duration() -> None:
    applied = past_event("applied", {}, BEGIN)
    assert applied is not None
    (timed,) = with_durations([applied], BEGIN + timedelta(seconds=9))
    assert (timed.seconds, timed.is_present) == (None, False)


@pytest.mark.parametrize(
    ("kind", "source", "states"),
    [
        ("", "", ["a", "b", "c", "d"]),
        ("errors", "", ["b", "d"]),
        ("table", "", ["a", "b"]),
        ("source", "", ["c"]),
        ("target", "", ["d"]),
        ("mapping", "", []),
        ("", "web", ["b"]),
        ("errors", "shop", []),
    ],
)
def test_a_filter_matches_a_kind_and_a_source(kind: str, source: str, states: list[str]) -> None:
    past = [
        event(0, "a"),
        event(1, "b", source="web", error="x"),
        event(2, "c", table=None),
        event(3, "d", source=None, table=None, error="x"),
    ]
    choice = EventFilter(kind, source)
    assert [entry.state for entry in past if choice.matches(entry)] == states
