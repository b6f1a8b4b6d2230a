"""Indexes, constraints and types of a table, and the difference between two states.

An object keeps its OID for life, so a rename is exact. When the type of a column changes,
PostgreSQL rebuilds an index under a new OID; the index keeps its mark.

`streamer.postgres.describing.objects_sql` reads indexes and constraints. A query that must not wait
for locks reads no texts: the fields from ``keys`` or ``definition`` on. Equality compares only the
fields before the texts. Pure.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

from streamer.mapping.relation_names import RelationName, ordered_renames
from streamer.mapping.rule_options import DdlKind
from streamer.postgres.quoting import quote_identifier

INDEX: Final = "i"
_SUFFIX: Final = re.compile(r"(\([\d,-]+\))?(\[\])?$")
_FORMER_BYTES: Final = 40
"""The number of bytes of a type's name in its former name; a name may have 63 bytes."""
_PLAIN: Final = re.compile("[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class IndexKey:
    """A key of an index: a column or an expression, and the clauses that follow the key.

    ``collation``, ``opclass``: quoted names, None for the default. ``operator``: the operator of an
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
    """An index. The fields from ``keys`` on are the texts.

    ``mark``: a hash of the definition without names. ``columns``: the columns of the keys; None for
    an expression. ``uses``: the columns in the expressions and the predicate. ``options``: storage
    parameters.
    """

    oid: int
    name: str
    mark: str = ""
    is_valid: bool = True
    is_unique: bool = False
    is_immediate: bool = field(default=True, compare=False)
    is_partial: bool = field(default=False, compare=False)
    method: str = field(default="btree", compare=False)
    columns: tuple[str | None, ...] = field(default=(), compare=False)
    keys: tuple[IndexKey, ...] = field(default=(), compare=False)
    included: tuple[str, ...] = field(default=(), compare=False)
    nulls_not_distinct: bool = field(default=False, compare=False)
    predicate: str | None = field(default=None, compare=False)
    options: tuple[str, ...] = field(default=(), compare=False)
    uses: frozenset[str] = field(default=frozenset(), compare=False)
    comment: str | None = field(default=None, compare=False)
    kind: ClassVar[str] = INDEX
    is_index: ClassVar[bool] = True

    @classmethod
    def of(cls, values: Mapping[str, Any], names: Mapping[int, str]) -> Self:
        """Read the JSON of an index. *names*: the names of the table's columns, by number."""
        keys = (
            IndexKey(**{**_as_tuples(key), "column": names.get(key["column"])})
            for key in values.get("keys", ())
        )
        named = {
            "columns": tuple(names.get(number) for number in values.get("columns", ())),
            "keys": tuple(keys),
            "included": _named(values.get("included"), names),
            "uses": frozenset(_named(values.get("uses"), names)),
        }
        return cls(**{**_as_tuples(values), **named})

    @property
    def index(self) -> Self:
        return self

    @property
    def binds(self) -> bool:
        """Whether the object refuses rows."""
        return self.is_unique

    @property
    def has_texts(self) -> bool:
        return bool(self.keys)

    @property
    def finds_rows(self) -> bool:
        """Whether a search by the columns of the keys finds all rows."""
        is_plain = not self.is_partial and None not in self.columns
        return self.is_valid and is_plain and self.method == "btree"


@dataclass(frozen=True, slots=True)
class ConstraintDefinition:
    """A constraint of a table, with the index that implements the constraint.

    ``kind``: pg_constraint.contype: c, p, u, x or f. ``is_valid``: the constraint is validated.
    ``columns``: the columns of the constraint. The fields from ``definition`` on are the texts.
    ``definition``: pg_get_constraintdef. A check has an ``expression``; a foreign key has the
    fields from ``referenced`` on.
    """

    oid: int
    kind: str
    name: str
    mark: str = ""
    is_valid: bool = True
    index: IndexDefinition | None = None
    columns: tuple[str, ...] = field(default=(), compare=False)
    deferrable: bool = field(default=False, compare=False)
    deferred: bool = field(default=False, compare=False)
    definition: str = field(default="", compare=False)
    expression: str | None = field(default=None, compare=False)
    enforced: bool = field(default=True, compare=False)
    no_inherit: bool = field(default=False, compare=False)
    period: bool = field(default=False, compare=False)
    referenced: RelationName | None = field(default=None, compare=False)
    referenced_columns: tuple[str, ...] = field(default=(), compare=False)
    match: str = field(default="s", compare=False)
    on_update: str = field(default="a", compare=False)
    on_delete: str = field(default="a", compare=False)
    on_delete_columns: tuple[str, ...] = field(default=(), compare=False)
    comment: str | None = field(default=None, compare=False)
    is_index: ClassVar[bool] = False
    binds: ClassVar[bool] = True

    @classmethod
    def of(
        cls, values: Mapping[str, Any], index: IndexDefinition | None, names: Mapping[int, str]
    ) -> Self:
        """Read the JSON of a constraint. *names*: the names of the table's columns, by number."""
        referenced = values.get("referenced")
        named = {
            "columns": _named(values.get("columns"), names),
            "referenced": referenced and RelationName(*referenced),
            "on_delete_columns": _named(values.get("on_delete_columns"), names),
        }
        return cls(**{**_as_tuples(values), **named}, index=index)

    @property
    def has_texts(self) -> bool:
        return bool(self.definition)

    @property
    def timing(self) -> str:
        """The SQL to add to a deferrable constraint."""
        if not self.deferrable:
            return ""
        return " deferrable initially deferred" if self.deferred else " deferrable"


DefinedObject = IndexDefinition | ConstraintDefinition
"""An index without a constraint, or a constraint."""


def object_of(values: Mapping[str, Any], names: Mapping[int, str]) -> DefinedObject:
    """Read the JSON of `streamer.postgres.describing.objects_sql`, or of `stored_object`."""
    index = values["index"] and IndexDefinition.of(values["index"], names)
    if values["constraint"] is None:
        assert isinstance(index, IndexDefinition)
        return index
    return ConstraintDefinition.of(values["constraint"], index, names)


def constraints_of(objects: Iterable[DefinedObject]) -> list[ConstraintDefinition]:
    """Return the constraints among *objects*."""
    return [part for part in objects if isinstance(part, ConstraintDefinition)]


def primary_key_of(objects: Iterable[DefinedObject]) -> ConstraintDefinition | None:
    return next((c for c in constraints_of(objects) if c.kind == "p"), None)


def unique_keys_of(objects: Iterable[DefinedObject]) -> tuple[tuple[str, ...], ...]:
    """Return the columns of the valid, immediate, complete unique indexes over plain columns.

    The primary key comes first.
    """
    keys = [(part.kind != "p", part.index) for part in objects if part.index is not None]
    keys.sort(key=lambda key: (key[0], key[1].oid))
    return tuple(
        tuple(column for column in index.columns if column is not None)
        for _, index in keys
        if index.is_unique and index.is_immediate and index.finds_rows
    )


def stored_object(item: DefinedObject) -> dict[str, Any]:
    """Return the JSON of the fields that equality compares."""
    names = ("oid", "name", "mark", "is_valid")
    return {
        "index": _fields(item.index, *names, "is_unique"),
        "constraint": None if item.is_index else _fields(item, *names, "kind"),
    }


def _fields(part: DefinedObject | None, *names: str) -> dict[str, Any] | None:
    return None if part is None else {name: getattr(part, name) for name in names}


def _as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _named(numbers: Iterable[int] | None, names: Mapping[int, str]) -> tuple[str, ...]:
    # An expression of an exclusion constraint has the number 0, a system column a negative number.
    # A separate statement reads the columns, perhaps before or after a change.
    return tuple(names[number] for number in numbers or () if number in names)


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """A change of an index or a constraint. A state is None if the object is absent."""

    kind: DdlKind
    before: DefinedObject | None
    after: DefinedObject | None

    @property
    def name(self) -> str:
        part = self.before or self.after
        assert part is not None
        return part.name

    def __str__(self) -> str:
        if self.before is not None and self.after is not None and self.after.name != self.name:
            return f'{self.kind} "{self.name}" to "{self.after.name}"'
        return f'{self.kind} "{self.name}"'


def object_difference(
    before: Iterable[DefinedObject], after: Iterable[DefinedObject]
) -> list[ObjectChange]:
    """Return the changes of indexes and constraints, in a feasible order.

    The function ignores an index that a failed build left invalid.
    """
    former = {part.oid: part for part in before if part.is_valid or not part.is_index}
    present = {part.oid: part for part in after if part.is_valid or not part.is_index}
    missing = {(o.kind, o.name): o for oid, o in former.items() if oid not in present}
    dropped: list[ObjectChange] = []
    renamed: list[ObjectChange] = []
    added: list[ObjectChange] = []
    for new in present.values():
        old = former.get(new.oid) or missing.pop((new.kind, new.name), None)
        if old is None:
            index = None if new.index is None else former.get(new.index.oid)
            if index is not None and index.is_index:  # ADD CONSTRAINT … USING INDEX
                missing.pop((index.kind, index.name), None)
                renamed += _renamed(index, new)
            added.append(_added(new))
        elif _marks(old) != _marks(new):
            dropped.append(_dropped(old))
            added.append(_added(new))
        else:
            renamed += _renamed(old, new)
            if new.is_valid and not old.is_valid:
                added.append(ObjectChange(DdlKind.VALIDATE_CONSTRAINT, new, new))
    dropped += map(_dropped, missing.values())
    return [*dropped, *_in_order(renamed), *added]


def _marks(part: DefinedObject) -> tuple[str, str]:
    return part.mark, "" if part.index is None else part.index.mark


def _in_order(renames: Sequence[ObjectChange]) -> Iterator[ObjectChange]:
    """Return *renames* in an order in which each new name is free.

    Indexes and constraints have separate name spaces; an index of a constraint is in both.
    """
    for with_index in (True, False):
        changes = {rename.name: rename for rename in renames if _has_index(rename) is with_index}
        names = {former: rename.after.name for former, rename in changes.items() if rename.after}
        for former, name in ordered_renames(names):
            change = changes.pop(former)
            assert change.before is not None
            assert change.after is not None
            yield replace(change, after=replace(change.after, name=name))
            changes[name] = replace(change, before=replace(change.before, name=name))


def _has_index(change: ObjectChange) -> bool:
    return change.before is not None and change.before.kind not in "cf"


def _added(new: DefinedObject) -> ObjectChange:
    kind = DdlKind.ADD_INDEX if new.is_index else DdlKind.ADD_CONSTRAINT
    return ObjectChange(kind, None, new)


def _dropped(old: DefinedObject) -> ObjectChange:
    kind = DdlKind.DROP_INDEX if old.is_index else DdlKind.DROP_CONSTRAINT
    return ObjectChange(kind, old, None)


def _renamed(old: DefinedObject, new: DefinedObject) -> Iterator[ObjectChange]:
    if old.name != new.name:
        kind = DdlKind.RENAME_INDEX if old.is_index else DdlKind.RENAME_CONSTRAINT
        yield ObjectChange(kind, old, new)


# ---- types -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DefinedType:
    """A type of the source that a table uses.

    ``kind``: pg_type.typtype: e (enum), d (domain), c (composite), r (range). ``labels``: OID and
    text, in order. ``base``: the base type of a domain or a range, as SQL. ``checks``: OID, name
    and definition. ``attributes``: number, name and type. ``operator_class``: the operator class of
    a range, if not the default. ``multirange``: the name of the multirange, in the same schema.
    ``extension``: the extension that created the type.
    """

    oid: int
    namespace: str
    name: str
    kind: str
    labels: tuple[tuple[int, str], ...] = ()
    base: str | None = None
    not_null: bool = False
    default: str | None = None
    checks: tuple[tuple[int, str, str], ...] = ()
    attributes: tuple[tuple[int, str, str], ...] = ()
    operator_class: str | None = None
    multirange: str | None = None
    extension: str | None = None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        """Read the JSON of `streamer.postgres.describing.USED_TYPES`."""
        lists = {name: fields.get(name) or () for name in ("labels", "checks", "attributes")}
        return cls(**{**fields, **{n: tuple(map(tuple, values)) for n, values in lists.items()}})

    @property
    def full_name(self) -> RelationName:
        return RelationName(self.namespace, self.name)

    @property
    def can_be_created(self) -> bool:
        """Whether streamer can create the type, rather than an extension or an operator."""
        return self.extension is None and self.kind in "edcr"

    @property
    def quoted(self) -> str:
        """The name as ``format_type`` writes it with an empty search_path."""
        return quoted_type(self.full_name)

    @property
    def former_name(self) -> RelationName:
        """The name that the type gets at the target when a new type needs its name."""
        start = self.name.encode()[:_FORMER_BYTES].decode(errors="ignore")
        return RelationName(self.namespace, f"{start}_former_{self.oid}")

    @property
    def content(self) -> tuple[Any, ...]:
        """The content of the type without OIDs, comparable between servers."""
        lists = (self.labels, sorted(self.checks, key=lambda check: check[1:]), self.attributes)
        texts = tuple(tuple(part[1:] for part in items) for items in lists)
        return (self.kind, self.base, self.not_null, self.default, self.operator_class, *texts)

    def takes_all(self, other: Self) -> bool:
        """Whether the type accepts all values of the type *other*, in the same order."""
        if self.kind != other.kind:
            return False
        match other.kind:
            case "e":
                texts = {label for _, label in other.labels}
                return [t for _, t in self.labels if t in texts] == [t for _, t in other.labels]
            case "d":
                checks = {check[1:] for check in other.checks}
                if other.base != self.base or (self.not_null and not other.not_null):
                    return False
                return checks.issuperset(check[1:] for check in self.checks)
            case _:
                return False

    @property
    def parts(self) -> set[str]:
        """The names of the types of parts, as ``format_type`` writes names."""
        return {base_type(t) for t in (self.base or "", *(kind for _, _, kind in self.attributes))}


@dataclass(frozen=True, slots=True)
class TypeUse:
    """The uses of a type at the target.

    ``foreign``: the objects that use the type, except tables that only this source fills.
    """

    is_used: bool = False
    foreign: Sequence[str] = ()


def quoted_type(name: RelationName) -> str:
    """Return the name of a type as ``format_type`` writes it with an empty search_path."""
    return f"{_quoted(name.namespace)}.{_quoted(name.name)}"


def base_type(type_name: str) -> str:
    """Return the name of a type without the modifier and the brackets of an array."""
    return _SUFFIX.sub("", type_name)


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else quote_identifier(name)


def under_new_name(type_name: str, renamed: Mapping[str, str]) -> str:
    """Return the name of a type or array after some types were *renamed*."""
    base = base_type(type_name)
    return renamed.get(base, base) + type_name.removeprefix(base)


@dataclass(frozen=True, slots=True)
class TypeChange:
    """A change of a type. ``part``: the label, constraint or attribute, before and after the
    change.
    """

    kind: DdlKind
    before: DefinedType | None
    after: DefinedType
    part: tuple[str | None, str | None] = (None, None)

    def __str__(self) -> str:
        if self.kind is DdlKind.RENAME_TYPE and self.before is not None:
            return f'{self.kind} "{self.before.full_name}" to "{self.after.full_name}"'
        old, new = self.part
        words = " to ".join(f'"{text}"' for text in (old, new) if text is not None)
        return f'{self.kind} "{self.after.full_name}"' + (f" {words}" if words else "")


def type_difference(
    before: Iterable[DefinedType], after: Iterable[DefinedType]
) -> list[TypeChange]:
    """Return the changes of types, in a feasible order. A type that the table no longer uses
    stays.
    """
    former = {type_.oid: type_ for type_ in before}
    changes: list[TypeChange] = []
    for new in after:
        old = former.get(new.oid)
        if old is None:
            changes.append(TypeChange(DdlKind.CREATE_TYPE, None, new))
            continue
        if old.full_name != new.full_name:
            changes.append(TypeChange(DdlKind.RENAME_TYPE, old, new))
        changes += _changes_of_labels(old, new)
        if (old.not_null, old.default, _texts(old)) != (new.not_null, new.default, _texts(new)):
            changes.append(TypeChange(DdlKind.CHANGE_DOMAIN, old, new))
        changes += _changes_of_attributes(old, new)
    return changes


def is_another(old: DefinedType, new: DefinedType, replaced: Collection[str]) -> bool:
    """Whether *new* is a different type with different content; see `replaced_types`."""
    has_other = old.content != new.content or not new.parts.isdisjoint(replaced)
    return old.oid != new.oid and has_other


def replaced_types(before: Iterable[DefinedType], after: Iterable[DefinedType]) -> set[str]:
    """Return the quoted names that denote a different type with different content in *after*."""
    former = {type_.full_name: type_ for type_ in before}
    replaced: set[str] = set()
    for new in after:  # parts come first
        old = former.get(new.full_name)
        if old is not None and is_another(old, new, replaced):
            replaced.add(new.quoted)
    return replaced


def _texts(domain: DefinedType) -> set[tuple[str, str]]:
    return {(name, text) for _, name, text in domain.checks}


def _changes_of_labels(old: DefinedType, new: DefinedType) -> Iterator[TypeChange]:
    former = dict(old.labels)
    for oid, label in new.labels:
        was = former.get(oid)
        if was is not None and was != label:
            yield TypeChange(DdlKind.RENAME_ENUM_VALUE, old, new, (was, label))
    for oid, label in new.labels:
        if oid not in former:
            yield TypeChange(DdlKind.ADD_ENUM_VALUE, old, new, (None, label))


def _changes_of_attributes(old: DefinedType, new: DefinedType) -> Iterator[TypeChange]:
    former = {number: (name, type_) for number, name, type_ in old.attributes}
    present = {number: (name, type_) for number, name, type_ in new.attributes}
    for number, (name, _) in former.items():
        if number not in present:
            yield TypeChange(DdlKind.DROP_ATTRIBUTE, old, new, (name, None))
    for number, (name, type_) in present.items():
        if number not in former:
            continue
        former_name, former_type = former[number]
        if former_name != name:
            yield TypeChange(DdlKind.RENAME_ATTRIBUTE, old, new, (former_name, name))
        if former_type != type_:
            yield TypeChange(DdlKind.CHANGE_ATTRIBUTE, old, new, (name, name))
    for number, (name, _) in present.items():
        if number not in former:
            yield TypeChange(DdlKind.ADD_ATTRIBUTE, old, new, (None, name))
