"""Output of commands: numbers for readers, and views that stay until Ctrl-C."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def until_interrupted(showing: Coroutine[Any, Any, None]) -> None:
    """Show a view until it ends, a signal arrives, or its reader has gone: each is an orderly
    end.
    """
    task = asyncio.create_task(showing, name="showing")
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except (asyncio.CancelledError, BrokenPipeError):
        return
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def lag_style(seconds: float) -> str:
    return "green" if seconds < 1 else "yellow" if seconds < 10 else "red"


def format_seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TB"
