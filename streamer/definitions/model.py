"""The definition of a table, as the catalogs of its server have it.

Expressions are the text of PostgreSQL's own deparsers (``pg_get_expr``), read with an empty
search_path. The names of columns in them are those of the table. Pure.
"""

from dataclasses import dataclass

from streamer.mapping.definition import DefinedColumn
from streamer.mapping.names import RelationName
from streamer.mapping.partitions import Partition


@dataclass(frozen=True, slots=True)
class IndexKey:
    """A key of an index: a column or an expression, and all that follows it in its definition.

    ``collation``, ``opclass``: quoted names, None for the default ones. ``operator``: that of an
    exclusion constraint, as SQL.
    """

    column: str | None
    expression: str | None = None
    collation: str | None = None
    opclass: str | None = None
    opclass_options: tuple[str, ...] = ()
    descending: bool = False
    nulls_first: bool = False
    operator: str | None = None
    statistics: int | None = None


@dataclass(frozen=True, slots=True)
class IndexDefinition:
    """An index. ``uses``: the columns in its expressions and its predicate.

    ``constraint``: the name of the constraint that it implements. ``options``: storage parameters.
    """

    name: str
    method: str
    keys: tuple[IndexKey, ...]
    included: tuple[str, ...] = ()
    is_unique: bool = False
    is_primary: bool = False
    is_valid: bool = True
    nulls_not_distinct: bool = False
    predicate: str | None = None
    options: tuple[str, ...] = ()
    uses: frozenset[str] = frozenset()
    constraint: str | None = None
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class ConstraintDefinition:
    """A constraint of a table.

    ``kind``: pg_constraint.contype: c, p, u, x or f. ``definition``: pg_get_constraintdef, as the
    source has it. ``columns``: those it is about. A check has an ``expression``, a foreign key the
    fields from ``referenced`` on, and the others an ``index``.
    """

    name: str
    kind: str
    definition: str
    columns: tuple[str, ...] = ()
    expression: str | None = None
    index: str | None = None
    deferrable: bool = False
    deferred: bool = False
    validated: bool = True
    enforced: bool = True
    no_inherit: bool = False
    period: bool = False
    referenced: RelationName | None = None
    referenced_columns: tuple[str, ...] = ()
    match: str = "s"
    on_update: str = "a"
    on_delete: str = "a"
    on_delete_columns: tuple[str, ...] = ()
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class StatisticsDefinition:
    """Extended statistics. ``definition``: pg_get_statisticsobjdef, as the source has it."""

    name: str
    definition: str
    target: int | None = None
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table with its columns, indexes and constraints; each in the order of its creation.

    ``partitions``: itself and its partitions, parents first, if it is partitioned.
    """

    name: RelationName
    columns: tuple[DefinedColumn, ...]
    indexes: tuple[IndexDefinition, ...] = ()
    constraints: tuple[ConstraintDefinition, ...] = ()
    comment: str | None = None
    statistics: tuple[StatisticsDefinition, ...] = ()
    partitions: tuple[Partition, ...] = ()

    def index(self, name: str) -> IndexDefinition | None:
        """Return the index called *name*."""
        return next((index for index in self.indexes if index.name == name), None)
