"""Which tables are copied in chunks, and how `check` and `plan` say so."""

from dataclasses import replace

import pytest

from streamer.commands.check import planned_copies
from streamer.control.chunked_copy import ChunkedCopy, in_bytes
from streamer.copy.copy_in_chunks import chunk_bytes
from streamer.mapping.relation_names import RelationName
from streamer.source.catalog import SourceRelation
from streamer.source.tables.chunk_columns import chunk_columns
from tests.unit.build import relation_mapping, source_column, source_relation

COLUMNS = (
    source_column("tenant", "integer"),
    source_column("id", "uuid"),
    source_column("name", "text"),
    source_column("made", "bigint", generated="s"),
    source_column("at", "timestamp(3) with time zone"),
    source_column("amount", "numeric(10,2)"),
)
GIB = 1024**3
NAMES = [column.name for column in COLUMNS]


def partitioned(*key: str, other: str) -> SourceRelation:
    """A table of two partitions. *other*: the identity of the second partition."""
    relation = table(*key)
    one = relation.identity.root
    two = replace(one, oid=2, name=RelationName("public", "p"), kind=other)
    identity = replace(relation.identity, leaves=(one, two), is_partitioned=True)
    return replace(relation, identity=identity)


def table(*key: str, identity: str = "d") -> SourceRelation:
    replicated = () if identity == "f" else key
    return source_relation(
        columns=COLUMNS, key=replicated, primary_key=key, replica_identity=identity
    )


@pytest.mark.parametrize(
    ("relation", "columns"),
    [
        (table("tenant", "id"), (("tenant", "integer"), ("id", "uuid"))),
        (table("tenant", "name", "id"), (("tenant", "integer"),)),
        (table("id", identity="f"), (("id", "uuid"),)),
        (
            table("at", "amount", "name"),
            (("at", "timestamp(3) with time zone"), ("amount", "numeric(10,2)")),
        ),
        (
            table("name", "id"),
            'its key begins with "name" of type text, whose order is not that of its bytes in UTF-8',
        ),
        (
            table("made"),
            (
                "its updates are not published (has a generated column in its replica identity, "
                "which is not published)"
            ),
        ),
        (table(), "it has no key"),
        (partitioned("id", other="d"), (("id", "uuid"),)),
        (
            partitioned("id", other="n"),
            (
                'its updates are not published (its partition "public.p" has REPLICA IDENTITY '
                "NOTHING, while the replica identity of the table itself is: key id)"
            ),
        ),
    ],
)
def test_the_first_columns_of_the_key_with_one_order_everywhere_make_the_chunks(
    relation: SourceRelation, columns: object
) -> None:
    assert chunk_columns(relation, NAMES, ()) == columns


def test_a_column_that_the_target_does_not_have_makes_no_chunks() -> None:
    assert chunk_columns(table("tenant", "id"), ["tenant"], ()) == (("tenant", "integer"),)
    assert isinstance(chunk_columns(table("tenant", "id"), ["id"], ()), str)


def test_a_key_whose_neighbours_are_in_distant_pages_makes_no_chunks() -> None:
    found = chunk_columns(table("id"), NAMES, (), is_distant=True)
    assert found == (
        "neighbouring keys are in distant pages, so each chunk would read the whole table"
    )


def test_check_names_it_whatever_its_size_is() -> None:
    planned = planned_copies._planned(
        table("id"), relation_mapping(), 10 * GIB, (), is_distant=True
    )
    assert (planned.in_one_piece, planned.is_distant) == (None, True)


def test_text_that_is_ordered_by_bytes_makes_chunks() -> None:
    found = chunk_columns(table("name", "id"), NAMES, {"name"})
    assert found == (("name", "text"), ("id", "uuid"))
    assert in_bytes('"name"', "character varying(9)") == '"name" collate "C"'
    assert in_bytes('"id"', "uuid") == '"id"'


def test_the_number_of_chunks_is_an_estimate_that_gives_way() -> None:
    copied = ChunkedCopy(("id",), ("bigint",), ("7",), "", 2, 10, 95, 7, ((16385, 1), (16386, 2)))
    assert copied.total == 8
    assert replace(copied, count=12).total == 13
    assert ChunkedCopy.from_json(copied.to_json()) == copied


@pytest.mark.parametrize(
    ("size", "total"), [(11 * GIB, 8), (100 * GIB, 26), (1024 * GIB, 49), (10240 * GIB, 73)]
)
def test_chunks_grow_so_that_a_table_of_any_size_has_few(size: int, total: int) -> None:
    copied = ChunkedCopy(("id",), ("bigint",), (), "", 0, chunk_bytes(10 * GIB), size, 0)
    assert copied.total == total
    sizes = [replace(copied, count=count).next_bytes for count in range(total)]
    assert sum(sizes[:-1]) < size <= sum(sizes) + total
    assert sizes[-1] <= GIB + size / 10, "what a failure costs"


def test_the_order_of_copies_names_large_tables_and_why_one_is_not_in_chunks() -> None:
    tables = [
        {"source": "a", "in_chunks": False, "in_one_piece": None, "is_distant": False},
        {"source": "b", "in_chunks": True, "in_one_piece": None, "is_distant": False},
        {"source": "c", "in_chunks": False, "in_one_piece": "it has no key", "is_distant": False},
        {"source": "d", "in_chunks": False, "in_one_piece": None, "is_distant": True},
    ]
    planned = [{"label": "shop", "size_bytes": 1, "seconds": 1, "tables": tables}]
    assert list(planned_copies.copy_lines(planned, 4))[2:] == [
        "     b: in chunks (sync.resumable_above)",
        "     c: not in chunks, because it has no key",
        "     d: compared page by page, because neighbouring keys are in distant pages",
    ]
