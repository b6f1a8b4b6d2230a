"""Messages about a table's definition, and the definition after one of them.

A message has the state of a table, and names the columns, objects and types that its transaction
has changed. Another message names the objects that a command has dropped. The rest of a state is
only a view: another session may have committed since, or be about to commit. So the stored
definition goes before it, and an absence counts for nothing.

Where the two differ in such a part, a message may also have been lost. The definition is in doubt
then: streamer has the source send a state that counts as a whole, at a later place of the stream.
Pure.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

from streamer.mapping.definition import SourceDefinition, under_new_names
from streamer.mapping.names import RelationName
from streamer.mapping.objects import DefinedType, type_difference
from streamer.mapping.partitions import ROOT, Partition

BASELINE: Final = "BASELINE"
ALTER_TABLE: Final = "ALTER TABLE"
K = TypeVar("K")
V = TypeVar("V")
Part = int | str
"""The OID of an index, a constraint or a partition, or the qualified name of an index."""


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

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Self:
        return cls(
            frozenset(fields.get("objects") or ()),
            frozenset((schema, name) for schema, name in fields.get("indexes") or ()),
            frozenset((table, number) for table, number in fields.get("columns") or ()),
            frozenset((table, number) for table, number in fields.get("defaults") or ()),
            frozenset(oid for oid in fields.get("partitions") or () if oid is not None),
        )

    def concerns(self, relid: int | None, parts: Collection[Part]) -> bool:
        """Whether it has a part of a table, and not the table itself. *parts*: of the table."""
        if relid in self.objects:
            return False
        if any(table == relid for table, _ in (*self.columns, *self.defaults)):
            return True
        names = (index_part(*each) for each in self.indexes)
        return not self.objects.isdisjoint(parts) or any(name in parts for name in names)


def index_part(namespace: str, name: str) -> str:
    """Return the part that is an index."""
    return f"{namespace}.{name}"


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
    """Return the parts of a table of schema *namespace*; its partitions and constraints, too."""
    objects, partitions = definition.objects or (), definition.partitions or ()
    return {
        *(each.oid for each in objects),
        *(index_part(namespace, each.name) for each in objects if each.is_index),
        *(each.oid for each in partitions),
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
        told.types,
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
    objects = [
        each
        for each in known.objects or ()
        if each.oid not in dropped.objects
        and not (each.is_index and (namespace, each.name) in dropped.indexes)
    ]
    partitions = _staying(known.partitions or (), dropped.objects | dropped.partitions)
    return replace(known, columns=tuple(columns), objects=tuple(objects), partitions=partitions)


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
    columns, is_doubtful = _chosen(
        {each.number: each for each in under_new_names(known, renames).columns},
        {each.number: each for each in told.columns},
        own.columns,
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
    return (*types, *(() if own.is_fresh else former.values())), is_doubtful


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
