"""Partitions of a source's table, the difference between two states, and their rows.

A partition keeps its OID for life. A state contains the text of each bound and partition key, in
the form of ``pg_get_expr`` and ``pg_get_partkeydef``, which lock no table. From these texts this
module builds the condition for the rows of a partition, because ``pg_get_partition_constraintdef``
waits for sessions that lock the partition.

A condition is true for a row exactly where PostgreSQL routes the row to the partition. Values are
literals without a type, so the type of the column applies. Hash partitions have no such condition:
the hash depends on the server. Pure.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from streamer.mapping.relation_names import RelationName, ordered_renames
from streamer.mapping.rule_options import DdlKind
from streamer.postgres.quoting import quote_literal

ROOT: Final = 0


class UnclearPartitionError(Exception):
    """No condition can select the rows of a partition; the text states the reason."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition, or the partitioned table itself, whose ``bound`` is None.

    ``parent``: the parent's OID; `ROOT` for a partition of the table itself. ``key``: the partition
    key of a partition with further partitions, as ``RANGE (a, lower(b))``.
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
    """A partition that was attached, detached or renamed. ``tree``: the partitions after an
    attachment, otherwise before the change. ``name``: the new name.
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
    previous: Sequence[Partition], after: Sequence[Partition]
) -> list[PartitionChange]:
    """Return the changes, in a feasible order. A change of a partition includes its
    sub-partitions.
    """
    former = {item.oid: item for item in previous if item.bound is not None}
    present = {item.oid: item for item in after if item.bound is not None}
    removed = {o for o, item in former.items() if o not in present or _moved(item, present[o])}
    attached = {o for o in present if o not in former or o in removed}
    changes = [
        PartitionChange(DdlKind.DETACH_PARTITION, former[oid], tuple(previous))
        for oid in former
        if oid in removed and former[oid].parent not in removed
    ]
    staying = {
        item.name: item for oid, item in former.items() if oid in present and oid not in removed
    }
    names = {name: present[item.oid].name for name, item in staying.items()}
    for old, name in ordered_renames({o: n for o, n in names.items() if o != n}):
        partition = staying.pop(old)
        changes.append(PartitionChange(DdlKind.RENAME_TABLE, partition, tuple(previous), name))
        staying[name] = replace(partition, name=name)
    changes += [
        PartitionChange(DdlKind.ATTACH_PARTITION, item, tuple(after))
        for oid, item in present.items()
        if oid in attached
    ]
    return changes


def _moved(previous: Partition, after: Partition) -> bool:
    return (previous.parent, previous.bound) != (after.parent, after.bound)


# ---- partition keys ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionKey:
    """``strategy``: RANGE, LIST or HASH. ``items``: columns and expressions, as written."""

    strategy: str
    items: tuple["KeyItem", ...]

    @classmethod
    def parse(cls, text: str) -> "PartitionKey":
        strategy, _, items = text.partition(" (")
        return cls(strategy, tuple(map(KeyItem.parse, split_list(items.removesuffix(")")))))


_COLUMN: Final = re.compile(r'([a-z_][a-z0-9_$]*|"(?:[^"]|"")+")(?= |$)')


@dataclass(frozen=True, slots=True)
class KeyItem:
    """A column or an ``expression``. ``rest``: the collation and operator class, as written."""

    column: str | None
    expression: str | None
    rest: str

    @classmethod
    def parse(cls, text: str) -> "KeyItem":
        if column := _COLUMN.match(text):
            name = column[1]
            if name.startswith('"'):
                name = name[1:-1].replace('""', '"')
            return cls(name, None, text[column.end() :])
        depth = 0
        for position, char in outside_quotes(text):
            depth += (char == "(") - (char == ")")
            if char == ")" and depth == 0:
                return cls(None, text[: position + 1], text[position + 1 :])
        return cls(None, text, "")


def outside_quotes(text: str) -> Iterable[tuple[int, str]]:
    """Yield the characters outside quotes, with their positions."""
    quote = ""
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            yield position, char


def split_list(text: str) -> list[str]:
    """Split a list at commas outside quotes and brackets."""
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
    """Return the condition for the rows of *partition*, which is in *tree*.

    Raises UnclearPartitionError, and the errors of *render*.
    """
    by_oid = {member.oid: member for member in tree}
    root = next((member for member in tree if member.bound is None), None)
    conditions = []
    inner: Partition | None = partition
    while inner is not None and inner.bound is not None:
        parent = root if inner.parent == ROOT else by_oid.get(inner.parent)
        if parent is None or parent.key is None:
            raise UnclearPartitionError(f'the partition key above "{inner.full_name}" is not known')
        children = (item for item in tree if item.parent == inner.parent and item is not root)
        siblings = [child for child in children if child.bound != inner.bound]
        conditions.append(_rows_within_parent(inner, parent.key, siblings, render))
        inner = parent
    return " and ".join(reversed(conditions))


def _rows_within_parent(
    partition: Partition, key_text: str, siblings: Sequence[Partition], render: Render
) -> str:
    key = PartitionKey.parse(key_text)
    if key.strategy == "HASH":
        raise UnclearPartitionError("only the source can select the rows of a hash partition")
    if any(item.rest for item in key.items):
        raise UnclearPartitionError(
            f"its partition key uses a collation or an operator class: {key_text}"
        )
    columns = [render(item) for item in key.items]
    if partition.bound != _DEFAULT:
        return f"({_bound_rows(partition.bound or '', columns)})"
    conditions = [f"({_bound_rows(sibling.bound or '', columns)})" for sibling in siblings]
    return f"(({' or '.join(conditions)}) is not true)" if conditions else "true"


def _bound_rows(bound: str, columns: Sequence[str]) -> str:
    if match := _LIST.fullmatch(bound):
        values = split_list(match[1])
        named = ", ".join(_value(value) for value in values if value != "NULL")
        parts = [f"{columns[0]} in ({named})"] if named else []
        parts += [f"{columns[0]} is null"] if "NULL" in values else []
        return " or ".join(parts)
    if match := _RANGE.fullmatch(bound):
        parts = [f"{column} is not null" for column in columns]
        parts += _edge(columns, split_list(match[1]), ">=", {"MINVALUE": ">=", "MAXVALUE": ">"})
        parts += _edge(columns, split_list(match[2]), "<", {"MINVALUE": "<", "MAXVALUE": "<="})
        return " and ".join(parts)
    raise UnclearPartitionError(f"its bound is unclear: {bound}")


def _edge(
    columns: Sequence[str], values: Sequence[str], operator: str, cut: dict[str, str]
) -> list[str]:
    """Return the condition for a bound of a range.

    *cut*: the operator for the columns before MINVALUE or MAXVALUE, which ends the comparison.
    """
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
    """Return a value as a literal without a type, so that the type of the column applies."""
    return text if text.startswith(("'", "E'")) else quote_literal(text)


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """The rows of a detached or dropped partition, by a ``condition`` over the target's columns.

    ``columns``: the columns of the source that the condition uses. ``unclear``: the reason why
    there is no condition.
    """

    partition: RelationName
    condition: str = ""
    columns: tuple[str, ...] = ()
    unclear: str | None = None
