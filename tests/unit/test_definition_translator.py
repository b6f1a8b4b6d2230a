"""The difference of two definitions, and its statements for the target."""

from dataclasses import replace
from typing import Any

import pytest

from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.expressions import parse_expression
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import Create, TableType
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.schema.source_definition import (
    DefinedColumn,
    DefinedSequence,
    SourceDefinition,
    columns_after,
    difference,
    widens,
)
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.schema_changes.translate.definition_translator import (
    DefinitionTranslator,
    Translation,
)
from streamer.schema_changes.translate.generated_columns import GeneratedFacts

ID = DefinedColumn(1, "id", "integer", not_null=True)
NAME = DefinedColumn(2, "name", "text")
NAME_T = RelationName("public", "t")
RULE = TableRule(RelationPattern("public", "t"))


def table(*columns: DefinedColumn) -> SourceDefinition:
    return SourceDefinition(columns)


def target(*columns: DefinedColumn) -> TargetRelation:
    found = {
        c.name: TargetColumn(
            *(c.name, c.type, c.type, "=", 25, c.not_null, c.default is not None),
            generated=bool(c.generated),
            identity_always=False,
        )
        for c in columns
    }
    return TargetRelation(
        1, NAME_T, False, found, ("id",), (("id",),), frozenset(), False, False, True
    )


def translation(
    before: SourceDefinition,
    after: SourceDefinition,
    rule: TableRule = RULE,
    *,
    sid: str | None = None,
    others: tuple[SourceDefinition, ...] = (),
    there: TargetRelation | None = None,
    expressions: dict[str, str] | None = None,
    identities: dict[str, str] | None = None,
    version: int = 18_00_00,
    facts: GeneratedFacts | None = None,
) -> Translation:
    columns = list(before.columns)
    if sid is not None:
        columns.append(DefinedColumn(99, "sid", "text", not_null=True))
    translator = DefinitionTranslator(
        RelationMapping(NAME_T, NAME_T, rule, sid),
        there or target(*columns),
        peers=others,
        generated=facts
        or GeneratedFacts(
            [c.name for c in after.columns], expressions or {}, identities or {}, version
        ),
    )
    found = translator.translate(difference(before, after))
    found.statements = [s.replace('alter table "public"."t" ', "") for s in found.statements]
    return found


def translated(
    before: SourceDefinition,
    after: SourceDefinition,
    rule: TableRule = RULE,
    *,
    sid: str | None = None,
    others: tuple[SourceDefinition, ...] = (),
    there: TargetRelation | None = None,
) -> list[str]:
    return translation(before, after, rule, sid=sid, others=others, there=there).statements


@pytest.mark.parametrize(
    ("before", "after", "is_wider"),
    [
        ("integer", "bigint", True),
        ("bigint", "integer", False),
        ("integer[]", "bigint[]", True),
        ("integer", "bigint[]", False),
        ("character varying(5)", "character varying(6)", True),
        ("character varying(5)", "character varying(4)", False),
        ("character varying(5)", "text", True),
        ("text", "character varying(5)", False),
        ("character(5)", "character(6)", False),  # the padding changes
        ("numeric(10,2)", "numeric(12,4)", True),
        ("numeric(10,2)", "numeric(11,4)", False),
        ("numeric(10,2)", "numeric", True),
        ("timestamp(3) without time zone", "timestamp(6) without time zone", True),
        ("timestamp without time zone", "timestamp with time zone", False),
        ("integer", "text", False),
        ("public.mood", "text", False),
    ],
)
def test_a_wider_type_holds_every_value(before: str, after: str, is_wider: bool) -> None:
    assert widens(before, after) is is_wider


def test_a_definition_survives_storage() -> None:
    definition = table(ID, NAME)
    assert SourceDefinition.from_json(definition.to_json()) == definition
    assert SourceDefinition.from_json(None) is None


def test_a_column_of_the_same_name_and_another_number_is_another_column() -> None:
    changes = difference(table(ID, NAME), table(ID, replace(NAME, number=3)))
    assert list(map(str, changes)) == ['drop_column "name"', 'add_column "name"']


def test_a_renamed_column_changes_under_its_new_name() -> None:
    after = replace(NAME, name="title", type="character varying(5)", not_null=True)
    changes = difference(table(ID, NAME), table(ID, after))
    assert list(map(str, changes)) == [
        'rename_column "name" to "title"',
        'change_type "title" to character varying(5)',
        'set_not_null "title"',
    ]
    assert translated(table(ID, NAME), table(ID, after)) == [
        'rename column "name" to "title"',
        'alter column "title" type character varying(5) using "title"::character varying(5)',
    ]
    # NOT NULL waits for the values of the source.
    assert translation(table(ID, NAME), table(ID, after)).unfinished == [after]


def test_excluded_and_renamed_columns_follow_the_rule() -> None:
    new = DefinedColumn(3, "secret", "text")
    assert translated(table(ID), table(ID, new), replace(RULE, exclude=frozenset({"secret"}))) == []
    rule = replace(RULE, columns=(("id", "id"), ("secret", "open")))
    assert translated(table(ID), table(ID, new), rule) == ['add column "open" text']
    with pytest.raises(TargetSchemaError, match="names column"):
        translated(table(ID, new), table(ID, replace(new, name="other")), rule)


def test_a_history_table_keeps_columns_and_takes_no_constraint() -> None:
    rule = replace(RULE, type=TableType.HISTORY)
    before = table(ID, replace(NAME, not_null=True))
    assert translated(before, table(ID), rule) == ['alter column "name" drop not null']
    five = DefinedColumn(3, "five", "integer", not_null=True, default="5", fill="5")
    assert translated(table(ID), table(ID, five), rule) == [
        "add column \"five\" integer default '5'::integer",
        'alter column "five" drop default',
    ]


def test_a_sequence_of_the_source_is_no_default_of_the_target() -> None:
    serial = DefinedColumn(3, "n", "integer", default="nextval('public.t_n_seq'::regclass)")
    assert serial.fills_rows_one_by_one
    assert translated(table(ID), table(ID, serial)) == ['add column "n" integer']


def test_tenants_of_one_table() -> None:
    five = DefinedColumn(3, "five", "integer", not_null=True, default="5", fill="5")
    mine = "where \"sid\"::text = 'a'"
    assert translated(table(ID), table(ID, five), sid="a") == [
        'add column "five" integer',
        f'update "public"."t" set "five" = \'5\'::integer {mine}',
    ]
    other = table(ID, NAME)
    title = replace(NAME, name="title")
    assert translated(table(ID, NAME), table(ID), sid="a", others=(other,)) == []
    assert translated(table(ID, NAME), table(ID), sid="a", others=(table(ID),)) == [
        'drop column "name"'
    ]
    assert translated(table(ID, NAME), table(ID, title), sid="a", others=(other,)) == [
        'add column "title" text',
        f'update "public"."t" set "title" = "name" {mine}',
    ]
    sid = DefinedColumn(99, "sid", "text", not_null=True)
    last = translated(
        *(table(ID, NAME), table(ID, title)),
        sid="a",
        others=(table(ID, title),),
        there=target(ID, NAME, title, sid),
    )
    assert last == [
        f'update "public"."t" set "title" = "name" {mine}',
        'drop column "name"',
    ]
    clash = replace(NAME, type="integer", number=3, name="clash")
    with pytest.raises(TargetSchemaError, match="already, of type text"):
        translated(
            table(ID), table(ID, clash), sid="a", there=target(ID, sid, replace(clash, type="text"))
        )


A, B, C = (DefinedColumn(n, name, "integer") for n, name in enumerate("abc", 2))


def named(*columns: tuple[DefinedColumn, str]) -> list[DefinedColumn]:
    return [replace(column, name=name) for column, name in columns]


def test_columns_that_exchange_their_names_take_turns() -> None:
    chain = table(ID, *named((A, "b"), (B, "c")))
    assert translated(table(ID, A, B), chain) == [
        'rename column "b" to "c"',
        'rename column "a" to "b"',
    ]
    circle = table(ID, *named((A, "b"), (B, "c"), (C, "a")))
    changes = difference(table(ID, A, B, C), circle)
    assert translated(table(ID, A, B, C), circle) == [
        'rename column "a" to "a_moves1"',
        'rename column "c" to "a"',
        'rename column "b" to "c"',
        'rename column "a_moves1" to "b"',
    ]
    after = {name: column and column.name for name, column in columns_after(changes).items()}
    assert after == {"a": "b", "b": "c", "c": "a"}
    wider = replace(named((A, "b"))[0], type="bigint")
    assert translated(table(ID, A, B), table(ID, wider, *named((B, "a")))) == [
        'rename column "a" to "a_moves1"',
        'rename column "b" to "a"',
        'rename column "a_moves1" to "b"',
        'alter column "b" type bigint using "b"::bigint',
    ]


def test_an_operator_decides_about_a_column_of_the_target_that_is_in_the_way() -> None:
    found = translation(table(ID, A), table(ID, *named((A, "b"))), there=target(ID, A, B))
    assert found.statements == ['drop column "b"', 'rename column "a" to "b"']
    assert 'already has a column "b", which streamer would drop' in found.doubts[0][1]
    rule = replace(RULE, type=TableType.HISTORY)
    kept = translation(table(ID, A), table(ID, *named((A, "b"))), rule, there=target(ID, A, B))
    assert (kept.statements, kept.filled, kept.doubts) == ([], ["b"], [])


def test_tenants_exchange_names_of_columns_in_their_own_rows() -> None:
    sid = DefinedColumn(99, "sid", "text", not_null=True)
    mine = "where \"sid\"::text = 'a'"
    before, after = table(ID, A, B), table(ID, *named((A, "b"), (B, "a")))
    assert translated(before, after, sid="a", others=(before,)) == [
        'add column "a_moves1" integer',
        f'update "public"."t" set "a_moves1" = "a" {mine}',
        f'update "public"."t" set "a" = "b" {mine}',
        f'update "public"."t" set "b" = "a_moves1" {mine}',
        'drop column "a_moves1"',
    ]
    chain = table(ID, *named((A, "b"), (B, "c")))
    last = translated(before, chain, sid="a", others=(chain,), there=target(ID, A, B, C, sid))
    assert last == [
        f'update "public"."t" set "c" = "b" {mine}',
        f'update "public"."t" set "b" = "a" {mine}',
        'drop column "a"',
    ]


def test_a_tenant_moves_its_values_to_a_column_that_holds_them() -> None:
    sid = DefinedColumn(99, "sid", "text", not_null=True)
    wide = replace(A, type="bigint")
    before, after = table(ID, wide), table(ID, *named((wide, "b")))
    there = target(ID, wide, B, sid)
    other = table(ID, *named((A, "b")))
    assert translated(before, after, sid="a", others=(other,), there=there) == [
        'alter column "b" type bigint using "b"::bigint',
        'update "public"."t" set "b" = "a" where "sid"::text = \'a\'',
        'drop column "a"',
    ]
    clash = table(ID, replace(B, type="text"))
    text = target(ID, wide, replace(B, type="text"), sid)
    with pytest.raises(TargetSchemaError, match="another source has it with type text"):
        translated(before, after, sid="a", others=(clash,), there=text)


WHOLE = replace(RULE, create=Create.ALL)
OPTIONS = "increment by 1 minvalue 1 maxvalue 9 start with 1 cache 1"
OWNED = DefinedSequence(7, "public", "t_id_seq", "integer", OPTIONS)
DRAWN = replace(OWNED, oid=9)
SERIAL = replace(ID, default="nextval('t_id_seq'::regclass)", default_mark="1", sequence=OWNED)


def drawing(
    before: list[DefinedColumn],
    after: list[DefinedColumn],
    rule: TableRule = WHOLE,
    sequences: dict[str, DefinedSequence] | None = None,
) -> Translation:
    """Translate for a target whose column "id" draws from its own sequence, or *sequences*."""
    there = {"id": DRAWN} if sequences is None else sequences
    facts = GeneratedFacts(sequences=there, drawing=frozenset(there))
    return translation(table(*before), table(*after), rule, facts=facts)


def test_the_sequence_of_a_column_stays_with_its_default() -> None:
    wide = replace(SERIAL, type="bigint", default_mark="2")
    assert drawing([SERIAL], [wide]).statements == [
        'alter column "id" type bigint using "id"::bigint'
    ]
    # Without `create: all` an operator has made the default.
    assert not drawing([SERIAL], [replace(SERIAL, default_mark="2")], RULE).statements
    as_bigint = replace(SERIAL, sequence=replace(OWNED, type="bigint", name="s"))
    assert drawing([SERIAL], [as_bigint]).statements == [
        f'alter sequence "public"."t_id_seq" as bigint {OPTIONS} no cycle',
        'alter sequence "public"."t_id_seq" rename to "s"',
    ]
    gone = drawing([SERIAL], [ID])
    assert gone.statements == [
        'alter column "id" drop default',
        'drop sequence "public"."t_id_seq"',
    ]
    new = drawing([ID], [SERIAL], sequences={})
    assert (new.statements, new.unfinished) == ([], [SERIAL])


def test_a_sequence_passes_to_another_column_in_any_order() -> None:
    other = DefinedColumn(9, "wide", "bigint")
    taken = replace(other, default=SERIAL.default, default_mark="2", sequence=OWNED)
    used = replace(SERIAL, sequence=replace(OWNED, is_owned=False))
    moved = [
        'alter sequence "public"."t_id_seq" owned by none',
        'alter sequence "public"."t_id_seq" owned by "public"."t"."wide"',
        'alter column "wide" set default nextval(\'"public"."t_id_seq"\'::regclass)',
    ]
    assert drawing([SERIAL, other], [used, taken]).statements == moved
    drop = 'alter column "id" drop default'
    assert drawing([SERIAL, other], [ID, taken]).statements == [drop, *moved[1:]]


def test_the_sequence_of_a_shared_table_follows_the_last_source() -> None:
    wide = replace(SERIAL, sequence=replace(OWNED, type="bigint"))
    facts = GeneratedFacts(sequences={"id": DRAWN}, drawing=frozenset({"id"}))

    def shared(other: DefinedColumn, after: DefinedColumn) -> list[str]:
        there = target(ID, DefinedColumn(99, "sid", "text", not_null=True))
        others, tables = (table(other),), (table(SERIAL), table(after))
        return translation(
            *tables, WHOLE, sid="a", others=others, there=there, facts=facts
        ).statements

    theirs = replace(OWNED, oid=70)
    assert shared(replace(SERIAL, sequence=theirs), wide) == []
    assert shared(replace(wide, sequence=replace(theirs, type="bigint")), wide) == [
        f'alter sequence "public"."t_id_seq" as bigint {OPTIONS} no cycle'
    ]
    dropped = replace(SERIAL, default=None, default_mark=None, sequence=None)
    assert shared(replace(SERIAL, sequence=theirs), dropped) == []
    assert shared(dropped, dropped) == [
        'alter column "id" drop default',
        'drop sequence "public"."t_id_seq"',
    ]


LOUD = DefinedColumn(3, "loud", "text", default="upper(name)", default_mark="1", generated="s")
LOUDER = replace(LOUD, default="(upper(name) || '!')", default_mark="2")
SET = """alter column "loud" set expression as ((upper("title") || '!'))"""


def expressed(rule: TableRule = RULE, **facts: Any) -> Translation:
    """Translate SET EXPRESSION for a target that calls column "name" "title"."""
    title = replace(NAME, name="title")
    columns = (("id", "id"), ("name", "title"), ("loud", "loud"))
    sid = [DefinedColumn(99, "sid", "text")] if "sid" in facts else []
    facts = {
        "expressions": {"loud": "upper(title)"},
        "there": target(ID, title, LOUD, *sid),
        **facts,
    }
    rule = replace(rule, columns=columns)
    return translation(table(ID, NAME, LOUD), table(ID, NAME, LOUDER), rule, **facts)


def test_an_expression_follows_the_source_under_the_names_of_the_target() -> None:
    found = expressed()
    assert (found.statements, found.doubts, found.filled) == ([SET], [], [])
    there = expressed(expressions={"loud": "(upper(title) || '!')"})
    assert there.statements == []  # a peer or an operator has made the column
    plain = target(ID, NAME, replace(LOUD, generated=""))
    assert expressed(there=plain).statements == []
    with pytest.raises(TargetSchemaError, match=r'"loud" of source .* generated from "name"'):
        expressed(there=target(ID, LOUD))


def test_an_operator_decides_where_an_expression_would_change_other_rows() -> None:
    other = expressed(sid="a", others=(table(ID, NAME, LOUD),))
    assert "in the rows of other sources, too" in other.doubts[0][1]
    history = expressed(replace(RULE, type=TableType.HISTORY))
    assert "in versions that have ended, too" in history.doubts[0][1]
    assert other.statements == history.statements == [SET]
    old = expressed(version=16_00_00)
    assert "PostgreSQL 16 at the target has no SET EXPRESSION" in old.doubts[0][1]
    assert old.statements == [
        'drop column "loud"',
        """add column "loud" text generated always as ((upper("title") || '!')) stored""",
    ]
    same = expressed(version=16_00_00, expressions={"loud": "(upper(title) || '!')"})
    assert (same.statements, same.doubts) == ([], [])


def test_a_generated_column_takes_types_not_null_and_columns_that_are_new() -> None:
    wide = replace(LOUD, type="character varying", not_null=True)
    assert translated(table(ID, NAME, LOUD), table(ID, NAME, wide)) == [
        'alter column "loud" type character varying',
        'alter column "loud" set not null',
    ]
    new = DefinedColumn(4, "new", "text")
    uses = replace(LOUD, default="new", default_mark="2")
    assert translated(table(ID, LOUD), table(ID, uses, new)) == [
        'add column "new" text',
        'alter column "loud" set expression as (new)',
    ]


def test_a_column_that_the_target_never_computed_gets_its_values() -> None:
    stored = replace(LOUD, generated="", default=None, default_mark=None, not_null=True)
    before, after = table(ID, NAME, replace(LOUD, not_null=True)), table(ID, NAME, stored)
    assert translation(before, after).statements == ['alter column "loud" drop expression']
    plain = translation(before, after, there=target(ID, NAME, stored))
    assert (plain.statements, plain.filled) == ([], ["loud"])
    absent = translation(before, after, there=target(ID, NAME))
    assert (absent.statements, absent.filled) == (['add column "loud" text'], ["loud"])
    assert absent.unfinished == [stored]


def test_values_that_set_computes_from_a_column_follow_its_type() -> None:
    rule = replace(
        RULE, set=(("code", parse_expression("md5(name)")),), exclude=frozenset({"name"})
    )
    code, after = DefinedColumn(3, "code", "text"), table(ID, replace(NAME, type="bytea"))
    found = translation(table(ID, NAME), after, rule, there=target(ID, code))
    assert (found.statements, found.filled, found.doubts) == ([], ["code"], [])
    rule = replace(RULE, filter=parse_expression("name > 'b'"))
    (doubt,) = translation(table(ID, NAME), after, rule).doubts
    assert '`filter` uses column "name"' in doubt[1]


def test_a_rename_of_one_tenant_leaves_no_expression_with_the_former_name() -> None:
    title = replace(NAME, name="title")
    with pytest.raises(TargetSchemaError, match=r'"loud" of target .* uses "name", which other'):
        translation(
            *(table(ID, NAME), table(ID, title)),
            sid="a",
            others=(table(ID, NAME, LOUD),),
            expressions={"loud": "upper(name)"},
        )


def test_an_identity_comes_changes_and_goes_where_create_asks_for_it() -> None:
    always, default = (replace(ID, identity=identity) for identity in "ad")
    whole = replace(RULE, create=Create.ALL)

    def change(before: DefinedColumn, after: DefinedColumn, there: str = "") -> Translation:
        identities = {"id": there} if there else {}
        return translation(table(before), table(after), whole, identities=identities)

    added = change(ID, always)
    assert (added.statements, added.unfinished) == ([], [always])
    assert change(ID, always, "d").unfinished == []  # an operator has made an identity
    assert change(always, default, "a").statements == ['alter column "id" set generated by default']
    assert change(default, always, "d").statements == ['alter column "id" set generated always']
    assert change(always, ID, "a").statements == ['alter column "id" drop identity']
    pending = change(always, ID)
    assert (pending.statements, pending.unfinished) == ([], [])
    for rule in (RULE, replace(whole, type=TableType.HISTORY)):
        for before, after in ((ID, always), (always, default), (always, ID)):
            left = translation(table(before), table(after), rule, identities={"id": "a"})
            assert (left.statements, left.unfinished) == ([], [])
    # An UPDATE could not write the column.
    beside = replace(NAME, type="integer", identity="d")
    found = translation(
        *(table(ID, beside), table(ID, replace(beside, identity="a")), whole),
        identities={"name": "d"},
    )
    assert found.statements == []


def test_a_default_gives_way_to_an_identity() -> None:
    serial = replace(ID, default_mark="1", default="nextval('s'::regclass)")
    there = target(replace(ID, default="1"))
    identity = replace(ID, identity="d")
    whole = replace(RULE, create=Create.ALL)
    found = translation(table(serial), table(identity), whole, there=there)
    assert (found.statements, found.unfinished) == (['alter column "id" drop default'], [identity])
    own = translation(table(serial), table(ID), there=there, identities={"id": "d"})
    assert own.statements == []  # the identity of the target is no default
