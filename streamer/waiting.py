"""Waits for an event for a limited time."""

import asyncio
import contextlib


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until *event* is set, at most *seconds*; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
