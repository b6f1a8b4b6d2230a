"""Tenants: deviations in a matrix of definitions, and the chunks of a purge."""

from dataclasses import replace

import pytest

from streamer.bookkeeping.purges import PurgeRecord
from streamer.commands.tenants.add_and_remove import urls_of
from streamer.commands.tenants.purge_rows import CHUNK_BLOCKS, PurgedLeaf, steps
from streamer.commands.tenants.tenant_drift import Drift, TenantTable, deviations, judge
from streamer.mapping.relation_names import RelationName, RelationPattern
from streamer.mapping.rules import RelationMapping, SourceLabel, TableRule
from streamer.schema.indexes_constraints_types import ConstraintDefinition
from streamer.schema.source_definition import DefinedColumn
from streamer.schema.table_definition import TableDefinition
from tests.unit.build import target_relation

T = RelationName("public", "t")
RULE = TableRule(RelationPattern("public", "t"))


def table(types: dict[str, str], *constraints: ConstraintDefinition) -> TableDefinition:
    columns = tuple(DefinedColumn(n, name, kind) for n, (name, kind) in enumerate(types.items()))
    return TableDefinition(T, columns, constraints)


def tenant(sid: str, types: dict[str, str], *constraints: ConstraintDefinition) -> TenantTable:
    source, mapping = SourceLabel("shop", sid), RelationMapping(T, T, RULE)
    return TenantTable(source, mapping, table(types, *constraints))


def key(*columns: str) -> ConstraintDefinition:
    return ConstraintDefinition(1, "p", "t_pkey", columns=columns)


KEY = key("id")
UNIQUE = ConstraintDefinition(2, "u", "other_name", definition="UNIQUE (email)", columns=("email",))


def found(tables: list[TenantTable], there: TableDefinition) -> list[Drift]:
    return [each for each in judge(tables, {T: there}) if not each.is_equal]


def test_the_matrix_names_tenants_that_deviate_from_most_tenants_or_the_target() -> None:
    same = {"id": "integer", "email": "text", "amount": "numeric(10,2)"}
    tables = [tenant(f"t{n}", same, KEY, UNIQUE) for n in range(5)]
    tables[1] = tenant("t1", same | {"amount": "numeric(12,2)"}, KEY)
    tables[3] = tenant("t3", {"id": "bigint", "amount": "numeric(10,2)", "own": "text"}, UNIQUE)
    types = {"sid": "text", "id": "integer", "email": "text", "amount": "integer"}
    there = table(types, key("sid", "id"))
    rows = {(d.kind, d.name): deviations(d) for d in found(tables, there)}
    assert rows == {
        ("column", "id"): ["bigint: shop:t3"],
        ("column", "email"): ["absent: shop:t3"],
        ("column", "amount"): ["numeric(12,2): shop:t1", "target"],
        ("column", "own"): ["text: shop:t3"],
        ("primary key", ""): ["absent: shop:t3"],
        ("unique", "UNIQUE (email)"): ["absent: shop:t1"],
    }


def test_a_table_that_a_tenant_or_the_target_lacks_is_one_deviation() -> None:
    tables = [tenant(f"t{n}", {"id": "integer"}, KEY) for n in range(3)]
    tables[2] = replace(tables[2], definition=None)
    there = table({"sid": "text", "id": "integer"}, key("sid", "id"))
    rows = {d.kind: d.deviating for d in found(tables, there)}
    assert rows["table"] == {"shop:t2": None}
    assert all(d.target_deviates for d in judge(tables, {}))


def test_a_purge_reads_ranges_of_blocks_from_where_it_was_over_all_partitions() -> None:
    leaves = [PurgedLeaf(RelationName("public", name), 700) for name in ("p1", "p2")]
    there = target_relation(["sid"])
    every = steps(leaves, there, "it's", 0)
    assert [step.next_block for step in every] == [CHUNK_BLOCKS, 700, 1200, 1400]
    assert every[1].sql == (
        """delete from "public"."p1" where ctid >= '(500,0)'::tid and ctid < '(700,0)'::tid """
        """and "sid" = 'it''s'"""
    )
    assert steps(leaves, there, "it's", 1200) == every[3:]
    assert steps(leaves, there, "it's", 1400) == []


def test_a_purge_uses_an_index_on_the_sid() -> None:
    leaves = [PurgedLeaf(RelationName("public", name), 700) for name in ("p1", "p2")]
    there = target_relation(["sid"], leading_index_columns=["sid"])
    assert [(step.next_block, step.repeats) for step in steps(leaves, there, "eu", 0)] == [
        (700, True),
        (1400, True),
    ]
    assert [step.next_block for step in steps(leaves, there, "eu", 700)] == [1400]


def test_the_url_of_tenants_is_a_template() -> None:
    assert urls_of("postgresql://{sid}-db/{sid}", ["a", "b"]) == [
        ("postgresql://a-db/a", "a"),
        ("postgresql://b-db/b", "b"),
    ]


@pytest.mark.parametrize(
    ("next_block", "progress"), [(None, None), (0, None), (25, 0.25), (120, 1.0)]
)
def test_a_purge_over_an_index_shows_no_fraction_before_its_end(
    next_block: int | None, progress: float | None
) -> None:
    record = PurgeRecord(
        "shop", "us", "public.t", 5000, next_block, 100, has_begun=True, is_finished=False
    )
    assert record.progress == progress
    assert replace(record, is_finished=True).progress == 1.0
