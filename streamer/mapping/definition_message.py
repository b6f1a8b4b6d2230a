"""Messages about a table's definition, and the definition after one of them.

A message has the state of a table, and names the columns, objects and types that its transaction
has changed. Another message names the objects that a command has dropped. The rest of a state is
only a view: another session may have committed since, or be about to commit. So the stored
definition goes before it, and an absence counts for nothing.

Where the two differ in such a part, a message may also have been lost. The definition is in doubt
then: streamer has the source send a state that counts as a whole, at a later place of the stream.
Until that place, `explaining` finds the parts that a row of the stream needs. Pure.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

from streamer.mapping.definition import DefinedColumn, SourceDefinition, under_new_names
from streamer.mapping.names import RelationName
from streamer.mapping.objects import DefinedObject, DefinedType, type_difference
from streamer.mapping.options import DdlKind
from streamer.mapping.partitions import ROOT, Partition

BASELINE: Final = "BASELINE"
ALTER_TABLE: Final = "ALTER TABLE"
UNPUBLISHED: Final = "unpublished"
"""The whole message of a command on a table that streamer does not publish.

Every role may write such a message. It names nothing, and streamer only looks for new tables.
"""
K = TypeVar("K")
V = TypeVar("V")
Part = int | str
"""The OID of an index, a constraint or a partition, the qualified name of an index, or a type."""


@dataclass(frozen=True, slots=True)
class Own:
    """The parts of a state that the transaction itself has changed.

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
    """The parts that a command has dropped, of any table; ``partitions``: or detached.

    ``columns`` and ``defaults``: the table's OID and the column's number. ``indexes``: schema and
    name, because PostgreSQL 16 and older tell no event trigger of REINDEX CONCURRENTLY.
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
        """Whether it has a part of a table, and not the table itself. *parts*: of the table."""
        if relid in self.objects:
            return False
        if any(table == relid for table, _ in (*self.columns, *self.defaults)):
            return True
        names = [*(index_part(*each) for each in self.indexes), *map(type_part, self.types)]
        return not self.objects.isdisjoint(parts) or any(name in parts for name in names)


def index_part(namespace: str, name: str) -> str:
    """Return the part that is an index."""
    return f"{namespace}.{name}"


def type_part(oid: int) -> str:
    """Return the part that is a type, also one that no column has any more."""
    return f"type {oid}"


@dataclass(frozen=True, slots=True)
class DefinitionMessage:
    """The state of a table after a command at the source, or the objects that a command dropped.

    ``relid``: None if the message names no table. ``tag``: the command tag; `BASELINE` for a state
    that no command preceded. ``query``: the text of the statement. ``own``: None if the state
    counts as a whole. ``known``: the OIDs and numbers that streamer knew when it asked for it.
    """

    relid: int | None
    namespace: str
    name: str
    tag: str
    query: str
    definition: SourceDefinition | None = field(default=None, repr=False)
    described: dict[str, Any] = field(default_factory=dict, repr=False)
    """The indexes and constraints, as `streamer.definitions.read` takes them."""
    own: Own | None = None
    dropped: Dropped = Dropped()
    known: Mapping[str, Sequence[int]] | None = None
    is_made: bool = False
    """The target has the definition already: a script for both sides has made it."""

    @classmethod
    def parse(cls, content: bytes, token: str | None = None) -> "DefinitionMessage | None":
        """Read a message: the subtransaction, the token and the JSON, with a space between them.

        None unless it has *token*; without that, it was compared before.
        """
        _, _, rest = content.partition(b" ")
        given, _, text = rest.partition(b" ")
        if token is not None and given != token.encode():
            return None
        fields = json.loads(text)
        relation = fields.get("relation") or {}
        own, definition = relation.pop("own", None), None
        if "columns" in relation:
            definition = SourceDefinition.of(relation)
        return cls(
            relation.get("oid"),
            relation.get("namespace") or "",
            relation.get("name") or "",
            fields["tag"],
            fields["query"] or "",
            definition,
            {name: relation.get(name) or [] for name in ("indexes", "constraints")},
            None if own is None else Own.of(own),
            Dropped.of(fields.get("dropped") or {}),
            fields.get("known"),
            fields.get("is_made", False),
        )

    @property
    def relation_name(self) -> RelationName:
        return RelationName(self.namespace, self.name)

    @property
    def computes_values(self) -> bool:
        """Whether the statement may have computed a column's values in its own way."""
        return re.search(r"\busing\b", self.query, re.IGNORECASE) is not None

    @property
    def parts(self) -> set[Part]:
        """The parts of the table that a later command may drop without naming the table."""
        return set() if self.definition is None else parts_of(self.definition, self.namespace)


def with_dropped(content: bytes, dropped: bytes) -> bytes:
    """Return message *content* with the parts, too, that message *dropped* has."""
    start = content.index(b"{")  # no token has one
    fields, more = json.loads(content[start:]), json.loads(dropped[dropped.index(b"{") :])
    fields["dropped"] = {**(fields.get("dropped") or {}), **more["dropped"]}
    return content[:start] + json.dumps(fields).encode()


def as_made(content: bytes) -> bytes:
    """Return message *content* with the word that the target has the definition already."""
    start = content.index(b"{")
    fields = {**json.loads(content[start:]), "is_made": True}
    return content[:start] + json.dumps(fields).encode()


def parts_of(definition: SourceDefinition, namespace: str) -> set[Part]:
    """Return the parts of a table of schema *namespace*; its partitions and sequences, too."""
    objects, partitions = definition.objects or (), definition.partitions or ()
    return {
        *(each.oid for each in objects),
        *(index_part(namespace, each.name) for each in objects if each.is_index),
        *(each.oid for each in partitions),
        *(type_part(each.oid) for each in definition.types or ()),
        *(each.sequence.oid for each in definition.columns if each.sequence is not None),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The definition after a message; None if it is not known. ``is_doubtful``: see the module."""

    definition: SourceDefinition | None
    is_doubtful: bool = False


def definition_after(
    known: SourceDefinition | None, message: DefinitionMessage, namespace: str, relid: int | None
) -> Outcome:
    """Return the definition after *message*; *known* was the one before.

    *namespace* and *relid*: of the table at the source.
    """
    told, own = message.definition, message.own
    if known is None or not known.is_whole:
        if told is not None and own is None:
            return Outcome(told)
        return Outcome(known, is_doubtful=True)
    known = _without(known, message.dropped, namespace, relid)
    if told is None:  # the message drops parts, or describes no columns
        return Outcome(known, is_doubtful=message.relid is not None)
    if own is None:
        return Outcome(_whole(known, told, message.known))
    return _merged(known, told, own)


def _whole(
    known: SourceDefinition, told: SourceDefinition, seen: Mapping[str, Sequence[int]] | None
) -> SourceDefinition:
    """Return a state that counts as a whole, with the parts that have come since the request."""
    seen = seen or {}
    columns, objects = seen.get("columns", ()), seen.get("objects", ())
    partitions = seen.get("partitions", ())
    taken = {(each.kind, each.name) for each in told.objects or ()}
    return SourceDefinition.of_columns(
        _added(told.columns, known.columns, columns, lambda each: each.number),
        tuple(
            each
            for each in _added(told.objects, known.objects, objects, lambda each: each.oid)
            if each in (told.objects or ()) or (each.kind, each.name) not in taken
        ),
        _with_former(told.types or (), known.types or ()),
        _added(told.partitions, known.partitions, partitions, lambda each: each.oid),
        oid=told.oid,
    )


def _added(
    told: Iterable[V] | None, kept: Iterable[V] | None, seen: Collection[int], key: Any
) -> tuple[V, ...]:
    told = tuple(told or ())
    present = {key(each) for each in told}
    return (*told, *(e for e in kept or () if key(e) not in present and key(e) not in seen))


def _without(
    known: SourceDefinition, dropped: Dropped, namespace: str, relid: int | None
) -> SourceDefinition:
    columns = [
        replace(each, default=None, default_mark=None)
        if (relid, each.number) in dropped.defaults
        else each
        for each in known.columns
        if (relid, each.number) not in dropped.columns
    ]
    columns = [
        replace(each, sequence=None)
        if each.sequence is not None and each.sequence.oid in dropped.objects
        else each
        for each in columns
    ]
    objects = [
        each
        for each in known.objects or ()
        if each.oid not in dropped.objects
        and not (each.is_index and (namespace, each.name) in dropped.indexes)
    ]
    return replace(
        known,
        columns=tuple(columns),
        objects=tuple(objects),
        partitions=_staying(known.partitions or (), dropped.objects | dropped.partitions),
        types=tuple(each for each in known.types or () if each.oid not in dropped.types),
    )


def _staying(partitions: Sequence[Partition], gone: Collection[int]) -> tuple[Partition, ...]:
    """Return the partitions without those that are *gone*, and without theirs; parents first."""
    left = {each.oid for each in partitions if each.bound is not None and each.oid in gone}
    staying = []
    for each in partitions:
        if each.oid in left or (each.parent != ROOT and each.parent in left):
            left.add(each.oid)
        else:
            staying.append(each)
    return tuple(staying)


def _merged(known: SourceDefinition, told: SourceDefinition, own: Own) -> Outcome:
    types, doubts = _types(known.types or (), told.types or (), own)
    renames = type_difference(known.types or (), types)
    # A column loses the sequence that another one gets, and nothing marks that column.
    taken = [
        each.sequence.oid for each in told.columns if each.number in own.columns and each.sequence
    ]
    losers = {each.number for each in known.columns if each.sequence and each.sequence.oid in taken}
    columns, is_doubtful = _chosen(
        {each.number: each for each in under_new_names(known, renames).columns},
        {each.number: each for each in told.columns},
        own.columns | losers,
    )
    doubts |= is_doubtful
    replaced = {
        (each.kind, each.name): each.oid for each in told.objects or () if each.oid in own.objects
    }
    absorbed = {each.index_oid for each in told.objects or () if each.oid in own.objects}
    objects, is_doubtful = _chosen(
        {
            each.oid: each
            for each in known.objects or ()
            if replaced.get((each.kind, each.name), each.oid) == each.oid
            and not (each.is_index and each.oid in absorbed)
        },
        {each.oid: each for each in told.objects or ()},
        own.objects,
    )
    doubts |= is_doubtful
    joined = told.partitions or ()
    came = {each.oid for each in joined}
    partitions = (*(each for each in known.partitions or () if each.oid not in came), *joined)
    definition = SourceDefinition.of_columns(
        columns.values(), tuple(objects.values()), types, partitions, oid=told.oid
    )
    return Outcome(definition, doubts)


def _chosen(
    kept: Mapping[K, V], told: Mapping[K, V], own: Collection[K]
) -> tuple[dict[K, V], bool]:
    """Return own parts from the message and others from the store, and whether these differ."""
    chosen = {**kept, **{key: part for key, part in told.items() if key in own}}
    return chosen, chosen != dict(told)


def _types(
    kept: Sequence[DefinedType], told: Sequence[DefinedType], own: Own
) -> tuple[tuple[DefinedType, ...], bool]:
    """Return the types after a message; the same as `_chosen`, for types that a table may share."""
    former = {each.oid: each for each in kept}
    types, is_doubtful = [], False
    for each in told:
        was = former.pop(each.oid, None)
        if was is None:
            types.append(each)
        elif each.oid in own.types:
            types.append(each if own.is_fresh else _united(was, each))
            is_doubtful |= not own.is_fresh
        else:
            types.append(was)
            is_doubtful |= was != each
    return _with_former(types, former.values()), is_doubtful


def _with_former(
    types: Sequence[DefinedType], former: Iterable[DefinedType]
) -> tuple[DefinedType, ...]:
    """Return *types* with those *former* ones that the source has, as far as is known."""
    names, oids = ({getattr(e, n) for e in types} for n in ("full_name", "oid"))
    return (*types, *(e for e in former if e.full_name not in names and e.oid not in oids))


def _united(was: DefinedType, told: DefinedType) -> DefinedType:
    """Return a type with the labels and parts that others have added since its snapshot."""
    labels = list(told.labels)
    present = {oid for oid, _ in labels}
    for position, label in enumerate(was.labels):
        if label[0] not in present:
            before = {oid for oid, _ in was.labels[:position]}
            places = [place for place, each in enumerate(labels) if each[0] in before]
            labels.insert(max(places, default=-1) + 1, label)
            present.add(label[0])
    checks = {oid: (oid, name, text) for oid, name, text in (*was.checks, *told.checks)}
    attributes = {n: (n, name, text) for n, name, text in (*was.attributes, *told.attributes)}
    return replace(
        told,
        labels=tuple(labels),
        checks=tuple(checks[oid] for oid in sorted(checks)),
        attributes=tuple(attributes[number] for number in sorted(attributes)),
    )


# ---- rows that no message explains -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shown:
    """The evidence that refused rows give about the definition at their place.

    ``relations``: the columns of each RELATION message of the rows, in order, with their types as
    far as these are known. ``may_have``: whether a row may contain a label of an enum. ``eases``:
    the kinds of changes that may be made early, because they only let more rows in.
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
        """Whether the order of the names is that of their numbers in *definition*."""
        numbers = definition.numbers
        return all(
            places == sorted(places)
            for relation in self.relations
            for places in [[numbers[name] for name in relation if name in numbers]]
        )


def explaining(known: SourceDefinition, told: SourceDefinition, shown: Shown) -> SourceDefinition:
    """Return the stored definition with the parts of the present one that refused rows need.

    The present definition *told* may be ahead of the rows. So it counts only where *shown* agrees,
    or where a change lets more rows in and refuses none.
    """
    columns = _explaining_columns(known, told, shown)
    if len({each.name for each in columns}) < len(columns):
        return known
    has_changed = [*known.columns] != columns
    return SourceDefinition.of_columns(
        columns,
        _easing_objects(known.objects or (), told.objects or (), shown),
        _explaining_types(known.types or (), told.types or (), shown, takes_new=has_changed),
        _more_partitions(known.partitions or (), told.partitions or (), shown),
        oid=known.oid,
    )


def _explaining_columns(
    known: SourceDefinition, told: SourceDefinition, shown: Shown
) -> list[DefinedColumn]:
    names, present = shown.names, {each.number: each for each in told.columns}
    are_traded = not shown.follows(known) and shown.follows(told)
    columns = []
    for column in known.columns:
        now = present.pop(column.number, None)
        if now is None:
            if column.name in names or column.generated:
                columns.append(column)
            continue
        if now.name in names and (column.name not in names or are_traded):
            column = replace(column, name=now.name)
        if column.name == now.name and shown.has_type(now):
            column = replace(column, type=now.type, collation=now.collation)
        if DdlKind.DROP_NOT_NULL in shown.eases:
            column = replace(column, not_null=column.not_null and now.not_null)
        columns.append(column)
    taken = {each.name for each in columns}
    return columns + [e for e in present.values() if e.name in names and e.name not in taken]


def _easing_objects(
    known: Sequence[DefinedObject], told: Sequence[DefinedObject], shown: Shown
) -> tuple[DefinedObject, ...]:
    """Return the objects without those that refuse rows, and that the source has dropped."""
    oids = {oid for each in told for oid in (each.oid, each.index_oid)}
    names = {(each.kind, each.name) for each in told}

    def is_gone(part: DefinedObject) -> bool:
        kind = DdlKind.DROP_INDEX if part.is_index else DdlKind.DROP_CONSTRAINT
        is_there = part.oid in oids or (part.kind, part.name) in names
        return part.binds and part.kind != "p" and kind in shown.eases and not is_there

    return tuple(part for part in known if not is_gone(part))


def _explaining_types(
    known: Sequence[DefinedType], told: Sequence[DefinedType], shown: Shown, *, takes_new: bool
) -> tuple[DefinedType, ...]:
    """Return the types with labels that rows may have, and without checks that are gone.

    *takes_new*: with types that only the present definition has, too.
    """
    former = {each.oid: each for each in known}
    types = []
    for now in told:
        was = former.pop(now.oid, None)
        if was is None:
            if takes_new:
                types.append(now)
            continue
        before = dict(was.labels)
        labels = [
            (oid, label if shown.may_have(label) else before[oid])
            for oid, label in now.labels
            if oid in before or shown.may_have(label)
        ]
        explained = replace(
            was,
            labels=_united(was, replace(now, labels=tuple(labels))).labels,
            attributes=_explaining_attributes(was, now, shown),
        )
        if DdlKind.CHANGE_DOMAIN in shown.eases:
            left = {oid for oid, _, _ in now.checks}
            checks = tuple(check for check in was.checks if check[0] in left)
            not_null = was.not_null and now.not_null
            explained = replace(explained, checks=checks, not_null=not_null)
        types.append(explained)
    return (*types, *former.values())


def _explaining_attributes(
    was: DefinedType, now: DefinedType, shown: Shown
) -> tuple[tuple[int, str, str], ...]:
    """Return the attributes of a composite type that all values of the rows have.

    Values have no names of attributes. So only another number of attributes is evidence.
    """
    counts = set(shown.attribute_counts.get(now.oid, ()))
    attributes = now.attributes[: max(counts, default=0)]
    numbers = {number for number, _, _ in attributes}
    has_former = all(number in numbers for number, _, _ in was.attributes)
    is_shown = counts == {len(attributes)} and counts != {len(was.attributes)}
    return (
        attributes if is_shown and (has_former or attributes == now.attributes) else was.attributes
    )


def _more_partitions(
    known: tuple[Partition, ...], told: tuple[Partition, ...], shown: Shown
) -> tuple[Partition, ...]:
    """Return the present partitions if none has left: a new one could have its bounds."""
    is_more = {each.oid for each in known} <= {each.oid for each in told}
    return told if known and is_more and DdlKind.ATTACH_PARTITION in shown.eases else known
