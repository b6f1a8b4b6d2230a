"""Operators' requests while a source streams: pause, resume, resync, and quarantined changes."""

import asyncio
from collections.abc import Awaitable, Callable

from streamer.apply.lane import Hold, Lane, MappedRelation, QuarantineRequest
from streamer.failpoints import failpoint
from streamer.lsn import EVERYTHING
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.requests import Request, read_quarantine_requests
from streamer.progress.sources import SourceRecord
from streamer.progress.taken_requests import take_requests
from streamer.progress.tracker import ProgressTracker
from streamer.runtime.relations import Relations, until_applied
from streamer.sync.coordinator import SyncCoordinator
from streamer.sync.states import State


class Requests:
    """Fulfils the requests for one source, for one attempt to stream it."""

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        record: SourceRecord,
        relations: Relations,
        coordinator: SyncCoordinator,
        tracker: ProgressTracker,
        publish: Callable[[list[MappedRelation]], Awaitable[None]],
    ) -> None:
        """*publish* sees that relations are published, and asks for their copies."""
        self._bookkeeping = bookkeeping
        self._source_id = record.source_id
        self._relations = relations
        self._coordinator = coordinator
        self._tracker = tracker
        self._publish = publish

    async def follow(self, arrived: asyncio.Event) -> None:
        """Fulfil requests as soon as they arrive."""
        while True:
            await arrived.wait()
            arrived.clear()
            requests = await take_requests(
                self._bookkeeping, self._source_id, self._relations.source, self._pause
            )
            failpoint("requests.taken")
            for request in requests:
                if (mapped := self._relations.get(request.relation_id)) is None:
                    continue
                match request.action:
                    case "pause":
                        self._relations.set_state(mapped, State.PAUSED)
                        self._coordinator.ask_no_more(mapped)
                        self._pause(request.relation_id)
                    case "resume":
                        mapped.decide(request.decided)
                        await self._resume(mapped)
                    case "resync":
                        await self._resync(mapped, request)
            for request in await read_quarantine_requests(self._bookkeeping, self._source_id):
                if (mapped := self._relations.get(request.relation_id)) is not None:
                    is_retry = request.action == "quarantine_retry"
                    ids = request.options.get("ids")
                    self._relations.lane(mapped).ask(
                        QuarantineRequest(request.request_id, mapped, is_retry, ids)
                    )

    def _pause(self, relation_id: int) -> None:
        """Hold later changes. A client that reads the state "paused" may rely on it."""
        if (mapped := self._relations.get(relation_id)) is not None:
            self._relations.lane(mapped).keep(Hold.PAUSED)

    def _end_pause(self, lane: Lane) -> None:
        """Let *lane* continue, unless one of the tables that share it is paused."""
        in_lane = self._relations.in_lane(lane)
        if not any(self._relations.state(other) is State.PAUSED for other in in_lane):
            lane.release(Hold.PAUSED)

    async def _resume(self, mapped: MappedRelation) -> None:
        lane = self._relations.lane(mapped)
        if self._coordinator.is_at(mapped):
            self._coordinator.ask_again(mapped)
            self._relations.set_state(mapped, State.COPYING)
        elif mapped.is_held_to_point:
            self._relations.set_state(mapped, State.COPYING)
            self._coordinator.request(mapped)
        elif Hold.SYNC in lane.hold or mapped.is_set_aside:
            if self._relations.state(mapped) in (State.PAUSED, State.ERROR):
                self._relations.set_state(mapped, State.INIT)
                self._relations.hold_for_copy(mapped)
                lane = self._relations.lane(mapped)
                await self._publish([mapped])
        elif self._relations.state(mapped) in (State.PAUSED, State.ERROR):
            self._relations.set_state(mapped, State.READY)
        lane.release(Hold.ERROR)
        self._end_pause(lane)

    def _resync_to_point(self, mapped: MappedRelation, request: Request) -> None:
        """Copy some rows of a relation that stays in sync meanwhile, or of one that keeps its
        past.
        """
        if mapped.skip_through_lsn == EVERYTHING:
            return  # it has stopped meanwhile, and only a copy of all rows helps
        self._coordinator.give_up(mapped)  # the new copy does for the one under way, too
        mapped.resync = request.resync
        before = self._relations.lane(mapped)
        if request.stays_paused:
            self._relations.hold_to_point(mapped, self._tracker.newest_lsn)
            self._relations.lane(mapped).keep(Hold.PAUSED)
            return
        self._relations.set_state(mapped, State.COPYING)
        self._relations.hold_to_point(mapped, self._tracker.newest_lsn)
        self._relations.lane(mapped).release(Hold.PAUSED | Hold.ERROR)
        self._end_pause(before)
        self._coordinator.request(mapped)

    async def _resync(self, mapped: MappedRelation, request: Request) -> None:
        if request.is_to_point:
            self._resync_to_point(mapped, request)
            return
        if mapped.is_held_to_point:
            self._coordinator.give_up(mapped)
        if self._coordinator.is_at(mapped):
            mapped.resync = request.resync
            self._coordinator.ask_again(mapped)
            self._relations.set_state(mapped, State.COPYING)
            self._relations.lane(mapped).release(Hold.PAUSED)
            return
        self._relations.set_state(mapped, State.INIT)
        through_lsn = self._tracker.newest_lsn
        before = self._relations.lane(mapped)
        self._relations.hold_for_copy(mapped)
        mapped.resync = request.resync
        self._relations.lane(mapped).release(Hold.PAUSED | Hold.ERROR)
        self._end_pause(before)
        # A drainer that waits for more of a large transaction gives it up. Nothing of it may be on
        # its way to the target when the copy begins.
        before.changed.set()
        await until_applied(before, through_lsn)
        await self._publish([mapped])
