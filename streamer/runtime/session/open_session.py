"""Opens the session of a source: the state that an attempt needs before streaming.

`open_session` proves that source, slot and target belong together, publishes and registers the
tables, opens the slot or the journal, and starts the stream. The function returns a complete
`Session`; when it raises, no open resource remains.
"""

import contextlib
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.spool import StreamedSpool
from streamer.bookkeeping.sources import read_source_record
from streamer.bookkeeping.taken_requests import take_requests
from streamer.compare.differences_at_point import find_differences
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_coordinator import SyncCoordinator
from streamer.decode.transactions import TransactionAssembler
from streamer.runtime.guards.timeline_monitor import TimelineMonitor
from streamer.runtime.session.attempt import Attempt
from streamer.runtime.session.dispatcher import Dispatcher
from streamer.runtime.session.script_runner import Scripts
from streamer.runtime.session.session import Session
from streamer.runtime.session.source_reconciler import ReconciledSource, SourceReconciler
from streamer.runtime.session.start_waits import StartWaits
from streamer.runtime.session.stored_position import StoredPosition
from streamer.runtime.tables.table_events import TableEvents
from streamer.source.catalog import SourceServer, check_ready, read_server
from streamer.source.connection import Connection, connect, translating
from streamer.source.history_check import HistoryCheck
from streamer.source.server.primaries_after_failover import prefer_newest, require_successor
from streamer.source.server.timeline import check_same_server_by_query, read_branch
from streamer.source.server.wait_limits import reporting_blockers, set_lock_timeout
from streamer.source.slot_and_publications.guard_query import measure
from streamer.source.source_database import require_same_database
from streamer.source.stream.feedback import Feedback, FeedbackTimes
from streamer.source.timeline_branches import Branch
from streamer.util.lsn import INVALID_LSN, Lsn

if TYPE_CHECKING:
    from streamer.bookkeeping.sources import SourceRecord

PIECE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A larger transaction goes through the spools of its lanes."""


async def open_session(attempt: Attempt, tables: TableEvents) -> Session:
    """Open the session of *attempt*; *tables* gets its relations. Raises StreamerError."""
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(tables.close)
        session = await _Opening(attempt, tables, opened).open()
        opened.pop_all()
        return session


class _Opening:
    """The steps of opening a session. *opened* closes its resources if a step fails."""

    def __init__(
        self, attempt: Attempt, tables: TableEvents, opened: contextlib.AsyncExitStack
    ) -> None:
        self._attempt = attempt
        self._source = attempt.source
        self._services = attempt.services
        self._bookkeeping = attempt.services.bookkeeping
        self._source_id = attempt.fence.source_id
        self._tables = tables
        self._waits = StartWaits(attempt)
        self._opened = opened

    async def open(self) -> Session:
        record = await read_source_record(self._bookkeeping, self._source_id)
        await self._waits.show()
        await take_requests(self._bookkeeping, self._source_id, self._source, begins=True)
        self._opened.callback(self._waits.end_turn)
        server, branch, replication = await self._reach(record)
        if record.acknowledged_lsn == INVALID_LSN:
            await self._waits.acquire_turn(server.identity)
        reconciled = await self._reconcile(server, branch, record)
        # The status may still show the waits of a process that died.
        await self._tables.relations.show_wait(self._tables.relations, None)
        await self._waits.show()
        return await self._start(server, branch, reconciled, replication)

    async def _reach(self, record: "SourceRecord") -> tuple[SourceServer, Branch, Connection]:
        """Find the server of the source, and prove that *record* names its database.

        Also return the replication connection, which stays open at a standby.
        """
        source, stored_server = self._source, record.known_server
        async with self._waits.reporting_password():
            await prefer_newest(source, stored_server)
            replication = await connect(source, replication=True)
            self._opened.push_async_callback(replication.close)
        with translating(source.label):
            server = await read_server(replication)
            branch = await read_branch(replication, server)
        if source.label not in self._services.take_over:
            require_successor(source, server, stored_server)
        if not server.in_recovery:
            await replication.close()
        identity = server.system_identifier, server.database_oid
        require_same_database(source, stored_server, *identity, server.database_names)
        check_ready(server, source)
        return server, branch, replication

    async def _reconcile(
        self, server: SourceServer, branch: Branch, record: "SourceRecord"
    ) -> ReconciledSource:
        """Reconcile source and target, and report the sessions that the start waits for."""
        async with self._services.sources.connection(self._source) as plain:
            await check_same_server_by_query(plain, server)
            await measure(plain, self._tables.relations.clock)
            await set_lock_timeout(plain)
            reconciler = SourceReconciler(
                self._attempt, self._tables, server, record, branch, self._waits, self._opened
            )
            return await reporting_blockers(
                self._source, server, plain, reconciler.reconcile(plain), self._waits.report
            )

    async def _monitor_timeline(
        self,
        server: SourceServer,
        branch: Branch,
        reconciled: ReconciledSource,
        record: "SourceRecord",
        replication: Connection,
    ) -> TimelineMonitor | None:
        """Return the monitor, which then owns *replication*; at a primary, close *replication*.

        Raises SourceConnectionError if the timeline changed meanwhile. In that case the slot
        may be past the fork, so no table may switch to streaming at its position.
        """
        if not server.in_recovery:
            await replication.close()
            return None
        monitor = TimelineMonitor(
            self._source,
            server,
            branch,
            replication,
            self._bookkeeping,
            self._attempt.fence,
            max(record.acknowledged_lsn, reconciled.slot_check.held_lsn),
        )
        await monitor.check()
        if not reconciled.slot_check.reads_slot:  # the journal's writer watches the timeline
            await monitor.close()
            return None
        return monitor

    async def _start(
        self,
        server: SourceServer,
        branch: Branch,
        reconciled: ReconciledSource,
        replication: Connection,
    ) -> Session:
        """Start the stream, as the last step: from then on the source expects status updates.

        Opening the slot may have changed the source's record.
        """
        source, services, tables = self._source, self._services, self._tables
        record = await read_source_record(self._bookkeeping, self._source_id)
        tables.tracker.keepalive(reconciled.start_lsn)
        history_check = HistoryCheck(
            record.last_transaction, reconciled.start_lsn, with_origins=source.forward_origins
        )
        timeline_monitor = await self._monitor_timeline(
            server, branch, reconciled, record, replication
        )
        position = StoredPosition(
            services.positions,
            self._attempt.fence,
            record,
            tables.tracker,
            history_check,
            self._attempt.heartbeat,
            tables.advanced,
        )
        stream = await reconciled.slot_check.open_stream(
            services.sources,
            reconciled.start_lsn,
            binary=reconciled.registrar.transport.is_binary,
            on_slot=reconciled.monitor.report_slot,
        )
        journaling, health = self._attempt.guard.journaling, self._attempt.health

        def acknowledged_lsn() -> Lsn:
            return journaling.acknowledged_lsn(position.stored_lsn, health.wal_end_lsn)

        session = Session(
            services=services,
            fence=self._attempt.fence,
            record=record,
            server=server,
            tables=tables,
            registrar=reconciled.registrar,
            monitor=reconciled.monitor,
            slot_check=reconciled.slot_check,
            stream=stream,
            dispatcher=self._make_dispatcher(reconciled, history_check),
            scripts=Scripts(
                source, tables.fence, services.address, services.bookkeeping, tables.relations
            ),
            position=position,
            feedback=Feedback(
                stream,
                FeedbackTimes.of(source.label, server.wal_sender_timeout_seconds),
                lambda: (acknowledged_lsn(), tables.tracker.flush_lsn),
                lambda: services.budget.has_room(tables),
            ),
            coordinator=self._make_coordinator(server, reconciled.capture.is_on, timeline_monitor),
            snapshot=reconciled.snapshot,
            turn=self._waits.turn,
            timeline_monitor=timeline_monitor,
        )
        reconciled.monitor.cases.follow(session.coordinator, session.remove)
        return session

    def _make_dispatcher(
        self, reconciled: ReconciledSource, history_check: HistoryCheck
    ) -> Dispatcher:
        source, relations, capture = self._source, self._tables.relations, reconciled.capture
        assembler = TransactionAssembler(
            lambda relation: relations.find(relation) is not None,
            lambda xid: StreamedSpool(self._services.spools),
            piece_bytes_max=PIECE_BYTES_MAX,
            forward_origins=source.forward_origins,
            messages=capture.messages,
        )
        assembler.conversion = reconciled.registrar.conversion
        return Dispatcher(
            assembler,
            relations,
            self._tables.tracker,
            history_check,
            replaced=reconciled.monitor.cases.replaced,
            with_origins=source.forward_origins,
            stop_lsn=self._attempt.stop_lsn,
            ddl_token=capture.token,
        )

    def _make_coordinator(
        self, server: SourceServer, captures: bool, timeline_monitor: TimelineMonitor | None
    ) -> SyncCoordinator:
        services = self._services
        return SyncCoordinator(
            CopyContext(
                self._source,
                self._source_id,
                server,
                services.address,
                services.bookkeeping,
                services.sources,
                services.targets,
                services.launcher,
                services.sync,
                self._tables,
                services.metrics,
                find_differences,
                services.copy_turns,
                captures=captures,
                check_timeline=None if timeline_monitor is None else timeline_monitor.check,
            )
        )
