"""Writes windows to the target, as sets or in exact order, inside a transaction of its caller.

The writer uses sets where they give the same result as single changes. Rows go to a staging table
by COPY, and one statement applies them. For everything else, a block at the server goes through
staged changes in exact order.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Final, TypeVar

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_window import LaneWindow, RelationWindow
from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.copydata import RowLayout, constant, encode_rows
from streamer.apply.rows.fold import Fold, NotFoldable
from streamer.apply.rows.history_chains import Versions
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import (
    OP_CLEAR,
    OP_DELETE,
    OP_INSERT,
    OP_MOVED,
    OP_UPDATED,
    OP_UPDATED_PARTLY,
    SEVERAL_ROWS,
)
from streamer.apply.sql.wide_rows import SplitStatements
from streamer.apply.write.conflict_notes import ConflictNotes, Noted, refusal
from streamer.apply.write.foreign_key_order import Removal, in_key_order, is_connected, removal_of
from streamer.apply.write.rejection_advice import advise
from streamer.apply.write.staged_rows import OrderedRun, masked_rows, staged_values
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.bookkeeping.deferred_indexes import has_deferred
from streamer.decode.pgoutput import INSERT, from_datetime
from streamer.decode.tuples import PendingRow, Row, is_partial, unchanged_positions
from streamer.errors.error_classes import (
    ConflictError,
    RowTooLargeError,
    StreamerError,
    TextEncodingError,
)
from streamer.util.failpoints import failpoint

T = TypeVar("T")


LARGE_WINDOW_BYTES: Final = 1024 * 1024
"""The server frees the space of staged rows at the end of a window that is larger."""

WriteOrdered = Callable[[LaneWindow, MappedRelation, int, int], Awaitable[None]]
"""Writes one relation's changes of some shares in exact order."""


class Writer:
    """Writes in *transaction*.

    *write_ordered* writes a relation's changes in exact order; by default `write_ordered` does.
    """

    def __init__(
        self, transaction: TargetTransaction, write_ordered: WriteOrdered | None = None
    ) -> None:
        self._transaction = transaction
        self._write_ordered = write_ordered or self.write_ordered
        self._is_large = False
        """Whether the present window is large, so that its staging tables take much space."""
        self.conflicts = ConflictNotes(transaction, self._copy_stage)
        self._window: LaneWindow | None = None
        """The window that is written as sets, to find the change behind a conflict."""

    async def write(self, window: LaneWindow) -> None:
        """Write a window as sets where that gives the same result, else in exact order.

        In tables that foreign keys connect, write referenced rows before those that refer to them,
        and remove them after those.
        """
        self._is_large = window.size > LARGE_WINDOW_BYTES
        self._window = window
        if not self.orders_by_keys(window):
            for relation in window.relations.values():
                await self._write_relation(window, relation)
            return
        relations = in_key_order(window.relations.values())
        removals = [
            removal_of(r, keeps_keys=r.is_set and all(map(self._keeps_keys, r.folds)))
            for r in relations
        ]
        steps = list(zip(relations, removals, strict=True))
        await self._remove(step for step in reversed(steps) if step[1] is Removal.FIRST)
        for relation, removal in steps:
            if removal is Removal.WITHIN:
                await self._write_relation(window, relation)
            elif relation.folds[0].truncate and removal is Removal.LAST:
                await self._replace_rows(relation.mapped, relation.folds[0], removes=False)
            else:
                await self._write_fold(relation.mapped, relation.folds[0].additions())
        await self._remove(step for step in reversed(steps) if step[1] is Removal.LAST)

    def _small(self, count: int) -> int | None:
        return None if self._is_large else count

    def orders_by_keys(self, window: LaneWindow) -> bool:
        return self._transaction.target.checks_foreign_keys and is_connected(window)

    async def _remove(self, steps: Iterable[tuple[RelationWindow, Removal]]) -> None:
        for relation, removal in steps:
            (fold,) = relation.folds
            if fold.truncate and removal is Removal.LAST:
                await self._replace_rows(relation.mapped, fold, adds=False)
            else:
                await self._write_fold(relation.mapped, fold.removals())

    async def _write_relation(self, window: LaneWindow, relation: RelationWindow) -> None:
        if relation.is_set and relation.versions:
            await self._write_all_versions(window, relation)
        elif relation.is_set:
            for fold in relation.folds:
                await self._write_fold(relation.mapped, fold)
        else:
            await self._write_ordered(window, relation.mapped, 0, len(window.shares))

    async def _write_all_versions(self, window: LaneWindow, relation: RelationWindow) -> None:
        """Write versions of a history table as sets; in exact order, if the target's rows are not
        what sets expect.
        """
        failpoint("apply.write")
        target = self._transaction.target
        target.send_before_next("savepoint streamer_versions")
        try:
            for versions in relation.versions:
                await self._write_versions(relation.mapped, versions)
        except NotFoldable:
            await self._transaction.rollback_to_savepoint("streamer_versions")
            relation.needs_order()
            await self._write_ordered(window, relation.mapped, 0, len(window.shares))
        else:
            target.send_before_next("release savepoint streamer_versions")

    async def _write_versions(self, mapped: MappedRelation, versions: Versions) -> None:
        """End the open versions of all keys, and bring the new ones."""
        if not versions.chains:  # a large value comes in a piece of its own
            return
        plan, target = versions.plan, self._transaction.target
        statements = mapped.statements(plan).versions
        chains = versions.in_order_of_keys()
        self._transaction.stage(statements.statements, self._small(len(chains)))
        await target.copy_in(
            statements.statements.stage,
            statements.staged_columns,
            paced(statements.stage(chains)),
            namespace="pg_temp",
            binary=plan.binary,
        )
        taken = () if plan.history_sequence is None else (versions.change_count,)
        closed, *known = await target.fetch_planned_now(statements.close, *taken)
        expected = len(chains) - [chain[1] for chain in versions.chains.values()].count(INSERT)
        if (closed["seq"], closed["keys"], closed["same"]) != (expected, expected, 0):
            raise NotFoldable
        if any(row["is_open"] for row in known):
            raise NotFoldable
        ends = {
            row["seq"]: from_datetime(row["last_end"])
            for row in known
            if row["last_end"] is not None
        }
        numbers: Sequence[int] | None = None
        if taken:
            first = closed["first"]
            numbers = closed["numbers"] or range(first, first + versions.change_count)
        await target.copy_in(
            plan.target.name.name,
            statements.columns,
            paced(statements.encode(chains, ends, numbers)),
            namespace=plan.target.name.namespace,
            binary=plan.binary,
        )

    async def write_in_order(
        self, window: LaneWindow, start: int, stop: int, *, reverse: bool = False
    ) -> None:
        """Write the shares from number *start* to before *stop* of a window in exact order.

        The order is exact for each table. Of tables that foreign keys connect, those that others
        refer to come first; with *reverse* they come last. An error's ``share_number`` tells which
        share is at fault, where that is known.
        """
        relations = list(window.relations)
        if self.orders_by_keys(window):
            relations = [each.mapped for each in in_key_order(window.relations.values())]
        for mapped in reversed(relations) if reverse else relations:
            await self._write_ordered(window, mapped, start, stop)

    async def _write_fold(self, mapped: MappedRelation, fold: Fold) -> None:
        plan = fold.plan
        failpoint("apply.write")
        if fold.truncate and self._keeps_keys(fold):
            await self._replace_rows(mapped, fold)
            return
        if fold.truncate:
            await self._transaction.target.execute(mapped.statements(plan).plain.truncate)
            await self._restart_sequences(mapped, fold)
        is_staged = plan.has_expressions  # rows without updates or deletes, too
        if fold.must_stage or (is_staged and fold.inserts):
            statements = mapped.statements(plan).sets
            self._transaction.stage(statements, self._small(fold.row_count))
            async with self.planned_for(mapped, plan):
                await self._write_changes(mapped, fold, statements)
        if fold.inserts and not is_staged:
            await self._copy_inserts(mapped, fold)

    def _keeps_keys(self, fold: Fold) -> bool:
        """Whether a TRUNCATE must leave the rows alone whose keys are there again behind it.

        The table that refers to them may be ahead, and refer to the new ones already.
        """
        plan = fold.plan
        return (
            self._transaction.target.checks_foreign_keys
            and plan.target.is_referenced
            and plan.key_is_indexed
            and plan.identity is Identity.KEY
            and not plan.has_expressions
            and not (fold.deletes or fold.updates or fold.moves)
        )

    async def _replace_rows(
        self, mapped: MappedRelation, fold: Fold, *, adds: bool = True, removes: bool = True
    ) -> None:
        """Have the table hold the rows inserted after a TRUNCATE, and no others."""
        statements = mapped.statements(fold.plan).sets
        self._transaction.stage(statements, self._small(len(fold.inserts)))
        async with self.planned_for(mapped, fold.plan):
            columns, positions = staged_values(fold.plan, statements, frozenset())
            rows = fold.inserts.values()
            await self._copy_stage(statements, columns, rows, OP_UPDATED, positions)
            target = self._transaction.target
            if adds:
                updated = await self._touch(statements, OP_UPDATED, statements.update(OP_UPDATED))
                await self._settle(statements, OP_UPDATED, len(fold.inserts), 0, updated)
            if removes:
                await target.execute(statements.delete_others(OP_UPDATED))
                await self._restart_sequences(mapped, fold)

    async def _restart_sequences(self, mapped: MappedRelation, fold: Fold) -> None:
        restart = mapped.statements(fold.plan).plain.restart
        if fold.restarts and restart:
            await self._transaction.target.execute(restart)

    async def _write_changes(
        self, mapped: MappedRelation, fold: Fold, statements: Statements
    ) -> None:
        plan = fold.plan
        removed = fold.removed
        if removed:
            await self._write_deletes(mapped, fold, removed, statements)
        if fold.clears_keys:
            await self._clear_keys(plan, statements, fold.inserts.keys() - fold.deletes.keys())
        if fold.moves:
            await self._write_moves(fold, statements)
        rows = in_order_of_keys(fold.updates)
        whole = [row for row in rows if not is_partial(row)]
        partial = [row for row in rows if is_partial(row)] if len(whole) < len(rows) else []
        missing = 0
        if whole:
            await self.conflicts.look_for_updates(self._window, mapped, fold, statements)
            missing = await self._write_whole(plan, statements, whole)
        if partial:
            await self._write_partial(plan, statements, partial)
        if plan.filter is None:  # else it has just been let in
            self.conflicts.require_notes(mapped, missing)
            self._transaction.count_conflict(mapped, "update_missing", missing)
        if fold.inserts and plan.has_expressions:
            columns, positions = staged_values(plan, statements, frozenset())
            await self._copy_stage(statements, columns, fold.inserts.values(), OP_INSERT, positions)
            if (room := statements.make_room(OP_INSERT)) is not None:
                await self._transaction.target.execute(room)
            await self._transaction.target.execute(statements.insert_staged(OP_INSERT))

    async def _write_moves(self, fold: Fold, statements: Statements) -> None:
        """Give rows their new keys. Exact order finds those that the target lacks.

        Without ``deletes``, rows with the old keys stay for now.
        """
        plan = fold.plan
        if not (fold.deletes or plan.key_is_indexed):
            raise _not_all_there(plan)  # an INSERT does not tell for which row it is
        moves = list(fold.moves.values())
        lacking = frozenset().union(*(unchanged_positions(r) for _, r in moves if is_partial(r)))
        columns, _ = staged_values(plan, statements, frozenset())
        single = len(plan.key) == 1
        staged = masked_rows(plan, (row for _, row in moves))
        rows = (
            [values[0], *([origin] if single else origin), *values[1:]]
            for values, (origin, _) in zip(staged, moves, strict=True)
        )
        old = [statements.old(column) for column in plan.key]
        _, moved = await self._stage_and_run(
            statements,
            ["mask", *old, *columns],
            rows,
            OP_MOVED,
            statement=(statements.move if fold.deletes else statements.copy_moved)(
                OP_MOVED, lacking
            ),
        )
        _check_count(moved, len(moves))
        if moved < len(moves):
            raise _not_all_there(plan)

    async def _write_deletes(
        self,
        mapped: MappedRelation,
        fold: Fold,
        removed: Mapping[Any, Row | None],
        statements: Statements,
    ) -> None:
        plan = fold.plan
        rows: Iterable[Any]
        positions: tuple[int, ...] | None = None
        staged = plan.key
        if plan.marks_in_filter:
            staged += plan.metadata_columns
            positions = tuple(column.position for column in staged)
            rows = in_order_of_keys(removed)
        else:
            rows = _key_rows(plan, removed)
        columns = [statements.new(column) for column in staged]
        is_conflict = self.conflicts.is_conflict_to_delete(plan)
        if is_conflict:
            await self.conflicts.look_for_deletes(self._window, mapped, removed, statements)
        deleted = await self._remove_staged(
            statements, columns, rows, OP_DELETE, positions, len(removed), statements.delete
        )
        if is_conflict:
            self.conflicts.require_notes(mapped, len(removed) - deleted)
        # With rows that outlive their deletes, `deletes` has keys that no row may have.
        if plan.filter is None and not plan.may_outlive:
            self._transaction.count_conflict(mapped, "delete_missing", len(removed) - deleted)

    async def _clear_keys(self, plan: ApplyPlan, statements: Statements, keys: set[Any]) -> None:
        """Delete the rows of *keys*, which outlived their deletes or a TRUNCATE."""
        columns = [statements.new(column) for column in plan.key]
        await self._remove_staged(
            statements, columns, _key_rows(plan, keys), OP_CLEAR, None, len(keys), statements.clear
        )

    async def _remove_staged(
        self,
        statements: Statements,
        columns: list[str],
        rows: Iterable[Any],
        op: int,
        positions: tuple[int, ...] | None,
        count: int,
        statement: str,
    ) -> int:
        """Stage *count* keys as *op*, and remove their rows by *statement*; return how many were
        there.

        Another statement finds the rows that a session has deleted and inserted again meanwhile.
        """
        _, removed = await self._stage_and_run(
            statements, columns, rows, op, positions, statement=statement
        )
        _check_count(removed, count)
        if removed < count and await self._transaction.target.fetch_value(statements.remain(op)):
            raise _not_all_there(statements.plan)
        return removed

    async def _write_whole(
        self, plan: ApplyPlan, statements: Statements, rows: list[PendingRow]
    ) -> int:
        """Update rows, insert those that are missing, and return how many that were."""
        columns, positions = staged_values(plan, statements, frozenset())
        touched = await self._stage_and_run(
            statements,
            columns,
            rows,
            OP_UPDATED,
            positions,
            statement=statements.update(OP_UPDATED),
        )
        return await self._settle(statements, OP_UPDATED, len(rows), *touched)

    async def _write_partial(
        self, plan: ApplyPlan, statements: Statements, rows: list[PendingRow]
    ) -> None:
        """Update rows that lack unchanged values, which the target's rows keep."""
        lacking = [unchanged_positions(row) for row in rows]
        update = statements.update(
            OP_UPDATED_PARTLY, frozenset.intersection(*lacking), masked=frozenset.union(*lacking)
        )
        columns, _ = staged_values(plan, statements, frozenset())
        touched = await self._stage_and_run(
            statements,
            ["mask", *columns],
            masked_rows(plan, rows),
            OP_UPDATED_PARTLY,
            statement=update,
        )
        await self._settle(statements, OP_UPDATED_PARTLY, len(rows), *touched, inserts=False)

    async def _settle(
        self,
        statements: Statements,
        op: int,
        count: int,
        left: int,
        updated: int,
        *,
        inserts: bool = True,
    ) -> int:
        """Insert the rows that are missing of *count* staged as *op*; return how many that were.

        *left* rows of the target have left the filter. The numbers have to account for all staged
        rows. The statements have different snapshots, so a row that a session deletes and inserts
        again between them is in none.
        """
        target = self._transaction.target
        _check_count(left + updated, count)
        if left + updated == count:
            return 0
        is_filtered = statements.plan.filter is not None
        passing = await target.fetch_value(statements.passing(op)) if is_filtered else count
        inserted = 0
        if inserts and updated < passing:
            inserted = await target.execute(statements.insert_missing(op))
        if updated + inserted != passing:
            raise _not_all_there(statements.plan)
        if left < count - passing and await target.fetch_value(statements.remain(op)):
            raise _not_all_there(statements.plan)
        return inserted

    async def _stage_and_run(
        self,
        statements: Statements,
        columns: list[str],
        rows: Iterable[Any],
        op: int,
        positions: tuple[int, ...] | None = None,
        *,
        statement: str,
    ) -> tuple[int, int]:
        """Stage rows as *op*, and write them by *statement*. Return how many rows of the target
        have left the filter, and how many the statement touched.

        That is one message, unless the target has to be asked for something in between.
        """
        before = statements.before_write(op) if op in (OP_UPDATED, OP_UPDATED_PARTLY) else []
        if not before and statements.plan.key_is_indexed:
            touched = await self._copy_stage(
                statements, columns, rows, op, positions, then=statement
            )
            return 0, touched
        await self._copy_stage(statements, columns, rows, op, positions)
        left, *_ = [await self._touch(statements, op, each) for each in before] or [0]
        return left, await self._touch(statements, op, statement)

    async def _touch(self, statements: Statements, op: int, statement: str) -> int:
        """Run *statement* on rows staged as *op*; return how many rows of the target it touched.

        Refuses keys of several rows, unless an index of the target keeps them unique.
        """
        target = self._transaction.target
        if statements.plan.key_is_indexed:
            return await target.execute(statement)
        (found,) = await target.fetch(statements.counted(op, statement))
        if found["several"] is not None:
            raise _several_rows(found["several"])
        return int(found["rows"])

    @asynccontextmanager
    async def planned_for(self, mapped: MappedRelation, plan: ApplyPlan) -> AsyncIterator[None]:
        """Let the server plan statements of *plan* as its key asks for.

        Without an index on the key each row would take a scan of the whole table. A rollback of the
        transaction or savepoint resets the setting, too.
        """
        if plan.key_is_indexed:
            yield
            return
        if plan.is_provisional and not await has_deferred(self._transaction.target, plan.name):
            mapped.forget(plan)
        await self._transaction.target.execute("set local enable_hashjoin = on")
        yield
        await self._transaction.target.execute("set local enable_hashjoin = off")

    async def _copy_stage(
        self,
        statements: Statements,
        columns: list[str],
        rows: Iterable[Any],
        op: int,
        positions: tuple[int, ...] | None = None,
        *,
        then: str = "",
    ) -> int:
        binary = statements.plan.binary
        # Without positions, rows have the staged values alone.
        count = len(columns) if positions is None else statements.plan.row_width
        prefix = (constant(op, binary=binary, int_size=2),)
        chunks = encode_rows(rows, RowLayout(count, binary, positions, prefix))
        return await self._transaction.target.copy_in(
            statements.stage,
            ["op", *columns],
            paced(chunks),
            namespace="pg_temp",
            binary=binary,
            then=then,
        )

    async def _copy_inserts(self, mapped: MappedRelation, fold: Fold) -> None:
        plan = fold.plan
        statements = mapped.statements(plan).plain
        self._transaction.keep(statements.facts)
        prefix = () if plan.sid is None else (constant(plan.sid, binary=plan.binary),)
        layout = RowLayout(plan.row_width, plan.binary, plan.positions, prefix)
        chunks = encode_rows(fold.inserts.values(), layout)
        await self._transaction.target.copy_in(
            plan.target.name.name,
            statements.insert_columns,
            paced(chunks),
            namespace=plan.target.name.namespace,
            binary=plan.binary,
        )

    async def write_ordered(
        self, window: LaneWindow, mapped: MappedRelation, start: int, stop: int
    ) -> None:
        """Write one relation's changes in exact order, a run for each definition of it."""
        runs: list[OrderedRun] = []
        for number in range(start, stop):
            share = window.shares[number]
            for owner, changes, plan in window.parts[number]:
                if owner is mapped:
                    if not runs or runs[-1].plan is not plan:
                        runs.append(OrderedRun(plan))
                    for transaction, payloads in share.by_transaction(changes):
                        runs[-1].parts.append((number, transaction, payloads))
        for run in runs:
            try:
                async with self.planned_for(mapped, run.plan):
                    await self._write_run(mapped, run)
            except StreamerError as exc:
                self.conflicts.raise_if_found(mapped, exc)
                _name_column(exc, run.plan)
                advise(exc, mapped, run.plan)
                raise

    async def _write_run(self, mapped: MappedRelation, run: OrderedRun) -> None:
        statements = mapped.statements(run.plan).in_order
        notes = self.conflicts.are_noted(mapped)
        noted: list[Noted] = []
        try:
            if isinstance(statements, SplitStatements):
                noted = await self._write_split(mapped, run, statements, notes=notes)
            else:
                self._transaction.stage(statements)
                await self.copy_staged(statements, run.rows())
                noted = await self.conflicts.run_in_order(
                    mapped, statements, is_partial=run.is_partial, notes=notes
                )
        except StreamerError as exc:
            if exc.change_number is not None:
                exc.share_number = run.share_number(exc.change_number)
                if isinstance(exc, RowTooLargeError):
                    exc.message += f": {run.describe(exc.change_number)}"
                if isinstance(exc, TextEncodingError):
                    exc.column = exc.column or run.invalid_text(exc.change_number)
                exc.key = exc.key or run.key_of(exc.change_number)
                exc.conflict = refusal(exc, run)
            raise
        await self.conflicts.note_in_order(mapped, noted, run.origin_of)

    async def _write_split(
        self, mapped: MappedRelation, run: OrderedRun, statements: SplitStatements, *, notes: bool
    ) -> list[Noted]:
        rows = run.rows()
        done = 0
        noted: list[Noted] = []
        while some := list(islice(rows, statements.rows_max)):
            self._transaction.stage(statements)
            try:
                await self.copy_staged(statements, some)
            except StreamerError as exc:
                if exc.change_number is not None:  # of these
                    exc.change_number += done
                raise
            noted += await self.conflicts.run_in_order(
                mapped, statements, is_partial=run.is_partial, notes=notes
            )
            done += len(some)
        return noted

    async def copy_staged(self, statements: Statements, rows: Iterable[Row]) -> None:
        """Stage changes for exact order; if that takes several parts, *rows* is a list."""
        plan = statements.plan
        if isinstance(statements, SplitStatements):
            assert isinstance(rows, list)
            for part in statements.parts:
                columns = list(part.columns)
                await self.copy_rows(part.table, columns, part.rows(rows), binary=plan.binary)
            return
        columns = ["seq", "op", "mask", "at", *(name for name, _ in statements.staged)]
        await self.copy_rows(statements.stage, columns, rows, binary=plan.binary)

    async def copy_rows(
        self, table: str, columns: list[str], rows: Iterable[Row], *, binary: bool
    ) -> None:
        chunks = encode_rows(rows, RowLayout(len(columns), binary))
        await self._transaction.target.copy_in(
            table, columns, paced(chunks), namespace="pg_temp", binary=binary
        )


def in_order_of_keys(changes: Mapping[Any, T]) -> list[T]:
    """Return the values of *changes* in an order in which the target finds their keys faster.

    Neighbours in an index are often neighbours in memory: writing in their order costs the target's
    backend a third to a half less. The order has no other meaning. Keys that cannot be compared,
    such as large ones, keep the order in which they came.
    """
    try:
        return [changes[key] for key in sorted(changes)]
    except TypeError:
        return list(changes.values())


def _key_rows(plan: ApplyPlan, keys: Iterable[Any]) -> Iterable[Any]:
    """Return *keys* of a fold as rows to stage."""
    rows = in_order_of_keys({key: key for key in keys})
    return ([key] for key in rows) if len(plan.key) == 1 else rows


def _name_column(error: StreamerError, plan: ApplyPlan) -> None:
    number = error.staged_column
    if error.column is None and number is not None and number < len(plan.columns):
        error.column = plan.columns[number].name


def _check_count(touched: int, asked: int) -> None:
    """Refuse a statement that has touched more rows than it was asked for."""
    if touched > asked:
        raise _several_rows(None)


def _not_all_there(plan: ApplyPlan) -> ConflictError:
    """Have exact order write a window: it locks each row, and names one that is missing."""
    return ConflictError(
        f'target table "{plan.mapping.target}": a row is missing, or another session changes it',
        kind="update_missing",
    )


def _several_rows(key: str | None) -> ConflictError:
    which = f": Key {key}" if key is not None else ""
    return ConflictError(f"target: {SEVERAL_ROWS}{which}", kind="several_rows")


async def paced(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Let others run between chunks, so that a long COPY does not keep a reader from its socket."""
    since = time.monotonic()
    for chunk in chunks:
        yield chunk
        now = time.monotonic()
        if now - since > 0.005:
            await asyncio.sleep(0)
            since = now
