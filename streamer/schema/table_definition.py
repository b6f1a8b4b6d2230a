"""The definition of a table, as the catalogs of its server have it.

Expressions are the text of PostgreSQL's own deparsers (``pg_get_expr``), read with an empty
search_path. The names of columns in them are those of the table. Pure.
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
    objects: tuple[DefinedObject, ...] = ()
    comment: str | None = None
    statistics: tuple[StatisticsDefinition, ...] = ()
    partitions: tuple[Partition, ...] = ()

    @property
    def indexes(self) -> list[IndexDefinition]:
        """The indexes that no constraint has."""
        return [each for each in self.objects if isinstance(each, IndexDefinition)]

    @property
    def constraints(self) -> list[ConstraintDefinition]:
        return constraints_of(self.objects)

    @property
    def referenced(self) -> set[RelationName]:
        """The tables that foreign keys refer to."""
        return {c.referenced for c in self.constraints if c.referenced is not None}

    @property
    def all_indexes(self) -> dict[str, IndexDefinition]:
        """All indexes by name, with those of constraints."""
        return {each.index.name: each.index for each in self.objects if each.index is not None}
