"""Changes of a source's types as statements for the target, which uses the same names. Pure.

Every table that uses the type receives the change at its own position in the stream, and the first
table applies the change. The translator therefore returns a statement only if the target's type
lacks the change.

A transaction that adds a value to an enum cannot use the value, unless it also creates the enum.
The source has the same rule, so rows with the value arrive in later transactions.

A name may mean a new type, because the source has dropped or renamed the former type. The target's
former type is then dropped, or renamed to a name of streamer's own until no column uses it
(`DefinedType.former_name`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from streamer.errors.error_classes import SharedTargetError, TargetSchemaError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlKind
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.schema.create_type import NOT_VALID, create_type_sql
from streamer.schema.indexes_constraints_types import (
    DefinedType,
    TypeChange,
    TypeUse,
    base_type,
    quoted_type,
)
from streamer.schema.source_definition import DefinedColumn


@dataclass(slots=True)
class TypeTranslation:
    """The statements for the target, and their effects.

    ``statements``: run at the position of the change. ``before``: run in an earlier transaction,
    because no transaction can use a label that it adds itself. ``rewritten``: types whose values in
    existing rows differ at the target, with the reason. ``doubts``: changes that an operator must
    review first, and why. ``renamed``: the new names of the target's types, by their former names.
    ``merged``: the existing types that columns of a renamed type get. ``created``: types that the
    statements create. ``awaited``: OIDs of types of the source; the statements wait for all tables
    with these types.
    """

    statements: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    rewritten: dict[str, str] = field(default_factory=dict)
    doubts: list[tuple[TypeChange, str]] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    merged: set[str] = field(default_factory=set)
    created: set[str] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)


class TypeTranslator:
    """Translates changes for a target whose types are *target_types*.

    *peers*: the types of peer sources. *uses*: the objects that use each target type, by OID.
    *own*: the target's types of the table's columns, by the source's names before the changes.
    *known*: the OIDs of the types in the source's other tables, by name. *kept*: labels of enums
    that only ended versions of a history use, by name of the enum.
    """

    def __init__(
        self,
        target_types: Mapping[RelationName, DefinedType],
        peers: Sequence[Sequence[DefinedType]] = (),
        *,
        uses: Mapping[int, TypeUse] | None = None,
        own: Mapping[RelationName, DefinedType] | None = None,
        known: Mapping[RelationName, frozenset[int]] | None = None,
        kept: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._target_types = dict(target_types)
        self._peers = peers
        self._uses = uses or {}
        self._types_elsewhere = known or {}
        self._kept = kept or {}
        self._before = {**target_types, **(own or {})}
        self._names = {type_.oid: type_.full_name for type_ in target_types.values()}
        """The names that the target's types have after the statements."""
        self._replaced: set[str] = set()

    def translate(self, changes: Iterable[TypeChange]) -> TypeTranslation:
        """Return the statements for *changes*. Raises TargetSchemaError for a change that would
        break a peer source.
        """
        result = TypeTranslation()
        for change in changes:
            self._translate(change, result)
        for type_ in self._before.values():
            present = self._names.get(type_.oid, type_.full_name)
            if present != type_.full_name:
                result.renamed[type_.quoted] = quoted_type(present)
        return result

    def _translate(self, change: TypeChange, result: TypeTranslation) -> None:
        new, old = change.after, change.before
        if change.kind is DdlKind.CREATE_TYPE or old is None:
            self._create(new, result)
            return
        if change.kind is DdlKind.RENAME_TYPE:
            self._rename(old, new, result)
            return
        if change.kind is DdlKind.DROP_TYPE:
            self._drop(old, result)
            return
        present = self._target_types.get(new.full_name)
        former = self._before.get(old.full_name)
        is_it = present is not None and (former is None or former.oid == present.oid)
        if present is None or present.kind != new.kind or not is_it:
            raise TargetSchemaError(f'the target has no type "{new.full_name}" of this kind')
        alter = _alter(new)
        match change.kind:
            case DdlKind.ADD_ENUM_VALUE:
                self._add_value(change, present, alter, result)
            case DdlKind.RENAME_ENUM_VALUE:
                self._rename_value(change, present, alter, result)
            case DdlKind.CHANGE_DOMAIN:
                self._change_domain(new, present, alter, result)
            case _:
                self._change_attribute(change, present, alter, result)

    def _create(self, new: DefinedType, result: TypeTranslation) -> None:
        if ended := self._kept.get(new.quoted):
            new = replace(new, labels=(*new.labels, *((0, label) for label in ended)))
        present = self._target_types.get(new.full_name)
        if present is not None:
            is_alike = present.content == new.content and self._replaced.isdisjoint(new.parts)
            if new.oid in self._types_elsewhere.get(new.full_name, ()):  # altered by another table
                result.awaited |= set() if is_alike else {new.oid}
                return
            if is_alike or (self._use(present).foreign and present.takes_all(new)):
                return
            if self._joins(new, present, result):
                return
            self._make_room(present, result)
            self._replaced.add(new.quoted)
        result.statements += [_schema_sql(new.full_name), *create_type_sql(new)]
        result.created.add(new.quoted)
        self._target_types[new.full_name] = replace(new, oid=-new.oid)

    def _joins(self, new: DefinedType, target: DefinedType, result: TypeTranslation) -> bool:
        """Whether the type of a peer source accepts all values of *new*, after added statements."""
        is_alike = new.kind == target.kind and new.base == target.base and new.kind in "ed"
        if not is_alike or not self._of_peers(new):
            return False
        if new.kind == "e" and not _sorts_alike(new, target):
            return False
        alter = _alter(new)
        if new.kind == "d":
            self._change_domain(new, target, alter, result)
        added = TypeTranslation()
        for _, label in new.labels:
            present = self._target_types[new.full_name]
            change = TypeChange(DdlKind.ADD_ENUM_VALUE, None, new, (None, label))
            self._add_value(change, present, alter, added)
        result.before += added.statements
        return True

    def _drop(self, old: DefinedType, result: TypeTranslation) -> None:
        """Drop a type of the target that the source dropped and no other table uses.

        An enum may have further labels, for ended versions of a history.
        """
        present = self._target_types.get(old.full_name)
        if present is None or self._use(present).foreign:
            return
        if present.content == old.content or (old.kind == "e" and present.takes_all(old)):
            self._make_room(present, result)

    def _make_room(self, present: DefinedType, result: TypeTranslation) -> None:
        """Free the name of a type of the target: the source uses the name for a new type."""
        use = self._use(present)
        if use.foreign:
            raise TargetSchemaError(
                f'type "{present.full_name}" of the target would be replaced, and is still used by '
                f"{', '.join(use.foreign)}"
            )
        result.awaited |= self._types_elsewhere.get(present.full_name, frozenset())
        if use.is_used:
            self._rename_to(present, present.former_name, result)
        else:
            result.statements.append(f"drop type {_quoted(present)}")
            del self._target_types[present.full_name], self._names[present.oid]

    def _use(self, present: DefinedType) -> TypeUse:
        return self._uses.get(present.oid, TypeUse())

    def _rename(self, old: DefinedType, new: DefinedType, result: TypeTranslation) -> None:
        was, namesake = self._before.get(old.full_name), self._target_types.get(new.full_name)
        present = None if was is None else self._names.get(was.oid)
        meant = None if present is None else self._target_types.get(present)
        if meant is None or meant is namesake:
            return  # an earlier table made the change
        if namesake is not None:
            is_made = namesake.content == new.content
            if is_made and meant.content != old.content:
                return
            if is_made and self._use(namesake).is_used:  # created as a new type by an earlier table
                self._make_room(meant, result)
                result.merged.add(new.quoted)
                return
            self._make_room(namesake, result)
        self._refuse_others(old, "renamed")
        self._rename_to(meant, new.full_name, result)

    def _rename_to(self, present: DefinedType, name: RelationName, result: TypeTranslation) -> None:
        """Rename a type of the target."""
        if present.namespace != name.namespace:
            schema = quote_identifier(name.namespace)
            result.statements += [
                _schema_sql(name),
                f"alter type {_quoted(present)} set schema {schema}",
            ]
        if present.name != name.name:
            moved = quote_qualified(name.namespace, present.name)
            result.statements.append(f"alter type {moved} rename to {quote_identifier(name.name)}")
        del self._target_types[present.full_name]
        self._target_types[name] = replace(present, namespace=name.namespace, name=name.name)
        self._names[present.oid] = name

    def _of_peers(self, type_: DefinedType) -> list[DefinedType]:
        """Return the types of peer sources with the name of *type_*."""
        return [e for types in self._peers for e in types if e.full_name == type_.full_name]

    def _refuse_others(self, type_: DefinedType, word: str) -> None:
        if self._of_peers(type_):
            raise SharedTargetError(
                f'type "{type_.full_name}" would be {word}, and another source still '
                "has the old type"
            )

    # ---- enums ---------------------------------------------------------------------------------

    def _add_value(
        self, change: TypeChange, enum: DefinedType, alter: str, result: TypeTranslation
    ) -> None:
        label = change.part[1] or ""
        present = [text for _, text in enum.labels]
        if label in present:
            return
        texts = [text for _, text in change.after.labels]
        if not _sorts_alike(change.after, enum):
            reason = (
                f'value "{label}" of "{change.after.full_name}" has no certain position, because '
                "the target has the values in a different order"
            )
            result.doubts.append((change, reason))
        successor = next((value for value in texts[texts.index(label) :] if value in present), None)
        place = "" if successor is None else f" before {quote_literal(successor)}"
        result.statements.append(f"{alter} add value if not exists {quote_literal(label)}{place}")
        at = len(present) if successor is None else present.index(successor)
        labels = (*enum.labels[:at], (0, label), *enum.labels[at:])
        self._target_types[change.after.full_name] = replace(enum, labels=labels)

    def _rename_value(
        self, change: TypeChange, enum: DefinedType, alter: str, result: TypeTranslation
    ) -> None:
        old, new = (part or "" for part in change.part)
        present = {text for _, text in enum.labels}
        peers = self._of_peers(change.after)
        is_shared = any(old == text for peer in peers for _, text in peer.labels)
        if is_shared or {old, new} <= present:
            # Both values exist until every source has renamed its value and all rows have the new
            # value.
            if new not in present:
                self._add_value(replace(change, part=(None, new)), enum, alter, result)
            name = change.after.quoted
            result.rewritten[name] = f'value "{old}" of "{change.after.full_name}" was renamed'
            return
        if old not in present:
            return
        result.statements.append(
            f"{alter} rename value {quote_literal(old)} to {quote_literal(new)}"
        )
        labels = tuple((oid, new if text == old else text) for oid, text in enum.labels)
        self._target_types[change.after.full_name] = replace(enum, labels=labels)

    # ---- domains and composite types -----------------------------------------------------------

    def _change_domain(
        self, new: DefinedType, domain: DefinedType, alter: str, result: TypeTranslation
    ) -> None:
        peers = self._of_peers(new)
        present = {name: _check(text) for _, name, text in domain.checks}
        defined = {name: text for _, name, text in new.checks}
        for name, text in present.items():
            if name not in defined or _check(defined[name]) != text:
                result.statements.append(f"{alter} drop constraint {quote_identifier(name)}")
        for name, text in defined.items():
            binds_all = all(name in {n for _, n, _ in peer.checks} for peer in peers)
            if present.get(name) != _check(text) and binds_all:
                # The target evaluates the check only after streamer has checked the functions.
                action = f"constraint {quote_identifier(name)}"
                result.statements.append(f"{alter} add {action} {_check(text)} not valid")
                if _check(text) == text:
                    result.statements.append(f"{alter} validate {action}")
        if domain.not_null != new.not_null and (not new.not_null or all(o.not_null for o in peers)):
            result.statements.append(f"{alter} {'set' if new.not_null else 'drop'} not null")
        if domain.default != new.default and not peers:
            end = "drop default" if new.default is None else f"set default {new.default}"
            result.statements.append(f"{alter} {end}")
        self._target_types[new.full_name] = new

    def _change_attribute(
        self, change: TypeChange, composite: DefinedType, alter: str, result: TypeTranslation
    ) -> None:
        old, name = change.part
        present = {attribute: kind for _, attribute, kind in composite.attributes}
        types = {attribute: kind for _, attribute, kind in change.after.attributes}
        if change.kind is DdlKind.DROP_ATTRIBUTE:
            # An older transaction may contain a value with the right number of attributes, but with
            # different attributes. The backfill begins after all such transactions.
            reason = f'attribute "{old}" of "{change.after.full_name}" was dropped'
            result.rewritten[change.after.quoted] = reason
        match change.kind:
            case DdlKind.ADD_ATTRIBUTE if name is not None and name not in present:
                action = f"add attribute {quote_identifier(name)} {types[name]}"
                present[name] = types[name]
            case DdlKind.DROP_ATTRIBUTE if old in present:
                action = f"drop attribute {quote_identifier(old)}"
                del present[old]
            case DdlKind.RENAME_ATTRIBUTE if old in present and name is not None:
                action = f"rename attribute {quote_identifier(old)} to {quote_identifier(name)}"
                present = {(name if n == old else n): kind for n, kind in present.items()}
            case DdlKind.CHANGE_ATTRIBUTE if name in present and present[name] != types[name]:
                action = f"alter attribute {quote_identifier(name)} type {types[name]}"
                present[name] = types[name]
            case _:
                return  # made already
        self._refuse_others(change.after, "changed")
        result.statements.append(f"{alter} {action}")
        attributes = tuple((0, attribute, kind) for attribute, kind in present.items())
        self._target_types[change.after.full_name] = replace(composite, attributes=attributes)


def _schema_sql(type_: RelationName) -> str:
    return f"create schema if not exists {quote_identifier(type_.namespace)}"


def columns_of(columns: Iterable[DefinedColumn], type_name: str) -> list[DefinedColumn]:
    """Return the columns of type *type_name*, or of its array type."""
    return [column for column in columns if base_type(column.type) == type_name]


def _sorts_alike(enum: DefinedType, present_enum: DefinedType) -> bool:
    """Whether two enums have their common labels in the same order."""
    labels, present = ([text for _, text in e.labels] for e in (enum, present_enum))
    return [e for e in labels if e in present] == [e for e in present if e in labels]


def _alter(type_: DefinedType) -> str:
    return f"alter {'domain' if type_.kind == 'd' else 'type'} {_quoted(type_)}"


def _quoted(type_: DefinedType) -> str:
    return quote_qualified(type_.namespace, type_.name)


def _check(text: str) -> str:
    return text.removesuffix(NOT_VALID)
