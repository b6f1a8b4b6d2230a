"""Stops and allows writes at a source, for a cut-over.

``default_transaction_read_only`` of the database makes every later session of a program read-only
(PostgreSQL documentation, "Client Connection Defaults"). streamer ends all existing sessions except
its own, which set the parameter explicitly. A program that overrides the setting can still write;
the stream then shows changes after the marker.

``pg_stat_activity`` hides the transactions of foreign roles from a role without
``pg_read_all_stats``. Such a session may write, so it counts as a writer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.errors.remedies import Remedy, at_source
from streamer.postgres.blocking_sessions import MAY_END
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.source.connection import Connection, fetch_all, fetch_one

_FACTS_SQL: Final = """
select pg_catalog.current_database() as database, current_user as role,
       pg_catalog.pg_has_role(d.datdba, 'usage') as may_alter,
       pg_catalog.pg_has_role('pg_signal_backend', 'usage') as may_end,
       pg_catalog.pg_has_role('pg_read_all_stats', 'usage') as may_see,
       case when not o.rolsuper then o.rolname end as owner,
       (select pg_catalog.count(*) from pg_catalog.pg_prepared_xacts p
        where p.database = pg_catalog.current_database()) as prepared,
       (select o.option from pg_catalog.pg_db_role_setting s,
               unnest(s.setconfig) o (option)
        where s.setdatabase = d.oid and s.setrole = 0
          and o.option like 'default_transaction_read_only=%') as setting,
       array(select pg_catalog.format(
                 'alter role %I%s reset default_transaction_read_only', g.rolname,
                 case when s.setdatabase <> 0
                      then pg_catalog.format(' in database %I', d.datname) end)
             from pg_catalog.pg_db_role_setting s
             join pg_catalog.pg_roles g on g.oid = s.setrole, unnest(s.setconfig) o (option)
             where s.setdatabase in (0, d.oid)
               and o.option ilike 'default_transaction_read_only=%') as role_settings
from pg_catalog.pg_database d
join pg_catalog.pg_roles o on o.oid = d.datdba
where d.datname = pg_catalog.current_database()
"""
# A worker without a role, such as autovacuum, runs no statements of programs.
_OTHERS: Final = """
from pg_catalog.pg_stat_activity a
join pg_catalog.pg_roles r on r.oid = a.usesysid
where a.datname = pg_catalog.current_database() and a.pid <> pg_catalog.pg_backend_pid()
  and not (a.usename = current_user
           and (a.application_name like 'streamer%'
                or a.application_name = pg_catalog.current_setting('application_name')))
"""
_END_SQL: Final = f"""
select pg_catalog.pg_terminate_backend(a.pid) {_OTHERS}
  and a.backend_type = 'client backend' and {MAY_END}
"""
_SESSIONS_SQL: Final = f"""
select a.usename as role, a.pid, a.backend_type is null as is_hidden,
       a.backend_xid is not null as writes, r.rolsuper as is_superuser,
       coalesce(a.backend_type = 'client backend' and not {MAY_END}, false) as stays
{_OTHERS} order by a.pid
"""


@dataclass(frozen=True, slots=True)
class ProgramSession:
    """A session of a program at the source.

    ``is_hidden``: the role cannot see whether the session writes. ``stays``: the role may not end
    the session.
    """

    role: str
    pid: int
    is_hidden: bool
    writes: bool
    is_superuser: bool
    stays: bool

    def __str__(self) -> str:
        return f"{quote_identifier(self.role)} (pid {self.pid})"


def _listed(sessions: Iterable[ProgramSession]) -> str:
    return ", ".join(map(str, sessions))


Problem = tuple[str, Remedy]


@dataclass(frozen=True, slots=True)
class WriteFacts:
    """The facts that decide whether streamer can stop the writes of a source.

    ``setting``: the database's value of ``default_transaction_read_only``, if set. ``owner``: the
    owner of the database, unless a superuser. ``role_settings``: statements that reset the values
    of roles, which override the database's value.
    """

    database: str
    role: str
    may_alter: bool
    may_end: bool
    may_see: bool
    owner: str | None
    prepared: int
    setting: str | None
    role_settings: tuple[str, ...]
    sessions: tuple[ProgramSession, ...] = ()

    def obstacles(self, *, stops: bool) -> list[Problem]:
        """Return the obstacles to a stop of writes. *stops*: streamer itself will stop writes.
        Pure.
        """
        problems: list[Problem] = []
        if self.prepared:
            text = f"{self.prepared} prepared transactions would write when they are committed"
            fix = Remedy.of(
                "commit them or roll them back; they are listed at the source by: ",
                at_source("select * from pg_catalog.pg_prepared_xacts"),
            )
            problems.append((text, fix))
        problems += self.of_hidden()
        return problems + self._stopping_problems() if stops else problems

    def of_hidden(self) -> list[Problem]:
        """Return the obstacle of a role that cannot see which sessions write. Pure."""
        if self.may_see:
            return []
        hidden = [session for session in self.sessions if session.is_hidden]
        text = f"role {quote_identifier(self.role)} does not see the transactions of other roles"
        if hidden:
            text += f", now of {_listed(hidden)}"
        return [(text, self._grant("pg_read_all_stats"))]

    def of_superusers(self) -> list[Problem]:
        """Return the sessions that only a superuser can end. Pure."""
        return [
            (
                f"only a superuser can end the session of superuser {session}",
                Remedy.of(
                    "run at the source: ",
                    at_source(f"select pg_catalog.pg_terminate_backend({session.pid})"),
                ),
            )
            for session in self.sessions
            if session.stays and session.is_superuser
        ]

    def _grant(self, granted: str) -> Remedy:
        grant = f"grant {granted} to {quote_identifier(self.role)}"
        return Remedy.of("run at the source: ", at_source(grant))

    def _stopping_problems(self) -> list[Problem]:
        problems: list[Problem] = []
        role, database = quote_identifier(self.role), quote_identifier(self.database)
        if not self.may_alter:
            owns = f"alter database {database} owner to {role}"
            if self.owner is not None:
                owns = f"grant {quote_identifier(self.owner)} to {role}"
            fix = Remedy.of(
                "run at the source: ",
                at_source(owns),
                "; or stop the programs yourself and use --stop-writes operator",
            )
            problems.append((f"role {role} does not own the database", fix))
        if not self.may_end:
            text = f"role {role} may not end the programs' sessions"
            problems.append((text, self._grant("pg_signal_backend")))
        for sql in self.role_settings:
            text = (
                "the default_transaction_read_only of a role takes precedence over the database's"
            )
            problems.append((text, Remedy.of("run at the source: ", at_source(sql))))
        return problems + self.of_superusers()


async def read_write_facts(plain: Connection) -> WriteFacts:
    """Return the facts for `obstacles`. Raises psycopg.Error."""
    row = await fetch_one(plain, _FACTS_SQL)
    setting = row["setting"]
    row["setting"] = None if setting is None else setting.partition("=")[2]
    row["role_settings"] = tuple(row["role_settings"])
    return WriteFacts(**row, sessions=tuple(await _read_sessions(plain)))


def stop_sql(database: str) -> str:
    """Return the SQL that makes later sessions of *database* read-only. Pure."""
    return f"alter database {quote_identifier(database)} set default_transaction_read_only = on"


def allow_sql(database: str, setting: str | None) -> str:
    """Return the SQL that reverts `stop_sql`. *setting*: the former value of
    default_transaction_read_only, None without a value. Pure.
    """
    name = quote_identifier(database)
    if setting is None:
        return f"alter database {name} reset default_transaction_read_only"
    return f"alter database {name} set default_transaction_read_only = {quote_literal(setting)}"


async def end_sessions(plain: Connection) -> None:
    """End all sessions that the role may end, except streamer's. Raises psycopg.Error."""
    await fetch_all(plain, _END_SQL)


async def _read_sessions(plain: Connection) -> list[ProgramSession]:
    return [ProgramSession(**row) for row in await fetch_all(plain, _SESSIONS_SQL)]


async def read_writers(plain: Connection, *, ends: bool) -> list[str]:
    """Return the sessions that write, or that may write unseen by the role.

    *ends*: include each session that the role may not end, because all sessions must end.
    """
    return [
        f"{session}, which the role does not see" if session.is_hidden else str(session)
        for session in await _read_sessions(plain)
        if session.writes or session.is_hidden or (ends and session.stays)
    ]
