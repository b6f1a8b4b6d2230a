"""Numbers and times in readable form. Pure."""

import re
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup, escape

from streamer.util.quantities import format_bytes, format_duration, format_latency

NO_VALUE: Final = "\u2013"
RECENT_SECONDS: Final = 10
"""Younger events are "just now", because an age of some seconds changes too often to read."""
OLD_SECONDS: Final = 30 * 86400
"""Events of this age have a date instead of an age."""


def count(value: float | None) -> str:
    """Write a number with the digits in groups."""
    if value is None:
        return NO_VALUE
    return f"{value:,.0f}".replace(",", "\u202f")


def grouped(text: str) -> str:
    """Group the digits of the large numbers in a sentence."""
    return re.sub(r"\b\d{4,}\b", lambda digits: count(int(digits[0])), text)


def size(value: float | None) -> str:
    """Write a number of bytes."""
    return NO_VALUE if value is None else _unbroken(format_bytes(value))


def duration(seconds: float | None) -> str:
    """Write a length of time."""
    return NO_VALUE if seconds is None else _unbroken(format_duration(seconds))


def latency(seconds: float | None) -> str:
    """Write a length of time that is most often far below a second."""
    return NO_VALUE if seconds is None else _unbroken(format_latency(seconds))


def _unbroken(text: str) -> str:
    """Return a text without line breaks between a number and its unit."""
    return re.sub(r"(?<=\d) ", "\u00a0", text)


def rate(value: float | None) -> str:
    """Write a rate per second."""
    if value is None:
        return NO_VALUE
    return f"{value:.1f}/s" if 0 < value < 10 else f"{count(value)}/s"


_FORMS: Final = {"latency": latency, "rate": rate, "size": size}


def written(value: float | None, form: str) -> str:
    """Write a value in a form: ``latency``, ``rate`` or ``size``."""
    return _FORMS[form](value)


def plural(number: int, singular: str, many: str | None = None) -> str:
    """Write a number with a noun."""
    return f"{count(number)} {singular if number == 1 else many or singular + 's'}"


def moment(value: str | datetime | None) -> str:
    """Write a time to the second, in UTC, as in the database."""
    if value is None:
        return NO_VALUE
    text = value.isoformat() if isinstance(value, datetime) else value
    return f"{text[:10]} {text[11:19]}" if len(text) >= 19 else text


def ago(value: str | datetime | None, now: datetime) -> Markup:
    """Write a time as an age, with the exact time for a pointer that rests there."""
    if value is None:
        return Markup(NO_VALUE)
    at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    seconds = (now - at).total_seconds()
    text = moment(at)[:10]
    if seconds < RECENT_SECONDS:
        text = "just now"
    elif seconds < OLD_SECONDS:
        text = f"{duration(seconds)} ago"
    markup = Markup('<time datetime="{}" title="{} UTC">{}</time>')
    return markup.format(at.isoformat(), moment(at), text)


def prose(text: str) -> Markup:
    """Write a text with the parts between backticks set as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a name has a backtick
        return escape(text)
    code = Markup("<code>{}</code>")
    return Markup("").join(
        code.format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


def unbroken(line: str) -> Markup:
    """Write a command so that a narrow page breaks the line before an option, not inside."""
    first, *options = re.split(r" (?=--\w)", line)
    option = Markup(' <span class="option">{}</span>')
    return escape(first) + Markup("").join(option.format(text) for text in options)


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
    """Return the colour of a state; the page always shows the word too."""
    return _STATES.get(state, "quiet")


def state_word(state: str) -> str:
    return {"catching_up": "catching up", "init": "waiting to copy"}.get(state, state)
