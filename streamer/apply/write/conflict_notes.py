"""Finds the conflicts of a writer's changes, and notes them in its transaction.

`streamer.apply.write.conflicts` has the mechanism.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.copydata import constant
from streamer.apply.rows.fold import Fold
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import (
    CONFLICT_STATE,
    CREATE_NOTED,
    NOTED,
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
    note_conflicts,
    operation_of,
)
from streamer.apply.write.staged_rows import OrderedRun
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import is_partial
from streamer.errors.error_classes import ConflictError, StreamerError

_NOTED_SQL: Final = f"select seq, kind, key from pg_temp.{NOTED} order by seq"

Noted = tuple[int, str, Key]
"""A change in exact order whose row was missing: its number, the kind of the conflict, the key."""


class CopyStage(Protocol):
    """Stages rows for the statements of a plan."""

    def __call__(
        self, statements: Statements, columns: list[str], rows: Any, op: int, /
    ) -> Awaitable[int]: ...


class ConflictNotes:
    """The conflicts in *transaction*. *copy_stage* stages rows there."""

    def __init__(self, transaction: TargetTransaction, copy_stage: CopyStage) -> None:
        self._transaction = transaction
        self._copy_stage = copy_stage

    async def note(self, mapped: MappedRelation, conflicts: list[Conflict]) -> None:
        """Write conflicts of a relation."""
        kept = self._transaction.conflicts_kept
        await note_conflicts(self._transaction.target, mapped.relation_id, conflicts, kept)

    # ---- sets ----------------------------------------------------------------------------------

    def is_conflict_to_delete(self, plan: ApplyPlan) -> bool:
        """Whether a row that is missing in a delete is a conflict.

        Foreign keys of the target may have removed it. A table with rows that outlive their deletes
        is cleared of more than it has.
        """
        return (
            plan.filter is None
            and not plan.may_outlive
            and not self._transaction.target.checks_foreign_keys
        )

    def require_notes(self, mapped: MappedRelation, missing: int) -> None:
        """Have the window written again, if missing rows were found and not looked for."""
        if missing > 0 and not mapped.conflict_watch:
            mapped.conflict_watch = WATCHED_WINDOWS
            raise ConflictsFound

    async def look_for_updates(
        self, window: LaneWindow | None, mapped: MappedRelation, fold: Fold, statements: Statements
    ) -> None:
        """Note updates whose row is missing, before the writer writes them."""
        if mapped.conflict_watch and fold.plan.filter is None:
            keys = [key for key, row in fold.updates.items() if not is_partial(row)]
            await self._look_for(window, mapped, statements, keys, deletes=False)

    async def look_for_deletes(
        self,
        window: LaneWindow | None,
        mapped: MappedRelation,
        keys: Iterable[Any],
        statements: Statements,
    ) -> None:
        """Note deletes whose row is missing, before the writer writes them."""
        if mapped.conflict_watch:
            await self._look_for(window, mapped, statements, list(keys), deletes=True)

    async def _look_for(
        self,
        window: LaneWindow | None,
        mapped: MappedRelation,
        statements: Statements,
        keys: list[Any],
        *,
        deletes: bool,
    ) -> None:
        plan = statements.plan
        mapped.conflict_watch -= 1
        single = len(plan.key) == 1
        rows = (
            [constant(number, binary=plan.binary), *([key] if single else key)]
            for number, key in enumerate(keys)
        )
        columns = ["seq", *(statements.new(column) for column in plan.key)]
        op = OP_PROBED_DELETE if deletes else OP_PROBED_UPDATE
        await self._copy_stage(statements, columns, rows, op)
        found = await self._transaction.target.fetch(statements.missing(op, NOTED_MAX))
        if not found:
            return
        mapped.conflict_watch = WATCHED_WINDOWS
        assert window is not None
        missing = [(keys[row["seq"]], _key_of(plan, row["key"])) for row in found]
        changes = find_changes(window, mapped, plan, [key for key, _ in missing])
        await self.note(mapped, missing_rows(missing, changes, deletes=deletes))

    # ---- exact order ---------------------------------------------------------------------------

    def are_noted(self, mapped: MappedRelation) -> bool:
        """Whether the next block in exact order notes missing rows, or ends at one."""
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
        self, mapped: MappedRelation, statements: Statements, *, is_partial: bool, notes: bool
    ) -> list[Noted]:
        """Apply the staged changes one by one; with *notes*, return those whose row was missing."""
        target = self._transaction.target
        if notes:
            await target.execute(CREATE_NOTED)
        cascades = target.checks_foreign_keys
        await target.execute(statements.ordered(partial=is_partial, notes=notes, cascades=cascades))
        return await self.read_noted(mapped, statements.plan) if notes else []

    async def read_noted(self, mapped: MappedRelation, plan: ApplyPlan) -> list[Noted]:
        """Return the changes that a block in exact order has noted, and count their conflicts."""
        found = await self._transaction.target.fetch(_NOTED_SQL)
        for kind, number in Counter(row["kind"] for row in found).items():
            self._transaction.count_conflict(mapped, kind, number)
        return [(row["seq"], row["kind"], _key_of(plan, row["key"])) for row in found]

    async def note_in_order(
        self,
        mapped: MappedRelation,
        noted: list[Noted],
        origin_of: Callable[[int], tuple[Transaction, int] | None],
    ) -> None:
        """Note changes in exact order; *origin_of* has transaction and kind of each."""
        if noted:
            mapped.conflict_watch = WATCHED_WINDOWS
        conflicts = []
        for number, name, key in noted[:NOTED_MAX]:
            if (origin := origin_of(number)) is not None:
                transaction, kind = origin
                operation = operation_of(kind)
                conflicts.append(Conflict(name, RESOLUTIONS[name], operation, key, transaction))
        await self.note(mapped, conflicts)


def refusal(error: StreamerError, run: OrderedRun) -> Conflict | None:
    """Return the conflict for which the target refuses a change of *run*, and the table stops."""
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
