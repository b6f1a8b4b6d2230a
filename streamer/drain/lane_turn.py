"""A lane's use of a connection of the drainer: requests, windows and large transactions."""

import time
from functools import partial
from itertools import takewhile
from typing import Final

from streamer.apply.lanes.copied_range import only_copied
from streamer.apply.lanes.lane import Lane, MappedRelation, until_changed
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.lanes.spool import OpenTransactionDiscarded
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.apply.quarantine.retry_and_drop import fulfil
from streamer.apply.rows.fold import Counts
from streamer.apply.write.commit_counts import (
    count_changes,
    count_drained,
    skipped_truncates,
    table_labels,
)
from streamer.apply.write.conflicts import ConflictsFound
from streamer.apply.write.planner import Planner
from streamer.bookkeeping.relation_definitions import read_former_labels
from streamer.drain.commit_transactions import (
    add_context,
    commit,
    may_divert,
    release_delete_counts,
    report_quarantine,
)
from streamer.drain.exact_order import ExactOrder
from streamer.drain.large_transaction import LargeTransaction
from streamer.errors.error_classes import (
    DefinitionStopError,
    ProtocolError,
    Retry,
    StreamerError,
)
from streamer.observability.metrics import Metrics
from streamer.schema_changes.lost_messages import Refused, apply_lost_definitions
from streamer.target.missing_grants import advise_grants

READ_BYTES: Final = 4 * 1024 * 1024


class Turn:
    """A lane's use of a connection."""

    def __init__(
        self,
        lane: Lane,
        writer: QuarantineWriter,
        planner: Planner,
        metrics: Metrics,
    ) -> None:
        self._lane = lane
        self._writer = writer
        self._planner = planner
        self._metrics = metrics

    async def apply_next(self) -> bool:
        """Fulfil a request, or apply the next transactions; return False if there are none."""
        if self._lane.requests:
            await self._fulfil()
            return True
        try:
            transactions = self._lane.read_held(READ_BYTES)
        except OpenTransactionDiscarded:
            self._lane.front.rewind()
            return True
        if not transactions:
            return False
        try:
            allowed = await self._before_delete_limit(transactions)
        except StreamerError:  # the next turn takes the same transactions
            self._lane.front.rewind()
            raise
        if not allowed:
            self._lane.front.rewind()
            return True
        refused = Refused()
        try:
            await self._apply_some(allowed, refused)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED or isinstance(exc, DefinitionStopError):
                raise
            if not (
                await self._expects_former_labels(refused)
                or await self._apply_lost_definitions(refused)
            ):
                mappings = [mapped.mapping for mapped in refused.relations]
                await advise_grants(exc, self._writer.target, mappings)
                raise
        return True

    async def _apply_lost_definitions(self, refused: Refused) -> bool:
        """Apply definition changes without a message; return whether *refused* needed any."""
        return await apply_lost_definitions(
            self._writer.target, self._lane.owner, self._planner, refused
        )

    async def _apply_some(self, transactions: list[LaneTransaction], refused: Refused) -> None:
        """Apply finished transactions, or a large transaction; put failed transactions into
        *refused*.
        """
        if _is_alone(transactions[0]):
            large = LargeTransaction(
                self._lane,
                self._writer,
                self._planner,
                self._metrics,
                read_bytes=READ_BYTES,
                tried=refused,
                apply_lost_definitions=partial(self._apply_lost_definitions, refused),
            )
            await large.apply(transactions[0])
        else:
            finished = list(
                takewhile(lambda lane_transaction: not _is_alone(lane_transaction), transactions)
            )
            await self._apply(finished, refused)

    async def _expects_former_labels(self, refused: Refused) -> bool:
        """Whether to try again, with the former labels of enums that the source renamed.

        See `streamer.decode.former_labels`. Former labels stay expected until the lane is live.
        """
        strict = {m.relation_id: m for m in refused.relations if not m.former_labels}
        labels = await read_former_labels(self._writer.target, list(strict)) if strict else {}
        for relation_id, columns in labels.items():
            strict[relation_id].former_labels, strict[relation_id].plan = columns, None
        return any(labels.values())

    async def _before_delete_limit(
        self, transactions: list[LaneTransaction]
    ) -> list[LaneTransaction]:
        """Return the *transactions* before the first that waits for an operator. Leave out
        changes that operators skip, or that a later chunk contains. If the very first transaction
        waits, pause its table.
        """
        lane, delete_limit = self._lane, self._lane.delete_limit
        if (
            transactions[0].end_lsn is None
            and lane.has_open_transaction
            and lane.owner.has_delete_limit(lane)
        ):
            while lane.has_open_transaction:  # the delete limit counts the whole transaction
                await until_changed(lane, None)
            return []
        for number, lane_transaction in enumerate(transactions):
            waiting = delete_limit.waiting(lane_transaction)
            if waiting is None:
                continue
            if not number:
                await lane.owner.delete_limit_reached(lane, *waiting)
            transactions = transactions[:number]
            break
        return [
            only_copied(delete_limit.without_skipped(lane_transaction))
            for lane_transaction in transactions
        ]

    async def _fulfil(self) -> None:
        lane = self._lane
        request = lane.requests[0]
        if lane.owner.lane_of(request.mapped) is lane:
            await fulfil(request, lane, self._writer, self._planner)
            lane.owner.quarantine_changed(request.mapped)
        # If a separate lane has the relation, a copy is in progress, and that lane handles the
        # request afterwards.
        if lane.requests:
            lane.requests.pop(0)

    async def _apply(self, transactions: list[LaneTransaction], refused: Refused) -> None:
        """Apply as many finished transactions as the target accepts; raise the target's error."""
        done = 0
        window, began = LaneWindow(self._lane), time.monotonic()
        try:
            while True:
                try:
                    window, done, error = await self._try(transactions)
                    break
                except ConflictsFound:
                    await self._writer.rollback()
            if error is not None:
                raise error
        except StreamerError:
            refused.add(transactions[done : done + 1])
            if not self._writer.transaction.is_broken:
                await self._writer.rollback()
            raise
        finally:
            # This also runs after a cancellation: changes that are not durable stay in the lane.
            self._lane.drained(done)
            if done:
                self._durable(window, done)
                label, seconds = self._lane.owner.source.label, time.monotonic() - began
                count_drained(self._metrics, window.relations, label, done, seconds)
            report_quarantine(self._lane, self._writer)

    async def _try(
        self, transactions: list[LaneTransaction]
    ) -> tuple[LaneWindow, int, StreamerError | None]:
        """Write and commit transactions; return the window, the number of accepted transactions,
        and the error, if any. Raises ConflictsFound.
        """
        window, error = await self._window(transactions)
        try:
            await self._writer.begin()
            await self._writer.write(window)
            await commit(self._writer, window.progress(), skipped_truncates(window))
            return window, len(window.transactions), error
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            await self._writer.rollback()
            if any(map(may_divert, transactions)):  # rather than put rows into quarantine
                diverted = Refused()
                diverted.add(window.transactions)
                await self._apply_lost_definitions(diverted)
            # Plan the transactions again: an earlier definition may have caused the rejection.
            for lane_transaction in transactions:
                self._planner.invalidate(lane_transaction)
            window, error = await self._window(transactions)
            done, refused = await self._apply_in_order(window)
            return window, done, refused or error

    async def _window(
        self, transactions: list[LaneTransaction]
    ) -> tuple[LaneWindow, StreamerError | None]:
        """Plan transactions up to the first transaction that cannot be planned or read. If planning
        the very first transaction fails, raise the error.
        """
        window = LaneWindow(self._lane)
        self._writer.start_window()
        changed: set[MappedRelation] = set()
        for number, lane_transaction in enumerate(transactions):
            try:
                plans = await self._planner.plans(lane_transaction, earlier=changed)
                remaining = await self._writer.divert_followers(lane_transaction, plans)
                window.add(lane_transaction, plans, remaining)
                changed.update(mapped for mapped, _ in lane_transaction.changes)
            except ProtocolError as exc:
                add_context(exc, lane_transaction)
                if not number:
                    raise
                # By now the window contains parts of this transaction.
                window, error = await self._window(transactions[:number])
                return window, error or exc
            except StreamerError as exc:
                if not window.transactions or exc.retry is Retry.TIMED:
                    raise
                return window, exc
        return window, None

    async def _apply_in_order(self, window: LaneWindow) -> tuple[int, StreamerError | None]:
        """Commit the transactions before the transaction that the target refuses; return their
        number and the error.
        """
        await self._writer.begin()
        count, error = await ExactOrder(self._writer).write(window)
        if count:
            skipped = skipped_truncates(window, count)
            await commit(self._writer, window.progress(count), skipped)
        else:
            await self._writer.rollback()
        return count, error

    def _durable(self, window: LaneWindow, done: int) -> None:
        self._lane.owner.lane_durable(self._lane, window.transactions[:done])
        for lane_transaction in window.transactions[:done]:
            release_delete_counts(self._lane, lane_transaction, self._metrics)
        for parts in window.parts[:done]:
            for mapped, changes, _ in parts:
                counts = Counts().count(changes.payloads)
                count_changes(self._metrics, table_labels(mapped), counts)


def _is_alone(lane_transaction: LaneTransaction) -> bool:
    """Whether a lane transaction needs a target transaction of its own."""
    return lane_transaction.end_lsn is None or lane_transaction.redefines
