"""The steps that write the changes of a window. Integration tests show the effect on servers."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from streamer.apply.lanes.lane_window import LaneWindow, RelationWindow
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.copydata import Copy
from streamer.apply.rows.fold import Fold
from streamer.apply.sql.set_statements import OP_CLEAR, OP_DELETE, OP_MOVED, OP_UPDATED_PARTLY
from streamer.apply.sql.set_statements import OP_UPDATED as UPDATED
from streamer.apply.sql.wide_rows import PlanStatements, SplitStatements
from streamer.apply.write.foreign_key_order import Half, write_order
from streamer.apply.write.staged_rows import OrderedRun
from streamer.apply.write.write_steps import (
    Change,
    Execute,
    InOrder,
    RequireFacts,
    Staged,
    Step,
    fold_steps,
    ordered_steps,
)
from streamer.decode.pgoutput import TRUNCATE
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import UNCHANGED, Row, merge
from streamer.errors.error_classes import ConflictError
from streamer.mapping.expressions import parse_expression
from streamer.util.lsn import Lsn
from tests.property import encode
from tests.unit import build

RELID = 16385
PLAN = build.apply_plan(["id", "v"], ["id"])
REFERENCED = replace(PLAN, target=replace(PLAN.target, oid=1, is_referenced=True))
NOT_INDEXED = replace(PLAN, target=replace(PLAN.target, unique_keys=()))
RULE = PLAN.mapping.rule
FILTERED = replace(
    PLAN,
    mapping=replace(PLAN.mapping, rule=replace(RULE, filter=parse_expression("v > 'a'"))),
)
SKIPPING = replace(PLAN, mapping=replace(PLAN.mapping, rule=replace(RULE, skip_truncate=True)))


def steps_of(fold: Fold, half: Half = Half.BOTH, *, fires_keys: bool = False) -> list[Step]:
    """All steps of a fold; steps that share a staging table follow the creation of the table."""

    def flat(steps: Iterable[Step]) -> Iterator[Step]:
        for step in steps:
            yield step
            if isinstance(step, Staged):
                yield from flat(step.steps)

    return list(flat(fold_steps(fold, PlanStatements(fold.plan), half, fires_keys=fires_keys)))


def changes_of(fold: Fold, **options: Any) -> dict[int, Change]:
    return {step.op: step for step in steps_of(fold, **options) if isinstance(step, Change)}


def data(copy: Copy) -> bytes:
    return b"".join(copy.chunks)


def partial(key: bytes) -> Row:
    return merge([key, UNCHANGED], [key, UNCHANGED])


def every_change(plan: ApplyPlan = PLAN) -> Fold:
    """A fold with a change of each kind."""
    return Fold(
        plan,
        deletes={b"7": None, b"3": None, b"8": None},
        updates={b"5": [b"5", b"e"], b"4": [b"4", b"d"], b"6": partial(b"6")},
        moves={b"9": (b"8", partial(b"9"))},
        inserts={b"2": [b"2", b"b"], b"1": [b"1", b"a"]},
    )


def test_rows_are_removed_first_and_inserted_last_each_in_the_order_of_keys() -> None:
    staged, *changes, keep, inserts = steps_of(every_change())
    assert isinstance(staged, Staged)
    assert isinstance(keep, RequireFacts)
    assert staged.count == 9
    assert staged.is_indexed
    rows = {step.op: data(step.rows) for step in changes if isinstance(step, Change)}
    assert list(rows.items()) == [
        (OP_DELETE, b"1\t3\n1\t7\n"),
        (OP_MOVED, b"11\t.u\t8\t9\t\\N\n"),
        (UPDATED, b"9\t4\td\n9\t5\te\n"),
        (OP_UPDATED_PARTLY, b"10\t.u\t6\t\\N\n"),
    ]
    assert isinstance(inserts, Copy)
    assert (inserts.namespace, inserts.table) == ("public", "t")
    assert data(inserts) == b"2\tb\n1\ta\n"  # as the source inserted them


def test_inserts_alone_need_no_staging_table() -> None:
    keep, inserts = steps_of(Fold(PLAN, inserts={b"1": [b"1", b"a"]}))
    assert isinstance(keep, RequireFacts)
    assert isinstance(inserts, Copy)
    assert steps_of(Fold(PLAN)) == []


def test_a_row_that_stays_is_written_and_one_that_goes_is_not() -> None:
    changes = changes_of(every_change())
    kinds = {op: (bool(c.leaves), bool(c.writes), c.inserts) for op, c in changes.items()}
    assert kinds == {
        OP_DELETE: (True, False, False),
        OP_MOVED: (False, True, False),
        UPDATED: (False, True, True),  # only a whole row can be inserted
        OP_UPDATED_PARTLY: (False, True, False),
    }


@pytest.mark.parametrize(
    ("plan", "fires_keys", "deleted", "updated"),
    [
        (PLAN, False, ("delete_missing", True), ("update_missing", True)),
        (PLAN, True, ("delete_missing", False), ("update_missing", True)),
        (FILTERED, False, (None, False), (None, False)),
        (SKIPPING, False, (None, False), ("update_missing", True)),
    ],
)
def test_a_missing_row_is_a_conflict_unless_it_may_be_missing(
    plan: ApplyPlan, fires_keys: bool, deleted: object, updated: object
) -> None:
    fold = Fold(plan, deletes={b"1": None}, updates={b"2": [b"2", b"b"], b"3": partial(b"3")})
    changes = changes_of(fold, fires_keys=fires_keys)
    facts = {op: (change.conflict, change.is_recorded) for op, change in changes.items()}
    assert facts == {OP_DELETE: deleted, UPDATED: updated, OP_UPDATED_PARTLY: (None, False)}
    assert list(changes[OP_DELETE].keys) == [b"1"]
    assert list(changes[UPDATED].keys) == [b"2"]


def test_rows_leave_a_filter_before_others_enter_it() -> None:
    fold = Fold(FILTERED, updates={b"2": [b"2", b"b"]}, inserts={b"1": [b"1", b"a"]})
    staged, update, rows, insert = steps_of(fold)
    assert isinstance(staged, Staged)
    assert isinstance(update, Change)
    assert update.leaves is not None
    assert update.leaves.startswith("delete from")
    assert isinstance(rows, Copy)
    assert rows.table == staged.statements.stage
    assert isinstance(insert, Execute)
    assert insert.sql.startswith("insert into")


def test_keys_that_no_index_guards_are_cleared_before_they_come_again() -> None:
    plan = replace(SKIPPING, target=NOT_INDEXED.target)
    fold = Fold(plan, deletes={b"1": None}, inserts={b"1": [b"1", b"a"], b"2": [b"2", b"b"]})
    staged, *_ = steps_of(fold)
    assert isinstance(staged, Staged)
    assert not staged.is_indexed
    clear = changes_of(fold)[OP_CLEAR]
    assert (data(clear.rows), clear.count, clear.conflict) == (b"6\t2\n", 1, None)


def truncated(plan: ApplyPlan) -> Fold:
    fold = Fold(plan)
    fold.add([bytes([TRUNCATE]) + (1).to_bytes(4, "big") + b"\2" + RELID.to_bytes(4, "big")])
    fold.inserts[b"1"] = [b"1", b"a"]
    return fold


def test_a_truncate_comes_first_and_restarts_sequences() -> None:
    plan = replace(PLAN, target=replace(PLAN.target, sequences=('"s"',)))
    truncate, keep, inserts = steps_of(truncated(plan), fires_keys=True)
    assert truncate == Execute('truncate only "public"."t"; alter sequence "s" restart')
    assert isinstance(keep, RequireFacts)
    assert isinstance(inserts, Copy)


def test_a_truncate_leaves_the_rows_alone_to_which_others_refer_again() -> None:
    fold = truncated(REFERENCED)
    staged, change, others = steps_of(fold, fires_keys=True)
    assert isinstance(staged, Staged)
    assert isinstance(change, Change)
    assert change.inserts
    assert change.conflict is None
    assert isinstance(others, Execute)
    assert "not exists" in others.sql
    kinds = [
        [type(step) for step in steps_of(fold, half, fires_keys=True)]
        for half in (Half.ADDITIONS, Half.REMOVALS)
    ]
    assert kinds == [[Staged, Change], [Staged, Copy, Execute]]
    assert [type(step) for step in steps_of(fold)] == [Execute, RequireFacts, Copy]


def test_half_of_a_fold_removes_rows_and_the_other_half_adds_some() -> None:
    fold = every_change(REFERENCED)
    assert list(changes_of(fold, half=Half.REMOVALS)) == [OP_DELETE]
    removals = changes_of(fold, half=Half.REMOVALS)[OP_DELETE]
    assert data(removals.rows) == b"1\t3\n1\t7\n1\t8\n"  # with the key from which a row moves
    additions = changes_of(fold, half=Half.ADDITIONS)
    assert list(additions) == [OP_MOVED, UPDATED, OP_UPDATED_PARTLY]
    assert (additions[OP_MOVED].writes or "").startswith("insert into")


def test_a_row_beside_the_moved_one_needs_an_index_that_tells_them_apart() -> None:
    with pytest.raises(ConflictError, match="a row is missing"):
        steps_of(every_change(NOT_INDEXED), Half.ADDITIONS)


def test_tables_that_keys_connect_are_written_in_halves() -> None:
    child_plan = replace(PLAN, target=replace(PLAN.target, oid=2, references=frozenset({1})))
    parent, child = (
        RelationWindow(build.mapped_relation(), [Fold(plan, deletes={b"1": None})], plan=plan)
        for plan in (REFERENCED, child_plan)
    )
    window = LaneWindow(None)  # type: ignore[arg-type]
    window.relations = {child.mapped: child, parent.mapped: parent}
    assert write_order(window) == [
        (child, Half.REMOVALS),
        (parent, Half.ADDITIONS),
        (child, Half.ADDITIONS),
        (parent, Half.REMOVALS),
    ]
    child.require_order()
    assert write_order(window)[1] == (child, Half.BOTH)


def test_exact_order_stages_changes_and_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = [encode.insert(RELID, [b"%d" % n, b"v"]) for n in range(3)]
    run = OrderedRun(PLAN, [(0, Transaction(1, Lsn(1), 0), payloads)])
    (staged,) = ordered_steps(run, PlanStatements(PLAN).in_order, notes=False)
    assert isinstance(staged, Staged)
    copy, block = staged.steps
    assert isinstance(copy, Copy)
    assert copy.first == 0
    assert data(copy).count(b"\n") == 3
    assert isinstance(block, InOrder)

    monkeypatch.setattr("streamer.apply.sql.wide_rows.CELLS_MAX", 15)
    wide, parts = SplitStatements(PLAN), []
    for step in ordered_steps(run, wide, notes=False):
        assert isinstance(step, Staged)
        *copies, block = step.steps
        assert isinstance(block, InOrder)
        parts.append([(c.table, c.first, data(c)) for c in copies if isinstance(c, Copy)])
    tables = [part.table for part in wide.parts]
    assert [[table for table, *_ in part] for part in parts] == [tables, tables]
    # An error about the first row of the second part is about the third change.
    assert [first for part in parts for _, first, _ in part] == [0, 0, 2, 2]
    assert parts[1][1][2] == b"2\t\\N\t2\tv\n"
