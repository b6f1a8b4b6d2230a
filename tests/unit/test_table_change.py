"""Which changes of a definition concern peers, types and columns of the target."""

import pytest

from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rule_options import DdlKind
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.schema.indexes_constraints_types import DefinedType, ObjectChange, TypeChange
from streamer.schema.source_definition import (
    AnyChange,
    ColumnChange,
    DefinedColumn,
    SourceDefinition,
    difference,
)
from streamer.schema_changes.changes_with_facts import needed_types, of_class
from streamer.schema_changes.definition_stop import undecided
from streamer.schema_changes.shared_changes import PeerSources, made_for_all
from streamer.schema_changes.store_new_definition import (
    added_columns,
    moved_columns,
    renamed_labels,
)

T = RelationName("public", "t")
ID = DefinedColumn(1, "id", "integer")
NAME = DefinedColumn(2, "name", "text")
MOOD = DefinedType(9, "public", "mood", "e", labels=((1, "sad"),))
FEELING = DefinedColumn(3, "feeling", "public.mood[]")
PAIR = DefinedType(8, "public", "pair", "c", attributes=((1, "a", "public.mood"),))
ADDED = ColumnChange(DdlKind.ADD_COLUMN, None, FEELING)
WIDENED = ColumnChange(DdlKind.WIDEN_TYPE, ID, DefinedColumn(1, "id", "bigint"))
RENAMED = ColumnChange(DdlKind.RENAME_COLUMN, NAME, DefinedColumn(2, "title", "text"))
LABEL = TypeChange(DdlKind.RENAME_ENUM_VALUE, MOOD, MOOD, ("sad", "blue"))


def mapping(exclude: str = "", **columns: str) -> RelationMapping:
    listed = tuple(columns.items()) or None
    pattern = RelationPattern("public", "t")
    rule = TableRule(pattern, columns=listed, exclude=frozenset(exclude.split()))
    return RelationMapping(T, T, rule)


@pytest.mark.parametrize(
    ("changes", "made", "done"),
    [
        ([WIDENED, RENAMED], [WIDENED, RENAMED], [WIDENED]),  # each tenant renames separately
        ([WIDENED, RENAMED], [WIDENED], []),  # different changes than those of the peer
        ([RENAMED, WIDENED], [WIDENED, RENAMED], []),
        ([LABEL, ADDED], [LABEL, ADDED], [LABEL]),
        ([WIDENED], [], []),
    ],
)
def test_a_change_of_a_type_is_made_for_all_sources_that_wait_with_the_same_changes(
    changes: list[AnyChange], made: list[AnyChange], done: list[AnyChange]
) -> None:
    assert made_for_all(changes, [str(change) for change in made]) == done


def test_a_source_is_the_last_one_when_all_others_wait() -> None:
    other = SourceDefinition((ID,))
    assert not PeerSources().all_wait
    assert not PeerSources([other], [other]).all_wait
    assert PeerSources([other], []).all_wait


@pytest.mark.parametrize(
    ("changes", "types", "columns", "needed"),
    [
        ([ADDED], (), {}, {"public.mood"}),
        ([ADDED], (MOOD,), {}, set()),  # a change of the type creates the type
        ([ADDED], (), {"exclude": "feeling"}, set()),  # the target does not get the column
        ([TypeChange(DdlKind.CREATE_TYPE, None, PAIR)], (PAIR,), {}, {"public.mood"}),
        ([ColumnChange(DdlKind.DROP_COLUMN, FEELING, None)], (), {}, set()),
    ],
)
def test_types_that_no_change_creates_are_needed(
    changes: list[AnyChange],
    types: tuple[DefinedType, ...],
    columns: dict[str, str],
    needed: set[str],
) -> None:
    definition = SourceDefinition((ID, FEELING), types=types)
    assert needed_types(changes, definition, mapping(**columns)) - {""} == needed


def test_columns_of_the_target_follow_those_of_the_source() -> None:
    here = SourceDefinition((ID, NAME))
    there = SourceDefinition((DefinedColumn(2, "title", "text"), FEELING))
    changes = difference(here, there)
    assert added_columns(changes, mapping()) == ["feeling"]
    assert added_columns(changes, mapping("feeling")) == []
    assert moved_columns(changes, mapping(), {"title"}) == {"name": "title", "id": None}
    assert moved_columns(changes, mapping(), set()) == {"name": None, "id": None}
    same = mapping(name="n", title="n")
    assert moved_columns(changes, same, {"n"}) == {"id": None}


def test_labels_keep_their_former_names_by_their_type() -> None:
    second = TypeChange(DdlKind.RENAME_ENUM_VALUE, MOOD, MOOD, ("mad", "angry"))
    added = TypeChange(DdlKind.ADD_ENUM_VALUE, MOOD, MOOD, (None, "calm"))
    assert renamed_labels([LABEL, ADDED, second, added]) == {9: {"sad": "blue", "mad": "angry"}}
    assert of_class([LABEL, ADDED], ObjectChange) == []


def test_a_change_that_waits_gives_its_reason() -> None:
    assert undecided([RENAMED], ["a doubt"], None).message == (
        'on_ddl is stop for rename_column "name" to "title"; a doubt'
    )
    assert undecided([RENAMED], [], "tried before").message == "tried before"
