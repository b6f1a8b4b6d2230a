"""A type of the source takes the name of a former type, and the target follows."""

from dataclasses import replace
from typing import Any

import pytest

from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.rule_options import DdlKind
from streamer.schema.definition_message import (
    ChangedParts,
    DefinitionMessage,
    Dropped,
    definition_after,
    parts_of,
)
from streamer.schema.indexes_constraints_types import (
    DefinedType,
    TypeChange,
    TypeUse,
    type_difference,
)
from streamer.schema.source_definition import DefinedColumn, SourceDefinition, all_differences
from streamer.schema_changes.translate.type_translator import TypeTranslation, TypeTranslator

OLD = DefinedType(1, "public", "st", "e", labels=((11, "new"), (12, "done")))
NEW = DefinedType(2, "public", "st", "e", labels=((21, "new"), (22, "finished")))
NEXT = replace(NEW, name="st2")
THERE = replace(OLD, oid=70)
USED = {70: TypeUse(is_used=True)}
FOREIGN = {70: TypeUse(is_used=True, foreign=("view v",))}
MADE = "create type \"public\".\"st\" as enum ('new', 'finished')"
CREATED = [TypeChange(DdlKind.CREATE_TYPE, None, NEW)]
RENAMED = [TypeChange(DdlKind.RENAME_TYPE, NEXT, NEW)]


def translated(
    changes: list[TypeChange], *there: DefinedType, **facts: Any
) -> tuple[list[str], TypeTranslation]:
    translator = TypeTranslator({each.full_name: each for each in there}, **facts)
    found = translator.translate(changes)
    return [each for each in found.statements if "create schema" not in each], found


def test_a_type_without_use_is_dropped() -> None:
    assert translated(CREATED, THERE)[0] == ['drop type "public"."st"', MADE]


def test_a_type_in_use_makes_room() -> None:
    statements, found = translated(CREATED, THERE, uses=USED)
    assert statements == ['alter type "public"."st" rename to "st_former_70"', MADE]
    assert found.renamed == {"public.st": "public.st_former_70"}


def test_a_type_of_the_same_content_is_the_same() -> None:
    assert translated(CREATED, replace(NEW, oid=70), uses=FOREIGN)[0] == []


def test_a_type_that_others_use_stays() -> None:
    with pytest.raises(TargetSchemaError, match="still used by view v"):
        translated(CREATED, THERE, uses=FOREIGN)
    more = replace(THERE, labels=(*NEW.labels, (13, "more")))
    assert translated(CREATED, more, uses=FOREIGN)[0] == []
    assert translated([TypeChange(DdlKind.DROP_TYPE, OLD, OLD)], THERE, uses=FOREIGN)[0] == []


def test_an_enum_with_more_labels_goes_and_another_type_stays() -> None:
    dropped = [TypeChange(DdlKind.DROP_TYPE, OLD, OLD)]
    kept = replace(THERE, labels=(*OLD.labels, (0, "ended")))
    assert translated(dropped, kept)[0] == ['drop type "public"."st"']
    assert translated(dropped, replace(THERE, labels=OLD.labels[:1]))[0] == []


def test_the_type_of_another_table_changes_in_its_own_place() -> None:
    statements, found = translated(CREATED, THERE, known={NEW.full_name: frozenset({NEW.oid})})
    assert statements == []
    assert found.awaited == {NEW.oid}


def test_other_tables_leave_the_former_type_first() -> None:
    _, found = translated(CREATED, THERE, known={OLD.full_name: frozenset({OLD.oid})})
    assert found.awaited == {OLD.oid}


def test_a_domain_is_another_one_if_its_base_is() -> None:
    domain = DefinedType(3, "public", "kind", "d", base="public.st")
    changes = [*CREATED, TypeChange(DdlKind.CREATE_TYPE, None, domain)]
    statements, _ = translated(changes, THERE, replace(domain, oid=71), uses=USED)
    assert statements[2:] == [
        'drop type "public"."kind"',
        'create domain "public"."kind" as public.st',
    ]


def test_a_renamed_type_takes_the_place_of_the_former() -> None:
    there = replace(NEXT, oid=71)
    rename = 'alter type "public"."st2" rename to "st"'
    assert translated(RENAMED, THERE, there)[0] == ['drop type "public"."st"', rename]
    statements, found = translated(RENAMED, THERE, there, uses=USED)
    assert statements == ['alter type "public"."st" rename to "st_former_70"', rename]
    assert found.renamed["public.st2"] == "public.st"


def test_types_that_exchange_their_names_at_once_have_room() -> None:
    other = replace(OLD, name="st2")
    changes = type_difference([OLD, NEXT], [other, NEW])
    uses = {oid: TypeUse(is_used=True) for oid in (70, 71)}
    statements, _ = translated(changes, THERE, replace(NEXT, oid=71), uses=uses)
    assert statements == [
        'alter type "public"."st2" rename to "st2_former_71"',
        'alter type "public"."st" rename to "st2"',
        'alter type "public"."st2_former_71" rename to "st"',
    ]
    made = translated(changes, replace(NEW, oid=71), replace(other, oid=70), uses=uses)
    assert made[0] == []


def test_columns_leave_a_type_for_the_one_that_another_table_has_renamed() -> None:
    there = replace(NEW, oid=72)
    statements, found = translated(
        RENAMED, there, replace(NEXT, oid=71), uses={oid: TypeUse(is_used=True) for oid in (71, 72)}
    )
    assert statements == ['alter type "public"."st2" rename to "st2_former_71"']
    assert found.merged == {"public.st"}


def test_the_type_of_an_own_column_is_found_under_any_name() -> None:
    aside = replace(THERE, name="st_former_70")
    change = TypeChange(DdlKind.RENAME_TYPE, OLD, replace(OLD, name="old"))
    statements, _ = translated(
        [change], aside, replace(NEW, oid=72), uses=USED, own={OLD.full_name: aside}
    )
    assert statements == ['alter type "public"."st_former_70" rename to "old"']


def test_a_long_name_stays_within_its_limit() -> None:
    name = replace(OLD, name="ä" * 31, oid=4294967295).former_name
    assert len(name.name.encode()) <= 63
    assert name.name.endswith("ä_former_4294967295")


COLUMN = DefinedColumn(1, "s", "public.st[]")


def test_a_column_gets_the_other_type_of_that_name() -> None:
    before = SourceDefinition((COLUMN,), (), (OLD,))
    found = all_differences(before, SourceDefinition((COLUMN,), (), (NEW,)))
    assert [str(each) for each in found] == [
        'create_type "public.st"',
        'change_type "s" to public.st[]',
    ]
    again = all_differences(before, SourceDefinition((COLUMN,), (), (replace(OLD, oid=5),)))
    assert [str(each) for each in again] == ['create_type "public.st"']


def test_a_former_type_stays_until_the_source_drops_it() -> None:
    text = replace(COLUMN, type="text")
    known = SourceDefinition((COLUMN,), (), (OLD,), (), oid=100)
    changed = ChangedParts(frozenset({1}), frozenset(), frozenset(), is_fresh=True)
    told = SourceDefinition((text,), (), (), (), oid=100)
    left = definition_after(
        known, DefinitionMessage(100, "public", "t", "", "", told, changed=changed), "public", 100
    ).definition
    assert left is not None
    assert left.types == (OLD,)
    assert left.used_types == []
    dropped = Dropped(types=frozenset({OLD.oid}))
    assert dropped.concerns(100, parts_of(left, "public"))
    message = DefinitionMessage(None, "", "", "DROP TYPE", "", dropped=dropped)
    after = definition_after(left, message, "public", 100).definition
    assert after is not None
    assert after.types == ()
    changes = all_differences(left, after, dropped_types=dropped.types)
    assert [str(each) for each in changes] == ['drop_type "public.st"']
    assert all_differences(left, after) == []  # an absence is no evidence
