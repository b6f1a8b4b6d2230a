"""The difference of two definitions, and its statements for the target."""

from dataclasses import replace

import pytest

from streamer.apply.sql.definition import DefinitionTranslator
from streamer.errors import TargetSchemaError
from streamer.mapping.definition import DefinedColumn, SourceDefinition, difference, widens
from streamer.mapping.rules import (
    RelationMapping,
    RelationName,
    RelationPattern,
    TableRule,
    TableType,
)
from streamer.target.catalog import TargetColumn, TargetRelation

ID = DefinedColumn(1, "id", "integer", not_null=True)
NAME = DefinedColumn(2, "name", "text")
NAME_T = RelationName("public", "t")
RULE = TableRule(RelationPattern("public", "t"))


def table(*columns: DefinedColumn) -> SourceDefinition:
    return SourceDefinition(columns)


def target(*columns: DefinedColumn) -> TargetRelation:
    found = {
        c.name: TargetColumn(
            c.name, c.type, c.type, "=", 25, c.not_null, c.default is not None, False, False
        )
        for c in columns
    }
    return TargetRelation(
        1, NAME_T, False, found, ("id",), (("id",),), frozenset(), False, False, False, True
    )


def translated(
    before: SourceDefinition,
    after: SourceDefinition,
    rule: TableRule = RULE,
    *,
    sid: str | None = None,
    others: tuple[SourceDefinition, ...] = (),
    there: TargetRelation | None = None,
) -> list[str]:
    columns = list(before.columns)
    if sid is not None:
        columns.append(DefinedColumn(99, "sid", "text", not_null=True))
    mapping = RelationMapping(NAME_T, NAME_T, rule)
    translator = DefinitionTranslator(mapping, there or target(*columns), sid=sid, others=others)
    found = translator.translate(difference(before, after))
    return [each.replace('alter table "public"."t" ', "") for each in found.statements]


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
        'change_type "title"',
        'set_not_null "title"',
    ]
    assert translated(table(ID, NAME), table(ID, after)) == [
        'rename column "name" to "title"',
        'alter column "title" type character varying(5) using "title"::character varying(5)',
        'alter column "title" set not null',
    ]


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
