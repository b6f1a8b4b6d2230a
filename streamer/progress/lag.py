"""Lagging tables in the bookkeeping: start of the lag, visible position, and the sessions at the
target that cause it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from streamer.error_reports import TableWait
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.requests import CHANNEL, WAITING, WAITING_FOR_TABLES
from streamer.remedies import Remedy, at_target

_BLOCKERS_SQL: Final = """
select w.pid as waiter, pg_catalog.string_agg(distinct
         case when b.pid = 0 then 'a prepared transaction (pg_prepared_xacts)' else
           pg_catalog.format(
             'pid %s (role "%s", application "%s", query %s s old, transaction %s s old)',
             b.pid, coalesce(a.usename, '?'), coalesce(a.application_name, ''),
             coalesce(pg_catalog.floor(extract(epoch from
               pg_catalog.clock_timestamp() - a.query_start))::text, '?'),
             coalesce(pg_catalog.floor(extract(epoch from
               pg_catalog.clock_timestamp() - a.xact_start))::text, '?')) end, ', ') as sessions,
       pg_catalog.array_agg(distinct b.pid) filter (where b.pid <> 0) as pids
from pg_catalog.unnest($1::int4[]) w (pid)
cross join lateral pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) b (pid)
left join pg_catalog.pg_stat_activity a on a.pid = b.pid
group by w.pid
"""


@dataclass(frozen=True, slots=True)
class Blockers:
    """Sessions at the target that hold a lock. ``pids``: without prepared transactions."""

    sessions: str
    pids: tuple[int, ...] = ()

    def wait_for(self, target: object) -> TableWait:
        """Return the wait for their locks on the table *target*."""
        sql = at_target(*(f"select pg_terminate_backend({pid})" for pid in self.pids))
        remedy = Remedy.of("let it end, or run at the target: ", sql) if self.pids else None
        return TableWait(f'a lock on target table "{target}": {self.sessions}', remedy)


async def read_blockers(bookkeeping: Bookkeeping, pids: Collection[int]) -> dict[int, Blockers]:
    """Return the sessions at the target that backends of ours wait for, by our pid."""
    rows = await bookkeeping.fetch(_BLOCKERS_SQL, list(pids))
    return {row["waiter"]: Blockers(row["sessions"], tuple(row["pids"] or ())) for row in rows}


async def ask_for_positions(bookkeeping: Bookkeeping, *, of_tables: bool) -> None:
    """Ask the process that streams to store its positions as soon as they move."""
    payload = WAITING_FOR_TABLES if of_tables else WAITING
    await bookkeeping.execute(f"notify {CHANNEL}, '{payload}'")
