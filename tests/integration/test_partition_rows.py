"""The condition for the rows of a partition, with PostgreSQL's routing of rows as the oracle."""

import json

import pytest

from streamer.mapping.relation_names import RelationName, parse_relation
from streamer.mapping.rules import RelationMapping, TableRule
from streamer.postgres.describing import PARTITIONS
from streamer.postgres.quoting import quote_qualified
from streamer.schema.partition_statements import key_renderer
from streamer.schema.partitions import Partition, UnclearPartitionError, rows_of
from tests.support.postgres import Database

T = RelationName("public", "t")
MAPPING = RelationMapping(T, T, TableRule(parse_relation("t", "public")))
VALUES = """
insert into t select a, b, c, d from (values (null), (-5), (1), (2), (7)) a (a),
    (values (null), ('it''s, (x)'), ('b'), ('Z')) b (b), (values (null), (1.1::real), (2.5)) c (c),
    (values (null), ('2024-01-31 23:59:59.9+00'::timestamptz), ('2024-02-01 00:00+00')) d (d)
"""
COLUMNS = "a int, b text, c real, d timestamptz"


def tree_of(database: Database) -> tuple[Partition, ...]:
    sql = f"select ({PARTITIONS})::text from pg_class c where oid = 't'::regclass"
    return tuple(Partition(**each) for each in json.loads(str(database.value(sql))))


SCHEMES = {
    "range of several": """partition by range (a, b);
        create table p1 partition of t for values from (minvalue, minvalue) to (1, 'b');
        create table p2 partition of t for values from (1, 'b') to (2, maxvalue);
        create table p3 partition of t for values from (2, maxvalue) to (maxvalue, maxvalue)""",
    "list": """partition by list (b);
        create table p1 partition of t for values in ('it''s, (x)', null);
        create table p2 partition of t for values in ('b')""",
    "fractions, times": """partition by list (c);
        create table p1 partition of t for values in (1.1) partition by range (d);
        create table p2 partition of p1 for values from ('2024-01-01 00:00+00')
            to ('2024-02-01 00:00+00');
        create table p3 partition of p1 for values from ('2024-02-01 00:00+00') to (maxvalue);
        create table p4 partition of p1 default""",
    "an expression": """partition by range (lower(b), (a + 1));
        create table p1 partition of t for values from ('b', minvalue) to ('b', 3);
        create table p2 partition of t for values from ('b', 3) to (maxvalue, maxvalue)""",
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_condition_finds_exactly_the_rows_of_its_partition(scheme: str, source: Database) -> None:
    source.execute(f"create table t ({COLUMNS}) {SCHEMES[scheme]}")
    source.execute(f"create table rest partition of t default; {VALUES}")
    tree = tree_of(source)
    render = key_renderer(MAPPING, "abcd", None)
    for partition in tree[1:]:
        condition = rows_of(partition, tree, render)
        name = quote_qualified(partition.namespace, partition.name)
        own = source.execute(f"select * from {name} order by a, b, c, d")
        assert source.execute(f"select * from t where {condition} order by a, b, c, d") == own
        assert own or partition.name == "p4", "an empty partition shows nothing"


@pytest.mark.parametrize(
    "scheme",
    [
        "partition by hash (a); create table p partition of t for values with (modulus 1, remainder 0)",
        "partition by list (b collate \"C\"); create table p partition of t for values in ('b')",
        "partition by range (b text_pattern_ops); create table p partition of t for values from ('a') to ('z')",
    ],
)
def test_a_partition_that_only_its_source_knows_has_no_condition(
    scheme: str, source: Database
) -> None:
    source.execute(f"create table t ({COLUMNS}) {scheme}")
    tree = tree_of(source)
    with pytest.raises(UnclearPartitionError):
        rows_of(tree[1], tree, key_renderer(MAPPING, "abcd", None))
