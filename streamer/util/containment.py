"""Contains defects: a defect in the work for a table or source ends that work, but never the
process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import structlog

from streamer.errors.error_classes import DefectError, StreamerError
from streamer.util.backoff import Backoff

T = TypeVar("T")

log = structlog.get_logger()

AGAIN_SECONDS_MAX: Final = 60.0
END_SECONDS: Final = 60.0
"""The time in which cancelled tasks must end."""


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


@contextmanager
def ending(work: str, tasks: Collection["asyncio.Task[Any]"]) -> Iterator[None]:
    """Wait in this block for the end of *tasks*, which are cancelled.

    A task that has not ended after `END_SECONDS` is a defect: the log names the task and the place,
    and the task is cancelled again. A library may have lost the cancellation, as in `apart`.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def check() -> None:
        for task in tasks:
            if not task.done():
                places = [f"{f.f_code.co_filename}:{f.f_lineno}" for f in task.get_stack(limit=1)]
                log.error(
                    "a task has not ended after its cancellation",
                    work=work,
                    task=task.get_name(),
                    places=places,
                )
                task.cancel()
        timers[:] = [loop.call_later(END_SECONDS, check)]

    timers.append(loop.call_later(END_SECONDS, check))
    try:
        yield
    finally:
        timers[0].cancel()


async def apart(work: Coroutine[Any, Any, T], name: str) -> T:
    """Await *work* in a separate task, so that no end of *work* can lose a cancellation of the
    caller.

    Before Python 3.13 asyncio.TaskGroup forgets a cancellation that comes while the group ends with
    an error. A caller that retries after errors would continue.
    """
    task = asyncio.create_task(work, name=name)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark the error as retrieved
        raise
    return task.result()


async def enduring(
    work: str,
    run: Callable[[], Coroutine[Any, Any, None]],
    failed: Callable[[StreamerError], Awaitable[None]] | None = None,
) -> None:
    """Run *work* that all sources need; after an error, restart the work with a back-off.

    *failed* runs before each restart, and informs the tasks that rely on the failed work.
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


class EnduringTasks(asyncio.TaskGroup):
    """Tasks that run by `enduring`, and end with the block of the group."""

    def __init__(self) -> None:
        super().__init__()
        self._enduring: list[asyncio.Task[None]] = []

    def start(
        self,
        work: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        failed: Callable[[StreamerError], Awaitable[None]] | None = None,
    ) -> "asyncio.Task[None]":
        """Start a task with the arguments of `enduring`."""
        self._enduring.append(self.create_task(enduring(work, run, failed), name=work))
        return self._enduring[-1]

    async def __aexit__(self, *exit_of_block: Any) -> None:
        if exit_of_block[0] is None:  # the group itself cancels the tasks of a failed block
            for task in self._enduring:
                if not task.cancelling():
                    task.cancel()
        await super().__aexit__(*exit_of_block)
