"""The publishable changes of a relation depend on the root table and every leaf."""

import pytest

from streamer.mapping.relation_names import RelationName
from streamer.source.replica_identity import NONE, RelationIdentity, TableIdentity


def table(kind: str, key: tuple[str, ...] = (), name: str = "leaf") -> TableIdentity:
    return TableIdentity(1, RelationName("public", name), kind, key)


@pytest.mark.parametrize(
    ("root", "leaves", "published"),
    [
        (table("d", ("id",)), [], "key id"),
        (table("d"), [], NONE),
        (table("n", ("id",)), [], NONE),
        (table("f"), [table("f"), table("f")], "full"),
        (table("f"), [table("f"), table("d", ("id",))], NONE),
        (table("f"), [table("d")], NONE),
        (table("d", ("id",)), [table("f")], NONE),
        # The index does not matter, only the old values in the stream.
        (table("d", ("a", "b")), [table("i", ("b", "a"))], "key a, b"),
        (table("i", ("a",)), [table("i", ("b",))], NONE),
        (table("d"), [table("f")], NONE),
        (table("i"), [], NONE),
    ],
)
def test_updates_are_published_only_if_every_leaf_logs_like_the_root(
    root: TableIdentity, leaves: list[TableIdentity], published: str
) -> None:
    identity = RelationIdentity(root, tuple(leaves), bool(leaves), {})
    assert identity.published == published
    assert (identity.obstacle is None) == (published != NONE)


@pytest.mark.parametrize(
    ("root", "leaves", "refuses"),
    [
        (table("d", ("id",)), [], False),
        (table("d"), [], True),
        (table("n", ("id",)), [], True),
        # The server asks for the identity of the table with the row.
        (table("d"), [table("f")], False),
        (table("f"), [table("f"), table("d")], True),
        (table("f"), [table("d", ("id",))], False),
    ],
)
def test_the_server_refuses_updates_of_rows_in_tables_without_identity(
    root: TableIdentity, leaves: list[TableIdentity], refuses: bool
) -> None:
    identity = RelationIdentity(root, tuple(leaves), bool(leaves), {})
    assert identity.refuses_updates is refuses
    assert identity.with_full().is_usable


def test_a_row_filter_needs_columns_that_every_old_row_has() -> None:
    key = RelationIdentity(table("d", ("id", "region")), (), False, {})
    assert key.covers(frozenset({"region"}))
    assert not key.covers(frozenset({"region", "amount"}))
    assert RelationIdentity(table("f"), (), False, {}).covers(frozenset({"amount"}))
    assert not RelationIdentity(table("n"), (), False, {}).covers(frozenset())
