"""Stopping and allowing writes at a source, for a cut-over.

``default_transaction_read_only`` of the database makes every later session of a program read-only
(PostgreSQL documentation, "Client Connection Defaults"). Sessions that are there are ended, apart
from those of streamer, which pin the setting for themselves. A program that sets the opposite for
itself can still write; the stream then shows its changes behind the marker.
"""

from dataclasses import dataclass
from typing import Final

from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.source.connection import Connection, fetch_all, fetch_one

_FACTS_SQL: Final = """
select pg_catalog.current_database() as database, current_user as role,
       pg_catalog.pg_has_role(d.datdba, 'member') as may_alter,
       pg_catalog.pg_has_role('pg_signal_backend', 'member') or r.rolsuper as may_end,
       (select pg_catalog.count(*) from pg_catalog.pg_prepared_xacts p
        where p.database = pg_catalog.current_database()) as prepared,
       (select o.option from pg_catalog.pg_db_role_setting s,
               unnest(s.setconfig) o (option)
        where s.setdatabase = d.oid and s.setrole = 0
          and o.option like 'default_transaction_read_only=%') as setting,
       array(select pg_catalog.quote_ident(g.rolname)
             from pg_catalog.pg_db_role_setting s
             join pg_catalog.pg_roles g on g.oid = s.setrole, unnest(s.setconfig) o (option)
             where s.setdatabase in (0, d.oid)
               and o.option ilike 'default_transaction_read_only=%') as roles
from pg_catalog.pg_database d, pg_catalog.pg_roles r
where d.datname = pg_catalog.current_database() and r.rolname = current_user
"""
_OTHERS: Final = """
from pg_catalog.pg_stat_activity a
where a.datname = pg_catalog.current_database() and a.backend_type = 'client backend'
  and a.pid <> pg_catalog.pg_backend_pid()
  and not (a.usename = current_user
           and (a.application_name like 'streamer%'
                or a.application_name = pg_catalog.current_setting('application_name')))
"""
_END_SQL: Final = f"select pg_catalog.pg_terminate_backend(a.pid) {_OTHERS}"
_SESSIONS_SQL: Final = f"""
select a.usename as role, a.pid, a.backend_xid is not null as writes {_OTHERS}
"""


@dataclass(frozen=True, slots=True)
class WriteFacts:
    """What decides whether streamer can stop the writes of a source.

    ``setting``: the database's own value of ``default_transaction_read_only``, if it has one.
    ``roles``: roles with a value of their own, which goes before that of the database.
    """

    database: str
    role: str
    may_alter: bool
    may_end: bool
    prepared: int
    setting: str | None
    roles: tuple[str, ...]

    def obstacles(self, *, stops: bool) -> list[str]:
        """Return the obstacles to stopping writes; *stops*: streamer is to do it. Pure."""
        found = []
        if self.prepared:
            found.append(
                f"{self.prepared} prepared transactions would write when they are committed; "
                "commit them or roll them back: select * from pg_prepared_xacts"
            )
        if not stops:
            return found
        if not self.may_alter:
            found.append(
                f"role {quote_identifier(self.role)} does not own the database; stop the programs "
                "yourself and use --stop-writes operator"
            )
        if not self.may_end:
            grant = f"grant pg_signal_backend to {quote_identifier(self.role)}"
            found.append(f"the role may not end the programs' sessions; run at the source: {grant}")
        found += [
            f"role {role} has a default_transaction_read_only of its own, which goes before that "
            "of the database; reset it"
            for role in self.roles
        ]
        return found


async def read_write_facts(plain: Connection) -> WriteFacts:
    """Return the facts for `obstacles`. Raises psycopg.Error."""
    row = await fetch_one(plain, _FACTS_SQL)
    setting = row["setting"]
    row["setting"] = None if setting is None else setting.partition("=")[2]
    row["roles"] = tuple(row["roles"])
    return WriteFacts(**row)


def stop_sql(database: str) -> str:
    """Return the SQL that makes later sessions of *database* read-only. Pure."""
    return f"alter database {quote_identifier(database)} set default_transaction_read_only = on"


def allow_sql(database: str, setting: str | None) -> str:
    """Return the SQL that takes `stop_sql` back; *setting*: the value before. Pure."""
    name = quote_identifier(database)
    if setting is None:
        return f"alter database {name} reset default_transaction_read_only"
    return f"alter database {name} set default_transaction_read_only = {quote_literal(setting)}"


async def end_sessions(plain: Connection) -> None:
    """End the sessions of all programs but streamer. Raises psycopg.Error."""
    await fetch_all(plain, _END_SQL)


async def read_writers(plain: Connection, *, every_session: bool) -> list[str]:
    """Return the sessions of programs that are in a transaction that writes.

    *every_session*: all sessions. One that began before its database was read-only may write.
    """
    return [
        f"{row['role']} (pid {row['pid']})"
        for row in await fetch_all(plain, _SESSIONS_SQL)
        if row["writes"] or every_session
    ]
