"""The server that a source's connection reached, and where its history forked from a known branch.

After a failover the source has a new timeline. The new timeline lacks the old primary's commits
after the fork point, and the target lacks the new primary's commits since then. Positions up to
the fork point mean the same on both timelines.

PostgreSQL documentation, "Streaming Replication Protocol", TIMELINE_HISTORY.
"""

import psycopg

from streamer.errors.error_classes import SourceConnectionError
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, fetch_one
from streamer.source.reached_server import (
    IDENTITY_SQL,
    STARTED_SQL,
    ServerIdentity,
    find_difference,
    identity_of,
)
from streamer.source.timeline_branches import Branch


async def read_branch(connection: Connection, server: SourceServer) -> Branch:
    """Return the branch of the server's timeline; *connection* is a replication connection.

    The ends are unknown if the server cannot send the history file.
    """
    if server.timeline == 1:
        return Branch(1)
    try:
        row = await fetch_one(connection, f"TIMELINE_HISTORY {server.timeline}")
    except psycopg.Error as exc:
        if exc.sqlstate is None or connection.broken:
            raise
        return Branch(server.timeline)
    content = row["content"]
    text = content.decode(errors="replace") if isinstance(content, bytes) else str(content)
    return Branch.parse(server.timeline, text)


async def read_timeline(connection: Connection) -> int:
    """Return the timeline that the server writes, or that a standby replays; *connection* is a
    replication connection.
    """
    return int((await fetch_one(connection, "IDENTIFY_SYSTEM"))["timeline"])


async def check_same_server(connection: Connection, server: SourceServer) -> None:
    """Refuse a replication connection to any server but *server*.

    A url with several hosts may lead to another server during a failover. Raises
    SourceConnectionError.
    """
    row = await fetch_one(connection, "IDENTIFY_SYSTEM")
    started = server.started and await _read_started(connection)
    _require_same(server.identity, (str(row["systemid"]), int(row["timeline"]), started))


async def check_same_server_by_query(connection: Connection, server: SourceServer) -> None:
    """Refuse an ordinary connection to any server but *server*.

    A role that may not read system identifier and timeline compares only the start of the server.
    Raises SourceConnectionError.
    """
    try:
        row = await fetch_one(connection, IDENTITY_SQL)
    except psycopg.errors.InsufficientPrivilege:
        expected = server.identity
        started = server.started and await _read_started(connection)
        _require_same(expected, (expected[0], expected[1], started))
        return
    reached = identity_of(row["systemid"], row["segment"], row["started"], server.identity)
    _require_same(server.identity, reached)


async def _read_started(connection: Connection) -> int:
    return int((await fetch_one(connection, f"select {STARTED_SQL} as started"))["started"])


def _require_same(expected: ServerIdentity, reached: ServerIdentity) -> None:
    if difference := find_difference(expected, reached):
        raise SourceConnectionError(difference)
