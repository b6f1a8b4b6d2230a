"""The translation of one relation's changes into changes of its target: decided once per
definition.

A plan combines the RELATION message of the source, the rule of the mapping and the catalogs of the
target. It is immutable; a new RELATION message or a change of the target leads to a new plan. Pure.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from streamer.apply.hashed_columns import check_hashes
from streamer.apply.row_metadata import RowMetadata
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
from streamer.errors import TargetSchemaError
from streamer.mapping.expressions import Expression
from streamer.mapping.rules import (
    METADATA_TYPES,
    OnColumnAdded,
    RelationMapping,
    RelationName,
    TableType,
)
from streamer.postgres.quoting import (
    add_columns_clause,
    quote_identifier,
    quote_literal,
    quote_qualified,
)
from streamer.target.catalog import TargetColumn, TargetRelation
from streamer.target.conventions import (
    HISTORY_COLUMNS,
    HISTORY_ID,
    HISTORY_TYPES,
    SID,
    STABLE_OIDS_END,
    TABLE_COLUMNS_MAX,
)

if TYPE_CHECKING:
    from streamer.compiled._compiled import RowFolder


class Identity(enum.Enum):
    """The way to find a row to change."""

    KEY = "key"  # by columns whose values no two rows share
    ROW = "row"  # by all columns (REPLICA IDENTITY FULL without a key)
    NONE = "none"  # it is not: only inserts can arrive


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """A column of the target to write: the position of its value in the source's row, and its name.

    Values of `RowMetadata` have positions behind those of the source.

    ``expression``: the SQL in place of that value; without a source value, ``position`` is
    negative.
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
    """A source column that expressions use: where its value is, and its type at the source.

    ``stored_in``: the target's column that holds the same value, if one does.
    """

    position: int
    name: str
    type: str
    stored_in: str | None


def computed_cast(target: TargetColumn, *, of_target: bool) -> str:
    """Return the cast that makes an expression's value fit a column, on either side.

    Both sides must compute the same value, so they use the same cast. It goes to the column's type
    if every server has that, else to text, which the target reads as a value of the column's type.
    The write itself applies the type's modifier, because it rejects values that a cast would
    truncate.
    """
    if 0 < target.base_oid < STABLE_OIDS_END:
        return f"::{target.plain_type}"
    return f"::text::{target.plain_type}" if of_target else "::text"


@dataclass(frozen=True)
class ApplyPlan:
    """See the module. ``key``: those of `columns` that find a row; for Identity.ROW all.

    ``version_key``: those of `columns` that tell the rows of a history table apart. ``inputs``: the
    source's columns that `filter` and `set` use.
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
    """A copy will put back indexes that the target lacks now."""
    binary: bool = False
    number: int = field(default=0, compare=False)
    inputs: tuple[PlanInput, ...] = ()
    conversion: TextConversion | None = None
    """Converts the source's text to UTF-8, if the source sends another encoding."""
    former: FormerLabels | None = None
    """Gives labels of enums their present names, while a transaction may bring former ones."""
    outlives: bool = False
    """An operator has left deletes out."""

    @property
    def filter(self) -> Expression | None:
        return self.mapping.rule.filter

    @property
    def has_expressions(self) -> bool:
        """Whether expressions filter or change rows on their way."""
        return bool(self.mapping.rule.expressions)

    @cached_property
    def plain_columns(self) -> tuple[PlanColumn, ...]:
        """Those of `columns` that take the source's value as it is."""
        return tuple(column for column in self.columns if column.expression is None)

    @cached_property
    def source_columns(self) -> tuple[PlanColumn, ...]:
        """Those of `plain_columns` whose values the source sends."""
        count = len(self.relation.columns)
        return tuple(column for column in self.plain_columns if column.position < count)

    @cached_property
    def metadata(self) -> "RowMetadata | None":
        """The values that streamer appends to the source's rows, if the rule wants any."""
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
        """Whether rows that leave the filter stay with a mark, as they were last inside it.

        Sets know such a row only if it has one change in the window.
        """
        return self.marks and self.filter is not None

    @cached_property
    def metadata_columns(self) -> tuple[PlanColumn, ...]:
        """Those of `columns` whose values streamer appends."""
        count = len(self.relation.columns)
        return tuple(column for column in self.columns if column.position >= count)

    @property
    def row_width(self) -> int:
        """The number of values in a row, with those that streamer appends."""
        return len(self.relation.columns) + len(self.mapping.rule.metadata)

    @cached_property
    def written(self) -> dict[str, str]:
        """The target's names of the source columns that it gets as they are."""
        columns = self.relation.columns
        return {columns[c.position].name: c.name for c in self.source_columns}

    @cached_property
    def computed_columns(self) -> tuple[PlanColumn, ...]:
        return tuple(column for column in self.columns if column.expression is not None)

    @cached_property
    def old_inputs(self) -> tuple[PlanInput, ...]:
        """Inputs with necessary old values: those that identify a row without a key."""
        return self.inputs if self.identity is Identity.ROW else ()

    def input_positions(self, names: frozenset[str]) -> frozenset[int]:
        """Return where the values of those *names* are that are columns."""
        return frozenset(i.position for i in self.inputs if i.name in names)

    def is_unchanged(self, column: PlanColumn, unchanged: frozenset[int]) -> bool:
        """Return whether *column* keeps its value when the values at *unchanged* did not change."""
        if column.expression is None:
            return column.position in unchanged
        used = self.input_positions(column.expression.names)
        return bool(used) and used <= unchanged

    def uses(self, column: PlanColumn, positions: frozenset[int]) -> bool:
        """Return whether a value at one of *positions* is, or goes into, that of *column*."""
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
        """The target's name, as the bookkeeping has it."""
        return str(self.target.name)

    @property
    def table(self) -> str:
        """The target's name, quoted."""
        return quote_qualified(self.target.name.namespace, self.target.name.name)

    @cached_property
    def must_order(self) -> bool:
        """Whether changes must be made one by one, as the source made them."""
        return (
            self.type is TableType.HISTORY
            or self.identity is Identity.ROW
            # A row that leaves the filter stays as it was last: the last of a window is not enough.
            or (self.type is TableType.APPEND and self.filter is not None)
            or self.target.has_row_triggers
        )

    @cached_property
    def takes_versions(self) -> bool:
        """Whether sets can write the versions of its rows: of a history table whose keys an index
        of the target finds. A source with another encoding, or whole old rows, needs exact order.
        """
        types = {
            name: self.target.columns[name].type
            for name in HISTORY_COLUMNS
            if name in self.target.columns
        }
        leading = {column.name for column in self.key} | ({SID} if self.sid is not None else set())
        return (
            self.type is TableType.HISTORY
            and self.identity is Identity.KEY
            and self.relation.replica_identity != "f"
            and types == HISTORY_TYPES
            and not self.has_expressions
            and not self.may_outlive
            and not self.target.has_row_triggers
            and not self.is_converted
            and self.fits_stage
            and not leading.isdisjoint(self.target.leading_index_columns)
        )

    @cached_property
    def history_sequence(self) -> str | None:
        """The sequence that numbers the versions, if streamer can take numbers from it itself."""
        is_filled = any(column.name == HISTORY_ID for column in self.columns)
        return None if is_filled else self.target.history_sequence

    @property
    def fits_stage(self) -> bool:
        """Whether a staged row has no more columns than a table may have."""
        return 4 + self.staged_count <= TABLE_COLUMNS_MAX

    @cached_property
    def staged_key(self) -> tuple[PlanColumn, ...]:
        """Those of `key` with unaltered old values in the staging table."""
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
        """Whether the target may still hold a row whose key the source gives to a new one."""
        return self.outlives or self.ignores_truncate or self.marks

    @property
    def restarted_sequences(self) -> tuple[str, ...]:
        """Quoted names of the sequences that TRUNCATE … RESTART IDENTITY restarts.

        Other sources, whose rows stay, draw from those of a shared table.
        """
        is_own = self.type is TableType.CLONE and self.sid is None
        return self.target.sequences if is_own else ()

    @property
    def truncates_by_delete(self) -> bool:
        """Whether TRUNCATE must be a DELETE: others' rows are there, or foreign keys point here."""
        return self.sid is not None or self.target.is_referenced

    @property
    def read_row(self) -> Callable[[bytes], tuple[Row, int]]:
        return self._converting(read_binary_row if self.binary else read_text_row)

    @property
    def read_tuple(self) -> Callable[[bytes, int], tuple[Row, int]]:
        return self._converting(read_binary_tuple if self.binary else read_text_tuple)

    @property
    def is_converted(self) -> bool:
        """Whether values are changed as they are read."""
        return self.conversion is not None or self.former is not None

    def _converting(self, read: Callable[..., tuple[Row, int]]) -> Callable[..., tuple[Row, int]]:
        if self.conversion is not None:
            read = self.conversion.reading(read)
        return read if self.former is None else self.former.reading(read)

    @cached_property
    def get_key(self) -> Callable[[Row], Any]:
        """Take the key out of a source row: a value, or a tuple of values."""
        return itemgetter(*(column.position for column in self.key))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where the values of the written columns are in a source row."""
        return tuple(column.position for column in self.columns)

    @cached_property
    def folder(self) -> "RowFolder | None":
        """The compiled way to fold changes, if this process has one and the table is fit for it.

        With REPLICA IDENTITY FULL the fold compares an update or delete with the pending row. A
        mark in a filtered table needs the facts of a delete, and the folder keeps keys alone.
        """
        count = self.row_width
        positions = tuple(column.position for column in self.key)
        if choice.compiled is None or self.is_converted or self.marks_in_filter:
            return None
        if count > TABLE_COLUMNS_MAX or min(positions, default=0) < 0:
            return None
        folder: RowFolder = choice.compiled.RowFolder(
            count,
            positions,
            binary=self.binary,
            is_append=self.type is TableType.APPEND,
            takes_updates=self.relation.replica_identity != "f",
        )
        return folder


def make_plan(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation | None,
    *,
    sid: str | None,
    primary_key: tuple[str, ...] = (),
    source_keys: tuple[tuple[str, ...], ...] = (),
    has_partial_key: bool = False,
    is_partitioned: bool = False,
    type_names: dict[str, str] | None = None,
    binary: bool = False,
    number: int = 0,
    input_types: dict[str, str] | None = None,
    computed_types: dict[str, str] | None = None,
) -> ApplyPlan:
    """Decide the way to apply changes of *relation*.

    *primary_key*: the source's, for relations with REPLICA IDENTITY FULL. *source_keys*: columns of
    its unique indexes with an immediate check. *has_partial_key*: the source does not send
    generated columns of the key, and the others do not identify rows. *is_partitioned*: its
    partitions may have other replica identities. *type_names*: the source's types by column, to
    name in an ALTER TABLE. *input_types*: the same, with their collations, for columns that
    expressions use. *computed_types*: the types of expressions, by target column. Raises
    TargetSchemaError with the statement to run at the target, MappingError for an expression that
    does not fit the source.
    """
    if target is None:
        raise TargetSchemaError(
            f'target table "{mapping.target}" does not exist',
            hint="create it, or set target.create_tables: true",
        )
    columns, missing = match_columns(relation, mapping, target)
    if missing:
        raise missing_error(mapping, target.name, missing, type_names or {})
    has_sid = target.has_sid and all(column.name != SID for column in columns)
    if has_sid and sid is None:
        raise TargetSchemaError(
            f'target table "{mapping.target}" has a column "sid" but this source has no sid',
            hint="give its url a sid",
        )
    if target.has_sid and not has_sid and sid is not None:
        raise two_sids(mapping)
    if mapping.type is TableType.HISTORY:
        _check_history_columns(mapping, target)
    columns = _with_computed(columns, mapping, target, computed_types or {}, has_sid=has_sid)
    identity: Identity = Identity.NONE
    key: tuple[PlanColumn, ...] = ()
    if not has_partial_key:
        identity, key = _identify(relation, mapping, target, columns, primary_key, source_keys)
    check_hashes(relation, mapping, columns)
    if mapping.rule.deleted_at is not None:
        _check_marks(relation, mapping, target, identity, key, columns)
    columns = _with_metadata(columns, len(relation.columns), mapping, target)
    _check_unfilled_columns(mapping, target, columns, has_sid)
    if identity is not Identity.NONE:
        _check_identity_columns(target, columns, key)
    return ApplyPlan(
        relation=relation,
        mapping=mapping,
        target=target,
        sid=sid if has_sid else None,
        columns=columns,
        key=key,
        identity=identity,
        is_partitioned=is_partitioned,
        version_key=key if identity is Identity.KEY else _named(columns, mapping, primary_key),
        binary=binary,
        number=number,
        inputs=_inputs(relation, mapping, columns, input_types or {}),
    )


def _inputs(
    relation: Relation,
    mapping: RelationMapping,
    columns: tuple[PlanColumn, ...],
    types: dict[str, str],
) -> tuple[PlanInput, ...]:
    stored = {c.position: c.target for c in columns if c.expression is None}
    names = [column.name for column in relation.columns]
    inputs = []
    for name in mapping.expression_inputs(names):
        position = names.index(name)
        kind = types.get(name, "text")
        there = stored.get(position)
        # A slightly different type may not return the value that it received.
        same = there is not None and there.type == kind.partition(" collate ")[0]
        inputs.append(PlanInput(position, name, kind, there.name if there and same else None))
    return tuple(inputs)


def _with_computed(
    columns: tuple[PlanColumn, ...],
    mapping: RelationMapping,
    target: TargetRelation,
    types: dict[str, str],
    *,
    has_sid: bool,
) -> tuple[PlanColumn, ...]:
    """Add the computed columns of `set`: in place of the source's own value, or beside."""
    by_name = {column.name: column for column in columns}
    is_history = mapping.type is TableType.HISTORY
    ours = (*((SID,) if has_sid else ()), *(HISTORY_COLUMNS if is_history else ()))
    for name, expression in mapping.rule.set:
        if name in ours:
            raise TargetSchemaError(
                f'`set` computes column "{name}" of target table "{mapping.target}", which '
                "streamer writes itself",
                hint="take it out of `set`",
            )
        there = target.columns.get(name)
        if there is None:
            quoted = quote_qualified(target.name.namespace, target.name.name)
            addition = add_columns_clause([(name, types.get(name, "<its type>"))])
            raise TargetSchemaError(
                f'target table "{mapping.target}" has no column "{name}", which `set` computes',
                hint=f"run there: alter table {quoted} {addition}",
            )
        if there.generated:
            raise TargetSchemaError(
                f'column "{name}" of target table "{mapping.target}" is generated there, and `set` '
                "computes it too",
                hint="take it out of `set`, or make it an ordinary column",
            )
        position = by_name[name].position if name in by_name else -1
        by_name[name] = PlanColumn(position, there, expression)
    return tuple(by_name.values())


def _with_metadata(
    columns: tuple[PlanColumn, ...], count: int, mapping: RelationMapping, target: TargetRelation
) -> tuple[PlanColumn, ...]:
    """Add the columns of `metadata`, whose values stand behind the *count* columns of the source.

    Raises TargetSchemaError if the target lacks one, or the source writes to it.
    """
    added = []
    for number, (kind, name) in enumerate(mapping.rule.metadata):
        if name == SID or any(column.name == name for column in columns):
            raise TargetSchemaError(
                f'`metadata` writes {kind} to column "{name}" of target table "{mapping.target}", '
                "which already gets another value",
                hint="give the fact another column, or exclude that of the source",
            )
        there = target.columns.get(name)
        wanted = METADATA_TYPES[kind]
        table = quote_qualified(target.name.namespace, target.name.name)
        if there is None:
            addition = add_columns_clause([(name, wanted)])
            raise TargetSchemaError(
                f'target table "{mapping.target}" has no column "{name}", which `metadata` writes',
                hint=f"run there: alter table {table} {addition}",
            )
        if there.type != wanted or there.generated or there.identity_always:
            alter = f"alter table {table} alter column {quote_identifier(name)} type {wanted}"
            raise TargetSchemaError(
                f'column "{name}" of target table "{mapping.target}" must be an ordinary column of '
                f"type {wanted}, because `metadata` writes {kind} to it",
                hint=f"give the fact another column, or run there: {alter}",
            )
        added.append(PlanColumn(count + number, there))
    return columns + tuple(added)


def _check_marks(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation,
    identity: Identity,
    key: tuple[PlanColumn, ...],
    columns: tuple[PlanColumn, ...],
) -> None:
    """Check that a delete finds its row by a key, and leaves computed values alone.

    Raises TargetSchemaError.
    """
    if identity is not Identity.KEY:
        raise TargetSchemaError(
            f'`on_delete: mark` of target table "{target.name}" needs a key, and source table '
            f'"{mapping.source}" has none',
            hint="give it a primary key, or take out `on_delete`",
        )
    if mapping.rule.filter is not None:
        return  # a mark writes the facts alone
    names = {relation.columns[column.position].name for column in key}
    for column in columns:
        used = set() if column.expression is None else set(column.expression.names)
        if used & names and used - names:
            raise TargetSchemaError(
                f'`set` computes "{column.name}" of target table "{target.name}" from the key and '
                "from other columns, which a delete does not send",
                hint="take out `on_delete: mark`, or compute the column without the key",
            )


@dataclass(frozen=True, slots=True)
class AddedColumn:
    """A column of the source that the target lacks, as far as the source's catalog tells.

    ``renamed_from``: the source's column that it was. ``fill``: the text of the value that rows
    from before have. ``is_computed``: they may have values of their own, which no change brings.
    """

    renamed_from: str | None = None
    fill: str | None = None
    is_computed: bool = False


NO_ADDED: Final[Mapping[str, AddedColumn]] = MappingProxyType({})


def missing_error(
    mapping: RelationMapping,
    target: RelationName,
    missing: Sequence[tuple[str, str]],
    types: Mapping[str, str],
    added: Mapping[str, AddedColumn] = NO_ADDED,
) -> TargetSchemaError:
    """Return the error for columns that the target lacks, with `missing_remedy`. Pure."""
    statements, words = missing_remedy(mapping, target, missing, types, added)
    hint = f"run there: {'; '.join(statements)}; {words}"
    listed = ", ".join(f'"{name}"' for _, name in missing)
    return TargetSchemaError(f'target table "{mapping.target}" has no column {listed}', hint=hint)


def missing_remedy(
    mapping: RelationMapping,
    target: RelationName,
    missing: Sequence[tuple[str, str]],
    types: Mapping[str, str],
    added: Mapping[str, AddedColumn],
) -> tuple[list[str], str]:
    """Return the statements that make the target fit and keep its rows equal, and advice beyond
    them. Pure.
    """
    alter = f"alter table {quote_qualified(target.namespace, target.name)}"
    plain = AddedColumn()
    statements, additions = [], []
    for source, name in missing:
        column = added.get(source, plain)
        before = None if column.renamed_from is None else mapping.target_column(column.renamed_from)
        if before is not None:
            renaming = f"{quote_identifier(before)} to {quote_identifier(name)}"
            statements.append(f"{alter} rename column {renaming}")
            continue
        kind = mapping.type_of(name, types.get(source, "<its type>"))
        if column.fill is not None and not mapping.is_computed(name):
            kind += f" default {quote_literal(column.fill)}"
        additions.append((name, kind))
    if additions:
        statements.append(f"{alter} {add_columns_clause(additions)}")
    words = (
        "or exclude the column in the mapping; with the capture of definitions (`ddl: capture`) "
        "streamer makes such changes itself"
    )
    if any(added.get(source, plain).is_computed for source, _ in missing):
        words += "; once it is there, streamer brings the values of rows from before"
    return statements, words


def missing_columns(
    relation: Relation, mapping: RelationMapping, target: TargetRelation
) -> list[tuple[str, str]]:
    """Return the columns that the target lacks and should have: their names here and there."""
    return match_columns(relation, mapping, target)[1]


def match_columns(
    relation: Relation, mapping: RelationMapping, target: TargetRelation
) -> tuple[tuple[PlanColumn, ...], list[tuple[str, str]]]:
    """Pair the source's columns with the target's; also return those the target lacks."""
    columns: list[PlanColumn] = []
    missing: list[tuple[str, str]] = []
    for position, column in enumerate(relation.columns):
        name = mapping.target_column(column.name)
        if name is None:
            continue
        there = target.columns.get(name)
        if there is None and mapping.has_expression(name):
            continue
        if there is None:
            is_ignored = mapping.rule.on_column_added is OnColumnAdded.IGNORE
            if not is_ignored and not mapping.is_optional(column.name):
                missing.append((column.name, name))
        elif not there.generated:  # the target computes its own generated columns
            columns.append(PlanColumn(position, there))
    return tuple(columns), missing


def _check_history_columns(mapping: RelationMapping, target: TargetRelation) -> None:
    absent = [name for name in HISTORY_COLUMNS if name not in target.columns]
    if absent:
        types = {"kvsz_deleted": "boolean not null default false"}
        additions = ", ".join(
            f"add column {n} {types.get(n, 'timestamptz not null')}" for n in absent
        )
        table = quote_qualified(target.name.namespace, target.name.name)
        raise TargetSchemaError(
            f'history table "{mapping.target}" has no column "{absent[0]}"',
            hint=f"run there: alter table {table} {additions}",
        )


def _check_identity_columns(
    target: TargetRelation, columns: tuple[PlanColumn, ...], key: tuple[PlanColumn, ...]
) -> None:
    for column in columns:
        if column.target.identity_always and column not in key:
            table = quote_qualified(target.name.namespace, target.name.name)
            raise TargetSchemaError(
                f'column "{column.name}" of target table "{target.name}" is GENERATED ALWAYS AS '
                "IDENTITY, so the source's updates of it cannot be written",
                hint=f"run there: alter table {table} alter column {quote_identifier(column.name)} "
                "set generated by default",
            )


def _check_unfilled_columns(
    mapping: RelationMapping,
    target: TargetRelation,
    columns: tuple[PlanColumn, ...],
    has_sid: bool,
) -> None:
    filled = {column.name for column in columns} | ({SID} if has_sid else set())
    if mapping.type is TableType.HISTORY:
        filled |= set(HISTORY_COLUMNS)
    for column in target.columns.values():
        fills_itself = column.has_default or column.generated
        if column.not_null and column.name not in filled and not fills_itself:
            table = quote_qualified(target.name.namespace, target.name.name)
            raise TargetSchemaError(
                f'column "{column.name}" of target table "{mapping.target}" is NOT NULL, '
                "has no default and no column of the source to fill it",
                hint=f"run there: alter table {table} alter column {quote_identifier(column.name)} "
                "drop not null; or give it a default, or map a column to it",
            )


def _identify(
    relation: Relation,
    mapping: RelationMapping,
    target: TargetRelation,
    columns: tuple[PlanColumn, ...],
    primary_key: tuple[str, ...],
    source_keys: tuple[tuple[str, ...], ...],
) -> tuple[Identity, tuple[PlanColumn, ...]]:
    by_position = {column.position: column for column in columns}
    if relation.replica_identity in "di":
        wanted = [i for i, column in enumerate(relation.columns) if column.is_key]
        absent = [relation.columns[i].name for i in wanted if i not in by_position]
        if absent:
            raise TargetSchemaError(
                f'key column "{absent[0]}" of source table "{mapping.source}" is not written '
                "to the target",
                hint="do not exclude it, and let the target have it",
            )
        key = tuple(by_position[i] for i in wanted)
        for column in key:
            if column.expression is not None:
                # Two rows may get one key, and then a change could find the wrong one.
                raise TargetSchemaError(
                    f'`set` computes "{column.name}", which is part of the key of source table '
                    f'"{mapping.source}"',
                    hint="let the key be as it is, and compute a column beside it",
                )
        return (Identity.KEY, key) if key else (Identity.NONE, ())
    if relation.replica_identity == "n":
        return Identity.NONE, ()
    # FULL sends whole old rows. Columns that the target keeps unique find them faster. If two rows
    # of the source share a key for a while, the target refuses the second. A history table holds a
    # key many times. An append table keeps rows whose key another row has now. A row outside a
    # filter may share its key with one inside. There the source itself must keep the key unique at
    # every moment, which a deferrable constraint does not.
    by_name = {column.name: column for column in columns if column.expression is None}
    candidates = target.unique_keys
    trusted = [{mapping.target_column(name) or "" for name in key} for key in source_keys]
    if mapping.type is TableType.HISTORY or mapping.rule.filter is not None:
        candidates = (tuple(mapping.target_column(name) or "" for name in primary_key),)
    elif mapping.type is TableType.CLONE:
        trusted = [set()]
    for names in candidates:
        if not any(key <= set(names) for key in trusted):
            continue
        key_names = [name for name in names if name != SID or SID in by_name]
        if key_names and all(n in by_name and by_name[n].target.not_null for n in key_names):
            return Identity.KEY, tuple(by_name[name] for name in key_names)
    return Identity.ROW, columns


def _named(
    columns: tuple[PlanColumn, ...], mapping: RelationMapping, names: tuple[str, ...]
) -> tuple[PlanColumn, ...]:
    """Return the target's columns for the source's columns *names*; none unless the target gets
    all.
    """
    by_name = {column.name: column for column in columns if column.expression is None}
    wanted = [mapping.target_column(name) or "" for name in names]
    return tuple(by_name[name] for name in wanted) if set(wanted) <= set(by_name) else ()


def two_sids(mapping: RelationMapping) -> TargetSchemaError:
    """Say that a column of the source stands in the place of the url's sid."""
    return TargetSchemaError(
        f'column "sid" of source table "{mapping.source}" would be written where the sid goes',
        hint="give the column another name with `columns`, or exclude it",
    )
