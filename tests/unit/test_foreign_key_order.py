"""Groups of tables that foreign keys connect, and the order in which a window writes them."""

from dataclasses import replace

from streamer.apply.lanes.lane_window import LaneWindow, RelationWindow
from streamer.apply.rows.fold import Fold
from streamer.apply.write.foreign_key_order import Removal, in_key_order, is_connected, removal_of
from streamer.mapping.relation_names import RelationName
from streamer.target.foreign_key_groups import connect
from tests.unit import build


def name(table: str) -> RelationName:
    return RelationName("public", table)


def relation(oid: int, *references: int, is_referenced: bool = False) -> RelationWindow:
    plan = build.apply_plan(["id", "v"], ["id"])
    target = replace(
        plan.target, oid=oid, references=frozenset(references), is_referenced=is_referenced
    )
    plan = replace(plan, target=target)
    return RelationWindow(build.mapped_relation(), [Fold(plan)], plan=plan)


def window(*relations: RelationWindow) -> LaneWindow:
    made = LaneWindow(None)  # type: ignore[arg-type]
    made.relations = {each.mapped: each for each in relations}
    return made


def test_foreign_keys_connect_tables_to_groups_in_any_order() -> None:
    pairs = [(name("c"), name("b")), (name("x"), name("y")), (name("b"), name("a"))]
    for order in (pairs, pairs[::-1]):
        assert connect(order) == {
            name("a"): name("a"),
            name("b"): name("a"),
            name("c"): name("a"),
            name("x"): name("x"),
            name("y"): name("x"),
        }


def test_tables_that_are_referred_to_come_first() -> None:
    child, parent, other = relation(1, 2), relation(2, 3), relation(3)
    assert is_connected(window(child, parent))
    assert not is_connected(window(child, other))
    assert not is_connected(window(child))
    assert in_key_order([child, parent, other]) == [other, parent, child]
    circle = relation(4, 5), relation(5, 4)
    assert sorted(r.plan.target.oid for r in in_key_order(circle) if r.plan) == [4, 5]


def test_rows_that_others_refer_to_are_removed_last_unless_their_values_return() -> None:
    parent, child = relation(1, is_referenced=True), relation(2, 1)
    for each in (parent, child):
        each.folds[0].deletes[b"1"] = None
    assert removal_of(parent) is Removal.LAST
    assert removal_of(child) is Removal.FIRST
    parent.folds[0].inserts[b"1"] = [b"1", b"again"]
    assert removal_of(parent) is Removal.FIRST
    parent.folds[0].truncate = True
    assert removal_of(parent) is Removal.FIRST
    parent.folds[0].deletes.clear()  # the rows whose keys are there again stay
    assert removal_of(parent) is Removal.LAST
    parent.folds.append(parent.folds[0])
    assert removal_of(parent) is Removal.WITHIN


def test_a_key_that_others_refer_to_stays_until_they_have_the_new_one() -> None:
    parent, child = relation(1, is_referenced=True), relation(2, 1)
    for each in (parent, child):
        each.folds[0].deletes[b"1"] = None
        each.folds[0].moves[b"2"] = (b"1", [b"2", b"v"])
    assert removal_of(parent) is Removal.LAST
    assert removal_of(child) is Removal.WITHIN
    assert list(parent.folds[0].removals().removed) == [b"1"]
    assert not parent.folds[0].additions().deletes
    parent.folds[0].inserts[b"1"] = [b"1", b"again"]
    assert removal_of(parent) is Removal.WITHIN


def test_a_delete_that_takes_other_rows_along_is_no_way_to_change_a_key() -> None:
    parent = relation(1, is_referenced=True)
    fold = parent.folds[0]
    fold.deletes[b"1"] = None
    fold.moves[b"2"] = (b"1", [b"2", b"v"])
    fold.plan = replace(fold.plan, target=replace(fold.plan.target, delete_acts=True))
    assert removal_of(parent) is Removal.WITHIN
