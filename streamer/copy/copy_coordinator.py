"""Copies the relations of one source that need a copy, and switches each to streaming.

Relations that need a copy are held (`streamer.apply.lanes.lane`): the stream continues for all
tables, and keeps the changes of held relations on disk. The coordinator copies all waiting
relations in one round (`streamer.copy.copy_round`). A copy that is requested while a round runs
begins in a second round, which does not wait for the first. A table whose copy fails gets a second
round, too (`streamer.copy.round_removal`). The coordinator drops held changes up to the consistent
point, because the copy contains these.

A round begins when the source gets a turn (`streamer.copy.source_turns`).

After a crash at any point, the state says where to begin again (`streamer.control.table_state`).
"""

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.deferred_indexes import read_deferred_targets, restore_indexes
from streamer.bookkeeping.sources import set_source
from streamer.control.table_state import TableState
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_queue import CopyQueue
from streamer.copy.copy_round import Round
from streamer.copy.finish_copies import Finisher
from streamer.copy.round_removal import RoundRemoval
from streamer.copy.source_turns import CopyingSource, CopyTurn
from streamer.copy.staging_tables import drop_leftover_stages, find_leftover_stages
from streamer.copy.stalled_copies import CopyReports
from streamer.errors.error_classes import Retry, StreamerError, TargetError, TargetMovedError
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.mapping.relation_names import parse_name
from streamer.source.slot_and_publications.slot import ExportedSnapshot
from streamer.util.backoff import Backoff

log = structlog.get_logger()

ROUNDS_MAX: Final = 4
"""The number of rounds of a source that run at the same time. Each round holds a snapshot."""
GATHER_SECONDS: Final = 0.5
"""The time for which a round, except the first, waits for more tables to share its snapshot."""


class SyncCoordinator:
    """Copies relations of one source. The pipeline calls `run`; any task may call `request`."""

    def __init__(self, context: CopyContext) -> None:
        self._context = context
        self._queue = CopyQueue(partial(context.events.step, event=TableState.snapshot_ended))
        self._reports = CopyReports(context)
        self._wake_up = asyncio.Event()
        self._leaving = RoundRemoval(context, self._queue, self._reports, self._wake_up.set)
        self._finisher = Finisher(context, self._queue, self.request, self._leaving)
        self._snapshot: ExportedSnapshot | None = None
        self._turn: CopyTurn | None = None
        self._first: set[MappedRelation] = set()
        """Relations whose copy was requested when the stream began."""
        self._rounds: set[int] = set()
        """The numbers of the rounds that run."""
        self._round_count = 0
        self._backoff = Backoff(first=0.5)

    def request(self, mapped: MappedRelation, *, is_first: bool = False) -> None:
        """Copy *mapped*, in the next round. *is_first*: see `CopyingSource`."""
        self._queue.request(mapped)
        if is_first:
            self._first.add(mapped)
        self._wake_up.set()

    def request_again(self, mapped: MappedRelation) -> None:
        """Record an operator's request while a copy of *mapped* waits or is in progress."""
        self._queue.request_again(mapped)

    def cancel_request(self, mapped: MappedRelation) -> None:
        """Cancel the second copy of *mapped*, which an operator pauses."""
        self._queue.cancel_request(mapped)

    def give_up(self, mapped: MappedRelation) -> None:
        """End the waiting or running copy of *mapped*, without an error."""
        self._queue.give_up(mapped)

    @property
    def is_copying(self) -> bool:
        """Whether any copy is requested or in progress."""
        return not self._queue.is_empty

    def is_at(self, mapped: MappedRelation) -> bool:
        """Whether a copy of *mapped* is requested or in progress."""
        return self._queue.has(mapped)

    def use_snapshot(self, snapshot: ExportedSnapshot) -> None:
        """Use *snapshot* for the next round, which closes the snapshot."""
        self._snapshot = snapshot

    def use_turn(self, turn: CopyTurn) -> None:
        """Use *turn* for the next round, which ends the turn."""
        self._turn = turn

    async def close(self) -> None:
        """Release a snapshot and a turn that no round has taken."""
        if self._turn is not None:
            self._turn.end()
            self._turn = None
        await self._close_snapshot()

    async def _close_snapshot(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            await snapshot.close()

    async def run(self) -> None:
        """Copy requested relations until cancelled."""
        try:
            await self._restore_leftovers()
            async with asyncio.TaskGroup() as rounds:
                self._leaving.begin(rounds)
                while True:
                    await self._wake_up.wait()
                    if self._round_count:
                        await asyncio.sleep(GATHER_SECONDS)
                    self._wake_up.clear()
                    if len(self._rounds) < ROUNDS_MAX and (batch := self._queue.next_batch()):
                        self._round_count += 1
                        self._rounds.add(self._round_count)
                        rounds.create_task(
                            self._copy(batch, self._round_count),
                            name=f"copies {self._context.label}",
                        )
                        if self._queue.can_begin:
                            self._wake_up.set()
                    elif not self.is_copying:  # all copies were given up
                        await self.close()
        finally:
            await self.close()

    async def _copy(self, batch: list[MappedRelation], number: int) -> None:
        """Copy *batch* in the round *number*."""
        try:
            await self._round(batch, number)
            self._backoff = Backoff(first=0.5)
        except StreamerError as exc:
            await self._end_early(batch, exc)
        finally:
            self._rounds.discard(number)
            self._queue.end(batch)
            if self._queue.can_begin:  # copies failed, or more rounds wait than can run
                self._wake_up.set()
        if not self.is_copying:  # rounds that only mark tables as in sync take no snapshot
            await self.close()
        with contextlib.suppress(StreamerError):  # the next round stores the rate
            await self._share_rate()

    async def _round(self, batch: list[MappedRelation], number: int) -> None:
        turn: CopyTurn | None = None
        exported: ExportedSnapshot | None = None
        try:
            if not batch[0].state.is_to_mark_synced:
                turn, self._turn = self._turn, None
                turn = turn or await self._acquire_turn(batch)
                await self._share_rate()
                if batch[0].state.follows:  # the target may contain later changes by now
                    await self._close_snapshot()
                exported, self._snapshot = self._snapshot, None
            context = replace(self._context, round_number=number)
            copying = Round(context, self._queue, self._reports, self._finisher)
            await copying.run(batch, exported, self._rounds)
        finally:
            if turn is not None:
                turn.end()

    async def _acquire_turn(self, batch: list[MappedRelation]) -> CopyTurn:
        context, source = self._context, self._context.source
        has_waited = False

        async def tell(reason: str) -> None:
            nonlocal has_waited
            has_waited = True
            await self._close_snapshot()  # an open snapshot would keep dead rows at the source
            await self._reports.show_wait(batch, TableWait(reason, is_automatic=True))

        is_first = not self._first.isdisjoint(batch)
        copying = CopyingSource(source.label, context.server.identity, is_first)
        size = sum(mapped.size_bytes for mapped in batch)
        turn = await context.turns.acquire(copying, source.priority, size, tell)
        if has_waited:
            try:
                await self._reports.show_wait(batch, None)
            except BaseException:
                turn.end()
                raise
        return turn

    async def _share_rate(self) -> None:
        """Divide `sync.rows_per_second` among the rounds; parts in progress keep their rate."""
        context = self._context
        if context.settings.rows_per_second is not None:
            rounds = max(1, len(self._rounds))
            await set_source(context.bookkeeping, context.source_id, copy_rounds=rounds)

    async def _end_early(self, batch: list[MappedRelation], error: StreamerError) -> None:
        """Request the unfinished relations of a round again, or give up their copies."""
        source = self._context.source
        self._context.metrics.count_error(error, source.database, source.sid)
        if isinstance(error, TargetMovedError):
            self._context.events.source_failed(error)
            return
        unfinished = self._queue.unfinished(batch)
        if error.retry is not Retry.TIMED:
            await self._finisher.advise(error, unfinished)
            for mapped in unfinished:
                await self._finisher.fail(mapped, ErrorReport.of(error))
            return
        self._backoff.log(log, f'copying from "{source.label}" begins again', error)
        if not isinstance(error, TargetError):
            await self._reports.show_error(unfinished, ErrorReport.of(error))
        await self._backoff.wait()
        for mapped in unfinished:
            self.request(mapped)

    async def _restore_leftovers(self) -> None:
        """Clean up after a crashed process: drop staging tables, and create deferred indexes for
        which no copy runs.
        """
        await self._context.end_former_tasks([])
        async with self._context.bookkeeping.connection() as connection:
            stages = await find_leftover_stages(connection, self._context.source_id)
            deferred = await read_deferred_targets(connection)
        if not stages and not deferred:
            return
        async with self._context.target() as target:
            await drop_leftover_stages(target, stages)
            for name in deferred:
                try:
                    await restore_indexes(target, parse_name(name), is_start=True)
                except StreamerError as exc:
                    log.error("an index cannot be restored", target=name, error=str(exc))
