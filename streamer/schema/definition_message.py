"""Messages about a table's definition, and the definition after such a message.

A message contains the state of a table, and names the columns, objects and types that the
transaction changed. A second kind of message names the objects that a command dropped. The
unchanged parts of a state are a snapshot: a concurrent session may commit before or after. So the
stored definition takes precedence, and the absence of an object does not prove a drop.

If stored and described state differ in such a part, a message may also have been lost. Then the
definition is in doubt, and streamer requests a complete state, which arrives at a later place in
the stream. Until then, `with_needed_parts` finds the parts that a row of the stream needs. Pure.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlKind
from streamer.schema.indexes_constraints_types import DefinedObject, DefinedType, type_difference
from streamer.schema.partitions import ROOT, Partition
from streamer.schema.source_definition import DefinedColumn, SourceDefinition, under_new_names

BASELINE: Final = "BASELINE"
ALTER_TABLE: Final = "ALTER TABLE"
UNPUBLISHED: Final = "unpublished"
"""The whole message of a command on a table that streamer does not publish.

Any role may write such a message. The message has no names, and only makes streamer check for new
tables.
"""
K = TypeVar("K")
V = TypeVar("V")
Part = int | str
"""The OID of an index, a constraint or a partition, the qualified name of an index, or a type."""


@dataclass(frozen=True, slots=True)
class ChangedParts:
    """The parts of a state that the transaction changed.

    ``is_fresh``: each command of the transaction sees all earlier commits.
    """

    columns: frozenset[int]
    objects: frozenset[int]
    types: frozenset[int]
    is_fresh: bool

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        columns, objects, types = (frozenset(fields[n]) for n in ("columns", "objects", "types"))
        return cls(columns, objects, types, fields["is_fresh"])


@dataclass(frozen=True, slots=True)
class Dropped:
    """The parts of any tables that a command dropped; ``partitions``: dropped or detached
    partitions.

    ``columns`` and ``defaults``: the table's OID and the column's number. ``indexes``: schema and
    name, because REINDEX CONCURRENTLY fires no event trigger on PostgreSQL 16 and older.
    """

    objects: frozenset[int] = frozenset()
    indexes: frozenset[tuple[str, str]] = frozenset()
    columns: frozenset[tuple[int, int]] = frozenset()
    defaults: frozenset[tuple[int, int]] = frozenset()
    partitions: frozenset[int] = frozenset()
    types: frozenset[int] = frozenset()

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        return cls(
            frozenset(fields.get("objects") or ()),
            frozenset((schema, name) for schema, name in fields.get("indexes") or ()),
            frozenset((table, number) for table, number in fields.get("columns") or ()),
            frozenset((table, number) for table, number in fields.get("defaults") or ()),
            frozenset(oid for oid in fields.get("partitions") or () if oid is not None),
            frozenset(fields.get("types") or ()),
        )

    def concerns(self, relid: int | None, parts: Collection[Part]) -> bool:
        """Whether a part of a table was dropped, but not the table. *parts*: its parts."""
        if relid in self.objects:
            return False
        if any(table == relid for table, _ in (*self.columns, *self.defaults)):
            return True
        names = [*(index_part(*index) for index in self.indexes), *map(type_part, self.types)]
        return not self.objects.isdisjoint(parts) or any(name in parts for name in names)


def index_part(namespace: str, name: str) -> str:
    """Return the part for an index."""
    return f"{namespace}.{name}"


def type_part(oid: int) -> str:
    """Return the part for a type, also for a type that no column uses any more."""
    return f"type {oid}"


@dataclass(frozen=True, slots=True)
class DefinitionMessage:
    """The state of a table after a command at the source, or the objects that a command dropped.

    ``relid``: None if the message names no table. ``tag``: the command tag; `BASELINE` for a state
    that no command preceded. ``query``: the text of the statement. ``changed``: None for a complete
    state. ``known``: the OIDs and numbers that streamer knew when it requested the state.
    """

    relid: int | None
    namespace: str
    name: str
    tag: str
    query: str
    definition: SourceDefinition | None = field(default=None, repr=False)
    changed: ChangedParts | None = None
    dropped: Dropped = Dropped()
    known: Mapping[str, Sequence[int]] | None = None
    is_made: bool = False
    """The target already has the definition, because a script for both sides made the change."""

    @classmethod
    def parse(cls, content: bytes, token: str | None = None) -> "DefinitionMessage | None":
        """Read a message: the subtransaction, the token and the JSON, with a space between them.

        Return None unless the message has *token*. Without *token*, an earlier call has checked the
        message.
        """
        _, _, payload = content.partition(b" ")
        message_token, _, text = payload.partition(b" ")
        if token is not None and message_token != token.encode():
            return None
        fields = json.loads(text)
        relation = fields.get("relation") or {}
        changed_fields, definition = relation.pop("own", None), None
        if "columns" in relation:
            definition = SourceDefinition.of(relation)
        return cls(
            relation.get("oid"),
            relation.get("namespace") or "",
            relation.get("name") or "",
            fields["tag"],
            fields["query"] or "",
            definition,
            None if changed_fields is None else ChangedParts.of(changed_fields),
            Dropped.of(fields.get("dropped") or {}),
            fields.get("known"),
            fields.get("is_made", False),
        )

    @property
    def relation_name(self) -> RelationName:
        return RelationName(self.namespace, self.name)

    @property
    def computes_values(self) -> bool:
        """Whether the statement may have computed a column's values in an unknown way."""
        return re.search(r"\busing\b", self.query, re.IGNORECASE) is not None

    @property
    def parts(self) -> set[Part]:
        """The parts of the table that a later command may drop without naming the table."""
        return set() if self.definition is None else parts_of(self.definition, self.namespace)


def with_dropped(content: bytes, dropped: bytes) -> bytes:
    """Return message *content* with the dropped parts of message *dropped* added."""
    start = content.index(b"{")  # the token has no brace
    fields, more = json.loads(content[start:]), json.loads(dropped[dropped.index(b"{") :])
    fields["dropped"] = {**(fields.get("dropped") or {}), **more["dropped"]}
    return content[:start] + json.dumps(fields).encode()


def as_made(content: bytes) -> bytes:
    """Return message *content* with the mark that the target already has the definition."""
    start = content.index(b"{")
    fields = {**json.loads(content[start:]), "is_made": True}
    return content[:start] + json.dumps(fields).encode()


def parts_of(definition: SourceDefinition, namespace: str) -> set[Part]:
    """Return the parts of a table of schema *namespace*, with its partitions and sequences."""
    objects, partitions = definition.objects or (), definition.partitions or ()
    return {
        *(part.oid for part in objects),
        *(index_part(namespace, part.name) for part in objects if part.is_index),
        *(part.oid for part in partitions),
        *(type_part(part.oid) for part in definition.types or ()),
        *(part.sequence.oid for part in definition.columns if part.sequence is not None),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The definition after a message; None if unknown. ``is_doubtful``: see the docstring of the
    module.
    """

    definition: SourceDefinition | None
    is_doubtful: bool = False


def definition_after(
    stored: SourceDefinition | None, message: DefinitionMessage, namespace: str, relid: int | None
) -> Outcome:
    """Return the definition after *message*; *stored* is the former definition.

    *namespace* and *relid* identify the table at the source.
    """
    reported, changed = message.definition, message.changed
    if stored is None or not stored.is_whole:
        if reported is not None and changed is None:
            return Outcome(reported)
        return Outcome(stored, is_doubtful=True)
    stored = _without(stored, message.dropped, namespace, relid)
    if reported is None:  # the message drops parts, or describes no columns
        return Outcome(stored, is_doubtful=message.relid is not None)
    if changed is None:
        return Outcome(_whole(stored, reported, message.known))
    return _merged(stored, reported, changed)


def _whole(
    stored: SourceDefinition, reported: SourceDefinition, seen: Mapping[str, Sequence[int]] | None
) -> SourceDefinition:
    """Return a complete state, with the parts that were added since the request."""
    seen = seen or {}
    columns, objects = seen.get("columns", ()), seen.get("objects", ())
    partitions = seen.get("partitions", ())
    names = {(part.kind, part.name) for part in reported.objects or ()}
    return SourceDefinition.of_columns(
        _added(reported.columns, stored.columns, columns, lambda part: part.number),
        tuple(
            part
            for part in _added(reported.objects, stored.objects, objects, lambda part: part.oid)
            if part in (reported.objects or ()) or (part.kind, part.name) not in names
        ),
        _with_former(reported.types or (), stored.types or ()),
        _added(reported.partitions, stored.partitions, partitions, lambda part: part.oid),
        oid=reported.oid,
    )


def _added(
    reported: Iterable[V] | None, stored: Iterable[V] | None, seen: Collection[int], key: Any
) -> tuple[V, ...]:
    reported = tuple(reported or ())
    present = {key(part) for part in reported}
    return (*reported, *(e for e in stored or () if key(e) not in present and key(e) not in seen))


def _without(
    stored: SourceDefinition, dropped: Dropped, namespace: str, relid: int | None
) -> SourceDefinition:
    columns = [
        replace(part, default=None, default_mark=None)
        if (relid, part.number) in dropped.defaults
        else part
        for part in stored.columns
        if (relid, part.number) not in dropped.columns
    ]
    columns = [
        replace(part, sequence=None)
        if part.sequence is not None and part.sequence.oid in dropped.objects
        else part
        for part in columns
    ]
    objects = [
        part
        for part in stored.objects or ()
        if part.oid not in dropped.objects
        and not (part.is_index and (namespace, part.name) in dropped.indexes)
    ]
    return replace(
        stored,
        columns=tuple(columns),
        objects=tuple(objects),
        partitions=_staying(stored.partitions or (), dropped.objects | dropped.partitions),
        types=tuple(part for part in stored.types or () if part.oid not in dropped.types),
    )


def _staying(partitions: Sequence[Partition], oids: Collection[int]) -> tuple[Partition, ...]:
    """Return *partitions* without the partitions in *oids* and their descendants; parents first."""
    removed = {
        partition.oid
        for partition in partitions
        if partition.bound is not None and partition.oid in oids
    }
    staying = []
    for partition in partitions:
        if partition.oid in removed or (partition.parent != ROOT and partition.parent in removed):
            removed.add(partition.oid)
        else:
            staying.append(partition)
    return tuple(staying)


def _merged(stored: SourceDefinition, reported: SourceDefinition, changed: ChangedParts) -> Outcome:
    types, doubts = _types(stored.types or (), reported.types or (), changed)
    renames = type_difference(stored.types or (), types)
    # If a sequence moves to a different column, the message names only the column that gets the
    # sequence. So the column that loses the sequence counts as changed, too.
    serials = [
        part.sequence.oid
        for part in reported.columns
        if part.number in changed.columns and part.sequence
    ]
    losers = {
        part.number for part in stored.columns if part.sequence and part.sequence.oid in serials
    }
    columns, is_doubtful = _chosen(
        {part.number: part for part in under_new_names(stored, renames).columns},
        {part.number: part for part in reported.columns},
        changed.columns | losers,
    )
    doubts |= is_doubtful
    replaced = {
        (part.kind, part.name): part.oid
        for part in reported.objects or ()
        if part.oid in changed.objects
    }
    absorbed = {
        part.index.oid
        for part in reported.objects or ()
        if part.oid in changed.objects and part.index is not None
    }
    objects, is_doubtful = _chosen(
        {
            part.oid: part
            for part in stored.objects or ()
            if replaced.get((part.kind, part.name), part.oid) == part.oid
            and not (part.is_index and part.oid in absorbed)
        },
        {part.oid: part for part in reported.objects or ()},
        changed.objects,
    )
    doubts |= is_doubtful
    joined = reported.partitions or ()
    came = {part.oid for part in joined}
    partitions = (*(part for part in stored.partitions or () if part.oid not in came), *joined)
    definition = SourceDefinition.of_columns(
        columns.values(), tuple(objects.values()), types, partitions, oid=reported.oid
    )
    return Outcome(definition, doubts)


def _chosen(
    stored: Mapping[K, V], reported: Mapping[K, V], changed: Collection[K]
) -> tuple[dict[K, V], bool]:
    """Return the *changed* parts as *reported* and all other parts as *stored*, and whether the
    result differs from *reported*.
    """
    chosen = {**stored, **{key: part for key, part in reported.items() if key in changed}}
    return chosen, chosen != dict(reported)


def _types(
    stored: Sequence[DefinedType], reported: Sequence[DefinedType], changed: ChangedParts
) -> tuple[tuple[DefinedType, ...], bool]:
    """Return the types after a message: `_chosen` for types that a table may share."""
    former = {kind.oid: kind for kind in stored}
    types, is_doubtful = [], False
    for now in reported:
        was = former.pop(now.oid, None)
        if was is None:
            types.append(now)
        elif now.oid in changed.types:
            types.append(now if changed.is_fresh else _united(was, now))
            is_doubtful |= not changed.is_fresh
        else:
            types.append(was)
            is_doubtful |= was != now
    return _with_former(types, former.values()), is_doubtful


def _with_former(
    types: Sequence[DefinedType], former: Iterable[DefinedType]
) -> tuple[DefinedType, ...]:
    """Return *types* with the *former* types that the source still has, as far as known."""
    names, oids = ({getattr(e, n) for e in types} for n in ("full_name", "oid"))
    return (*types, *(e for e in former if e.full_name not in names and e.oid not in oids))


def _united(was: DefinedType, reported: DefinedType) -> DefinedType:
    """Return a type with the labels and parts that concurrent sessions have added since its
    snapshot.
    """
    labels = list(reported.labels)
    present = {oid for oid, _ in labels}
    for position, label in enumerate(was.labels):
        if label[0] not in present:
            earlier = {oid for oid, _ in was.labels[:position]}
            places = [place for place, entry in enumerate(labels) if entry[0] in earlier]
            labels.insert(max(places, default=-1) + 1, label)
            present.add(label[0])
    checks = {oid: (oid, name, text) for oid, name, text in (*was.checks, *reported.checks)}
    attributes = {n: (n, name, text) for n, name, text in (*was.attributes, *reported.attributes)}
    return replace(
        reported,
        labels=tuple(labels),
        checks=tuple(checks[oid] for oid in sorted(checks)),
        attributes=tuple(attributes[number] for number in sorted(attributes)),
    )


# ---- rows that need parts without a message ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """The evidence of refused rows about the definition at that place of the stream.

    ``relations``: the columns of each RELATION message of the rows, in order, with their types as
    far as known. ``may_have``: whether a row may contain a label of an enum. ``eases``: the kinds
    of changes that streamer may make early, because they only let more rows in.
    ``attribute_counts``: the numbers of attributes that composite values have, by type.
    """

    relations: Sequence[Mapping[str, str | None]]
    may_have: Callable[[str], bool]
    eases: Collection[DdlKind]
    attribute_counts: Mapping[int, Collection[int]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {name for relation in self.relations for name in relation}

    def has_type(self, column: DefinedColumn) -> bool:
        """Whether each RELATION message has *column* with its type."""
        return all(relation.get(column.name) == column.type for relation in self.relations)

    def follows(self, definition: SourceDefinition) -> bool:
        """Whether each RELATION message lists the columns in the attnum order of *definition*."""
        numbers = definition.numbers
        return all(
            places == sorted(places)
            for relation in self.relations
            for places in [[numbers[name] for name in relation if name in numbers]]
        )


def with_needed_parts(
    stored: SourceDefinition, reported: SourceDefinition, evidence: RowEvidence
) -> SourceDefinition:
    """Return the stored definition with the parts of the present definition that refused rows need.

    The present definition *reported* may be ahead of the rows. So use a part of *reported* only
    where *evidence* agrees, or where the change only admits more rows.
    """
    columns = _needed_columns(stored, reported, evidence)
    if len({column.name for column in columns}) < len(columns):
        return stored
    has_changed = [*stored.columns] != columns
    return SourceDefinition.of_columns(
        columns,
        _easing_objects(stored.objects or (), reported.objects or (), evidence),
        _needed_types(stored.types or (), reported.types or (), evidence, takes_new=has_changed),
        _more_partitions(stored.partitions or (), reported.partitions or (), evidence),
        oid=stored.oid,
    )


def _needed_columns(
    stored: SourceDefinition, reported: SourceDefinition, evidence: RowEvidence
) -> list[DefinedColumn]:
    names, present = evidence.names, {item.number: item for item in reported.columns}
    are_traded = not evidence.follows(stored) and evidence.follows(reported)
    columns = []
    for column in stored.columns:
        now = present.pop(column.number, None)
        if now is None:
            if column.name in names or column.generated:
                columns.append(column)
            continue
        if now.name in names and (column.name not in names or are_traded):
            column = replace(column, name=now.name)
        if column.name == now.name and evidence.has_type(now):
            column = replace(column, type=now.type, collation=now.collation)
        if DdlKind.DROP_NOT_NULL in evidence.eases:
            column = replace(column, not_null=column.not_null and now.not_null)
        columns.append(column)
    used_names = {item.name for item in columns}
    return columns + [e for e in present.values() if e.name in names and e.name not in used_names]


def _easing_objects(
    stored: Sequence[DefinedObject], reported: Sequence[DefinedObject], evidence: RowEvidence
) -> tuple[DefinedObject, ...]:
    """Return *stored* without the constraints and unique indexes that the source has dropped by
    now, as far as *evidence* permits.
    """
    oids = {part.oid for item in reported for part in (item, item.index) if part is not None}
    names = {(item.kind, item.name) for item in reported}

    def is_gone(part: DefinedObject) -> bool:
        kind = DdlKind.DROP_INDEX if part.is_index else DdlKind.DROP_CONSTRAINT
        is_shown = part.oid in oids or (part.kind, part.name) in names
        return part.binds and part.kind != "p" and kind in evidence.eases and not is_shown

    return tuple(part for part in stored if not is_gone(part))


def _needed_types(
    stored: Sequence[DefinedType],
    reported: Sequence[DefinedType],
    evidence: RowEvidence,
    *,
    takes_new: bool,
) -> tuple[DefinedType, ...]:
    """Return the types with labels that rows may have, and without dropped checks.

    *takes_new*: include types that only the present definition has.
    """
    former = {kind.oid: kind for kind in stored}
    types = []
    for now in reported:
        was = former.pop(now.oid, None)
        if was is None:
            if takes_new:
                types.append(now)
            continue
        former_labels = dict(was.labels)
        labels = [
            (oid, label if evidence.may_have(label) else former_labels[oid])
            for oid, label in now.labels
            if oid in former_labels or evidence.may_have(label)
        ]
        needed = replace(
            was,
            labels=_united(was, replace(now, labels=tuple(labels))).labels,
            attributes=_needed_attributes(was, now, evidence),
        )
        if DdlKind.CHANGE_DOMAIN in evidence.eases:
            present_checks = {oid for oid, _, _ in now.checks}
            checks = tuple(check for check in was.checks if check[0] in present_checks)
            not_null = was.not_null and now.not_null
            needed = replace(needed, checks=checks, not_null=not_null)
        types.append(needed)
    return (*types, *former.values())


def _needed_attributes(
    was: DefinedType, now: DefinedType, evidence: RowEvidence
) -> tuple[tuple[int, str, str], ...]:
    """Return the attributes of a composite type that all values of the rows have.

    Values contain no names of attributes, so only the number of attributes is evidence.
    """
    counts = set(evidence.attribute_counts.get(now.oid, ()))
    attributes = now.attributes[: max(counts, default=0)]
    numbers = {number for number, _, _ in attributes}
    has_former = all(number in numbers for number, _, _ in was.attributes)
    is_shown = counts == {len(attributes)} and counts != {len(was.attributes)}
    return (
        attributes if is_shown and (has_former or attributes == now.attributes) else was.attributes
    )


def _more_partitions(
    stored: tuple[Partition, ...], reported: tuple[Partition, ...], evidence: RowEvidence
) -> tuple[Partition, ...]:
    """Return the *reported* partitions if these include all stored partitions. Otherwise a new
    partition may have the bounds of a removed partition, so return *stored*.
    """
    is_more = {partition.oid for partition in stored} <= {partition.oid for partition in reported}
    return reported if stored and is_more and DdlKind.ATTACH_PARTITION in evidence.eases else stored
