"""The relations of one source that wait for a copy or are being copied. Pure.

Several rounds can run at a time. A relation belongs to a round until its copy is complete, it has
left the round (`streamer.copy.round_removal`), or the round ends. Only then have all its tasks
ended.
"""

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from streamer.apply.lanes.lane import MappedRelation

LOCK_AFTER_ROUNDS: Final = 3
"""The next round locks the table after rewrites of the table have ended this many rounds."""


class CopyQueue:
    """The relations that wait for a copy, and the relations in a round."""

    def __init__(self, free: "Callable[[MappedRelation], None]" = lambda _: None) -> None:
        """Calls *free* when a round no longer holds a relation."""
        self._free = free
        self._waiting: dict[MappedRelation, None] = {}
        self._copying: set[MappedRelation] = set()
        """Relations in rounds whose copy has neither ended nor failed."""
        self._taken: dict[MappedRelation, list[MappedRelation]] = {}
        """The batch of the running round that copies each relation, until its copy is complete."""
        self._attempts: dict[MappedRelation, int] = {}
        """The numbers of copies that have begun."""
        self._leaving: set[MappedRelation] = set()
        """Relations that are leaving a round."""
        self._requested_again: set[MappedRelation] = set()
        """Relations whose copy an operator requested after a round took the relation."""
        self._rewrites: Counter[MappedRelation] = Counter()
        """The number of rewrites that ended a round since the relation's last chunk."""
        self._rewrites_in_vain: Counter[MappedRelation] = Counter()
        """The number of rewrites after which the relation's copy in chunks began again."""
        self._in_one_piece: set[MappedRelation] = set()
        """Relations with changes that streamer cannot apply during a copy in chunks."""

    def request(self, mapped: "MappedRelation") -> None:
        """Copy *mapped*, in the next round."""
        self._waiting[mapped] = None

    def next_batch(self) -> "list[MappedRelation]":
        """Return the relations of the next round.

        Relations that streamer only marks as synced come first, in a batch of their own, and need
        no snapshot. Copies of some rows of relations in sync come last: such a copy may wait until
        the target has applied changes.
        """
        self._waiting = {m: None for m in self._waiting if not m.state.is_lost}
        free = [mapped for mapped in self._waiting if mapped not in self._taken]
        batch = (
            [mapped for mapped in free if mapped.state.is_to_mark_synced]
            or [mapped for mapped in free if not mapped.state.follows]
            or free
        )
        for mapped in batch:
            del self._waiting[mapped]
            self._attempts.pop(mapped, None)
        self._copying.update(batch)
        self._taken.update(dict.fromkeys(batch, batch))
        self._requested_again.difference_update(batch)
        return batch

    def began(self, mapped: "MappedRelation", attempt: int) -> None:
        """Record that the bookkeeping stores the copy of *mapped* as number *attempt*."""
        self._attempts[mapped] = attempt

    def attempt(self, mapped: "MappedRelation") -> int | None:
        """Return the number of the copy of *mapped*; None before the copy has begun."""
        return self._attempts.get(mapped)

    def end(self, batch: "list[MappedRelation]") -> None:
        """End the round of *batch*, which `next_batch` returned."""
        for mapped in batch:
            if self._taken.get(mapped) is batch:  # otherwise a later round owns the relation
                self._release(mapped)

    def request_again(self, mapped: "MappedRelation") -> None:
        """Repeat the copy of *mapped* if it fails, because an operator requested it again.

        The operator may have removed the cause of the failure after the snapshot of the round.
        """
        if mapped in self._copying:
            self._requested_again.add(mapped)

    def cancel_request(self, mapped: "MappedRelation") -> None:
        """Cancel the second copy of *mapped*."""
        self._requested_again.discard(mapped)

    def is_requested_again(self, mapped: "MappedRelation") -> bool:
        """Whether a failed copy of *mapped* is repeated in the next round."""
        is_requested_again = mapped in self._requested_again and self.is_copying(mapped)
        return is_requested_again or (mapped in self._waiting and not mapped.state.is_lost)

    def failed(self, mapped: "MappedRelation") -> bool:
        """Record that the copy of *mapped* failed; return whether the next round tries again."""
        is_requested_again = self.is_requested_again(mapped)
        self._requested_again.discard(mapped)
        self.remove(mapped)
        if is_requested_again:
            self.request(mapped)
        return is_requested_again

    def remove(self, mapped: "MappedRelation") -> None:
        """Record the end of the copy of *mapped*."""
        self._copying.discard(mapped)

    def give_up(self, mapped: "MappedRelation") -> None:
        """Give up the copy of *mapped* until the next request."""
        self._waiting.pop(mapped, None)
        self._copying.discard(mapped)

    def is_copying(self, mapped: "MappedRelation") -> bool:
        """Whether a running round copies *mapped*, and no caller has cancelled the copy."""
        return mapped in self._copying and not mapped.state.is_lost

    def unfinished(self, batch: "list[MappedRelation]") -> "list[MappedRelation]":
        """Return the relations of *batch*, which `next_batch` returned, whose copy is neither done
        nor given up.
        """
        members = [mapped for mapped in batch if self.is_taken(mapped, batch)]
        members = [mapped for mapped in members if mapped not in self._leaving]
        self._copying -= {mapped for mapped in members if mapped.state.is_lost}
        return [mapped for mapped in members if mapped in self._copying]

    def _release(self, mapped: "MappedRelation") -> None:
        if self._taken.pop(mapped, None) is not None:
            self._free(mapped)

    # ---- before the end of a round -------------------------------------------------------------

    def begin_removal(self, mapped: "MappedRelation") -> "list[MappedRelation] | None":
        """Begin to remove *mapped* from its round; return the round's batch.

        Return None if *mapped* is in no round or is leaving already.
        """
        batch = self._taken.get(mapped)
        if batch is None or mapped in self._leaving:
            return None
        self._leaving.add(mapped)
        return batch

    def is_taken(self, mapped: "MappedRelation", batch: "list[MappedRelation]") -> bool:
        """Whether *mapped* is in the round of *batch*."""
        return self._taken.get(mapped) is batch

    def removed(
        self, mapped: "MappedRelation", batch: "list[MappedRelation]", *, again: bool
    ) -> None:
        """Release *mapped* from the round of *batch*, whose tasks no longer write the table.

        *again*: request a copy, unless a caller has given up the copy meanwhile.
        """
        self._leaving.discard(mapped)
        if self.is_taken(mapped, batch):
            self._release(mapped)
        if again and self.is_copying(mapped):
            self.remove(mapped)
            self.request(mapped)

    # ---- in general ----------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._waiting and not self._copying

    @property
    def waiting(self) -> "list[MappedRelation]":
        """The relations that wait for a later round."""
        return list(self._waiting)

    @property
    def can_begin(self) -> bool:
        """Whether a round could take a relation now."""
        return not self._waiting.keys() <= self._taken.keys()

    def has(self, mapped: "MappedRelation") -> bool:
        is_here = mapped in self._waiting or mapped in self._copying
        return is_here and not mapped.state.is_lost

    # ---- rewrites ------------------------------------------------------------------------------

    def rewritten(self, mapped: "MappedRelation", *, in_vain: bool = False) -> None:
        """Count a rewrite of *mapped* that ended the round. *in_vain*: the rewrite also invalidated
        all chunks.
        """
        (self._rewrites_in_vain if in_vain else self._rewrites)[mapped] += 1

    def copied(self, mapped: "MappedRelation", *, has_more: bool = False) -> None:
        """Record the copy of *mapped*. *has_more*: more chunks remain; any round may copy them."""
        self.remove(mapped)
        self._release(mapped)
        self._rewrites.pop(mapped, None)
        if not has_more:
            self._rewrites_in_vain.pop(mapped, None)
            self._in_one_piece.discard(mapped)

    def copy_in_one_piece(self, mapped: "MappedRelation") -> None:
        """Do not copy *mapped* in chunks."""
        self._in_one_piece.add(mapped)

    def may_cut(self, mapped: "MappedRelation") -> bool:
        """Whether a round may copy a chunk of *mapped*, and leave the rest to later rounds."""
        return mapped not in self._in_one_piece and not self.needs_lock(mapped)

    def needs_lock(self, mapped: "MappedRelation") -> bool:
        """Whether a copy of *mapped* needs a lock, because rewrites would end a copy without a
        lock.
        """
        count = self._rewrites[mapped] + self._rewrites_in_vain[mapped]
        return count >= LOCK_AFTER_ROUNDS
