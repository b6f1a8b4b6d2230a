"""A defect in the work for one table or source ends that work, and never the process."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog

from streamer.backoff import Backoff
from streamer.errors import DefectError, StreamerError

T = TypeVar("T")

log = structlog.get_logger()

AGAIN_SECONDS_MAX: Final = 60.0


@contextmanager
def contained(work: str) -> Iterator[None]:
    """Turn any exception but a StreamerError into a DefectError of *work*."""
    try:
        yield
    except StreamerError:
        raise
    except Exception as raised:
        exc: BaseException = raised
        while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
            exc = exc.exceptions[0]
        if isinstance(exc, StreamerError):
            raise exc from raised
        log.exception("internal error", work=work)
        raise DefectError(f"internal error in {work}: {type(exc).__name__}") from exc


async def apart(work: Coroutine[Any, Any, T], name: str) -> T:
    """Await *work* in a task of its own; a cancellation of the caller counts however it ends.

    Before Python 3.13 asyncio.TaskGroup forgets a cancellation that comes while it ends with an
    error. A caller that retries after errors would go on.
    """
    task = asyncio.create_task(work, name=name)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it is of no interest any more
        raise
    return task.result()


async def enduring(
    work: str,
    run: Callable[[], Coroutine[Any, Any, None]],
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
                await apart(run(), work)
            return
        except StreamerError as exc:
            backoff.log(log, f"{work} ended and restarts", exc)
            if failed is not None:
                await failed(exc)
        await backoff.wait()
