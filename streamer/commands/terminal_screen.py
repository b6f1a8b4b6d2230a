"""Output of commands: views that stay until Ctrl-C, and the colors of lag."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def show_until_interrupted(view: Coroutine[Any, Any, None]) -> None:
    """Show a view until the view ends, a signal arrives, or the reader of the output has gone."""
    task = asyncio.create_task(view, name="view")
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
