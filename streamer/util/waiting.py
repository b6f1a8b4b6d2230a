"""Waits for an event for a limited time, for the end of a blocking call, and for more work."""

import asyncio
import contextlib
import contextvars
import threading
import time
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


async def block_event_loop(seconds: float) -> None:
    """Block the event loop, with all tasks, for *seconds* at the end of this iteration.

    A wake-up costs more than most work that follows. A single wake-up then handles all that arrived
    meanwhile: data of sources, and answers of the target. Calls in the same iteration overlap.
    """
    asyncio.get_running_loop().call_soon(_sleep_until, time.monotonic() + seconds)
    await asyncio.sleep(0)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


async def wait_while_idle(
    event: asyncio.Event, seconds: float, is_idle: Callable[[], bool]
) -> bool:
    """Wait until *event* is set, or until *is_idle*, called every *seconds*, returns False.

    Return whether the event is set. A check of an idle object wakes no task, because a process may
    have a thousand sources.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:

            def check() -> None:
                nonlocal timer
                if is_idle():
                    timer = loop.call_later(seconds, check)
                else:
                    limit.reschedule(loop.time())

            timer = loop.call_later(seconds, check)
            try:
                await event.wait()
            finally:
                timer.cancel()
    return event.is_set()


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a blocking call without a lasting effect. A cancellation abandons the thread, and
    the process can end before the thread does.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()
    results: list[T] = []
    errors: list[Exception] = []

    def end() -> None:
        if ended.done():
            return
        if errors:
            ended.set_exception(errors[0])
        else:
            ended.set_result(results[0])

    def run() -> None:
        try:
            results.append(function())
        except Exception as exc:  # noqa: BLE001 the caller gets the error
            errors.append(exc)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), daemon=True).start()
    return await ended


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call with a lasting effect, such as a new file.

    asyncio cannot cancel a thread. A cancellation waits until the call ends, so that the caller can
    undo the effect, and so that no file appears later. The threads are separate from asyncio's
    threads, in which look-ups of names may hang.
    """
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    task = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(_threads, call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
