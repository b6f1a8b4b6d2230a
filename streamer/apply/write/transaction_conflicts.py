"""Finds the conflicts of a writer's changes, and writes conflict rows in the same transaction.

`streamer.apply.write.conflicts` describes the mechanism.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import (
    CONFLICT_STATE,
    CREATE_NOTED,
    NOTED,
    OP_DELETE,
    OP_PROBED_DELETE,
    OP_PROBED_UPDATE,
)
from streamer.apply.write.conflicts import (
    NOTED_MAX,
    RESOLUTIONS,
    STOPPED,
    WATCHED_WINDOWS,
    Conflict,
    ConflictsFound,
    Key,
    find_changes,
    missing_rows,
    operation_of,
    store_conflicts,
)
from streamer.apply.write.staged_rows import OrderedRun, numbered_keys
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.write_steps import Change
from streamer.decode.transactions import Transaction
from streamer.errors.error_classes import ConflictError, StreamerError

_NOTED_SQL: Final = f"select seq, kind, key from pg_temp.{NOTED} order by seq"

OriginOf = Callable[[int], tuple[Transaction, int] | None]
"""Returns the transaction and the message kind of a change in exact order."""


class TransactionConflicts:
    """The conflicts in *transaction*."""

    def __init__(self, transaction: TargetTransaction) -> None:
        self._transaction = transaction

    async def add(self, mapped: MappedRelation, conflicts: list[Conflict]) -> None:
        kept_max = self._transaction.conflicts_kept
        await store_conflicts(self._transaction.target, mapped.relation_id, conflicts, kept_max)

    # ---- sets ----------------------------------------------------------------------------------

    async def find_missing_rows(
        self, window: LaneWindow, mapped: MappedRelation, change: Change
    ) -> None:
        """Record rows that *change* needs and the target lacks, if the table is watched."""
        if not (change.is_recorded and mapped.conflict_watch):
            return
        mapped.conflict_watch -= 1
        statements, plan, keys = change.statements, change.statements.plan, list(change.keys)
        is_delete = change.op == OP_DELETE
        op = OP_PROBED_DELETE if is_delete else OP_PROBED_UPDATE
        await self._transaction.copy(numbered_keys(statements, op, keys))
        rows = await self._transaction.target.fetch(statements.missing(op, NOTED_MAX))
        if not rows:
            return
        mapped.conflict_watch = WATCHED_WINDOWS
        missing = [(keys[row["seq"]], _key_of(plan, row["key"])) for row in rows]
        changes = find_changes(window, mapped, plan, [key for key, _ in missing])
        await self.add(mapped, missing_rows(missing, changes, deletes=is_delete))

    def count_missing(self, mapped: MappedRelation, change: Change, missing: int) -> None:
        """Count the rows that were missing for *change*.

        Raises ConflictsFound if rows are missing without a check by `find_missing_rows`.
        """
        if change.conflict is None or not missing:
            return
        if change.is_recorded and not mapped.conflict_watch:
            mapped.conflict_watch = WATCHED_WINDOWS
            raise ConflictsFound
        self._transaction.count_conflict(mapped, change.conflict, missing)

    # ---- exact order ---------------------------------------------------------------------------

    def use_watched_block(self, mapped: MappedRelation) -> bool:
        """Count a block in exact order against `conflict_watch`; return whether the block records
        missing rows. Otherwise the block ends at a missing row.
        """
        if not mapped.conflict_watch:
            return False
        mapped.conflict_watch -= 1
        return True

    def raise_if_found(self, mapped: MappedRelation, error: StreamerError) -> None:
        """Raise ConflictsFound if *error* is the end of a block at a missing row."""
        if getattr(error.__cause__, "sqlstate", None) == CONFLICT_STATE:
            mapped.conflict_watch = WATCHED_WINDOWS
            raise ConflictsFound from None

    async def run_in_order(
        self,
        mapped: MappedRelation,
        statements: Statements,
        origin_of: OriginOf,
        *,
        is_partial: bool,
        notes: bool,
    ) -> None:
        """Apply the staged changes in order; with *notes*, record changes whose row is missing."""
        target = self._transaction.target
        if notes:
            await target.execute(CREATE_NOTED)
        cascades = target.checks_foreign_keys
        await target.execute(statements.ordered(partial=is_partial, notes=notes, cascades=cascades))
        if notes:
            await self.add_in_order(mapped, statements.plan, origin_of)

    async def add_in_order(
        self, mapped: MappedRelation, plan: ApplyPlan, origin_of: OriginOf
    ) -> None:
        """Count and record the conflicts that a block in exact order listed."""
        rows = await self._transaction.target.fetch(_NOTED_SQL)
        for name, number in Counter(row["kind"] for row in rows).items():
            self._transaction.count_conflict(mapped, name, number)
        if rows:
            mapped.conflict_watch = WATCHED_WINDOWS
        conflicts = []
        for row in rows[:NOTED_MAX]:
            if (origin := origin_of(row["seq"])) is not None:
                name, key, (transaction, kind) = row["kind"], _key_of(plan, row["key"]), origin
                operation = operation_of(kind)
                conflicts.append(Conflict(name, RESOLUTIONS[name], operation, key, transaction))
        await self.add(mapped, conflicts)


def refusal(error: StreamerError, run: OrderedRun) -> Conflict | None:
    """Return the conflict for which the target rejects a change of *run*, stopping the table."""
    number = error.change_number
    origin = None if number is None else run.origin_of(number)
    if not isinstance(error, ConflictError) or number is None or origin is None:
        return None
    transaction, kind = origin
    existing = getattr(error.__cause__, "table_name", None) or None
    key = run.key_texts(number)
    return Conflict(error.kind, STOPPED, operation_of(kind), key, transaction, existing)


def _key_of(plan: ApplyPlan, texts: list[str | None]) -> Key:
    columns = plan.relation.columns
    names = (columns[column.position].name for column in plan.staged_key)
    return dict(zip(names, texts, strict=True))
