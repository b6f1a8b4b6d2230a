"""The changes of source transactions that a lane applies. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamer.decode.pgoutput import Redefinition, Relation
from streamer.decode.transactions import Changes, TransactionBlock
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import MappedRelation
    from streamer.decode.transactions import Transaction


@dataclass(slots=True)
class LaneTransaction:
    """The changes of a source transaction that a lane applies.

    Without ``end_lsn`` the object is a piece, and more pieces of the transaction follow.
    """

    transaction: "Transaction"
    changes: list[tuple["MappedRelation", "Changes"]]
    end_lsn: "Lsn | None"
    size: int
    is_lead: bool = True
    """Whether the metrics count the source transaction by this object, and not by an object of
    another lane.
    """

    @property
    def led_times(self) -> list[int]:
        """The commit time to count in the metrics, as a list; empty if another lane counts the
        transaction.
        """
        return [self.transaction.commit_time] if self.is_lead else []

    @property
    def redefines(self) -> bool:
        """Whether the transaction changes the definition of a relation."""
        return any(isinstance(changes.relation, Redefinition) for _, changes in self.changes)

    @property
    def is_partly_applied(self) -> bool:
        """Whether the target already contains some transactions of a block; a worker splits such a
        block.
        """
        return False

    @property
    def spans_definitions(self) -> bool:
        """Whether a block contains changes of a relation from before and after a change of its
        definition; a worker splits such a block.
        """
        return False

    def end_of(self, changes: "Changes") -> "Lsn | None":
        """Return the end of the last transaction of *changes*."""
        del changes
        return self.end_lsn

    def times_and_stops(self, changes: "Changes") -> tuple[list[int], list[int]]:
        """Return the commit time of each transaction of *changes*, and the end of its payloads."""
        return [self.transaction.commit_time], [len(changes.payloads)]

    def by_transaction(self, changes: "Changes") -> "Iterator[tuple[Transaction, list[bytes]]]":
        """Yield *changes* by source transaction: the transaction and the payloads."""
        yield self.transaction, changes.payloads

    def split(self) -> "list[LaneTransaction]":
        """Return an object for each source transaction, in commit order."""
        return [self]


@dataclass(slots=True)
class LaneBlock(LaneTransaction):
    """The changes of a block of source transactions that a lane applies.

    ``transaction`` and ``end_lsn`` belong to the last transaction.
    """

    block: TransactionBlock = field(default_factory=TransactionBlock)
    led: Collection[int] = ()
    """The numbers of the transactions that the metrics count by this object."""

    @property
    def led_times(self) -> list[int]:
        return list(map(self.block.commit_times.__getitem__, self.led))

    @property
    def is_partly_applied(self) -> bool:
        final_lsns = self.block.final_lsns
        return any(
            final_lsns[changes.numbers[0]] < mapped.skip_through_lsn
            for mapped, changes in self.changes
        )

    @property
    def spans_definitions(self) -> bool:
        relations: dict[MappedRelation, Relation] = {}
        return any(
            relations.setdefault(mapped, changes.relation) is not changes.relation
            for mapped, changes in self.changes
        )

    def end_of(self, changes: "Changes") -> Lsn:
        return Lsn(self.block.end_lsns[changes.numbers[-1]])

    def times_and_stops(self, changes: "Changes") -> tuple[list[int], list[int]]:
        times = self.block.commit_times
        return list(map(times.__getitem__, changes.numbers)), changes.stops

    def by_transaction(self, changes: "Changes") -> "Iterator[tuple[Transaction, list[bytes]]]":
        for number, payloads in changes.by_number():
            yield self.block.transaction(number), payloads

    def split(self) -> list[LaneTransaction]:
        parts: dict[int, list[tuple[MappedRelation, Changes]]] = {}
        for mapped, changes in self.changes:
            for number, payloads in changes.by_number():
                parts.setdefault(number, []).append((mapped, Changes(changes.relation, payloads)))
        led = set(self.led)
        return [
            LaneTransaction(
                self.block.transaction(number),
                parts[number],
                Lsn(self.block.end_lsns[number]),
                sum(changes.size for _, changes in parts[number]),
                number in led,
            )
            for number in sorted(parts)
        ]
