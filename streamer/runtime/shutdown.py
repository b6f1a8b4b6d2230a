"""Signals: the first asks to stop in order, the second ends at once."""

import asyncio
import os
import signal
from collections.abc import Callable

import structlog

log = structlog.get_logger()


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
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    loop.add_signal_handler(signal.SIGHUP, reload)
