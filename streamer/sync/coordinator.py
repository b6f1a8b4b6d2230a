"""Copies the relations of one source that need it, and hands each over to the stream.

Relations that need a copy are held (`streamer.apply.lane`): the stream continues for all others,
and keeps the changes of these on disk. The coordinator takes all that wait and copies them in one
round (`streamer.sync.round`); the tables that a round leaves, the next one takes. The coordinator
drops held changes up to the consistent point, because the copy has them.

Dying anywhere leaves a state that tells where to begin again (`streamer.sync.states`).
"""

import asyncio

import structlog

from streamer.apply.lane import MappedRelation
from streamer.backoff import Backoff
from streamer.error_reports import ErrorReport
from streamer.errors import Retry, StreamerError, TargetError
from streamer.mapping.rules import parse_name
from streamer.source.slot import ExportedSnapshot
from streamer.sync.context import CopyContext
from streamer.sync.copy_queue import CopyQueue
from streamer.sync.finish import Finisher
from streamer.sync.reports import CopyReports
from streamer.sync.round import Round
from streamer.sync.stage import drop_leftover_stages
from streamer.target.deferred_indexes import read_deferred_targets, restore_indexes

log = structlog.get_logger()


class SyncCoordinator:
    """Copies relations of one source. `run` belongs to its pipeline; any task may call
    `request`.
    """

    def __init__(self, context: CopyContext) -> None:
        self._context = context
        self._queue = CopyQueue()
        self._reports = CopyReports(context)
        self._finisher = Finisher(context, self._queue)
        self._wanted = asyncio.Event()
        self._snapshot: ExportedSnapshot | None = None

    def request(self, mapped: MappedRelation) -> None:
        """Copy *mapped*, in the next round."""
        self._queue.request(mapped)
        self._wanted.set()

    def ask_again(self, mapped: MappedRelation) -> None:
        """An operator asks for the copy of *mapped* while it is wanted or under way."""
        self._queue.ask_again(mapped)

    def ask_no_more(self, mapped: MappedRelation) -> None:
        """An operator pauses *mapped*: it gets no second copy if the one under way fails."""
        self._queue.ask_no_more(mapped)

    def give_up(self, mapped: MappedRelation) -> None:
        """End the copy of *mapped* that is wanted or under way, without an error."""
        self._queue.give_up(mapped)

    @property
    def is_copying(self) -> bool:
        """Whether any copy is wanted or under way."""
        return not self._queue.is_empty

    def is_at(self, mapped: MappedRelation) -> bool:
        """Whether a copy of *mapped* is wanted or under way."""
        return self._queue.has(mapped)

    def use_snapshot(self, snapshot: ExportedSnapshot) -> None:
        """Use *snapshot* for the next round; it is closed when that is over."""
        self._snapshot = snapshot

    async def run(self) -> None:
        """Copy requested relations until cancelled."""
        backoff = Backoff(first=0.5)
        try:
            await self._restore_leftovers()
            while True:
                await self._wanted.wait()
                batch = self._queue.take()
                self._wanted.clear()
                try:
                    await self._round(batch)
                    backoff = Backoff(first=0.5)
                except StreamerError as exc:
                    await self._end_early(batch, exc, backoff)
                if self._queue.waiting:  # failed copies that an operator asked for again
                    self._wanted.set()
        finally:
            if self._snapshot is not None:
                await self._snapshot.close()

    async def _round(self, batch: list[MappedRelation]) -> None:
        exported, self._snapshot = self._snapshot, None
        copying = Round(self._context, self._queue, self._reports, self._finisher)
        await copying.run(batch, exported)

    async def _end_early(
        self, batch: list[MappedRelation], error: StreamerError, backoff: Backoff
    ) -> None:
        """Request the relations again that a round left, or give them up."""
        source = self._context.source
        self._context.metrics.count_error(error, source.database, source.sid)
        unfinished = self._queue.unfinished(batch)
        if error.retry is not Retry.TIMED:
            for mapped in unfinished:
                await self._finisher.fail(mapped, ErrorReport.of(error))
            return
        backoff.log(log, f'copying from "{source.label}" begins again', error)
        if not isinstance(error, TargetError):
            await self._reports.show_error(unfinished, ErrorReport.of(error))
        await backoff.wait()
        for mapped in unfinished:
            self.request(mapped)

    async def _restore_leftovers(self) -> None:
        """Clear up after a crashed process: restore deferred indexes without a running copy, and
        drop staging tables.
        """
        await self._context.end_former_tasks()
        async with self._context.target() as target:
            await drop_leftover_stages(target, self._context.source_id)
            for name in await read_deferred_targets(target):
                try:
                    await restore_indexes(target, parse_name(name))
                except StreamerError as exc:
                    log.error("an index cannot be restored", target=name, error=str(exc))
