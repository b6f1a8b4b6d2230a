"""Writes changes of one definition of a relation around the changes that the target rejects.

The server writes each change in a subtransaction, and lists the rejected changes and all later
changes of the same keys. A value that the staging table refuses ends the COPY, which begins again
after that change.
"""

from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Final

from streamer.apply.lanes.blocked_keys import FOLLOWS, BlockedKeys
from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.quarantine.change_items import Item
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import CREATE_NOTED, CREATE_REFUSED, REFUSED
from streamer.apply.write.conflicts import NOTED_MAX, QUARANTINED, Conflict
from streamer.apply.write.staged_rows import OrderedRun
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.writer import Writer
from streamer.decode.transactions import Transaction
from streamer.errors.error_classes import StreamerError, UntranslatableTextError
from streamer.postgres.sqlstate import CONFLICT_KINDS, is_row_specific

STAGED_MAX: Final = 4000
"""Maximum number of changes in a COPY while the staging table may still refuse changes."""

_REFUSED_SQL: Final = (
    f"select seq, state, message, detail, existing from pg_temp.{REFUSED} order by seq"
)


@dataclass(slots=True)
class _ItemRun:
    """Changes of a relation under one definition: no TRUNCATE, or only a TRUNCATE.

    ``is_diverted``: rejected changes go into quarantine; with ``is_immediate``, the server checks
    deferred constraints at every change. ``outcomes``: error and SQLSTATE of the changes for
    quarantine, by number; ``staged``: the numbers of the remaining changes, in order.
    """

    plan: ApplyPlan
    blocked: BlockedKeys
    items: list[Item]
    is_diverted: bool
    is_immediate: bool
    outcomes: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    staged: list[int] = field(default_factory=list)
    existing: dict[int, str | None] = field(default_factory=dict)
    """The target's row that already has the key of a rejected change, as JSON; None if unknown."""

    def origin_of(self, number: int) -> tuple[Transaction, int]:
        """Return the transaction and the message kind of staged change *number*."""
        item = self.items[self.staged[number]]
        return item.transaction, item.change.kind


class SegmentWriter:
    """Writes segments in *transaction*."""

    def __init__(self, transaction: TargetTransaction, writer: Writer) -> None:
        self._transaction = transaction
        self._writer = writer

    async def write(
        self,
        mapped: MappedRelation,
        plan: ApplyPlan,
        blocked: BlockedKeys,
        items: list[Item],
        *,
        is_diverted: bool,
        is_immediate: bool,
    ) -> None:
        """Write the changes of one definition of a relation that the target accepts.

        With *is_diverted* the rejected changes go to *blocked*. With *is_immediate* too, the server
        checks deferred constraints at every change.
        """
        statements = mapped.statements(plan).in_order
        size = statements.rows_max or len(items)
        for ended_at, of_time in groupby(items, attrgetter("ended_at")):
            acting = replace(statements, ended_at=ended_at)
            ended = list(of_time)
            for start in range(0, len(ended), max(1, size)):
                batch = ended[start : start + size]
                segment = _ItemRun(plan, blocked, batch, is_diverted, is_immediate)
                async with self._writer.staged(mapped, acting, is_indexed=plan.key_is_indexed):
                    await self._write_some(mapped, acting, segment)

    async def _write_some(
        self, mapped: MappedRelation, statements: Statements, segment: _ItemRun
    ) -> None:
        plan, blocked, items = segment.plan, segment.blocked, segment.items
        run = OrderedRun(plan)
        await self._stage_segment(statements, segment, run)
        if segment.staged:
            try:
                if segment.is_diverted:
                    await self._run_around(mapped, statements, segment, run.is_partial)
                else:
                    await self._writer.conflicts.run_in_order(
                        mapped,
                        statements,
                        segment.origin_of,
                        is_partial=run.is_partial,
                        notes=True,
                    )
            except StreamerError as exc:
                if exc.change_number is not None:
                    exc.transaction_number = items[segment.staged[exc.change_number]].place[0]
                raise
        for index in sorted(segment.outcomes):
            error, code = segment.outcomes[index]
            blocked.put(items[index].quarantined(plan, error, code))
        await self._record_refused(mapped, segment)

    async def _record_refused(self, mapped: MappedRelation, segment: _ItemRun) -> None:
        """Store the conflicts of changes that go into quarantine because of the target's rows."""
        conflicts = []
        for index, (_, code) in sorted(segment.outcomes.items()):
            kind = None if code is None else CONFLICT_KINDS.get(code)
            if kind is not None:
                item = segment.items[index]
                change = item.quarantined(segment.plan, "", code)
                existing = segment.existing.get(index)
                conflicts.append(
                    Conflict(
                        kind, QUARANTINED, change.operation, change.key, item.transaction, existing
                    )
                )
        await self._writer.conflicts.add(mapped, conflicts[:NOTED_MAX])

    async def _stage_segment(
        self, statements: Statements, segment: _ItemRun, run: OrderedRun
    ) -> None:
        """Stage all changes that COPY accepts; after a refused value, first try few changes."""
        items, blocked, is_diverted = segment.items, segment.blocked, segment.is_diverted
        position, size = 0, STAGED_MAX if is_diverted else len(items)
        fault: tuple[int, StreamerError] | None = None
        while position < len(items):
            begin, key_count = position, len(blocked.added)
            stop = len(items) if fault is None else fault[0]
            chunk: list[int] = []
            following: list[int] = []
            while position < stop and len(chunk) < size:
                if blocked.follows(items[position].keys):
                    blocked.add(items[position].keys)
                    following.append(position)
                else:
                    chunk.append(position)
                position += 1
            try:
                await self._stage_chunk(statements, segment, run, chunk)
            except StreamerError as exc:
                number = exc.change_number
                if number is None or number >= len(chunk):
                    raise
                exc.transaction_number = items[chunk[number]].place[0]
                if not is_diverted or fault is not None or not _concerns_row(exc):
                    raise
                # Stage the changes before the refused value again.
                blocked.undo(key_count)
                position, fault = begin, (chunk[number], exc)
                continue
            segment.staged += chunk
            segment.outcomes.update((index, (FOLLOWS, None)) for index in following)
            size = min(2 * size, STAGED_MAX) if is_diverted else size
            if fault is not None and position == fault[0]:
                blocked.add(items[position].keys)
                segment.outcomes[position] = (fault[1].message, _sqlstate(fault[1]))
                position, size, fault = position + 1, 1, None

    async def _stage_chunk(
        self,
        statements: Statements,
        segment: _ItemRun,
        run: OrderedRun,
        chunk: list[int],
    ) -> None:
        if not chunk:
            return
        rows = [
            run.row(
                len(segment.staged) + n,
                segment.items[index].transaction,
                segment.items[index].change,
            )
            for n, index in enumerate(chunk)
        ]
        target = self._transaction.target
        if segment.is_diverted:
            await target.execute("savepoint streamer_stage")
        try:
            for copy in statements.copies(rows):
                await self._transaction.copy(copy)
        except StreamerError as exc:
            if segment.is_diverted and exc.change_number is not None:
                await target.execute("rollback to savepoint streamer_stage")
            raise
        if segment.is_diverted:
            await target.execute("release savepoint streamer_stage")

    async def _run_around(
        self, mapped: MappedRelation, statements: Statements, segment: _ItemRun, is_partial: bool
    ) -> None:
        """Write the staged changes; record rejected changes and their followers."""
        items, blocked = segment.items, segment.blocked
        numbers: dict[bytes, int] = {}
        keys: list[tuple[int, int]] = []
        for index in segment.staged:
            ids = [numbers.setdefault(key, len(numbers) + 1) for key in items[index].keys]
            keys.append((ids[0] if ids else 0, ids[-1] if ids else 0))
        target = self._transaction.target
        await target.execute(f"{CREATE_REFUSED}; {CREATE_NOTED}")
        await target.execute(
            statements.ordered_around(
                partial=is_partial,
                keys=keys,
                key_count=len(numbers),
                immediate=segment.is_immediate,
                cascades=target.checks_foreign_keys,
            )
        )
        await self._writer.conflicts.add_in_order(mapped, segment.plan, segment.origin_of)
        for row in await target.fetch(_REFUSED_SQL):
            index = segment.staged[row["seq"]]
            blocked.add(items[index].keys)
            error, code = FOLLOWS, None
            if row["state"] is not None:
                error, code = _message(row["message"], row["detail"]), row["state"]
                segment.existing[index] = row["existing"]
            segment.outcomes[index] = (error, code)


def _message(message: str, detail: str | None) -> str:
    # A detail about a key names the row. Other details may show all values of the row.
    if detail and detail.startswith("Key ("):
        return f"{message}: {detail.rstrip('.')}"
    return message


def _sqlstate(error: StreamerError) -> str | None:
    raised_by = error if isinstance(error, UntranslatableTextError) else error.__cause__
    return getattr(raised_by, "sqlstate", None)


def _concerns_row(error: StreamerError) -> bool:
    state = _sqlstate(error)
    return state is not None and is_row_specific(state)
