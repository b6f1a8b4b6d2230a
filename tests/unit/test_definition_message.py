"""The definition of a table after a message: parts in the message count, absent parts do not."""

import json
from dataclasses import replace
from typing import Any

import pytest

from streamer.mapping.rule_options import DdlKind
from streamer.schema.definition_message import (
    ChangedParts,
    DefinitionMessage,
    Dropped,
    Outcome,
    RowEvidence,
    definition_after,
    parts_of,
    with_dropped,
    with_needed_parts,
)
from streamer.schema.indexes_constraints_types import (
    ConstraintDefinition,
    DefinedType,
    IndexDefinition,
)
from streamer.schema.partitions import Partition
from streamer.schema.source_definition import (
    DefinedColumn,
    DefinedSequence,
    SourceDefinition,
    all_differences,
)

TABLE = 100
ID = DefinedColumn(1, "id", "integer", not_null=True)
NAME = DefinedColumn(2, "name", "text")
OTHER = DefinedColumn(3, "other", "integer", default_mark="1")
MINE = DefinedColumn(4, "mine", "integer")
INDEX = IndexDefinition(201, "t_name", "m1")
KEY = ConstraintDefinition(
    202, "p", "t_pkey", "m2", index=IndexDefinition(203, "t_pkey", "m3", is_unique=True)
)
ROOT = Partition(TABLE, 0, "public", "t", None, "RANGE (id)")
FIRST = Partition(301, 0, "public", "t_1", "FOR VALUES FROM (0) TO (10)", "LIST (name)")
INNER = Partition(302, 301, "public", "t_1_a", "FOR VALUES IN ('a')")
MOOD = DefinedType(400, "public", "mood", "e", ((1, "a"), (2, "b")))


def table(*columns: DefinedColumn, **more: Any) -> SourceDefinition:
    lists: dict[str, Any] = {"objects": (), "types": (), "partitions": (), "oid": TABLE, **more}
    return SourceDefinition(columns, **lists)


def changed(
    columns: Any = (), objects: Any = (), types: Any = (), *, is_fresh: bool = True
) -> ChangedParts:
    return ChangedParts(frozenset(columns), frozenset(objects), frozenset(types), is_fresh)


def message(
    told: SourceDefinition | None, of: ChangedParts | None, **more: Any
) -> DefinitionMessage:
    return DefinitionMessage(TABLE, "public", "t", "ALTER TABLE", "", told, of, **more)


def after(known: SourceDefinition | None, told: DefinitionMessage) -> Outcome:
    return definition_after(known, told, "public", TABLE)


def test_an_own_column_comes_and_one_of_another_session_stays() -> None:
    known = table(ID, replace(NAME, name="title"), OTHER)
    told = table(ID, NAME, MINE)  # a snapshot from before the rename, and before "other"
    assert after(known, message(told, changed([4]))) == Outcome(
        table(ID, replace(NAME, name="title"), OTHER, MINE), is_doubtful=True
    )


def test_a_message_that_explains_all_leaves_no_doubt() -> None:
    known = table(ID, NAME, objects=(INDEX, KEY))
    renamed = replace(NAME, name="title")
    told = table(ID, renamed, objects=(INDEX, KEY))
    assert after(known, message(told, changed([2]))) == Outcome(told)


@pytest.mark.parametrize(
    ("dropped", "left"),
    [
        (Dropped(columns=frozenset({(TABLE, 2)})), table(ID, OTHER, objects=(INDEX, KEY))),
        (Dropped(columns=frozenset({(999, 2)})), table(ID, NAME, OTHER, objects=(INDEX, KEY))),
        (Dropped(objects=frozenset({201})), table(ID, NAME, OTHER, objects=(KEY,))),
        (
            Dropped(indexes=frozenset({("public", "t_name")})),
            table(ID, NAME, OTHER, objects=(KEY,)),
        ),
        (
            Dropped(defaults=frozenset({(TABLE, 3)})),
            table(ID, NAME, replace(OTHER, default_mark=None), objects=(INDEX, KEY)),
        ),
    ],
)
def test_a_part_goes_by_its_number_or_oid(dropped: Dropped, left: SourceDefinition) -> None:
    known = table(ID, NAME, OTHER, objects=(INDEX, KEY))
    told = DefinitionMessage(None, "", "", "DROP TYPE", "", dropped=dropped)
    assert after(known, told) == Outcome(left)


def test_a_sequence_leaves_the_column_that_another_one_takes_it_from() -> None:
    sequence = DefinedSequence(500, "public", "t_id_seq", "integer", "")
    known = table(replace(ID, sequence=sequence), MINE)
    told = table(ID, replace(MINE, sequence=sequence))
    assert after(known, message(told, changed([4]))) == Outcome(told)
    assert 500 in parts_of(known, "public")
    dropped = DefinitionMessage(
        None, "", "", "DROP SEQUENCE", "", dropped=Dropped(objects=frozenset({500}))
    )
    assert after(known, dropped) == Outcome(table(ID, MINE))


def test_partitions_of_a_partition_go_with_it_and_a_bound_is_no_identity() -> None:
    known = table(ID, partitions=(ROOT, FIRST, INNER))
    assert after(known, message(table(ID), changed())).definition == known
    gone = message(table(ID), changed(), dropped=Dropped(partitions=frozenset({301})))
    assert after(known, gone) == Outcome(table(ID, partitions=(ROOT,)))
    back = message(table(ID, partitions=(FIRST, INNER)), changed())
    assert after(table(ID, partitions=(ROOT,)), back) == Outcome(known)


def test_an_index_that_alter_type_builds_anew_takes_the_place_of_the_former() -> None:
    anew = replace(INDEX, oid=999)
    known, told = table(ID, objects=(INDEX,)), table(ID, objects=(anew,))
    outcome = after(known, message(told, changed(objects=[999])))
    assert outcome == Outcome(told)
    assert not all_differences(known, told)


def test_a_constraint_takes_its_index_in() -> None:
    unique = ConstraintDefinition(205, "u", "t_name_key", "m3", index=INDEX)
    known, told = table(ID, objects=(INDEX,)), table(ID, objects=(unique,))
    assert after(known, message(told, changed(objects=[205]))) == Outcome(told)


def test_a_renamed_type_renames_the_columns_that_the_message_only_views() -> None:
    renamed = replace(MOOD, name="feeling")
    column = replace(NAME, type="public.mood")
    told = table(replace(column, type="public.feeling"), types=(renamed,))
    known = table(column, types=(MOOD,))
    assert after(known, message(told, changed(types=[400]))) == Outcome(told)
    changes = all_differences(known, told)
    assert [change.kind for change in changes] == [DdlKind.RENAME_TYPE]


def test_labels_of_two_sessions_are_united() -> None:
    known = table(ID, types=(replace(MOOD, labels=((1, "a"), (3, "theirs"), (2, "b"))),))
    told = table(ID, types=(replace(MOOD, labels=((1, "a"), (2, "b"), (4, "mine"))),))
    outcome = after(known, message(told, changed(types=[400], is_fresh=False)))
    assert outcome.is_doubtful
    assert outcome.definition is not None
    (mood,) = outcome.definition.types or ()
    assert [label for _, label in mood.labels] == ["a", "theirs", "b", "mine"]


def test_a_whole_state_drops_parts_known_at_its_request() -> None:
    known = table(ID, NAME, OTHER, objects=(INDEX, KEY))
    seen = table(ID, NAME, objects=(INDEX,)).identities
    told = table(ID)
    assert after(known, message(told, None, known=seen)) == Outcome(
        table(ID, OTHER, objects=(KEY,))
    )


def test_a_definition_that_is_not_known_comes_from_a_whole_state_only() -> None:
    assert after(None, message(table(ID), changed([1]))) == Outcome(None, is_doubtful=True)
    assert after(None, message(table(ID), None)) == Outcome(table(ID))


def test_another_table_of_that_name_is_compared_by_the_names_of_its_columns() -> None:
    before = table(ID, NAME, OTHER)
    anew = table(
        replace(OTHER, number=1), replace(ID, number=2), replace(NAME, number=3), oid=TABLE + 1
    )
    assert all_differences(before, anew) == []
    fewer = table(replace(NAME, number=1), replace(ID, number=2), oid=TABLE + 1)
    assert list(map(str, all_differences(before, fewer))) == ['drop_column "other"']


def test_a_dropped_part_finds_its_table_unless_that_goes_too() -> None:
    parts = parts_of(table(ID, objects=(INDEX, KEY), partitions=(ROOT, FIRST)), "public")
    assert Dropped(objects=frozenset({201})).concerns(TABLE, parts)
    assert Dropped(objects=frozenset({301})).concerns(TABLE, parts)
    assert Dropped(indexes=frozenset({("public", "t_name")})).concerns(TABLE, parts)
    assert Dropped(columns=frozenset({(TABLE, 1)})).concerns(TABLE, ())
    assert not Dropped(objects=frozenset({201, TABLE})).concerns(TABLE, parts)
    assert not Dropped(indexes=frozenset({("own", "t_name")})).concerns(TABLE, parts)


def test_two_messages_of_one_command_become_one() -> None:
    state = {"tag": "ALTER TABLE", "query": "q", "relation": {"oid": TABLE, "columns": []}}
    state["dropped"] = {"partitions": [None]}
    dropped = {"tag": "ALTER TABLE", "query": "q", "dropped": {"columns": [[TABLE, 2]]}}
    first, second = (b"7 token " + json.dumps(each).encode() for each in (state, dropped))
    joined = DefinitionMessage.parse(with_dropped(first, second), "token")
    assert joined is not None
    assert (joined.relid, joined.dropped) == (TABLE, Dropped(columns=frozenset({(TABLE, 2)})))


# ---- rows that need parts without a message ---------------------------------------------------

TYPES = {"id": "integer", "name": "text", "other": "integer", "mine": "integer"}
CHECK = ConstraintDefinition(501, "c", "t_check", "m3")


def evidence(
    *names: str, labels: Any = (), eases: Any = tuple(DdlKind), types: Any = TYPES
) -> RowEvidence:
    relation = {name: types.get(name) for name in names}
    return RowEvidence([relation], lambda label: label in labels, eases)


@pytest.mark.parametrize(
    ("told", "names", "expected"),
    [
        (table(ID, NAME, OTHER, MINE), ("id", "name", "other"), table(ID, NAME, OTHER)),
        (table(ID, replace(NAME, name="x")), ("id", "name"), table(ID, NAME)),
        (table(ID, replace(NAME, name="x")), ("id", "x"), table(ID, replace(NAME, name="x"))),
        (table(ID), ("id", "name"), table(ID, NAME)),
        (table(ID), ("id",), table(ID)),
        (table(ID, replace(NAME, type="integer")), ("id", "name"), table(ID, NAME)),
    ],
)
def test_columns_count_only_where_the_rows_show_them(
    told: SourceDefinition, names: tuple[str, ...], expected: SourceDefinition
) -> None:
    assert with_needed_parts(table(ID, NAME), told, evidence(*names)) == expected


def test_columns_trade_their_names_where_the_order_of_the_rows_shows_it() -> None:
    known = table(ID, OTHER, MINE)
    told = table(ID, replace(OTHER, name="mine"), replace(MINE, name="other"))
    assert with_needed_parts(known, told, evidence("id", "other", "mine")) == known
    assert with_needed_parts(known, told, evidence("id", "mine", "other")) == told


def test_an_object_that_refuses_rows_goes_only_if_that_kind_is_applied() -> None:
    known, told = table(ID, objects=(KEY, CHECK)), table(ID, objects=())
    assert with_needed_parts(known, told, evidence("id")) == table(ID, objects=(KEY,))
    assert with_needed_parts(known, told, evidence("id", eases=())) == known


def test_a_label_comes_only_if_a_row_may_have_it() -> None:
    more = replace(MOOD, labels=((1, "x"), (3, "between"), (2, "b"), (4, "last")))
    known, told = table(ID, types=(MOOD,)), table(ID, types=(more,))
    assert with_needed_parts(known, told, evidence("id")) == known
    found = with_needed_parts(known, told, evidence("id", labels=("between",))).types
    assert found == (replace(MOOD, labels=((1, "a"), (3, "between"), (2, "b"))),)
    found = with_needed_parts(known, told, evidence("id", labels=("x",))).types
    assert found == (replace(MOOD, labels=((1, "x"), (2, "b"))),)


def test_a_partition_comes_only_if_none_has_left() -> None:
    known, more = table(ID, partitions=(ROOT, FIRST)), table(ID, partitions=(ROOT, FIRST, INNER))
    assert with_needed_parts(known, more, evidence("id")) == more
    instead = table(ID, partitions=(ROOT, replace(FIRST, oid=303)))
    assert with_needed_parts(known, instead, evidence("id")) == known
