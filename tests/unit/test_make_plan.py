"""How changes become changes of the target: columns, sid, identity, and rejections."""

import pytest

from streamer.apply.rows.apply_plan import ApplyPlan, Identity
from streamer.apply.rows.make_plan import make_plan
from streamer.errors.error_classes import Retry, TargetSchemaError
from streamer.mapping.rule_options import OnColumnAdded, TableType
from streamer.schema.target_relation import TargetColumn
from tests.unit.build import (
    apply_plan,
    relation,
    relation_mapping,
    target_column,
    target_relation,
)


def columns_of(plan: ApplyPlan) -> list[tuple[int, str]]:
    return [(column.position, column.name) for column in plan.columns]


def key_of(plan: ApplyPlan) -> list[str]:
    return [column.name for column in plan.key]


# ---- columns -----------------------------------------------------------------------------------


def test_columns_are_matched_by_name_whatever_their_order() -> None:
    plan = make_plan(
        relation(["a", "b", "c"], ["a"]),
        relation_mapping(),
        target_relation(["c", "extra", "a", "b"]),
    )
    assert columns_of(plan) == [(0, "a"), (1, "b"), (2, "c")]
    assert plan.positions == (0, 1, 2)


def test_a_missing_target_is_refused() -> None:
    with pytest.raises(TargetSchemaError, match=r'"sales\.t" does not exist') as caught:
        make_plan(relation(["a"]), relation_mapping(target="sales.t"), None)
    assert "create_tables: true" in str(caught.value)


def test_missing_columns_are_refused_with_the_statement_that_adds_them() -> None:
    with pytest.raises(TargetSchemaError) as caught:
        make_plan(
            relation(["a", 'we"ird', "c"], ["a"]),
            relation_mapping(target="sales.t"),
            target_relation(["a"], name="sales.t"),
            type_names={'we"ird': "numeric(10,2)"},
        )
    assert caught.value.message == 'target table "sales.t" has no column "we"ird", "c"'
    hint = caught.value.hint
    assert hint is not None
    statement = (
        'alter table "sales"."t" add column "we""ird" numeric(10,2), add column "c" <its type>'
    )
    assert statement in hint
    assert caught.value.retry is Retry.MANUAL


def test_an_excluded_column_need_not_be_there() -> None:
    plan = make_plan(
        relation(["a", "b", "c"], ["a"]),
        relation_mapping(exclude=["b"]),
        target_relation(["a", "c"]),
    )
    assert columns_of(plan) == [(0, "a"), (2, "c")]


def test_an_excluded_column_is_not_written_even_if_it_is_there() -> None:
    plan = make_plan(
        relation(["a", "b"], ["a"]),
        relation_mapping(exclude=["b"]),
        target_relation(["a", "b"]),
    )
    assert columns_of(plan) == [(0, "a")]


def test_a_column_that_the_target_lacks_may_be_ignored() -> None:
    plan = make_plan(
        relation(["a", "b", "c"], ["a"]),
        relation_mapping(on_column_added=OnColumnAdded.IGNORE),
        target_relation(["a", "c"]),
    )
    assert columns_of(plan) == [(0, "a"), (2, "c")]


def test_a_key_that_the_target_lacks_is_not_ignored() -> None:
    with pytest.raises(TargetSchemaError, match='key column "a"'):
        make_plan(
            relation(["a", "b"], ["a"]),
            relation_mapping(on_column_added=OnColumnAdded.IGNORE),
            target_relation(["b"]),
        )


def test_a_renamed_column_goes_where_it_should() -> None:
    plan = make_plan(
        relation(["id", "name"], ["id"]),
        relation_mapping(columns={"id": "item_id", "name": "name"}),
        target_relation(["name", "item_id"]),
    )
    assert columns_of(plan) == [(0, "item_id"), (1, "name")]
    assert key_of(plan) == ["item_id"]


def test_a_renamed_column_that_is_missing_is_named_as_the_target_would() -> None:
    with pytest.raises(TargetSchemaError, match='has no column "item_id"') as caught:
        make_plan(
            relation(["id"], ["id"]),
            relation_mapping(columns={"id": "item_id"}),
            target_relation(["id"]),
            type_names={"id": "bigint"},
        )
    assert 'add column "item_id" bigint' in str(caught.value)


def test_a_column_that_the_rule_does_not_list_may_be_missing() -> None:
    plan = make_plan(
        relation(["id", "later", "there"], ["id"]),
        relation_mapping(columns={"id": "id"}),
        target_relation(["id", "there"]),
    )
    assert columns_of(plan) == [(0, "id"), (2, "there")]


def test_two_source_columns_never_go_to_one_target_column() -> None:
    """The rule renames a to b; the source also has a column b, which the rule does not list."""
    plan = make_plan(
        relation(["id", "a", "b"], ["id"]),
        relation_mapping(columns={"id": "id", "a": "b"}),
        target_relation(["id", "b"]),
    )
    assert columns_of(plan) == [(0, "id"), (1, "b")]


def test_a_key_column_whose_name_another_column_takes_is_missed() -> None:
    with pytest.raises(TargetSchemaError, match=r'key column "b" .* is not written to the target'):
        make_plan(
            relation(["a", "b"], ["b"]),
            relation_mapping(columns={"a": "b"}),
            target_relation(["b"]),
        )


def test_columns_that_the_target_computes_are_not_written() -> None:
    plan = make_plan(
        relation(["id", "sum"], ["id"]),
        relation_mapping(),
        target_relation(["id", target_column("sum", generated=True, not_null=True)]),
    )
    assert columns_of(plan) == [(0, "id")]


@pytest.mark.parametrize(
    ("column", "is_refused"),
    [
        (target_column("x", not_null=True), True),
        (target_column("x"), False),
        (target_column("x", not_null=True, has_default=True), False),
        (target_column("x", not_null=True, generated=True), False),
    ],
)
def test_a_column_that_nothing_fills_must_be_able_to_do_without(
    column: TargetColumn, is_refused: bool
) -> None:
    target = target_relation(["id", column])
    if is_refused:
        with pytest.raises(TargetSchemaError, match=r'column "x" .* is NOT NULL'):
            make_plan(relation(["id"], ["id"]), relation_mapping(), target)
    else:
        plan = make_plan(relation(["id"], ["id"]), relation_mapping(), target)
        assert columns_of(plan) == [(0, "id")]


def test_an_identity_column_without_updates_is_refused_with_the_statement_to_run() -> None:
    target = target_relation(["id", target_column("n", "bigint", identity_always=True)])
    with pytest.raises(TargetSchemaError, match="GENERATED ALWAYS AS IDENTITY") as caught:
        make_plan(relation(["id", "n"], ["id"]), relation_mapping(), target)
    statement = 'alter table "public"."t" alter column "n" set generated by default'
    assert statement in str(caught.value)


def test_an_identity_column_may_be_the_key_or_be_filled_by_inserts_alone() -> None:
    target = target_relation([target_column("id", "bigint", identity_always=True), "a"])
    plan = make_plan(relation(["id", "a"], ["id"]), relation_mapping(), target)
    assert key_of(plan) == ["id"]
    plan = make_plan(relation(["id", "a"], identity="n"), relation_mapping(), target)
    assert plan.identity is Identity.NONE


# ---- the sid -----------------------------------------------------------------------------------


def test_the_sid_is_written_where_the_target_has_a_column_for_it() -> None:
    target = target_relation(["id", target_column("sid", not_null=True)])
    plan = make_plan(relation(["id"], ["id"]), relation_mapping(sid="eu"), target)
    assert plan.sid == "eu"
    assert columns_of(plan) == [(0, "id")]
    assert plan.truncates_by_delete


def test_a_target_without_a_column_for_it_gets_no_sid() -> None:
    plan = make_plan(relation(["id"], ["id"]), relation_mapping(sid="eu"), target_relation(["id"]))
    assert plan.sid is None
    assert not plan.truncates_by_delete


def test_a_target_that_wants_a_sid_is_refused_to_a_source_without() -> None:
    with pytest.raises(TargetSchemaError, match="this source has no sid"):
        make_plan(relation(["id"], ["id"]), relation_mapping(), target_relation(["id", "sid"]))


def test_a_source_column_called_sid_is_a_column_like_any_other() -> None:
    plan = make_plan(
        relation(["id", "sid"], ["id"]),
        relation_mapping(),
        target_relation(["id", "sid"]),
    )
    assert plan.sid is None
    assert columns_of(plan) == [(0, "id"), (1, "sid")]


def test_a_source_column_called_sid_must_not_meet_the_sid() -> None:
    with pytest.raises(
        TargetSchemaError, match=r'column "sid" of source table "public\.t"'
    ) as caught:
        make_plan(
            relation(["id", "sid"], ["id"]),
            relation_mapping(sid="eu"),
            target_relation(["id", "sid"]),
        )
    assert "`columns`" in str(caught.value)


def test_renamed_or_excluded_it_does_not_meet_it() -> None:
    for mapping, names in (
        (relation_mapping(exclude=["sid"], sid="eu"), ["id", "sid"]),
        (
            relation_mapping(columns={"id": "id", "sid": "their_sid"}, sid="eu"),
            ["id", "their_sid", "sid"],
        ),
    ):
        plan = make_plan(relation(["id", "sid"], ["id"]), mapping, target_relation(names))
        assert plan.sid == "eu"
        assert "sid" not in [column.name for column in plan.columns]


# ---- identity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", ["d", "i"])
def test_the_key_is_the_key_of_the_source(identity: str) -> None:
    plan = make_plan(
        relation(["a", "b", "c"], ["c", "a"], identity=identity),
        relation_mapping(),
        target_relation(["a", "b", "c"], unique_keys=[("b",)]),
    )
    assert plan.identity is Identity.KEY
    assert key_of(plan) == ["a", "c"]
    assert not plan.key_is_indexed


@pytest.mark.parametrize("identity", ["d", "n"])
def test_a_source_without_a_key_sends_only_inserts(identity: str) -> None:
    plan = apply_plan(["a", "b"], identity=identity)
    assert plan.identity is Identity.NONE
    assert plan.key == ()
    assert not plan.must_order


@pytest.mark.parametrize("there", [["b"], ["b", target_column("a", generated=True)]])
def test_a_key_that_does_not_get_to_the_target_is_refused(
    there: list[str | TargetColumn],
) -> None:
    exclude = ["a"] if there == ["b"] else []
    with pytest.raises(TargetSchemaError, match=r'key column "a" of source table "public\.t"'):
        make_plan(
            relation(["a", "b"], ["a"]),
            relation_mapping(exclude=exclude),
            target_relation(there),
        )


def full(
    unique_keys: list[tuple[str, ...]],
    columns: list[str | TargetColumn] | None = None,
    *,
    sid: str | None = None,
    exclude: list[str] | None = None,
) -> ApplyPlan:
    return make_plan(
        relation(["a", "b", "c"], identity="f"),
        relation_mapping(exclude=exclude or [], sid=sid),
        target_relation(columns or ["a", "b", "c"], unique_keys=unique_keys),
    )


def test_whole_old_rows_are_found_by_unique_columns_of_the_target() -> None:
    plan = full([("c", "a"), ("b",)])
    assert plan.identity is Identity.KEY
    assert key_of(plan) == ["c", "a"]
    assert plan.key_is_indexed
    assert not plan.must_order


def test_whole_old_rows_without_such_a_key_are_found_by_all_columns() -> None:
    plan = full([])
    assert plan.identity is Identity.ROW
    assert key_of(plan) == ["a", "b", "c"]
    assert plan.must_order


def test_a_unique_key_that_may_be_null_finds_nothing() -> None:
    plan = full([("a",), ("b",)], [target_column("a"), target_column("b", not_null=True), "c"])
    assert key_of(plan) == ["b"]
    plan = full([("a",)], [target_column("a"), "b", "c"])
    assert plan.identity is Identity.ROW


def test_a_unique_key_of_columns_that_the_source_lacks_finds_nothing() -> None:
    there: list[str | TargetColumn] = ["a", "b", "c", target_column("x", has_default=True)]
    assert full([("x",), ("a", "x")], there).identity is Identity.ROW
    assert full([("a",)], exclude=["a"], columns=["b", "c"]).identity is Identity.ROW


def test_the_sid_in_a_unique_key_is_known_without_the_source() -> None:
    there: list[str | TargetColumn] = ["sid", "a", "b", "c"]
    plan = full([("sid", "a")], there, sid="eu")
    assert plan.identity is Identity.KEY
    assert key_of(plan) == ["a"]
    assert plan.key_is_indexed
    assert full([("sid",)], there, sid="eu").identity is Identity.ROW


def test_a_history_table_trusts_the_sources_primary_key() -> None:
    there: list[str | TargetColumn] = [
        target_column("a", not_null=True),
        target_column("b", not_null=True),
        *("kvsz_start", "kvsz_end", "kvsz_deleted"),
    ]
    target = target_relation(there, unique_keys=[("b",)])
    mapping = relation_mapping(table_type=TableType.HISTORY)
    definition = relation(["a", "b"], identity="f")

    def plan_with(*keys: tuple[str, ...]) -> ApplyPlan:
        return make_plan(definition, mapping, target, primary_key=("a",), source_keys=keys)

    plan = plan_with(("a",))
    assert key_of(plan) == ["a"]
    assert plan.must_order
    assert make_plan(definition, mapping, target).identity is Identity.ROW
    # A deferrable index distinguishes versions, but not the rows of a transaction.
    late = plan_with()
    assert late.identity is Identity.ROW
    assert [column.name for column in late.version_key] == ["a"]


def test_an_append_table_trusts_no_key_that_the_source_checks_late() -> None:
    target = target_relation(["a", "b"], unique_keys=[("a",)])
    mapping = relation_mapping(table_type=TableType.APPEND)
    definition = relation(["a", "b"], identity="f")
    assert make_plan(definition, mapping, target).identity is Identity.ROW
    plan = make_plan(definition, mapping, target, source_keys=(("a",),))
    assert key_of(plan) == ["a"]


def test_a_history_table_needs_its_columns() -> None:
    target = target_relation(["a", "kvsz_start"])
    with pytest.raises(TargetSchemaError, match='has no column "kvsz_end"') as caught:
        make_plan(
            relation(["a"], ["a"]),
            relation_mapping(table_type=TableType.HISTORY),
            target,
        )
    hint = str(caught.value)
    assert 'add column "kvsz_deleted" boolean default false not null' in hint
    assert 'add column "kvsz_end" timestamp with time zone default' in hint
    assert "kvsz_start" not in hint


# ---- consequences of a plan ---------------------------------------------------------------------


def test_triggers_that_fire_want_exact_order() -> None:
    target = target_relation(["a"], has_row_triggers=True)
    plan = make_plan(relation(["a"], ["a"]), relation_mapping(), target)
    assert plan.must_order


def test_a_referenced_table_is_emptied_by_delete() -> None:
    target = target_relation(["a"], is_referenced=True)
    plan = make_plan(relation(["a"], ["a"]), relation_mapping(), target)
    assert plan.truncates_by_delete


def test_a_key_with_the_sid_is_indexed_by_an_index_of_both() -> None:
    for unique_key, is_indexed in ((("sid", "a"), True), (("a",), True), (("a", "b"), False)):
        target = target_relation(["sid", "a", "b"], unique_keys=[unique_key])
        plan = make_plan(relation(["a", "b"], ["a"]), relation_mapping(sid="eu"), target)
        assert plan.key_is_indexed == is_indexed


def test_a_key_is_a_value_or_a_tuple_but_always_a_list_where_it_is_written() -> None:
    single, double = apply_plan(["a", "b"], ["b"]), apply_plan(["a", "b"], ["a", "b"])
    row = [b"A", b"B"]
    assert single.get_key(row) == b"B"
    assert double.get_key(row) == (b"A", b"B")


def test_a_plan_keeps_its_definitions() -> None:
    plan = make_plan(
        relation(["a"], ["a"]),
        relation_mapping(target='my."t.x"'),
        target_relation(["a"], name='my."t.x"'),
        binary=True,
        number=7,
    )
    assert (plan.number, plan.binary, plan.type) == (7, True, TableType.CLONE)
    assert plan.table == '"my"."t.x"'
