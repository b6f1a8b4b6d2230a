"""``streamer status`` and ``streamer wait``: from the databases alone, whether or not a process
runs.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.copies import CopyProgress, read_progress
from streamer.bookkeeping.followed_sequences import SequenceRecord, read_sequences
from streamer.bookkeeping.held_changes import HeldRecord, read_held
from streamer.bookkeeping.planned_definitions import DefinitionRecord, read_definitions
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.bookkeeping.replicas import (
    Fleet,
    ReplicaRecord,
    find_newest_mapping,
    is_process_beginning,
    read_fleet,
)
from streamer.bookkeeping.requests import name_requests, read_queued_resyncs
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.bookkeeping.verifications import VerificationRecord, read_verifications
from streamer.control.resync_options import after_loss
from streamer.control.table_state import Need
from streamer.errors.error_classes import (
    SourceConnectionError,
    SourceElsewhereError,
    SourceError,
    TargetError,
    TargetMovedError,
)
from streamer.errors.error_reports import ErrorReport, TableWait, error_fields, runbook_address
from streamer.errors.remedies import Remedy, resync_source, run, then_resync
from streamer.mapping.lost_mapping import MappingProblem, find_lost_mapping
from streamer.mapping.rule_options import OnMaxRetainedWal
from streamer.mapping.rules import Mapping, SourceLabel, SourceMapping
from streamer.mapping.scope import ALL, Scope
from streamer.postgres.conninfo import reach_hint
from streamer.report.problem_facts import shown_state, source_of_row
from streamer.report.problems import Problem, ProblemKind, of_mapping, of_source, of_target
from streamer.runtime.target_health import TargetHealth, check_once
from streamer.runtime.wal_retention.backlog_level import Backlog
from streamer.source.catalog import read_flush_lsn
from streamer.source.connection import Connection, connection, is_standby
from streamer.source.server.primaries_after_failover import require_server_of_run
from streamer.source.slot_and_publications.retained_wal import read_retained
from streamer.source.slot_and_publications.slot import (
    Slot,
    read_slot,
    read_visible_lsn,
    require_position,
)
from streamer.target.connection import TargetAddress
from streamer.util.lsn import INVALID_LSN, LSN_MAX, Lsn

Connect = Callable[[SourceMapping], AbstractAsyncContextManager[Connection]]

UNKNOWN: Final = "unknown"
"""The state of a source while the target, which stores the state, does not answer."""


@dataclass(slots=True)
class TableStatus:
    """A table in ``status --json``.

    ``bytes_total`` and ``rows_total`` are estimates during a copy; the rates describe a copy. Held
    changes are all changes that wait in the running process. ``retained_wal_bytes``: the WAL that
    the source retains for held changes; None without an answer of the source.
    """

    source: str
    target: str
    type: str
    state: str
    end_lsn: str
    rows_copied: int
    rows_total: int | None
    error: str | None
    quarantined: int
    error_code: str | None = None
    remedy: Remedy | None = None
    """The operator's next step for ``error``, if known."""
    bytes_copied: int = 0
    bytes_total: int | None = None
    rows_per_second: float | None = None
    seconds_left: float | None = None
    chunks_copied: int | None = None
    """During a copy in chunks: the chunks in the target, which stay after a restart."""
    chunks_total: int | None = None
    """The estimated number of chunks."""
    held_changes: int = 0
    held_bytes: int = 0
    retained_wal_bytes: int | None = None
    waiting_for: str | None = None
    wait: TableWait | None = None
    """Structured form of ``waiting_for``."""
    needs_resync: bool = False
    """Changes are permanently missing, so only a copy helps."""
    lag_seconds: float | None = None
    """Age of the oldest committed change that is not visible; None if that is not known."""
    identity: str | None = None
    """The replica identity: 'full', 'key …', or 'none' if the source sends inserts only."""
    identity_remedy: Remedy | None = None
    """The statements that give the source's table a usable replica identity."""
    partition_error: ErrorReport | None = None
    """Why streamer cannot create or remove time partitions of the target table."""
    transport: str | None = None
    """The format in which the source sends values: 'text' or 'binary'."""
    transport_reason: str | None = None
    verified_at: str | None = None
    """The start of the last comparison that found the table equal to its source."""
    differing_rows: int | None = None
    """Rows that differed in the last comparison; None without a comparison."""
    compared_at: str | None = None
    """The end of the last comparison."""
    verification_error: str | None = None
    """The error that prevented the last comparison of the table."""
    truncates_skipped: int = 0
    """The number of TRUNCATEs of the table that streamer ignored (`skip_truncate`)."""
    waits_before: dict[str, Any] | None = None
    """The transaction before which `max_deleted_rows` paused the table: xid, lsn, commit_time,
    deleted_rows, truncates.
    """
    definitions: list[DefinitionRecord] = field(default_factory=list)
    """Definitions that `create` demands and the target lacks."""
    sid: str | None = None
    """The sid of the table's rows: that of the source, or the `sid` of the table's rule."""


@dataclass(slots=True)
class SourceStatus:
    """A source in ``status --json``.

    ``backlog``: see `streamer.runtime.wal_retention.backlog_guard.Backlog`.
    """

    database: str
    sid: str | None
    state: str
    slot: str
    confirmed_flush_lsn: str | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    retained_wal_bytes: int | None = None
    heartbeat_seconds: float | None = None
    workers_wait_for: str | None = None
    """The reason why the sessions that write changes wait at the target."""
    error: str | None = None
    error_code: str | None = None
    remedy: Remedy | None = None
    """The operator's next step for ``error``, if known."""
    backlog: dict[str, Any] | None = None
    role: str | None = None
    """The role of the server: 'primary' or 'standby'; None without an answer."""
    process: str | None = None
    """Host and pid of the process that runs the source now."""
    sequences: list[SequenceRecord] = field(default_factory=list)
    """The sequences of the target that follow sequences of this source."""
    implementation: str | None = None
    """The implementation of the work per change in that process: 'compiled' or 'pure'."""
    waiting_for: str | None = None
    """Why the start waits: for its copy turn, or for sessions at the source."""
    own: dict[str, Any] | None = None
    """The state and the error in the answering process, if they differ from the state in the
    bookkeeping.
    """
    tables: list[TableStatus] = field(default_factory=list)

    @property
    def label(self) -> str:
        return SourceLabel(self.database, self.sid)

    def state_of_table(self, table: TableStatus) -> str:
        """Return the state of a table of this source, as lists and counts show the state."""
        return shown_state(self.state, table.state, table.wait)

    @property
    def problems(self) -> list[Problem]:
        """The problems of the source, then the problems of its tables."""
        return of_source(source_of_row(self._fields()))

    def to_json(self) -> dict[str, Any]:
        fields = self._fields()
        own_problems = of_source(source_of_row(fields | {"tables": (), "sequences": ()}))
        hints = [str(problem.remedy) for problem in own_problems if problem.remedy is not None]
        return fields | {"hint": hints[0] if hints else None}

    def _fields(self) -> dict[str, Any]:
        return _as_json(self) | {
            "tables": [
                _as_json(table)
                | {
                    "wait": None if table.wait is None else table.wait.to_json(),
                    "identity_remedy": table.identity_remedy and table.identity_remedy.to_json(),
                    "partition_error": _error(table.partition_error),
                    "definitions": [definition.to_json() for definition in table.definitions],
                }
                for table in self.tables
            ],
            "sequences": [sequence.to_json() for sequence in self.sequences],
        }


def _error(report: ErrorReport | None) -> dict[str, Any] | None:
    return None if report is None else error_fields(report)


def _as_json(status: "SourceStatus | TableStatus") -> dict[str, Any]:
    fields = {name: getattr(status, name) for name in status.__slots__}
    remedy = None if status.remedy is None else status.remedy.to_json()
    return fields | {"runbook": runbook_address(status.error_code), "remedy": remedy}


@dataclass(slots=True)
class _Bookkeeping:
    """The bookkeeping's answer."""

    sources: dict[str, SourceRecord] = field(default_factory=dict)
    relations: list[RelationRecord] = field(default_factory=list)
    copies: dict[int, CopyProgress] = field(default_factory=dict)
    held: dict[int, HeldRecord] = field(default_factory=dict)
    sequences: dict[int, list[SequenceRecord]] = field(default_factory=dict)
    verifications: dict[int, VerificationRecord] = field(default_factory=dict)
    definitions: dict[int, list[DefinitionRecord]] = field(default_factory=dict)
    resyncs: dict[int, int] = field(default_factory=dict)
    """The queued requests for copies, by relation."""
    fleet: Fleet = field(default_factory=Fleet)

    def relations_of(self, record: SourceRecord) -> list[RelationRecord]:
        return [r for r in self.relations if r.source_id == record.source_id]

    def without_held(self) -> "_Bookkeeping":
        return replace(self, held={})


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The facts that ``status`` shows: the target first, because the target stores the rest."""

    target: TargetHealth
    sources: list[SourceStatus]
    mapping: MappingProblem | None = None
    fleet: Fleet = field(default_factory=Fleet)
    """The processes that share the sources, and the processes that hold the locks of sources."""
    unfiltered: Sequence[SourceStatus] | None = None
    """All sources with all tables, if ``sources`` lacks some of them."""

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.to_json(),
            "mapping": error_fields(None) | {"hint": None}
            if self.mapping is None
            else self.mapping.to_json(),
            "sources": [status.to_json() for status in self.sources],
            "replicas": [self._replica(replica) for replica in self.fleet.replicas],
        }

    def _replica(self, replica: ReplicaRecord) -> dict[str, Any]:
        return {
            "process": replica.name,
            "version": replica.version,
            "address": replica.address,
            "sources": self.fleet.counts()[replica.name],
            "max_sources": replica.max_sources,
            "mapping": replica.mapping,
            "mapping_since": replica.mapping_since
            and replica.mapping_since.isoformat(timespec="seconds"),
            "has_newest_mapping": replica not in self.outdated_replicas(),
            "is_stopping": replica.is_stopping,
            "started_at": replica.started_at.isoformat(timespec="seconds"),
            "seen_at": replica.seen_at.isoformat(timespec="milliseconds"),
        }

    def outdated_replicas(self) -> list[ReplicaRecord]:
        """Return the replicas whose mapping is not the mapping that changed last."""
        newest = find_newest_mapping(self.fleet.replicas)
        if newest is None:
            return []
        return [r for r in self.fleet.replicas if r.mapping not in (None, newest.mapping)]

    @property
    def counted(self) -> Sequence[SourceStatus]:
        """All sources with all tables, for counts."""
        return self.sources if self.unfiltered is None else self.unfiltered

    @property
    def exit_code(self) -> int:
        if self.target.error is not None and not self.target.is_read_only:
            return 3
        return 0 if self.mapping is None else 4

    @property
    def problems(self) -> list[Problem]:
        """The problems of the target and of the mapping as a whole."""
        problems = [*of_target(self.target.facts)]
        return problems if self.mapping is None else [*problems, of_mapping(self.mapping.report)]

    @property
    def failure(self) -> str:
        """Return the line that ends the command when `exit_code` is not 0."""
        kind = ProblemKind.TARGET if self.exit_code == 3 else ProblemKind.MAPPING
        return next((problem.sentence for problem in self.problems if problem.kind is kind), "")


@dataclass(frozen=True, slots=True)
class MappingState:
    """The mapping, as far as it is known without the target."""

    problem: MappingProblem | None = None
    missing: Path | None = None
    """The path of the mapping database, if missing: before the first start there is no file."""


async def read_report(
    address: TargetAddress,
    mapping: Mapping,
    state: MappingState | None = None,
    scope: Scope = ALL,
) -> StatusReport:
    """Read the status of the target and the sources of *scope*. An outage is part of the report.

    The report leaves out tables outside *scope*, and sources whose tables are known and outside.
    Raises MappingError for a scope without a source, or a faulty pattern.
    """
    state = state or MappingState()
    is_empty = not mapping.sources
    mapping = replace(mapping, sources=tuple(scope.sources_of_tables(mapping)))
    target = await check_once(address, "streamer status")
    if target.is_well or target.is_read_only:
        bookkeeping = Bookkeeping(address, "streamer status")
        try:
            books = await _read_bookkeeping(bookkeeping)
            statuses = await _read_statuses(books, mapping, connection)
            for status in statuses:
                status.workers_wait_for = target.waits.workers
            problem = state.problem
            if problem is None and is_empty:
                problem = find_lost_mapping(0, list(books.sources), state.missing)
            return StatusReport(target, _only_tables(statuses, scope), problem, books.fleet)
        except TargetError as exc:
            target.record_error(exc, address)
        finally:
            await bookkeeping.close()
    reason = str(target.error).removeprefix("target: ")
    statuses = [
        SourceStatus(
            source.database,
            source.sid,
            UNKNOWN,
            source.slot,
            error=f"the state of this source is stored in the target: {reason}",
            error_code=target.error_code,
            remedy=Remedy.of("end the problem of the target first"),
        )
        for source in mapping.sources
    ]
    await _add_all_positions(statuses, mapping, _Bookkeeping(), connection)
    return StatusReport(target, statuses, state.problem)


def _only_tables(statuses: list[SourceStatus], scope: Scope) -> list[SourceStatus]:
    shown = []
    for status in statuses:
        if not scope.has_whole(status):
            tables = ((table.source, table.sid, table) for table in status.tables)
            status.tables = scope.select(status, tables)
        if status.tables or scope.has_whole(status):
            shown.append(status)
    if not shown and not scope.tables and scope.sid is not None:
        raise scope.unknown()
    return shown


async def read_status(
    bookkeeping: Bookkeeping, mapping: Mapping, connect: Connect = connection
) -> list[SourceStatus]:
    """Read the status of every mapped source. *connect* gives a connection to a source for a block.

    Raises TargetConnectionError, TargetRejectedError.
    """
    return await _read_statuses(await _read_bookkeeping(bookkeeping), mapping, connect)


async def read_stored_status(bookkeeping: Bookkeeping, mapping: Mapping) -> list[SourceStatus]:
    """Return the facts of every mapped source that are in the bookkeeping.

    Raises TargetConnectionError, TargetRejectedError.
    """
    return _stored_statuses(await _read_bookkeeping(bookkeeping), mapping)


async def _read_statuses(
    books: _Bookkeeping, mapping: Mapping, connect: Connect
) -> list[SourceStatus]:
    statuses = _stored_statuses(books, mapping)
    await _add_all_positions(statuses, mapping, books, connect)
    return statuses


def _stored_statuses(books: _Bookkeeping, mapping: Mapping) -> list[SourceStatus]:
    statuses = []
    for source in mapping.sources:
        record = books.sources.get(source.label)
        state, error = (record.state, record.error) if record else ("not started", None)
        if (vacancy := books.fleet.vacancy(source.label)) is not None:
            state, error = "waiting", vacancy
        elif books.fleet.is_starting(source.label):
            state, error = "starting", None
        status = SourceStatus(
            source.database,
            source.sid,
            state,
            source.slot,
            error=error and error.text,
            error_code=error and error.code,
            remedy=error and error.remedy,
            process=record.holder if record else None,
            implementation=record.implementation if record else None,
            waiting_for=record.waiting_for if record and record.holder else None,
        )
        if record is not None:
            status.tables = [
                _table_status(
                    relation,
                    books.copies.get(relation.relation_id),
                    books.verifications.get(relation.relation_id),
                    books.definitions.get(relation.relation_id, []),
                )
                for relation in books.relations_of(record)
            ]
            status.sequences = books.sequences.get(record.source_id, [])
        statuses.append(status)
    return statuses


async def _add_all_positions(
    statuses: list[SourceStatus], mapping: Mapping, books: _Bookkeeping, connect: Connect
) -> None:
    await asyncio.gather(
        *(
            _add_positions(status, source, books, connect)
            for status, source in zip(statuses, mapping.sources, strict=True)
        )
    )


async def _read_bookkeeping(bookkeeping: Bookkeeping) -> _Bookkeeping:
    if not await is_installed(bookkeeping):
        fleet = Fleet(is_beginning=await is_process_beginning(bookkeeping))
        return _Bookkeeping(fleet=fleet)
    async with bookkeeping.connection() as target:
        copies = await read_progress(target)
    books = _Bookkeeping(
        {record.label: record for record in await read_source_records(bookkeeping)},
        await read_relation_records(bookkeeping),
        copies,
        await read_held(bookkeeping),
        await read_sequences(bookkeeping),
        await read_verifications(bookkeeping),
        await read_definitions(bookkeeping),
        await read_queued_resyncs(bookkeeping),
    )
    async with bookkeeping.connection() as target:
        fleet = Fleet.of(await read_fleet(target))  # last: processes may have started meanwhile
    if not fleet.replicas:
        fleet = replace(fleet, is_beginning=await is_process_beginning(bookkeeping))
    return replace(books, fleet=fleet)


def _table_status(
    relation: RelationRecord,
    copy: CopyProgress | None,
    verification: VerificationRecord | None,
    definitions: list[DefinitionRecord],
) -> TableStatus:
    is_complete = relation.snapshot_lsn is not None
    mass_delete = relation.waiting_mass_delete
    status = TableStatus(
        source=relation.source,
        target=relation.target,
        type=relation.type,
        state=relation.state,
        end_lsn=str(relation.end_lsn),
        rows_copied=relation.rows_copied,
        rows_total=relation.rows_total,
        error=relation.error and relation.error.text,
        error_code=relation.error and relation.error.code,
        remedy=relation.error and relation.error.remedy,
        quarantined=relation.quarantined,
        waiting_for=None if relation.wait is None else str(relation.wait),
        wait=relation.wait,
        needs_resync=relation.needs_resync,
        lag_seconds=_rounded(relation.lag_seconds or 0.0),
        identity=relation.identity,
        identity_remedy=relation.identity_remedy,
        partition_error=relation.partition_error,
        transport=relation.transport,
        transport_reason=relation.transport_reason,
        truncates_skipped=relation.truncates_skipped,
        waits_before=None if mass_delete is None else mass_delete.to_json(),
        definitions=definitions,
        sid=relation.row_sid,
        bytes_copied=relation.bytes_copied,
        bytes_total=relation.bytes_copied if is_complete else None,
    )
    if copy is not None:
        status.rows_copied, status.rows_total = copy.rows, copy.rows_total
        status.bytes_copied, status.bytes_total = copy.bytes, copy.bytes_total
        status.rows_per_second, status.seconds_left = copy.rows_per_second, copy.seconds_left
    if relation.chunks is not None:
        status.chunks_copied, status.chunks_total = relation.chunks.count, relation.chunks.total
    if verification is not None:
        verified_at = verification.verified_at
        status.verified_at = None if verified_at is None else verified_at.isoformat()
        status.differing_rows = verification.differing_rows
        status.compared_at = verification.ended_at.isoformat()
        status.verification_error = verification.error
    return status


async def _add_positions(
    status: SourceStatus, source: SourceMapping, books: _Bookkeeping, connect: Connect
) -> None:
    """Query the slot at the source; the answer takes precedence over stored values."""
    record = books.sources.get(source.label)
    is_vacant = books.fleet.vacancy(source.label) is not None
    is_vacant = is_vacant or books.fleet.is_starting(source.label)
    try:
        async with connect(source) as plain:
            if record is not None:
                await require_server_of_run(source, plain, record.known_server)
            slot = await read_slot(plain, source.slot)
            visible_lsn = await read_visible_lsn(plain, slot) if slot is not None else None
            end = await read_flush_lsn(plain)
            retained = await read_retained(plain, source)
            database = plain.info.dbname
            loss = None if record is None else _find_loss(source, slot, database, books)
            status.role = "standby" if is_standby(plain) else "primary"
    except SourceError as exc:
        remedy = exc.remedy
        if isinstance(exc, SourceConnectionError) and remedy is None:
            remedy = reach_hint(source.url.reveal())
        # The process with the source's lock may reach the source, and has newer facts.
        is_reported = status.process is not None and status.state in ("streaming", "error")
        is_reported = is_reported or is_vacant
        if is_reported and status.state == "streaming":
            failure = error_fields(replace(ErrorReport.of(exc), remedy=remedy))
            is_elsewhere = isinstance(exc, SourceElsewhereError)
            state = "at another server" if is_elsewhere else "cut off from the source"
            status.own = {"state": state, **failure}
        elif not is_reported:
            if status.error is None or status.state == UNKNOWN:
                status.error, status.error_code, status.remedy = str(exc), exc.code, remedy
            status.state = "unreachable"
        _add_held(status, books, None)
        return
    stored = None if record is None else record.backlog
    if (backlog := Backlog.of(source, retained, stored)) is not None:
        warnings = {name: (stored or {}).get(name) for name in ("obstacle", "journal")}
        status.backlog = backlog.to_json() | warnings
    # A crashed process could not report the end. Only the lock shows whether the process runs.
    reader_pid = None if slot is None or slot.is_foreign(database) else slot.active_pid
    if status.process is None and not is_vacant and reader_pid is None:
        _show_end(status, slot, loss)
    if slot is None:
        return
    if record is not None and runs_at_another_target(source, record, slot):
        status.state, status.error_code = UNKNOWN, TargetMovedError.code
        status.error = (
            "a process reads the slot, but none holds the lock of this source at this target: "
            "`run` uses another target"
        )
        words = (
            "set target.url to the server that `run` uses; if this target is an old primary, stop "
            "it"
        )
        status.remedy = Remedy.of(words)
        return
    # Without a streaming process, the source will send held changes again.
    if slot.active_pid is None and status.state == "streaming":
        status.state = "stopped"
    _add_held(status, books if slot.active_pid is not None else books.without_held(), end)
    if slot.confirmed_flush_lsn is not None:
        status.confirmed_flush_lsn = str(slot.confirmed_flush_lsn)
        # A journal may hold the only copy of acknowledged changes, and the target may have
        # unacknowledged changes.
        position = slot.confirmed_flush_lsn
        if record is not None and record.acknowledged_lsn:
            position = min(position, record.acknowledged_lsn)
        status.lag_bytes = max(0, end - max(position, visible_lsn or INVALID_LSN))
    if slot.restart_lsn is not None:
        status.retained_wal_bytes = max(0, end - slot.restart_lsn)
    if record is not None and record.visible_seconds is not None:
        status.lag_seconds = 0.0 if status.lag_bytes == 0 else _rounded(record.visible_seconds)
    if slot.active_pid is None:  # no process has newer facts about tables
        for table in status.tables:
            table.lag_seconds = status.lag_seconds
    if record is not None and record.heartbeat_seconds is not None and slot.active_pid is not None:
        overdue = record.heartbeat_overdue_seconds or 0.0
        status.heartbeat_seconds = round(max(record.heartbeat_seconds, overdue), 3)


def _show_end(status: SourceStatus, slot: Slot | None, loss: SourceError | None) -> None:
    """Show that no process runs a source; *loss*: why a process could not continue."""
    if status.state in ("starting", "waiting"):
        status.state = "not started" if slot is None and loss is None else "stopped"
        status.error = status.error_code = status.remedy = status.waiting_for = None
    elif status.state == "streaming":
        status.state = "stopped"
    if status.state == "stopped" and loss is not None:
        status.error, status.error_code, status.remedy = str(loss), loss.code, loss.remedy


def _find_loss(
    source: SourceMapping, slot: Slot | None, database: str, books: _Bookkeeping
) -> SourceError | None:
    """Return the error with which the next process would refuse *slot*."""
    record = books.sources[source.label]
    synced = [
        relation
        for relation in books.relations_of(record)
        if relation.table_state.need in (Need.NOTHING, Need.PART)
    ]
    if not synced:
        return None
    # The changes between the acknowledged position and the slot may be in a journal.
    has_journal = bool((record.backlog or {}).get("spooled_bytes"))
    acknowledged_lsn = LSN_MAX if has_journal else record.acknowledged_lsn
    try:
        require_position(slot, source.slot, database, acknowledged_lsn)
    except SourceError as exc:
        exc.remedy = _remedy_of_loss(exc, source, synced, books.resyncs)
        return exc
    return None


def _remedy_of_loss(
    loss: SourceError,
    source: SourceMapping,
    synced: Sequence[RelationRecord],
    resyncs: dict[int, int],
) -> Remedy | None:
    """Return the remedy of *loss*: a resync and a start, or only a start after the requests."""
    if loss.remedy is None and all(relation.relation_id in resyncs for relation in synced):
        queued = name_requests(sorted(resyncs[relation.relation_id] for relation in synced))
        return Remedy.of(f"the resync is requested ({queued}); start: ", run("run"))
    again = resync_source(
        [relation.source for relation in synced],
        *after_loss(relation.type for relation in synced),
        database=source.database,
        sid=source.sid,
    )
    return then_resync(loss.remedy, Remedy.of(again, "; then start: ", run("run")))


def runs_at_another_target(source: SourceMapping, record: SourceRecord, slot: Slot) -> bool:
    """Return whether a process streams the source to a target other than this target. Pure.

    *record*: the source in the bookkeeping of this target. A process that may write a journal also
    reads the slot between two attempts.
    """
    has_limit = source.max_retained_wal_bytes is not None or slot.safe_wal_bytes is not None
    may_journal = has_limit and source.on_max_retained_wal is OnMaxRetainedWal.SPOOL
    is_read = slot.active_pid is not None and record.state == "streaming"
    return is_read and record.holder is None and not may_journal


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 3)


def _add_held(status: SourceStatus, books: _Bookkeeping, end_lsn: Lsn | None) -> None:
    record = books.sources.get(status.label)
    if record is None:
        return
    for table, relation in zip(status.tables, books.relations_of(record), strict=True):
        held = books.held.get(relation.relation_id)
        behind_lsn = end_lsn
        if held is not None:
            table.held_changes, table.held_bytes = held.changes, held.bytes
            behind_lsn = held.behind_lsn or end_lsn
        if end_lsn is not None and behind_lsn is not None:
            table.retained_wal_bytes = max(0, end_lsn - behind_lsn)
