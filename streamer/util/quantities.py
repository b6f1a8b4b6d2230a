"""Formats bytes and durations for people. Pure."""

from typing import Final

_BYTES: Final = ("B", "kB", "MB", "GB", "TB")


def format_bytes(value: float) -> str:
    """Return a number of bytes with a unit, in at most three digits."""
    for unit in _BYTES:
        if value < 1000 or unit == _BYTES[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """Return a length of time: 0.3 s, 12 s, 4 min, 2 h 10 min, 3 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(minutes / 60), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def format_latency(seconds: float) -> str:
    """Return a length of time that is usually far below a second."""
    return format_duration(seconds) if seconds >= 0.9995 else f"{seconds * 1000:.0f} ms"
