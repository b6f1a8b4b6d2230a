"""Operators' requests while a source streams: pause, resume, resync, restart, and quarantined
changes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from streamer.apply.lanes.lane import Hold, MappedRelation, QuarantineRequest
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.requests import (
    RESTART,
    Request,
    end_restarts,
    read_quarantine_requests,
)
from streamer.bookkeeping.sources import SourceRecord
from streamer.bookkeeping.taken_requests import store_outcomes, take_requests
from streamer.control.table_state import Need
from streamer.copy.copy_coordinator import SyncCoordinator
from streamer.runtime.tables.relations import Relations
from streamer.util.failpoints import failpoint
from streamer.util.lsn import LSN_MAX
from streamer.util.waiting import wait_for_event

OUTCOME_SECONDS: Final = 5.0
"""A table can change its state before the process stores the new state, so the process also polls
for outcomes.
"""


class Requests:
    """Fulfils the requests for a source, for one attempt to stream the source."""

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        record: SourceRecord,
        relations: Relations,
        coordinator: SyncCoordinator,
        publish: Callable[[list[MappedRelation]], Awaitable[None]],
        begin_anew: Callable[[], None],
    ) -> None:
        """*publish* publishes relations and requests their copies. *begin_anew* ends the attempt
        cleanly.
        """
        self._bookkeeping = bookkeeping
        self._source_id = record.source_id
        self._relations = relations
        self._coordinator = coordinator
        self._publish = publish
        self._begin_anew = begin_anew

    async def follow(self, arrived: asyncio.Event) -> None:
        """Fulfil requests as soon as they arrive, and store the outcomes of tables."""
        self._relations.requested = arrived
        await end_restarts(
            self._bookkeeping, self._source_id
        )  # an earlier attempt took these requests
        while True:
            await wait_for_event(arrived, OUTCOME_SECONDS if self._relations.awaited_ids else None)
            arrived.clear()
            requests = await take_requests(
                self._bookkeeping, self._source_id, self._relations.source, self._pause
            )
            failpoint("requests.taken")
            self._relations.awaited_ids |= {request.relation_id or 0 for request in requests}
            if any(request.action == RESTART for request in requests):
                self._begin_anew()
            for request in requests:
                if (mapped := self._mapped(request)) is None:
                    continue
                match request.action:
                    case "pause":
                        # an earlier request of this batch may have resumed the table
                        self._pause(mapped.relation_id)
                        self._coordinator.cancel_request(mapped)
                    case "resume":
                        mapped.decide(request.decided)
                        await self._resume(mapped)
                    case "resync":
                        await self._resync(mapped, request)
            for request in await read_quarantine_requests(self._bookkeeping, self._source_id):
                if (mapped := self._mapped(request)) is not None:
                    is_retry = request.action == "quarantine_retry"
                    ids = request.options.get("ids")
                    self._relations.lane(mapped).queue_request(
                        QuarantineRequest(request.request_id, mapped, is_retry, ids)
                    )
            self._relations.awaited_ids = await store_outcomes(self._bookkeeping, self._source_id)

    def _mapped(self, request: Request) -> MappedRelation | None:
        return self._relations.get(request.relation_id or 0)

    def _pause(self, relation_id: int) -> None:
        """Hold later changes. A client that reads the state "paused" may rely on the hold."""
        if (mapped := self._relations.get(relation_id)) is not None:
            self._relations.become(mapped, mapped.state.paused())

    async def _resume(self, mapped: MappedRelation) -> None:
        state = mapped.state.resumed()
        if self._coordinator.is_at(mapped):
            self._coordinator.request_again(mapped)
            self._relations.become(mapped, mapped.state.copy_requested())
        elif state.follows:
            self._relations.become(mapped, state)
            self._coordinator.request(mapped)
        elif state != mapped.state:
            self._relations.become(mapped, state)
            if state.need is not Need.NOTHING:
                await self._publish([mapped])
        self._relations.lane(mapped).release(Hold.ERROR)

    async def _resync(self, mapped: MappedRelation, request: Request) -> None:
        state = mapped.state
        if request.is_to_point:
            self._resync_to_point(mapped, request)
        elif self._coordinator.is_at(mapped) and not state.follows:
            self._coordinator.request_again(mapped)
            self._relations.become(mapped, state.copy_requested(request.resync))
        else:
            self._coordinator.give_up(mapped)
            # No change of the relation may be in flight when the copy begins.
            await self._relations.become_when_applied(mapped, state.rows_requested(request.resync))
            self._relations.lane(mapped).release(Hold.ERROR)
            await self._publish([mapped])

    def _resync_to_point(self, mapped: MappedRelation, request: Request) -> None:
        """Copy some rows of a relation that stays in sync meanwhile, or that keeps its past."""
        if mapped.skip_through_lsn == LSN_MAX:
            return  # the relation has stopped meanwhile, and only a copy of all rows helps
        self._coordinator.give_up(mapped)  # the new copy replaces the copy under way
        state = mapped.state.part_requested(request.resync, stays_paused=request.stays_paused)
        self._relations.become(mapped, state)
        if not state.is_paused:
            self._relations.lane(mapped).release(Hold.ERROR)
            self._coordinator.request(mapped)
