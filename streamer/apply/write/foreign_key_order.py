"""The order in which a window writes tables that foreign keys connect, where the keys fire.

At the end of each statement a foreign key must hold, unless the key is deferrable. So the writer
writes referenced rows before referencing rows, and removes referenced rows after referencing rows,
in any order of changes. Pure.
"""

import enum
from collections.abc import Iterable

from streamer.apply.lanes.lane_window import LaneWindow, RelationWindow
from streamer.apply.rows.apply_plan import Identity
from streamer.apply.rows.fold import Fold
from streamer.mapping.rule_options import TableType


class Removal(enum.Enum):
    """The moment at which a window removes rows of a relation."""

    FIRST = "first"
    """Before all writes: no row refers to the removed rows, or an insert repeats a removed key or
    unique value.
    """
    WITHIN = "within"
    """Together with the other changes of the relation."""
    LAST = "last"
    """After all writes, which may make referencing rows refer to other rows."""


class Half(enum.Enum):
    """The rows of a relation to write."""

    BOTH = "both"
    REMOVALS = "removals"
    ADDITIONS = "additions"


def is_connected(window: LaneWindow) -> bool:
    """Return whether a foreign key connects two relations of *window*."""
    if len(window.relations) < 2:
        return False
    targets = [r.plan.target for r in window.relations.values() if r.plan is not None]
    oids = {target.oid for target in targets}
    return any(target.references & oids for target in targets)


def in_key_order(relations: Iterable[RelationWindow]) -> list[RelationWindow]:
    """Return *relations*, referenced before referencing relations, except within a cycle."""
    by_oid = {r.plan.target.oid: r for r in relations if r.plan is not None}
    ordered: dict[int, RelationWindow] = {}
    visited: set[int] = set()

    def visit(oid: int) -> None:
        if oid in visited or oid not in by_oid:
            return
        visited.add(oid)
        plan = by_oid[oid].plan
        assert plan is not None
        for referred in sorted(plan.target.references):
            visit(referred)
        ordered[oid] = by_oid[oid]

    for oid in by_oid:
        visit(oid)
    return list(ordered.values())


def write_order(window: LaneWindow) -> list[tuple[RelationWindow, Half]]:
    """Return the relations of *window* in order; a relation may come in two halves."""
    moments = [(r, removal_of(r)) for r in in_key_order(window.relations.values())]
    first, last = (
        [(relation, Half.REMOVALS) for relation, at in reversed(moments) if at is moment]
        for moment in (Removal.FIRST, Removal.LAST)
    )
    middle = [
        (relation, Half.BOTH if at is Removal.WITHIN else Half.ADDITIONS)
        for relation, at in moments
    ]
    return [*first, *middle, *last]


def removal_of(relation: RelationWindow) -> Removal:
    if not relation.is_set or len(relation.folds) != 1:
        return Removal.WITHIN
    (fold,) = relation.folds
    if fold.plan.type is TableType.APPEND:
        return Removal.WITHIN
    if fold.moves:
        # LAST lets referencing rows change to the new key first. A foreign key with an action on
        # DELETE would change these rows.
        target = fold.plan.target
        is_last = target.is_referenced and not target.delete_acts and not _returns(fold)
        return Removal.LAST if is_last and not fold.truncate else Removal.WITHIN
    if fold.truncate:
        return Removal.LAST if keeps_keys(fold) else Removal.FIRST
    if fold.deletes and fold.plan.target.is_referenced and not _returns(fold):
        return Removal.LAST
    return Removal.FIRST


def keeps_keys(fold: Fold) -> bool:
    """Return whether a TRUNCATE must keep the rows whose keys are inserted again afterwards.

    The referencing table may already contain rows of later changes, which refer to the new rows.
    """
    plan = fold.plan
    return (
        fold.truncate
        and plan.target.is_referenced
        and plan.key_is_indexed
        and plan.identity is Identity.KEY
        and not plan.has_expressions
        and not (fold.deletes or fold.updates or fold.moves)
    )


def _returns(fold: Fold) -> bool:
    """Return whether an insert repeats a removed key, or perhaps a removed row's unique value."""
    return len(fold.plan.target.unique_keys) > 1 or not fold.inserts.keys().isdisjoint(fold.deletes)
