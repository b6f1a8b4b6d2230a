"""SQL text: statements quote all names, and a source touches only its own rows.

Tests on real servers show the effect of the statements; this file has the properties that no server
shows.
"""

import dataclasses
import re
from typing import Any

import pytest

from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.make_plan import make_plan
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.set_statements import OP_DELETE, OP_INSERT, OP_MOVED, OP_UPDATED
from streamer.apply.sql.wide_rows import PART_COLUMNS_MAX, SplitStatements, statements_in_order
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier
from tests.unit.build import (
    EQUALS,
    apply_plan,
    relation,
    table_rule,
    target_column,
    target_relation,
)

HOSTILE = [
    'a"b',
    "it's",
    "; drop table x; --",
    '"; drop table x; --',
    "'; drop table x; --",
    "\\'; drop table x; --",
    "/* drop table x",
    "$streamer$ drop table x",
    "$streamer_$",
    "select",
    "new\nline",
]
"""Names that would end a quotation, a comment or a block without quoting."""


def hostile_plan(
    table_type: TableType = TableType.CLONE, identity: str = "d", *, keyed: bool = True
) -> ApplyPlan:
    """A plan in which all names are hostile."""
    name = RelationName('s"; drop schema x', "t'; drop table x; --")
    unique = [("sid", *HOSTILE[:2])] if keyed else []
    there = [target_column(column, not_null=column in HOSTILE[:2]) for column in HOSTILE]
    there.append(target_column("sid", not_null=True))
    there += [target_column(c) for c in ("kvsz_start", "kvsz_end", "kvsz_deleted")]
    target = target_relation(there, unique_keys=unique, leading_index_columns=HOSTILE[2:3])
    sid = "e'u\\; drop table x; --"
    mapping = RelationMapping(name, name, table_rule(table_type=table_type), sid)
    return make_plan(
        relation(HOSTILE, HOSTILE[:2] if keyed else (), identity=identity),
        mapping,
        dataclasses.replace(target, name=name),
        primary_key=tuple(HOSTILE[:2]),
        source_keys=(tuple(HOSTILE[:2]),),
        number=3,
    )


PLANS = {
    f"{table_type} {identity}{'' if keyed else ' without key'}": hostile_plan(
        table_type, identity, keyed=keyed
    )
    for table_type in TableType
    for identity, keyed in (("d", True), ("f", True), ("f", False), ("n", False))
}


def all_statements(plan: ApplyPlan) -> list[str]:
    statements = Statements(plan)
    texts = [
        statements.create_stage,
        statements.facts.prepare,
        statements.facts.lock_sql,
        statements.delete_stage,
        statements.truncate_stage,
        statements.drop_stage,
        statements.truncate,
        statements.ordered(partial=False),
        statements.ordered(partial=True),
        statements.insert_staged(OP_INSERT),
        SplitStatements(plan).create_stage,
        SplitStatements(plan).delete_stage,
        SplitStatements(plan).truncate_stage,
        SplitStatements(plan).drop_stage,
        SplitStatements(plan).ordered(partial=True),
    ]
    if plan.key:
        unchanged = frozenset({len(HOSTILE) - 1})
        texts += [
            statements.delete,
            statements.update(OP_UPDATED),
            statements.update(OP_UPDATED, unchanged),
            statements.insert_missing(OP_UPDATED),
            statements.missing(OP_UPDATED, 10),
            statements.remain(OP_DELETE),
            statements.passing(OP_UPDATED),
            statements.move(OP_MOVED, unchanged),
        ]
    return texts


_QUOTED = re.compile(
    r"""
    "(?:[^"]|"")*"          # an identifier
    | \bE'(?:[^'\\]|''|\\.)*'  # a string with escapes
    | '(?:[^']|'')*'        # a string
    """,
    re.VERBOSE | re.DOTALL,
)


def unquoted(sql: str) -> str:
    """The rest of *sql* without quoted identifiers and strings."""
    return _QUOTED.sub(" ", sql)


@pytest.mark.parametrize("name", PLANS)
def test_no_name_and_no_sid_gets_out_of_its_quotes(name: str) -> None:
    for sql in all_statements(PLANS[name]):
        rest = unquoted(sql)
        assert "drop table x" not in rest
        assert "drop schema" not in rest
        assert not re.search(r"[\"'\\]|/\*|--", rest), rest


@pytest.mark.parametrize("name", PLANS)
def test_the_target_is_named_in_quotes(name: str) -> None:
    table = '"s""; drop schema x"."t\'; drop table x; --"'
    assert PLANS[name].table == table
    statements = Statements(PLANS[name])
    assert table in statements.truncate
    assert table in statements.insert_staged(OP_INSERT)


def test_every_written_column_is_named_in_quotes() -> None:
    statements = Statements(PLANS["clone d"])
    insert = statements.insert_staged(OP_INSERT)
    update = statements.update(OP_UPDATED)
    for column in HOSTILE:
        assert quote_identifier(column) in insert
        assert (f"{quote_identifier(column)} = s." in update) == (column not in HOSTILE[:2])


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("partial", [False, True])
def test_the_block_for_exact_order_cannot_be_ended_by_a_name(name: str, partial: bool) -> None:
    sql = Statements(PLANS[name]).ordered(partial=partial)
    found = re.match(r"do (\$[a-z_]+\$)", sql)
    assert found is not None
    tag = found[1]
    body = sql[found.end() : -len(tag)]
    assert sql.endswith(tag)
    assert tag not in body
    assert "$streamer$" in body, "the names that would have ended it are there"


def test_the_tag_grows_until_no_name_holds_it() -> None:
    for count in range(4):
        names = [f"$streamer{'_' * n}$" for n in range(count)]
        plan = apply_plan(["id", *names], ["id"])
        sql = Statements(plan).ordered(partial=False)
        assert sql.startswith(f"do $streamer{'_' * count}$")
        assert sql.count(f"$streamer{'_' * count}$") == 2


@pytest.mark.parametrize("name", [name for name in PLANS if "without key" not in name])
def test_each_statement_that_changes_rows_is_limited_to_the_sid(name: str) -> None:
    plan = PLANS[name]
    statements = Statements(plan)
    limit = """t."sid" =  E'e''u\\\\; drop table x; --'"""
    for sql in (
        statements.delete,
        statements.update(OP_UPDATED),
        statements.insert_missing(OP_UPDATED),
        statements.move(OP_MOVED, frozenset({10})),
        statements.truncate,
    ):
        assert limit in sql
    for sql in (statements.ordered(partial=False), statements.ordered(partial=True)):
        conditions = re.findall(r"\bwhere\b([^;]*);", unquoted(sql.replace(limit, "limited")))
        assert any("limited" in condition for condition in conditions)
        for condition in conditions:
            # The statement then changes the rows found with the limit by ctid.
            assert "limited" in condition or "t.ctid = streamer_ctid" in condition


def test_without_a_sid_nothing_asks_for_one() -> None:
    plan = apply_plan(["id", "a"], ["id"])
    statements = Statements(plan)
    assert not any("sid" in sql for sql in (statements.delete, statements.truncate))
    assert statements.insert_columns == ["id", "a"]
    assert statements.truncate == 'truncate only "public"."t"'


def test_the_sid_is_written_first() -> None:
    statements = Statements(apply_plan(["id", "a"], ["id"], sid="eu"))
    assert statements.insert_columns == ["sid", "id", "a"]
    assert "select 'eu', s.c_0, s.c_1" in statements.insert_staged(OP_INSERT)
    delete = """delete from only "public"."t" t where true and t."sid" = 'eu'"""
    assert statements.truncate == f"{delete}; {delete}"


def test_the_staging_table_has_plain_types_and_a_name_of_the_plans_own() -> None:
    domain = target_column("d", "s.positive", base_type="integer", not_null=True)
    target = target_relation([target_column("id", "bigint", not_null=True), domain])
    mapping = RelationMapping(target.name, target.name, table_rule())
    plan = make_plan(relation(["id", "d"], ["id"]), mapping, target, number=42)
    statements = Statements(plan)
    assert statements.stage == "streamer_stage_42"
    assert statements.create_stage == (
        "create temporary table if not exists streamer_stage_42 (seq integer, op smallint, mask text, "
        "at timestamptz, o_0 bigint, c_0 bigint, c_1 integer)"
    )


def test_rows_are_found_by_the_operator_of_the_keys_index() -> None:
    statements = Statements(apply_plan(["id", "a"], ["id", "a"]))
    assert f't."id" {EQUALS} s.c_0 and t."a" {EQUALS} s.c_1' in statements.delete


def test_rows_of_key_columns_alone_are_locked_and_counted() -> None:
    update = Statements(apply_plan(["a", "b"], ["a", "b"])).update(OP_UPDATED)
    assert update.startswith("select from")
    assert update.endswith("for no key update of t")


def test_columns_whose_values_are_unknown_are_left_alone() -> None:
    statements = Statements(apply_plan(["id", "a", "b"], ["id"]))
    update = statements.update(OP_UPDATED, frozenset({1}))
    assert '"b" = s.c_2' in update
    assert '"a"' not in update
    assert statements.update(OP_UPDATED, frozenset({1, 2})).startswith("select from")


def test_a_key_changes_by_one_update_that_keeps_unknown_values() -> None:
    statements = Statements(apply_plan(["id", "a", "b"], ["id"]))
    move = statements.move(OP_MOVED, frozenset({1}))
    assert move.startswith('update only "public"."t" t set "id" = s.c_0, "a" = case when ')
    assert """= 'u' then t."a" else s.c_1 end, "b" = s.c_2 """ in move
    assert move.endswith(f't."id" {EQUALS} s.o_0')


def test_an_append_table_deletes_only_rows_with_the_same_key() -> None:
    clone, append = (
        Statements(apply_plan(["id", "a"], ["id"], table_type=table_type)).ordered(partial=False)
        for table_type in (TableType.CLONE, TableType.APPEND)
    )
    assert "truncate" in clone
    assert "truncate" not in append
    assert "t.ctid = streamer_ctid" in clone
    assert not re.search(r"delete from [^;]*streamer_ctid", append)


def test_a_history_table_deletes_nothing() -> None:
    for partial in (False, True):
        plan = apply_plan(["id", "a"], ["id"], table_type=TableType.HISTORY)
        sql = Statements(plan).ordered(partial=partial)
        assert "delete from" not in sql
        assert "truncate" not in sql


def test_wide_rows_are_staged_in_parts_that_hold_each_value_once() -> None:
    names = [f"column {n}" for n in range(PART_COLUMNS_MAX * 2)]
    plan = apply_plan(names, names[:1])
    statements = statements_in_order(plan)
    assert isinstance(statements, SplitStatements)
    row: list[Any] = [str(n).encode() for n in range(4 + 1 + len(names))]
    staged: dict[str, bytes] = {}
    for part in statements.parts:
        (values,) = part.rows([row])
        assert len(values) == len(part.columns) == len(part.types) <= PART_COLUMNS_MAX + 1
        assert (part.columns[0], values[0]) == ("seq", row[0])
        staged |= dict(zip([f"{part.table}.{n}" for n in part.columns], values, strict=True))
    once = {name: value for name, value in staged.items() if not name.endswith("seq")}
    assert sorted(once.values()) == sorted(row[1:])
    assert statements.old(plan.key[0]) == "p1.o_0"
    assert statements.new(plan.columns[-1]) == f"p3.c_{len(names) - 1}"
    assert once["streamer_stage_0_p1.o_0"] == row[4]
    narrow = apply_plan(names[: PART_COLUMNS_MAX - 1], names[:1])
    assert not isinstance(statements_in_order(narrow), SplitStatements)
