"""Decides which lane receives which changes, and up to which position a source is dispatched.

The dispatcher reads the messages of the stream in order and gives every change of a mapped relation
to the lane of that relation. The tracker records each commit before any lane can apply a part of
the commit. The tracker can therefore never report a position as durable that a lane must still
reach. A keepalive moves the position only between transactions.

A block goes to the lanes as a whole if its transactions are new, before the stop position and after
the copies of their tables. Otherwise the dispatcher handles the transactions of the block one by
one. Tests compare the results of both ways.

A transaction may carry a message of ``streamer execute``. The dispatcher then yields
`ScriptsReached` before it records or dispatches any part of that transaction.

With a stop condition, the dispatcher ignores the first transaction that commits at or after the
stop position, and all later transactions.

Pure.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from streamer.apply.lanes.lane_transaction import LaneBlock, LaneTransaction
from streamer.apply.rows.hashed_columns import hashed_changes
from streamer.control.progress_tracker import LanePending, Run
from streamer.decode.pgoutput import DDL_PREFIX, EXECUTE_PREFIX, Redefinition, as_upserts
from streamer.decode.transactions import Changes, TransactionBlock
from streamer.schema.definition_message import (
    ALTER_TABLE,
    UNPUBLISHED,
    DefinitionMessage,
    as_made,
    with_dropped,
)
from streamer.source.history_check import CommittedTransaction, HistoryCheck
from streamer.util.lsn import LSN_MAX, Lsn

if TYPE_CHECKING:
    from streamer.apply.lanes.lane import Lane, MappedRelation
    from streamer.control.progress_tracker import ProgressTracker
    from streamer.decode.pgoutput import LogicalMessage, Relation
    from streamer.decode.transactions import TransactionAssembler, TransactionPiece


class HistoryMismatch(Exception):
    """The source does not send the last acknowledged transaction again."""


class Lanes(Protocol):
    """The mapped relations of the source, and their lanes; both may change between two pieces."""

    def find(self, relation: "Relation") -> "MappedRelation | None": ...
    def __iter__(self) -> "Iterator[MappedRelation]": ...
    def lane(self, mapped: "MappedRelation") -> "Lane": ...
    def report_unmapped(self) -> None:
        """Report that the source defined a table that is not mapped."""
        ...


@dataclass(slots=True)
class Dispatched:
    """The parts of a block, a transaction or a piece of a transaction, by lane.

    ``commit_time``: the newest commit time, a protocol time. ``is_new`` is false for a transaction
    that was dispatched before, and after the stop position.
    """

    commit_time: int
    end_lsn: Lsn | None
    parts: "dict[Lane, LaneTransaction]"
    is_new: bool = True


@dataclass(slots=True)
class ScriptsReached:
    """The stream has reached a transaction with messages of ``streamer execute``.

    All earlier transactions are dispatched, and no part of this transaction. ``lsn``: the position
    of the commit. ``is_made``: the target contains the transaction's definitions and rows, because
    a script for both sides has run. Lanes still apply the source's rows, as upserts: scripts may
    draw different values on each side.
    """

    xid: int
    lsn: Lsn
    messages: "list[LogicalMessage]"
    is_made: bool = False


class Dispatcher:
    """Dispatches the stream of a source, for one attempt to stream the source."""

    def __init__(
        self,
        assembler: "TransactionAssembler",
        lanes: Lanes,
        tracker: "ProgressTracker",
        history: HistoryCheck,
        *,
        replaced: "Callable[[MappedRelation], None]",
        with_origins: bool = False,
        stop_lsn: Lsn | None = None,
        ddl_token: str | None = None,
    ) -> None:
        """Calls *replaced* when the stream sends a new table under a relation's name.

        *with_origins*: the stream forwards transactions that carry a replication origin.
        *ddl_token*: the dispatcher ignores messages about definitions without this token, because
        every role of a source may write messages.
        """
        self.stop_lsn = stop_lsn
        """The dispatcher ignores transactions from this position on; `LSN_MAX`: unknown."""
        self.has_passed_stop = False
        """A transaction at or after `stop_lsn` has arrived."""
        self._assembler = assembler
        self._lanes = lanes
        self._tracker = tracker
        self._history = history
        self._replaced = replaced
        self._with_origins = with_origins
        self._ddl_token = ddl_token
        self.keeps_blocks = True
        """Whether whole blocks go to lanes; tests compare with single transactions."""
        self._made: int | None = None
        """The last transaction whose changes a script has made at the target."""
        self._open_lanes: dict[Lane, None] = {}
        """Lanes with a piece of the present, incomplete transaction."""

    def feed(self, payloads: list[bytes]) -> Iterator[Dispatched | ScriptsReached]:
        """Read a burst of messages; yield the transactions that the burst completes, including
        transactions without parts.

        The caller gives each part to its lane, or runs the scripts, before the next iteration.
        Raises HistoryMismatch and ProtocolError.
        """
        for item in self._assembler.feed(payloads):
            if not isinstance(item, TransactionBlock):
                yield from self._dispatch(item)
            elif (parts := self._share_out(item)) is not None:
                yield self._dispatch_block(item, parts)
            else:
                for piece in item.pieces():
                    yield from self._dispatch(piece)

    @property
    def is_between_transactions(self) -> bool:
        """Whether the stream has not begun a transaction that it must end."""
        return self._assembler.is_between_transactions

    def keepalive(self, wal_end_lsn: Lsn) -> bool:
        """Record the position that the source reached.

        Return False for a position in the middle of a transaction or after the stop position,
        which covers changes that were not dispatched. Raises HistoryMismatch.
        """
        if self.has_passed_stop or not self._assembler.is_between_transactions:
            return False
        if not self._history.saw_position(wal_end_lsn):
            raise HistoryMismatch
        self._tracker.keepalive(wal_end_lsn)
        return True

    def has_reached_stop(self, stored_lsn: Lsn) -> bool:
        """Return whether all changes before the stop position are durable.

        *stored_lsn*: the durable position that is stored in the target.
        """
        if self.stop_lsn is None:
            return False
        has_arrived = self.has_passed_stop and self._tracker.is_idle
        return has_arrived or stored_lsn >= self.stop_lsn

    def forget(self, lane: "Lane") -> None:
        """Stop counting the changes of *lane*: its relation is no longer mapped."""
        self._open_lanes.pop(lane, None)
        self._tracker.durable(lane.pending, LSN_MAX)

    def reset(self) -> None:
        """Discard unfinished transactions, which the source will send again."""
        self._assembler.reset()
        self._open_lanes.clear()

    def _share_out(self, block: TransactionBlock) -> "dict[Lane, LaneBlock] | None":
        """Return the parts of a block; None if the block cannot go to the lanes as a whole."""
        if not self.keeps_blocks or not self._history.is_complete:
            return None
        if self._open_lanes or self.has_passed_stop:
            return None
        if block.final_lsns[0] < self._tracker.newest_lsn:
            return None
        if self.stop_lsn is not None and block.final_lsns[-1] >= self.stop_lsn:
            return None
        parts: dict[Lane, LaneBlock] = {}
        for changes in block.changes:
            mapped = self._lanes.find(changes.relation)
            if mapped is None:
                continue  # no longer mapped
            lane = self._lanes.lane(mapped)
            if not lane.is_held_for_copy:
                if block.final_lsns[changes.numbers[0]] < mapped.skip_through_lsn:
                    return None
                if mapped.relid not in (None, changes.relation.relid):
                    return None
            part = parts.get(lane)
            if part is None:
                part = parts[lane] = LaneBlock(block.transaction(-1), [], None, 0, block=block)
            if hashes := mapped.mapping.rule.hashes:
                changes = hashed_changes(changes, hashes, mapped.source.conversion)
            part.changes.append((mapped, changes))
            part.size += changes.size
        return parts

    def _dispatch_block(
        self, block: TransactionBlock, parts: "dict[Lane, LaneBlock]"
    ) -> Dispatched:
        before_lsn, end_lsn = self._tracker.newest_lsn, Lsn(block.end_lsns[-1])
        if block.changes:
            first = min(changes.numbers[0] for changes in block.changes)
            last = max(changes.numbers[-1] for changes in block.changes)
            self._history.saw_transactions(
                self._committed_transaction(block, first), self._committed_transaction(block, last)
            )
        counted: set[int] = set()
        runs: list[tuple[LanePending, Run]] = []
        for lane, part in parts.items():
            first = min(changes.numbers[0] for _, changes in part.changes)
            last = max(changes.numbers[-1] for _, changes in part.changes)
            part.transaction = block.transaction(last)
            part.end_lsn = Lsn(block.end_lsns[last])
            numbers = set[int]().union(*(changes.numbers for _, changes in part.changes))
            part.led = numbers - counted if counted else numbers
            part.is_lead = bool(part.led)
            if len(parts) > 1:
                counted |= numbers
            first_lsn = Lsn(block.end_lsns[first])
            in_front = Lsn(block.end_lsns[first - 1]) if first else before_lsn
            run = Run(in_front, first_lsn, part.end_lsn, block.commit_times[first])
            runs.append((lane.pending, run))
        self._tracker.dispatched_runs(end_lsn, runs)
        block.changes = []  # so that a lane retains only its own changes
        return Dispatched(max(block.commit_times), end_lsn, dict(parts))

    def _committed_transaction(self, block: TransactionBlock, number: int) -> CommittedTransaction:
        return CommittedTransaction(
            Lsn(block.end_lsns[number]),
            block.xids[number],
            block.commit_times[number],
            self._with_origins,
        )

    def _dispatch(self, piece: "TransactionPiece") -> Iterator[Dispatched | ScriptsReached]:
        transaction, end_lsn = piece.transaction, piece.end_lsn
        if end_lsn is not None:
            self._check_history(piece, end_lsn)
        # A commit record before the newest position: this transaction was dispatched before.
        if transaction.final_lsn < self._tracker.newest_lsn or self.has_passed_stop:
            yield Dispatched(transaction.commit_time, end_lsn, {}, is_new=False)
            return
        if self.stop_lsn is not None and transaction.final_lsn >= self.stop_lsn:
            self.has_passed_stop = True
            yield Dispatched(transaction.commit_time, end_lsn, {}, is_new=False)
            return
        scripts = [i.message for i in piece.instructions if i.message.prefix == EXECUTE_PREFIX]
        if scripts:
            reached = ScriptsReached(transaction.xid, transaction.final_lsn, scripts)
            yield reached
            self._made = transaction.xid if reached.is_made else None
        if transaction.xid == self._made:  # the target may contain these rows already
            for changes in piece.changes:
                relation = changes.relation
                changes.payloads = [
                    new for payload in changes.payloads for new in as_upserts(payload, relation)
                ]
        parts: dict[Lane, LaneTransaction] = {}
        for changes in self._with_definitions(piece):
            self._add(parts, changes, piece)
        if end_lsn is None:
            self._open_lanes.update(dict.fromkeys(parts))
            yield Dispatched(transaction.commit_time, None, parts)
            return
        for lane in self._open_lanes:
            if lane not in parts:
                parts[lane] = LaneTransaction(transaction, [], end_lsn, 0)
        self._open_lanes.clear()
        is_lead = True
        for part in parts.values():
            part.is_lead = is_lead
            is_lead = False
        self._tracker.dispatched(end_lsn, [lane.pending for lane in parts], transaction.commit_time)
        yield Dispatched(transaction.commit_time, end_lsn, parts)

    def _with_definitions(self, piece: "TransactionPiece") -> "Iterator[Changes]":
        """Yield the changes of a piece, and messages about definitions in their places."""
        start = 0
        dropped: bytes | None = None
        described: set[int | None] = set()
        for instruction in piece.instructions:
            content = instruction.message.content
            if instruction.message.prefix != DDL_PREFIX or self._ddl_token is None:
                continue
            if content == UNPUBLISHED.encode():
                self._lanes.report_unmapped()
                continue
            definition = DefinitionMessage.parse(content, self._ddl_token)
            if definition is None:
                continue
            if piece.transaction.xid == self._made:
                content = as_made(content)
            # A message with the objects that ALTER TABLE drops precedes the message of its table.
            # The two messages form a single change.
            is_next = definition.tag == ALTER_TABLE and start == instruction.place
            if dropped is not None and (definition.relid is None or not is_next):
                yield from self._redefined(dropped, described)
                dropped = None
            yield from piece.changes[start : instruction.place]
            start = instruction.place
            if definition.relid is None and definition.tag == ALTER_TABLE:
                dropped, described = content, set()
                continue
            if dropped is not None:
                content = with_dropped(content, dropped)
                described.add(definition.relid)
            yield from self._redefined(content)
        if dropped is not None:
            yield from self._redefined(dropped, described)
        yield from piece.changes[start:]

    def _redefined(
        self, content: bytes, described: "Collection[int | None]" = ()
    ) -> "Iterator[Changes]":
        """Yield a message for each relation that *content* concerns, except *described* ones."""
        message = DefinitionMessage.parse(content)
        assert message is not None
        if message.relid is not None:
            relation = Redefinition(message.relid, message.namespace, message.name, "d", ())
            mapped = self._lanes.find(relation)
            if mapped is not None and mapped.parts is not None:
                mapped.add_parts(message.parts)
            yield Changes(relation, [content])
            return
        for mapped in self._lanes:
            parts, name = mapped.parts, mapped.mapping.source
            is_open = parts is None or self._lanes.lane(mapped).is_held_for_copy
            if mapped.relid not in described and (
                is_open or message.dropped.concerns(mapped.relid, parts or ())
            ):
                relation = Redefinition(mapped.relid or 0, name.namespace, name.name, "d", ())
                yield Changes(relation, [content])

    def _check_history(self, piece: "TransactionPiece", end_lsn: Lsn) -> None:
        transaction = piece.transaction
        applied = CommittedTransaction(
            end_lsn, transaction.xid, transaction.commit_time, self._with_origins
        )
        # A source sends messages also for transactions without changes of mapped tables.
        has_changes = bool(piece.changes or piece.instructions or self._open_lanes)
        if not self._history.saw_transaction(applied, has_changes=has_changes):
            raise HistoryMismatch

    def _add(
        self, parts: "dict[Lane, LaneTransaction]", changes: "Changes", piece: "TransactionPiece"
    ) -> None:
        mapped = self._lanes.find(changes.relation)
        if mapped is None:  # no longer mapped, or not yet
            if isinstance(changes.relation, Redefinition):
                self._lanes.report_unmapped()
            return
        lane = self._lanes.lane(mapped)
        is_other = mapped.relid not in (None, changes.relation.relid)
        if is_other and isinstance(changes.relation, Redefinition):
            return  # a new table took the name; its first change reports the replacement
        if not lane.is_held_for_copy:
            if piece.transaction.final_lsn < mapped.skip_through_lsn:
                return  # the target contains the change
            if is_other:
                self._replaced(mapped)
                return
        part = parts.get(lane)
        if part is None:
            part = parts[lane] = LaneTransaction(piece.transaction, [], piece.end_lsn, 0)
        if hashes := mapped.mapping.rule.hashes:
            changes = hashed_changes(changes, hashes, mapped.source.conversion)
        part.changes.append((mapped, changes))
        part.size += changes.size
