"""Which indexes serve a foreign key, and which are missing."""

import pytest

from streamer.indexes.foreign_key_indexes import (
    PREFIX,
    ForeignKey,
    find_missing,
    index_name,
    serves,
)
from streamer.mapping.relation_names import RelationName
from streamer.schema.indexes_constraints_types import IndexDefinition

T = RelationName("public", "t")


def index(*columns: str | None, method: str = "btree", usable: bool = True, partial: bool = False):
    return IndexDefinition(
        1, "i", is_valid=usable, is_partial=partial, method=method, columns=columns
    )


@pytest.mark.parametrize(
    ("there", "columns", "expected"),
    [
        (index("a"), ("a",), True),
        (index("a", "z"), ("a",), True),
        (index("z", "a"), ("a",), False),
        (index("b", "a", "z"), ("a", "b"), True),
        (index("a", "z", "b"), ("a", "b"), False),
        (index("a"), ("a", "b"), False),
        (index(None, "a"), ("a",), False),
        (index("a", None), ("a",), True),
        (index("a", method="hash"), ("a",), True),
        (index("a", method="brin"), ("a",), False),
        (index("a", usable=False), ("a",), False),
        (index("a", partial=True), ("a",), False),
        # An index finds the rows of a sid with the sid in first, last or no place.
        (index("sid", "a"), ("sid", "a"), True),
        (index("a", "sid"), ("sid", "a"), True),
        (index("a"), ("sid", "a"), True),
        (index("sid"), ("sid", "a"), False),
        (index("sid", "a"), ("a",), True),
        (index("sid", "z", "a"), ("sid", "a"), False),
    ],
)
def test_an_index_serves_equality_of_its_first_columns(
    there: IndexDefinition, columns: tuple[str, ...], expected: bool
) -> None:
    assert serves(there, columns) is expected


def missing(*keys: ForeignKey, there: list[IndexDefinition] | None = None) -> list[tuple[str, ...]]:
    return [found.columns for found in find_missing(keys, {T: there or []})]


def test_few_indexes_serve_many_keys() -> None:
    keys = [
        ForeignKey(T, ("a",), "short"),
        ForeignKey(T, ("a", "b"), "long"),
        ForeignKey(T, ("b", "a"), "turned"),
        ForeignKey(T, ("c",), "eu", by_sid=True),
        ForeignKey(T, ("c",), "us", by_sid=True),
        ForeignKey(T, ("d",), "served"),
    ]
    assert missing(*keys, there=[index("d", "x")]) == [("a", "b"), ("sid", "c")]
    labels = [found.foreign_keys for found in find_missing(keys, {})]
    assert labels == [("long", "turned"), ("eu", "us"), ("served",)]


def test_names_fit_and_differ() -> None:
    long = "ä" * 60
    tables = [RelationName(n, t) for n in ("a", "b") for t in ("t", long, long + "x", 't"; drop')]
    columns = [("c",), ("c", "d"), ("c_d",), (long,), ("d", "c")]
    names = [index_name(table, its) for table in tables for its in columns]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) <= 63 and name.startswith(PREFIX) for name in names)
    assert index_name(T, ("c",)).startswith("streamer_fk_t_c_")
