"""The amount of WAL that a source retains for streamer."""

from dataclasses import dataclass
from typing import Final

from streamer.mapping.rules import SourceMapping
from streamer.source.connection import Connection, fetch_all
from streamer.source.slot_and_publications.slot import sync_slot_prefix
from streamer.source.wal_end import FLUSH_LSN_SQL
from streamer.util.lsn import Lsn

_SQL: Final = f"""
select e.lsn::text as end_lsn, s.restart_lsn::text as restart_lsn,
       s.confirmed_flush_lsn::text as confirmed_flush_lsn, s.active,
       (select min(t.restart_lsn)::text from pg_catalog.pg_replication_slots t
        where t.temporary and pg_catalog.strpos(t.slot_name, %s) = 1)
       as sync_restart_lsn,
       pg_catalog.pg_size_bytes(nullif(
           pg_catalog.current_setting('max_slot_wal_keep_size', true), '-1')) as keep_size_bytes
from pg_catalog.pg_replication_slots s,
     (select {FLUSH_LSN_SQL} as lsn) e
where s.slot_name = %s and s.plugin = 'pgoutput' and s.database = pg_catalog.current_database()
"""
"""The conditions exclude a slot of a different program or database with the same name."""


@dataclass(frozen=True, slots=True)
class RetainedWal:
    """The retained WAL. ``unconfirmed_bytes``: the part after the acknowledged LSN; the source
    keeps the rest for open transactions and for copies. ``keep_size_bytes``:
    max_slot_wal_keep_size, the limit of the WAL for a slot; None without that limit.
    """

    retained_bytes: int
    unconfirmed_bytes: int
    is_active: bool
    keep_size_bytes: int | None = None


async def read_retained(connection: Connection, source: SourceMapping) -> RetainedWal | None:
    """Measure the retained WAL; None without a slot, or if the slot is invalidated."""
    rows = await fetch_all(connection, _SQL, sync_slot_prefix(source.slot), source.slot)
    if not rows or rows[0]["restart_lsn"] is None or rows[0]["confirmed_flush_lsn"] is None:
        return None
    (row,) = rows
    end_lsn = Lsn.parse(row["end_lsn"])
    positions = [Lsn.parse(row[name]) for name in ("restart_lsn", "sync_restart_lsn") if row[name]]
    return RetainedWal(
        max(0, end_lsn - min(positions)),
        max(0, end_lsn - Lsn.parse(row["confirmed_flush_lsn"])),
        row["active"],
        row["keep_size_bytes"],
    )
