"""Column lists of streamer's publications, which keep excluded columns at the source.

A table has a list if its rule says `column_list: true`. From PostgreSQL 15 on, pgoutput then omits
unlisted columns from the RELATION message and from every row. A column that a session adds later is
not in the list, so changes lack the column. The guard then extends the list and requests a new
copy of the table.

Pure.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from streamer.errors.error_classes import UnpublishedError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.source.replica_identity import FULL, RelationIdentity

if TYPE_CHECKING:
    from streamer.source.slot_and_publications.publication import Publication

LISTS_SINCE: Final = 15_00_00


@dataclass(frozen=True, slots=True)
class ColumnLists:
    """The columns that publications may send, and the tables for which no list is possible."""

    columns: Mapping[RelationName, frozenset[str]] = field(default_factory=dict)
    """The columns of each table with a list; a table without a list sends all columns."""
    refused: Mapping[RelationName, UnpublishedError] = field(default_factory=dict)
    """Tables that stay unpublished: the server cannot omit their excluded columns."""


NO_LISTS: Final = ColumnLists()


def sent_columns(mapping: RelationMapping, identity: RelationIdentity) -> frozenset[str]:
    """Return the columns that the stream needs: the columns to write, and the inputs of
    expressions.
    """
    used = {name for expression in mapping.rule.expressions for name in expression.names}
    return frozenset(
        name
        for name in identity.columns
        if name not in identity.generated
        and (name in used or mapping.target_column(name) is not None)
    )


def held_back(mapping: RelationMapping, identity: RelationIdentity) -> frozenset[str]:
    """Return the columns that the stream does not need."""
    return frozenset(identity.columns) - identity.generated - sent_columns(mapping, identity)


def column_lists(
    mappings: Iterable[RelationMapping],
    identities: Iterable[RelationIdentity],
    publications: Collection["Publication"],
    version: int,
) -> ColumnLists:
    """Return the lists for rules with `column_list`, and errors where no list is possible.

    A table without columns to omit needs no list.
    """
    by_name = {identity.name: identity for identity in identities}
    columns, refused = {}, {}
    for mapping in mappings:
        identity = by_name.get(mapping.source)
        if not mapping.rule.column_list or identity is None:
            continue
        if not (held := held_back(mapping, identity)):
            continue
        sent = sent_columns(mapping, identity)
        obstacle = _obstacle(identity, sent, publications, version)
        if obstacle is None:
            columns[mapping.source] = sent
            continue
        names = ", ".join(f'"{name}"' for name in sorted(held))
        refused[mapping.source] = UnpublishedError(
            f'the source cannot omit column {names} of "{mapping.source}": {obstacle}',
            hint="remove this obstacle, or remove `column_list`: the source then sends the column, "
            "and streamer ignores it",
        )
    return ColumnLists(columns, refused)


def _obstacle(
    identity: RelationIdentity,
    sent: frozenset[str],
    publications: Collection["Publication"],
    version: int,
) -> str | None:
    """Return the reason why a publication cannot use this list, or None."""
    if version < LISTS_SINCE:
        return "column lists need PostgreSQL 15 or newer"
    if not sent:
        return "the mapping leaves no column"
    if identity.published == FULL:
        return "its replica identity is FULL, which sends whole rows"
    if identity.is_usable and (keys := sorted(set(identity.root.key) - sent)):
        return f'its replica identity has column "{keys[0]}"'
    for publication in publications:
        if publication.has_all_tables or publication.namespaces:
            return f'publication "{publication.name}" names all tables, or schemas'
    return None


def unlisted(
    mapping: RelationMapping,
    identity: RelationIdentity,
    publications: Iterable["Publication"],
    lists: ColumnLists,
) -> frozenset[str] | None:
    """Return the needed columns that a publication's list lacks; None if no list has to change.

    An empty result means that a list has columns that the stream does not need.
    """
    name = identity.name
    members = [p.members[name] for p in publications if name in p.members]
    if name in lists.refused or all(m.columns == lists.columns.get(name) for m in members):
        return None
    sent = sent_columns(mapping, identity)
    lacking = (sent - member.columns for member in members if member.columns is not None)
    return frozenset[str]().union(*lacking)
