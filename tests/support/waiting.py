"""Waiting for a condition, with a deadline. No test sleeps anywhere else (tests/test_tidy.py).

Deadlines are long because the machine may be busy: a passing test never reaches a deadline.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from psycopg.errors import LockNotAvailable

POLL_SECONDS: Final = 0.02
POLL_SECONDS_MAX: Final = 0.25
DEADLINE_SECONDS: Final = 60.0

LOCK_SECONDS: Final = ContextVar("LOCK_SECONDS", default=10.0)
"""How long a statement of a test that stops the event loop waits for a lock.

The engine of most tests runs in that loop, and may hold the lock until the loop goes on.
"""
_LOCK_SECONDS_OF_A_LOOK: Final = 0.2


def _pause(looked: float, least: float) -> float:
    """Return how long to wait after a check that took *looked* seconds, at least *least* seconds.

    A check may connect to both servers, so a test spends a tenth of its time on checks at most.
    """
    return max(least, min(POLL_SECONDS_MAX, 9 * looked))


def polls(seconds: float = DEADLINE_SECONDS, every: float = POLL_SECONDS) -> Iterator[None]:
    """Yield until *seconds* have passed, at most once in *every* seconds. The caller leaves the
    loop once the condition holds.
    """
    began = time.monotonic()
    while True:
        asked_at = time.monotonic()
        yield
        now = time.monotonic()
        if now > began + seconds:
            return
        time.sleep(_pause(now - asked_at, every))


def eventually(
    condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS, what: str = ""
) -> Any:
    """Wait until *condition* returns a true value; return the value."""
    for _ in polls(seconds):
        if answer := condition():
            return answer
    raise AssertionError(f"not so after {seconds:g} s: {what}")


async def until(
    condition: Callable[[], object | Awaitable[object]],
    what: str = "",
    seconds: float = DEADLINE_SECONDS,
) -> None:
    """Wait until *condition* holds, and let the event loop run meanwhile."""
    began = time.monotonic()
    while True:
        asked_at = time.monotonic()
        waits = LOCK_SECONDS.set(_LOCK_SECONDS_OF_A_LOOK)
        try:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
        except LockNotAvailable:
            answer = False
        finally:
            LOCK_SECONDS.reset(waits)
        if answer:
            return
        now = time.monotonic()
        assert now < began + seconds, f"not so after {seconds:g} s: {what}"
        await asyncio.sleep(_pause(now - asked_at, POLL_SECONDS))
