"""The delete limit of a lane: finds source transactions beyond `max_deleted_rows`.

The limit counts changes on arrival, so the count of a transaction is complete before a worker
applies the first change. A lane with such a transaction is held, and the drainer stops before the
transaction until an operator decides. Pure.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streamer.control.mass_delete import MassDelete
from streamer.decode.pgoutput import DELETE, TRUNCATE, to_datetime
from streamer.decode.transactions import Changes
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import TableRule

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import MappedRelation
    from streamer.apply.lanes.lane_transaction import LaneTransaction
    from streamer.decode.transactions import Transaction
    from streamer.util.lsn import Lsn


@dataclass(slots=True)
class _Removed:
    transaction: "Transaction"
    rows: int = 0
    truncates: int = 0


class DeleteLimit:
    """Counts deletes and TRUNCATEs by source transaction and table."""

    __slots__ = ("_counts", "_exceeding")

    def __init__(self) -> None:
        self._counts: dict[tuple[Lsn, MappedRelation], _Removed] = {}
        """Removals of the lane transaction whose last piece has not arrived."""
        self._exceeding: dict[Lsn, dict[MappedRelation, MassDelete]] = {}

    def add(self, lane_transaction: "LaneTransaction") -> bool:
        """Count a lane transaction or its next piece; return whether a transaction must wait."""
        for mapped, changes in lane_transaction.changes:
            rule = mapped.mapping.rule
            if rule.max_deleted_rows is None or rule.type is TableType.APPEND:
                continue
            if mapped.state.chunks is not None:
                continue  # the limit does not apply during a copy in chunks
            for transaction, payloads in lane_transaction.by_transaction(changes):
                self._count(mapped, transaction, payloads)
        if lane_transaction.end_lsn is None or not self._counts:
            return False
        is_found = False
        for (lsn, mapped), removed in self._counts.items():
            mass_delete = _mass_delete(removed, mapped.mapping.rule)
            if mass_delete.exceeds(mapped.mapping.rule.max_deleted_rows):
                self._exceeding.setdefault(lsn, {})[mapped] = mass_delete
                is_found = True
        self._counts.clear()
        return is_found

    def _count(
        self, mapped: "MappedRelation", transaction: "Transaction", payloads: list[bytes]
    ) -> None:
        kinds = [payload[0] for payload in payloads]
        rows, truncates = kinds.count(DELETE), kinds.count(TRUNCATE)
        if rows or truncates:
            key = (transaction.final_lsn, mapped)
            removed = self._counts.setdefault(key, _Removed(transaction))
            removed.rows += rows
            removed.truncates += truncates

    def discard_open(self) -> None:
        """Discard the counts of the unfinished transaction, which the source sends again."""
        self._counts.clear()

    def waiting(
        self, lane_transaction: "LaneTransaction"
    ) -> "tuple[MappedRelation, MassDelete] | None":
        """Return the table for which *lane_transaction* awaits an operator's decision, if any."""
        for mapped, mass_delete in self._mass_deletes(lane_transaction).items():
            is_decided = _decision(mapped, mass_delete) is not None
            if not is_decided and mass_delete.exceeds(mapped.mapping.rule.max_deleted_rows):
                return mapped, mass_delete
        return None

    def without_skipped(self, lane_transaction: "LaneTransaction") -> "LaneTransaction":
        """Return the transaction without the deletes that an operator skips."""
        skipped = self._skipped(lane_transaction)
        if not skipped:
            return lane_transaction
        changes = [
            (mapped, _without_removals(items) if mapped in skipped else items)
            for mapped, items in lane_transaction.changes
        ]
        return replace(lane_transaction, changes=changes)

    def release(self, lane_transaction: "LaneTransaction") -> "dict[MappedRelation, MassDelete]":
        """Discard the mass deletes of a durable transaction; return the skipped mass deletes."""
        skipped = self._skipped(lane_transaction)
        self._exceeding.pop(lane_transaction.transaction.final_lsn, None)
        return skipped

    def _mass_deletes(
        self, lane_transaction: "LaneTransaction"
    ) -> "dict[MappedRelation, MassDelete]":
        mass_deletes = self._exceeding.get(lane_transaction.transaction.final_lsn, {})
        return {
            m: mass_delete
            for m, mass_delete in mass_deletes.items()
            if not m.has(lane_transaction.transaction)
        }

    def _skipped(self, lane_transaction: "LaneTransaction") -> "dict[MappedRelation, MassDelete]":
        mass_deletes = self._mass_deletes(lane_transaction)
        return {
            mapped: mass_delete
            for mapped, mass_delete in mass_deletes.items()
            if _decision(mapped, mass_delete)
        }


def _decision(mapped: "MappedRelation", mass_delete: MassDelete) -> bool | None:
    """Return whether an operator skips the deletes of *mass_delete*; None without a decision."""
    decided = mapped.decided
    return None if decided is None or decided.lsn != mass_delete.lsn else decided.skips


def _mass_delete(removed: _Removed, rule: TableRule) -> MassDelete:
    transaction = removed.transaction
    return MassDelete(
        transaction.xid,
        transaction.final_lsn,
        to_datetime(transaction.commit_time).isoformat(sep=" "),
        removed.rows,
        0 if rule.skip_truncate else removed.truncates,
    )


def _without_removals(changes: Changes) -> Changes:
    retained = [p for p in changes.payloads if p[0] not in (DELETE, TRUNCATE)]
    return Changes(changes.relation, retained)
