"""Replica identities that prevent updates and deletes, and the statements that give better ones.

PostgreSQL uses the identity of each partition, so a partitioned table needs a statement for the
root and a statement for every partition. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

from streamer.commands.check.findings import (
    Finding,
    Fix,
    Place,
    at_source,
    from_error,
    in_words,
    quote_relation,
    some_of,
    warning,
)
from streamer.commands.check.source_facts import IdentityDetails
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier
from streamer.source.catalog import SourceRelation
from streamer.source.replica_identity import FULL, TableIdentity, key_identity
from streamer.source.slot_and_publications.publication import unlogged_error

Details = Mapping[int, IdentityDetails]
"""The facts about the identity of each table, by its OID."""


def check_identity(
    place: Place,
    mapping: RelationMapping,
    relation: SourceRelation,
    details: Details,
    moves: Sequence[str] = (),
) -> Iterable[Finding]:
    """Whether the source publishes updates and deletes of a table and of all its partitions.

    *moves*: the statements that afterwards publish these changes, if streamer lacks the privilege.
    """
    if (unlogged := unlogged_error(relation.identity)) is not None:
        yield from_error(place, unlogged)
    if foreign := relation.identity.foreign:
        problem = (
            "has partitions that are foreign tables, whose changes are not in the WAL: "
            f"{some_of(map(str, foreign))}"
        )
        words = "detach them, and map the tables of their own servers as tables of another source"
        yield warning(place, problem, in_words(words))
    if relation.has_usable_identity:
        return
    lost = "updates" if mapping.type is TableType.APPEND else "updates and deletes"
    yield warning(
        place,
        f"{relation.identity.obstacle}, so {lost} are not replicated",
        _identity_fix(relation, details, moves),
    )


def _identity_fix(relation: SourceRelation, details: Details, moves: Sequence[str]) -> Fix:
    """Keep a usable identity of the table, and give every partition the same identity."""
    root = relation.identity.root
    if root.obstacle is None:
        return _fix(relation, details, root.published, root_clause=None, moves=moves)
    if (key_fix := _key_fix(relation, details, moves)) is not None:
        return key_fix
    if root.refuses_full:
        return in_words(
            "add a primary key, or a unique index on NOT NULL columns, without a generated column"
        )
    words = "or add a primary key, which is faster"
    if root.has_deferrable_primary_key:
        words = "or re-create the primary key without DEFERRABLE, which is faster"
    return _fix(relation, details, FULL, root_clause="full", words=words, moves=moves)


def key_fix(relation: SourceRelation, details: Details) -> Fix:
    """Return the fix that gives a table a key in place of whole rows."""
    words = (
        "add a primary key at the source; for a clone without `filter`, a unique index on NOT NULL "
        "columns of the target is enough"
    )
    return _key_fix(relation, details) or in_words(words)


def _key_fix(relation: SourceRelation, details: Details, moves: Sequence[str] = ()) -> Fix | None:
    root = details[relation.oid]
    if root.primary_key is not None:
        identity = key_identity(root.primary_key)
        return _fix(relation, details, identity, root_clause="default", moves=moves)
    if root.usable_index is not None:
        identity = key_identity(root.indexes[root.usable_index])
        index = f"using index {quote_identifier(root.usable_index)}"
        return _fix(relation, details, identity, root_clause=index, moves=moves)
    return None


def _fix(
    relation: SourceRelation,
    details: Details,
    identity: str,
    *,
    root_clause: str | None,
    words: str | None = None,
    moves: Sequence[str] = (),
) -> Fix:
    """Make *identity* the identity of the partitions; *root_clause* is the clause for the root.

    Add the table to a publication of updates only afterwards: while a published table has no
    identity, the application's updates fail.
    """
    statements = [] if root_clause is None else [_alter(relation.identity.root, root_clause)]
    for leaf in relation.identity.leaves:
        if leaf.published == identity:
            continue
        clause = "full" if identity == FULL else details[leaf.oid].clause_for(identity)
        if clause is not None:
            statements.append(_alter(leaf, clause))
        else:
            words = (
                f'create a unique index on the columns of that key on partition "{leaf.name}", '
                "then make that index its replica identity"
            )
            moves = ()
    statements += moves if statements else ()
    return at_source(*statements, words=words) if statements else in_words(words or "")


def _alter(table: TableIdentity, way: str) -> str:
    return f"alter table {quote_relation(table.name)} replica identity {way}"
