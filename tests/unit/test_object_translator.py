"""Differences of indexes, constraints and types, and their statements for the target."""

from dataclasses import replace

import pytest

from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import Create
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.schema.indexes_constraints_types import (
    ConstraintDefinition,
    DefinedObject,
    DefinedType,
    IndexDefinition,
    IndexKey,
    object_difference,
    type_difference,
)
from streamer.schema.planned_definition import TargetPlace
from streamer.schema.source_definition import DefinedColumn, SourceDefinition, all_differences
from streamer.schema.table_definition import TableDefinition
from streamer.schema.table_difference import table_difference
from streamer.schema.table_difference import type_difference as compared
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.schema_changes.translate.joining_source import part_of_target
from streamer.schema_changes.translate.object_translator import ObjectTranslator
from streamer.schema_changes.translate.type_translator import TypeTranslator

INDEX = IndexDefinition(1, "by_name", "m")
CHECK = ConstraintDefinition(2, "c", "positive", "m")
UNIQUE = ConstraintDefinition(3, "u", "once", "m", index=replace(INDEX, oid=30, name="once"))
MOOD = DefinedType(9, "public", "mood", "e", labels=((1, "sad"), (2, "happy")))
PLACE = DefinedType(8, "public", "place", "c", attributes=((1, "street", "text"),))
POSITIVE = DefinedType(
    7, "public", "positive", "d", base="integer", checks=((1, "above", "CHECK ((VALUE > 0))"),)
)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ([], [INDEX, CHECK], ['add_index "by_name"', 'add_constraint "positive"']),
        ([INDEX, CHECK], [], ['drop_index "by_name"', 'drop_constraint "positive"']),
        ([INDEX], [replace(INDEX, name="other")], ['rename_index "by_name" to "other"']),
        ([INDEX], [replace(INDEX, oid=9)], []),  # re-created by ALTER TYPE
        (
            [INDEX],
            [replace(INDEX, oid=9, mark="other")],
            ['drop_index "by_name"', 'add_index "by_name"'],
        ),
        (
            [replace(INDEX, oid=30)],
            [UNIQUE],
            ['rename_index "by_name" to "once"', 'add_constraint "once"'],
        ),
        (
            [UNIQUE],
            [replace(UNIQUE, oid=4, index=IndexDefinition(31, "once", "distinct nulls"))],
            ['drop_constraint "once"', 'add_constraint "once"'],
        ),
        ([replace(CHECK, is_valid=False)], [CHECK], ['validate_constraint "positive"']),
        ([], [replace(INDEX, is_valid=False)], []),  # a build that failed, or is under way
        ([replace(INDEX, is_valid=False)], [INDEX], ['add_index "by_name"']),
        ([replace(INDEX, is_valid=False)], [], []),
        (
            [INDEX, replace(INDEX, oid=2, name="b")],
            [replace(INDEX, name="b"), replace(INDEX, oid=2, name="c")],
            ['rename_index "b" to "c"', 'rename_index "by_name" to "b"'],
        ),
        (
            [INDEX, replace(INDEX, oid=5, name="b"), replace(CHECK, name="by_name")],
            [replace(INDEX, name="b"), replace(INDEX, oid=5), replace(CHECK, name="b")],
            [
                'rename_index "by_name" to "by_name_moves1"',
                'rename_index "b" to "by_name"',
                'rename_index "by_name_moves1" to "b"',
                'rename_constraint "by_name" to "b"',
            ],
        ),
    ],
)
def test_objects_are_distinguished_by_their_oids(
    before: list[DefinedObject], after: list[DefinedObject], changes: list[str]
) -> None:
    assert [str(change) for change in object_difference(before, after)] == changes


@pytest.mark.parametrize(
    ("before", "after", "statements"),
    [
        (
            MOOD,
            replace(MOOD, labels=((1, "sad"), (3, "so so"), (2, "happy"), (4, "mad"))),
            ["add value if not exists 'so so' before 'happy'", "add value if not exists 'mad'"],
        ),
        (
            MOOD,
            replace(MOOD, labels=((1, "it's"), (2, "happy"))),
            ["rename value 'sad' to 'it''s'"],
        ),
        (MOOD, replace(MOOD, name="feeling"), ['rename to "feeling"']),
        (
            PLACE,
            replace(PLACE, attributes=((2, "no", "integer"),)),
            ['drop attribute "street"', 'add attribute "no" integer'],
        ),
        (
            PLACE,
            replace(PLACE, attributes=((1, "Street", "character varying"),)),
            [
                'rename attribute "street" to "Street"',
                'alter attribute "Street" type character varying',
            ],
        ),
        (
            POSITIVE,
            replace(
                POSITIVE, checks=((2, "b", "CHECK ((VALUE > 1))"),), not_null=True, default="5"
            ),
            [
                'drop constraint "above"',
                'add constraint "b" CHECK ((VALUE > 1)) not valid',
                'validate constraint "b"',
                "set not null",
                "set default 5",
            ],
        ),
    ],
)
def test_a_type_is_changed_once_for_all_tables(
    before: DefinedType, after: DefinedType, statements: list[str]
) -> None:
    changes = type_difference([before], [after])
    translator = TypeTranslator({before.full_name: before})
    kind = "domain" if before.kind == "d" else "type"
    found = translator.translate(changes).statements
    prefix = f'alter {kind} "public"."{before.name}" '
    assert [each.removeprefix(prefix) for each in found] == statements
    # A second table reaches its own message.
    there = TypeTranslator({after.full_name: replace(after, oid=77)})
    assert there.translate(changes).statements == []


def test_the_column_of_a_renamed_type_is_the_same() -> None:
    column = DefinedColumn(1, "m", "public.mood[]")
    before = SourceDefinition((column,), (), (MOOD,))
    odd = replace(MOOD, name="Odd")
    after = SourceDefinition((replace(column, type='public."Odd"[]'),), (), (odd,))
    assert [str(c) for c in all_differences(before, after)] == [
        'rename_type "public.mood" to "public.Odd"'
    ]


def test_a_source_that_still_has_the_value_or_type_keeps_it() -> None:
    renamed = replace(MOOD, labels=((1, "blue"), (2, "happy")))
    changes = type_difference([MOOD], [renamed])
    found = TypeTranslator({MOOD.full_name: MOOD}, [[MOOD]]).translate(changes)
    assert found.statements == [
        "alter type \"public\".\"mood\" add value if not exists 'blue' before 'happy'"
    ]
    assert list(found.rewritten) == ["public.mood"]
    with pytest.raises(TargetSchemaError, match="another source"):
        TypeTranslator({PLACE.full_name: PLACE}, [[PLACE]]).translate(
            type_difference([PLACE], [replace(PLACE, attributes=())])
        )


def test_a_stored_definition_is_read_back() -> None:
    definition = SourceDefinition(
        (DefinedColumn(1, "id", "integer"),), (INDEX, CHECK, UNIQUE), (MOOD, PLACE, POSITIVE)
    )
    assert SourceDefinition.from_json(definition.to_json()) == definition


# ---- comparison --------------------------------------------------------------------------------

T = RelationName("public", "t")


def described(*columns: str, objects: tuple[DefinedObject, ...] = ()) -> TableDefinition:
    return TableDefinition(
        T,
        tuple(DefinedColumn(n, name, "integer", name == "id") for n, name in enumerate(columns)),
        objects,
    )


def differences(
    source: TableDefinition,
    target: TableDefinition,
    *,
    has_sid: bool = False,
    create: Create = Create.ALL,
    columns: tuple[tuple[str, str], ...] | None = None,
) -> list[str]:
    rule = TableRule(RelationPattern("public", "t"), create=create, columns=columns)
    names = frozenset(column.name for column in target.columns)
    place = TargetPlace(RelationMapping(T, T, rule), has_sid, names)
    return [str(each) for each in table_difference(source, place, lambda _: None, target)]


KEY = ConstraintDefinition(10, "p", "t_pkey", columns=("id",))
BY_N = IndexDefinition(11, "by_n", method="btree", keys=(IndexKey("n"),), is_unique=True)


def test_a_definition_is_compared_through_the_mapping() -> None:
    source = described("id", "n", objects=(BY_N, KEY))
    by_m = replace(BY_N, keys=(IndexKey("sid"), IndexKey("m")))
    target = described("id", "m", "sid", objects=(by_m, replace(KEY, columns=("sid", "id"))))
    columns = (("id", "id"), ("n", "m"))
    assert differences(source, target, has_sid=True, columns=columns) == []
    found = differences(source, target, columns=columns)
    assert found[0] == 'primary key "t" is (sid, id), and should be (id)'
    assert found[1].startswith('index "by_n" is create unique index "by_n" on')


@pytest.mark.parametrize(
    ("objects", "statements"),
    [
        ((CHECK,), ['alter table "public"."t" drop constraint "positive"']),
        ((replace(INDEX, name="positive"),), []),
    ],
    ids=["a check", "an index"],
)
def test_a_dropped_check_drops_no_index_of_the_same_name(
    objects: tuple[DefinedObject, ...], statements: list[str]
) -> None:
    rule = TableRule(RelationPattern("public", "t"), create=Create.ALL)
    place = TargetPlace(RelationMapping(T, T, rule), False, frozenset({"id"}))
    translator = ObjectTranslator(
        place, lambda _: None, described("id"), described("id", objects=objects)
    )
    translation = translator.translate(object_difference([CHECK], []))
    assert translation.statements == statements


def test_create_decides_which_objects_the_target_gets() -> None:
    check = ConstraintDefinition(12, "c", "above", columns=("n",), expression="(n > 0)")
    source = described("id", "n", objects=(BY_N, KEY, check))
    target = described("id", "n", objects=(KEY,))
    assert differences(source, target, create=Create.COLUMNS) == []
    (index,) = differences(source, target, create=Create.KEYS)
    assert index.startswith('index "by_n" is missing: create unique index')
    assert len(differences(source, target)) == 2
    # A unique index may refuse rows of the source, and an index for readers does not.
    own = replace(BY_N, name="own", is_unique=False)
    (extra,) = differences(target, replace(target, objects=(KEY, own, BY_N)))
    assert extra.startswith('index "by_n" is only at the target: create unique index')
    assert differences(described("id", "x"), described("id")) == ['column "x" is missing: integer']


def test_types_are_compared_by_their_values() -> None:
    assert compared([MOOD, PLACE], [replace(MOOD, oid=1)]) == []
    # A table of several sources accepts the values of all sources, and a history those of all
    # versions.
    more = replace(MOOD, labels=((5, "calm"), *MOOD.labels))
    turned = replace(MOOD, labels=(MOOD.labels[1], MOOD.labels[0]))
    free = replace(POSITIVE, checks=())
    assert compared([MOOD, POSITIVE], [more, free], keeps_more=True) == []
    assert len(compared([MOOD, POSITIVE], [more, free])) == 2
    assert len(compared([more, MOOD, free], [turned, POSITIVE], keeps_more=True)) == 3
    (found,) = compared([MOOD], [replace(MOOD, labels=((1, "sad"),))])
    assert str(found) == "type \"public.mood\" is enum ('sad'), and should be enum ('sad', 'happy')"


def test_a_source_joins_with_the_part_of_its_definition_that_the_target_has() -> None:
    place = replace(PLACE, attributes=(*PLACE.attributes, (9, "zip", "text")))
    more = replace(MOOD, labels=((7, "calm"), *MOOD.labels, (8, "last")))
    columns = (
        DefinedColumn(1, "id", "integer", not_null=True),
        DefinedColumn(2, "name", "character varying(20)"),
        DefinedColumn(3, "own", "text"),
    )
    here = SourceDefinition(columns, (), (more, place, replace(POSITIVE, checks=())))
    there = target_table({"id": ("integer", True), "name": ("character varying(9)", True)})
    mapping = RelationMapping(
        RelationName("public", "t"), there.name, TableRule(RelationPattern("public", "t"))
    )
    types = [replace(MOOD, oid=99), PLACE, POSITIVE]
    part = part_of_target(here, mapping, there, types, (), {"own"})
    assert sorted(str(change) for change in all_differences(part, here)) == [
        'add_attribute "public.place" "zip"',
        'add_column "own"',
        'add_enum_value "public.mood" "calm"',
        'add_enum_value "public.mood" "last"',
        'change_domain "public.positive"',
        'drop_not_null "name"',
        'widen_type "name" to character varying(20)',
    ]
    assert part_of_target(here, mapping, there, here.types or (), (), ()) != here  # "name"
    wide = target_table({"id": ("integer", True), "name": ("text", False), "own": ("text", False)})
    assert part_of_target(here, mapping, wide, here.types or (), (), ()) == here


def test_a_value_without_a_certain_place_is_a_conflict() -> None:
    turned = replace(MOOD, labels=(MOOD.labels[1], MOOD.labels[0]))
    after = replace(turned, labels=(*turned.labels, (9, "odd")))
    changes = type_difference([turned], [after])
    found = TypeTranslator({MOOD.full_name: MOOD}).translate(changes)
    assert found.statements == [f"{MOOD_SQL} add value if not exists 'odd'"]
    assert "in a different order" in found.doubts[0][1]
    assert not TypeTranslator({MOOD.full_name: turned}).translate(changes).doubts


MOOD_SQL = 'alter type "public"."mood"'


def target_table(columns: dict[str, tuple[str, bool]]) -> TargetRelation:
    return TargetRelation(
        name=RelationName("public", "t"),
        oid=1,
        columns={
            name: TargetColumn(
                name,
                kind,
                kind,
                "=",
                0,
                not_null=not_null,
                has_default=False,
                generated=False,
                identity_always=False,
            )
            for name, (kind, not_null) in columns.items()
        },
        primary_key=("id",),
        unique_keys=(),
        leading_index_columns=frozenset(),
        is_partitioned=False,
        has_row_triggers=False,
        is_referenced=False,
        is_writable=True,
    )


def test_a_table_of_several_sources_has_the_longest_type() -> None:
    def table(kind: str) -> TableDefinition:
        return TableDefinition(RelationName("public", "t"), (DefinedColumn(1, "n", kind),))

    mapping = RelationMapping(
        RelationName("public", "t"),
        RelationName("public", "t"),
        TableRule(RelationPattern("public", "t")),
    )
    place = TargetPlace(mapping, True, frozenset({"n"}))
    pairs = [("character varying(5)", "text"), ("integer", "bigint"), ("text", "integer")]
    found = [
        bool(table_difference(table(here), place, lambda _: None, table(there), is_shared=shared))
        for here, there in pairs
        for shared in (False, True)
    ]
    assert found == [True, False, True, False, True, True]
