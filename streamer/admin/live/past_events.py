"""Past changes of states for the events page: their kinds, and how long each state lasted. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from streamer.observability.logs import redact

ERRORS: Final = "errors"
KINDS: Final = (ERRORS, "source", "table", "target", "mapping")
"""The filters of the events page: events with an error, or all events of a kind of subject."""
_DIFFERS: Final = "differs"
_APPLIED: Final = "applied"
_REMOVED: Final = "removed"


@dataclass(frozen=True, slots=True)
class PastEvent:
    """A change of a state, or of the mapping. ``source``: None for the target and the mapping."""

    at: datetime
    source: str | None
    table: str | None
    subject: str
    state: str
    error: str | None

    @property
    def is_state(self) -> bool:
        """Whether the subject entered a state, which ends the former state."""
        return self.state not in (_DIFFERS, _APPLIED)


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event with the duration of its state: None for an event without a duration.

    ``is_present``: whether the state still lasts.
    """

    event: PastEvent
    seconds: float | None
    is_present: bool


@dataclass(frozen=True, slots=True)
class EventFilter:
    """The events to show. Empty fields match all; ``source``: a label."""

    kind: str = ""
    source: str = ""

    def matches(self, event: PastEvent) -> bool:
        is_error = self.kind == ERRORS and event.error is not None
        has_kind = is_error or self.kind in ("", event.subject)
        return has_kind and self.source in ("", event.source)


def past_event(name: str, data: dict[str, Any], at: datetime) -> PastEvent | None:
    """Return an event for the events page; None for events that occur every second."""
    if name == "state":
        subject = "table" if data["table"] else "source"
        return PastEvent(at, data["source"], data["table"], subject, data["state"], data["error"])
    if name == "verified":
        if not data["differing_rows"]:
            return None  # the table is equal to its source
        difference = f"{data['differing_rows']} rows differ from the source"
        return PastEvent(at, data["source"], data["table"], "table", _DIFFERS, difference)
    if name == "target":
        error = redact(data["error"]) if data.get("error") else None
        return PastEvent(at, None, None, "target", data["state"], error)
    if name == "applied":
        return PastEvent(at, None, None, "mapping", _APPLIED, None)
    return None


def with_durations(past: Sequence[PastEvent], now: datetime) -> Iterator[TimedEvent]:
    """Yield the events of *past*, the newest first, with the durations of their states."""
    ends: dict[tuple[str, str | None, str | None], datetime] = {}
    for event in past:
        subject = (event.subject, event.source, event.table)
        end = ends.get(subject)
        has_duration = event.is_state and event.state != _REMOVED
        seconds = ((end or now) - event.at).total_seconds() if has_duration else None
        yield TimedEvent(event, seconds, has_duration and end is None)
        if event.is_state:
            ends[subject] = event.at
