"""Reads from pg_stat_activity why the sessions of streamer at the target wait."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.errors.error_reports import TableWait
from streamer.errors.remedies import Remedy, at_target
from streamer.target.connection import Record, TargetConnection
from streamer.util.quantities import format_latency

WAIT_SECONDS_MIN: Final = 3.0
"""A shorter wait is ordinary."""
SYNC_REP: Final = "SyncRep"
_NAMES: Final = {
    SYNC_REP: "the synchronous standby of the target",
    "Lock": "locks at the target",
    "IO": "reads and writes of the target's files",
    "Client": "the network between streamer and the target",
    "CPU": "the processors of the target",
}
"""The words for the types of wait events."""

_WAITS_SQL: Final = f"""
select case when a.wait_event = '{SYNC_REP}' then a.wait_event
            else coalesce(a.wait_event_type, 'CPU') end as event,
       pg_catalog.count(*)::int4 as sessions,
       pg_catalog.max(extract(epoch from
           pg_catalog.clock_timestamp() - a.query_start))::float8 as seconds,
       pg_catalog.current_setting('synchronous_standby_names') as standbys
from pg_catalog.pg_stat_activity a
where a.datname = pg_catalog.current_database() and a.usename = current_user
  and a.state = 'active' and a.pid <> pg_catalog.pg_backend_pid()
  and (a.application_name like 'streamer worker%' or a.application_name like 'streamer drainer%'
       or a.wait_event = '{SYNC_REP}' and a.application_name like 'streamer %')
group by 1 order by 3 desc
"""


@dataclass(frozen=True, slots=True)
class SessionWaits:
    """Long waits. ``workers``: the reason why workers wait; ``standby``: commits wait for a
    synchronous standby.
    """

    workers: str | None = None
    standby: TableWait | None = None


async def read_waits(session: TargetConnection) -> SessionWaits:
    """Return the waits of at least `WAIT_SECONDS_MIN`."""
    rows = await session.fetch(_WAITS_SQL)
    return _describe(row for row in rows if (row["seconds"] or 0.0) >= WAIT_SECONDS_MIN)


def _describe(rows: Iterable[Record]) -> SessionWaits:
    by_event = {row["event"]: row for row in rows}
    parts = [_NAMES.get(event, f"the target ({event})") for event in by_event]
    standby = None
    if (row := by_event.get(SYNC_REP)) is not None:
        text = (
            "commits at the target wait for a synchronous standby (synchronous_standby_names = "
            f"'{row['standbys']}'), the longest for {format_latency(row['seconds'])}"
        )
        sql = at_target(
            "alter system set synchronous_standby_names = ''", "select pg_reload_conf()"
        )
        words = (
            "have an administrator of the target start the standby; or, to commit without that "
            "standby, have a superuser run at the target: "
        )
        standby = TableWait(text, Remedy.of(words, sql))
    return SessionWaits(", ".join(parts) or None, standby)
