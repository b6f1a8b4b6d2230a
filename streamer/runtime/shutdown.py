"""Signals: the first asks to stop in order, the second ends at once.

Stopping in order is bounded: a server that answers nobody must not keep us. Ending abruptly loses
nothing, because what is not durable was never acknowledged.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Final

import structlog

log = structlog.get_logger()

EXIT_SECONDS: Final = 9.7


def stop_on_signals(stop: Callable[[], None], reload: Callable[[], None]) -> None:
    """Call *stop* at the first SIGTERM or SIGINT, exit at the second; call *reload* at SIGHUP."""
    loop = asyncio.get_running_loop()
    asked = False

    def handle(number: signal.Signals) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        log.info("stopping", signal=number.name)
        loop.call_later(EXIT_SECONDS, os._exit, 0)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
