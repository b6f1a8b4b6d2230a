"""Replication slots: creating, inspecting and dropping them, and the snapshot that a new one
exports.

PostgreSQL documentation, "Streaming Replication Protocol", CREATE_REPLICATION_SLOT; view
pg_replication_slots.
"""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import psycopg

from streamer.errors import (
    SlotInUseError,
    SlotInvalidatedError,
    SlotMissingError,
    SourceDivergedError,
)
from streamer.lsn import Lsn
from streamer.route.mapping import SourceMapping
from streamer.source.connection import Connection, connect, fetch_all, translating
from streamer.sql import quote_identifier, quote_literal


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot as the source shows it. Lsns are None where the slot has none."""

    name: str
    plugin: str | None
    database: str | None
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    invalidation: str | None

    @classmethod
    def from_view(cls, row: dict[str, Any]) -> Self:
        """Read a row of pg_replication_slots of whichever version, as JSON."""
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
        )

    def is_foreign(self, database: str) -> bool:
        """Whether it cannot be one of ours, whatever it is called."""
        return self.plugin != "pgoutput" or self.database != database


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


def check_slot(slot: Slot | None, name: str, database: str) -> Lsn:
    """Return where streaming from *slot* resumes; refuse a slot that lost something.

    Raises SlotMissingError, SlotInvalidatedError, SourceDivergedError.
    """
    if slot is None:
        raise SlotMissingError(f'replication slot "{name}" is gone')
    if slot.invalidation is not None:
        raise SlotInvalidatedError(
            f'replication slot "{name}" was invalidated: {slot.invalidation}'
        )
    if slot.is_foreign(database):
        raise SourceDivergedError(
            f'replication slot "{name}" belongs to plugin "{slot.plugin}" and database '
            f'"{slot.database}"',
            hint="give this `database` of the configuration another name or, if nobody needs that "
            f"slot, run there: {drop_slot_sql(name)}",
        )
    if slot.confirmed_flush_lsn is None or slot.restart_lsn is None:
        raise SlotInvalidatedError(f'replication slot "{name}" has no position')
    return slot.confirmed_flush_lsn


DROP_SECONDS: Final = 10.0


def drop_slot_sql(name: str) -> str:
    """Return the statement that drops a slot, and does nothing if it is gone. Pure."""
    return (
        "select pg_catalog.pg_drop_replication_slot(slot_name) "
        f"from pg_catalog.pg_replication_slots where slot_name = {quote_literal(name)}"
    )


async def drop_slot(connection: Connection, name: str) -> None:
    """Drop a slot; one that is already gone is fine, because a crashed run may have left none.

    A slot whose walsender is still ending is waited for a moment. Raises SlotInUseError.
    """
    deadline = asyncio.get_running_loop().time() + DROP_SECONDS
    while True:
        try:
            await connection.execute(drop_slot_sql(name).encode())
        except psycopg.errors.ObjectInUse:
            if asyncio.get_running_loop().time() > deadline:
                raise SlotInUseError(f'replication slot "{name}" is in use') from None
            await asyncio.sleep(0.2)
        except psycopg.errors.UndefinedObject:
            return
        else:
            return


class ExportedSnapshot:
    """A snapshot of the source that other sessions can import, for as long as this object is open.

    It lives until the next command of the connection that exported it, so this object owns that
    connection and does nothing with it.
    """

    def __init__(
        self, connection: Connection, slot: str, snapshot_name: str, consistent_point: Lsn
    ) -> None:
        self._connection = connection
        self.slot = slot
        self.snapshot_name = snapshot_name
        self.consistent_point = consistent_point

    @property
    def is_alive(self) -> bool:
        """Whether the connection still stands, and with it the snapshot."""
        try:
            self._connection.pgconn.consume_input()  # nothing comes but the end
        except psycopg.OperationalError:
            return False
        return not self._connection.closed and not self._connection.broken

    async def close(self) -> None:
        """Give the snapshot up; a temporary slot goes with it."""
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
    source: SourceMapping, name: str, version: int, *, temporary: bool = False
) -> ExportedSnapshot:
    """Create a logical slot and export the snapshot of its consistent point.

    Waits for every transaction that runs at the source now, so that nothing done before the
    consistent point is missed by the snapshot and nothing after it by the slot.
    """
    connection = await connect(source, replication=True)
    try:
        kind = "TEMPORARY " if temporary else ""
        export = "(SNAPSHOT 'export')" if version >= 15_00_00 else "EXPORT_SNAPSHOT"
        with translating(source.label):
            slot = quote_identifier(name)
            command = f"CREATE_REPLICATION_SLOT {slot} {kind}LOGICAL pgoutput {export}"
            cursor = await connection.execute(command.encode())
            row = await cursor.fetchone()
        assert row is not None
        return ExportedSnapshot(
            connection, name, row["snapshot_name"], Lsn.parse(row["consistent_point"])
        )
    except BaseException:
        await connection.close()
        raise
