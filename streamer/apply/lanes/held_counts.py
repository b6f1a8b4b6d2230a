"""Counts the changes that a lane holds. Pure."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import MappedRelation
    from streamer.apply.lanes.lane_transaction import LaneTransaction


class Held:
    """The number and the bytes of held changes, by relation."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[MappedRelation, tuple[int, int]] = {}

    def counts_of(self, mapped: "MappedRelation") -> tuple[int, int]:
        """Return the number and the bytes of a relation's changes."""
        return self._counts.get(mapped, (0, 0))

    def __bool__(self) -> bool:
        return any(number for number, _ in self._counts.values())

    def add(self, lane_transaction: "LaneTransaction") -> None:
        for mapped, changes in lane_transaction.changes:
            number, size = self.counts_of(mapped)
            self._counts[mapped] = (number + len(changes.payloads), size + changes.size)

    def remove(self, released: "Held") -> None:
        for mapped, (number, size) in released._counts.items():
            count_before, size_before = self.counts_of(mapped)
            self._counts[mapped] = (count_before - number, size_before - size)
