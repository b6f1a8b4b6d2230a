"""Writes changes around rejected changes, which go into quarantine in the same target transaction.
The rest of the table continues.

A window is first written as usual, without the changes that follow a change in quarantine. If the
target rejects the window, `SegmentWriter` writes changes one by one. `QuarantineTable` adds the
rejected changes to streamer.quarantine.
"""

from collections.abc import Sequence
from functools import partial

import structlog

from streamer.apply.lanes.blocked_keys import FOLLOWS, BlockedKeys, KeyColumns
from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.quarantine.change_items import Item, ItemReader
from streamer.apply.quarantine.quarantine_table import QuarantineTable
from streamer.apply.quarantine.segment_writer import SegmentWriter
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.change_as_json import Quarantined
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.write_steps import ordered_runs
from streamer.apply.write.writer import Writer
from streamer.decode.pgoutput import TRUNCATE
from streamer.mapping.rule_options import OnError
from streamer.mapping.rules import SourceLabel
from streamer.observability.metrics import Metrics
from streamer.target.connection import TargetAddress, TargetConnection

log = structlog.get_logger()


class QuarantineWriter:
    """Writes windows, and puts changes that the target refuses into quarantine.

    Only drainers use this class: it serves one lane at a time, and needs the outcome of each
    transaction before the next begins.
    """

    def __init__(
        self,
        address: TargetAddress,
        name: str,
        metrics: Metrics,
        *,
        lock_seconds: float,
        conflicts_kept: int,
    ) -> None:
        self.transaction = TargetTransaction(
            address,
            name,
            metrics,
            lock_seconds=lock_seconds,
            conflicts_kept=conflicts_kept,
            on_committed=self._store_blocked_keys,
        )
        """The target transaction, for work that does not concern quarantine."""
        self._writer = Writer(self.transaction, self._write_ordered)
        self._items = ItemReader(self.transaction)
        self._segments = SegmentWriter(self.transaction, self._writer)
        self._table = QuarantineTable(self.transaction)
        self._blocked: dict[MappedRelation, BlockedKeys] = {}
        """The blocked keys after the writes of this transaction."""
        self._ahead: dict[MappedRelation, BlockedKeys] = {}
        """The blocked keys after the window, valid if the writer writes the window as sets."""
        self._at_savepoint: dict[MappedRelation, BlockedKeys] = {}
        self._changed: set[MappedRelation] = set()
        self._is_begun = False
        self._diverts = False
        self._is_immediate = False
        self._retried_before: int | None = None
        """The number of the first quarantined change that a retry writes; None outside a retry."""

    @property
    def target(self) -> TargetConnection:
        """The connection. Raises TargetConnectionError if there is none."""
        return self.transaction.target

    def pop_changed(self) -> set[MappedRelation]:
        """Return the relations whose number of rows in quarantine changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    # ---- the transaction -----------------------------------------------------------------------

    def start_window(self) -> None:
        """Prepare for the next window, which calls `divert_followers` for each transaction."""
        self._ahead.clear()
        if not self._is_begun:
            self._blocked.clear()

    def disconnect(self) -> None:
        self.transaction.disconnect()
        self._is_begun = False

    async def begin(self) -> None:
        await self.transaction.begin()
        self._blocked.clear()
        self._is_begun = True

    async def rollback(self) -> None:
        self._blocked.clear()
        self._ahead.clear()
        self._is_begun = False
        await self.transaction.rollback()

    async def savepoint(self) -> None:
        await self.transaction.savepoint()
        self._at_savepoint = {m: blocked.copy() for m, blocked in self._blocked.items()}

    async def rollback_to_savepoint(self) -> None:
        self._blocked = {m: blocked.copy() for m, blocked in self._at_savepoint.items()}
        self._ahead.clear()
        await self.transaction.rollback_to_savepoint()

    def _store_blocked_keys(self) -> None:
        """Keep the blocked keys of the transaction, which committed."""
        self._is_begun = False
        for mapped, blocked in self._blocked.items():
            was_empty = mapped.quarantine.count == 0
            blocked.commit_to(mapped.quarantine)
            if blocked.change_count or blocked.is_outdated:
                self._changed.add(mapped)
            if was_empty and mapped.quarantine.count and blocked.first_rejected is not None:
                log.warning(
                    "rows are in quarantine",
                    source=SourceLabel(mapped.source.database, mapped.source.sid),
                    table=str(mapped.mapping.source),
                    rows=mapped.quarantine.count,
                    error=blocked.first_rejected.error,
                )
        self._blocked.clear()

    def record_quarantine_change(self, mapped: MappedRelation, count: int) -> None:
        """Record that this transaction added (or removed) *count* rows in streamer.quarantine."""
        self._blocked.setdefault(mapped, BlockedKeys()).discard_keys(count)

    # ---- later changes of the same rows ---------------------------------------------------------

    async def divert_followers(
        self, lane_transaction: LaneTransaction, plans: Sequence[ApplyPlan | None]
    ) -> list[list[bytes]] | None:
        """Divert the changes of a lane transaction that follow changes of their rows in quarantine.

        Return the remaining payloads of each item of changes; None if all remain.
        """
        if not any(self.has_blocked_keys(mapped) for mapped, _ in lane_transaction.changes):
            return None
        remaining: list[list[bytes]] = []
        for (mapped, changes), plan in zip(lane_transaction.changes, plans, strict=True):
            if (
                plan is None
                or mapped.has(lane_transaction.transaction)
                or not self.has_blocked_keys(mapped)
            ):
                remaining.append(changes.payloads)
                continue
            blocked = self._ahead.get(mapped)
            if blocked is None:
                blocked = self._blocked.get(mapped, BlockedKeys()).copy()
                self._ahead[mapped] = blocked
            await self._use_key_columns(mapped, blocked, plan)
            items = await self._items.read(plan, lane_transaction.transaction, 0, changes.payloads)
            unblocked = []
            for item, payload in zip(items, changes.payloads, strict=True):
                if item.change.kind == TRUNCATE:
                    blocked.truncate(plan, lane_transaction.transaction)
                elif blocked.follows(item.keys):
                    blocked.add(item.keys)
                    blocked.put(item.quarantined(plan, FOLLOWS, None))
                    continue
                unblocked.append(payload)
            remaining.append(unblocked)
        return remaining

    def orders_by_keys(self, window: LaneWindow) -> bool:
        """Return whether foreign keys fire between relations of *window*."""
        return self._writer.orders_by_keys(window)

    def has_blocked_keys(self, mapped: MappedRelation) -> bool:
        """Return whether changes of *mapped* may have to follow earlier changes into quarantine."""
        blocked = self._ahead.get(mapped) or self._blocked.get(mapped)
        return blocked is not None or mapped.quarantine.count > 0

    async def _use_key_columns(
        self, mapped: MappedRelation, blocked: BlockedKeys, plan: ApplyPlan
    ) -> None:
        """Make *blocked* use the key columns of *plan*, with the keys of rows in quarantine."""
        columns, quarantine = KeyColumns.of(plan), mapped.quarantine
        if blocked.columns == columns:
            return
        is_first = (
            blocked.columns is None and not blocked.is_outdated and self._retried_before is None
        )
        base: set[bytes] = set()
        if not columns.names or blocked.is_emptied or (is_first and not quarantine.count):
            pass
        elif is_first:
            if quarantine.columns != columns:
                quarantine.keys = await self._table.read_keys(
                    mapped, columns, before=self._retried_before
                )
                quarantine.columns = columns
            base = quarantine.keys or set()
        else:
            base = await self._table.read_keys(mapped, columns, before=self._retried_before)
        blocked.use(columns, base, await self._table.keys_of_pending(blocked, columns))

    # ---- writing -------------------------------------------------------------------------------

    async def write(self, window: LaneWindow) -> None:
        await self._writer.write(window)
        for mapped, blocked in self._ahead.items():
            relation = window.relations.get(mapped)
            if relation is not None and relation.is_set:
                self._blocked[mapped] = blocked
        self._ahead.clear()
        await self._table.flush(self._blocked)

    async def write_in_order(
        self,
        window: LaneWindow,
        start: int,
        stop: int,
        *,
        reverse: bool = False,
        immediate: bool = False,
    ) -> None:
        """Write in exact order; rejected changes go into quarantine if the table's rule says so.

        With *immediate*, deferred constraints are checked at every change of such a table.
        """
        self._ahead.clear()
        self._diverts, self._is_immediate = True, immediate
        try:
            await self._writer.write_in_order(window, start, stop, reverse=reverse)
        finally:
            self._diverts = self._is_immediate = False
        await self._table.flush(self._blocked)

    async def write_again(
        self, window: LaneWindow, mapped: MappedRelation, before: int, *, immediate: bool
    ) -> list[Quarantined]:
        """Write changes that were in quarantine; return the changes that stay there.

        *before*: the number of the first change. A change also stays if an earlier change of the
        same key stays, in this call or in an earlier call in this transaction.
        """
        self._retried_before = before
        self._diverts, self._is_immediate = True, immediate
        try:
            blocked = self._blocked.setdefault(mapped, BlockedKeys())
            await self._write_ordered(window, mapped, 0, len(window.transactions))
            failures = [change for change in blocked.pending if isinstance(change, Quarantined)]
            blocked.pending.clear()
            return failures
        finally:
            self._retried_before = None
            self._diverts = self._is_immediate = False

    async def _write_ordered(
        self, window: LaneWindow, mapped: MappedRelation, start: int, stop: int
    ) -> None:
        is_diverted = self._diverts and (
            mapped.mapping.rule.on_error is OnError.QUARANTINE or self._retried_before is not None
        )
        if not is_diverted and mapped not in self._blocked and not mapped.quarantine.count:
            await self._writer.write_ordered(window, mapped, start, stop)
            return
        blocked = self._blocked.setdefault(mapped, BlockedKeys())
        write = partial(self._segments.write, is_immediate=self._is_immediate)
        for run in ordered_runs(window, mapped, start, stop):
            segment: list[Item] = []
            await self._use_key_columns(mapped, blocked, run.plan)
            for number, transaction, payloads in run.parts:
                for item in await self._items.read(run.plan, transaction, number, payloads):
                    if item.change.kind != TRUNCATE:
                        segment.append(item)
                    elif not run.plan.ignores_truncate:
                        await write(mapped, run.plan, blocked, segment, is_diverted=is_diverted)
                        await write(mapped, run.plan, blocked, [item], is_diverted=False)
                        blocked.truncate(run.plan, transaction)
                        segment = []
            await write(mapped, run.plan, blocked, segment, is_diverted=is_diverted)
