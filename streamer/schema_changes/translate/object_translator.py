"""Changes of a source table's indexes and constraints, for its target. Pure.

A drop or a rename runs at its position in the stream, because a dropped constraint would refuse
later rows. An addition is planned, and built beside the stream without long locks, like the
definitions of a copied table (`streamer.schema_changes.target_definitions`).

`create` decides which objects the target gets: indexes, unique and exclusion constraints with
`keys`, checks and foreign keys with `all`. Every level includes the primary key.

In the table of several tenants, a constraint of a single tenant must not bind its peers. So the
target has a constraint or a unique index while all tenants have that object. A plain index exists
while any tenant has that index.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from streamer.mapping.rule_options import Create, DdlKind, TableType
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.indexes_constraints_types import (
    INDEX,
    ConstraintDefinition,
    DefinedObject,
    IndexDefinition,
    ObjectChange,
    constraints_of,
)
from streamer.schema.planned_definition import (
    ObjectKind,
    Places,
    Planned,
    TargetLimits,
    TargetPlace,
)
from streamer.schema.render_definitions import (
    Renderer,
    is_of_open_versions,
    other_name,
    versions_name,
)
from streamer.schema.source_definition import SourceDefinition
from streamer.schema.table_definition import TableDefinition

KINDS: Final = {
    INDEX: (ObjectKind.INDEX,),
    "p": (ObjectKind.UNIQUE, ObjectKind.INDEX),
    "u": (ObjectKind.UNIQUE, ObjectKind.INDEX),
    "x": (ObjectKind.EXCLUSION, ObjectKind.INDEX),
    "c": (ObjectKind.CHECK,),
    "f": (ObjectKind.FOREIGN_KEY,),
}
"""The kinds of an object in a plan. In a history, keys are not unique, so an index takes the place
of the constraint.
"""


def is_created(create: Create, kind: str) -> bool:
    """Whether the target contains objects of *kind*: `INDEX`, or pg_constraint.contype."""
    if kind == "p":
        return True
    if kind in "cf":
        return create is Create.ALL
    return create is not Create.COLUMNS


@dataclass(slots=True)
class ObjectTranslation:
    """``statements``: run at the position of the change. ``planned``: definitions to build beside
    the stream. ``ended``: kinds and names of obsolete plans. ``reasons``: why the target gets no
    such object.
    """

    statements: list[str] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    ended: list[tuple[ObjectKind, str]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class ObjectTranslator:
    """Translates changes for the target of one relation.

    *definition*: the source's table after the changes. *target*: the target's table. *peers*: the
    definitions of peer sources. *limits*: of the target; None for no limits.
    """

    def __init__(
        self,
        place: TargetPlace,
        places: Places,
        definition: TableDefinition,
        target: TableDefinition,
        *,
        peers: Sequence[SourceDefinition] = (),
        taken: frozenset[str] = frozenset(),
        limits: TargetLimits | None = None,
    ) -> None:
        self._place = place
        self._alter = f"alter table {place.quoted}"
        self._limits = limits
        self._definition = definition
        self._peers = peers
        self._renderer = Renderer(definition, place, places, taken)
        self._present = list(target.objects)
        """The target's objects, after the statements so far."""

    def translate(self, changes: Sequence[ObjectChange]) -> ObjectTranslation:
        """Return the statements and plans for *changes*."""
        result = ObjectTranslation()
        for change in changes:
            about = change.before or change.after
            assert about is not None
            if not is_created(self._place.mapping.rule.create, about.kind):
                continue
            match change.kind:
                case DdlKind.DROP_INDEX | DdlKind.DROP_CONSTRAINT:
                    self._drop(about, result)
                case DdlKind.RENAME_INDEX | DdlKind.RENAME_CONSTRAINT if change.after is not None:
                    self._rename(about, change.after, result)
                case _ if change.after is not None:
                    self._add(change.after, result)
        return result

    def plan_lost(
        self, objects: Sequence[DefinedObject], lost: frozenset[str]
    ) -> ObjectTranslation:
        """Return the plans for the source's *objects* with names in *lost*."""
        result = ObjectTranslation()
        for lost_object in objects:
            is_included = is_created(self._place.mapping.rule.create, lost_object.kind)
            if is_included and not lost.isdisjoint(self._names(lost_object.name)):
                self._add(lost_object, result)
        return result

    def planned(self, kind: ObjectKind, name: str) -> Planned | None:
        """Return the plan for an object of the source; None if the source has no object of that
        name.
        """
        for key in self._renderer.primary_key():
            if (key.kind, key.name) == (kind, name):
                return key
        for defined in self._definition.objects:
            if defined.name != name or kind not in KINDS[defined.kind] or defined.kind == "p":
                continue
            if isinstance(defined, IndexDefinition):
                planned = self._renderer.index(defined)
            else:
                planned = self._renderer.constraint(defined)
            return planned if self._limits is None else self._limits.apply(planned)
        return None

    # ---- one change ----------------------------------------------------------------------------

    def _add(self, new: DefinedObject, result: ObjectTranslation) -> None:
        lacking = new.binds and any(not _has(peer, new) for peer in self._peers)
        if lacking:
            result.reasons.append(
                f'index or constraint "{new.name}" waits until every source of the table has made '
                "the change"
            )
            return
        if new.kind == "p":
            if self._is_history and (index := self._find(new)) is not None:
                # A unique index of the source became the key, but the target's index is not unique.
                self._remove(index, result)
            if not (self._row_keys if self._is_history else self._primary_key):
                result.planned += self._renderer.primary_key()
            return
        planned = self.planned(KINDS[new.kind][0], new.name)
        if planned is not None and not self._has_planned(planned, new):
            result.planned.append(planned)

    def _has_planned(self, planned: Planned, new: DefinedObject) -> bool:
        for present in self._present:
            if present.name == planned.name and not present.is_index:
                return present.is_valid or not new.is_valid
        return planned.kind is ObjectKind.INDEX and any(
            present.name == planned.name and present.is_valid for present in self._present
        )

    def _drop(self, old: DefinedObject, result: ObjectTranslation) -> None:
        result.ended += [(kind, old.name) for kind in KINDS[old.kind]]
        if not old.binds and any(_has(peer, old) for peer in self._peers):
            return
        if old.kind == "p" and self._is_history:
            versions = versions_name(old.name, self._place.mapping.target)
            result.ended += [(ObjectKind.INDEX, versions), (ObjectKind.EXCLUSION, versions)]
            for key in self._keys_of_versions():
                self._remove(key, result)
        elif (present := self._find(old)) is not None:
            self._remove(present, result)

    def _rename(self, old: DefinedObject, new: DefinedObject, result: ObjectTranslation) -> None:
        result.ended += [(kind, old.name) for kind in KINDS[old.kind]]
        if any(_has(peer, old) for peer in self._peers):
            self._add(new, result)
            return
        name, present = self._renderer.free(new.name), self._find(old)
        if self._peers and any(o.name == name for o in self._present):
            self._drop(old, result)  # the previous tenant created the object under its new name
            return
        named = [o for o in self._present if o.name == name]
        if present is not None and not any(_prevents_name(o, present) for o in named):
            quoted = quote_identifier(name)
            result.statements.append(
                f"alter {self._quoted(present)} rename to {quoted}"
                if present.is_index
                else f"{self._alter} rename {self._quoted(present)} to {quoted}"
            )
            self._present.remove(present)
            self._present.append(replace(present, name=name))
        # A builder may have died half way, or may still run. The plan under the former name ends
        # here, so the rest needs a plan under the new name.
        self._add(new, result)

    def _remove(self, present: DefinedObject, result: ObjectTranslation) -> None:
        """Drop an object of the target."""
        prefix = "" if present.is_index else f"{self._alter} "
        result.statements.append(f"{prefix}drop {self._quoted(present)}")
        self._present.remove(present)

    # ---- the target's objects ------------------------------------------------------------------

    @property
    def _row_keys(self) -> list[DefinedObject]:
        """The indexes and constraints of a history that allow one open version of a key."""
        history = self._place.mapping.rule.history
        return [
            o
            for o in self._present
            if o.binds and o.index is not None and is_of_open_versions(o.index, history)
        ]

    def _keys_of_versions(self) -> list[DefinedObject]:
        """Return the objects that limit a history to one open version of a key."""
        key, history = self._primary_key, self._place.mapping.rule.history
        has_key = key is not None and {*key.columns} - {history.id, history.end}
        return self._row_keys + ([key] if key is not None and has_key else [])

    @property
    def _is_history(self) -> bool:
        return self._place.mapping.type is TableType.HISTORY

    @property
    def _primary_key(self) -> ConstraintDefinition | None:
        return next((c for c in constraints_of(self._present) if c.kind == "p"), None)

    def _find(self, source_object: DefinedObject) -> DefinedObject | None:
        """Return the target's counterpart of a source's object, or an index for a constraint."""
        if source_object.kind == "p" and self._place.mapping.type is TableType.CLONE:
            return self._primary_key  # whose name may come from the target table
        kinds = [source_object.kind] if source_object.kind != "p" else []
        kinds += [INDEX] if ObjectKind.INDEX in KINDS[source_object.kind] else []
        by_name = {(o.kind, o.name): o for o in self._present}
        names = ((kind, name) for kind in kinds for name in self._names(source_object.name))
        return next((by_name[name] for name in names if name in by_name), None)

    def _names(self, name: str) -> tuple[str, str]:
        return name, other_name(name, self._place.mapping.target)

    def _quoted(self, present: DefinedObject) -> str:
        if present.is_index:
            return f"index {quote_qualified(self._place.mapping.target.namespace, present.name)}"
        return f"constraint {quote_identifier(present.name)}"


def _prevents_name(item: DefinedObject, renamed: DefinedObject) -> bool:
    """Whether *item*, an object of the target, prevents *renamed* from using its name.

    Index names are unique in a schema, names of constraints in their table.
    """
    return item.index is not None if renamed.is_index else not item.is_index


def _has(peer: SourceDefinition, new: DefinedObject) -> bool:
    """Whether a peer has an object like *new*."""
    return any(item.kind == new.kind and item.name == new.name for item in peer.objects or ())
