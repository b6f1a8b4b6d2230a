"""A defect in the work for one table or source ends that work, and never the process."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from streamer.backoff import Backoff
from streamer.errors import DefectError, StreamerError

log = structlog.get_logger()

AGAIN_SECONDS_MAX: Final = 60.0


@contextmanager
def contained(work: str) -> Iterator[None]:
    """Turn any exception but a StreamerError into a DefectError of *work*.

    If the task is being cancelled, raise CancelledError instead: the caller would go on. Before
    Python 3.13 asyncio.TaskGroup forgets a cancellation that comes while it ends with an error.
    """
    try:
        yield
    except Exception as raised:
        if _is_cancelled():
            raise asyncio.CancelledError from raised
        if isinstance(raised, StreamerError):
            raise
        exc: BaseException = raised
        while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
            exc = exc.exceptions[0]
        if isinstance(exc, StreamerError):
            raise exc from raised
        log.exception("internal error", work=work)
        raise DefectError(f"internal error in {work}: {type(exc).__name__}") from exc


def _is_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0


async def enduring(
    work: str,
    run: Callable[[], Awaitable[None]],
    failed: Callable[[StreamerError], Awaitable[None]] | None = None,
) -> None:
    """Run *work* that all sources need; after an error, restart it with a back-off.

    *failed* runs before each restart. It informs the parts that rely on the work of the failed
    attempt.
    """
    backoff = Backoff(first=1.0, most=AGAIN_SECONDS_MAX)
    while True:
        try:
            with contained(work):
                await run()
            return
        except StreamerError as exc:
            backoff.log(log, f"{work} ended and restarts", exc)
            if failed is not None:
                await failed(exc)
        await backoff.wait()
