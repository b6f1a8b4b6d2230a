"""The plan that translates changes of a relation into changes of the target table.

A plan combines the RELATION message of the source, the rule of the mapping and the catalogs of the
target. A plan is immutable; a new RELATION message or a change of the target leads to a new plan.
Pure.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from streamer.apply.rows.row_metadata import RowMetadata
from streamer.compiled import choice
from streamer.decode.former_labels import FormerLabels
from streamer.decode.pgoutput import Relation
from streamer.decode.text_conversion import TextConversion
from streamer.decode.tuples import (
    Row,
    read_binary_row,
    read_binary_tuple,
    read_text_row,
    read_text_tuple,
)
from streamer.mapping.expressions import Expression
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.mapping.sid_and_history_columns import (
    SID,
    STABLE_OIDS_END,
    TABLE_COLUMNS_MAX,
    HistoryColumns,
)
from streamer.postgres.quoting import (
    quote_qualified,
)
from streamer.schema.target_relation import TargetColumn, TargetRelation

if TYPE_CHECKING:
    from streamer.compiled._compiled import RowFolder


class Identity(enum.Enum):
    """The way to find a row to change."""

    KEY = "key"  # by columns whose values no two rows share
    ROW = "row"  # by all columns (REPLICA IDENTITY FULL without a key)
    NONE = "none"  # only inserts can arrive


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """A column of the target to write, and the position of the value in the source's row.

    Values of `RowMetadata` have positions after the source's values.

    ``expression``: SQL that replaces the source's value. ``position`` is negative if the source has
    no value for the column.
    """

    position: int
    target: TargetColumn
    expression: Expression | None = None

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def cast(self) -> str:
        """The cast from an expression's value to the column's type, at the target."""
        return computed_cast(self.target, of_target=True)


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A source column that expressions use: the position of the value, and the source's type.

    ``stored_in``: the target's column that holds the same value, or None.
    """

    position: int
    name: str
    type: str
    stored_in: str | None


def computed_cast(target: TargetColumn, *, of_target: bool) -> str:
    """Return the cast that makes an expression's value fit a column, on either side.

    Both sides must compute the same value, so both use the same cast. The cast is to the column's
    type if every server has the type, else to text, which the target reads as that type. Only the
    write applies the type's modifier, because a write rejects values that a cast would truncate.
    """
    if 0 < target.base_oid < STABLE_OIDS_END:
        return f"::{target.plain_type}"
    return f"::text::{target.plain_type}" if of_target else "::text"


@dataclass(frozen=True)
class ApplyPlan:
    """Translates changes of a relation. ``key``: the part of `columns` that finds a row; all
    columns for Identity.ROW.

    ``version_key``: the part of `columns` that identifies the rows of a history table. ``inputs``:
    the source's columns that `filter` and `set` use.
    """

    relation: Relation
    mapping: RelationMapping
    target: TargetRelation
    sid: str | None
    columns: tuple[PlanColumn, ...]
    key: tuple[PlanColumn, ...]
    identity: Identity
    version_key: tuple[PlanColumn, ...] = ()
    is_partitioned: bool = False
    is_provisional: bool = False
    """A copy will create indexes that the target lacks now."""
    binary: bool = False
    number: int = field(default=0, compare=False)
    inputs: tuple[PlanInput, ...] = ()
    conversion: TextConversion | None = None
    """Converts the source's text to UTF-8, if the source sends another encoding."""
    former: FormerLabels | None = None
    """Renames former labels of enums, while a transaction may contain former labels."""
    outlives: bool = False
    """The target may contain rows whose deletes an operator has skipped."""

    @property
    def filter(self) -> Expression | None:
        return self.mapping.rule.filter

    @property
    def history(self) -> HistoryColumns:
        return self.mapping.rule.history

    @property
    def may_lack_rows(self) -> bool:
        """Whether streamer expects updates of missing rows, which then are not conflicts."""
        return self.mapping.rule.may_lack_rows

    @property
    def has_expressions(self) -> bool:
        """Whether expressions filter or change rows."""
        return bool(self.mapping.rule.expressions)

    @cached_property
    def plain_columns(self) -> tuple[PlanColumn, ...]:
        """The part of `columns` that stores values without an expression."""
        return tuple(column for column in self.columns if column.expression is None)

    @cached_property
    def source_columns(self) -> tuple[PlanColumn, ...]:
        """The part of `plain_columns` whose values the source sends."""
        count = len(self.relation.columns)
        return tuple(column for column in self.plain_columns if column.position < count)

    @cached_property
    def metadata(self) -> "RowMetadata | None":
        """The values that streamer appends to the source's rows, if the rule has `metadata`."""
        kinds = tuple(kind for kind, _ in self.mapping.rule.metadata)
        if not kinds:
            return None
        marking = frozenset(c.position for c in self.key) if self.marks else None
        count = len(self.relation.columns)
        return RowMetadata(kinds, count, self.binary, marking, self.marks_in_filter)

    @property
    def marks(self) -> bool:
        """Whether deleted rows stay with a mark."""
        return self.mapping.rule.deleted_at is not None

    @property
    def marks_in_filter(self) -> bool:
        """Whether rows that leave the filter stay, marked, with their last values inside the
        filter.

        Sets support such a row only with a single change in the window.
        """
        return self.marks and self.filter is not None

    @cached_property
    def metadata_columns(self) -> tuple[PlanColumn, ...]:
        """The part of `columns` whose values streamer appends."""
        count = len(self.relation.columns)
        return tuple(column for column in self.columns if column.position >= count)

    @property
    def row_width(self) -> int:
        """The number of values in a row, including appended values."""
        return len(self.relation.columns) + len(self.mapping.rule.metadata)

    @cached_property
    def written(self) -> dict[str, str]:
        """The target's names of the columns whose source values the target stores."""
        columns = self.relation.columns
        return {columns[c.position].name: c.name for c in self.source_columns}

    @cached_property
    def computed_columns(self) -> tuple[PlanColumn, ...]:
        return tuple(column for column in self.columns if column.expression is not None)

    @cached_property
    def old_inputs(self) -> tuple[PlanInput, ...]:
        """Inputs whose old values are necessary to identify a row without a key."""
        return self.inputs if self.identity is Identity.ROW else ()

    def input_positions(self, names: frozenset[str]) -> frozenset[int]:
        """Return the positions of the values of inputs among *names*."""
        return frozenset(i.position for i in self.inputs if i.name in names)

    def is_unchanged(self, column: PlanColumn, unchanged: frozenset[int]) -> bool:
        """Return whether *column* keeps its value when the values at *unchanged* did not change."""
        if column.expression is None:
            return column.position in unchanged
        used = self.input_positions(column.expression.names)
        return bool(used) and used <= unchanged

    def uses(self, column: PlanColumn, positions: frozenset[int]) -> bool:
        """Return whether the value of *column* depends on a value at *positions*."""
        if column.expression is None:
            return column.position in positions
        return bool(self.input_positions(column.expression.names) & positions)

    def needs_missing_value(self, unchanged: frozenset[int]) -> bool:
        """Return whether an expression needs a value that the source did not send (*unchanged*)."""
        if self.filter is not None and self.input_positions(self.filter.names) & unchanged:
            return True
        return any(
            self.input_positions(column.expression.names) & unchanged
            and not self.is_unchanged(column, unchanged)
            for column in self.computed_columns
            if column.expression is not None
        )

    @property
    def type(self) -> TableType:
        return self.mapping.type

    @property
    def name(self) -> str:
        """The target's name in the bookkeeping."""
        return str(self.target.name)

    @property
    def table(self) -> str:
        """The target's name, quoted."""
        return quote_qualified(self.target.name.namespace, self.target.name.name)

    @cached_property
    def must_order(self) -> bool:
        """Whether the target needs each change, in the order of the source."""
        return (
            self.type is TableType.HISTORY
            or self.identity is Identity.ROW
            # A row that leaves the filter keeps its last values inside the filter, which a fold
            # loses.
            or (self.type is TableType.APPEND and self.filter is not None)
            or self.target.has_row_triggers
        )

    @cached_property
    def takes_versions(self) -> bool:
        """Whether sets can write the versions of a history table. An index must find the keys.

        A source with a different encoding, or whole old rows, needs exact order.
        """
        types = {
            name: self.target.columns[name].type
            for name in self.history.names
            if name in self.target.columns
        }
        leading = {column.name for column in self.key} | ({SID} if self.sid is not None else set())
        return (
            self.type is TableType.HISTORY
            and self.identity is Identity.KEY
            and self.relation.replica_identity != "f"
            and types == self.history.types
            and not self.has_expressions
            and not self.may_outlive
            and not self.target.has_row_triggers
            and not self.is_converted
            and self.fits_stage
            and not leading.isdisjoint(self.target.leading_index_columns)
        )

    @cached_property
    def history_sequence(self) -> str | None:
        """The sequence that numbers the versions, if streamer can draw its numbers."""
        is_filled = any(column.name == self.history.id for column in self.columns)
        return None if is_filled else self.target.numbering.get(self.history.id)

    @property
    def fits_stage(self) -> bool:
        """Whether a staged row has no more columns than a table may have."""
        return 4 + self.staged_count <= TABLE_COLUMNS_MAX

    @cached_property
    def staged_key(self) -> tuple[PlanColumn, ...]:
        """The columns of `key` without an expression, whose old values the staging table holds."""
        return tuple(column for column in self.key if column.expression is None)

    @property
    def staged_count(self) -> int:
        """The number of staged values of a change."""
        old = len(self.staged_key) + len(self.old_inputs)
        return old + len(self.plain_columns) + len(self.inputs)

    @cached_property
    def key_is_indexed(self) -> bool:
        """Whether an index of the target finds a row by key."""
        names = {column.name for column in self.key} | ({SID} if self.sid is not None else set())
        return bool(self.key) and self.target.is_unique(frozenset(names))

    @property
    def ignores_truncate(self) -> bool:
        """Whether rows stay when the source truncates the table."""
        return self.type is TableType.APPEND or self.mapping.rule.skip_truncate

    @property
    def may_outlive(self) -> bool:
        """Whether the target may still hold an old row with the key of a new row of the source."""
        may_outlive = self.outlives or self.ignores_truncate or self.marks
        # With disjoint keys, a row with that key may be another table's.
        return may_outlive and not self.mapping.rule.is_disjoint

    @property
    def restarted_sequences(self) -> tuple[str, ...]:
        """Quoted names of the sequences that TRUNCATE … RESTART IDENTITY restarts.

        The sequences of a shared table also serve sources whose rows stay.
        """
        is_own = self.type is TableType.CLONE and self.sid is None
        is_own = is_own and not self.mapping.rule.is_disjoint
        return self.target.sequences if is_own else ()

    @property
    def truncates_by_delete(self) -> bool:
        """Whether TRUNCATE must be a DELETE, for rows of other sources or for foreign keys."""
        return self.sid is not None or self.target.is_referenced

    @property
    def read_row(self) -> Callable[[bytes], tuple[Row, int]]:
        return self._converting(read_binary_row if self.binary else read_text_row)

    @property
    def read_tuple(self) -> Callable[[bytes, int], tuple[Row, int]]:
        return self._converting(read_binary_tuple if self.binary else read_text_tuple)

    @property
    def is_converted(self) -> bool:
        """Whether the reader changes values of a row."""
        return self.conversion is not None or self.former is not None

    def _converting(self, read: Callable[..., tuple[Row, int]]) -> Callable[..., tuple[Row, int]]:
        if self.conversion is not None:
            read = self.conversion.reading(read)
        return read if self.former is None else self.former.reading(read)

    @cached_property
    def get_key(self) -> Callable[[Row], Any]:
        """Return the key of a source row: a value, or a tuple of values."""
        return itemgetter(*(column.position for column in self.key))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The positions of the values of written columns in a source row."""
        return tuple(column.position for column in self.columns)

    @cached_property
    def folder(self) -> "RowFolder | None":
        """The compiled implementation of a fold, if this process has it and the table fits.

        In a clone that keeps removed rows, a delete may concern a row that is not pending. A mark
        in a filtered table needs the facts of a delete, and the folder stores only keys.
        """
        rule = self.mapping.rule
        keeps_removed = (self.outlives or rule.skip_truncate) and not rule.is_disjoint
        count, positions = self.row_width, tuple(column.position for column in self.key)
        is_unfit = count > TABLE_COLUMNS_MAX or min(positions, default=0) < 0
        if choice.compiled is None or self.is_converted or self.marks_in_filter or is_unfit:
            return None
        folder: RowFolder = choice.compiled.RowFolder(
            count,
            positions,
            binary=self.binary,
            is_append=self.type is TableType.APPEND,
            is_full=self.relation.replica_identity == "f",
            takes_updates=not keeps_removed,
            added=count - len(self.relation.columns),
        )
        return folder
