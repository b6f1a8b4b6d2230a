"""Which server a source's connection reached, and where its history forked from a known one.

After a failover the source has a new timeline. It lacks the old primary's commits behind the fork
point, and the target lacks the new primary's commits since then. Positions up to the fork point
mean the same on both.

PostgreSQL documentation, "Streaming Replication Protocol", TIMELINE_HISTORY.
"""

from dataclasses import dataclass

import psycopg

from streamer.errors import SourceConnectionError
from streamer.lsn import EVERYTHING, Lsn
from streamer.source.catalog import SourceServer
from streamer.source.connection import Connection, fetch_one
from streamer.source.place import PLACE_SQL, STARTED_SQL, Place, find_difference, place_of


@dataclass(frozen=True, slots=True)
class Branch:
    """A timeline, and where each of its ancestors ended, the oldest first.

    Servers number timelines by themselves. So two standbys that are promoted independently have the
    same number, and only the ends tell their branches apart.
    """

    timeline: int
    ends: tuple[tuple[int, Lsn], ...] = ()

    @classmethod
    def parse(cls, timeline: int, history: str) -> "Branch":
        """Read the text of a timeline history file, or the `text` of a branch. Pure."""
        lines = (line.partition("#")[0].split(None, 2) for line in history.splitlines())
        ends = [(int(f[0]), Lsn.parse(f[1])) for f in lines if len(f) >= 2 and f[0].isdigit()]
        return cls(timeline, tuple(ends))

    @property
    def text(self) -> str:
        """The ends, one in a line, as the bookkeeping stores them."""
        return "\n".join(f"{timeline} {lsn}" for timeline, lsn in self.ends)

    @property
    def is_known(self) -> bool:
        """Whether the ends of the ancestors could be read; the first timeline has none."""
        return self.timeline == 1 or bool(self.ends)

    def end_of(self, timeline: int) -> Lsn | None:
        """Return where an ancestor ended; None if *timeline* is none."""
        return dict(self.ends).get(timeline)


def common_end(known: Branch, now: Branch) -> Lsn | None:
    """Return where two branches forked; `EVERYTHING` if they are one, None if nothing is common.

    Pure.
    """
    if not (known.is_known and now.is_known):  # the numbers have to do
        return EVERYTHING if known.timeline == now.timeline else now.end_of(known.timeline)
    fork_lsn = None
    its, others = ([*b.ends, (b.timeline, EVERYTHING)] for b in (known, now))
    for (timeline, end_lsn), (other, other_end_lsn) in zip(its, others, strict=False):
        if timeline != other:
            break
        fork_lsn = min(end_lsn, other_end_lsn)
        if end_lsn != other_end_lsn:
            break
    return fork_lsn


async def read_branch(connection: Connection, server: SourceServer) -> Branch:
    """Return the branch of the server's timeline; *connection* is a replication connection.

    Its ends are not known if the server cannot send the history file.
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
    """Return the timeline that the server writes, or a standby replays; *connection* is a
    replication connection.
    """
    return int((await fetch_one(connection, "IDENTIFY_SYSTEM"))["timeline"])


async def check_same_server(connection: Connection, server: SourceServer) -> None:
    """Refuse a replication connection that reached another server than *server*.

    A url with several hosts may lead to another one during a failover. Raises
    SourceConnectionError.
    """
    row = await fetch_one(connection, "IDENTIFY_SYSTEM")
    started = server.started and await _read_started(connection)
    _require_same(server.place, (str(row["systemid"]), int(row["timeline"]), started))


async def check_same_server_plainly(connection: Connection, server: SourceServer) -> None:
    """The same for an ordinary connection. A role that may not read system identifier and timeline
    compares only the start of the server.
    """
    try:
        row = await fetch_one(connection, PLACE_SQL)
    except psycopg.errors.InsufficientPrivilege:
        expected = server.place
        started = server.started and await _read_started(connection)
        _require_same(expected, (expected[0], expected[1], started))
        return
    reached = place_of(row["systemid"], row["segment"], row["started"], server.place)
    _require_same(server.place, reached)


async def _read_started(connection: Connection) -> int:
    return int((await fetch_one(connection, f"select {STARTED_SQL} as started"))["started"])


def _require_same(expected: Place, reached: Place) -> None:
    if difference := find_difference(expected, reached):
        raise SourceConnectionError(difference)
