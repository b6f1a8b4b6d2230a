"""An open stream of a source, with the objects that serve the stream."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamer.apply.lanes.lane import MappedRelation, until_idle
from streamer.copy.copy_coordinator import SyncCoordinator
from streamer.copy.source_turns import CopyTurn
from streamer.runtime.guards.slot_check import SlotCheck
from streamer.runtime.guards.source_monitor import SourceMonitor
from streamer.runtime.guards.timeline_monitor import TimelineMonitor
from streamer.runtime.services import Services
from streamer.runtime.session.dispatcher import Dispatcher
from streamer.runtime.session.registrar import Registrar
from streamer.runtime.session.script_runner import Scripts
from streamer.runtime.session.stored_position import StoredPosition
from streamer.runtime.tables.lag import Lag
from streamer.runtime.tables.relations import Relations
from streamer.runtime.tables.table_events import TableEvents
from streamer.source.catalog import SourceServer
from streamer.source.slot_and_publications.slot import ExportedSnapshot
from streamer.source.stream.feedback import Feedback
from streamer.source.stream.replication_stream import ReplicationStream
from streamer.target.fencing_token import FencingToken

if TYPE_CHECKING:
    from streamer.bookkeeping.sources import SourceRecord
    from streamer.control.progress_tracker import ProgressTracker
    from streamer.source.stream.replication_stream import ChangeStream


@dataclass(frozen=True, slots=True)
class Session:
    """An open session, as `streamer.runtime.session.open_session` returns."""

    services: Services
    fence: FencingToken
    record: "SourceRecord"
    server: SourceServer
    tables: TableEvents
    registrar: Registrar
    monitor: SourceMonitor
    slot_check: SlotCheck
    stream: "ChangeStream"
    dispatcher: Dispatcher
    scripts: Scripts
    position: StoredPosition
    feedback: Feedback
    coordinator: SyncCoordinator
    snapshot: ExportedSnapshot | None
    """The snapshot of a slot that this attempt created."""
    turn: CopyTurn | None
    """The turn to copy for which this attempt has waited."""
    timeline_monitor: TimelineMonitor | None
    """Present for the slot of a standby; a primary's timeline never changes while the primary runs.
    """

    @property
    def relations(self) -> Relations:
        return self.tables.relations

    @property
    def lag(self) -> Lag:
        return self.tables.lag

    @property
    def tracker(self) -> "ProgressTracker":
        return self.tables.tracker

    @property
    def reads_slot(self) -> bool:
        """Whether the stream comes from the slot; otherwise the stream comes from a journal."""
        return isinstance(self.stream, ReplicationStream)

    async def remove(self, mapped: MappedRelation) -> None:
        """Remove a relation from the stream, unless the guard has removed the relation already.

        Workers apply or discard its dispatched changes.
        """
        if mapped not in self.relations:
            return
        lane = self.relations.remove(mapped)
        if self.relations.has_lane(lane):
            return  # further relations share the lane
        await until_idle(lane)
        lane.is_ending = True
        await self.services.drainer.forget({lane})
        lane.close()
        self.dispatcher.forget(lane)
        self.tables.advanced.set()

    def begin_copies(self, relations: Iterable[MappedRelation], *, is_start: bool = False) -> None:
        """Copy, or mark as synced, each relation that needs a copy and is not paused."""
        for mapped in relations:
            if mapped not in self.relations:  # dropped or renamed at the source meanwhile
                continue
            if mapped.state.is_to_mark_synced:
                mapped.end_lsn = self.tracker.newest_lsn
            if self.relations.awaits_copy(mapped) and self.monitor.cases.may_be_copied(mapped):
                self.coordinator.request(mapped, is_first=is_start)

    async def use_snapshot(self) -> None:
        """Pass the snapshot and the copy turn of a new slot to the copies of `begin_copies`."""
        if self.turn is not None:
            self.coordinator.use_turn(self.turn)
        if self.snapshot is not None:
            self.coordinator.use_snapshot(self.snapshot)
        if not self.coordinator.is_copying:
            # An open snapshot would keep the source from removing dead rows.
            await self.coordinator.close()
