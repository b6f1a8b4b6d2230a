"""The creation of a missing target table."""

import pytest

from streamer.mapping.rule_options import TableType
from streamer.schema_changes.create_tables import NewTable
from streamer.schema_changes.translate.joining_source import widening_statements
from tests.unit.build import (
    relation_mapping,
    source_column,
    source_relation,
    target_relation,
)


@pytest.mark.parametrize("timing", [" deferrable", " deferrable initially deferred"])
def test_a_key_that_is_checked_late_at_the_source_is_so_at_the_target(timing: str) -> None:
    late = source_relation(primary_key=("id",), replica_identity="f", primary_key_timing=timing)
    (statement,) = NewTable(late, relation_mapping(sid="eu"), {}).statements
    assert f'primary key ("sid", "id"){timing})' in statement
    history = relation_mapping(table_type=TableType.HISTORY)
    (statement,) = NewTable(late, history, {}).statements
    assert (
        f'exclude using btree ("id" with =) where ("kvsz_end" = \'9999-01-01 00:00:00+00\'::timestamptz){timing}'
        in statement
    )


def test_a_replica_identity_is_a_key_that_is_checked_at_once() -> None:
    relation = source_relation(
        key=("name",), primary_key=("id",), replica_identity="i", primary_key_timing=" deferrable"
    )
    (statement,) = NewTable(relation, relation_mapping(), {}).statements
    assert statement.endswith('primary key ("name"))')


def test_a_tenant_that_joins_brings_its_generated_column_over_the_names_of_the_target() -> None:
    loud = source_column("loud", generated="s", default="upper(name)")
    relation = source_relation(columns=["id", "name", loud])
    mapping = relation_mapping(columns={"id": "id", "name": "full", "loud": "loud"}, sid="eu")
    there = target_relation(["sid", "id", "full"])
    assert widening_statements(relation.definition, mapping, there) == [
        'alter table "public"."t" add column "loud" text generated always as (upper("full")) stored'
    ]
