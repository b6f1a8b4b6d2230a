"""Waits for an event for a limited time, and for the end of a blocking call."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_threads: Final = ThreadPoolExecutor(32, thread_name_prefix="files")


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until *event* is set, at most *seconds*; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call with a lasting effect, such as a new file.

    asyncio cannot cancel a thread. A cancellation waits until the call has ended, so that the
    caller can undo the effect, and so that no file appears later. The threads are separate from
    asyncio's threads, in which look-ups of names may hang.
    """
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    task = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(_threads, call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
