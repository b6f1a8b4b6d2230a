"""The definition of a table in the catalogs of a server.

Expressions are the text of PostgreSQL's deparsers (``pg_get_expr``) under an empty search_path,
with the table's names of columns. Pure.
"""

from dataclasses import dataclass

from streamer.mapping.relation_names import RelationName
from streamer.schema.indexes_constraints_types import (
    ConstraintDefinition,
    DefinedObject,
    IndexDefinition,
    constraints_of,
)
from streamer.schema.partitions import Partition
from streamer.schema.source_definition import DefinedColumn


@dataclass(frozen=True, slots=True)
class StatisticsDefinition:
    """Extended statistics. ``definition``: pg_get_statisticsobjdef of the source."""

    name: str
    definition: str
    target: int | None = None
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class TableDefinition:
    """A table with columns, indexes and constraints, in the order of creation.

    ``partitions``: the partitions of a partitioned table and the table itself, parents first.
    """

    name: RelationName
    columns: tuple[DefinedColumn, ...]
    objects: tuple[DefinedObject, ...] = ()
    comment: str | None = None
    statistics: tuple[StatisticsDefinition, ...] = ()
    partitions: tuple[Partition, ...] = ()

    @property
    def indexes(self) -> list[IndexDefinition]:
        """The indexes without a constraint."""
        return [part for part in self.objects if isinstance(part, IndexDefinition)]

    @property
    def constraints(self) -> list[ConstraintDefinition]:
        return constraints_of(self.objects)

    @property
    def referenced(self) -> set[RelationName]:
        """The tables that foreign keys refer to."""
        return {c.referenced for c in self.constraints if c.referenced is not None}

    @property
    def all_indexes(self) -> dict[str, IndexDefinition]:
        """All indexes by name, including indexes of constraints."""
        return {part.index.name: part.index for part in self.objects if part.index is not None}
