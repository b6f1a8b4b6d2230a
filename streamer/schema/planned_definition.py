"""A planned definition of a target table, and the target of a source's table. Pure."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Self

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_qualified
from streamer.schema.target_relation import TargetRelation


class ObjectKind(enum.StrEnum):
    """The kind of a planned definition."""

    COMMENT = "comment"
    DEFAULT = "default"
    NOT_NULL = "not null"
    STATISTICS = "statistics"
    EXTENDED_STATISTICS = "extended statistics"
    PARTITIONING = "partitioning"
    UNIQUE = "unique"
    INDEX = "index"
    EXCLUSION = "exclusion"
    CHECK = "check"
    FOREIGN_KEY = "foreign key"


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """The target of a source's table.

    ``has_sid``: the target's column ``sid`` gets the sid of the mapping. ``columns``: the target's
    columns; None for an absent table, whose columns only the mapping decides. ``is_partitioned``:
    the target is a partitioned table.
    """

    mapping: RelationMapping
    has_sid: bool
    columns: frozenset[str] | None = None
    is_partitioned: bool = False

    @classmethod
    def at(cls, mapping: RelationMapping, relation: TargetRelation | None) -> Self:
        """Return the target of *mapping*. *relation*: the target's table; None if absent."""
        if relation is None:
            return cls(mapping, mapping.sid is not None)
        has_sid = mapping.sid is not None and relation.has_sid
        return cls(mapping, has_sid, frozenset(relation.columns), relation.is_partitioned)

    @property
    def quoted(self) -> str:
        return quote_qualified(self.mapping.target.namespace, self.mapping.target.name)

    @property
    def is_alone(self) -> bool:
        """Whether only the present rows of one table bind the definition of the target."""
        is_shared = self.has_sid or self.mapping.rule.is_disjoint
        return self.mapping.type is TableType.CLONE and not is_shared

    def column(self, source_column: str) -> str | None:
        """Return the target's name for a column; None if the target does not get the column."""
        name = self.mapping.target_column(source_column)
        if name is None or (self.columns is None and self.mapping.is_optional(source_column)):
            return None
        return name if self.columns is None or name in self.columns else None

    def key(self, columns: Iterable[str]) -> list[str] | None:
        """Return the target's columns for a key of the source, the sid first; None if the target
        lacks a column.
        """
        names = [self.column(column) for column in columns]
        key = [name for name in names if name is not None]
        if len(key) < len(names):
            return None
        return [SID, *key] if key and self.has_sid else key


Places = Callable[[RelationName], TargetPlace | None]
"""Returns the target of a source's table; None for a table that is not replicated."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A definition for the target, in two forms of statements.

    ``statements`` run in a single transaction, while no other session uses the table. The
    statements of ``online`` avoid long locks; each runs in a separate transaction, as ``create
    index concurrently`` requires. ``name``: the name of the index, constraint or column, or of the
    table for a table's comment. ``index``: the index that ``online`` builds concurrently; a failed
    build leaves an invalid index. ``reason``: the obstacle at the target, if any; then only
    ``source_sql`` has SQL.
    """

    kind: ObjectKind
    name: str
    statements: tuple[str, ...] = ()
    online: tuple[str, ...] = ()
    index: str | None = None
    source_sql: str = ""
    reason: str | None = None
    referenced: RelationName | None = None
    """The target table that a foreign key refers to."""
    version_min: int = 0
    """The oldest server, as ``server_version_num``, that accepts the statements."""

    @property
    def sql(self) -> str:
        """The SQL to show to an operator."""
        return "; ".join(self.online or self.statements) or self.source_sql


_NO_ROLE: Final = (
    "the role of the target may not set session_replication_role, so the foreign key would also "
    "act on replicated changes"
)


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """Obstacles of the target's server and role.

    ``version``: ``server_version_num`` of the target. ``acts``: the target's foreign keys would act
    on replicated changes.
    """

    version: int
    acts: bool = False

    def apply(self, planned: Planned) -> Planned:
        """Return the plan, or the obstacle in place of its statements."""
        if planned.reason is not None:
            return planned
        if self.version < planned.version_min:
            return _without(
                planned,
                f"the clause needs PostgreSQL {planned.version_min // 10000}, and the target has "
                f"PostgreSQL {self.version // 10000}",
            )
        if self.acts and planned.kind is ObjectKind.FOREIGN_KEY:
            return _without(planned, _NO_ROLE)
        return planned


def _without(planned: Planned, reason: str) -> Planned:
    return replace(planned, statements=(), online=(), index=None, reason=reason)
