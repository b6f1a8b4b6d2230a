"""Lagging tables in the bookkeeping: start of the lag, visible position, and the sessions at the
target that cause it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from streamer.error_reports import TableWait
from streamer.lsn import Lsn
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


async def set_lags(bookkeeping: Bookkeeping, seconds: dict[int, float | None]) -> None:
    """Store for how long relations, by their id, have lagged."""
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation r"
            " set lag_since = clock_timestamp() - make_interval(secs => l.seconds)"
            " from unnest($1::int8[], $2::float8[]) l (id, seconds) where r.id = l.id",
            list(seconds),
            list(seconds.values()),
        )


async def set_visible(bookkeeping: Bookkeeping, visible: dict[int, Lsn | None]) -> None:
    """Store up to where everything of relations, by their id, is visible."""
    if not visible:
        return
    async with bookkeeping.connection() as connection:
        await connection.execute(
            "update streamer.relation r set visible_lsn = v.lsn::pg_lsn"
            " from unnest($1::int8[], $2::text[]) v (id, lsn)"
            " where r.id = v.id and r.visible_lsn is distinct from v.lsn::pg_lsn",
            list(visible),
            [None if lsn is None else str(lsn) for lsn in visible.values()],
        )


async def read_blockers(bookkeeping: Bookkeeping, pids: Collection[int]) -> dict[int, Blockers]:
    """Return the sessions at the target that backends of ours wait for, by our pid."""
    async with bookkeeping.connection() as connection:
        rows = await connection.fetch(_BLOCKERS_SQL, list(pids))
    return {row["waiter"]: Blockers(row["sessions"], tuple(row["pids"] or ())) for row in rows}


async def ask_for_positions(bookkeeping: Bookkeeping, *, of_tables: bool) -> None:
    """Ask the process that streams to store its positions as soon as they move."""
    payload = WAITING_FOR_TABLES if of_tables else WAITING
    async with bookkeeping.connection() as connection:
        await connection.execute(f"notify {CHANNEL}, '{payload}'")
