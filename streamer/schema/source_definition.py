"""A table's definition at the source, and the difference between two definitions.

The capture at the source (`streamer.source.capture.ddl_capture`) sends the state of a table's
catalog rows after each command. Two successive states show the change without an SQL parser: a
column keeps its number for life, so a rename is exact. Several actions of an ALTER TABLE appear as
several changes of a difference.

Pure.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Self

from streamer.mapping.relation_names import ordered_renames
from streamer.mapping.rule_options import DdlKind
from streamer.postgres.quoting import quote_qualified
from streamer.schema.indexes_constraints_types import (
    DefinedObject,
    DefinedType,
    ObjectChange,
    TypeChange,
    base_type,
    is_another,
    object_difference,
    object_of,
    replaced_types,
    stored_object,
    type_difference,
    under_new_name,
)
from streamer.schema.partitions import Partition, PartitionChange, partition_difference

FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class DefinedSequence:
    """A sequence of a column. ``options``: the SQL of bounds and step. ``is_owned``: the column
    owns the sequence; otherwise only the column's default uses the sequence.
    """

    oid: int
    namespace: str
    name: str
    type: str
    options: str
    is_owned: bool = True

    @property
    def quoted(self) -> str:
        return quote_qualified(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class DefinedColumn:
    """A column of a table. Types, defaults and expressions are SQL with qualified names.

    ``generated``: '' or 's' (stored) or 'v' (virtual), and then ``default`` is the expression.
    ``identity``: '' or 'a' (always) or 'd' (by default). ``fill``: the text of the value that ADD
    COLUMN gave to existing rows, if all got the same value. ``default_mark`` changes with each SET
    DEFAULT. ``sequence``: the sequence that the default uses or the column owns. ``computed``: the
    values of rows are unknown, as after ALTER COLUMN TYPE … USING. ``of_domain``: a default of the
    domain applies, because the column lacks a default. ``may_be_toasted``: the server may store
    values out of line, and then omits unchanged values.

    Readers fill different fields. Only messages and `streamer.schema_changes.read_definitions` have
    the text of a plain default, because deparsing a default locks the table.
    """

    number: int
    name: str
    type: str
    not_null: bool = False
    default: str | None = None
    generated: str = ""
    identity: str = ""
    collation: str | None = None
    fill: str | None = field(default=None, compare=False)
    default_mark: str | None = None
    sequence: DefinedSequence | None = None
    computed: bool = field(default=False, compare=False)
    of_domain: bool = field(default=False, compare=False)
    type_oid: int = field(default=0, compare=False)
    may_be_toasted: bool = field(default=False, compare=False)
    statistics: int | None = field(default=None, compare=False)
    comment: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read a row of a catalog query, or the JSON of a message or a stored definition."""
        sequence = values.get("sequence")
        return cls(**{**values, "sequence": sequence and DefinedSequence(**sequence)})

    @property
    def fills_rows_one_by_one(self) -> bool:
        """Whether rows from before ADD COLUMN may have different values in the column."""
        if self.generated:
            return False
        has_default = self.default is not None or self.default_mark is not None or self.of_domain
        return self.constant is None and (has_default or bool(self.identity))

    @property
    def may_hide_values(self) -> bool:
        """Whether rows from before ADD COLUMN may have values that the catalogs lack.

        A NOT NULL column may have lost a default since then.
        """
        is_given = self.computed or (self.not_null and self.constant is None)
        return is_given or self.fills_rows_one_by_one

    @property
    def constant(self) -> str | None:
        """The SQL of the common value of all rows from before ADD COLUMN, if any."""
        if self.fill is not None:
            return "'" + self.fill.replace("'", "''") + f"'::{self.type}"
        if self.default is not None and not self.generated and _LITERAL.fullmatch(self.default):
            return self.default
        return None

    @property
    def draws(self) -> bool:
        """Whether the default draws values from a sequence."""
        return self.default is not None and not self.generated and "nextval(" in self.default

    @property
    def own_default(self) -> str | None:
        """The default, if a different server can compute it, unlike a default from the source's
        sequence.
        """
        if self.generated or self.draws:
            return None
        return self.default


_STORED: Final = {column.name for column in fields(DefinedColumn) if column.compare} - {"default"}
_LITERAL: Final = re.compile(
    r"(?:'(?:[^']|'')*'(?:::[\w .\"(),\[\]]+)?|-?\d+(?:\.\d+)?|true|false|NULL(?:::[\w .\"]+)?)"
)


@dataclass(frozen=True, slots=True)
class SourceDefinition:
    """A table at the source: columns in the order of their numbers, objects, types and partitions.

    ``objects``: indexes and constraints. ``types``: the types of columns and the parts of these
    types, parts first; then former types that the source still has. ``partitions``: the table
    itself and the partitions, parents first; empty for a table without a partition key. A part is
    None if unknown. ``oid``: the OID of the table; the numbers of columns are valid for this OID
    only.
    """

    columns: tuple[DefinedColumn, ...]
    objects: tuple[DefinedObject, ...] | None = None
    types: tuple[DefinedType, ...] | None = None
    partitions: tuple[Partition, ...] | None = None
    oid: int | None = None

    @property
    def used_types(self) -> list[DefinedType]:
        """The types of columns, and the parts of these types."""
        names = {base_type(column.type) for column in self.columns}
        for type_ in reversed(self.types or ()):
            names |= type_.parts if type_.quoted in names else set()
        return [type_ for type_ in self.types or () if type_.quoted in names]

    @property
    def numbers(self) -> dict[str, int]:
        """The columns' numbers by name."""
        return {column.name: column.number for column in self.columns}

    @property
    def identities(self) -> dict[str, list[int]]:
        """The numbers of the columns, and the OIDs of the objects and partitions."""
        return {
            "columns": [item.number for item in self.columns],
            "objects": [item.oid for item in self.objects or ()],
            "partitions": [item.oid for item in self.partitions or ()],
        }

    def column(self, name: str) -> DefinedColumn | None:
        return next((column for column in self.columns if column.name == name), None)

    def to_json(self) -> str:
        """Return the definition as JSON for `from_json`, without the fields that only messages
        contain.
        """
        columns = [
            {name: value for name, value in asdict(column).items() if name in _STORED}
            for column in self.columns
        ]
        stored: dict[str, Any] = {"format": FORMAT, "columns": columns, "oid": self.oid}
        lists: dict[str, Sequence[Any] | None] = {
            "types": self.types,
            "partitions": self.partitions,
        }
        for name, parts in lists.items():
            if parts is not None:
                stored[name] = [asdict(item) for item in parts]
        if self.objects is not None:
            stored["objects"] = [stored_object(item) for item in self.objects]
        return json.dumps(stored)

    @classmethod
    def from_json(cls, text: str | None) -> "SourceDefinition | None":
        """Read a stored definition; None if absent or of a different version."""
        stored = None if text is None else json.loads(text)
        if stored is None or stored["format"] != FORMAT:
            return None
        return cls.of(stored)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Read the JSON of a message, or a stored definition."""
        objects, types = values.get("objects"), values.get("types")
        partitions = values.get("partitions")
        columns = [DefinedColumn.of(item) for item in values["columns"]]
        names = {column.number: column.name for column in columns}
        return cls.of_columns(
            columns,
            None if objects is None else tuple(object_of(item, names) for item in objects),
            None if types is None else tuple(map(DefinedType.of, types)),
            None if partitions is None else tuple(Partition(**item) for item in partitions),
            oid=values.get("oid"),
        )

    @classmethod
    def of_columns(
        cls,
        columns: Iterable[DefinedColumn],
        objects: tuple[DefinedObject, ...] | None = None,
        types: tuple[DefinedType, ...] | None = None,
        partitions: tuple[Partition, ...] | None = None,
        oid: int | None = None,
    ) -> Self:
        in_order = tuple(sorted(columns, key=lambda column: column.number))
        return cls(in_order, objects, types, partitions, oid)

    @property
    def is_whole(self) -> bool:
        """Whether the definition contains all parts of a message of this version."""
        return self.objects is not None and self.partitions is not None


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """A change of a column: the state before and after; None where the column is absent."""

    kind: DdlKind
    before: DefinedColumn | None
    after: DefinedColumn | None

    @property
    def column(self) -> str:
        """The name of the column before the change; for a new column, the name after the change."""
        column = self.before or self.after
        assert column is not None
        return column.name

    def __str__(self) -> str:
        if self.kind is DdlKind.RENAME_COLUMN:
            assert self.after is not None
            return f'{self.kind} "{self.column}" to "{self.after.name}"'
        if self.kind in (DdlKind.CHANGE_TYPE, DdlKind.WIDEN_TYPE):
            assert self.after is not None
            return f'{self.kind} "{self.column}" to {self.after.type}'
        return f'{self.kind} "{self.column}"'


AnyChange = ColumnChange | ObjectChange | TypeChange | PartitionChange


def all_differences(
    before: SourceDefinition,
    after: SourceDefinition,
    *,
    computes_values: bool = False,
    dropped_types: Collection[int] = (),
) -> list[AnyChange]:
    """Return the changes of types, columns, objects and partitions, in a feasible order.

    *computes_values*: see `difference`. *dropped_types*: the OIDs of dropped types, because the
    absence of a type does not prove a drop.
    """
    before = _of_table(before, after)
    objects: list[ObjectChange] = []
    if before.objects is not None and after.objects is not None:
        objects = object_difference(before.objects, after.objects)
    types: list[TypeChange] = []
    if before.types is not None and after.types is not None:
        types = type_difference(before.types, after.types)
    types[:0] = [
        TypeChange(DdlKind.DROP_TYPE, e, e) for e in before.types or () if e.oid in dropped_types
    ]
    parts: list[PartitionChange] = []
    if before.partitions is not None and after.partitions is not None:
        parts = partition_difference(before.partitions, after.partitions)
    dropped = [change for change in objects if change.after is None]
    after = _of_other_types(before, after)
    before = under_new_names(before, types)
    columns = difference(before, after, computes_values=computes_values)
    made = [change for change in objects if change.after is not None]
    return [*types, *dropped, *columns, *made, *parts]


def _of_table(before: SourceDefinition, after: SourceDefinition) -> SourceDefinition:
    """Return *before* with the column numbers of *after*, by the names of columns, if *after* is a
    new table.

    A session may have dropped the table and created a table of that name.
    """
    if before.oid is None or after.oid is None or before.oid == after.oid:
        return before
    numbers = after.numbers
    columns = [replace(c, number=numbers.get(c.name, -c.number)) for c in before.columns]
    return replace(before, columns=tuple(columns))


def _of_other_types(before: SourceDefinition, after: SourceDefinition) -> SourceDefinition:
    """Return *after* with each column whose type the source replaced marked as computed.

    The new type may have the name of the former type, which the source dropped or renamed.
    """
    former = {type_.quoted: type_ for type_ in before.types or ()}
    present = {type_.quoted: type_ for type_ in after.types or ()}
    replaced = replaced_types(former.values(), present.values())
    types = {column.number: former.get(base_type(column.type)) for column in before.columns}
    computed = set()
    for column in after.columns:
        old, new = types.get(column.number), present.get(base_type(column.type))
        if old is not None and new is not None and is_another(old, new, replaced):
            computed.add(column.number)
    columns = (replace(c, computed=c.computed or c.number in computed) for c in after.columns)
    return replace(after, columns=tuple(columns)) if computed else after


def under_new_names(
    definition: SourceDefinition, changes: Iterable[TypeChange]
) -> SourceDefinition:
    """Return *definition* with the names that the types of columns have after *changes*."""
    names = {
        change.before.quoted: change.after.quoted
        for change in changes
        if change.kind is DdlKind.RENAME_TYPE and change.before is not None
    }
    columns = [replace(c, type=under_new_name(c.type, names)) for c in definition.columns]
    return replace(definition, columns=tuple(columns)) if names else definition


def difference(
    before: SourceDefinition, after: SourceDefinition, *, computes_values: bool = False
) -> list[ColumnChange]:
    """Return the changes from *before* to *after*, in a feasible order.

    *computes_values*: the statement may have computed values of a column with a new type.
    """
    former = {column.number: column for column in before.columns}
    present = {column.number: column for column in after.columns}
    changes = [
        ColumnChange(DdlKind.DROP_COLUMN, column, None)
        for number, column in former.items()
        if number not in present
    ]
    pairs = [(former[n], column) for n, column in present.items() if n in former]
    changes += _renames(pairs)
    for old, new in pairs:
        changes += _changes_of(replace(old, name=new.name), new, computes_values=computes_values)
    for number, column in present.items():
        if number not in former:
            changes.append(ColumnChange(DdlKind.ADD_COLUMN, None, column))
    # An expression may use a column that is new.
    return sorted(changes, key=lambda change: change.kind is DdlKind.SET_EXPRESSION)


def _renames(pairs: Sequence[tuple[DefinedColumn, DefinedColumn]]) -> Iterable[ColumnChange]:
    """Return the renames of columns in an order in which each new name is free."""
    columns = {old.name: (old, new) for old, new in pairs}
    names = {old.name: new.name for old, new in pairs if old.name != new.name}
    for former, name in ordered_renames(names):
        old, new = columns.pop(former)
        moved = replace(new, name=name)
        columns[name] = replace(old, name=name), new
        yield ColumnChange(DdlKind.RENAME_COLUMN, old, moved)


def columns_after(changes: Iterable[ColumnChange]) -> dict[str, DefinedColumn | None]:
    """Return the columns after all *changes*, by their former names; None for a dropped column."""
    after: dict[str, DefinedColumn | None] = {}
    for change in changes:
        if change.before is None:
            continue
        name = change.before.name
        first = next((old for old, now in after.items() if now and now.name == name), name)
        after[first] = change.after
    return after


def _changes_of(
    old: DefinedColumn, new: DefinedColumn, *, computes_values: bool
) -> Iterable[ColumnChange]:
    if (old.type, old.collation) != (new.type, new.collation):
        widened = widens(old.type, new.type) and not computes_values
        kind = DdlKind.WIDEN_TYPE if widened else DdlKind.CHANGE_TYPE
        yield ColumnChange(kind, old, new)
    elif new.computed and not new.generated:
        yield ColumnChange(DdlKind.CHANGE_TYPE, old, new)
    if old.not_null != new.not_null:
        kind = DdlKind.SET_NOT_NULL if new.not_null else DdlKind.DROP_NOT_NULL
        yield ColumnChange(kind, old, new)
    if (old.default_mark, old.generated) != (new.default_mark, new.generated):
        is_expression = old.generated and new.generated
        kind = DdlKind.SET_EXPRESSION if is_expression else DdlKind.SET_DEFAULT
        yield ColumnChange(kind, old, new)
    elif (old.identity, old.sequence) != (new.identity, new.sequence):
        yield ColumnChange(DdlKind.SET_DEFAULT, old, new)


_WIDER: Final[dict[str, frozenset[str]]] = {
    "smallint": frozenset({"integer", "bigint", "numeric", "real", "double precision"}),
    "integer": frozenset({"bigint", "numeric", "double precision"}),
    "bigint": frozenset({"numeric"}),
    "real": frozenset({"double precision"}),
    "character varying": frozenset({"text"}),
    "text": frozenset({"character varying"}),
    "date": frozenset({"timestamp without time zone"}),
}
"""For each type, the types without a modifier that hold all its values, by a cast that ignores
settings.
"""

_TYPE: Final = re.compile(r"([a-z ]+?)(?:\((-?\d+(?:,-?\d+)?)\))?( with(?:out)? time zone)?(\[\])?")


@dataclass(frozen=True, slots=True)
class TypeName:
    """The parts of a type's name, as format_type writes the name."""

    base: str
    modifiers: tuple[int, ...] = ()
    is_array: bool = False

    @classmethod
    def parse(cls, text: str) -> "TypeName":
        """Return the parts; if the name has a different form, the whole name is the ``base``."""
        if (match := _TYPE.fullmatch(text)) is None:
            return cls(text)
        base, modifiers, zone, brackets = match.groups("")
        return cls(base + zone, tuple(map(int, filter(None, modifiers.split(",")))), bool(brackets))

    @property
    def scale(self) -> int:
        """The number of digits after the decimal point of a numeric with modifiers."""
        return self.modifiers[1] if len(self.modifiers) > 1 else 0

    @property
    def whole_digits(self) -> int:
        """The number of digits before the decimal point."""
        return self.modifiers[0] - self.scale


def widens(before: str, after: str) -> bool:
    """Return whether type *after* holds every value of type *before* unchanged."""
    if before == after:
        return True
    old, new = TypeName.parse(before), TypeName.parse(after)
    if old.is_array != new.is_array:
        return False
    if old.base != new.base:
        return not new.modifiers and new.base in _WIDER.get(old.base, frozenset())
    if not new.modifiers:
        return old.base != "character"
    if not old.modifiers:
        return False
    if old.base == "numeric":
        return new.scale >= old.scale and new.whole_digits >= old.whole_digits
    return new.modifiers >= old.modifiers and old.base not in ("character", "bit")
