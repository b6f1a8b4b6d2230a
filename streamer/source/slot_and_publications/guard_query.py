"""The periodic check of a source's guard: slot, end of WAL, and a digest of the catalogs.

A process with 200 sources checks 100 times a second, so each check is a single statement.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.source.connection import Connection, fetch_one
from streamer.source.guarded_identities import IDENTITIES_SQL
from streamer.source.server.source_clock import CLOCK_SQL, SourceClock
from streamer.source.slot_and_publications.publication import publications_sql
from streamer.source.slot_and_publications.slot import Slot
from streamer.source.wal_end import FLUSH_LSN_SQL
from streamer.util.lsn import Lsn

_GUARD_SQL: Final = """
select pg_catalog.md5(
    coalesce((select pg_catalog.string_agg(i::text, ';' order by i.root, i.relid)
                from ({identities}) i), '') || '/' ||
    coalesce((select pg_catalog.string_agg(p::text, ';' order by p.mark)
                from ({publications}) p), '')) as digest,
    ({flush_lsn})::text as flush_lsn,
    {clock} as clock_seconds,
    (select pg_catalog.to_jsonb(s) from pg_catalog.pg_replication_slots s
      where s.slot_name = %s) as slot
"""


@dataclass(frozen=True, slots=True)
class GuardFacts:
    """The result of a guard's check.

    ``digest`` changes with the identities, partitions and files of the tables, and with streamer's
    publications.
    ``flush_lsn``: the end of the WAL that the source flushed. ``clock_seconds``: the source's
    clock, in unix time.
    """

    slot: Slot | None
    flush_lsn: Lsn
    digest: str
    clock_seconds: float


async def read_guard_facts(
    connection: Connection, source: SourceMapping, names: Iterable[RelationName], version: int
) -> GuardFacts:
    """Return the facts about *source* and its tables *names*, in one round trip."""
    listed = list(names)
    sql = _GUARD_SQL.format(
        identities=IDENTITIES_SQL,
        publications=publications_sql(version),
        flush_lsn=FLUSH_LSN_SQL,
        clock=CLOCK_SQL,
    )
    row = await fetch_one(
        connection,
        sql,
        [name.namespace for name in listed],
        [name.name for name in listed],
        [source.publication, source.publication_inserts],
        source.slot,
    )
    slot = None if row["slot"] is None else Slot.from_view(row["slot"])
    return GuardFacts(slot, Lsn.parse(row["flush_lsn"]), str(row["digest"]), row["clock_seconds"])


async def measure(connection: Connection, clock: SourceClock) -> None:
    """Measure the clock of the server of *connection*."""
    began = time.monotonic()
    row = await fetch_one(connection, f"select {CLOCK_SQL} as seconds")
    clock.measured(row["seconds"], began, time.monotonic())
