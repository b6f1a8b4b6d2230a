"""The steps that write a window; `streamer.apply.write.writer` executes the steps. Pure.

The writer requests each step after the previous step. So memory contains copies of the rows of a
single step only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_window import LaneWindow, RelationWindow
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.copydata import Copy
from streamer.apply.rows.fold import Fold
from streamer.apply.rows.history_chains import Versions
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.planned_facts import PlannedFacts
from streamer.apply.sql.set_statements import (
    OP_CLEAR,
    OP_DELETE,
    OP_INSERT,
    OP_MOVED,
    OP_UPDATED,
    OP_UPDATED_PARTLY,
)
from streamer.apply.sql.wide_rows import PlanStatements
from streamer.apply.write.conflicts import DELETE_MISSING, UPDATE_MISSING
from streamer.apply.write.foreign_key_order import Half, keeps_keys
from streamer.apply.write.staged_rows import (
    OrderedRun,
    in_order_of_keys,
    inserted_rows,
    marking_rows,
    moved_rows,
    partial_rows,
    staged_keys,
    whole_rows,
)
from streamer.decode.tuples import MixedRow, PendingRow, Row, is_partial, unchanged_positions
from streamer.errors.error_classes import ConflictError


@dataclass(frozen=True, slots=True)
class Execute:
    """Statements without a result."""

    sql: str


@dataclass(frozen=True, slots=True)
class RequireFacts:
    """Facts of the target that the next step needs."""

    facts: PlannedFacts


@dataclass(frozen=True, slots=True)
class Change:
    """Rows staged as *op*, and the statements that change the target's rows with the same keys.

    First ``leaves`` removes or marks rows, then ``room`` deletes marked rows with keys that new
    rows need, and ``writes`` writes the remaining rows. With ``inserts``, the writer inserts rows
    that the target lacks.

    ``conflict``: the kind of conflict of a missing row. With ``is_recorded``, the writer searches
    for missing rows by ``keys``.
    """

    statements: Statements
    rows: Copy
    op: int
    count: int
    leaves: str | None = None
    room: str | None = None
    writes: str | None = None
    inserts: bool = False
    conflict: str | None = None
    is_recorded: bool = False
    keys: Iterable[Any] = ()


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A query; ``then`` makes the next step from the answer."""

    sql: str
    parameters: tuple[Any, ...]
    then: Callable[[Sequence[Mapping[str, Any]]], Copy]


@dataclass(frozen=True, slots=True)
class InOrder:
    """The staged changes of *run*, in exact order."""

    run: OrderedRun
    statements: Statements
    notes: bool


@dataclass(frozen=True, slots=True)
class Staged:
    """Steps that share an empty staging table, for *count* small rows or for any number of rows.

    ``is_indexed``: an index of the target finds the rows.
    """

    statements: Statements
    steps: Iterable["Step"]
    count: int | None
    is_indexed: bool


Step = Execute | RequireFacts | Copy | Change | Inquiry | InOrder | Staged


def fold_steps(
    fold: Fold, statements: PlanStatements, half: Half = Half.BOTH, *, fires_keys: bool
) -> Iterator[Step]:
    """Yield the steps that write a fold, or a half of a fold.

    *fires_keys*: the server checks foreign keys.
    """
    plan, plain, sets = fold.plan, statements.plain, statements.sets
    if fires_keys and keeps_keys(fold):
        steps = _replace_rows(fold, statements, half)
        yield Staged(sets, steps, len(fold.inserts), plan.key_is_indexed)
        return
    if half is not Half.BOTH:
        fold = fold.removals() if half is Half.REMOVALS else fold.additions()
    if fold.truncate:
        yield _with_restart(plain.truncate, fold, statements)
    is_staged = plan.has_expressions  # inserted rows need staging, too
    if fold.must_stage or (is_staged and fold.inserts):
        steps = _change_rows(fold, sets, fires_keys)
        yield Staged(sets, steps, fold.row_count, plan.key_is_indexed)
    if fold.inserts and not is_staged:
        yield RequireFacts(plain.facts)
        yield inserted_rows(plain, fold.inserts.values())


def needs_no_answer(window: RelationWindow) -> bool:
    """Whether the writer can send the steps of *window* at once, without reading their row counts.

    A missing row is then an error of the server, and the caller sends the steps one by one.
    """
    if not window.is_set or window.versions or window.mapped.conflict_watch:
        return False
    return not any(
        fold.truncate
        or (fold.must_stage and not (fold.plan.key_is_indexed and fold.plan.filter is None))
        for fold in window.folds
    )


def _replace_rows(fold: Fold, statements: PlanStatements, half: Half) -> Iterator[Step]:
    """Replace the table's rows by the rows inserted after a TRUNCATE."""
    sets = statements.sets
    rows = whole_rows(sets, OP_UPDATED, fold.inserts.values())
    if half is Half.REMOVALS:
        yield rows
    else:
        count, update = len(fold.inserts), sets.update_whole
        yield Change(sets, rows, OP_UPDATED, count, writes=update, inserts=True)
    if half is not Half.ADDITIONS:
        yield _with_restart(sets.delete_others(OP_UPDATED), fold, statements)


def _with_restart(sql: str, fold: Fold, statements: PlanStatements) -> Execute:
    """Empty a table, and restart its sequences if the TRUNCATE restarts them."""
    restart = statements.plain.restart if fold.restarts else ""
    return Execute(f"{sql}; {restart}" if restart else sql)


def _change_rows(fold: Fold, sets: Statements, fires_keys: bool) -> Iterator[Step]:
    plan = fold.plan
    if removed := fold.removed:
        yield _delete(removed, sets, fires_keys)
    if fold.clears_keys:
        keys = fold.inserts.keys() - fold.deletes.keys()
        rows = staged_keys(sets, OP_CLEAR, keys)
        yield Change(sets, rows, OP_CLEAR, len(keys), leaves=sets.clear)
    if fold.moves:
        yield _move(fold, sets)
    updated = whole = in_order_of_keys(fold.updates)
    if MixedRow in set(map(type, updated)):
        whole = [row for row in updated if not is_partial(row)]
    if whole:
        yield _update(fold, sets, whole)
    if len(whole) < len(updated):
        yield _update_partly(sets, [row for row in updated if is_partial(row)])
    if fold.inserts and plan.has_expressions:
        yield whole_rows(sets, OP_INSERT, fold.inserts.values())
        room = sets.make_room(OP_INSERT)
        yield Execute("; ".join(filter(None, [room, sets.insert_staged(OP_INSERT)])))


def _delete(removed: Mapping[Any, Row | None], sets: Statements, fires_keys: bool) -> Change:
    plan = sets.plan
    rows = (marking_rows if plan.marks_in_filter else staged_keys)(sets, OP_DELETE, removed)
    # If the target may keep rows that the source has deleted, a fold also deletes keys for which
    # there may be no row. Foreign keys of the target may also have removed rows.
    is_conflict = not plan.may_lack_rows and not plan.may_outlive
    return Change(
        sets,
        rows,
        OP_DELETE,
        len(removed),
        leaves=sets.delete,
        conflict=DELETE_MISSING if is_conflict else None,
        is_recorded=is_conflict and not fires_keys,
        keys=removed,
    )


def _move(fold: Fold, sets: Statements) -> Change:
    """Set new keys. Without ``deletes``, rows with the old keys stay for now."""
    if not (fold.deletes or fold.plan.key_is_indexed):
        raise rows_missing_error(fold.plan)  # an INSERT does not identify the moved row
    moves = fold.moves.values()
    lacking = frozenset().union(*(unchanged_positions(r) for _, r in moves if is_partial(r)))
    move = sets.move if fold.deletes else sets.copy_moved
    rows = moved_rows(sets, OP_MOVED, moves)
    return Change(sets, rows, OP_MOVED, len(moves), writes=move(OP_MOVED, lacking))


def _update(fold: Fold, sets: Statements, whole: list[PendingRow]) -> Change:
    is_conflict = not fold.plan.may_lack_rows  # the row may pass a filter only now
    return Change(
        sets,
        whole_rows(sets, OP_UPDATED, whole),
        OP_UPDATED,
        len(whole),
        leaves=sets.remove_unfiltered(OP_UPDATED),
        room=sets.make_room(OP_UPDATED),
        writes=sets.update_whole,
        inserts=True,
        conflict=UPDATE_MISSING if is_conflict else None,
        is_recorded=is_conflict,
        keys=(key for key, row in fold.updates.items() if not is_partial(row)),
    )


def _update_partly(sets: Statements, partial: list[PendingRow]) -> Change:
    """Update rows without their unchanged values, which the target's rows keep."""
    op, lacking = OP_UPDATED_PARTLY, [unchanged_positions(row) for row in partial]
    update = sets.update(op, frozenset.intersection(*lacking), masked=frozenset.union(*lacking))
    return Change(
        sets,
        partial_rows(sets, op, partial),
        op,
        len(partial),
        leaves=sets.remove_unfiltered(op),
        room=sets.make_room(op),
        writes=update,
    )


def version_steps(versions: Versions, statements: PlanStatements) -> Iterator[Step]:
    """Yield the steps that end the open versions of all keys, and insert the new versions.

    An answer that sets do not expect raises NotFoldable.
    """
    if not versions.chains:  # a large value arrives in a separate piece
        return
    of_versions = statements.versions
    chains = versions.in_order_of_keys()
    steps = (
        of_versions.stage(chains),
        Inquiry(
            of_versions.close,
            () if versions.plan.history_sequence is None else (versions.change_count,),
            lambda answer: of_versions.insert_versions(versions, chains, answer),
        ),
    )
    # An index covers the key's leading column.
    yield Staged(of_versions.statements, steps, len(chains), is_indexed=True)


def ordered_runs(
    window: LaneWindow, mapped: MappedRelation, start: int, stop: int
) -> list[OrderedRun]:
    """Return a relation's changes of some transactions, a run for each definition."""
    runs: list[OrderedRun] = []
    for number in range(start, stop):
        lane_transaction = window.transactions[number]
        for owner, changes, plan in window.parts[number]:
            if owner is mapped:
                if not runs or runs[-1].plan is not plan:
                    runs.append(OrderedRun(plan))
                for transaction, payloads in lane_transaction.by_transaction(changes):
                    runs[-1].parts.append((number, transaction, payloads))
    return runs


def ordered_steps(run: OrderedRun, statements: Statements, *, notes: bool) -> Iterator[Step]:
    """Yield the steps that write a run in exact order. *notes*: whether to record missing rows."""
    for first, rows in statements.batches(run.rows()):
        block = InOrder(run, statements, notes)
        steps = chain[Step](statements.copies(rows, first), (block,))
        yield Staged(statements, steps, None, run.plan.key_is_indexed)


def rows_missing_error(plan: ApplyPlan) -> ConflictError:
    """Return the error that makes the writer repeat the window in exact order, which locks rows and
    reports their keys.
    """
    return ConflictError(
        f'target table "{plan.mapping.target}": a row is missing, or another session changes this '
        "row",
        kind="update_missing",
    )
