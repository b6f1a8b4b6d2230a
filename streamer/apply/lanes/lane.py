"""Lanes: sequences of changes with a fixed order.

With ``consistency: table`` every mapped relation has its own lane. With ``consistency:
transaction`` the ready relations of a source share a lane, so that a source transaction becomes
visible as a whole. A lane is *live* or *held*. A live lane sends its changes to the queue of a
worker. A held lane sends changes to a spool on disk, from which a drainer applies the changes on
its own connection. A relation is held while it waits for its copy, a lock, an operator, or a row
that the target refuses. A lane is also held until the end of a transaction too large for memory.
The remaining relations continue.

Changes keep their order, whether the worker or the drainer applies the changes. A drainer begins
after the worker has finished all transactions of the lane, and a lane becomes live again only with
an empty spool.

A lane *held to a point* lets a copy replace some rows or columns of a relation that is in sync. The
copy lacks the rest of the rows, whose changes must not be dropped:

0. ``hold_to_point(LSN_MAX)``: the drainer applies all changes while the copy waits for its slot
   and prepares the target. Otherwise this table could delay a change of a shared type, and so the
   copy.
1. ``hold_to_point(None)`` before the copy's snapshot exists: all changes dispatched so far are
   older.
2. The snapshot shows the source at the consistent point P. ``hold_to_point(P)`` lets the drainer
   apply only the changes that commit before P. The stream has delivered all these changes once the
   tracker is at P.
3. With ``is_at_point``, the target's rows of this relation are the source's rows at P. Now a
   transaction may swap its rows for the rows of the snapshot, and store P as the relation's
   position.
4. ``release(Hold.POINT)`` lets the drainer apply the remaining changes.

The state of the table (`streamer.control.table_state`) says which step comes next. `Relations`
takes the step, and `SyncEvents.reach` waits for the third. A process that dies before the commit
has stored only applied changes, so the relation is unchanged.

A copy in chunks (`streamer.copy.copy_in_chunks`) takes the same steps for each chunk after the
first. Its lane stays held in between, and the drainer leaves out changes of rows that a later chunk
copies (`streamer.apply.lanes.copied_range`).
"""

import asyncio
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from sys import intern
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from streamer.apply.lanes.blocked_keys import Quarantine
from streamer.apply.lanes.delete_limit import DeleteLimit
from streamer.apply.lanes.held_counts import Held
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.sql.wide_rows import PlanStatements
from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.mass_delete import MassDelete
from streamer.control.progress_tracker import LanePending
from streamer.control.table_state import Need, State, TableState
from streamer.decode.pgoutput import Relation
from streamer.decode.text_conversion import TextConversion
from streamer.decode.transactions import Transaction
from streamer.errors.error_classes import StreamerError
from streamer.mapping.recomputed_columns import recomputed
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.schema.definition_message import Part
from streamer.source.catalog import SourceRelation
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn
from streamer.util.waiting import wait_for_event

if TYPE_CHECKING:
    from streamer.errors.remedies import Remedy


@dataclass(frozen=True, slots=True)
class RelationSource:
    """Facts about a relation's source that its plans need and RELATION messages lack.

    ``binary_types``: OIDs of types that may be applied in binary; empty in text transport.
    ``conversion``: converts the source's text to UTF-8, if the source uses a different encoding.
    ``unique_keys``: columns whose values no two rows share, not even within a transaction.
    """

    database: str
    sid: str | None
    fence: FencingToken
    binary_types: frozenset[int]
    primary_key: tuple[str, ...] = ()
    unique_keys: tuple[tuple[str, ...], ...] = ()
    has_partial_key: bool = False
    is_partitioned: bool = False
    types: Mapping[str, str] = field(default_factory=dict)
    conversion: TextConversion | None = None

    def with_definition(self, relation: SourceRelation) -> "RelationSource":
        """Return these facts with the definition of *relation* in the source's catalogs."""
        return replace(
            self,
            primary_key=tuple(map(intern, relation.primary_key)),
            unique_keys=relation.unique_keys,
            has_partial_key=relation.replica_identity != "f" and relation.has_generated_key,
            is_partitioned=relation.is_partitioned,
            types=_types(tuple((intern(c.name), intern(c.type)) for c in relation.columns)),
        )


@lru_cache(maxsize=4096)
def _types(columns: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """Return types by column; the tables of many tenants share one object."""
    return MappingProxyType(dict(columns))


class MappedRelation:
    """A mapped source relation: its place in the bookkeeping, and the target's progress.

    ``end_lsn`` is the present value of the progress row; only the task that commits changes of this
    relation moves it.
    """

    __slots__ = (
        "_confirmed",
        "_confirmed_through",
        "_statements",
        "conflict_watch",
        "copy_remedy",
        "decided",
        "end_lsn",
        "former_labels",
        "is_doubtful",
        "mapping",
        "obstacle",
        "outlives",
        "parts",
        "plan",
        "quarantine",
        "relation_id",
        "relid",
        "size_bytes",
        "skip_through_lsn",
        "source",
        "state",
    )

    def __init__(
        self,
        relation_id: int,
        mapping: RelationMapping,
        end_lsn: Lsn,
        source: RelationSource,
        state: TableState | None = None,
    ) -> None:
        """*state*: the state; by default, a table in sync through *end_lsn*."""
        self.relation_id = relation_id
        self.mapping = mapping
        self.end_lsn = end_lsn
        self.become(state or TableState(State.READY, through_lsn=end_lsn))
        self.decided: MassDelete | None = None
        """The last mass delete that an operator decided about."""
        self.outlives = False
        """The target may contain rows whose deletes an operator has skipped."""
        self.obstacle: Callable[[], StreamerError] | None = None
        """Makes the error that stops the relation until the rules change."""
        self.parts: set[Part] | None = None
        """Parts of the source's table that a command may drop without naming the table; None:
        any.
        """
        self.is_doubtful = False
        """The stored definition may differ from the source's, so the source must repeat it."""
        self.relid: int | None = None
        """Oid of the source's table; a table of that name with a different oid is a new table."""
        self.source = source
        self.size_bytes = 0
        """The size of the source's table at registration: decides the order of copies."""
        self.plan: ApplyPlan | None = None
        self.former_labels: Mapping[str, tuple[bool, Mapping[str, str]]] = {}  # `FormerColumns`
        self._statements: PlanStatements | None = None
        self._confirmed: Relation | None = None
        """The last message that repeated the definition; saves a comparison for each
        transaction.
        """
        self._confirmed_through = 0
        """RELATION messages below this number that repeat the definition of ``plan`` fit
        ``plan``.
        """
        self.quarantine = Quarantine()
        self.copy_remedy: Remedy | None = None
        """The command that copies the table and discards the waiting changes; set after the target
        refused changes from before a requested copy.
        """
        self.conflict_watch = 0
        """The number of further windows in which a writer checks for missing rows before each
        change.
        """

    def become(self, state: TableState) -> None:
        """Set *state*. The caller updates the lane, see `Relations.become`."""
        self.state = state
        self.skip_through_lsn = state.skips_through

    def add_parts(self, parts: set[Part]) -> None:
        """Add *parts* of the source's table. Dropped parts may stay in the set."""
        self.parts = parts | (self.parts or set())

    def has(self, transaction: Transaction) -> bool:
        """Whether a copy included the changes of *transaction*."""
        return transaction.final_lsn < self.skip_through_lsn

    def check(self) -> None:
        """Raise the error of the obstacle, if any."""
        if self.obstacle is not None:
            error = self.obstacle()
            error.subject = self
            raise error

    def plan_for(self, relation: Relation) -> ApplyPlan | None:
        """Return the plan for *relation* if the plan is current.

        The source repeats RELATION after every change of the table's definition, also after changes
        that RELATION does not show, such as a new primary key. So each message needs a plan or a
        confirmation, for which the planner reads the source's catalogs after the message arrives.
        """
        plan = self.plan
        if plan is None or plan.relation is relation or self._confirmed is relation:
            return plan
        if relation.number < self._confirmed_through and plan.relation == relation:
            self._confirmed = relation
            return plan
        return None

    def set_plan(self, plan: ApplyPlan, confirmed_through: int = 0) -> None:
        """Apply later changes by *plan*.

        *confirmed_through*: the message number before the planner read the source's catalogs.
        """
        self.plan, self._confirmed = plan, None
        self._confirmed_through = confirmed_through

    def statements(self, plan: ApplyPlan) -> PlanStatements:
        """Return the statements of *plan* for changes of this relation."""
        if self._statements is None or self._statements.plan is not plan:
            self._statements = PlanStatements(plan)
        return self._statements

    def confirm(self, through: int) -> None:
        """Confirm the plan by the source's catalogs, read after message number *through*."""
        self._confirmed_through = through

    def invalidate(self, plan: ApplyPlan) -> None:
        """Discard *plan*; later changes get a new plan."""
        if self.plan is plan:
            self.plan = None

    def decide(self, decided: MassDelete | None) -> None:
        """Apply an operator's decision about a mass delete, if any."""
        self.decided = decided
        if decided is not None and decided.skips and not self.outlives:
            self.outlives = True
            self.plan = None

    def switched_to_stream(self, chunks: ChunkedCopy | None, lsn: Lsn) -> None:
        """Record that a copy is complete up to *lsn*, for all rows or for the rows of *chunks*."""
        self.end_lsn = lsn
        if chunks is not None:
            return
        self.plan = None  # the copy may have changed the target's indexes
        self.copy_remedy = None
        if self.state.need is not Need.PART:
            self.outlives = False

    def can_backfill_to(
        self, mapping: RelationMapping | None, columns: Sequence[str] | None
    ) -> bool:
        """Return whether *mapping* differs only in columns that a backfill can recompute.

        *columns*: the source's columns, or None if no backfill is possible. A relation without a
        copy, or with rows in quarantine, needs a full copy.
        """
        present = self.mapping
        if mapping is None or (present.rows, present.type) != (mapping.rows, mapping.type):
            return False
        fingerprint = present.rule.expressions_fingerprint
        if fingerprint == mapping.rule.expressions_fingerprint:
            return True
        if columns is None or self.quarantine.count or self.skip_through_lsn == LSN_MAX:
            return False
        return recomputed(fingerprint, mapping, columns) is not None

    def __repr__(self) -> str:
        return (
            f"MappedRelation({self.source.database!r}, {self.source.sid!r}, {self.mapping.source})"
        )


class Hold(enum.Flag):
    """Why a lane is held. The drainer works unless one of `BLOCKING` is among the reasons."""

    NONE = 0
    SYNC = enum.auto()  # a copy of its relation is under way
    PAUSED = enum.auto()  # at an operator's request
    ERROR = enum.auto()  # the target refuses a change: retried every few seconds
    BUSY = enum.auto()  # a lock or a similar transient obstacle at the target
    LARGE = enum.auto()  # a transaction larger than memory
    QUARANTINE = enum.auto()  # rows are in quarantine: a drainer handles later changes of them
    POINT = enum.auto()  # a copy swaps rows at a point: the drainer stops at that point
    CHUNKS = enum.auto()  # a copy in chunks: the drainer knows which rows are copied
    SLOW = enum.auto()  # slow at the target: a drainer spares the remaining lanes of the worker


BLOCKING = Hold.SYNC | Hold.PAUSED


def holds(state: TableState) -> Hold:
    """Return the reasons to hold the lane of a table in *state*. Pure."""
    if state.is_lost:
        return Hold.NONE  # its changes are dropped
    reasons = Hold.PAUSED if state.is_paused else Hold.NONE
    match state.need:
        case Need.ROWS:
            return reasons | Hold.SYNC
        case Need.PART:
            return reasons | Hold.POINT
        case Need.CHUNKS:
            return reasons | Hold.CHUNKS
        case Need.CHUNK:
            return reasons | Hold.CHUNKS | Hold.POINT
        case _:
            return reasons


STAYING = Hold.QUARANTINE | Hold.CHUNKS | Hold.SLOW
"""Reasons for which a lane stays with the drainer, even with an empty spool."""


@dataclass(frozen=True, slots=True)
class QuarantineRequest:
    """An operator's request about rows in quarantine: some rows of a relation, or all."""

    request_id: int
    mapped: MappedRelation
    is_retry: bool
    ids: list[int] | None


class TransactionSpool(Protocol):
    """Keeps lane transactions on disk, in order; see `streamer.apply.lanes.spool`."""

    @property
    def is_empty(self) -> bool: ...
    @property
    def held(self) -> Held: ...
    def append(self, lane_transaction: LaneTransaction) -> None: ...
    def discard_open(self) -> None: ...
    def read(self, size: int) -> list[LaneTransaction]: ...
    def rewind(self) -> None: ...
    def release(self, count: int) -> None: ...
    def close(self) -> None: ...


class TransactionQueue(Protocol):
    """A worker's queue."""

    def put(self, lane: "Lane", *transactions: LaneTransaction) -> None: ...
    def hurry(self) -> None: ...


class LaneOwner(Protocol):
    """The owner of lanes, which receives their progress: the pipeline."""

    @property
    def source(self) -> SourceMapping:
        """The source of the lanes' changes."""
        ...

    @property
    def fence(self) -> FencingToken:
        """The right to write the lanes' changes to the target."""
        ...

    @property
    def has_other_lanes(self) -> bool:
        """Whether the source has several lanes."""
        ...

    def find_mapping(self, name: RelationName) -> RelationMapping | None:
        """Return the mapping of a source table; None if no rule maps the table."""
        ...

    def is_behind(self, name: RelationName, lsn: Lsn) -> bool:
        """Whether the target lacks changes of a table that committed before *lsn*."""
        ...

    def has_delivered(self, lsn: Lsn) -> bool:
        """Whether the stream has delivered all changes that committed before *lsn*."""
        ...

    def lane_held(self, lane: "Lane") -> None:
        """The lane becomes held: start a drainer for it."""
        ...

    def lane_live(self, lane: "Lane") -> None:
        """The lane no longer holds changes."""
        ...

    def lane_durable(self, lane: "Lane", transactions: list[LaneTransaction]) -> None:
        """The target has committed *transactions*, the lane's oldest."""
        ...

    async def lane_failed(self, lane: "Lane", error: StreamerError) -> None:
        """The target refuses the lane's next change."""
        ...

    async def lane_waits(self, lane: "Lane", reason: str | None) -> None:
        """The lane waits for the target because of *reason*; None if the wait ended."""
        ...

    def has_delete_limit(self, lane: "Lane") -> bool:
        """Whether a table of the lane limits the deletes of a transaction."""
        ...

    async def delete_limit_reached(
        self, lane: "Lane", mapped: MappedRelation, mass_delete: MassDelete
    ) -> None:
        """The lane's next transaction deletes more rows of *mapped* than its rule allows."""
        ...

    async def lane_recovered(self, lane: "Lane") -> None:
        """The target accepts changes again."""
        ...

    async def lane_drained(self, lane: "Lane") -> None:
        """All held changes are durable."""
        ...

    def source_failed(self, error: StreamerError) -> None:
        """End the source's attempt: none of its lanes can continue before the next attempt."""
        ...

    def lane_of(self, mapped: MappedRelation) -> "Lane | None":
        """Return the lane of a relation's changes, if the relation is still mapped."""
        ...

    def quarantine_changed(self, mapped: MappedRelation) -> None:
        """The number of a relation's rows in quarantine has changed."""
        ...


@dataclass(eq=False, slots=True, weakref_slot=True)
class Lane:
    """A lane. Its methods never wait.

    A process may have a lane for each of 100,000 tables, so an idle lane has no queues.
    """

    name: str
    queue: TransactionQueue
    owner: LaneOwner
    open_spool: Callable[[], TransactionSpool]
    table: str | None = None
    """The source's table, if the lane serves a single table."""
    hold: Hold = Hold.NONE
    error: str | None = None
    pending: LanePending = field(default_factory=LanePending)
    spool: TransactionSpool | None = None
    queued_count: int = 0
    """Number of unfinished transactions at the worker."""
    returned: list[TransactionSpool] = field(default_factory=list)
    """Spools of the transactions that the worker gave back; all precede `spool`."""
    backend_pid: int | None = None
    """The drainer's session at the target while the drainer applies changes of this lane."""
    is_draining: bool = False
    """Whether a drainer is applying changes of this lane."""
    slow_until: float = 0.0
    """End of the hold as slow, on the clock of `time.monotonic`."""
    queues_since: float | None = None
    """Start of the wait for a drainer's connection, on the clock of `time.monotonic`."""
    has_open_transaction: bool = False
    point: Lsn | None = None
    """The drainer applies only changes that commit before this point; None if unknown so far.
    `LSN_MAX` before the snapshot.
    """
    is_at_point: bool = False
    """All changes before `point` that arrived are durable."""
    passed_lsn: Lsn = INVALID_LSN
    """All changes of the lane that commit before this position are durable."""
    is_ending: bool = False
    """The pipeline ends; the source sends unapplied changes again to the next attempt."""
    delete_limit: DeleteLimit = field(default_factory=DeleteLimit)
    requests: list[QuarantineRequest] = field(default_factory=list)
    """The drainer fulfils requests before it applies changes."""
    _changed: asyncio.Event | None = None

    @property
    def changed(self) -> asyncio.Event:
        """The event of the next change; a task clears the event before it waits."""
        if self._changed is None:
            self._changed = asyncio.Event()
        return self._changed

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        if self._changed is not None:
            self._changed.set()

    @property
    def is_held(self) -> bool:
        return self.spool is not None

    @property
    def is_held_for_copy(self) -> bool:
        """Whether the lane keeps every change until a copy decides which changes it includes."""
        return Hold.SYNC in self.hold

    @property
    def may_drain(self) -> bool:
        if not self.is_held or self.queued_count or self.hold & BLOCKING:
            return False
        return Hold.POINT not in self.hold or (self.point is not None and not self.is_at_point)

    def is_applying(self, through_lsn: Lsn) -> bool:
        """Whether changes up to *through_lsn* may be on their way to the target."""
        if not self.queued_count and not self.is_draining:
            return False
        behind = self.pending.flush_lsn_max
        return self.has_open_transaction or (behind is not None and behind < through_lsn)

    def is_behind(self, lsn: Lsn) -> bool:
        """Whether changes of the lane that commit before *lsn* are not durable."""
        first = self.pending.first_lsn
        return first is not None and first <= lsn and self.passed_lsn < lsn

    @property
    def has_backlog(self) -> bool:
        """Whether requests or changes wait for the drainer."""
        return bool(self.requests) or any(not spool.is_empty for spool in self._spools)

    @property
    def _spools(self) -> list[TransactionSpool]:
        """All spools, in commit order."""
        return [*self.returned, *([] if self.spool is None else [self.spool])]

    @property
    def front(self) -> TransactionSpool:
        """The spool that holds the oldest transaction."""
        while self.returned and self.returned[0].is_empty:
            self.returned.pop(0).close()
        return self._spools[0]

    def held(self, mapped: MappedRelation) -> tuple[int, int]:
        """Return the number and the bytes of a relation's held changes."""
        counts = [spool.held.counts_of(mapped) for spool in self._spools]
        return sum(number for number, _ in counts), sum(size for _, size in counts)

    def dispatch(self, lane_transaction: LaneTransaction) -> None:
        """Send the next transaction, in commit order, to the worker or the spool."""
        if self.is_ending:
            return
        if self.spool is None and lane_transaction.end_lsn is None:
            self.add_hold(Hold.LARGE)
        elif self.spool is None and lane_transaction.redefines:
            self.add_hold(Hold.BUSY)
        if self.delete_limit.add(lane_transaction):
            self.add_hold(Hold.BUSY)  # a drainer applies the preceding changes
        if self.spool is None:
            self.queued_count += 1
            self.queue.put(self, lane_transaction)
            return
        for single in lane_transaction.split():
            self.spool.append(single)
            if self._is_before_point(single):
                self.is_at_point = False
        self.has_open_transaction = lane_transaction.end_lsn is None
        self.wake()

    def add_hold(self, reason: Hold, error: str | None = None) -> None:
        """Hold this lane from now on, for *reason*."""
        if self.is_ending:
            return
        self.hold |= reason
        if error is not None:
            self.error = error
        if self.spool is None:
            self.spool = self.open_spool()
            self.queue.hurry()  # a drainer begins when the queue is empty
            self.owner.lane_held(self)
        self.wake()

    def release(self, reason: Hold) -> None:
        """Remove *reason*; the drainer continues unless another reason blocks the lane."""
        self.hold &= ~reason
        if reason & Hold.ERROR:
            self.error = None
        if reason & Hold.POINT:
            self.point, self.is_at_point = None, False
        self.wake()

    def defer_to_drainer(self, until: float) -> None:
        """Leave this lane to a drainer until *until*, a time of `time.monotonic`."""
        self.slow_until = until
        self.add_hold(Hold.SLOW)

    def hold_to_point(self, point: Lsn | None) -> None:
        """Allow the drainer to apply changes that commit before *point*; with None, no changes."""
        if Hold.POINT not in self.hold or self.point != point:
            self.point, self.is_at_point = point, False
            self.add_hold(Hold.POINT)

    def _is_before_point(self, lane_transaction: LaneTransaction) -> bool:
        return self.point is not None and lane_transaction.transaction.final_lsn < self.point

    def queue_request(self, request: QuarantineRequest) -> None:
        """Queue *request* in order, unless the queue already contains the request."""
        if all(queued.request_id != request.request_id for queued in self.requests):
            self.requests.append(request)
            self.add_hold(Hold.BUSY)

    def split(self, lane_transaction: LaneTransaction) -> list[LaneTransaction]:
        """Divide a block into its transactions, which the worker applies instead."""
        singles = lane_transaction.split()
        self.queued_count += len(singles) - 1
        return singles

    def applied(self, transactions: list[LaneTransaction]) -> None:
        """The worker has committed *transactions*."""
        self.owner.lane_durable(self, transactions)
        self._uncount(len(transactions))

    def give_back(self, transactions: list[LaneTransaction]) -> None:
        """Hold the lane; spool *transactions*, which the worker cannot apply, and all later
        transactions.

        The lane may be held for days, so the transactions go to disk. Raises SpoolError.
        """
        if self.is_ending:
            self._uncount(len(transactions))
            return
        self.add_hold(Hold.BUSY)
        if transactions:
            spool = self.open_spool()
            for lane_transaction in transactions:
                for single in lane_transaction.split():
                    spool.append(single)
            # The worker returned later transactions first, and now returns the window whose commit
            # failed.
            self.returned.insert(0, spool)
            self.is_at_point = False
        self._uncount(len(transactions))

    def _uncount(self, count: int) -> None:
        self.queued_count -= count
        if self.queued_count == 0:
            self.wake()

    def read_held(self, size: int) -> list[LaneTransaction]:
        """Return the next held transactions, about *size* bytes, or a piece of a larger
        transaction.

        The lane keeps the transactions until `drained` is called. A lane held to a point returns
        the transactions before that point. Raises OpenTransactionDiscarded.
        """
        if not self.is_held:
            return []
        transactions = self.front.read(size)
        if transactions:
            self.passed_lsn = max(self.passed_lsn, transactions[0].transaction.final_lsn)
        if Hold.POINT not in self.hold:
            return transactions
        transactions = list(itertools.takewhile(self._is_before_point, transactions))
        if not transactions:
            self.front.rewind()
            self.is_at_point = True
            self.wake()
        return transactions

    def drained(self, count: int) -> None:
        """Drop the first *count* finished transactions, for the next `read_held`."""
        spool = self.front
        spool.release(count)
        spool.rewind()

    def discard_open(self) -> None:
        """Discard the unfinished transaction of a lost connection; the source sends it again."""
        if self.has_open_transaction:
            assert self.spool is not None
            self.spool.discard_open()
            self.delete_limit.discard_open()
            self.has_open_transaction = False
            self.wake()

    def go_live(self) -> bool:
        """Return to the worker's queue if no change is held; return whether the lane is live."""
        if self.hold & (BLOCKING | Hold.POINT | STAYING):
            return False
        if self.has_backlog or self.has_open_transaction:
            return False
        self._close_spools()
        self.hold = Hold.NONE
        self.error = None
        self.owner.lane_live(self)
        return True

    def close(self) -> None:
        """Discard all changes; the next attempt streams again from the acknowledged position."""
        self._close_spools()
        self.requests.clear()

    def _close_spools(self) -> None:
        for spool in self._spools:
            spool.close()
        self.returned.clear()
        self.spool = None


async def until_idle(lane: Lane) -> None:
    """Wait until the worker has finished all transactions of *lane*."""
    while lane.queued_count:
        lane.queue.hurry()
        lane.changed.clear()
        await lane.changed.wait()


async def until_changed(lane: Lane, seconds: float | None) -> None:
    """Wait until *lane* changes, at most *seconds*."""
    lane.changed.clear()
    await wait_for_event(lane.changed, seconds)
