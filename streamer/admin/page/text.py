"""Numbers and times as people read them. Pure."""

from datetime import datetime
from typing import Final

NOTHING: Final = "\u2013"
_BYTES: Final = ("B", "kB", "MB", "GB", "TB")


def count(value: float | None) -> str:
    """Write a number with its digits in groups."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}".replace(",", "\u202f")


def size(value: float | None) -> str:
    """Write a number of bytes."""
    if value is None:
        return NOTHING
    for unit in _BYTES:
        if value < 1000 or unit == _BYTES[-1]:
            break
        value /= 1024
    return f"{value:.0f}\u00a0{unit}" if unit == "B" or value >= 100 else f"{value:.1f}\u00a0{unit}"


def duration(seconds: float | None) -> str:
    """Write a length of time: 0.3 s, 12 s, 4 min, 2 h 10 min, 3 d 4 h."""
    if seconds is None:
        return NOTHING
    if seconds < 9.95:
        return f"{seconds:.1f}\u00a0s"
    if seconds < 90:
        return f"{seconds:.0f}\u00a0s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes}\u00a0min"
    if minutes < 48 * 60:
        hours, minutes = divmod(minutes, 60)
        return f"{hours}\u00a0h {minutes}\u00a0min" if minutes else f"{hours}\u00a0h"
    days, hours = divmod(round(minutes / 60), 24)
    return f"{days}\u00a0d {hours}\u00a0h" if hours else f"{days}\u00a0d"


def latency(seconds: float | None) -> str:
    """Write a length of time that is most often far below a second."""
    if seconds is None or seconds >= 0.9995:
        return duration(seconds)
    return f"{seconds * 1000:.0f}\u00a0ms"


def rate(value: float | None) -> str:
    """Write how many a second."""
    if value is None:
        return NOTHING
    return f"{value:.1f}/s" if 0 < value < 10 else f"{count(value)}/s"


def plural(number: int, singular: str, many: str | None = None) -> str:
    """Write a number with its noun."""
    return f"{count(number)} {singular if number == 1 else many or singular + 's'}"


def moment(value: str | datetime | None) -> str:
    """Write a time to the second, in UTC as it is stored."""
    if value is None:
        return NOTHING
    text = value.isoformat() if isinstance(value, datetime) else value
    return f"{text[:10]} {text[11:19]}" if len(text) >= 19 else text


_STATES: Final = {
    "streaming": "good",
    "reachable": "good",
    "ready": "good",
    "copying": "busy",
    "catching_up": "busy",
    "init": "busy",
    "queued": "quiet",
    "starting": "busy",
    "paused": "quiet",
    "stopped": "quiet",
    "not started": "quiet",
    "waiting": "warning",
    "unreachable": "warning",
    "refused": "bad",
    "read-only": "bad",
    "error": "bad",
}


def state_kind(state: str) -> str:
    """Return the colour of a state; the page always shows its word too."""
    return _STATES.get(state, "quiet")


def state_word(state: str) -> str:
    return {"catching_up": "catching up", "init": "waiting to copy"}.get(state, state)
