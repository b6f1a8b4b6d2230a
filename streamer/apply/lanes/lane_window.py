"""The changes of a lane in a target transaction, folded as far as possible. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streamer.apply.lanes.lane import Lane, MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.fold import Counts, Fold, NotFoldable
from streamer.apply.rows.history_chains import Versions
from streamer.decode.transactions import Changes, Transaction
from streamer.util.lsn import Lsn


@dataclass(slots=True)
class RelationWindow:
    """Changes of a relation in a window, folded as far as possible."""

    mapped: MappedRelation
    folds: list[Fold] = field(default_factory=list)
    is_foldable: bool = True
    plan: ApplyPlan | None = None
    """The newest plan of the changes."""
    versions: list[Versions] = field(default_factory=list)
    """The changes of a history table, which streamer does not fold."""

    @property
    def is_set(self) -> bool:
        """Whether sets can express the changes."""
        return self.is_foldable and not any(fold.must_order for fold in self.folds)

    @property
    def counts(self) -> list[Counts]:
        """The numbers of changes, while sets can express the changes."""
        return [*(fold.counts for fold in self.folds), *(v.counts for v in self.versions)]

    def add(self, plan: ApplyPlan, payloads: list[bytes]) -> None:
        """Add changes; with metadata in *plan*, the payloads must be extended already."""
        self.plan = plan
        if plan.must_order:
            self.is_foldable = False
        if not self.is_foldable:
            return
        if not self.folds or self.folds[-1].plan is not plan:
            self.folds.append(Fold(plan))
        try:
            self.folds[-1].add(payloads)
        except NotFoldable:
            self.require_order()

    def add_by_transaction(
        self, plan: ApplyPlan, parts: Iterable[tuple[Transaction, list[bytes]]]
    ) -> None:
        """Add changes, each with the metadata of the transaction appended."""
        self.plan = plan
        for transaction, payloads in parts:
            if not self.is_foldable or plan.metadata is None:
                return
            extended = plan.metadata.extend(transaction, payloads)
            if extended is None:
                self.require_order()
                return
            self.add(plan, extended)
            if plan.marks and not plan.marks_in_filter and self.is_foldable:
                # A fold counts messages, and a delete that marks a row has become an update.
                self.folds[-1].counts.count_marked(payloads)

    def add_versions(self, plan: ApplyPlan, part: LaneTransaction, changes: Changes) -> None:
        """Add *changes* of *part*, which are changes of a history table."""
        self.plan = plan
        if not self.is_foldable:
            return
        if not self.versions or self.versions[-1].plan is not plan:
            self.versions.append(Versions(plan))
        try:
            self.versions[-1].add(changes.payloads, *part.times_and_stops(changes))
        except NotFoldable:
            self.require_order()

    def require_order(self) -> None:
        """Use exact order, because sets cannot express the changes."""
        self.is_foldable = False
        self.folds.clear()
        self.versions.clear()


@dataclass(slots=True)
class LaneWindow:
    """Transactions of a lane for a target transaction."""

    lane: Lane
    transactions: list[LaneTransaction] = field(default_factory=list)
    parts: list[list[tuple[MappedRelation, Changes, ApplyPlan]]] = field(default_factory=list)
    """For each transaction, the changes that the target lacks, with plans."""
    relations: dict[MappedRelation, RelationWindow] = field(default_factory=dict)
    change_count: int = 0
    version_count: int = 0
    """The number of changes that end a version of a row and begin the next."""
    size: int = 0

    def add(
        self,
        lane_transaction: LaneTransaction,
        plans: Sequence[ApplyPlan | None],
        kept: list[list[bytes]] | None = None,
    ) -> None:
        """Add a transaction with a plan for each item of its changes. Raises ProtocolError.

        *kept*: the payloads to fold for each item; by default all payloads.
        """
        parts: list[tuple[MappedRelation, Changes, ApplyPlan]] = []
        self.transactions.append(lane_transaction)
        self.parts.append(parts)
        self.size += lane_transaction.size
        payloads = kept or [changes.payloads for _, changes in lane_transaction.changes]
        for (mapped, changes), plan, folded in zip(
            lane_transaction.changes, plans, payloads, strict=True
        ):
            if plan is None or mapped.has(lane_transaction.transaction):
                continue  # a later copy includes the changes
            parts.append((mapped, changes, plan))
            window = self.relations.get(mapped)
            if window is None:
                window = self.relations[mapped] = RelationWindow(mapped)
            if plan.takes_versions:
                self.version_count += len(changes.payloads)
            if plan.takes_versions and kept is None:
                window.add_versions(plan, lane_transaction, changes)
            elif plan.metadata is None:
                window.add(plan, folded)
            elif kept is None:
                window.add_by_transaction(plan, lane_transaction.by_transaction(changes))
            else:
                window.plan = plan
                if folded:  # the transactions of the payloads are not known
                    window.require_order()
            self.change_count += len(changes.payloads)

    def single_transaction(self, number: int) -> "LaneWindow":
        """Return a window with only transaction *number*, with the same plans."""
        window = LaneWindow(self.lane, [self.transactions[number]], [self.parts[number]])
        for mapped, changes, plan in self.parts[number]:
            relation = window.relations.setdefault(mapped, RelationWindow(mapped))
            if plan.takes_versions:
                relation.add_versions(plan, self.transactions[number], changes)
            elif plan.metadata is not None:
                relation.add_by_transaction(plan, self.transactions[number].by_transaction(changes))
            else:
                relation.add(plan, changes.payloads)
        return window

    def progress(self, transaction_count: int | None = None) -> dict[MappedRelation, Lsn]:
        """Return each relation's position after a commit of the first *transaction_count*
        transactions.
        """
        reached: dict[MappedRelation, Lsn] = {}
        for lane_transaction, parts in zip(
            self.transactions[:transaction_count], self.parts, strict=False
        ):
            for mapped, changes, _ in parts:
                if (end_lsn := lane_transaction.end_of(changes)) is not None:
                    reached[mapped] = end_lsn
        return reached
