"""How catalogs of the source differ from the catalogs as of a copy."""

from typing import Any

import pytest

from streamer.copy.gap_reports import replaced_columns
from streamer.mapping.relation_names import RelationName
from streamer.source.replica_identity import RelationIdentity, TableIdentity
from streamer.source.slot_and_publications.publication import (
    Member,
    Publication,
    PublishedSchema,
    is_of_scope,
)
from streamer.source.tables.rewritten_tables import Storage

T = RelationName("public", "t")
ANY: dict[str, Any] = {"is_owned": True, "publishes": frozenset(), "via_root": True}


def test_a_column_that_the_target_does_not_get_is_never_a_replaced_column() -> None:
    now = {"a": 1, "b": 2, "c": 5}
    assert replaced_columns({"a": 1, "b": -2, "c": 3}, now) == ["c"]
    assert replaced_columns({"a": 1, "b": 2}, now) == []


@pytest.mark.parametrize(
    ("former", "now", "is_detached"),
    [
        ("d1 ", "d1 77", True),
        ("d1 76", "d1 77", True),
        ("d1 77", "d1 77", False),
        ("d1 78", "d1 ", False),  # a session changed one of the columns
        ("d1", "d1 77", False),  # an older version stored the columns only
        (None, "d1 77", False),
    ],
)
def test_the_catalogs_show_that_a_table_was_attached_and_detached(
    former: str | None, now: str, is_detached: bool
) -> None:
    stored = Storage.of([0, 5, former])
    assert stored.stored == [0, 5, former]
    assert Storage.of([0, 5, now]).was_detached(stored) is is_detached


@pytest.mark.parametrize(
    ("publication", "is_scope"),
    [
        (Publication("p", "1.1", members={T: Member("7")}, **ANY), False),
        (Publication("p", "1.1", has_all_tables=True, **ANY), True),
        (Publication("p", "1.1", namespaces={"public": PublishedSchema("8", {})}, **ANY), True),
    ],
    ids=["by name", "all tables", "schema"],
)
def test_a_fingerprint_shows_whether_the_publication_names_the_table(
    publication: Publication, *, is_scope: bool
) -> None:
    identity = RelationIdentity(TableIdentity(1, T, "d", ("id",)), (), False, {"id": 1})
    assert is_of_scope(publication.fingerprint_of(identity)) is is_scope
