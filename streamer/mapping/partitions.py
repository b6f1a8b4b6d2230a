"""Partitions of a source's table, the difference between two states, and the rows of each.

A partition has an OID for life. A state has the text of each bound and partition key, as
``pg_get_expr`` and ``pg_get_partkeydef`` write them. Neither locks a table. That is why the
condition for the rows of a partition is built here: ``pg_get_partition_constraintdef`` waits for
sessions that lock the partition.

A condition is true for a row exactly where PostgreSQL routes the row to the partition. Values are
literals without a type, so they take that of the column. Hash partitions have no such condition:
the hash depends on the server. Pure.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from streamer.mapping.names import RelationName, ordered_renames
from streamer.mapping.options import DdlKind
from streamer.postgres.quoting import quote_literal

ROOT: Final = 0


class UnclearPartitionError(Exception):
    """A condition for the rows of a partition cannot be given; the text says why."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, or the partitioned table itself, whose ``bound`` is None.

    ``parent``: its OID; `ROOT` for a partition of the table itself. ``key``: its partition key if
    it has partitions of its own, as ``RANGE (a, lower(b))``.
    """

    oid: int
    parent: int
    namespace: str
    name: str
    bound: str | None
    key: str | None = None

    @property
    def full_name(self) -> RelationName:
        return RelationName(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """A partition that joined or left, or has another name. *tree*: the partitions after it joined,
    before it left. *name*: the one that it gets.
    """

    kind: DdlKind
    partition: Partition
    tree: tuple[Partition, ...]
    name: str | None = None

    def __str__(self) -> str:
        if self.name is not None:
            return f'{self.kind} "{self.partition.full_name}" to "{self.name}"'
        return f'{self.kind} "{self.partition.full_name}"'


def partition_difference(
    before: Sequence[Partition], after: Sequence[Partition]
) -> list[PartitionChange]:
    """Return the changes, in an order to make them in. The partitions of one go with it."""
    former = {each.oid: each for each in before if each.bound is not None}
    present = {each.oid: each for each in after if each.bound is not None}
    gone = {o for o, each in former.items() if o not in present or _moved(each, present[o])}
    come = {o for o in present if o not in former or o in gone}
    changes = [
        PartitionChange(DdlKind.DETACH_PARTITION, former[oid], tuple(before))
        for oid in former
        if oid in gone and former[oid].parent not in gone
    ]
    staying = {
        each.name: each for oid, each in former.items() if oid in present and oid not in gone
    }
    names = {name: present[each.oid].name for name, each in staying.items()}
    for old, name in ordered_renames({o: n for o, n in names.items() if o != n}):
        partition = staying.pop(old)
        changes.append(PartitionChange(DdlKind.RENAME_TABLE, partition, tuple(before), name))
        staying[name] = replace(partition, name=name)
    changes += [
        PartitionChange(DdlKind.ATTACH_PARTITION, each, tuple(after))
        for oid, each in present.items()
        if oid in come
    ]
    return changes


def _moved(before: Partition, after: Partition) -> bool:
    return (before.parent, before.bound) != (after.parent, after.bound)


# ---- partition keys ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """``strategy``: RANGE, LIST or HASH. ``items``: columns and expressions, as written."""

    strategy: str
    items: tuple["KeyItem", ...]

    @classmethod
    def parse(cls, text: str) -> "PartitionKey":
        strategy, _, rest = text.partition(" (")
        return cls(strategy, tuple(map(KeyItem.parse, split_list(rest.removesuffix(")")))))


_COLUMN: Final = re.compile(r'([a-z_][a-z0-9_$]*|"(?:[^"]|"")+")(?= |$)')


@dataclass(frozen=True, slots=True)
class KeyItem:
    """A column or an ``expression``. ``rest``: its collation and operator class, as written."""

    column: str | None
    expression: str | None
    rest: str

    @classmethod
    def parse(cls, text: str) -> "KeyItem":
        if found := _COLUMN.match(text):
            name = found[1]
            if name.startswith('"'):
                name = name[1:-1].replace('""', '"')
            return cls(name, None, text[found.end() :])
        depth = 0
        for position, char in outside_quotes(text):
            depth += (char == "(") - (char == ")")
            if char == ")" and depth == 0:
                return cls(None, text[: position + 1], text[position + 1 :])
        return cls(None, text, "")


def outside_quotes(text: str) -> Iterable[tuple[int, str]]:
    """Yield the characters that no quotes enclose, with their positions."""
    quote = ""
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            yield position, char


def split_list(text: str) -> list[str]:
    """Return the parts of a list with commas between them."""
    ends, depth = [], 0
    for position, char in outside_quotes(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            ends.append(position)
    starts = [0, *(end + 1 for end in ends)]
    return [text[a:b].strip() for a, b in zip(starts, [*ends, len(text)], strict=True)]


# ---- the rows of a partition -------------------------------------------------------------------

_RANGE: Final = re.compile(r"FOR VALUES FROM \((.*)\) TO \((.*)\)", re.DOTALL)
_LIST: Final = re.compile(r"FOR VALUES IN \((.*)\)", re.DOTALL)
_DEFAULT: Final = "DEFAULT"
_ENDS: Final = ("MINVALUE", "MAXVALUE")

Render = Callable[[KeyItem], str]
"""Returns a column or an expression of a partition key as SQL over the target's columns."""


def rows_of(partition: Partition, tree: Sequence[Partition], render: Render) -> str:
    """Return the condition for the rows of *partition*, which is one of *tree*.

    Raises UnclearPartitionError, and the errors of *render*.
    """
    by_oid = {each.oid: each for each in tree}
    root = next((each for each in tree if each.bound is None), None)
    conditions = []
    inner: Partition | None = partition
    while inner is not None and inner.bound is not None:
        parent = root if inner.parent == ROOT else by_oid.get(inner.parent)
        if parent is None or parent.key is None:
            raise UnclearPartitionError(f'the partition key above "{inner.full_name}" is not known')
        beside = (each for each in tree if each.parent == inner.parent and each is not root)
        siblings = [each for each in beside if each.bound != inner.bound]
        conditions.append(_own_rows(inner, parent.key, siblings, render))
        inner = parent
    return " and ".join(reversed(conditions))


def _own_rows(
    partition: Partition, key_text: str, siblings: Sequence[Partition], render: Render
) -> str:
    key = PartitionKey.parse(key_text)
    if key.strategy == "HASH":
        raise UnclearPartitionError("only its source knows the rows of a hash partition")
    if any(item.rest for item in key.items):
        raise UnclearPartitionError(f"its partition key has own rules for the order: {key_text}")
    columns = [render(item) for item in key.items]
    if partition.bound != _DEFAULT:
        return f"({_bound_rows(partition.bound or '', columns)})"
    others = [f"({_bound_rows(each.bound or '', columns)})" for each in siblings]
    return f"(({' or '.join(others)}) is not true)" if others else "true"


def _bound_rows(bound: str, columns: Sequence[str]) -> str:
    if found := _LIST.fullmatch(bound):
        values = split_list(found[1])
        named = ", ".join(_value(each) for each in values if each != "NULL")
        parts = [f"{columns[0]} in ({named})"] if named else []
        parts += [f"{columns[0]} is null"] if "NULL" in values else []
        return " or ".join(parts)
    if found := _RANGE.fullmatch(bound):
        parts = [f"{column} is not null" for column in columns]
        parts += _edge(columns, split_list(found[1]), ">=", {"MINVALUE": ">=", "MAXVALUE": ">"})
        parts += _edge(columns, split_list(found[2]), "<", {"MINVALUE": "<", "MAXVALUE": "<="})
        return " and ".join(parts)
    raise UnclearPartitionError(f"its bound is unclear: {bound}")


def _edge(
    columns: Sequence[str], values: Sequence[str], operator: str, cut: dict[str, str]
) -> list[str]:
    """Return the condition for one end of a range. *cut*: the operators where it ends early."""
    for count, value in enumerate(values):
        if value in _ENDS:
            if count == 0:
                is_all = (value == "MINVALUE") == operator.startswith(">")
                return [] if is_all else ["false"]
            columns, values, operator = columns[:count], values[:count], cut[value]
            break
    literals = ", ".join(map(_value, values))
    if len(values) == 1:
        return [f"{columns[0]} {operator} {literals}"]
    return [f"({', '.join(columns)}) {operator} ({literals})"]


def _value(text: str) -> str:
    """Return a value as a literal without a type, which takes that of the column."""
    return text if text.startswith(("'", "E'")) else quote_literal(text)
