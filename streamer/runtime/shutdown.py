"""Signals: the first requests an orderly stop, the second ends the process at once.

An orderly stop has a time limit: a server that does not answer must not delay the stop. An abrupt
end loses no change, because streamer acknowledges durable changes only.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, TypeVar

import structlog

from streamer.errors.error_classes import StreamerError

log = structlog.get_logger()

Result = TypeVar("Result")

EXIT_SECONDS: Final = 9.7


def stop_on_signals(stop: Callable[[], None], reload: Callable[[], None]) -> Callable[[str], None]:
    """Call *stop* at the first SIGTERM or SIGINT, exit at the second; call *reload* at SIGHUP.

    The returned function acts like a first signal, for the reason in its argument. The function has
    no effect on a process that is already stopping.
    """
    loop = asyncio.get_running_loop()
    is_stopping = False

    def begin(reason: str) -> None:
        nonlocal is_stopping
        if is_stopping:
            return
        is_stopping = True
        log.info("stopping", signal=reason)
        loop.call_later(EXIT_SECONDS, os._exit, 0)
        stop()

    signalled = False

    def handle(number: signal.Signals) -> None:
        nonlocal signalled
        if signalled:
            os._exit(128 + number)
        signalled = True
        begin(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
    return begin


async def finishes_before(
    stop: asyncio.Event, work: Coroutine[None, None, Result]
) -> Result | None:
    """Return the result of *work*; None if *stop* is set before, which cancels *work*."""
    doing = asyncio.create_task(work, name="until stopped")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])
    return None if doing.cancelled() else doing.result()


async def endless(run: Callable[[], Awaitable[None]], name: str) -> None:
    """Run a task that must not return: its return is a defect."""
    await run()
    raise StreamerError(f"the {name} task ended by itself")
