"""Waiting for a condition, with a deadline. No test sleeps anywhere else (tests/test_tidy.py).

Deadlines are long because the machine may be busy: a test that passes never waits for one.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

POLL_SECONDS: Final = 0.02
DEADLINE_SECONDS: Final = 60.0


def polls(seconds: float = DEADLINE_SECONDS, every: float = POLL_SECONDS) -> Iterator[None]:
    """Yield until *seconds* have passed. The caller leaves the loop once its condition holds."""
    deadline = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(every)


def eventually(
    condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS, what: str = ""
) -> Any:
    """Wait until *condition* returns something true; return that."""
    for _ in polls(seconds):
        if found := condition():
            return found
    raise AssertionError(f"not so after {seconds:g} s: {what}")


async def until(
    condition: Callable[[], object | Awaitable[object]],
    what: str = "",
    seconds: float = DEADLINE_SECONDS,
) -> None:
    """Wait until *condition* holds, and let the event loop run meanwhile."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"not so after {seconds:g} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
