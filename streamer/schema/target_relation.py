"""The parts of a target relation's definition on which applying changes depends. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import (
    quote_columns,
    quote_identifier,
    quote_literal,
    quote_qualified,
)
from streamer.schema.indexes_constraints_types import (
    DefinedObject,
    IndexDefinition,
    primary_key_of,
)

_BYTEWISE_TYPES: Final = frozenset({16, 20, 21, 23, 25, 26, 1043, 1082, 1114, 1184, 2950})
"""OIDs of bool, int8, int2, int4, text, oid, varchar, date, timestamp, timestamptz and uuid.
Numeric is not in the set, because 1.0 equals 1.00.
"""


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of a target relation. ``type``: the type with its modifier and, if necessary, its
    schema.

    ``base_type``: the type without domains. ``equality``: the operator that indexes of the type
    use.
    """

    name: str
    type: str
    base_type: str
    equality: str
    type_oid: int
    not_null: bool
    has_default: bool
    generated: bool
    identity_always: bool
    base_oid: int = 0
    plain_type: str = ""
    """``base_type`` without a modifier."""
    type_facts: str = ""
    """OIDs of type and collation, and the modifier, in the form of ``streamer.require_facts``."""
    collation: str = ""
    """The quoted name of a nondeterministic collation, by which different texts may be equal."""

    @property
    def equality_is_bytewise(self) -> bool:
        """Whether two values are equal only if the bytes are equal, in text and in binary."""
        return self.base_oid in _BYTEWISE_TYPES and not self.collation

    @property
    def staged_type(self) -> str:
        """The type for staged values, which compare like values of the column."""
        return f"{self.base_type} collate {self.collation}" if self.collation else self.base_type


@dataclass(frozen=True, slots=True)
class TargetRelation:
    """A table of the target that receives rows.

    ``unique_keys``: the column sets of valid, immediate, complete unique indexes over plain
    columns, the primary key first. ``has_row_triggers``: triggers or rules that fire even for
    replicated changes (ENABLE REPLICA or ALWAYS). ``is_referenced``: a foreign key points to the
    table, so TRUNCATE fails. ``delete_acts``: such a key changes referencing rows at a DELETE.
    ``references``: OIDs of tables that the foreign keys refer to. ``sequences``: quoted names of
    the sequences that the columns own and the role may restart. ``numbering``: the quoted names of
    the sequences of bigint identity columns, by column. Their increment is 1, and the role may use
    the sequences. ``unlogged``: the tables, this table or partitions, whose rows a crash of
    the server removes. ``facts``: further facts on which a plan depends, as the text of
    ``streamer.require_facts``.
    """

    oid: int
    name: RelationName
    is_partitioned: bool
    columns: dict[str, TargetColumn]
    primary_key: tuple[str, ...]
    unique_keys: tuple[tuple[str, ...], ...]
    leading_index_columns: frozenset[str]
    has_row_triggers: bool
    is_referenced: bool
    is_writable: bool
    references: frozenset[int] = frozenset()
    delete_acts: bool = False
    sequences: tuple[str, ...] = ()
    numbering: Mapping[str, str] = field(default_factory=dict)
    unlogged: tuple[RelationName, ...] = ()
    facts: str = ""
    partition_key: str | None = None
    """The partition key in the form of ``pg_get_partkeydef``; None for a plain table."""
    objects: tuple[DefinedObject, ...] = field(default=(), compare=False)
    """The indexes and constraints, without texts."""

    @property
    def rows(self) -> str:
        """The table in statements about existing rows, quoted.

        Child tables by inheritance are separate tables, as at the source.
        """
        quoted = quote_qualified(self.name.namespace, self.name.name)
        return quoted if self.is_partitioned else f"only {quoted}"

    @property
    def indexes(self) -> list[IndexDefinition]:
        """All indexes, including indexes of constraints."""
        return [part.index for part in self.objects if part.index is not None]

    @property
    def object_names(self) -> frozenset[str]:
        """The names of indexes and constraints."""
        return frozenset(part.name for part in self.objects)

    @property
    def has_sid(self) -> bool:
        return SID in self.columns

    def add_sid_sql(self, first: str | None) -> list[str]:
        """Return the statements that add a sid to the table and to its primary key.

        Existing rows get the sid *first*, if any.
        """
        default = f" default {quote_literal(first)}" if first is not None else ""
        table = quote_qualified(self.name.namespace, self.name.name)
        column = f"{quote_identifier(SID)} text not null{default}"
        return [f"alter table {table} add column {column}", *self.key_with_sid_sql()]

    def key_with_sid_sql(self) -> list[str]:
        """Return the statement that adds the sid to the primary key, if any."""
        if (key := primary_key_of(self.objects)) is None:
            return []
        table = quote_qualified(self.name.namespace, self.name.name)
        drop = f"drop constraint {quote_identifier(key.name)}"
        columns = quote_columns([SID, *self.primary_key])
        return [f"alter table {table} {drop}, add primary key ({columns})"]

    def is_shared(self, mapping: RelationMapping) -> bool:
        """Whether source tables besides the table of *mapping* may write to the target."""
        return mapping.rule.is_disjoint or (self.has_sid and mapping.sid is not None)

    def lacks_sid(self, mapping: RelationMapping, name: str) -> bool:
        """Whether constraint or unique index *name* compares rows of *mapping* with rows of other
        sids.
        """
        if mapping.sid is None or not self.has_sid:
            return False
        indexes = (part.index for part in self.objects if part.name == name)
        return any(index is not None and SID not in index.columns for index in indexes)

    def drop_sql(self, name: str) -> str:
        """Return the statement that drops constraint *name*, or a unique index without a
        constraint.
        """
        quoted, namespace = quote_identifier(name), quote_identifier(self.name.namespace)
        if any(part.is_index and part.name == name for part in self.objects):
            return f"drop index {namespace}.{quoted}"
        table = quote_qualified(self.name.namespace, self.name.name)
        return f"alter table {table} drop constraint {quoted}"

    def is_unique(self, columns: frozenset[str]) -> bool:
        """Whether *columns* are unique, and an index finds a row by them."""
        return any(columns >= set(key) for key in self.unique_keys)

    def unfilled(self, filled: Collection[str | None]) -> list[TargetColumn]:
        """Return the columns outside *filled* that refuse a row without a value."""
        return [
            column
            for column in self.columns.values()
            if column.not_null
            and column.name not in filled
            and not (column.has_default or column.generated)
        ]
