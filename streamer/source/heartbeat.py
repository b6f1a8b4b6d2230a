"""Committing a heartbeat: an empty transaction with a logical message that other readers ignore."""

from typing import Final

from streamer.lsn import Lsn
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, fetch_one, translating

PREFIX: Final = "streamer"

_MAY_SQL: Final = """
select pg_catalog.has_function_privilege(oid, 'execute') as may_emit
from pg_catalog.pg_proc
where pronamespace = 'pg_catalog'::pg_catalog.regnamespace and proname = 'pg_logical_emit_message'
  and proargtypes[2] = 'text'::pg_catalog.regtype
"""
_STARTED_SQL: Final = """
select extract(epoch from pg_catalog.pg_postmaster_start_time())::text as started
"""
# One transaction. The source flushes it, because the stream would otherwise get it only from the
# WAL writer. It does not wait for a synchronous standby, because the heartbeat does not measure
# that.
_EMIT_SQL: Final = """
select pg_catalog.set_config('synchronous_commit', 'local', true),
       pg_catalog.pg_logical_emit_message(true, %s::text, ''::text)::text as lsn
"""


async def heartbeat_obstacle(plain: Connection, server: SourceServer) -> str | None:
    """Return the obstacle to heartbeats at the source, or None."""
    if server.in_recovery:
        return "the source is a standby"
    if not (await fetch_one(plain, _MAY_SQL))["may_emit"]:
        return "the role may not execute pg_logical_emit_message"
    return None


async def read_server_start(plain: Connection, label: str) -> str:
    """Return when the server started, in microseconds: no two servers share it, clones neither.

    Raises SourceError.
    """
    with translating(label):
        return str((await fetch_one(plain, _STARTED_SQL))["started"])


async def emit_heartbeat(plain: Connection, label: str) -> Lsn:
    """Commit a heartbeat; return where its message lies in the WAL. Raises SourceError."""
    with translating(label):
        row = await fetch_one(plain, _EMIT_SQL, PREFIX)
    return Lsn.parse(row["lsn"])
