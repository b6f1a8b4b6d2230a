"""Reports of workers, drainers and copies about the tables of a source.

A worker or drainer reports a lane, the coordinator a copy. `TableEvents` moves the durable
position, stores the states of the tables, and wakes the task that stores the position. Each attempt
to stream the source creates a `TableEvents`, which owns the lanes.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import structlog

from streamer.apply.lanes.lane import Hold, Lane, MappedRelation, until_changed
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.write.commit_counts import count_lane_transactions
from streamer.apply.write.conflicts import Conflict, store_conflicts
from streamer.bookkeeping.relation_states import (
    pause_before_mass_delete,
    request_still_unfilled,
    set_streaming_states,
)
from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.mass_delete import MassDelete
from streamer.control.progress_tracker import ProgressTracker
from streamer.control.resync_options import after_loss, keeps_deleted_rows
from streamer.control.table_state import Need, State, TableState
from streamer.copy.shared_copies import advise_resync, name_tables
from streamer.decode.pgoutput import to_datetime
from streamer.errors.error_classes import (
    SOURCE_LOCK_LOST,
    ConflictError,
    MappingError,
    MassDeleteError,
    SharedTableError,
    StreamerError,
    SyncError,
    TargetError,
)
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.errors.remedies import Remedy, run
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping, find_rules, map_relation
from streamer.runtime.check_pace import BUSY_SECONDS
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.services import Health, Services
from streamer.runtime.tables.lag import Lag
from streamer.runtime.tables.relations import Relations
from streamer.target.connection import transaction
from streamer.target.fencing_token import FencingToken
from streamer.util.backoff import Backoff
from streamer.util.failpoints import failpoint
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn

log = structlog.get_logger()

REACH_SECONDS: Final = 0.1
"""How often a copy checks whether the stream has reached its point; a keepalive wakes no lane."""


class TableEvents:
    """Implements `LaneOwner` and `SyncEvents` for one attempt to stream a source."""

    def __init__(
        self,
        source: SourceMapping,
        fence: FencingToken,
        services: Services,
        health: Health,
        heartbeat: Heartbeat,
        fail: Callable[[StreamerError], None],
    ) -> None:
        """*services*: the services for the holder of *fence*. *fail* ends the attempt."""
        self.source = source
        self.fence = fence
        self.tracker = ProgressTracker(INVALID_LSN)
        self.relations = Relations(source.label, services, self, health, self.tracker)
        self.lag = Lag(self.tracker, self.relations.clock)
        self.advanced = asyncio.Event()
        """Set when the durable position may have moved."""
        self.refused: MappingError | None = None
        """Why a new table that a rule matches cannot join; its cause may be in a foreign schema."""
        self.clash: MappingError | None = None
        """Why a new table that would write rows of another source cannot join."""
        self.has_progress = False
        """A table has advanced since the last stored position."""
        self._changed_at = -math.inf
        """When a table last advanced, in `time.monotonic`'s terms."""
        self._to_request: set[MappedRelation] = set()
        """Relations that request a copy again, because the obstacle of the last copy is gone."""
        self._unstored: set[MappedRelation] = set()
        """Relations whose outcome of applying changes is not stored yet."""
        self._storing = asyncio.Lock()
        self._unreached: set[MappedRelation] = set()
        """Relations whose copy fails because of changes that the target rejects."""
        self._services = services
        self._heartbeat = heartbeat
        self._fail = fail

    @property
    def is_busy(self) -> bool:
        """Whether the source has, or recently had, changes that the target lacks."""
        now = time.monotonic()
        is_behind = not self.tracker.is_idle or self.lag.is_stalled(now)
        return is_behind or now - self._changed_at < BUSY_SECONDS

    def pause(self, interval: float) -> float:
        """Return the seconds before the next check, for checks *interval* seconds apart."""
        pace, table_count = self._services.pace, self.relations.table_count
        return pace.seconds(interval, table_count, is_busy=self.is_busy)

    async def close(self) -> None:
        """Discard all unapplied changes: the source will send these changes again."""
        lanes = self.relations.lanes()
        for lane in lanes:
            lane.is_ending = True  # a worker that fails now must not hand the lane to a drainer
            lane.wake()
        try:
            for worker in self._services.all_workers:
                await worker.drop(lanes)
            await self._services.drainer.forget(lanes)
        finally:
            for lane in lanes:
                lane.close()

    # ---- lanes (LaneOwner) ---------------------------------------------------------------------

    @property
    def has_other_lanes(self) -> bool:
        return self.relations.has_several_lanes

    def find_mapping(self, name: RelationName) -> RelationMapping | None:
        if (mapped := self.relations.named(name)) is not None:
            return mapped.mapping
        try:  # the table is about to join the stream
            rule = find_rules(self.source, [name]).get(name)
            if rule is None:
                return None
            return map_relation(self.source, rule, name, self._services.target_namespace)
        except MappingError:  # the join of the table reports the error
            return None

    def is_behind(self, name: RelationName, lsn: Lsn) -> bool:
        mapped = self.relations.named(name)
        return mapped is not None and self.relations.is_behind(mapped, lsn)

    def has_delivered(self, lsn: Lsn) -> bool:
        return self.tracker.newest_lsn >= lsn

    def lane_held(self, lane: Lane) -> None:
        self._services.drainer.held(lane)

    def lane_live(self, lane: Lane) -> None:
        for mapped in self.relations.in_lane(lane):
            if mapped.former_labels:  # the fast reader of rows suffices for the current labels
                mapped.former_labels, mapped.plan = {}, None
        self.relations.move_to_home_lanes(lane)

    def lane_durable(self, lane: Lane, transactions: list[LaneTransaction]) -> None:
        last = transactions[-1]
        assert last.end_lsn is not None
        self.tracker.durable(lane.pending, last.end_lsn, last.transaction.commit_time)
        self.relations.release_moved(lane)
        self._heartbeat.check_arrival(self.tracker)
        count_lane_transactions(self._services.metrics, self.source, transactions)
        lane.wake()
        self.has_progress, self._changed_at = True, time.monotonic()
        self.advanced.set()

    async def lane_failed(self, lane: Lane, error: StreamerError) -> None:
        relations = self._relations_of(lane, error)
        if isinstance(error, ConflictError) and len(relations) == 1:
            await self._name_sharers(relations[0], error)
        if isinstance(error, SharedTableError) and relations:
            advise_resync(relations[0], error)
        for mapped in relations:
            if mapped.state.chunks_obstacle is not None:
                continue  # another copy follows
            if mapped.state.shown is not State.ERROR:
                log.error(
                    "table stopped",
                    source=self.source.label,
                    table=str(mapped.mapping.source),
                    error=str(error),
                    **error.log_fields,
                    **({} if error.lsn is None else {"lsn": error.lsn}),
                )
            if (copy := mapped.copy_remedy) is not None:
                error.remedy = Remedy.of(error.remedy, "; " if error.remedy else "", copy)
            report = ErrorReport.with_notes(error)
            await self._store_streaming_state(mapped, mapped.state.failing(report))
            if mapped.state.follows:  # the copy owns the state
                await self.lane_waits(lane, error.message)
            if isinstance(error.conflict, Conflict):
                await self._store_conflict(mapped, error.conflict)

    async def _name_sharers(self, mapped: MappedRelation, error: ConflictError) -> None:
        """Add to *error* the names of the tables that share the target with *mapped*, if the rule
        is `keys: disjoint`.
        """
        if mapped.mapping.rule.is_disjoint:
            with contextlib.suppress(TargetError):  # the message then lacks only the names
                async with self._services.bookkeeping.connection() as target:
                    await name_tables(target, mapped, error)

    async def _store_conflict(self, mapped: MappedRelation, conflict: Conflict) -> None:
        """Store why a table stops. Each retry calls this method again, without further effect."""

        async def store() -> None:
            async with self._services.bookkeeping.connection() as target, transaction(target):
                limit = self._services.conflicts_kept
                await store_conflicts(target, mapped.relation_id, [conflict], limit)

        await self._store(store)

    async def lane_waits(self, lane: Lane, reason: str | None) -> None:
        text = f"the target to accept changes again: {reason}"
        wait = None if reason is None else TableWait(text)
        with contextlib.suppress(TargetError):  # a full disk may refuse this statement, too
            await self.relations.show_wait(self.relations.in_lane(lane), wait)

    def has_delete_limit(self, lane: Lane) -> bool:
        relations = self.relations.in_lane(lane)
        return any(mapped.mapping.rule.max_deleted_rows is not None for mapped in relations)

    async def delete_limit_reached(
        self, lane: Lane, mapped: MappedRelation, mass_delete: MassDelete
    ) -> None:
        error = _mass_delete_error(mapped, mass_delete)
        report = ErrorReport.of(error)
        lane.add_hold(Hold.PAUSED)  # perhaps a lane that the relation has left
        self.relations.become(mapped, mapped.state.paused(report))
        log.error(
            "table paused before a mass delete",
            source=self.source.label,
            table=str(mapped.mapping.source),
            error=str(error),
            lsn=str(mass_delete.lsn),
            **error.log_fields,
        )
        bookkeeping = self._services.bookkeeping
        failpoint("delete_limit.found")
        await self._store(
            lambda: pause_before_mass_delete(bookkeeping, mapped.relation_id, mass_delete, report)
        )
        failpoint("delete_limit.stored")

    async def lane_recovered(self, lane: Lane) -> None:
        for mapped in self._relations_of(lane):
            mapped.copy_remedy = None
            if mapped.state.follows:
                await self.lane_waits(lane, None)
            if mapped.state.shown is State.ERROR:
                log.info(
                    "table recovered", source=self.source.label, table=str(mapped.mapping.source)
                )
                await self._store_streaming_state(mapped, mapped.state.recovered())
            await self._request_still_unfilled(mapped)

    async def lane_drained(self, lane: Lane) -> None:
        for mapped in self._relations_of(lane):
            if mapped in self._to_request:
                self._to_request.discard(mapped)
                await self._request_still_unfilled(mapped)
            if mapped.state.drained() != mapped.state:
                await self._store_streaming_state(mapped, mapped.state.drained())
                failpoint("sync.drained")
        self.relations.release_to_home_lane(lane)
        self.advanced.set()

    def lane_of(self, mapped: MappedRelation) -> Lane | None:
        return self.relations.current_lane(mapped)

    def quarantine_changed(self, mapped: MappedRelation) -> None:
        self.relations.quarantine_changed(mapped)
        if not mapped.quarantine.count:
            self._to_request.add(mapped)

    def source_failed(self, error: StreamerError) -> None:
        for lane in self.relations.lanes():
            lane.is_ending = True  # the next attempt receives later changes again
        self._fail(error)

    def _relations_of(self, lane: Lane, error: StreamerError | None = None) -> list[MappedRelation]:
        if error is not None and isinstance(error.subject, MappedRelation):
            is_mapped = self.relations.get(error.subject.relation_id) is error.subject
            return [error.subject] if is_mapped else []
        return self.relations.in_lane(lane)

    async def _store_streaming_state(self, mapped: MappedRelation, state: TableState) -> None:
        """Apply and store *state*, the outcome of applying changes."""
        if not mapped.state.is_of_stream:
            return  # a copy or a pause owns the state
        if mapped.obstacle is not None and state.error is None:
            return
        self.relations.become(mapped, state)
        self._unstored.add(mapped)
        async with self._storing:
            if mapped in self._unstored:
                await self._store(self._store_streaming_states)

    async def _store_streaming_states(self) -> None:
        """Store all outcomes that wait, in a transaction: many lanes may drain at the same time."""
        waiting, self._unstored = self._unstored, set()
        outcomes = {
            mapped.relation_id: (mapped.state.shown, mapped.state.error)
            for mapped in waiting
            if mapped.state.is_of_stream  # may have changed during an outage of the target
        }
        try:
            if outcomes:
                await set_streaming_states(self._services.bookkeeping, outcomes)
        except BaseException:
            self._unstored |= waiting
            raise

    async def _request_still_unfilled(self, mapped: MappedRelation) -> None:
        bookkeeping = self._services.bookkeeping
        await self._store(lambda: request_still_unfilled(bookkeeping, mapped.relation_id))

    async def _store(self, store: Callable[[], Awaitable[None]]) -> None:
        """Run *store*, and retry until the target answers.

        Without the lock of the source, this attempt ends, and the next attempt applies the changes
        again.
        """
        backoff = Backoff()
        while True:
            try:
                await store()
                return
            except SOURCE_LOCK_LOST as exc:
                self.source_failed(exc)
                return
            except TargetError as exc:
                self._services.metrics.count_error(exc, self.source.database, self.source.sid)
                await backoff.wait()

    # ---- copies (SyncEvents) -------------------------------------------------------------------

    def copy_began(self, mapped: MappedRelation, consistent_point: Lsn) -> None:
        self.relations.become(mapped, mapped.state.copy_began(consistent_point))
        if mapped.state.need is Need.ROWS:  # the copy includes the rows of all earlier changes
            self.tracker.durable(self.relations.lane(mapped).pending, consistent_point)
            self.has_progress = True
            self.advanced.set()

    async def reach(self, mapped: MappedRelation, point: Lsn) -> None:
        lane = self.relations.lane(mapped)
        while True:
            if not mapped.state.follows or self.relations.current_lane(mapped) is not lane:
                raise SyncError("another task has given up the copy")
            former_lane = self.relations.former_lane(mapped)
            for blocked in (lane, former_lane):
                if blocked is not None and Hold.ERROR in blocked.hold:
                    raise self._cannot_reach(mapped, blocked)
            if Hold.PAUSED in lane.hold:
                again = (
                    "resume it"
                    if mapped.state.resync.columns
                    else "resume the table, and repeat the request"
                )
                raise SyncError("the table was paused", hint=again)
            if (state := mapped.state.reached_for(point)) != mapped.state:
                self.relations.become(mapped, state)
            is_read = mapped.state.is_read
            has_reached = lane.is_at_point if is_read else not lane.is_behind(point)
            if former_lane is None and has_reached and self.has_delivered(point):
                return
            await until_changed(lane, REACH_SECONDS)

    def _cannot_reach(self, mapped: MappedRelation, lane: Lane) -> SyncError:
        """Return the error of a copy when the target refuses a change from before its point."""
        count, _ = lane.held(mapped)
        oldest = lane.pending.oldest_time
        since = f" since {to_datetime(oldest):%Y-%m-%d %H:%M:%S} UTC" if oldest else ""
        source, kind = mapped.source, mapped.mapping.type
        again = run(
            "resync",
            str(mapped.mapping.source),
            *after_loss([kind]),
            database=source.database,
            sid=source.sid,
        )
        lost = ", with a gap in its past" if keeps_deleted_rows(kind) else ""
        waiting = f"{count} changes{since}"
        self._unreached.add(mapped)
        mapped.copy_remedy = Remedy.of(
            f"to copy the table without its {waiting}{lost}, run: ", again
        )
        return SyncError(
            f"{waiting} from before the copy cannot be applied: {lane.error}",
            hint=Remedy.of("remove the cause; ", mapped.copy_remedy),
        )

    def may_copy_in_chunks(self, mapped: MappedRelation) -> bool:
        return self.relations.may_follow_chunks(mapped)

    def step(self, mapped: MappedRelation, event: Callable[[TableState], TableState]) -> None:
        if mapped in self.relations:
            self.relations.become(mapped, event(mapped.state))

    def snapshot_passes(self, relations: Sequence[MappedRelation], lsn: Lsn) -> None:
        for mapped in relations:
            self.relations.become(mapped, mapped.state.snapshot_passes(lsn))
        for mapped in self.relations:
            state = mapped.state
            has_copy = state.need is Need.ROWS and not state.is_to_mark_synced
            if has_copy and mapped.skip_through_lsn == LSN_MAX:
                self.tracker.durable(self.relations.lane(mapped).pending, lsn)
        self.has_progress = True
        self.advanced.set()

    def switched_to_stream(
        self, mapped: MappedRelation, chunks: ChunkedCopy | None, consistent_point: Lsn
    ) -> None:
        mapped.switched_to_stream(chunks, consistent_point)
        self.relations.become(mapped, mapped.state.switched_to_stream(chunks, consistent_point))
        self.relations.quarantine_changed(mapped)
        self.has_progress = True
        self.advanced.set()

    async def copy_begins_again(self, mapped: MappedRelation) -> None:
        await self.relations.become_when_applied(mapped, mapped.state.to_copy_again())
        self.relations.lane(mapped).release(Hold.ERROR)

    async def copies_wait(
        self, relations: Iterable[MappedRelation], wait: TableWait | None
    ) -> None:
        await self.relations.show_wait(relations, wait)

    def table_missing(self, mapped: MappedRelation) -> None:
        self.relations.become(mapped, mapped.state.without_table())
        self.relations.missing.add(mapped)

    def copy_failed(self, mapped: MappedRelation, error: ErrorReport) -> None:
        continues_on_resume = mapped.state.follows and mapped.state.is_paused
        is_in_chunks = mapped.state.chunks is not None
        if mapped in self._unreached:  # requested again once the lane has applied its changes
            self._to_request.add(mapped)
        self._unreached.discard(mapped)
        self.relations.become(mapped, mapped.state.copy_failed(error))
        if is_in_chunks and continues_on_resume:
            return
        log.error(
            "table cannot be copied",
            source=self.source.label,
            table=str(mapped.mapping.source),
            error=error.text,
            **error.log_fields,
        )


def _mass_delete_error(mapped: MappedRelation, mass_delete: MassDelete) -> MassDeleteError:
    table, source = str(mapped.mapping.source), mapped.source
    resume = run("resume", table, database=source.database, sid=source.sid)
    skip = run("resume", table, "--skip-deletes", database=source.database, sid=source.sid)
    limit = mapped.mapping.rule.max_deleted_rows
    return MassDeleteError(
        f'table "{table}" is paused, because max_deleted_rows is {limit}: {mass_delete}',
        hint=Remedy.of(
            "to apply the transaction, run: ", resume, "; to leave out its deletes, run: ", skip
        ),
    )
