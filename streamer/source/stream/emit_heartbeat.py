"""Commits a heartbeat: a transaction that contains only a logical message of streamer."""

from typing import Final

from streamer.source.connection import Connection, fetch_one, is_standby, translating
from streamer.source.wal_end import COMMIT_SQL
from streamer.util.lsn import Lsn

_MAY_SQL: Final = """
select pg_catalog.has_function_privilege(oid, 'execute') as may_emit
from pg_catalog.pg_proc
where pronamespace = 'pg_catalog'::pg_catalog.regnamespace and proname = 'pg_logical_emit_message'
  and proargtypes[2] = 'text'::pg_catalog.regtype
"""


async def heartbeat_obstacle(plain: Connection) -> str | None:
    """Return the obstacle to heartbeats over *plain*, or None."""
    if is_standby(plain):
        return "the source is a standby, and its url does not list the primary"
    if not (await fetch_one(plain, _MAY_SQL))["may_emit"]:
        return "the role may not execute pg_logical_emit_message"
    return None


async def emit_heartbeat(plain: Connection, label: str) -> Lsn:
    """Commit a heartbeat; return the position of the message in the WAL. Raises SourceError."""
    with translating(label):
        row = await fetch_one(plain, COMMIT_SQL)
    return Lsn.parse(row["lsn"])
