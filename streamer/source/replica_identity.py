"""Decides which changes of a relation may be published, from the replica identity.

PostgreSQL reads the replica identity of the table that gets a change. For a partitioned table that
is the partition, and a partition does not inherit REPLICA IDENTITY. The stream, however, names the
root and the root's key. So updates and deletes of a partitioned table can be published only while
every leaf logs the old rows that the root announces. Otherwise the application's statement fails,
or the stream sends a key without meaning.

Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier

NONE: Final = "none"
"""The value of `RelationIdentity.published` if only inserts may be published."""
FULL: Final = "full"


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """The part of the old row that a table logs. ``kind`` is pg_class.relreplident; ``key`` names
    the columns of the identity's index, if that index is valid.
    """

    oid: int
    name: RelationName
    kind: str
    key: tuple[str, ...] = ()
    has_generated_key: bool = False
    """The stream leaves generated columns out, and the rest of such a key identifies no row."""
    refuses_full: bool = False
    """From PostgreSQL 18 on, the server rejects UPDATE and DELETE of a published table with REPLICA
    IDENTITY FULL and generated columns.
    """
    has_deferrable_primary_key: bool = False
    is_unlogged: bool = False

    @property
    def obstacle(self) -> str | None:
        """The reason why neither UPDATE nor DELETE of this table can be published, or None."""
        if self.kind == "f":
            if not self.refuses_full:
                return None
            return (
                "has REPLICA IDENTITY FULL and generated columns, which PostgreSQL 18 cannot "
                "publish"
            )
        if self.kind == "n":
            return "has REPLICA IDENTITY NOTHING"
        if self.has_generated_key:
            return "has a generated column in its replica identity, which is not published"
        if self.key:
            return None
        if self.kind == "i":
            return "has a replica identity whose index is dropped or invalid"
        if self.has_deferrable_primary_key:
            return "has a deferrable primary key, which cannot be a replica identity"
        return "has no primary key"

    @property
    def refuses_updates(self) -> bool:
        """Whether the server refuses UPDATE and DELETE while a publication publishes these.

        Servers before PostgreSQL 18 accept these statements despite a generated column in the key.
        """
        return self.obstacle is not None and not self.has_generated_key

    @property
    def published(self) -> str:
        """``full``, ``key`` with the names of the columns, or ``none``."""
        if self.obstacle is not None:
            return NONE
        return FULL if self.kind == "f" else key_identity(self.key)


def key_identity(columns: Iterable[str]) -> str:
    """Return the value of `TableIdentity.published` for an index over *columns*. Pure."""
    return f"key {', '.join(sorted(columns))}"


@dataclass(frozen=True, slots=True)
class KeyCandidates:
    """The unique indexes of a table that can be its replica identity, with their columns."""

    indexes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The index with the fewest columns first."""
    primary_key: Sequence[str] | None = None
    """Columns of the primary key, if suitable."""

    @property
    def usable_index(self) -> str | None:
        return next(iter(self.indexes), None)

    def clause_for(self, identity: str) -> str | None:
        """Return the clause after REPLICA IDENTITY that makes *identity* the key; None without such
        a clause.
        """
        if self.primary_key is not None and key_identity(self.primary_key) == identity:
            return "default"
        for index, columns in self.indexes.items():
            if key_identity(columns) == identity:
                return f"using index {quote_identifier(index)}"
        return None


@dataclass(frozen=True, slots=True)
class RelationIdentity:
    """A mapped relation with its leaves: the tables with the rows of a partitioned relation.

    ``columns``: the numbers of columns by name.
    """

    root: TableIdentity
    leaves: tuple[TableIdentity, ...]
    is_partitioned: bool
    columns: Mapping[str, int]
    generated: frozenset[str] = frozenset()
    """The columns that PostgreSQL computes; the stream omits these."""
    foreign: tuple[RelationName, ...] = ()
    """Partitions that are foreign tables. The WAL lacks their changes, so their replica identity
    does not matter.
    """

    @property
    def name(self) -> RelationName:
        return self.root.name

    @property
    def is_unlogged(self) -> bool:
        return self.root.is_unlogged

    @property
    def refuses_full(self) -> bool:
        return self.root.refuses_full

    @property
    def unlogged_leaves(self) -> tuple[TableIdentity, ...]:
        """The unlogged leaf partitions, whose changes the stream lacks."""
        return tuple(leaf for leaf in self.leaves if leaf.is_unlogged)

    @property
    def differing(self) -> tuple[TableIdentity, ...]:
        """The leaves that do not log the old rows that the root announces."""
        announced = self.root.published
        return tuple(leaf for leaf in self.leaves if leaf.published != announced)

    @property
    def published(self) -> str:
        """The stream's way to identify old rows: ``full``, ``key …`` or ``none``."""
        return NONE if self.differing else self.root.published

    @property
    def is_usable(self) -> bool:
        """Whether updates and deletes can be published without harm to the application."""
        return self.published != NONE

    @property
    def refuses_updates(self) -> bool:
        """Whether the server refuses UPDATE and DELETE of rows while a publication publishes
        these.
        """
        tables = self.leaves if self.is_partitioned else (self.root,)
        return any(table.refuses_updates for table in tables)

    def with_full(self) -> "RelationIdentity":
        """Return the identity after REPLICA IDENTITY FULL of the table and of all partitions."""
        root, *leaves = (
            replace(table, kind="f", refuses_full=False) for table in (self.root, *self.leaves)
        )
        return replace(self, root=root, leaves=tuple(leaves))

    @property
    def obstacle(self) -> str | None:
        """The reason why only inserts may be published; None if all changes may be published."""
        if (root_obstacle := self.root.obstacle) is not None:
            return root_obstacle
        if not (differing := self.differing):
            return None
        leaf = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        reason = leaf.obstacle or f"has another replica identity ({leaf.published})"
        return (
            f'its partition "{leaf.name}"{more} {reason}, while the replica identity of the table '
            f"itself is: {self.root.published}"
        )

    def covers(self, columns: frozenset[str]) -> bool:
        """Whether old rows contain *columns*, as a row filter requires."""
        return self.published == FULL or (self.is_usable and columns <= set(self.root.key))
