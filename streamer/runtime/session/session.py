"""Opens the session of a source: the state that an attempt needs before streaming.

`open_session` proves that source, slot and target belong together, publishes and registers the
tables, opens the slot or the journal, and starts the stream. The function returns a complete
`Session`; when it raises, no open resource remains.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.lane import MappedRelation, until_idle
from streamer.apply.lanes.spool import StreamedSpool
from streamer.bookkeeping.bookkeeping_schema import read_installation
from streamer.bookkeeping.registered_relations import register_relations
from streamer.bookkeeping.relation_columns import set_transports
from streamer.bookkeeping.relation_definitions import read_definitions, read_unknown
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.sources import read_source_record, set_source_state
from streamer.bookkeeping.taken_requests import take_requests
from streamer.compare.differences_at_point import find_differences
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_coordinator import SyncCoordinator
from streamer.copy.source_turns import CopyTurn
from streamer.decode.pgoutput import DDL_PREFIX
from streamer.decode.table_messages import TableMessages
from streamer.decode.transactions import TransactionAssembler
from streamer.errors.error_classes import SourceContentionError, SourcePasswordError, StreamerError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rule_options import DdlCapture, Initial
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.postgres.credentials import awaited_password
from streamer.runtime.guards.follow_renames import follow_renames
from streamer.runtime.guards.publications import Publishing
from streamer.runtime.guards.slot_check import SlotCheck
from streamer.runtime.guards.source_monitor import SourceMonitor
from streamer.runtime.guards.table_cases import TableCases
from streamer.runtime.guards.timeline_monitor import TimelineMonitor
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.services import Health, Services
from streamer.runtime.session.choose_transport import ChosenTransport, choose_transport
from streamer.runtime.session.dispatcher import Dispatcher
from streamer.runtime.session.script_runner import Scripts
from streamer.runtime.session.stored_position import StoredPosition
from streamer.runtime.tables.lag import Lag
from streamer.runtime.tables.relations import (
    Relations,
    forget_unmapped,
    relation_source,
    resolve_at,
)
from streamer.runtime.tables.table_events import TableEvents
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.schema.definition_message import parts_of
from streamer.source.capture.ddl_capture import (
    ensure_capture,
    message_table,
    publish_messages,
    send_baseline,
    uses_table,
)
from streamer.source.catalog import SourceRelation, SourceServer, check_ready, read_server
from streamer.source.connection import Connection, connect, translating
from streamer.source.history_check import HistoryCheck
from streamer.source.server.database_encoding import read_conversion
from streamer.source.server.primaries_after_failover import prefer_newest, require_successor
from streamer.source.server.primary_of_standby import writable
from streamer.source.server.timeline import check_same_server_plainly, read_branch
from streamer.source.server.wait_limits import reporting_blockers, set_lock_timeout
from streamer.source.slot_and_publications.guard_query import measure
from streamer.source.slot_and_publications.ownership import mark_publications, unproven_rows
from streamer.source.slot_and_publications.slot import ExportedSnapshot
from streamer.source.source_database import require_same_database
from streamer.source.stream.feedback import Feedback, FeedbackTimes
from streamer.source.stream.replication_stream import ReplicationStream
from streamer.source.timeline_branches import Branch
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import NOTHING, Lsn

if TYPE_CHECKING:
    from streamer.bookkeeping.sources import SourceRecord
    from streamer.control.progress_tracker import ProgressTracker
    from streamer.decode.text_conversion import TextConversion
    from streamer.source.stream.replication_stream import ChangeStream

PIECE_BYTES_MAX: Final = 8 * 1024 * 1024
"""A larger transaction goes through the spools of its lanes."""
PASSWORD_REPORT_SECONDS: Final = 1.0
"""How often `status` learns that a start waits for a password."""
IS_JOURNAL: Final = "changes come by a journal, which is in text"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The inputs of one attempt to stream a source. ``services``: for the holder of the lock."""

    source: SourceMapping
    services: Services
    fence: FencingToken
    guard: BacklogGuard
    health: Health
    heartbeat: Heartbeat
    binary_obstacle: str | None
    """Why an earlier attempt gave up binary transport."""
    stop_lsn: Lsn | None
    let_others_start: Callable[[], None]
    """Called when opening the session has to wait for long."""


@dataclass(frozen=True, slots=True)
class StreamTransport:
    """How the stream sends values."""

    chosen: ChosenTransport
    conversion: "TextConversion | None"

    @property
    def is_binary(self) -> bool:
        return self.chosen.is_binary


@dataclass(frozen=True, slots=True)
class Session:
    """An open stream of a source, with all objects that serve the stream."""

    services: Services
    fence: FencingToken
    record: "SourceRecord"
    server: SourceServer
    transport: StreamTransport
    tables: TableEvents
    publishing: Publishing
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
    """Exists for the slot of a standby; the timeline of a primary never changes while it runs."""

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

    async def register(
        self, mappings: Iterable[RelationMapping], definitions: dict[RelationName, SourceRelation]
    ) -> list[MappedRelation]:
        """Add relations that join while the source streams."""
        return await _register(
            self.services,
            self.record.source_id,
            self.tables,
            self.publishing,
            self.transport,
            mappings,
            definitions,
            may_resume=False,
        )

    def begin_copies(self, relations: Iterable[MappedRelation], *, is_start: bool = False) -> None:
        """Copy, or mark as synced, each relation that needs a copy and is not paused."""
        for mapped in relations:
            if mapped not in self.relations:  # a session dropped or renamed the table meanwhile
                continue
            if mapped.state.is_to_mark_synced:
                mapped.end_lsn = self.tracker.newest_lsn
            if self.relations.awaits_copy(mapped) and self.monitor.cases.may_be_copied(mapped):
                self.coordinator.request(mapped, is_first=is_start)

    async def use_snapshot(self) -> None:
        """Give the copies that `begin_copies` requested the snapshot and the turn of a new slot."""
        if self.turn is not None:
            self.coordinator.use_turn(self.turn)
        if self.snapshot is not None:
            self.coordinator.use_snapshot(self.snapshot)
        if not self.coordinator.is_copying:
            # An open snapshot would keep the source from removing dead rows.
            await self.coordinator.close()


async def open_session(attempt: Attempt, tables: TableEvents) -> Session:
    """Open the session of *attempt*; *tables* takes its relations. Raises StreamerError."""
    try:
        return await _Opening(attempt, tables).open()
    except BaseException:
        await tables.close()
        raise


class _Opening:
    """The steps of opening a session."""

    def __init__(self, attempt: Attempt, tables: TableEvents) -> None:
        self._attempt = attempt
        self._source = attempt.source
        self._services = attempt.services
        self._bookkeeping = attempt.services.bookkeeping
        self._source_id = attempt.fence.source_id
        self._tables = tables
        self._turn: CopyTurn | None = None
        self._opened = contextlib.AsyncExitStack()
        """Closes the session's resources if the opening fails."""

    async def open(self) -> Session:
        source, bookkeeping = self._source, self._bookkeeping
        record = await read_source_record(bookkeeping, self._source_id)
        await set_source_state(bookkeeping, self._source_id, "starting")
        await take_requests(bookkeeping, self._source_id, source, begins=True)
        stored_place = record.known_place
        async with self._opened as opened:
            opened.callback(self._end_turn)
            async with self._telling_of_password():
                await prefer_newest(source, stored_place)
                replication = await connect(source, replication=True)
                opened.push_async_callback(replication.close)
            with translating(source.label):
                server = await read_server(replication)
                branch = await read_branch(replication, server)
            if source.label not in self._services.take_over:
                require_successor(source, server, stored_place)
            if not server.in_recovery:
                await replication.close()
            names = server.database_names
            identity = server.system_identifier, server.database_oid
            require_same_database(source, stored_place, *identity, names)
            check_ready(server, source)
            if record.acknowledged_lsn == NOTHING:
                await self._acquire_turn()
            session = await self._open_under(server, record, branch, replication)
            opened.pop_all()
            return session

    @contextlib.asynccontextmanager
    async def _telling_of_password(self) -> AsyncIterator[None]:
        """Store why connections of the block wait for their password."""
        reporting = asyncio.create_task(self._report_password(), name="password wait")
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])

    async def _report_password(self) -> None:
        with contextlib.suppress(StreamerError):
            while True:
                await asyncio.sleep(PASSWORD_REPORT_SECONDS)
                if (awaited := awaited_password(self._source.url)) is not None:
                    await self._report_wait(awaited, SourcePasswordError.code)

    async def _acquire_turn(self) -> None:
        """Wait for the copy turn of a new source, if all its tables need a copy.

        The source has no slot yet. An earlier slot would keep WAL, and its snapshot old row
        versions, until the turn comes. A free turn costs no query: `_reconcile` returns an unused
        turn.
        """
        source, services = self._source, self._services
        self._turn = services.copy_turns.acquire_free(source.label)
        if self._turn is not None:
            return
        async with services.sources.connection(source) as plain:
            mappings, definitions = await resolve_at(plain, source, services.target_namespace)
        if not copies_all(mappings):
            return
        size = sum(definitions[m.source].size_bytes for m in mappings if m.source in definitions)
        self._turn = await services.copy_turns.acquire(
            source.label, source.priority, size, self._report_turn
        )
        self._attempt.health.waiting_for = None

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    async def _report_turn(self, reason: str) -> None:
        self._attempt.let_others_start()
        self._attempt.health.waiting_for = reason
        await set_source_state(self._bookkeeping, self._source_id, "starting", waiting_for=reason)

    async def _open_under(
        self,
        server: SourceServer,
        record: "SourceRecord",
        branch: Branch,
        replication: Connection,
    ) -> Session:
        source = self._source
        async with self._services.sources.connection(source) as plain:
            await check_same_server_plainly(plain, server)
            await measure(plain, self._tables.relations.clock)
            await set_lock_timeout(plain)
            reconciled = await reporting_blockers(
                source,
                server,
                plain,
                self._reconcile(plain, server, record, branch),
                self._report_wait,
            )
        # A process that died may have left these waits behind.
        await self._tables.relations.tell_waiting(self._tables.relations, None)
        await set_source_state(self._bookkeeping, self._source_id, "starting")
        return await self._start(server, branch, reconciled, replication)

    async def _report_wait(self, awaited: str, code: str = SourceContentionError.code) -> None:
        """Store the reason why the start waits: sessions of the source, or its password."""
        reason = ErrorReport(f"the start waits for {awaited}", code)
        await set_source_state(
            self._bookkeeping, self._source_id, "starting", reason, waiting_for=awaited
        )

    async def _reconcile(
        self, plain: Connection, server: SourceServer, record: "SourceRecord", branch: Branch
    ) -> "_Reconciled":
        """Reconcile source and target. *branch*: the source's history."""
        source, bookkeeping, guard = self._source, self._bookkeeping, self._attempt.guard
        relations = self._tables.relations
        installation = await read_installation(bookkeeping)
        is_known = record.acknowledged_lsn != NOTHING
        owned_objects = await guard.owner.check_owner(
            plain,
            source,
            installation,
            is_known=is_known,
            is_taken_over=source.label in self._services.take_over,
        )
        ddl_token = None
        if source.ddl is DdlCapture.CAPTURE:
            async with writable(source, plain) as writing:
                ddl_token = await ensure_capture(writing, source)
        journal = await guard.journaling.choose_journal(
            plain, server, branch, record.acknowledged_lsn
        )
        unfollowed = await follow_renames(
            plain,
            source,
            bookkeeping,
            await read_relation_records(bookkeeping, self._source_id),
            server.version,
            self._services.target_namespace,
        )
        records = await read_relation_records(bookkeeping, self._source_id)
        mappings, definitions = await resolve_at(
            plain,
            source,
            self._services.target_namespace,
            [parse_name(record.source) for record in records],
        )
        if not copies_all(mappings):
            self._end_turn()
        # A different table may have the name of a table that did not follow.
        definitions = {
            name: relation for name, relation in definitions.items() if name not in unfollowed.names
        }
        await forget_unmapped(bookkeeping, self._source_id, mappings)
        chosen = await choose_transport(
            source,
            server,
            bookkeeping,
            mappings,
            definitions,
            known_obstacle=self._attempt.binary_obstacle if journal is None else IS_JOURNAL,
        )
        conversion = None if chosen.is_binary else await read_conversion(plain)
        transport = StreamTransport(chosen, conversion)
        publishing = Publishing(
            source, server, bookkeeping, relations, captures=ddl_token is not None
        )
        cases = TableCases(server, self._services, self._tables, publishing, unfollowed.refused)
        monitor = SourceMonitor(server, self._services, self._tables, cases, self._attempt.health)
        relations.set_groups(await relations.read_groups(mappings))
        await _register(
            self._services,
            self._source_id,
            self._tables,
            publishing,
            transport,
            mappings,
            definitions,
            may_resume=True,
        )
        declared = [mapped.mapping.source for mapped in relations if mapped.state.is_to_mark_synced]
        # A journal has all changes since the slot was made.
        is_known = is_known or journal is not None
        unproven = unproven_rows(owned_objects, source, installation, declared, is_known=is_known)
        if unproven is not None:
            raise unproven
        if any(
            relations.awaits_copy(mapped)
            and not mapped.state.is_to_mark_synced
            and not mapped.state.is_lost
            for mapped in relations
        ):
            self._services.launcher.prepare()  # Spark starts while the slot is made
        slot_check = SlotCheck(
            source, server, bookkeeping, record, relations, guard, journal, branch
        )
        await slot_check.check()
        await cases.begin(plain)
        await mark_publications(plain, source, installation)
        if ddl_token is not None and uses_table(source, server.version):
            await publish_messages(plain, source)
        start_lsn, snapshot = await slot_check.open_slot(plain)
        if snapshot is not None:
            self._opened.push_async_callback(snapshot.close)
        # Until the target knows the server and slot, an attempt without the order refuses them.
        self._services.take_over.discard(source.label)
        if ddl_token is not None:
            await self._send_baseline(plain)
        return _Reconciled(
            transport, publishing, monitor, slot_check, start_lsn, snapshot, ddl_token
        )

    async def _send_baseline(self, plain: Connection) -> None:
        """Request definitions that streamer does not know: of tables copied before capture began.

        The stored definitions of the remaining tables find the objects that a command drops.
        """
        by_id = {mapped.relation_id: mapped for mapped in self._tables.relations}
        unknown = await read_unknown(self._bookkeeping, list(by_id))
        async with self._bookkeeping.connection() as connection:
            stored = await read_definitions(connection, list(by_id))
        for relation_id, definition in stored.items():
            mapped = by_id[relation_id]
            mapped.add_parts(parts_of(definition, mapped.mapping.source.namespace))
        if unknown:
            names = {by_id[relation_id].mapping.source: None for relation_id in sorted(unknown)}
            async with writable(self._source, plain) as writing:
                await send_baseline(writing, self._source, names)

    async def _monitor_timeline(
        self,
        server: SourceServer,
        branch: Branch,
        reconciled: "_Reconciled",
        record: "SourceRecord",
        replication: Connection,
    ) -> TimelineMonitor | None:
        """Return the watch, which then owns *replication*; close *replication* without a watch.

        Raises SourceConnectionError if the timeline has changed meanwhile. The slot may be behind
        the fork then, and no table may become in sync at its position.
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
        reconciled: "_Reconciled",
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
        assembler = TransactionAssembler(
            lambda relation: tables.relations.find(relation) is not None,
            lambda xid: StreamedSpool(services.spools),
            piece_bytes_max=PIECE_BYTES_MAX,
            forward_origins=source.forward_origins,
            messages=_table_messages(source, server) if reconciled.ddl_token is not None else None,
        )
        assembler.conversion = reconciled.transport.conversion
        timeline_monitor = await self._monitor_timeline(
            server, branch, reconciled, record, replication
        )
        coordinator = SyncCoordinator(
            CopyContext(
                source,
                self._source_id,
                server,
                services.address,
                services.bookkeeping,
                services.sources,
                services.launcher,
                services.sync,
                tables,
                services.metrics,
                find_differences,
                services.copy_turns,
                services.later_turns,
                captures=reconciled.ddl_token is not None,
                check_timeline=None if timeline_monitor is None else timeline_monitor.check,
            )
        )
        dispatcher = Dispatcher(
            assembler,
            tables.relations,
            tables.tracker,
            history_check,
            replaced=reconciled.monitor.cases.replaced,
            with_origins=source.forward_origins,
            stop_lsn=self._attempt.stop_lsn,
            ddl_token=reconciled.ddl_token,
        )
        reconciled.monitor.cases.follow(
            coordinator,
            lambda mapped: remove_relation(mapped, services, tables, dispatcher),
        )
        position = StoredPosition(
            services.positions,
            self._attempt.fence,
            record,
            tables.tracker,
            history_check,
            self._attempt.heartbeat,
        )
        stream = await reconciled.slot_check.open_stream(
            services.sources,
            reconciled.start_lsn,
            binary=reconciled.transport.is_binary,
            on_slot=reconciled.monitor.report_slot,
        )
        return Session(
            services=services,
            fence=self._attempt.fence,
            record=record,
            server=server,
            transport=reconciled.transport,
            tables=tables,
            publishing=reconciled.publishing,
            monitor=reconciled.monitor,
            slot_check=reconciled.slot_check,
            stream=stream,
            dispatcher=dispatcher,
            scripts=Scripts(
                source, tables.fence, services.address, services.bookkeeping, tables.relations
            ),
            position=position,
            feedback=Feedback(
                stream,
                FeedbackTimes.of(source.label, server.wal_sender_timeout_seconds),
                lambda: (position.stored_lsn, tables.tracker.flush_lsn),
                lambda: services.budget.has_room(tables),
            ),
            coordinator=coordinator,
            snapshot=reconciled.snapshot,
            turn=self._turn,
            timeline_monitor=timeline_monitor,
        )


def copies_all(mappings: Iterable[RelationMapping]) -> bool:
    """Whether each table needs a first copy. Pure.

    A table without a first copy follows the source from the slot on, so the slot is made at once.
    """
    return all(mapping.rule.initial is not Initial.NONE for mapping in mappings)


@dataclass(frozen=True, slots=True)
class _Reconciled:
    """The results of reconciling source and target."""

    transport: StreamTransport
    publishing: Publishing
    monitor: SourceMonitor
    slot_check: SlotCheck
    start_lsn: Lsn
    snapshot: ExportedSnapshot | None
    ddl_token: str | None
    """Proves messages about definitions, if the source captures definitions."""


async def remove_relation(
    mapped: MappedRelation, services: Services, tables: TableEvents, dispatcher: Dispatcher
) -> None:
    """Remove a relation from the stream; workers apply or discard its dispatched changes."""
    lane = tables.relations.remove(mapped)
    if lane in tables.relations.lanes():
        return  # further relations share the lane
    await until_idle(lane)
    lane.is_ending = True
    await services.drainer.forget({lane})
    lane.close()
    dispatcher.forget(lane)
    tables.advanced.set()


def _table_messages(source: SourceMapping, server: SourceServer) -> TableMessages | None:
    """Return the reader of messages that a source sends as rows; None for a source without them."""
    if not uses_table(source, server.version):
        return None
    table = message_table(source)
    return TableMessages(table.namespace, table.name, DDL_PREFIX)


async def _register(
    services: Services,
    source_id: int,
    tables: TableEvents,
    publishing: Publishing,
    transport: StreamTransport,
    mappings: Iterable[RelationMapping],
    definitions: dict[RelationName, SourceRelation],
    *,
    may_resume: bool,
) -> list[MappedRelation]:
    """Create and return relations with their records, lanes and states."""
    expected, added = list(mappings), []
    records = await register_relations(
        services.bookkeeping, source_id, expected, may_resume=may_resume, definitions=definitions
    )
    for mapping, record in zip(expected, records, strict=True):
        mapped = MappedRelation(
            record.relation_id,
            mapping,
            record.end_lsn,
            relation_source(
                tables.source,
                definitions.get(mapping.source),
                transport.chosen.types,
                tables.fence,
                transport.conversion,
            ),
        )
        mapped.decided, mapped.outlives = record.brake, record.outlives
        if mapping.source in definitions:
            mapped.size_bytes = definitions[mapping.source].size_bytes
        is_to_mark_synced = mapping.rule.initial is Initial.NONE and not record.declared
        tables.relations.add(mapped, record, is_to_mark_synced=is_to_mark_synced)
        added.append(mapped)
        publishing.load(record)
    transports = {m.relation_id: transport.chosen.of(m.mapping.source) for m in added}
    await set_transports(services.bookkeeping, transports)
    return added
