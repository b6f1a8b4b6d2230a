"""A script of ``streamer execute`` at the source: the transaction that carries or runs it.

A lock on the script's id keeps two commands apart. The command stores the number of the transaction
before it commits, so a later command reads the outcome from the source. PostgreSQL documentation,
"Transaction ID and Snapshot Information Functions".
"""

import json
from dataclasses import dataclass
from typing import Final

import psycopg

from streamer.decode.pgoutput import EXECUTE_PREFIX
from streamer.errors.error_classes import ScriptError, SourceError, StreamerError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_literal
from streamer.postgres.script_sql import AFTER_SCRIPT_SQL, line_of, script_sql
from streamer.source.connection import Connection, connection, fetch_all, fetch_one, translate
from streamer.source.reached_server import IDENTITY_SQL, identity_of

_LOCK_SQL: Final = """
select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%s, 14))
"""
_EMIT_SQL: Final = "select pg_catalog.pg_logical_emit_message(true, %s::text, %s::text)"
# txid_status rejects a number that the source has not assigned yet.
_SEEN_SQL: Final = """
select xid from pg_catalog.unnest(%s::int8[]) as xid
where case when pg_catalog.txid_visible_in_snapshot(xid, pg_catalog.txid_current_snapshot())
      then pg_catalog.txid_status(xid) is distinct from 'aborted' end
"""
# The server counts changes by leaf of a partitioned table, but the stream names the root.
_CHANGED_SQL: Final = """
select distinct n.nspname as namespace, c.relname as name
from pg_catalog.pg_stat_xact_user_tables s
join pg_catalog.pg_class c
  on c.oid = coalesce(pg_catalog.pg_partition_root(s.relid), s.relid)
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where s.n_tup_ins + s.n_tup_upd + s.n_tup_del > 0
order by 1, 2
"""


ScriptOrigin = tuple[str | None, int | None]
"""System identifier and timeline of the server that ran a script's transaction."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """The contents of a script's transaction. ``emits``: the target must run the script, too."""

    script_id: str
    script: str | None
    emits: bool


async def begin_script(plain: Connection, script_id: str) -> None:
    """Open the transaction of a script, and wait until an earlier transaction of its id ends."""
    await plain.execute("begin")
    await fetch_all(plain, _LOCK_SQL, f"streamer execute {script_id}")


async def current_xid(plain: Connection) -> int:
    """Return the number of the present transaction, in 64 bits."""
    return int((await fetch_one(plain, "select pg_catalog.txid_current() as xid"))["xid"])


async def read_origin(plain: Connection) -> ScriptOrigin:
    """Return the server's system identifier and timeline; both are None if the role may not read
    them.
    """
    try:
        row = await fetch_one(plain, IDENTITY_SQL)
    except psycopg.errors.InsufficientPrivilege:
        return None, None
    return identity_of(row["systemid"], row["segment"], 0, ("", 0, 0))[:2]


async def has_committed(plain: Connection, xid: int) -> bool:
    """Return whether the source has committed transaction *xid*, which is no longer running.

    Raises ScriptError if the source has forgotten the transaction.
    """
    row = await fetch_one(plain, "select pg_catalog.txid_status(%s::int8) as status", xid)
    if row["status"] is None:
        raise unknown_outcome(xid)
    return bool(row["status"] == "committed")


def unknown_outcome(xid: int) -> ScriptError:
    """Return the error for a script whose transaction *xid* the source does not know. Pure."""
    return ScriptError(
        f"the source no longer knows whether transaction {xid} of this script has committed",
        hint="check whether the script took effect there, then use a new --id",
    )


async def seen_by(snapshot: str, source: SourceMapping, xids: list[int]) -> set[int]:
    """Return the transactions among *xids* that committed before an exported *snapshot*.

    A slot's stream contains exactly the transactions that its snapshot does not see. The result
    includes a transaction whose outcome the source has forgotten.
    """
    async with connection(source) as plain:
        await plain.execute("begin isolation level repeatable read read only")
        await plain.execute(f"set transaction snapshot {quote_literal(snapshot)}".encode())
        rows = await fetch_all(plain, _SEEN_SQL, xids)
    return {int(row["xid"]) for row in rows}


async def run_script(plain: Connection, label: str, run: ScriptRun) -> list[RelationName]:
    """Run and announce a script in the open transaction; return the tables whose rows it changed.

    The message comes first, so that the target runs the script before it applies changes that the
    script makes at the source. Raises ScriptError, SourceError.
    """
    if run.emits:
        await fetch_all(plain, _EMIT_SQL, EXECUTE_PREFIX, json.dumps({"id": run.script_id}))
    if run.script is None:
        return []
    try:
        await plain.execute(script_sql(run.script).encode())
        await plain.execute(f"{AFTER_SCRIPT_SQL}; set local synchronous_commit to local")
    except psycopg.Error as exc:
        raise _failed(exc, label, run) from exc
    rows = await fetch_all(plain, _CHANGED_SQL)
    return [RelationName(row["namespace"], row["name"]) for row in rows]


def _failed(exc: psycopg.Error, label: str, run: ScriptRun) -> StreamerError:
    error = translate(exc, label)
    if not isinstance(error, SourceError) or exc.sqlstate is None:
        return error
    return ScriptError(
        f'script "{run.script_id}" failed{place(run.script, exc.diag)}, and the source rolled '
        f"the script back: {error.message}",
        hint="correct the script and run the command again with the same id",
    )


def place(script: str | None, diagnosis: object) -> str:
    """Return, as text, the line of a script that an error of the server concerns. Pure."""
    position = getattr(diagnosis, "internal_position", None)
    if script is None or position is None or getattr(diagnosis, "internal_query", "") != script:
        return ""
    return f" in line {line_of(script, int(position))}"
