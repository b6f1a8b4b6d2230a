"""The state of a mapped table as one value, and the effect of each event on that value. Pure.

`State` is the part that users see, stored in streamer.relation: init → copying → catching_up →
ready, and error or paused from any. streamer stores a state before its work begins, so the stored
state is true after a crash. A process that reads a state at its start acts as follows:

- ``init``: the target contains no rows of this source yet, or rows to replace. Begin.
- ``copying`` with ``snapshot_lsn``: the table follows the stream, and a copy of some of its rows
  begins again, see `streamer.apply.lanes.lane`.
- ``copying``: the snapshot ended with the process that exported it. Increase the attempt number, so
  that an old task can no longer commit. Then clear the rows of finished parts, and begin again.
- ``catching_up``: the copy is complete, and ``end_lsn`` is its consistent point. The stream, read
  again from the acknowledged position, has all later changes; only the name differs from ``ready``.
- ``ready``: the table follows the stream.
- ``paused``: an operator paused the table. Changes are held; the source retains its WAL. A copy in
  progress ends, a queued copy waits.
- ``error``: the target rejects a change. A drainer retries now and then, and after an operator's
  request.

In the last two states too, ``snapshot_lsn`` says whether the relation needs a copy: the value is
null until a copy is complete.

`Need` names the copy or request that the table lacks to be in sync, and decides what happens to its
changes. A table without a need is in sync. `TableState` has both, and one method for each event:

- of operators: `paused`, `resumed`, `copy_requested`, `rows_requested`, `part_requested`
- of losses: `cut_off`, `lost`, `to_copy_again`, `blocked`, `unblocked`
- of copies: `chunk_begins` to `copy_failed`
- of the stream: `stopped_by_delete_limit`, `failing`, `recovered`, `drained`, `lacks_rows`

`streamer.runtime.tables.relations` holds and drains lanes as a state says. The event changes the
stored state, too, see `streamer.bookkeeping.relation_states`.
"""

import enum
from dataclasses import dataclass, replace
from typing import Final, Self

from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.resync_options import Resync
from streamer.errors.error_reports import ErrorReport
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn


class State(enum.StrEnum):
    """The states of contract.md, as stored in streamer.relation."""

    INIT = "init"
    COPYING = "copying"
    CATCHING_UP = "catching_up"
    READY = "ready"
    PAUSED = "paused"
    ERROR = "error"


class Need(enum.Enum):
    """The copy or request that a table needs before it is in sync."""

    NOTHING = enum.auto()
    """streamer applies the table's changes."""
    ROWS = enum.auto()
    """A copy of all rows, or a mark as synced. Changes wait; the copy's snapshot decides which of
    them are dropped.
    """
    PART = enum.auto()
    """A copy of some rows or columns. streamer applies changes up to the snapshot's position."""
    CHUNKS = enum.auto()
    """The next chunk of a copy. streamer applies changes of rows in earlier chunks."""
    CHUNK = enum.auto()
    """A chunk that a round copies now. streamer applies changes of rows in earlier chunks, up to
    the snapshot's position.
    """
    REQUEST = enum.auto()
    """A copy that an operator requests: changes are missing, and streamer drops later changes."""


ALL_ROWS: Final = Resync()
TO_POINT: Final = (Need.PART, Need.CHUNK)
"""A copy swaps rows at a point of the stream."""


@dataclass(frozen=True, slots=True)
class CopyScope:
    """The rows and columns of a copy.

    ``need`` is ``ROWS`` for all rows, ``PART`` for the rows of ``resync``, and ``CHUNKS`` for the
    rows after ``chunks``. With ``PART``, the other rows follow the stream meanwhile.
    """

    need: Need
    resync: Resync = ALL_ROWS
    chunks: ChunkedCopy | None = None

    @property
    def is_to_point(self) -> bool:
        """Whether the table is in sync, and follows the stream up to the copy's point."""
        return self.need is Need.PART

    @property
    def is_whole(self) -> bool:
        """Whether the copy writes all rows and columns, or compares them."""
        return self.need is not Need.CHUNKS and not self.resync.is_partial


@dataclass(frozen=True, slots=True)
class TableState:
    """See the module."""

    shown: State
    need: Need = Need.NOTHING
    error: ErrorReport | None = None
    through_lsn: Lsn = INVALID_LSN
    """The target contains all changes that commit before this LSN, by a copy or as stored at the
    start.
    """
    resync: Resync = ALL_ROWS
    """The options of the next copy."""
    chunks: ChunkedCopy | None = None
    """The rows that a copy in chunks has written."""
    chunks_obstacle: str | None = None
    """Why a copy in chunks cannot continue."""
    is_to_mark_synced: bool = False
    """The table counts as in sync at a position, without a copy."""
    is_read: bool = False
    """A copy has a snapshot of the table, or is about to take a snapshot."""
    point: Lsn | None = None
    """The position of the snapshot, or a position before the snapshot; None if not known yet."""

    @classmethod
    def stored(
        cls,
        shown: State,
        *,
        end_lsn: Lsn = INVALID_LSN,
        error: ErrorReport | None = None,
        has_snapshot: bool = True,
        needs_resync: bool = False,
        resync: Resync = ALL_ROWS,
        chunks: ChunkedCopy | None = None,
        is_to_mark_synced: bool = False,
    ) -> Self:
        """Return the state of a table after a start, from its row in streamer.relation."""
        if needs_resync:
            need = Need.REQUEST
        elif chunks is not None:
            need = Need.CHUNKS
        elif _needs_copy(shown, has_snapshot=has_snapshot):
            need = Need.ROWS
        elif resync.compares and shown in (State.COPYING, State.PAUSED, State.ERROR):
            need = Need.PART
        else:
            need = Need.NOTHING
        chunks = chunks if need is Need.CHUNKS else None
        return cls(shown, need, error, end_lsn, resync, chunks, is_to_mark_synced=is_to_mark_synced)

    # ---- what follows from a state -------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self.shown is State.PAUSED

    @property
    def is_lost(self) -> bool:
        """Whether changes are missing, so that only an operator's request helps."""
        return self.need is Need.REQUEST

    @property
    def follows(self) -> bool:
        """Whether the stream changes rows of the target, while a copy writes other rows."""
        return self.need in (Need.PART, Need.CHUNKS, Need.CHUNK)

    @property
    def skips_through(self) -> Lsn:
        """streamer drops changes up to this position, because the target or a copy contains these
        changes.
        """
        match self.need:
            case Need.REQUEST:
                return LSN_MAX
            case Need.ROWS:
                return LSN_MAX if self.point is None else self.point
            case _:
                return self.through_lsn

    @property
    def awaits_snapshot(self) -> bool:
        """Whether the table needs a copy of all rows, whose snapshot does not exist yet."""
        return self.need is Need.ROWS and not self.needs_stream

    @property
    def needs_stream(self) -> bool:
        """Whether the target needs all later changes from the stream.

        The table is in sync, or its copy may have a snapshot whose position is not known yet.
        """
        return self.skips_through != LSN_MAX or self.is_being_read

    @property
    def is_being_read(self) -> bool:
        """Whether a copy of all rows may have a snapshot whose position is not known yet."""
        return self.need is Need.ROWS and self.is_read and self.point is None

    @property
    def drains_to(self) -> Lsn | None:
        """The position at which the lane stops for a copy. None: the lane stops at once, because
        the position of the snapshot is not known yet.
        """
        if self.point is None:
            return None if self.is_read else LSN_MAX
        return self.point

    @property
    def scope(self) -> CopyScope:
        """The scope of the copy that the table needs."""
        need = Need.CHUNKS if self.need is Need.CHUNK else self.need
        return CopyScope(need, self.resync, self.chunks)

    def lacks(self, need: Need) -> bool:
        """Whether a copy of the scope *need* can begin; a copy of all rows includes every scope."""
        if need is Need.ROWS:
            return not self.is_lost
        return need in (Need.PART, Need.CHUNKS) and self.scope.need is need

    def _unless_paused(self, shown: State, error: ErrorReport | None = None) -> Self:
        return replace(self, shown=State.PAUSED if self.is_paused else shown, error=error)

    def _without_part(self) -> Self:
        """Replace a copy of some rows by a copy of all rows."""
        resync = ALL_ROWS if self.need is Need.PART else self.resync
        return replace(
            self, resync=resync, chunks=None, chunks_obstacle=None, is_read=False, point=None
        )

    def with_options(self, resync: Resync) -> Self:
        """Use *resync* as the options of the next copy."""
        return replace(self, resync=resync)

    # ---- operators -----------------------------------------------------------------------------

    def paused(self, error: ErrorReport | None = None) -> Self:
        """An operator pauses the table, or *error* reports a mass delete."""
        return replace(self, shown=State.PAUSED, error=error)

    def resumed(self) -> Self:
        """An operator resumes the table, while no copy of the table runs."""
        if self.follows:
            return replace(self, shown=State.COPYING, error=None)
        if self.shown not in (State.PAUSED, State.ERROR):
            return self
        if self.need is Need.NOTHING:
            return replace(self, shown=State.READY, error=None)
        return replace(self, shown=State.INIT, error=None, need=Need.ROWS, point=None)

    def copy_requested(self, resync: Resync | None = None) -> Self:
        """An operator requests the copy that already runs. *resync*: the options from now on."""
        options = self.resync if resync is None else resync
        return replace(self, shown=State.COPYING, error=None, resync=options)

    def rows_requested(self, resync: Resync) -> Self:
        """An operator requests a copy of all rows, which supersedes all earlier changes."""
        rows = replace(self._without_part(), need=Need.ROWS, resync=resync)
        return replace(rows, shown=State.INIT, error=None)

    def part_requested(self, resync: Resync, *, stays_paused: bool = False) -> Self:
        """An operator, or streamer itself, requests some rows or columns of a table in sync."""
        shown = State.PAUSED if stays_paused else State.COPYING
        need = self.need if self.follows else Need.PART
        return replace(self, shown=shown, error=None, need=need, resync=resync)

    # ---- losses --------------------------------------------------------------------------------

    def cut_off(self, error: ErrorReport) -> Self:
        """Changes of all tables of the source are missing; its next start refuses to stream."""
        return self._unless_paused(State.ERROR, error)

    def lost(self, error: ErrorReport) -> Self:
        """Changes are permanently missing; later changes are of no use."""
        return replace(self._without_part().cut_off(error), need=Need.REQUEST)

    def to_copy_again(self) -> Self:
        """The table needs a copy of all rows, which streamer begins without a request."""
        return replace(self._without_part()._unless_paused(State.INIT), need=Need.ROWS)

    def blocked(self, error: ErrorReport) -> Self:
        """The copy that the table needs cannot begin."""
        return replace(self, shown=State.ERROR, error=error)

    def unblocked(self) -> Self:
        """The copy that the table needs can begin."""
        return self if self.follows else replace(self, shown=State.INIT, error=None)

    # ---- copies --------------------------------------------------------------------------------

    def chunk_begins(self) -> Self:
        """A round is about to copy the next chunk."""
        return replace(self._unless_paused(State.COPYING), need=Need.CHUNK)

    def snapshot_begins(self) -> Self:
        """A round is about to take a snapshot, whose point is not known yet."""
        return replace(self, is_read=True, point=None)

    def snapshot_passes(self, lsn: Lsn) -> Self:
        """The point of the next snapshot will be after *lsn*."""
        return replace(self, point=lsn) if self.need in TO_POINT else self

    def copy_begins(self) -> Self:
        """A new attempt begins. The error of the last attempt stays until the copy progresses."""
        is_again = self.shown in (State.INIT, State.COPYING)
        return self._unless_paused(State.COPYING, self.error if is_again else None)

    def copy_began(self, consistent_point: Lsn) -> Self:
        """The snapshot of the copy is at *consistent_point*."""
        if self.need in (Need.NOTHING, Need.REQUEST):
            return self  # the copy was given up meanwhile
        return replace(self.copy_begins(), point=consistent_point)

    def reached_for(self, point: Lsn) -> Self:
        """A copy with a snapshot waits for all changes that commit before *point*."""
        return replace(self, point=point) if self.need in TO_POINT and self.is_read else self

    def snapshot_ended(self) -> Self:
        """No copy of the table has a snapshot, or waits for a snapshot."""
        return replace(self, is_read=False, point=None)

    def delayed(self, error: ErrorReport | None) -> Self:
        """The running copy makes no progress because of *error*; None when progress continues."""
        return replace(self, error=error) if self.shown in (State.INIT, State.COPYING) else self

    def without_table(self) -> Self:
        """The source has no table of that name, so the round gives up the copy."""
        return replace(self, point=None) if self.need is Need.ROWS else self

    def unfit_for_chunks(self, reason: str) -> Self:
        """streamer cannot tell whether a change concerns a row of an earlier chunk."""
        return replace(self, chunks_obstacle=reason)

    def switched_to_stream(self, chunks: ChunkedCopy | None, consistent_point: Lsn) -> Self:
        """The target contains all rows, or the rows of *chunks*, as of *consistent_point*."""
        state = replace(self, error=None, point=None, through_lsn=consistent_point)
        if chunks is not None:
            return replace(state, need=Need.CHUNKS, chunks=chunks)
        state = replace(state._without_part()._unless_paused(State.CATCHING_UP), resync=ALL_ROWS)
        return replace(state, need=Need.NOTHING, is_to_mark_synced=False)

    def copy_superseded(self, consistent_point: Lsn) -> Self:
        """The copy is complete as of *consistent_point*, and a later request needs a new copy."""
        return replace(self, through_lsn=consistent_point)

    def copy_failed(self, error: ErrorReport) -> Self:
        """A round gives up the copy. A table in sync stays in sync."""
        match self.need:
            case Need.CHUNK | Need.CHUNKS:
                state = replace(self, need=Need.CHUNKS, point=None)
                # A paused table continues when an operator resumes the table.
                return state if self.is_paused else replace(state, shown=State.ERROR, error=error)
            case Need.PART:
                state = replace(self._without_part(), need=Need.NOTHING)
                return state._unless_paused(State.READY, error)
            case Need.NOTHING:
                return self
            case _:
                return replace(self, shown=State.ERROR, error=error, point=None)

    # ---- the stream ----------------------------------------------------------------------------

    @property
    def is_of_stream(self) -> bool:
        """Whether the stream owns the shown state, rather than a copy or a pause."""
        return self.need is Need.NOTHING and not self.is_paused

    def stopped_by_delete_limit(self, error: ErrorReport) -> Self:
        """The next change is a mass delete, which a copy of all rows would replace."""
        is_replaced = self.need in (Need.ROWS, Need.REQUEST)
        return self if is_replaced else self.paused(error)

    def with_shown(self, shown: State, error: ErrorReport | None) -> Self:
        """Return the table state with *shown* and *error*, if the stream owns the shown state."""
        return replace(self, shown=shown, error=error) if self.is_of_stream else self

    def failing(self, error: ErrorReport) -> Self:
        """The target refuses a change."""
        return self.with_shown(State.ERROR, error)

    def lacks_rows(self, gap: ErrorReport) -> Self:
        """Rows of a table in sync are missing; an existing error takes precedence."""
        is_well = self.error is None or self.error.code == gap.code
        return replace(self, error=gap) if self.shown is State.READY and is_well else self

    def recovered(self) -> Self:
        """The target accepts the change that it refused."""
        is_failing = self.is_of_stream and self.shown is State.ERROR
        return replace(self, shown=State.CATCHING_UP, error=None) if is_failing else self

    def drained(self) -> Self:
        """The target contains all held changes."""
        is_behind = self.shown in (State.CATCHING_UP, State.ERROR) and self.is_of_stream
        return replace(self, shown=State.READY, error=None) if is_behind else self


def _needs_copy(state: State, *, has_snapshot: bool) -> bool:
    """Whether a relation in *state* at a start still needs a copy."""
    match state:
        case State.INIT:
            return True
        case State.COPYING | State.ERROR | State.PAUSED:
            return not has_snapshot
        case _:
            return False
