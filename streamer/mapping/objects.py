"""Indexes, constraints and types of a source's table, and the difference between two states.

Each has an OID for life. So a rename is exact, like that of a column. PostgreSQL makes an index
anew when the type of a column changes. Its OID is another one then, and its mark is the same.

Pure.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from streamer.mapping.names import RelationName, ordered_renames
from streamer.mapping.options import DdlKind
from streamer.postgres.quoting import quote_identifier

INDEX: Final = "i"
_SUFFIX: Final = re.compile(r"(\([\d,-]+\))?(\[\])?$")
_FORMER_BYTES: Final = 40
"""The bytes of a type's name that its former name has; a name may have 63."""
_PLAIN: Final = re.compile("[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class DefinedObject:
    """An index or a constraint. An index that implements a constraint is a part of that.

    ``kind``: `INDEX`, or pg_constraint.contype. ``mark``: of its definition without its name.
    ``is_valid``: of a constraint, whether it was validated. ``index_oid``: its index.
    """

    oid: int
    kind: str
    name: str
    mark: str
    is_valid: bool = True
    is_unique: bool = False
    index_oid: int = 0

    @property
    def is_index(self) -> bool:
        return self.kind == INDEX

    @property
    def is_usable(self) -> bool:
        return self.is_valid or not self.is_index

    @property
    def binds(self) -> bool:
        """Whether it refuses rows."""
        return self.is_unique or not self.is_index


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """One change of an index or a constraint; None where it is not there."""

    kind: DdlKind
    before: DefinedObject | None
    after: DefinedObject | None

    @property
    def name(self) -> str:
        found = self.before or self.after
        assert found is not None
        return found.name

    def __str__(self) -> str:
        if self.before is not None and self.after is not None and self.after.name != self.name:
            return f'{self.kind} "{self.name}" to "{self.after.name}"'
        return f'{self.kind} "{self.name}"'


def object_difference(
    before: Iterable[DefinedObject], after: Iterable[DefinedObject]
) -> list[ObjectChange]:
    """Return the changes of indexes and constraints, in an order to make them in.

    An index that a failed build left invalid counts as none.
    """
    former = {each.oid: each for each in before if each.is_usable}
    present = {each.oid: each for each in after if each.is_usable}
    gone = {(o.kind, o.name): o for oid, o in former.items() if oid not in present}
    dropped: list[ObjectChange] = []
    renamed: list[ObjectChange] = []
    added: list[ObjectChange] = []
    for new in present.values():
        old = former.get(new.oid) or gone.pop((new.kind, new.name), None)
        if old is None:
            index = former.get(new.index_oid)
            if index is not None and index.is_index:  # ADD CONSTRAINT … USING INDEX
                gone.pop((index.kind, index.name), None)
                renamed += _renamed(index, new)
            added.append(_added(new))
        elif old.mark != new.mark:
            dropped.append(_dropped(old))
            added.append(_added(new))
        else:
            renamed += _renamed(old, new)
            if new.is_valid and not old.is_valid:
                added.append(ObjectChange(DdlKind.VALIDATE_CONSTRAINT, new, new))
    dropped += map(_dropped, gone.values())
    return [*dropped, *_in_order(renamed), *added]


def _in_order(renames: Sequence[ObjectChange]) -> Iterator[ObjectChange]:
    """Return *renames*, each to a name that is free by then.

    Indexes have one space of names, and constraints another; an index of a constraint is in both.
    """
    for with_index in (True, False):
        changes = {each.name: each for each in renames if _has_index(each) is with_index}
        names = {former: each.after.name for former, each in changes.items() if each.after}
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
    """A type of the source that its table uses.

    ``kind``: pg_type.typtype: e (enum), d (domain), c (composite), r (range). ``labels``: OID and
    text, in order. ``base``: of a domain or a range, as SQL. ``checks``: OID, name and definition.
    ``attributes``: number, name and type. ``operator_class``: of a range, if it is not the default
    one. ``multirange``: the name of its multirange, in the same schema. ``extension``: the one that
    has the type, or has brought it.
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
        return cls(**{**fields, **{n: tuple(map(tuple, each)) for n, each in lists.items()}})

    @property
    def full_name(self) -> RelationName:
        return RelationName(self.namespace, self.name)

    @property
    def can_be_created(self) -> bool:
        """Whether streamer can create the type; an extension or an operator brings the others."""
        return self.extension is None and self.kind in "edcr"

    @property
    def quoted(self) -> str:
        """The name as ``format_type`` writes it with an empty search_path."""
        return quoted_type(self.full_name)

    @property
    def former_name(self) -> RelationName:
        """The name that it gets at the target if another type is to have its name."""
        start = self.name.encode()[:_FORMER_BYTES].decode(errors="ignore")
        return RelationName(self.namespace, f"{start}_former_{self.oid}")

    @property
    def content(self) -> tuple[Any, ...]:
        """The parts of the type by which two servers may have the same one."""
        lists = (self.labels, sorted(self.checks, key=lambda check: check[1:]), self.attributes)
        texts = tuple(tuple(part[1:] for part in each) for each in lists)
        return (self.kind, self.base, self.not_null, self.default, self.operator_class, *texts)

    def takes_all(self, other: Self) -> bool:
        """Whether it takes all values of another type, in the same order."""
        if self.kind != other.kind:
            return False
        match other.kind:
            case "e":
                own = {label for _, label in other.labels}
                return [t for _, t in self.labels if t in own] == [t for _, t in other.labels]
            case "d":
                checks = {check[1:] for check in other.checks}
                if other.base != self.base or (self.not_null and not other.not_null):
                    return False
                return checks.issuperset(check[1:] for check in self.checks)
            case _:
                return False

    @property
    def parts(self) -> set[str]:
        """The types that it is made of, as ``format_type`` writes their names."""
        return {base_type(t) for t in (self.base or "", *(kind for _, _, kind in self.attributes))}


@dataclass(frozen=True, slots=True)
class TypeUse:
    """The objects of the target that use a type. ``foreign``: those that are not of tables which
    this source alone fills.
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
    """Return the name of a type, or of an array of it, after some types were *renamed*."""
    base = base_type(type_name)
    return renamed.get(base, base) + type_name.removeprefix(base)


@dataclass(frozen=True, slots=True)
class TypeChange:
    """One change of a type. ``part``: the label, constraint or attribute before and after it."""

    kind: DdlKind
    before: DefinedType | None
    after: DefinedType
    part: tuple[str | None, str | None] = (None, None)

    def __str__(self) -> str:
        if self.kind is DdlKind.RENAME_TYPE and self.before is not None:
            return f'{self.kind} "{self.before.full_name}" to "{self.after.full_name}"'
        old, new = self.part
        words = " to ".join(f'"{each}"' for each in (old, new) if each is not None)
        return f'{self.kind} "{self.after.full_name}"' + (f" {words}" if words else "")


def type_difference(
    before: Iterable[DefinedType], after: Iterable[DefinedType]
) -> list[TypeChange]:
    """Return the changes of types, in an order to make them in. A type that the table no longer
    uses stays.
    """
    former = {each.oid: each for each in before}
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
    """Whether *new* is not *old*, and has other content. *replaced*: see `replaced_types`."""
    has_other = old.content != new.content or not new.parts.isdisjoint(replaced)
    return old.oid != new.oid and has_other


def replaced_types(before: Iterable[DefinedType], after: Iterable[DefinedType]) -> set[str]:
    """Return the names, quoted, that mean another type with other content in *after*."""
    former = {each.full_name: each for each in before}
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
        was, its_type = former[number]
        if was != name:
            yield TypeChange(DdlKind.RENAME_ATTRIBUTE, old, new, (was, name))
        if its_type != type_:
            yield TypeChange(DdlKind.CHANGE_ATTRIBUTE, old, new, (name, name))
    for number, (name, _) in present.items():
        if number not in former:
            yield TypeChange(DdlKind.ADD_ATTRIBUTE, old, new, (None, name))
