"""The statements at the source that give a table a usable replica identity.

PostgreSQL uses the identity of each partition, so a partitioned table needs a statement for the
root and a statement for every partition. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from streamer.errors.remedies import Remedy, at_source
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.source.replica_identity import (
    FULL,
    KeyCandidates,
    RelationIdentity,
    TableIdentity,
    key_identity,
)

Candidates = Mapping[int, KeyCandidates]
"""The possible keys of each table and partition, by OID."""


@dataclass(frozen=True, slots=True)
class IdentityAdvice:
    """Statements, and words about a better or a further act.

    ``is_complete``: the table has a usable identity after the statements.
    """

    statements: tuple[str, ...]
    words: str | None = None
    is_complete: bool = True

    @property
    def remedy(self) -> Remedy:
        if not self.statements:
            return Remedy.of(self.words)
        sql = at_source(*self.statements)
        return Remedy.of("run at the source: ", sql, self.words and f"; {self.words}")


def advise_identity(identity: RelationIdentity, candidates: Candidates) -> IdentityAdvice:
    """Keep a usable identity of the root, and give every partition the same identity."""
    root = identity.root
    if root.obstacle is None:
        return _advise(identity, candidates, root.published, root_clause=None)
    if (by_key := advise_key(identity, candidates)) is not None:
        return by_key
    if root.refuses_full:
        words = (
            "add a primary key, or a unique index on NOT NULL columns, without a generated column"
        )
        return IdentityAdvice((), words, is_complete=False)
    words = "or add a primary key, which is faster"
    if root.has_deferrable_primary_key:
        words = "or re-create the primary key without DEFERRABLE, which is faster"
    return _advise(identity, candidates, FULL, root_clause="full", words=words)


def advise_key(identity: RelationIdentity, candidates: Candidates) -> IdentityAdvice | None:
    """Return the statements that make an existing key the identity; None without such a key."""
    root = candidates.get(identity.root.oid, KeyCandidates())
    if root.primary_key is not None:
        key = key_identity(root.primary_key)
        return _advise(identity, candidates, key, root_clause="default")
    if root.usable_index is not None:
        key = key_identity(root.indexes[root.usable_index])
        index = f"using index {quote_identifier(root.usable_index)}"
        return _advise(identity, candidates, key, root_clause=index)
    return None


def _advise(
    identity: RelationIdentity,
    candidates: Candidates,
    key: str,
    *,
    root_clause: str | None,
    words: str | None = None,
) -> IdentityAdvice:
    """Make *key* the identity of the partitions; *root_clause* is the clause for the root."""
    statements = [] if root_clause is None else [_alter(identity.root, root_clause)]
    is_complete = True
    for leaf in identity.leaves:
        if leaf.published == key:
            continue
        of_leaf = candidates.get(leaf.oid, KeyCandidates())
        clause = "full" if key == FULL else of_leaf.clause_for(key)
        if clause is not None:
            statements.append(_alter(leaf, clause))
        else:
            words = (
                f'create a unique index on the columns of that key on partition "{leaf.name}", '
                "then make that index its replica identity"
            )
            is_complete = False
    return IdentityAdvice(tuple(statements), words, is_complete)


def _alter(table: TableIdentity, clause: str) -> str:
    name = quote_qualified(table.name.namespace, table.name.name)
    return f"alter table {name} replica identity {clause}"
