"""Which sequence of the target follows which sequence of a source, and the value it is to have.

A target sequence is kept ahead of its source's by a margin. A program that begins to write at the
target therefore draws no value that the source has given to a row. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from streamer.mapping.names import RelationName
from streamer.mapping.options import TableType
from streamer.mapping.rules import RelationMapping

MARGIN_STEPS: Final = 1000
"""How many values ahead a target sequence is set, at least."""
MARGIN_LOOKS: Final = 10
"""So many looks ahead it is set at least, as fast as the source draws values."""


class Followed(Protocol):
    """A sequence of a source, as far as its place at the target depends on it."""

    @property
    def name(self) -> RelationName: ...
    @property
    def owner(self) -> tuple[RelationName, str] | None: ...


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """Where the target's sequence is found: by the column that owns it, or by its own name."""

    name: RelationName
    column: str | None = None
    """The column of the table ``name``, whose sequence it is."""

    def __str__(self) -> str:
        return str(self.name) if self.column is None else f"{self.name}.{self.column}"


@dataclass(frozen=True, slots=True)
class Range:
    """The values that the target's sequence can take, and the last one it has given."""

    increment: int
    minimum: int
    maximum: int
    last_value: int | None


def place_of(
    sequence: Followed, mappings: Mapping[RelationName, RelationMapping], target_namespace: str
) -> SequencePlace | None:
    """Return the place of the counterpart of *sequence*.

    None if the target does not get its table or column, or does not take over the rows unchanged.
    """
    if sequence.owner is None:
        return SequencePlace(RelationName(target_namespace, sequence.name.name))
    table, column = sequence.owner
    mapping = mappings.get(table)
    if mapping is None or mapping.type is TableType.HISTORY:
        return None
    target_column = mapping.target_column(column)
    if target_column is None or mapping.is_computed(target_column):
        return None
    return SequencePlace(mapping.target, target_column)


def places(
    sequences: Iterable[Followed], mappings: Iterable[RelationMapping], target_namespace: str
) -> dict[RelationName, SequencePlace]:
    """Return the places of those of *sequences* that have one, by the name of the sequence."""
    by_source = {mapping.source: mapping for mapping in mappings}
    found = {s.name: place_of(s, by_source, target_namespace) for s in sequences}
    return {name: place for name, place in found.items() if place is not None}


def value_ahead(value: int, increment: int, drawn_steps: int, there: Range) -> int | None:
    """Return the value to set the target's sequence to, or None if it is far enough ahead.

    *value* and *increment* are the source's; *drawn_steps*: the values that the source drew since
    the last look. A sequence is moved when half of its margin is used up, so an idle or slow one
    costs no write. Raises ValueError if the target's sequence cannot follow.
    """
    if (increment > 0) != (there.increment > 0):
        raise ValueError("its increment has the other sign")
    if not there.minimum <= value <= there.maximum:
        raise ValueError(f"the source is at {value}, which it cannot take")
    margin = increment * max(MARGIN_STEPS, MARGIN_LOOKS * drawn_steps)
    wanted = min(max(value + margin, there.minimum), there.maximum)
    last = there.last_value
    if last is None or last == wanted:
        return None if last == wanted else wanted
    ahead = (last - value) * (1 if increment > 0 else -1)
    is_enough = 2 * ahead >= abs(wanted - value)
    return None if is_enough else wanted
