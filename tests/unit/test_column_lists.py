"""Column lists: which columns a publication sends, and where PostgreSQL allows no list."""

from dataclasses import replace

import pytest

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.source.replica_identity import RelationIdentity, TableIdentity
from streamer.source.slot_and_publications.column_lists import column_lists, sent_columns, unlisted
from streamer.source.slot_and_publications.publication import (
    Member,
    Publication,
    PublishedSchema,
    WantedMembers,
    publication_changes,
    publication_faults,
)
from tests.unit.build import relation_mapping, source_mapping

T = RelationName("public", "t")
COLUMNS = {"id": 1, "name": 2, "secret": 3, "twice": 4}


def identity(kind: str = "d", key: tuple[str, ...] = ("id",)) -> RelationIdentity:
    root = TableIdentity(1, T, kind, key)
    return RelationIdentity(root, (), False, COLUMNS, frozenset({"twice"}))


def rule(*exclude: str) -> RelationMapping:
    mapping = relation_mapping(exclude=exclude)
    return replace(mapping, rule=replace(mapping.rule, column_list=True))


def publication(
    columns: frozenset[str] | None = None, *, name: str = "streamer_shop", has_member: bool = True
) -> Publication:
    changes = {"insert", "truncate"} | (set() if name.endswith("_ins") else {"update", "delete"})
    return Publication(
        name,
        "1.1",
        is_owned=True,
        publishes=frozenset(changes),
        via_root=True,
        members={T: Member("5", columns=columns)} if has_member else {},
    )


def test_a_list_has_the_columns_that_are_written() -> None:
    lists = column_lists([rule("secret")], [identity()], [], 15_00_00)
    assert lists.columns == {T: frozenset({"id", "name"})}
    assert not lists.refused
    assert not column_lists([rule()], [identity()], [], 15_00_00).columns


@pytest.mark.parametrize(
    ("exclude", "what", "published", "version", "reason"),
    [
        ("secret", identity(), publication(), 14_00_00, "PostgreSQL 15"),
        ("secret", identity("f", ()), publication(), 15_00_00, "is FULL"),
        ("id", identity(), publication(), 15_00_00, 'column "id"'),
        (
            "secret",
            identity(),
            replace(publication(), has_all_tables=True),
            15_00_00,
            "names all tables",
        ),
        (
            "secret",
            identity(),
            replace(publication(), namespaces={"other": PublishedSchema("9", {})}),
            15_00_00,
            "or schemas",
        ),
    ],
)
def test_a_table_whose_columns_cannot_stay_is_unpublished(
    exclude: str, what: RelationIdentity, published: Publication, version: int, reason: str
) -> None:
    lists = column_lists([rule(exclude)], [what], [published], version)
    assert reason in lists.refused[T].message
    changes = publication_changes(
        source_mapping(),
        WantedMembers([what], lists=lists),
        {published.name: published},
        version,
    )
    assert 'alter publication "streamer_shop" drop table only "public"."t"' in changes.needed
    assert not any(" add table" in sql or '"t" (' in sql for sql in changes.needed)


def test_without_a_key_any_column_can_stay() -> None:
    lists = column_lists([rule("id")], [identity("n", ())], [], 15_00_00)
    assert lists.columns == {T: frozenset({"name", "secret"})}


@pytest.mark.parametrize(
    ("present", "lacking"),
    [
        (None, frozenset()),  # sends all columns
        (frozenset({"id", "name"}), None),
        (frozenset({"id"}), frozenset({"name"})),
        (frozenset({"id", "secret"}), frozenset({"name"})),
        (frozenset({"id", "name", "secret"}), frozenset()),
    ],
)
def test_a_list_that_lacks_a_column_needs_a_copy(
    present: frozenset[str] | None, lacking: frozenset[str] | None
) -> None:
    mapping, it = rule("secret"), identity()
    lists = column_lists([mapping], [it], [], 15_00_00)
    assert unlisted(mapping, it, [publication(present)], lists) == lacking


def test_a_list_goes_with_its_setting() -> None:
    mapping, it = rule("secret"), identity()
    plain = replace(mapping, rule=replace(mapping.rule, column_list=False))
    lists = column_lists([plain], [it], [], 15_00_00)
    assert unlisted(plain, it, [publication(frozenset({"id", "name"}))], lists) == frozenset()
    assert sent_columns(plain, it) == {"id", "name"}


def test_a_list_changes_only_with_a_copy_or_on_demand() -> None:
    source, it = source_mapping(), identity()
    lists = column_lists([rule("secret")], [it], [], 15_00_00)
    existing = {
        "streamer_shop": publication(),
        "streamer_shop_ins": publication(name="streamer_shop_ins", has_member=False),
    }
    wanted = WantedMembers([it], lists=lists)
    idle = publication_changes(source, wanted, existing, 15_00_00)
    assert idle.all == []
    changes = publication_changes(
        source, replace(wanted, relisted=frozenset({T})), existing, 15_00_00
    )
    assert changes.needed == [
        'alter publication "streamer_shop" drop table only "public"."t"',
        'alter publication "streamer_shop" add table only "public"."t" ("id", "name")',
    ]
    (fault,) = publication_faults(source, existing, [it], (), 15_00_00, lists)
    assert fault.problem == "sends excluded columns"
    assert list(fault.sql) == changes.needed


def test_two_publications_never_have_different_lists() -> None:
    """Decoding fails if a table is in both publications, so the table leaves the second at the same
    time.
    """
    source, it = source_mapping(), identity()
    lists = column_lists([rule("secret")], [it], [], 15_00_00)
    existing = {
        "streamer_shop": publication(has_member=False),
        "streamer_shop_ins": publication(name="streamer_shop_ins"),
    }
    changes = publication_changes(source, WantedMembers([it], lists=lists), existing, 15_00_00)
    assert not changes.surplus
    assert sorted(sql.split()[3] for sql in changes.needed) == ["add", "drop"]


def test_a_mapped_table_may_be_a_surplus_member_of_the_second_publication() -> None:
    source, it = source_mapping(), identity()
    existing = {
        "streamer_shop": publication(),
        "streamer_shop_ins": publication(name="streamer_shop_ins"),
    }
    changes = publication_changes(source, WantedMembers([it]), existing, 15_00_00)
    assert changes.all == ['alter publication "streamer_shop_ins" drop table only "public"."t"']
    assert changes.surplus_members == {T}
