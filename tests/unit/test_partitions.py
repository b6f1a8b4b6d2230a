"""Partitions that come and go, as changes and as statements."""

from dataclasses import replace

import pytest

from streamer.errors.error_classes import TargetSchemaError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.relation_names import RelationPattern as Pattern
from streamer.mapping.rule_options import DdlKind, TableType
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.schema.partitions import (
    Partition,
    PartitionChange,
    PartitionKey,
    partition_difference,
)
from streamer.schema.statistics_and_partitions import obstacle_to_partitions
from streamer.schema.target_relation import TargetColumn, TargetRelation
from streamer.schema_changes.translate.partition_translator import PartitionTranslator

T, W = RelationName("public", "t"), RelationName("dw", "w")
ROOT = Partition(1, 0, "public", "t", None, "LIST (region)")
EU = Partition(2, 0, "public", "t_eu", "FOR VALUES IN ('eu')", "RANGE (id)")
EU_1 = Partition(3, 2, "public", "t_eu_1", "FOR VALUES FROM (1) TO (9)")
REST = Partition(4, 0, "public", "t_rest", "DEFAULT")
TREE = (ROOT, EU, REST, EU_1)
AT_TARGET = tuple(
    replace(
        each,
        oid=each.oid + 100,
        parent=each.parent and each.parent + 100,
        namespace="dw",
        name="w" if each is ROOT else each.name,
    )
    for each in TREE
)


def mapping(type_: TableType = TableType.CLONE, **fields: object) -> RelationMapping:
    rule = TableRule(Pattern("public", "t"), type=type_, columns=(("region", "zone"),))
    return RelationMapping(T, W, replace(rule, **fields))  # type: ignore[arg-type]


def translate(
    changes: list[PartitionChange],
    of: RelationMapping | None = None,
    *,
    sid: str | None = None,
    there: tuple[Partition, ...] = (),
    copy_follows: bool = False,
) -> list[str]:
    columns = ["id", "zone"] + (["sid"] if sid else [])
    column = TargetColumn("", "text", "text", "=", 25, False, False, False, False)
    target = TargetRelation(
        9,
        W,
        bool(there),
        dict.fromkeys(columns, column),
        *((), (), frozenset(), False, False, True),
    )
    translator = PartitionTranslator(
        replace(of or mapping(), sid=sid),
        target,
        source_columns=["id", "region"],
        target_partitions=there,
        at="2024-01-01 00:00:00+00:00",
        lsn="0/1",
    )
    return translator.translate(changes, copy_follows=copy_follows)


def test_partitions_that_exchange_their_names_take_turns() -> None:
    renamed = (ROOT, replace(EU, name="t_rest"), replace(REST, name="t_eu"), EU_1)
    changes = partition_difference(TREE, renamed)
    assert str(changes[0]) == 'rename_table "public.t_eu" to "t_eu_moves1"'
    rename = 'alter table "dw"."{}" rename to "{}"'
    assert translate(changes, there=AT_TARGET) == [
        rename.format("t_eu", "t_eu_moves1"),
        rename.format("t_rest", "t_eu"),
        rename.format("t_eu_moves1", "t_rest"),
    ]
    assert not translate(changes, sid="a", there=AT_TARGET)
    assert not translate(changes)
    gone = partition_difference(renamed, (ROOT, renamed[2]))
    assert translate(gone, there=AT_TARGET) == ['alter table "dw"."w" detach partition "dw"."t_eu"']


def test_a_partition_takes_its_own_along_and_may_come_again() -> None:
    changes = partition_difference(TREE, (ROOT, REST))
    assert [str(each) for each in changes] == ['detach_partition "public.t_eu"']
    changes = partition_difference((ROOT, REST), TREE)
    assert [each.partition for each in changes] == [EU, EU_1]
    other = replace(EU_1, bound="FOR VALUES FROM (1) TO (5)")
    kinds = [each.kind for each in partition_difference(TREE, (ROOT, EU, REST, other))]
    assert kinds == [DdlKind.DETACH_PARTITION, DdlKind.ATTACH_PARTITION]
    assert partition_difference(TREE, TREE) == []


LEFT = partition_difference(TREE, (ROOT, EU, REST))
EU_ROWS = """("zone" in ('eu')) and ("id" is not null and "id" >= '1' and "id" < '9')"""


def test_rows_of_a_partition_that_left_leave_the_target() -> None:
    assert translate(LEFT) == [f'delete from only "dw"."w" where {EU_ROWS}']
    (statement,) = translate(LEFT, sid="it's")
    assert statement.startswith('delete from only "dw"."w" where "sid"::text = \'it\'\'s\' and (')
    (statement,) = translate(LEFT, mapping(TableType.HISTORY))
    assert '"kvsz_deleted" = true where "kvsz_end" = \'9999-01-01 00:00:00+00\'' in statement
    assert translate(LEFT, mapping(TableType.APPEND)) == []
    assert translate(LEFT, copy_follows=True) == []
    rest = partition_difference(TREE, (ROOT, EU, EU_1))
    assert translate(rest) == [
        """delete from only "dw"."w" where ((("zone" in ('eu'))) is not true)"""
    ]


def test_rows_that_the_target_cannot_tell_apart_are_named() -> None:
    with pytest.raises(TargetSchemaError, match=r'column "region".*resync public\.t --mode diff'):
        translate(LEFT, mapping(exclude=frozenset({"region"})))


def test_a_partitioned_target_follows() -> None:
    assert translate(LEFT, there=AT_TARGET) == [
        'alter table "dw"."t_eu" detach partition "dw"."t_eu_1"'
    ]
    assert translate(LEFT, sid="eu", there=AT_TARGET)[0].startswith("delete from")
    moved = tuple(
        replace(e, bound="FOR VALUES FROM (1) TO (7)") if e.oid == 103 else e for e in AT_TARGET
    )
    assert translate(LEFT, there=moved)[0].startswith("delete from"), "it has other rows"
    come = partition_difference((ROOT, REST), TREE)
    assert translate(come, there=(AT_TARGET[0], AT_TARGET[2])) == [
        """create table "dw"."t_eu" partition of "dw"."w" FOR VALUES IN ('eu') partition by range ("id")""",
        'create table "dw"."t_eu_1" partition of "dw"."t_eu" FOR VALUES FROM (1) TO (9)',
    ]
    assert translate(come, there=AT_TARGET) == []
    assert translate(come) == [], "a plain table takes all rows"


def test_keys_are_read_as_postgresql_writes_them() -> None:
    key = PartitionKey.parse(
        """RANGE ("we""ird, (", lower(b) COLLATE "C", ((a || ','::text)) ops)"""
    )
    assert [(i.column, i.expression, i.rest) for i in key.items] == [
        ('we"ird, (', None, ""),
        (None, "lower(b)", ' COLLATE "C"'),
        (None, "((a || ','::text))", " ops"),
    ]


def test_a_target_may_be_unable_to_have_the_partitions() -> None:
    names = ["id", "region"]
    assert obstacle_to_partitions(TREE, mapping(), names, ["id", "region"]) is None
    assert "lacks" in (obstacle_to_partitions(TREE, mapping(), names, ["id"]) or "")
    excluded = mapping(exclude=frozenset({"region"}))
    assert "region" in (obstacle_to_partitions(TREE, excluded, names, []) or "")
    assert obstacle_to_partitions(TREE, mapping(TableType.HISTORY), names, []) is not None
