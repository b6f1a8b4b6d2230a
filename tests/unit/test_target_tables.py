"""The creation of a missing target table."""

import pytest

from streamer.mapping.options import TableType
from streamer.sync.create_tables import create_table_sql
from tests.unit.build import relation_mapping, source_relation


@pytest.mark.parametrize("timing", [" deferrable", " deferrable initially deferred"])
def test_a_key_that_is_checked_late_at_the_source_is_so_at_the_target(timing: str) -> None:
    late = source_relation(primary_key=("id",), replica_identity="f", primary_key_timing=timing)
    (statement,) = create_table_sql(late, relation_mapping(), "eu", {})
    assert f'primary key ("sid", "id"){timing})' in statement
    history = relation_mapping(table_type=TableType.HISTORY)
    (statement,) = create_table_sql(late, history, None, {})
    assert (
        f"exclude using btree (\"id\" with =) where (kvsz_end = '9999-01-01 00:00:00+00'::timestamptz){timing}"
        in statement
    )


def test_a_replica_identity_is_a_key_that_is_checked_at_once() -> None:
    relation = source_relation(
        key=("name",), primary_key=("id",), replica_identity="i", primary_key_timing=" deferrable"
    )
    (statement,) = create_table_sql(relation, relation_mapping(), None, {})
    assert statement.endswith('primary key ("name"))')
