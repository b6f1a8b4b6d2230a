"""Changes of a source table's indexes and constraints, for its target. Pure.

A drop or a rename is a statement in the transaction of its place in the stream. Later rows may need
it: those that a dropped constraint would refuse. An addition is planned, and made beside the stream
without long locks, as the definitions of a copied table are (`streamer.sync.target_definitions`).

The target gets what `create` asks for: indexes, unique and exclusion constraints with `keys`,
checks and foreign keys with `all`. A primary key comes with every level.

In the table of several tenants, one that has a constraint must not bind another that has not. So
the last tenant that gets a constraint or a unique index adds it, and the first one that drops it
drops it. Any other index is there from the first tenant that has it to the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from streamer.definitions.model import ConstraintDefinition, IndexDefinition, TableDefinition
from streamer.definitions.planned import ObjectKind, Places, Planned, TargetPlace
from streamer.definitions.render import (
    Renderer,
    is_of_open_versions,
    other_name,
    versions_name,
    without_acting,
)
from streamer.mapping.definition import SourceDefinition
from streamer.mapping.names import RelationName
from streamer.mapping.objects import INDEX, DefinedObject, ObjectChange
from streamer.mapping.options import Create, DdlKind, TableType
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.target.conventions import HISTORY_ID

KINDS: Final = {
    INDEX: (ObjectKind.INDEX,),
    "p": (ObjectKind.UNIQUE, ObjectKind.INDEX),
    "u": (ObjectKind.UNIQUE, ObjectKind.INDEX),
    "x": (ObjectKind.EXCLUSION, ObjectKind.INDEX),
    "c": (ObjectKind.CHECK,),
    "f": (ObjectKind.FOREIGN_KEY,),
}
"""What a plan may call an object; rows of a history are not unique, so there it is an index."""


def claims(create: Create, kind: str) -> bool:
    """Whether the target has objects of *kind*: `INDEX`, or pg_constraint.contype."""
    if kind == "p":
        return True
    if kind in "cf":
        return create is Create.ALL
    return create is not Create.COLUMNS


@dataclass(slots=True)
class ObjectTranslation:
    """``statements``: to run in place. ``planned``: to make beside the stream. ``ended``: kinds and
    names of plans that are void now. ``reasons``: why something is left out.
    """

    statements: list[str] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    ended: list[tuple[ObjectKind, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class ObjectTranslator:
    """Translates changes for the target of one relation.

    *definition*: the source's table after them. *there*: the target's table. *others*: the
    definitions of other sources of the target. *acts*: foreign keys would act on changes there.
    """

    def __init__(
        self,
        place: TargetPlace,
        places: Places,
        definition: TableDefinition,
        there: TableDefinition,
        *,
        others: Sequence[SourceDefinition] = (),
        taken: frozenset[str] = frozenset(),
        acts: bool = False,
    ) -> None:
        self._place = place
        self._acts = acts
        self._definition = definition
        self._there = there
        self._others = others
        self._renderer = Renderer(definition, place, places, taken)
        self._indexes = {index.name: index for index in there.indexes}
        self._constraints = {each.name: each for each in there.constraints}

    def translate(self, changes: Sequence[ObjectChange]) -> ObjectTranslation:
        """Return the statements and plans for *changes*."""
        found = ObjectTranslation()
        for change in changes:
            about = change.before or change.after
            assert about is not None
            if not claims(self._place.mapping.rule.create, about.kind):
                continue
            match change.kind:
                case DdlKind.DROP_INDEX | DdlKind.DROP_CONSTRAINT:
                    self._drop(about, found)
                case DdlKind.RENAME_INDEX | DdlKind.RENAME_CONSTRAINT if change.after is not None:
                    self._rename(about, change.after, found)
                case _ if change.after is not None:
                    self._add(change.after, found)
        return found

    def plan_lost(
        self, objects: Sequence[DefinedObject], lost: frozenset[str]
    ) -> ObjectTranslation:
        """Return the plans for those of the source's *objects* whose names are among *lost*."""
        found = ObjectTranslation()
        for each in objects:
            is_claimed = claims(self._place.mapping.rule.create, each.kind)
            if is_claimed and not lost.isdisjoint(self._names(each.name)):
                self._add(each, found)
        return found

    def planned(self, kind: ObjectKind, name: str) -> Planned | None:
        """Return the plan for an object that the source has; None if it has none of that name."""
        for index in self._definition.indexes:
            if index.constraint is None and index.name == name and kind is ObjectKind.INDEX:
                return self._renderer.index(index)
        for key in self._renderer.primary_key():
            if (key.kind, key.name) == (kind, name):
                return key
        for constraint in self._definition.constraints:
            is_it = constraint.name == name and kind in KINDS[constraint.kind]
            if is_it and constraint.kind != "p":
                planned = self._renderer.constraint(constraint)
                return without_acting(planned) if self._acts else planned
        return None

    # ---- one change ----------------------------------------------------------------------------

    def _add(self, new: DefinedObject, found: ObjectTranslation) -> None:
        lacking = new.binds and any(not _has(other, new) for other in self._others)
        if lacking:
            found.reasons.append(f'"{new.name}" waits until every source of the table has it')
            return
        if new.kind == "p":
            if self._is_history and (index := self._index(new)) is not None:
                # It was unique at the source and became the key. Here it is not unique.
                found.statements.append(f"drop index {self._quoted(index.name)}")
                del self._indexes[index.name]
            if not (self._row_keys if self._is_history else self._primary_key):
                found.planned += self._renderer.primary_key()
            return
        for kind in KINDS[new.kind]:
            planned = self.planned(kind, new.name)
            if planned is not None:
                if not self._is_there(planned, new):
                    found.planned.append(planned)
                return

    def _is_there(self, planned: Planned, new: DefinedObject) -> bool:
        constraint = self._constraints.get(planned.name)
        if constraint is not None:
            return constraint.validated or not new.is_valid
        index = self._indexes.get(planned.name)
        return planned.kind is ObjectKind.INDEX and index is not None and index.is_valid

    def _drop(self, old: DefinedObject, found: ObjectTranslation) -> None:
        found.ended += [(kind, old.name) for kind in KINDS[old.kind]]
        if not old.binds and any(_has(other, old) for other in self._others):
            return
        if old.kind == "p" and self._is_history:
            versions = versions_name(old.name, self._place.mapping.target)
            found.ended += [(ObjectKind.INDEX, versions), (ObjectKind.EXCLUSION, versions)]
            found.statements += self._drop_row_keys()
            return
        constraint = self._constraint(old)
        if constraint is not None:
            quoted = quote_identifier(constraint.name)
            found.statements.append(f"alter table {self._place.quoted} drop constraint {quoted}")
            del self._constraints[constraint.name]
            self._indexes.pop(constraint.index or "", None)
        elif (index := self._index(old)) is not None:
            found.statements.append(f"drop index {self._quoted(index.name)}")
            del self._indexes[index.name]

    def _rename(self, old: DefinedObject, new: DefinedObject, found: ObjectTranslation) -> None:
        found.ended += [(kind, old.name) for kind in KINDS[old.kind]]
        if any(_has(other, old) for other in self._others):
            self._add(new, found)
            return
        name = self._renderer.free(new.name)
        if self._others and (name in self._constraints or name in self._indexes):
            self._drop(old, found)  # the tenant before brought the object under its new name
            return
        constraint, index = self._constraint(old), self._index(old)
        quoted = quote_identifier(name)
        if constraint is not None:
            if name not in self._constraints:
                former = quote_identifier(constraint.name)
                found.statements.append(
                    f"alter table {self._place.quoted} rename constraint {former} to {quoted}"
                )
                del self._constraints[constraint.name]
                self._constraints[name] = replace(constraint, name=name)
                if (own := self._indexes.pop(constraint.index or "", None)) is not None:
                    self._constraints[name] = replace(constraint, name=name, index=name)
                    self._indexes[name] = replace(own, name=name, constraint=name)
        elif index is not None and name not in self._indexes:
            found.statements.append(f"alter index {self._quoted(index.name)} rename to {quoted}")
            del self._indexes[index.name]
            self._indexes[name] = replace(index, name=name)
        # A builder may have died with half of it made, or be under way. The plan of the former name
        # ends here, so the rest has to be planned under the new one.
        self._add(new, found)

    def _drop_row_keys(self) -> list[str]:
        """Return the statements that let a history have several open versions of a key."""
        keys = self._row_keys
        if self._primary_key is not None and self._primary_key.columns != (HISTORY_ID,):
            keys.append(self._primary_key)
        statements = []
        for each in keys:
            if isinstance(each, ConstraintDefinition):
                name = quote_identifier(each.name)
                statements.append(f"alter table {self._place.quoted} drop constraint {name}")
                del self._constraints[each.name]
                self._indexes.pop(each.index or "", None)
            else:
                statements.append(f"drop index {self._quoted(each.name)}")
                del self._indexes[each.name]
        return statements

    # ---- the target's objects ------------------------------------------------------------------

    @property
    def _row_keys(self) -> list[ConstraintDefinition | IndexDefinition]:
        """The indexes and constraints of a history by which a key has one open version."""
        indexes = [each for each in self._indexes.values() if is_of_open_versions(each)]
        found: list[ConstraintDefinition | IndexDefinition] = []
        for index in indexes:
            constraint = self._constraints.get(index.constraint or "")
            if constraint is not None or index.is_unique:
                found.append(constraint or index)
        return found

    @property
    def _is_history(self) -> bool:
        return self._place.mapping.type is TableType.HISTORY

    @property
    def _is_clone(self) -> bool:
        return self._place.mapping.type is TableType.CLONE

    @property
    def _primary_key(self) -> ConstraintDefinition | None:
        return next((c for c in self._constraints.values() if c.kind == "p"), None)

    def _constraint(self, of: DefinedObject) -> ConstraintDefinition | None:
        """Return the target's constraint for a source's object."""
        if of.kind == "p":  # its name may come from the target table
            return self._primary_key if self._is_clone else None
        for name in self._names(of.name):
            found = self._constraints.get(name)
            if found is not None and found.kind == of.kind:
                return found
        return None

    def _index(self, of: DefinedObject) -> IndexDefinition | None:
        for name in self._names(of.name):
            found = self._indexes.get(name)
            if found is not None and found.constraint is None:
                return found
        return None

    def _names(self, name: str) -> tuple[str, str]:
        return name, other_name(name, self._place.mapping.target)

    def _quoted(self, name: str) -> str:
        return quote_qualified(self._place.mapping.target.namespace, name)


def _has(other: SourceDefinition, wanted: DefinedObject) -> bool:
    """Whether another source of the table has an object like *wanted*."""
    return any(
        each.kind == wanted.kind and each.name == wanted.name for each in other.objects or ()
    )


def referenced(definition: TableDefinition) -> set[RelationName]:
    """Return the tables that the foreign keys of a table refer to."""
    return {c.referenced for c in definition.constraints if c.referenced is not None}
