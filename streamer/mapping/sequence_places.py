"""The target sequence that follows a source sequence, and its value.

streamer keeps a target sequence ahead of the source's sequence by a margin. So a program that
begins to write at the target draws no value that the source used. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping

MARGIN_STEPS: Final = 1000
"""The minimum margin: streamer sets a target sequence ahead by at least this number of values."""
MARGIN_CHECKS: Final = 10
"""The margin lasts for at least this many checks, at the source's rate of drawing values."""


class FollowedSequence(Protocol):
    """The facts about a source's sequence that decide the sequence of the target."""

    @property
    def name(self) -> RelationName: ...
    @property
    def owner(self) -> tuple[RelationName, str] | None: ...


@dataclass(frozen=True, slots=True)
class SequencePlace:
    """The place of the target's sequence: its owning column, or its name."""

    name: RelationName
    column: str | None = None
    """The column of table ``name`` that owns the sequence."""

    def __str__(self) -> str:
        return str(self.name) if self.column is None else f"{self.name}.{self.column}"


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """The range of the target's sequence, and its last value."""

    increment: int
    minimum: int
    maximum: int
    last_value: int | None


def place_of(
    sequence: FollowedSequence,
    mappings: Mapping[RelationName, RelationMapping],
    target_namespace: str,
) -> SequencePlace | None:
    """Return the place of the counterpart of *sequence*.

    None if the target lacks the sequence's table or column, or does not store the rows unchanged.
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
    sequences: Iterable[FollowedSequence],
    mappings: Iterable[RelationMapping],
    target_namespace: str,
) -> dict[RelationName, SequencePlace]:
    """Return the places of *sequences* by sequence name; omit sequences without a place."""
    by_source = {mapping.source: mapping for mapping in mappings}
    by_name = {s.name: place_of(s, by_source, target_namespace) for s in sequences}
    return {name: place for name, place in by_name.items() if place is not None}


def value_ahead(value: int, increment: int, drawn_steps: int, target: SequenceRange) -> int | None:
    """Return the value for the target's sequence, or None if the sequence is far enough ahead.

    *value* and *increment* belong to the source; *drawn_steps*: the number of values that the
    source drew since the last check. The sequence moves only when half of its margin is used up, so
    an idle or slow sequence costs no write. Raises ValueError if the target's sequence cannot
    follow.
    """
    if (increment > 0) != (target.increment > 0):
        raise ValueError("the increment of the target's sequence has the opposite sign")
    if not target.minimum <= value <= target.maximum:
        raise ValueError(f"the source is at {value}, outside the limits of the target's sequence")
    margin = increment * max(MARGIN_STEPS, MARGIN_CHECKS * drawn_steps)
    goal = min(max(value + margin, target.minimum), target.maximum)
    last = target.last_value
    if last is None or last == goal:
        return None if last == goal else goal
    ahead = (last - value) * (1 if increment > 0 else -1)
    is_enough = 2 * ahead >= abs(goal - value)
    return None if is_enough else goal
