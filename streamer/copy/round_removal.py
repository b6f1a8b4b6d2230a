"""Removes relations from a running round of copies.

A round may take hours for large tables. A copy that fails or begins again must not wait for the end
of the round. Tasks of the round may still write to the table, so the removal takes three steps:

1. the remaining parts of the relation are withdrawn, so that no task begins such a part;
2. the tasks that write a part of the relation commit or fail;
3. the relation is free for the next round, which repeats a copy after a back-off per relation.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.copied_parts import withdraw_parts
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_queue import CopyQueue
from streamer.copy.stalled_copies import CopyReports
from streamer.errors.error_classes import SOURCE_LOCK_LOST, Retry, StreamerError, SyncAgainError
from streamer.errors.error_reports import ErrorReport
from streamer.util.backoff import Backoff

log = structlog.get_logger()

CHECK_SECONDS: Final = 0.5

T = TypeVar("T")


class RoundRemoval:
    """Removes relations from all rounds of a source."""

    def __init__(
        self,
        context: CopyContext,
        queue: CopyQueue,
        reports: CopyReports,
        wake: Callable[[], None],
    ) -> None:
        """Calls *wake* when a relation is free."""
        self._context = context
        self._queue = queue
        self._reports = reports
        self._wake = wake
        self._tasks: asyncio.TaskGroup | None = None
        self._backoffs: dict[MappedRelation, Backoff] = {}

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Run removals in *tasks*."""
        self._tasks = tasks

    def remove(
        self,
        mapped: MappedRelation,
        again: str | None = None,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Remove *mapped* from its round, if any.

        *again*: the reason why the copy begins again, or None. Calls *then* once no task writes to
        the table.
        """
        batch = self._queue.begin_removal(mapped)
        if batch is not None:
            assert self._tasks is not None, "the task group of the rounds has not started"
            self._tasks.create_task(
                self._remove(mapped, batch, again, then), name=f"leaving {mapped.mapping.source}"
            )

    async def _remove(
        self,
        mapped: MappedRelation,
        batch: list[MappedRelation],
        again: str | None,
        then: Callable[[], Awaitable[None]] | None,
    ) -> None:
        backoff = self._backoffs.setdefault(mapped, Backoff(first=0.5))
        if again is not None:
            await self._report(mapped, SyncAgainError(again), backoff)
        await self._until_free(mapped, batch)
        if then is not None:
            await _persist(then)
        if again is not None:
            await backoff.wait()
        self._queue.removed(mapped, batch, again=again is not None)
        self._wake()

    async def _report(
        self, mapped: MappedRelation, error: SyncAgainError, backoff: Backoff
    ) -> None:
        source = self._context.source
        self._context.metrics.count_error(error, source.database, source.sid)
        backoff.log(log, f'copying "{mapped.mapping.source}" begins again', error)
        try:
            await self._reports.show_error([mapped], ErrorReport.of(error))
        except StreamerError as exc:  # the round gets the error, too
            log.debug("an error cannot be stored", error=str(exc))

    async def _until_free(self, mapped: MappedRelation, batch: list[MappedRelation]) -> None:
        """Withdraw the parts of *mapped*, and wait until no task writes a part.

        At the end of the round of *batch*, all its tasks have ended.
        """
        books = self._context.bookkeeping
        while self._queue.is_taken(mapped, batch):
            if await _persist(partial(withdraw_parts, books, mapped.relation_id)):
                return
            await asyncio.sleep(CHECK_SECONDS)


async def _persist(action: Callable[[], Awaitable[T]]) -> T:
    """Repeat *action* until success. Raises StreamerError for permanent errors."""
    backoff = Backoff()
    while True:
        try:
            return await action()
        except StreamerError as exc:
            if exc.retry is not Retry.TIMED or isinstance(exc, SOURCE_LOCK_LOST):
                raise
            await backoff.wait()
