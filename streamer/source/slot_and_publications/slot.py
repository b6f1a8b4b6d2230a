"""Creates, reads and drops replication slots, and holds the snapshot that a new slot exports.

PostgreSQL documentation, "Streaming Replication Protocol", CREATE_REPLICATION_SLOT; view
pg_replication_slots.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from streamer.errors.error_classes import (
    SlotInUseError,
    SlotInvalidatedError,
    SlotMissingError,
    SlotWaitError,
    SourceDatabaseError,
    SourceDivergedError,
    SourceStandbyError,
)
from streamer.errors.remedies import Remedy, at_source
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.source.catalog import SourceServer, read_flush_lsn
from streamer.source.connection import Connection, connect, fetch_all, translating
from streamer.source.connection import connection as plain_connection
from streamer.source.server.primary_of_standby import (
    LOG_SNAPSHOT_SQL,
    RunningTransactions,
    primary_hint,
)
from streamer.source.server.timeline import check_same_server, check_same_server_by_query
from streamer.source.server.wait_limits import Report, read_blockers
from streamer.util.lsn import INVALID_LSN, Lsn

CHECK_SECONDS: Final = 1.0
WAIT_SECONDS: Final = 900.0
"""The time for which the creation of a slot may wait for transactions to end."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot in the source's catalogs. Missing LSNs are None."""

    name: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    invalidation: str | None
    is_failover: bool = False
    is_synced: bool = False
    """Whether the slot is a standby's synchronized copy of the primary's slot, or was a copy until
    the promotion.
    """
    is_temporary: bool = False
    """A synchronized copy is temporary until it can survive a promotion."""
    decodes_prepared: bool = False
    """Whether the slot sends transactions already at PREPARE TRANSACTION (two_phase)."""
    can_be_altered: bool = False
    """Whether the server can alter two_phase (PostgreSQL 18)."""
    safe_wal_bytes: int | None = None
    """The bytes of WAL until the source may invalidate the slot; None without a limit."""

    @classmethod
    def from_view(cls, row: dict[str, Any]) -> Self:
        """Read a row of pg_replication_slots, of any version, as JSON."""
        lost = row.get("wal_status") == "lost"
        return cls(
            name=row["slot_name"],
            plugin=row["plugin"],
            database=row["database"],
            active_pid=row["active_pid"],
            restart_lsn=_lsn(row["restart_lsn"]),
            confirmed_flush_lsn=_lsn(row["confirmed_flush_lsn"]),
            invalidation=row.get("invalidation_reason")
            or ("conflict" if row.get("conflicting") else None)
            or ("wal_removed" if lost else None),
            is_failover=bool(row.get("failover")),
            is_synced=bool(row.get("synced")),
            is_temporary=bool(row.get("temporary")),
            decodes_prepared=bool(row.get("two_phase")),
            can_be_altered="two_phase_at" in row,
            safe_wal_bytes=row.get("safe_wal_size"),
        )

    def is_elsewhere(self, database: str) -> bool:
        """Whether this may be a slot of streamer for a different database of the server."""
        return self.plugin == "pgoutput" and self.database not in (None, database)

    def is_foreign(self, database: str) -> bool:
        """Whether this slot cannot belong to streamer, despite its name."""
        return self.misfit(database) is not None

    def misfit(self, database: str) -> "Misfit | None":
        """Return the attribute that proves that the slot is not streamer's, with a remedy."""
        rename = (
            "; if another program needs that slot, give this `database` of the configuration "
            "another name instead"
        )
        if self.is_elsewhere(database):
            return Misfit(
                f'belongs to database "{self.database}", but the url leads to "{database}"',
                Remedy.of("correct the url, or give this `database` another name"),
            )
        if self.plugin != "pgoutput" or self.database != database:
            return Misfit(
                f'belongs to plugin "{self.plugin}" and database "{self.database}"',
                Remedy.of(
                    "run at the source: ",
                    at_source(drop_slot_sql(self.name), is_choice=True),
                    rename,
                ),
            )
        if self.is_temporary and not self.is_synced:
            end = f"select pg_catalog.pg_terminate_backend({self.active_pid})"
            return Misfit(
                "is temporary: it ends with the session that created it, process "
                f"{self.active_pid}",
                Remedy.of("run at the source: ", at_source(end, is_choice=True), rename),
            )
        if self.decodes_prepared and self.can_be_altered:
            alter = f"ALTER_REPLICATION_SLOT {quote_identifier(self.name)} (TWO_PHASE false)"
            words = f"run over a replication connection to that database: {alter}"
            return Misfit(_TWO_PHASE, Remedy.of(words))
        if self.decodes_prepared:
            drop = at_source(drop_slot_sql(self.name), is_choice=True)
            words = "; streamer then creates a slot without two_phase"
            return Misfit(_TWO_PHASE, Remedy.of("run at the source: ", drop, words))
        return None


_TWO_PHASE: Final = (
    "sends transactions at PREPARE TRANSACTION (two_phase), but streamer applies transactions only "
    "after their commit"
)


@dataclass(frozen=True, slots=True)
class Misfit:
    """An attribute that streamer's slots do not have, and the remedy."""

    problem: str
    remedy: Remedy


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


async def read_slot(connection: Connection, name: str) -> Slot | None:
    """Return the slot called *name*, or None."""
    rows = await fetch_all(
        connection,
        "select pg_catalog.to_jsonb(s) as slot from pg_catalog.pg_replication_slots s"
        " where slot_name = %s",
        name,
    )
    return Slot.from_view(rows[0]["slot"]) if rows else None


async def read_visible_lsn(connection: Connection, slot: Slot) -> Lsn | None:
    """Return the consumer's `replay_lsn`, or None if no consumer streams from *slot*. The position
    can be ahead of ``confirmed_flush_lsn``.
    """
    rows = await fetch_all(
        connection,
        "select replay_lsn::text as lsn from pg_catalog.pg_stat_replication where pid = %s",
        slot.active_pid,
    )
    return _lsn(rows[0]["lsn"]) if rows else None


_KEEP_ROWS: Final = "set hot_standby_feedback = on and primary_slot_name on the standby"
_INVALIDATIONS: Final = {
    "wal_removed": "the source removed WAL beyond max_slot_wal_keep_size",
    "rows_removed": f"VACUUM at the primary removed rows of catalogs; {_KEEP_ROWS}",
    "wal_level_insufficient": "wal_level of the primary was below logical",
    "idle_timeout": "streamer was disconnected for longer than idle_replication_slot_timeout",
    "conflict": f"it conflicted with the recovery of the standby; {_KEEP_ROWS}, and keep "
    "wal_level = logical at the primary",
}
"""View pg_replication_slots, column invalidation_reason; ``conflict`` is the reason of PostgreSQL
16.
"""


def check_slot(slot: Slot | None, name: str, database: str) -> Lsn:
    """Return the position at which streaming from *slot* resumes; refuse a slot that lost changes.

    Raises SlotMissingError, SlotInvalidatedError, SourceDivergedError.
    """
    if slot is None:
        raise SlotMissingError(f'replication slot "{name}" is gone')
    if slot.invalidation is not None:
        why = _INVALIDATIONS.get(slot.invalidation)
        raise SlotInvalidatedError(
            f'replication slot "{name}" was invalidated: {slot.invalidation}'
            + (f" ({why})" if why else "")
        )
    if (misfit := slot.misfit(database)) is not None:
        kind = SourceDatabaseError if slot.is_elsewhere(database) else SourceDivergedError
        raise kind(
            f'replication slot "{name}" {misfit.problem}',
            hint=misfit.remedy,
        )
    if slot.confirmed_flush_lsn is None or slot.restart_lsn is None:
        raise SlotInvalidatedError(f'replication slot "{name}" has no position')
    return slot.confirmed_flush_lsn


def require_position(slot: Slot | None, name: str, database: str, acknowledged_lsn: Lsn) -> None:
    """Refuse a slot that has lost changes which the target lacks. Pure.

    Raises SlotMissingError, SlotInvalidatedError, SourceDivergedError.
    """
    position = check_slot(slot, name, database)
    if problem := ahead_of_target(name, position, acknowledged_lsn):
        raise SourceDivergedError(problem)


def require_own(slot: Slot | None, source: SourceMapping, server: SourceServer) -> None:
    """Refuse a slot that the standby behind *server* synchronizes from its primary. Pure.

    No client may read such a slot before the standby is promoted. Raises SourceStandbyError.
    """
    if slot is not None and slot.is_synced and server.in_recovery:
        raise SourceStandbyError(
            f'source "{source.label}": is a standby, and replication slot "{slot.name}" is a copy '
            "of its primary's",
            hint="promote the standby, or list all hosts in the url, with "
            "target_session_attrs=read-write",
        )


async def set_failover(source: SourceMapping, slot: Slot, server: SourceServer) -> None:
    """Set or clear the failover option of an existing slot, as configured for *source*."""
    if slot.is_failover == source.failover or server.in_recovery:
        return
    value = "true" if source.failover else "false"
    async with plain_connection(source, replication=True) as replication:
        await check_same_server(replication, server)
        command = f"ALTER_REPLICATION_SLOT {quote_identifier(slot.name)} (FAILOVER {value})"
        await replication.execute(command.encode())


DROP_SECONDS: Final = 10.0
FORMER_SECONDS: Final = 2.0
"""The time in which a process that has lost the right to a slot must close its stream."""
_END_READER_SQL: Final = """
select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity a
where a.pid = %s and a.usename = current_user
  and a.application_name = pg_catalog.current_setting('application_name')
"""


def ahead_of_target(name: str, confirmed_lsn: Lsn, acknowledged_lsn: Lsn) -> str | None:
    """Return the problem of a slot that discarded changes before the target had them, or None.

    The target stores each position before the source receives the position. For a slot created
    beforehand, the target has no position yet. Pure.
    """
    if acknowledged_lsn == INVALID_LSN or confirmed_lsn <= acknowledged_lsn:
        return None
    return (
        f'replication slot "{name}" is at {confirmed_lsn}, ahead of the target, which has changes '
        f"up to {acknowledged_lsn}"
    )


def drop_slot_sql(name: str) -> str:
    """Return the statement that drops a slot, and accepts a missing slot. Pure."""
    return (
        "select pg_catalog.pg_drop_replication_slot(slot_name) "
        f"from pg_catalog.pg_replication_slots where slot_name = {quote_literal(name)}"
    )


def drop_own_slot_sql(name: str) -> str:
    """Return the statement that drops streamer's slot in the database of the session; a foreign
    program's slot of that name stays. Pure.
    """
    return (
        f"{drop_slot_sql(name)} and plugin = 'pgoutput'"
        " and database = pg_catalog.current_database()"
    )


async def drop_slot(connection: Connection, name: str) -> None:
    """Drop streamer's slot in the database of *connection*. Accept a missing slot, which a crashed
    run may have dropped, and keep a slot of a foreign program.

    Wait a moment for a slot whose walsender is still ending. Raises SlotInUseError.
    """
    deadline = asyncio.get_running_loop().time() + DROP_SECONDS
    while True:
        try:
            await connection.execute(drop_own_slot_sql(name).encode())
        except psycopg.errors.ObjectInUse:
            if asyncio.get_running_loop().time() > deadline:
                raise SlotInUseError(f'replication slot "{name}" is in use') from None
            await asyncio.sleep(0.2)
        except psycopg.errors.UndefinedObject:
            return
        else:
            return


async def end_former_reader(connection: Connection, name: str) -> None:
    """End the session of a former process that still streams from the slot.

    The caller has the source's lock, so that process has lost the right to the slot. If the process
    is frozen or disconnected, the walsender would keep the slot until `wal_sender_timeout`.
    """
    deadline = asyncio.get_running_loop().time() + FORMER_SECONDS
    while (slot := await read_slot(connection, name)) and slot.active_pid is not None:
        if asyncio.get_running_loop().time() > deadline:
            await fetch_all(connection, _END_READER_SQL, slot.active_pid)
            return
        await asyncio.sleep(0.1)


async def copy_slot(replication: Connection, slot: str, name: str) -> Lsn:
    """Make the temporary slot *name* at the position of *slot*, which may be in use; return the
    position. The slot *name* ends with the session.
    """
    made = await fetch_all(
        replication,
        "select (pg_catalog.pg_copy_logical_replication_slot("
        f"{quote_literal(slot)}, {quote_literal(name)}, true)).lsn::text as lsn",
    )
    return Lsn.parse(made[0]["lsn"])


def sync_slot_prefix(slot: str) -> str:
    """Return the prefix of the names of temporary slots for copies."""
    return f"{slot[:44]}_sync_"


def sync_slot_name(slot: str) -> str:
    """Return a new name for the temporary slot of a copy."""
    return f"{sync_slot_prefix(slot)}{secrets.token_hex(4)}"


class ExportedSnapshot:
    """A snapshot of the source that sessions can import while this object is open.

    The snapshot lives until the next command of the exporting connection, so this object owns that
    connection and sends no command.
    """

    def __init__(
        self,
        connection: Connection,
        slot: str,
        snapshot_name: str,
        consistent_point: Lsn,
        source_time: str,
    ) -> None:
        """*source_time*: all transactions after the consistent point commit after this time."""
        self._connection = connection
        self.slot = slot
        self.snapshot_name = snapshot_name
        self.consistent_point = consistent_point
        self.source_time = source_time

    @property
    def is_alive(self) -> bool:
        """Whether the connection, and so the snapshot, still exists."""
        try:
            self._connection.pgconn.consume_input()  # the server sends only the end of the session
        except psycopg.OperationalError:
            return False
        return not self._connection.closed and not self._connection.broken

    async def close(self) -> None:
        """Release the snapshot; the server then drops a temporary slot."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


async def create_slot(
    source: SourceMapping,
    name: str,
    server: SourceServer,
    *,
    temporary: bool = False,
    report: Report,
    passed: Callable[[Lsn], None] = lambda _: None,
) -> ExportedSnapshot:
    """Create a logical slot and export the snapshot of its consistent point.

    PostgreSQL waits until every running transaction at the source has ended. So the snapshot
    contains all changes before the consistent point, and the slot all later changes. A standby
    waits for records of running transactions, which only the primary writes. *report* receives the
    sessions or the record that the slot waits for, after each change. While sessions delay the
    slot, *passed* receives positions that the consistent point will follow. Raises SlotWaitError
    after `WAIT_SECONDS`, and leaves no slot behind.
    """
    connection = await connect(source, replication=True)
    creating = asyncio.ensure_future(_create(connection, source, name, server, temporary))
    try:
        pid = connection.info.backend_pid
        return await _watched(creating, source, server, pid, report, passed)
    except BaseException:
        creating.cancel()
        await connection.close()
        raise


async def _create(
    connection: Connection,
    source: SourceMapping,
    name: str,
    server: SourceServer,
    temporary: bool,
) -> ExportedSnapshot:
    kind = "TEMPORARY " if temporary else ""
    export = "(SNAPSHOT 'export')" if server.version >= 15_00_00 else "EXPORT_SNAPSHOT"
    if source.failover and not temporary:
        export = "(SNAPSHOT 'export', FAILOVER true)"
    with translating(source.label):
        await check_same_server(connection, server)
        # Read the clock before the slot, because transactions after the consistent point commit
        # later.
        clock = await connection.execute("select pg_catalog.clock_timestamp()::text as now")
        time_row = await clock.fetchone()
        slot = quote_identifier(name)
        command = f"CREATE_REPLICATION_SLOT {slot} {kind}LOGICAL pgoutput {export}"
        cursor = await connection.execute(command.encode())
        row = await cursor.fetchone()
    assert row is not None
    assert time_row is not None
    return ExportedSnapshot(
        connection,
        name,
        row["snapshot_name"],
        Lsn.parse(row["consistent_point"]),
        time_row["now"],
    )


async def _watched(
    creating: "asyncio.Future[ExportedSnapshot]",
    source: SourceMapping,
    server: SourceServer,
    pid: int,
    report: Report,
    passed: Callable[[Lsn], None],
) -> ExportedSnapshot:
    """Wait for the new slot; on cancellation, end the walsender.

    A walsender that waits for a transaction does not notice a disconnected client.
    """
    # A new slot on a standby always waits.
    moment = CHECK_SECONDS / 10 if server.in_recovery else CHECK_SECONDS
    done, _ = await asyncio.wait([creating], timeout=moment)
    if done:
        return creating.result()
    reported = ""
    async with (
        plain_connection(source) as plain,
        RunningTransactions(source, server) as running,
    ):
        await check_same_server_by_query(plain, server)  # the pid is valid only there
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not creating.done():
                    # PostgreSQL finds the consistent point in a record written after the wait.
                    flush_lsn = await read_flush_lsn(plain)
                    awaited = await read_blockers(plain, pid)
                    if awaited and not server.in_recovery:
                        passed(flush_lsn)
                    awaited = awaited or await running.trigger(plain)
                    if awaited and awaited != reported:
                        reported = awaited
                        await report(awaited)
                    await asyncio.wait([creating], timeout=CHECK_SECONDS)
        except BaseException as exc:
            await asyncio.shield(_terminate(plain, pid))
            if not isinstance(exc, TimeoutError):
                raise
            raise SlotWaitError(
                f'source "{source.label}": the creation of a slot has waited too long for '
                f"{reported or 'the server'}",
                hint=_wait_hint(source, server),
            ) from None
    return creating.result()


def _wait_hint(source: SourceMapping, server: SourceServer) -> Remedy:
    if not server.in_recovery:
        return Remedy.of("end that transaction, or wait until it ends")
    # The creation ends at a snapshot record that follows the start of the slot, so the primary must
    # write the record during the wait.
    log_snapshot = primary_hint(source, LOG_SNAPSHOT_SQL)
    return Remedy.of("while the creation waits, ", log_snapshot)


async def _terminate(plain: Connection, pid: int) -> None:
    with contextlib.suppress(psycopg.Error):
        await plain.execute("select pg_catalog.pg_terminate_backend(%s)", (pid,))
