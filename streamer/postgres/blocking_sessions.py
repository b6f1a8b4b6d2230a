"""The sessions that block a session, with a query and texts for both servers.

The SQL has no percent sign, so that both drivers accept it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from streamer.errors.error_reports import TableWait
from streamer.errors.remedies import BlockingSession, Remedy, end_blocking_sessions

_AGE: Final = """pg_catalog.floor(extract(epoch from
    pg_catalog.clock_timestamp() - {}))::text"""
BACKENDS: Final = "select pid, pid as subject from pg_catalog.unnest({}::int4[]) pid"
"""The waiters of `blockers_sql` by their pids; the parameter is an array."""

END_OWN_SQL: Final = """
select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
where pid = $1 and usename = current_user and application_name = pg_catalog.left($2, 63)
"""
"""Ends a session of streamer by its pid, unless the pid now belongs to a different session."""


def session_sql(pid: str = "a.pid") -> str:
    """Return the expression that names session a of pg_stat_activity, or *pid* if there is none.
    Pure.

    From a role without pg_read_all_stats, the server hides states and ages of foreign sessions.
    """
    return f"""pg_catalog.concat('pid ', {pid}, case when a.pid is not null then pg_catalog.concat(
' (', coalesce('role "' || a.usename || '"'
  || coalesce(', application "' || nullif(a.application_name, '') || '"', ''), a.backend_type),
', ' || a.state || ' for ' || {_AGE.format("a.state_change")} || ' s',
', transaction ' || {_AGE.format("a.xact_start")} || ' s old',
case when a.backend_type is null
  then ', state and age hidden: an administrator can run: grant pg_read_all_stats to '
    || pg_catalog.quote_ident(current_user) end,
')') end,
case a.wait_event when 'SyncRep'
  then ', whose commit waits for synchronous_standby_names' end)"""


_IS_OURS: Final = """coalesce(a.usename = current_user
    and pg_catalog.starts_with(a.application_name, 'streamer '), false)"""
"""Whether session a is of streamer: such a session ends its work by itself."""
MAY_END: Final = """(
    select me.rolsuper or coalesce(not r.rolsuper and (pg_catalog.pg_has_role(r.oid, 'usage')
                                   or pg_catalog.pg_has_role('pg_signal_backend', 'usage')), false)
    from pg_catalog.pg_roles me left join pg_catalog.pg_roles r on r.oid = a.usesysid
    where me.rolname = current_user)"""
"""Whether the role may end session a; only a superuser may end a session without a role."""
_TRANSACTION: Final = """(select pg_catalog.min(l.virtualtransaction)
    from pg_catalog.pg_locks l where l.pid = b.pid)"""
"""The virtual transaction of pid b, which every role may read, unlike the start of the session."""

END_BLOCKING_SQL: Final = f"""
select pg_catalog.pg_terminate_backend(a.pid) as is_ended from pg_catalog.pg_stat_activity a
where a.pid = $1::int8 and not {_IS_OURS} and (exists (
    select from pg_catalog.pg_locks l
    where l.pid = a.pid and l.virtualtransaction = any($2::text[]))
  or exists (
    select from pg_catalog.pg_stat_activity w
    where w.datname = pg_catalog.current_database() and w.usename = current_user
      and pg_catalog.starts_with(w.application_name, 'streamer ')
      and a.pid = any(pg_catalog.pg_blocking_pids(w.pid))))
"""  # noqa: S608
"""Ends a session by its pid if the session is still in a transaction that blocked streamer, or
blocks a session of streamer now. Between two attempts, streamer waits for no lock. A request may
name any pid, and a pid may have a new owner.
"""


def blockers_sql(waiters: str) -> str:
    """Return the query for the sessions that block *waiters*. Pure.

    *waiters*: a query for the pids of backends, and for the subjects that these backends serve.
    """
    return f"""
select w.subject, pg_catalog.string_agg(distinct
         case when b.pid = 0 then 'a prepared transaction (pg_prepared_xacts)'
              else {session_sql("b.pid")} end, ', ') as sessions,
       (pg_catalog.jsonb_agg(distinct
          pg_catalog.jsonb_build_array(b.pid, {_TRANSACTION}, {MAY_END}))
        filter (where b.pid <> 0 and not {_IS_OURS}))::text as blocking,
       pg_catalog.bool_and({_IS_OURS}) as are_ours
from ({waiters}) w
cross join lateral pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) b (pid)
left join pg_catalog.pg_stat_activity a on a.pid = b.pid
group by w.subject
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Blockers:
    """Sessions that hold a lock. ``blocking``: the sessions that an operator may end.

    Prepared transactions have no pid, and sessions of streamer (``are_ours``) end by themselves.
    """

    sessions: str
    blocking: tuple[BlockingSession, ...] = ()
    are_ours: bool = False

    def wait_for(self, target: object) -> TableWait:
        """Return the wait for the sessions' locks on the table *target* of the target."""
        remedy = None
        if self.blocking:
            may_end = all(session.may_end for session in self.blocking)
            runs = "run at the target" if may_end else "have an administrator run at the target"
            sql = end_blocking_sessions(self.blocking)
            remedy = Remedy.of(f"{runs}: ", sql, "; or wait until it ends")
        text = f'a lock on target table "{target}": {self.sessions}'
        return TableWait(text, remedy, is_automatic=self.are_ours)


def blockers_of(rows: Iterable[Mapping[str, Any]]) -> dict[int, Blockers]:
    """Return the rows of `blockers_sql` by their subjects. Pure."""
    return {
        row["subject"]: Blockers(
            row["sessions"],
            tuple(BlockingSession(*holder) for holder in json.loads(row["blocking"] or "[]")),
            row["are_ours"],
        )
        for row in rows
    }
