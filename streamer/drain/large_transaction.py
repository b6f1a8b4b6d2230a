"""Applies a lane transaction that needs a separate target transaction, piece by piece.

Such a lane transaction is larger than memory, or changes the definition of a table.

The rest of a large transaction may still arrive meanwhile. A crash, the loss of the source, or a
resync of an affected table rolls back the whole transaction.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from streamer.apply.lanes.copied_range import only_copied
from streamer.apply.lanes.lane import Lane, MappedRelation, TransactionSpool, until_changed
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.lanes.spool import OpenTransactionDiscarded
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.apply.rows.fold import Counts
from streamer.apply.write.commit_counts import count_changes, count_drained, table_labels
from streamer.apply.write.conflicts import ConflictsFound
from streamer.apply.write.planner import Planner, existing_plans
from streamer.decode.pgoutput import Redefinition
from streamer.decode.transactions import Changes, Transaction
from streamer.drain.commit_transactions import (
    add_context,
    commit,
    diverts,
    may_divert,
    release_delete_counts,
    report_quarantine,
)
from streamer.errors.error_classes import Retry, StreamerError, TargetContentionError
from streamer.observability.metrics import Metrics
from streamer.schema_changes.lost_messages import Refused
from streamer.schema_changes.redefinition import Definitions, cut
from streamer.util.failpoints import failpoint

AHEAD_ROWS: Final = 1000


class LargeTransaction:
    """Applies the transaction at the front of *lane* through *writer*.

    *read_bytes*: the approximate size of a piece from the lane's spool. *tried*: records the pieces
    that the drainer tried to write. *apply_lost_definitions*: applies definition changes whose
    messages were lost, if the refused rows need such changes; returns whether the rows did.
    """

    def __init__(
        self,
        lane: Lane,
        writer: QuarantineWriter,
        planner: Planner,
        metrics: Metrics,
        *,
        read_bytes: int,
        tried: Refused,
        apply_lost_definitions: Callable[[], Awaitable[bool]],
    ) -> None:
        self._read_bytes = read_bytes
        self._tried = tried
        self._apply_lost_definitions = apply_lost_definitions
        self._may_lack_definitions = True
        self._lane = lane
        self._writer = writer
        self._planner = planner
        self._metrics = metrics
        self._touched: dict[MappedRelation, Counts] = {}
        """The relations that the pieces of this attempt have changed."""

    @property
    def _spool(self) -> TransactionSpool:
        return self._lane.front

    def _read(self) -> list[LaneTransaction]:
        """Return the next pieces, without changes that an operator skips or that a later chunk
        contains.
        """
        delete_limit, pieces = self._lane.delete_limit, self._spool.read(self._read_bytes)
        return [only_copied(delete_limit.without_skipped(piece)) for piece in pieces]

    async def apply(self, piece: LaneTransaction) -> None:
        """Apply the transaction that begins with *piece*, while pieces arrive."""
        pieces, immediate = [piece], False
        while True:
            try:
                await self._apply_pieces(pieces, immediate=immediate)
                return
            except _ConstraintAtEnd:
                immediate = True
            except _RowsRefused:
                self._may_lack_definitions = await self._apply_lost_definitions()
            pieces = await self._next_piece()

    async def _apply_pieces(self, first: list[LaneTransaction], *, immediate: bool) -> None:
        writer, spool = self._writer, self._spool
        touched = self._touched = {}
        began = time.monotonic()
        definitions = self._definitions = Definitions(writer, self._lane.owner, self._planner)
        (piece, *_) = first
        transaction = piece.transaction
        window: LaneWindow | None = None
        try:
            await writer.begin()
            while True:
                self._tried.add([piece])
                async with self._reading_ahead(piece, touched) as ahead:
                    written = await self._write_piece(piece, window, immediate=immediate)
                    for mapped, changes in written:
                        counts = touched.setdefault(mapped, Counts())
                        if not isinstance(changes.relation, Redefinition):
                            counts.count(changes.payloads)
                    failpoint("drain.piece_written")
                    _check_no_pending_copy(touched, transaction)
                    if ahead is None:
                        break
                    (piece, *_), window = await ahead
            try:
                await writer.transaction.check_constraints()
            except StreamerError as exc:
                if exc.retry is Retry.TIMED or immediate or not any(map(diverts, touched)):
                    raise
                raise _ConstraintAtEnd from exc
            assert piece.end_lsn is not None
            _check_no_pending_copy(touched, transaction)
            skipped = {
                mapped: counts.truncate
                for mapped, counts in touched.items()
                if counts.truncate and mapped.mapping.rule.skip_truncate
            }
            await commit(writer, dict.fromkeys(touched, piece.end_lsn), skipped)
        except (OpenTransactionDiscarded, _PendingCopy):
            await writer.rollback()
            spool.rewind()
            return
        except BaseException as exc:
            spool.rewind()
            definitions.forget_plans()
            if isinstance(exc, (_ConstraintAtEnd, _RowsRefused)):
                await writer.rollback()
            if isinstance(exc, StreamerError):
                add_context(exc, piece)
                await writer.rollback()
                await definitions.after_rollback()
            if isinstance(exc, TargetContentionError) and not definitions.has_applied:
                # A plan that adds a column to the target waited for a lock of this transaction,
                # which has ended. Plan again, so that the next attempt finds the column.
                await self._planner.plans(piece, earlier=touched)
            raise
        self._lane.drained(1)
        release_delete_counts(self._lane, piece, self._metrics)
        report_quarantine(self._lane, writer)
        self._lane.owner.lane_durable(self._lane, [piece])
        for mapped, counts in touched.items():
            count_changes(self._metrics, table_labels(mapped), counts)
        label = self._lane.owner.source.label
        count_drained(self._metrics, touched, label, 1, time.monotonic() - began)

    @contextlib.asynccontextmanager
    async def _reading_ahead(
        self, piece: LaneTransaction, touched: dict[MappedRelation, Counts]
    ) -> AsyncIterator["asyncio.Task[tuple[list[LaneTransaction], LaneWindow | None]] | None"]:
        """Read the piece after *piece*, if any, while the server writes *piece*.

        So the target and this process work at the same time.
        """
        if piece.end_lsn is not None:
            yield None
            return
        reading = self._read_ahead(piece.transaction, touched)
        task = asyncio.create_task(reading, name=f"next of {self._lane.name}")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _read_ahead(
        self, transaction: Transaction, touched: dict[MappedRelation, Counts]
    ) -> tuple[list[LaneTransaction], LaneWindow | None]:
        """Return the next pieces, and the window of the first if it can be folded in advance."""
        while not (transactions := self._read()):
            await until_changed(self._lane, None)
            _check_no_pending_copy(touched, transaction)
        plans = existing_plans(transactions[0])
        if plans is None or may_divert(transactions[0]):
            return transactions, None
        window = LaneWindow(self._lane)
        window.add(transactions[0], plans, [[] for _ in plans])
        for mapped, changes, plan in window.parts[0]:
            for start in range(0, len(changes.payloads), AHEAD_ROWS):
                payloads = changes.payloads[start : start + AHEAD_ROWS]
                relation = window.relations[mapped]
                if plan.metadata is None:
                    relation.add(plan, payloads)
                else:
                    relation.add_by_transaction(plan, [(transactions[0].transaction, payloads)])
                await asyncio.sleep(0)  # the write in progress goes first
        return transactions, window

    async def _write_piece(
        self, piece: LaneTransaction, window: LaneWindow | None, *, immediate: bool
    ) -> list[tuple[MappedRelation, Changes]]:
        """Write a piece, in *window* if the window is already planned; return the relations with
        their changes, including changes that went into quarantine.
        """
        if not piece.redefines:
            return await self._write_rows(piece, window, immediate=immediate)
        written = []
        for part in cut(piece):
            if part.redefines:
                concerned = await self._definitions.apply(part)
                written += [item for item in part.changes if item[0] in concerned]
            else:
                written += await self._write_rows(part, None, immediate=immediate)
        return written

    async def _write_rows(
        self, piece: LaneTransaction, window: LaneWindow | None, *, immediate: bool
    ) -> list[tuple[MappedRelation, Changes]]:
        while True:
            try:
                return await self._try_rows(piece, window, immediate=immediate)
            except ConflictsFound:
                await self._writer.rollback_to_savepoint()
                window = None

    async def _try_rows(
        self, piece: LaneTransaction, window: LaneWindow | None, *, immediate: bool
    ) -> list[tuple[MappedRelation, Changes]]:
        writer = self._writer
        await writer.savepoint()
        if window is None or any(mapped.plan is not plan for mapped, _, plan in window.parts[0]):
            window = await self._piece_window(piece)
        try:
            if immediate:
                await writer.write_in_order(window, 0, 1, immediate=True)
            else:
                await writer.write(window)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or immediate:
                raise
            # A lost definition change may make the rows valid, so try that before quarantine.
            if self._may_lack_definitions and may_divert(piece):
                raise _RowsRefused from exc
            await writer.rollback_to_savepoint()
            self._planner.invalidate(piece)
            window = await self._piece_window(piece)
            await writer.write_in_order(window, 0, 1)
        await writer.transaction.release_savepoint()
        return [(mapped, changes) for mapped, changes, _ in window.parts[0]]

    async def _piece_window(self, piece: LaneTransaction) -> LaneWindow:
        planner = self._planner
        if self._definitions.has_applied:  # other sessions do not see the definitions yet
            planner = planner.in_transaction(self._writer.target)
        plans = await planner.plans(piece, earlier=self._touched)
        self._writer.start_window()
        window = LaneWindow(self._lane)
        window.add(piece, plans, await self._writer.divert_followers(piece, plans))
        return window

    async def _next_piece(self) -> list[LaneTransaction]:
        while not (transactions := self._read()):
            await until_changed(self._lane, None)
        return transactions


class _PendingCopy(Exception):  # not an error: a copy includes part of the transaction
    """An operator requested a resync while the drainer wrote a large transaction."""


def _check_no_pending_copy(touched: Iterable[MappedRelation], transaction: Transaction) -> None:
    """Give up a large transaction that has written to a relation with a pending copy. Otherwise the
    drainer would skip later changes of the relation, and readers would see a part of the
    transaction.
    """
    if any(mapped.has(transaction) for mapped in touched):
        raise _PendingCopy


class _RowsRefused(Exception):  # not an error: a definition change may be lost
    """The target refuses rows that it may accept after a lost definition change is applied.

    Without such a change, the rows may go into quarantine.
    """


class _ConstraintAtEnd(Exception):  # not an error: the large transaction is written in exact order
    """A deferred constraint refuses a large transaction, and does not name the row."""
