"""The net changes of a window; `tests/property` compares windows with single changes."""

from dataclasses import replace

import pytest

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.fold import Counts, Fold, NotFoldable, OrderedChange, read_changes
from streamer.decode.pgoutput import DELETE, INSERT, TRUNCATE, UPDATE
from streamer.decode.transactions import Transaction
from streamer.decode.tuples import NULL, UNCHANGED, Row, read_rows
from streamer.errors.error_classes import IdentityError, ProtocolError
from streamer.mapping.expressions import parse_expression
from streamer.mapping.rule_options import MetadataKind, OnDelete, TableType
from streamer.util.lsn import Lsn
from tests.property import encode
from tests.property.encode import TOAST, Cell
from tests.support.implementations import implementation  # noqa: F401
from tests.unit.build import apply_plan

T = 16385
COLUMNS = ("id", "name", "big")
PLAN = apply_plan(COLUMNS, ("id",))
APPEND = apply_plan(COLUMNS, ("id",), table_type=TableType.APPEND)
FULL = apply_plan(COLUMNS, ("id",), identity="f")
KEYLESS = apply_plan(COLUMNS, identity="n")


def insert(key: bytes, name: Cell = b"n", big: Cell = b"b") -> bytes:
    return encode.insert(T, [key, name, big])


def update(key: bytes, name: Cell = b"m", big: Cell = TOAST) -> bytes:
    return encode.update(T, [key, name, big])


def move(old: bytes, key: bytes, name: Cell = b"m", big: Cell = TOAST) -> bytes:
    return encode.update(T, [key, name, big], key=[old, None, None])


def delete(key: bytes) -> bytes:
    return encode.delete(T, key=[key, None, None])


TRUNCATE_T = encode.truncate([T])


def fold(*payloads: bytes, plan: ApplyPlan = PLAN) -> Fold:
    plan = replace(plan)  # a plan caches objects of a single implementation
    folded = Fold(plan)
    rows = list(payloads)
    if plan.metadata is not None:
        rows = plan.metadata.extend(Transaction(1, Lsn(1), 0), rows) or []
    folded.add(rows)
    return folded


def left(folded: Fold) -> tuple[list[bytes], list[Row], list[tuple[bytes, Row]], list[Row]]:
    return (
        list(folded.deletes),
        read_rows([*folded.updates.values()], folded.plan.binary),
        [(old, read_rows([row], folded.plan.binary)[0]) for old, row in folded.moves.values()],
        read_rows([*folded.inserts.values()], folded.plan.binary),
    )


def test_changes_of_different_keys_are_kept() -> None:
    folded = fold(insert(b"1"), update(b"2"), delete(b"3"), move(b"4", b"5"), insert(b"6"))
    assert left(folded) == (
        [b"3", b"4"],
        [[b"2", b"m", UNCHANGED]],
        [(b"4", [b"5", b"m", UNCHANGED])],
        [[b"1", b"n", b"b"], [b"6", b"n", b"b"]],
    )
    assert folded.row_count == 6
    assert folded.counts == Counts(insert=2, update=2, delete=1)


def test_an_insert_takes_the_updates_that_follow() -> None:
    folded = fold(insert(b"1"), update(b"1", b"x"), update(b"1", None, b"c"))
    assert left(folded) == ([], [], [], [[b"1", NULL, b"c"]])


def test_an_unchanged_value_does_not_overwrite_one_from_the_same_window() -> None:
    folded = fold(update(b"1", b"x", b"new"), update(b"1", b"y"))
    assert left(folded) == ([], [[b"1", b"y", b"new"]], [], [])


def test_an_unchanged_value_that_nobody_sent_stays_unchanged() -> None:
    folded = fold(update(b"1", b"x"), update(b"1", b"y"))
    assert left(folded) == ([], [[b"1", b"y", UNCHANGED]], [], [])


def test_a_row_that_comes_and_goes_leaves_nothing() -> None:
    folded = fold(insert(b"1"), update(b"1"), delete(b"1"))
    assert folded.row_count == 0
    assert folded.counts == Counts(insert=1, update=1, delete=1)


def test_a_row_that_goes_and_comes_again_is_deleted_and_inserted() -> None:
    folded = fold(update(b"1"), delete(b"1"), insert(b"1", b"again"))
    assert left(folded) == ([b"1"], [], [], [[b"1", b"again", b"b"]])


def test_a_key_that_changes_is_no_delete() -> None:
    folded = fold(move(b"1", b"2", b"x", b"y"), delete(b"3"))
    assert left(folded) == ([b"1", b"3"], [], [(b"1", [b"2", b"x", b"y"])], [])
    assert list(folded.removed) == [b"3"]
    folded.add([delete(b"2")])
    assert left(folded) == ([b"1", b"3"], [], [], [])
    assert list(folded.removed) == [b"1", b"3"]


def test_a_row_that_comes_back_to_its_key_is_updated() -> None:
    folded = fold(move(b"1", b"2", b"x", b"y"), move(b"2", b"1", b"z"))
    assert left(folded) == ([], [[b"1", b"z", b"y"]], [], [])


@pytest.mark.parametrize(
    "payloads",
    [
        [move(b"2", b"3"), move(b"1", b"2")],
        [move(b"1", b"-"), move(b"2", b"1"), move(b"-", b"2")],
    ],
    ids=["shift", "swap"],
)
def test_a_key_that_goes_from_row_to_row_wants_exact_order(payloads: list[bytes]) -> None:
    """A single UPDATE could write the second row before the first row has left the key."""
    assert fold(*payloads).must_order
    assert not fold(delete(b"2"), move(b"1", b"2")).must_order


def test_no_update_changes_a_key_that_is_always_generated() -> None:
    always = replace(PLAN.key[0].target, identity_always=True)
    plan = replace(PLAN, key=(replace(PLAN.key[0], target=always),))
    assert fold(move(b"1", b"2"), plan=plan).must_order
    assert not fold(update(b"1"), delete(b"2"), plan=plan).must_order


def test_a_row_that_moves_on_keeps_where_it_came_from() -> None:
    folded = fold(update(b"1", b"x"), move(b"1", b"2", b"y"), move(b"2", b"3", b"z"))
    assert left(folded) == ([b"1"], [], [(b"1", [b"3", b"z", UNCHANGED])], [])
    folded.add([update(b"3", b"last", b"whole")])
    assert left(folded) == ([b"1"], [], [(b"1", [b"3", b"last", b"whole"])], [])


def test_two_keys_can_be_swapped() -> None:
    folded = fold(move(b"1", b"-"), move(b"2", b"1"), move(b"-", b"2"))
    assert left(folded) == (
        [b"1", b"2"],
        [],
        [(b"2", [b"1", b"m", UNCHANGED]), (b"1", [b"2", b"m", UNCHANGED])],
        [],
    )


def test_a_truncate_makes_all_that_was_before_it_pointless() -> None:
    folded = fold(insert(b"1"), update(b"2"), delete(b"3"), move(b"4", b"5"), TRUNCATE_T)
    assert folded.truncate
    assert folded.row_count == 0
    folded.add([insert(b"1")])
    assert left(folded) == ([], [], [], [[b"1", b"n", b"b"]])
    assert folded.counts == Counts(insert=2, update=2, delete=1, truncate=1)


@pytest.mark.parametrize(
    "payloads",
    [
        [insert(b"1"), insert(b"1")],
        [update(b"1"), insert(b"1")],
        [move(b"1", b"2"), insert(b"2")],
        [delete(b"1"), delete(b"1")],
        [delete(b"1"), update(b"1")],
        [delete(b"1"), move(b"1", b"2")],
        [move(b"1", b"2"), update(b"1")],
        [move(b"1", b"2"), delete(b"1")],
        [insert(b"2"), move(b"1", b"2")],
        [update(b"2"), move(b"1", b"2")],
        [move(b"1", b"3"), move(b"2", b"3")],
    ],
)
def test_changes_that_contradict_each_other_are_not_folded(payloads: list[bytes]) -> None:
    with pytest.raises(NotFoldable):
        fold(*payloads)


def test_a_whole_old_row_completes_the_new_one() -> None:
    payload = encode.update(T, [b"1", b"m", TOAST], old=[b"1", b"n", b"big"])
    assert left(fold(payload, plan=FULL)) == ([], [[b"1", b"m", b"big"]], [], [])
    payload = encode.update(T, [b"2", b"m", TOAST], old=[b"1", b"n", b"big"])
    assert left(fold(payload, plan=FULL)) == ([b"1"], [], [(b"1", [b"2", b"m", b"big"])], [])
    assert left(fold(encode.delete(T, old=[b"1", b"n", None]), plan=FULL))[0] == [b"1"]


def test_a_large_key_that_did_not_change_is_taken_from_the_key_tuple() -> None:
    plan = apply_plan(COLUMNS, ("id", "name"))
    payload = encode.update(T, [b"2", TOAST, b"b"], key=[b"1", b"large", None])
    folded = fold(payload, plan=plan)
    assert list(folded.deletes) == [(b"1", b"large")]
    assert folded.moves == {(b"2", b"large"): ((b"1", b"large"), [b"2", b"large", b"b"])}


def test_keys_of_several_columns_are_tuples_in_the_order_of_the_plan() -> None:
    plan = apply_plan(COLUMNS, ("big", "id"), identity="f")
    folded = fold(insert(b"1", b"n", b"k"), plan=plan)
    assert list(folded.inserts) == [(b"k", b"1")]


def test_binary_keys_are_distinguished_by_their_bytes() -> None:
    plan = apply_plan(COLUMNS, ("id",), binary=True)
    payloads = [encode.insert(T, [key, b"", None], binary=True) for key in (b"\0", b"\0\0", b"")]
    assert len(fold(*payloads, plan=plan).inserts) == 3


def test_a_null_key_is_not_the_text_that_stands_for_null() -> None:
    folded = fold(encode.insert(T, [None, b"a", b"b"]), insert(b"\\N"), insert(b"\\U"))
    assert len(folded.inserts) == 3


# ---- which row a change is about ---------------------------------------------------------------


def whole_move(old: bytes, key: bytes, name: bytes) -> bytes:
    return encode.update(T, [key, name, b"b"], old=[old, name, b"b"])


@pytest.mark.parametrize(
    "payloads",
    [
        [whole_move(b"1", b"2", b"x"), whole_move(b"2", b"3", b"y")],
        [whole_move(b"1", b"2", b"x"), whole_move(b"2", b"1", b"y")],
        [insert(b"1", b"new"), encode.delete(T, old=[b"1", b"old", b"b"])],
        [
            encode.update(T, [b"1", b"z", b"b"], old=[b"1", b"x", b"b"]),
            encode.delete(T, old=[b"1", b"y", b"b"]),
        ],
    ],
    ids=["shift", "swap", "inserted before the other goes", "updated, and the other goes"],
)
def test_an_old_row_that_is_not_the_pending_one_is_not_folded(payloads: list[bytes]) -> None:
    with pytest.raises(NotFoldable):
        fold(*payloads, plan=FULL)


def test_an_old_row_that_is_the_pending_one_is_folded() -> None:
    moved = fold(whole_move(b"1", b"2", b"x"), whole_move(b"2", b"3", b"x"), plan=FULL)
    assert left(moved) == ([b"1"], [], [(b"1", [b"3", b"x", b"b"])], [])


@pytest.mark.parametrize(
    ("plan", "payload"),
    [
        (FULL, update(b"1", b"m", b"b")),
        (FULL, move(b"1", b"2", b"m", b"b")),
        (FULL, delete(b"1")),
        (apply_plan(COLUMNS, identity="f"), update(b"1", b"m", b"b")),
        (apply_plan(COLUMNS, identity="f"), delete(b"1")),
        (PLAN, encode.delete(T, key=[None, b"n", None])),
        (PLAN, encode.update(T, [b"1", b"m", b"b"], key=[None, b"n", None])),
        (apply_plan(COLUMNS, ("id", "name")), encode.delete(T, key=[b"1", None, None])),
        (
            apply_plan(COLUMNS, ("id",), binary=True),
            encode.delete(T, key=[None, b"n", None], binary=True),
        ),
    ],
)
def test_a_change_that_lacks_its_old_values_is_never_guessed_at(
    plan: ApplyPlan, payload: bytes
) -> None:
    with pytest.raises(IdentityError, match="replica identity"):
        list(read_changes(plan, [payload]))
    if not plan.must_order:
        with pytest.raises(IdentityError, match="replica identity"):
            fold(payload, plan=plan)


# ---- tables without a key ----------------------------------------------------------------------


def test_a_table_without_key_takes_inserts_in_order_also_of_equal_rows() -> None:
    folded = fold(insert(b"2"), insert(b"1"), insert(b"2"), plan=KEYLESS)
    assert [row[0] for row in left(folded)[3]] == [b"2", b"1", b"2"]
    folded.add([TRUNCATE_T, insert(b"3")])
    assert folded.truncate
    assert [row[0] for row in folded.inserts.values()] == [b"3"]


@pytest.mark.parametrize("payload", [update(b"1"), delete(b"1"), move(b"1", b"2")])
def test_a_table_without_key_folds_only_inserts(payload: bytes) -> None:
    with pytest.raises(NotFoldable):
        fold(payload, plan=KEYLESS)


# ---- append tables -----------------------------------------------------------------------------


def test_an_append_table_ignores_deletes_and_truncates_but_counts_them() -> None:
    folded = fold(insert(b"1"), delete(b"1"), delete(b"2"), TRUNCATE_T, plan=APPEND)
    assert left(folded) == ([], [], [], [[b"1", b"n", b"b"]])
    assert not folded.truncate
    assert folded.counts == Counts(insert=1, delete=2, truncate=1)


def test_a_row_that_comes_again_takes_the_place_of_the_one_that_was_kept() -> None:
    folded = fold(insert(b"1"), delete(b"1"), insert(b"1", b"again"), plan=APPEND)
    assert left(folded)[3] == [[b"1", b"again", b"b"]]
    folded = fold(update(b"1"), delete(b"1"), insert(b"1", b"again"), plan=APPEND)
    assert left(folded) == ([b"1"], [], [], [[b"1", b"again", b"b"]])


def test_a_row_that_comes_and_goes_removes_the_one_that_it_had_replaced() -> None:
    """In exact order, the insert removes a row with the same key that outlived a TRUNCATE."""
    plan = replace(PLAN, outlives=True)
    assert left(fold(insert(b"1"), delete(b"1"), plan=plan)) == ([b"1"], [], [], [])
    changes = [insert(b"1"), update(b"1"), delete(b"1"), insert(b"1", b"new")]
    assert left(fold(*changes, plan=plan)) == ([b"1"], [], [], [[b"1", b"new", b"b"]])
    again = [insert(b"1"), delete(b"1"), insert(b"1"), delete(b"1"), insert(b"2")]
    folded = fold(*again, plan=plan)
    assert left(folded) == ([b"1"], [], [], [[b"2", b"n", b"b"]])
    assert folded.counts == Counts(insert=3, delete=2)


def test_a_key_that_changes_makes_room_in_an_append_table() -> None:
    folded = fold(move(b"1", b"2", b"x", b"y"), plan=APPEND)
    assert left(folded) == ([b"1", b"2"], [], [(b"1", [b"2", b"x", b"y"])], [])
    assert list(folded.removed) == [b"2"]


def test_an_append_table_without_key_ignores_truncates() -> None:
    plan = apply_plan(COLUMNS, identity="n", table_type=TableType.APPEND)
    folded = fold(insert(b"1"), TRUNCATE_T, insert(b"2"), plan=plan)
    assert not folded.truncate
    assert len(folded.inserts) == 2


# ---- malformed messages ------------------------------------------------------------------------

MALFORMED = [
    pytest.param(b"I", id="nothing after the kind"),
    pytest.param(insert(b"1")[:-1], id="truncated"),
    pytest.param(insert(b"1") + b"x", id="trailing bytes"),
    pytest.param(insert(b"1").replace(b"N", b"K", 1), id="insert of a key tuple"),
    pytest.param(update(b"1") + b"\0", id="update with trailing bytes"),
    pytest.param(move(b"1", b"2")[:20], id="update with a key tuple alone"),
    pytest.param(update(b"1").replace(b"N", b"X", 1), id="update with an unknown tuple"),
    pytest.param(delete(b"1").replace(b"K", b"N", 1), id="delete of a new tuple"),
    pytest.param(delete(b"1")[:-1], id="truncated delete"),
    pytest.param(b"X" + insert(b"1")[1:], id="unknown kind"),
]


@pytest.mark.parametrize("payload", MALFORMED)
@pytest.mark.parametrize("plan", [PLAN, APPEND, FULL], ids=["clone", "append", "full"])
def test_a_malformed_change_is_a_protocol_error(plan: ApplyPlan, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        fold(payload, plan=plan)


@pytest.mark.parametrize("payload", [b"I", insert(b"1")[:-1], insert(b"1") + b"x"])
def test_a_malformed_insert_of_a_table_without_key_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        fold(payload, plan=KEYLESS)


@pytest.mark.parametrize("payload", MALFORMED)
def test_a_malformed_change_is_a_protocol_error_in_exact_order_too(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(read_changes(PLAN, [payload]))


def test_rows_of_different_widths_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        fold(insert(b"1"), encode.update(T, [b"1", TOAST]))
    within_one = encode.update(T, [b"1", TOAST], old=[b"1", b"n", b"big"])
    with pytest.raises(ProtocolError):
        fold(within_one, plan=FULL)
    with pytest.raises(ProtocolError):
        list(read_changes(FULL, [within_one]))


# ---- exact order -------------------------------------------------------------------------------


def test_changes_are_read_one_by_one_as_the_source_made_them() -> None:
    payloads = [insert(b"1"), update(b"1"), move(b"1", b"2"), delete(b"2"), TRUNCATE_T]
    key = [b"1", NULL, NULL]
    assert list(read_changes(PLAN, payloads)) == [
        OrderedChange(INSERT, None, [b"1", b"n", b"b"]),
        OrderedChange(UPDATE, None, [b"1", b"m", UNCHANGED]),
        OrderedChange(UPDATE, key, [b"2", b"m", UNCHANGED]),
        OrderedChange(DELETE, [b"2", NULL, NULL], None),
        OrderedChange(TRUNCATE, None, None),
    ]


def test_a_whole_old_row_completes_the_new_one_in_exact_order_too() -> None:
    payload = encode.update(T, [b"1", b"m", TOAST], old=[b"1", b"n", b"big"])
    (change,) = read_changes(FULL, [payload])
    assert change == OrderedChange(UPDATE, [b"1", b"n", b"big"], [b"1", b"m", b"big"])


def test_changes_are_counted_by_operation() -> None:
    payloads = [insert(b"1"), insert(b"2"), update(b"1"), delete(b"2"), TRUNCATE_T]
    assert Counts().count(payloads) == Counts(2, 1, 1, 1)


def _marking_in_filter() -> ApplyPlan:
    rule = replace(
        PLAN.mapping.rule,
        filter=parse_expression("name = 'n'"),
        on_delete=OnDelete.MARK,
        metadata=((MetadataKind.DELETED_AT, "gone"),),
    )
    return replace(PLAN, mapping=replace(PLAN.mapping, rule=rule))


def test_sets_mark_a_row_in_a_filter_that_has_one_change() -> None:
    """A row keeps its last state inside the filter, which the last change does not show."""
    plan = _marking_in_filter()
    folded = fold(delete(b"1"), insert(b"1"), update(b"2"), insert(b"3"), plan=plan)
    (facts,) = folded.deletes.values()
    assert (list(folded.deletes), (facts or [])[:3]) == ([b"1"], [b"1", NULL, NULL])
    assert (list(folded.updates), list(folded.inserts)) == ([b"2"], [b"1", b"3"])
    for changes in (
        [update(b"1"), update(b"1")],
        [update(b"1"), delete(b"1")],
        [update(b"1"), insert(b"1")],
        [insert(b"1"), update(b"1")],
        [insert(b"1"), delete(b"1"), insert(b"2")],
        [delete(b"1"), insert(b"1"), delete(b"1")],
        [delete(b"1"), insert(b"1"), update(b"1")],
        [move(b"1", b"2")],
        [move(b"1", b"2", big=b"b")],
        [TRUNCATE_T],
    ):
        with pytest.raises(NotFoldable):
            fold(*changes, plan=plan)
