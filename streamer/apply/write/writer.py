"""Writes windows to the target, as sets or in exact order, inside a transaction of the caller.

The writer uses sets if the result equals that of single changes: COPY stages the rows, and a
statement applies the staged rows. Otherwise a block at the server applies staged changes in exact
order. `streamer.apply.write.write_steps` chooses the statements and their order.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_window import LaneWindow, RelationWindow
from streamer.apply.rows.copydata import Copy
from streamer.apply.rows.fold import NotFoldable
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import MISSED_STATE, SEVERAL_ROWS
from streamer.apply.write.foreign_key_order import Half, in_key_order, is_connected, write_order
from streamer.apply.write.rejection_advice import advise
from streamer.apply.write.staged_rows import OrderedRun
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.transaction_conflicts import TransactionConflicts, refusal
from streamer.apply.write.write_steps import (
    Change,
    Execute,
    InOrder,
    Inquiry,
    RequireFacts,
    Staged,
    Step,
    fold_steps,
    needs_no_answer,
    ordered_runs,
    ordered_steps,
    rows_missing_error,
    version_steps,
)
from streamer.bookkeeping.deferred_indexes import has_deferred
from streamer.errors.error_classes import ConflictError, StreamerError
from streamer.util.failpoints import failpoint

LARGE_WINDOW_BYTES: Final = 1024 * 1024
"""The server frees the space of staged rows at the end of a larger window."""

WriteOrdered = Callable[[LaneWindow, MappedRelation, int, int], Awaitable[None]]
"""Writes a relation's changes of some transactions in exact order."""


class Writer:
    """Writes in *transaction*.

    *write_ordered* writes a relation's changes in exact order; by default `write_ordered` does.
    """

    def __init__(
        self, transaction: TargetTransaction, write_ordered: WriteOrdered | None = None
    ) -> None:
        self._transaction = transaction
        self._write_ordered = write_ordered or self.write_ordered
        self.conflicts = TransactionConflicts(transaction)

    # ---- windows -------------------------------------------------------------------------------

    async def write(self, window: LaneWindow) -> None:
        """Write a window as sets if the result equals that of exact order, else in exact order.

        In tables that foreign keys connect, write referenced rows before referencing rows, and
        remove referenced rows after referencing rows.
        """
        if self.orders_by_keys(window):
            for relation, half in write_order(window):
                await self._write_relation(window, relation, half)
        else:
            for relation in window.relations.values():
                await self._write_relation(window, relation, Half.BOTH)

    def orders_by_keys(self, window: LaneWindow) -> bool:
        return self._transaction.target.checks_foreign_keys and is_connected(window)

    async def _write_relation(
        self, window: LaneWindow, relation: RelationWindow, half: Half
    ) -> None:
        mapped = relation.mapped
        if not relation.is_set:
            await self._write_ordered(window, mapped, 0, len(window.transactions))
        elif relation.versions:
            await self._write_versions(window, relation)
        else:
            fires_keys = self._transaction.target.checks_foreign_keys
            for fold in relation.folds:
                failpoint("apply.write")
                statements = mapped.statements(fold.plan)
                steps = fold_steps(fold, statements, half, fires_keys=fires_keys)
                await self._run_steps(steps, mapped, window)

    async def _write_versions(self, window: LaneWindow, relation: RelationWindow) -> None:
        """Write versions of a history table as sets; in exact order, if sets do not fit the
        target's rows.
        """
        failpoint("apply.write")
        mapped, target = relation.mapped, self._transaction.target
        target.send_before_next("savepoint streamer_versions")
        try:
            for versions in relation.versions:
                steps = version_steps(versions, mapped.statements(versions.plan))
                await self._run_steps(steps, mapped, window)
        except NotFoldable:
            await self._transaction.rollback_to_savepoint("streamer_versions")
            relation.require_order()
            await self._write_ordered(window, mapped, 0, len(window.transactions))
        else:
            target.send_before_next("release savepoint streamer_versions")

    async def write_in_order(
        self, window: LaneWindow, start: int, stop: int, *, reverse: bool = False
    ) -> None:
        """Write the transactions of a window from *start* up to, but not including, *stop* in exact
        order.

        The order is exact for each table. If foreign keys connect tables, referenced tables come
        first; with *reverse* last. An error's ``transaction_number`` names the failed transaction,
        if known.
        """
        relations = list(window.relations)
        if self.orders_by_keys(window):
            relations = [relation.mapped for relation in in_key_order(window.relations.values())]
        for mapped in reversed(relations) if reverse else relations:
            await self._write_ordered(window, mapped, start, stop)

    async def write_ordered(
        self, window: LaneWindow, mapped: MappedRelation, start: int, stop: int
    ) -> None:
        """Write a relation's changes in exact order, a run for each definition."""
        for run in ordered_runs(window, mapped, start, stop):
            statements = mapped.statements(run.plan).in_order
            steps = ordered_steps(run, statements, notes=self.conflicts.use_watched_block(mapped))
            try:
                await self._run_steps(steps, mapped, window)
            except StreamerError as exc:
                self.conflicts.raise_if_found(mapped, exc)
                _complete(exc, mapped, run)
                raise

    # ---- a whole transaction in one message ----------------------------------------------------

    def fits_message(self, window: LaneWindow) -> bool:
        """Whether `join` can write *window*."""
        return not self.orders_by_keys(window) and all(
            map(needs_no_answer, window.relations.values())
        )

    def join(self, window: LaneWindow) -> None:
        """Send the changes of *window* with the COMMIT, which then raises the errors of the
        changes.
        """
        fires_keys = self._transaction.target.checks_foreign_keys
        for relation in window.relations.values():
            for fold in relation.folds:
                failpoint("apply.write")
                statements = relation.mapped.statements(fold.plan)
                self._join(fold_steps(fold, statements, fires_keys=fires_keys))

    def _join(self, steps: Iterable[Step]) -> None:
        transaction = self._transaction
        for step in steps:
            match step:
                case Execute():
                    transaction.target.send_before_next(step.sql)
                case RequireFacts():
                    transaction.require(step.facts)
                case Copy():
                    transaction.copy_before_commit(step)
                case Change():
                    statement = step.leaves or step.writes or ""
                    counted = step.statements.of_rows(step.count, statement)
                    transaction.copy_before_commit(step.rows, counted)
                case Staged():
                    transaction.stage(step.statements, step.count)
                    self._join(step.steps)
                case _:
                    raise AssertionError(step)

    # ---- steps ---------------------------------------------------------------------------------

    async def _run_steps(
        self, steps: Iterable[Step], mapped: MappedRelation, window: LaneWindow
    ) -> None:
        transaction = self._transaction
        for step in steps:
            match step:
                case Execute():
                    await transaction.target.execute(step.sql)
                case RequireFacts():
                    transaction.require(step.facts)
                case Copy():
                    await transaction.copy(step)
                case Change():
                    await self.conflicts.find_missing_rows(window, mapped, step)
                    missing = await self._account_for(step, *await self._touch_rows(step))
                    self.conflicts.count_missing(mapped, step, missing)
                case Inquiry():
                    answer = await transaction.target.fetch_planned_now(step.sql, *step.parameters)
                    await transaction.copy(step.then(answer))
                case InOrder():
                    await self.conflicts.run_in_order(
                        mapped,
                        step.statements,
                        step.run.origin_of,
                        is_partial=step.run.is_partial,
                        notes=step.notes,
                    )
                case Staged():
                    count = None if window.size > LARGE_WINDOW_BYTES else step.count
                    is_indexed = step.is_indexed
                    async with self.staged(mapped, step.statements, count, is_indexed=is_indexed):
                        await self._run_steps(step.steps, mapped, window)

    @asynccontextmanager
    async def staged(
        self,
        mapped: MappedRelation,
        statements: Statements,
        count: int | None = None,
        *,
        is_indexed: bool,
    ) -> AsyncIterator[None]:
        """Prepare an empty staging table, and allow hash joins if the key has no index.

        Without an index on the key each row would need a scan of the whole table. A rollback of the
        transaction or savepoint resets the setting, too.
        """
        transaction, plan = self._transaction, statements.plan
        transaction.stage(statements, count)
        if is_indexed:
            yield
            return
        if plan.is_provisional and not await has_deferred(transaction.target, plan.name):
            mapped.invalidate(plan)
        transaction.target.send_before_next("set local enable_hashjoin = on")
        yield
        transaction.target.send_before_next("set local enable_hashjoin = off")

    async def _touch_rows(self, change: Change) -> tuple[int, int]:
        """Stage and write rows, in a single message if possible.

        Return the number of removed or marked target rows, and the number of written rows.
        """
        leaves, writes = change.leaves, change.writes
        if change.statements.plan.key_is_indexed and not (leaves and writes):
            touched = await self._transaction.copy(change.rows, leaves or writes or "")
            return (touched, 0) if leaves else (0, touched)
        await self._transaction.copy(change.rows)
        left_count = await self._touch(change, leaves)
        await self._touch(change, change.room)
        return left_count, await self._touch(change, writes)

    async def _touch(self, change: Change, statement: str | None) -> int:
        """Run *statement* on staged rows; return the number of touched target rows.

        Refuses keys of several rows, unless an index of the target makes keys unique.
        """
        if statement is None:
            return 0
        target = self._transaction.target
        if change.statements.plan.key_is_indexed:
            return await target.execute(statement)
        (touched,) = await target.fetch(change.statements.counted(change.op, statement))
        if touched["several"] is not None:
            raise _several_rows(f": Key {touched['several']}")
        return int(touched["rows"])

    async def _account_for(self, change: Change, left_count: int, written: int) -> int:
        """Check that the row counts cover all staged rows; insert missing rows, and return the
        number of missing rows.

        The statements use different snapshots, so a row that a session deletes and inserts again
        between them is in none of the snapshots.
        """
        target, statements, op = self._transaction.target, change.statements, change.op
        missing = change.count - left_count - written
        if missing < 0:
            raise _several_rows()
        if not missing:
            return 0
        passing = change.count if change.writes else 0
        if passing and statements.plan.filter is not None:
            passing = await target.fetch_value(statements.passing(op))
        inserted = 0
        if change.inserts and written < passing:
            inserted = await target.execute(statements.insert_missing(op))
        if written + inserted != passing:
            raise rows_missing_error(statements.plan)
        if left_count < change.count - passing and await target.fetch_value(statements.remain(op)):
            raise rows_missing_error(statements.plan)
        return missing


def misses_rows(error: StreamerError) -> bool:
    """Whether a statement that `Writer.join` sent touched more or fewer rows than expected."""
    return getattr(error.__cause__, "sqlstate", None) == MISSED_STATE


def _complete(error: StreamerError, mapped: MappedRelation, run: OrderedRun) -> None:
    """Complete *error* with the change of *run* that the target refuses, and with a remedy."""
    plan = run.plan
    run.locate(error)
    error.conflict = refusal(error, run)
    number = error.staged_column
    if error.column is None and number is not None and number < len(plan.columns):
        error.column = plan.columns[number].name
    advise(error, mapped, plan)


def _several_rows(which: str = "") -> ConflictError:
    return ConflictError(f"target: {SEVERAL_ROWS}{which}", kind="several_rows")
