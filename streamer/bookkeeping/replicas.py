"""The rows of streamer.replica: processes that share the sources, each alive while it holds the
lock of its row.

The same session holds this lock and the locks of the process's sources. A process that is frozen or
cut off keeps its locks, but its beats stop. Then a second process ends the sessions of the first.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Final

from streamer import __version__
from streamer.bookkeeping.bookkeeping_table import BookkeepingTable, Codec, Executor, fields_of
from streamer.bookkeeping.schema_version import share_schema
from streamer.errors.error_classes import NoReplicaError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import SourceLabel
from streamer.target.connection import TargetConnection, transaction
from streamer.target.fencing_token import LOCK_CLASS, LOCK_SQL, LOCKS_SQL, MEMBER_CLASS, signed

REPLICA_CLASS: Final = zlib.crc32(b"streamer.replica")
STARTING_SECONDS: Final = 10.0
"""The time in which a process locks its share of the sources after the start."""
KNOWN_SECONDS: Final = 600.0
"""The time for which a replica without its lock keeps its row, because it may only have lost its
session.
"""

MAPPING_HINT: Final = (
    "give this replica the configuration of the remaining replicas; or, if its file is newer, send "
    "SIGHUP to the replica"
)
_OTHER_MAPPING: Final = (
    "no replica runs this source: the mapping of {} differs from the mapping of the replicas"
)
_NO_ROOM: Final = "no replica runs this source: each may have reached its --max-sources"
_MORE_ROOM: Final = "start another process with the same configuration, or raise --max-sources"


def _with_locks(sql: str, parameter: str = "$1") -> str:
    """Replace ``LOCKS`` in a statement by the locks of the class in *parameter*."""
    return sql.replace("LOCKS", f"(select * from {LOCKS_SQL} l where l.class = {parameter}::int8)")


_JOIN_SQL: Final = """
insert into streamer.replica (name, backend_pid, address, version)
values ($1, pg_catalog.pg_backend_pid(), $2, $3) returning id
"""
_PRUNE_SQL: Final = _with_locks(
    """
where seen_at < now() - make_interval(secs => $2::float8)
  and not exists (select from LOCKS l
                  where l.id = r.id and l.pid = r.backend_pid)
"""
)
_JOINED_SQL: Final = _with_locks(
    """
left join lateral (select revision, since from streamer.mapping
                   where fingerprint = r.mapping order by revision desc limit 1) m on true
left join LOCKS l on l.id = r.id and l.pid = r.backend_pid
"""
)
_OWNERS_SQL: Final = _with_locks(
    """
select s.database, s.sid, s.holder, l.pid
from streamer.source s left join LOCKS l on l.id = s.id
"""
)
_PROCESSES_SQL: Final = f"""
select distinct coalesce(r.name || ' (' || r.version || ')', s.holder, 'pid ' || l.pid) as process
from {LOCKS_SQL} l
left join streamer.replica r on l.class = $1 and r.id = l.id
left join streamer.source s on l.class = $2 and s.id = l.id
where l.class = $1 or l.class = $2 and not exists (
    select from {LOCKS_SQL} o where o.class = $1 and o.pid = l.pid)
order by 1
"""
_MAPPINGS_SQL: Final = """
select fingerprint from streamer.mapping group by 1 order by pg_catalog.max(revision) desc
"""
_IS_STARTING_SQL: Final = """
select exists (
    select from pg_catalog.pg_stat_activity
     where datname = pg_catalog.current_database() and usename = current_user
       and application_name = 'streamer listener'
       and backend_start > pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $1))
"""
# A replica that has read an older revision must not overwrite a newer revision.
_PROPOSE_SQL: Final = """
insert into streamer.mapping (fingerprint)
select $1 where $2::text is not distinct from
    (select fingerprint from streamer.mapping order by revision desc limit 1)
"""
_END_SQL: Final = _with_locks(
    """
select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity a
where a.usename = current_user and a.pid <> pg_catalog.pg_backend_pid()
  and (a.pid = $1 and a.application_name = pg_catalog.left('streamer lock ' || $3, 63)
       or a.pid in (select l.pid from LOCKS l where l.id = $1))
""",
    "$2",
)


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A row of streamer.replica. ``is_alive``: the replica's session holds the replica's lock."""

    number: Annotated[int, Codec("r.id")]
    name: str
    """Host and pid of the process."""
    backend_pid: int
    version: str
    """The version of streamer that the process runs."""
    address: str | None
    """The address at which the replica serves page and metrics."""
    sources: frozenset[str]
    max_sources: int | None
    is_stopping: bool
    journals: frozenset[str]
    out_of_reach: frozenset[str]
    mapping: str | None
    """The fingerprint of the replica's mapping; None before its first beat."""
    mapping_revision: Annotated[int | None, Codec("m.revision")]
    """The newest revision with this mapping; None if no replica has run this mapping."""
    mapping_since: Annotated[datetime | None, Codec("m.since")]
    """The time of this revision."""
    beat: int
    started_at: datetime
    seen_at: datetime
    is_alive: Annotated[bool, Codec("l.id is not null")]

    def is_near(self, host: str) -> bool:
        """Whether the process runs on *host*."""
        return self.name.rpartition(":")[0] == host


REPLICAS: Final = BookkeepingTable("replica", "r", ReplicaRecord, _JOINED_SQL)


@dataclass(frozen=True, slots=True)
class Owner:
    """The session that holds the lock of a source, if any, and the process that last held the
    lock.
    """

    backend_pid: int | None
    holder: str | None


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """The replicas, and the owners of sources by label, read by one session."""

    replicas: list[ReplicaRecord]
    owners: dict[str, Owner]
    mappings: list[str] = field(default_factory=list)
    """The fingerprints of all mappings that replicas have run, the newest revision first."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The live replicas, and the name of the process that holds the lock of each source.

    ``mapping``: the fingerprint of the newest mapping.
    """

    replicas: list[ReplicaRecord] = field(default_factory=list)
    holders: dict[str, str] = field(default_factory=dict)
    mapping: str | None = None
    is_beginning: bool = False
    """A process has connected to the target, and has not joined yet."""

    def counts(self) -> dict[str, int]:
        """Return the number of sources that each live replica runs, by the replica's name."""
        names = list(self.holders.values())
        return {replica.name: names.count(replica.name) for replica in self.replicas}

    def vacancy(self, label: str) -> ErrorReport | None:
        """Return why no replica runs source *label*; None if a process runs it, or no replica maps
        it.
        """
        takers = self._takers(label)
        if not takers or label in self.holders or self.is_starting(label):
            return None
        if self.mapping is None or any(e.mapping in (None, self.mapping) for e in takers):
            return ErrorReport.of(NoReplicaError(_NO_ROOM, hint=_MORE_ROOM))
        text = _OTHER_MAPPING.format(", ".join(replica.name for replica in takers))
        return ErrorReport.of(NoReplicaError(text, hint=MAPPING_HINT))

    def is_starting(self, label: str) -> bool:
        """Whether a process that just started is about to run source *label*."""
        if label in self.holders:
            return False
        if not self.replicas:
            return self.is_beginning
        ages = [(e.seen_at - e.started_at).total_seconds() for e in self._takers(label)]
        return any(age < STARTING_SECONDS for age in ages)

    def _takers(self, label: str) -> list[ReplicaRecord]:
        return [e for e in self.replicas if label in e.sources and not e.is_stopping]

    @classmethod
    def of(cls, record: FleetRecord) -> "Fleet":
        live = [replica for replica in record.replicas if replica.is_alive]
        holders = {
            label: owner.holder or "another process"
            for label, owner in record.owners.items()
            if owner.backend_pid is not None
        }
        return cls(live, holders, next(iter(record.mappings), None))


@dataclass(frozen=True, slots=True)
class Presence:
    """The report of a replica with each beat."""

    sources: list[str]
    max_sources: int | None
    is_stopping: bool
    journals: list[str]
    out_of_reach: list[str]
    """The sources that the replica could not reach in its last attempt."""
    mapping: str


async def join(session: TargetConnection, name: str, address: str | None) -> int:
    """Register the process of *session*, which gets the lock; return the replica's number.

    Raises TargetError if this program is too old for the bookkeeping.
    """
    async with transaction(session):
        await share_schema(session)
        number = int(await session.fetch_value(_JOIN_SQL, name, address, __version__))
        await session.fetch_value(LOCK_SQL, signed(REPLICA_CLASS), number)
        await REPLICAS.delete(session, _PRUNE_SQL, REPLICA_CLASS, KNOWN_SECONDS)
    return number


async def beat(session: TargetConnection, number: int, presence: Presence) -> bool:
    """Report that replica *number* is alive; return False if the bookkeeping lacks the replica."""
    return await REPLICAS.set(
        session,
        number,
        fields_of(presence),
        "and backend_pid = pg_catalog.pg_backend_pid()",
        also="beat = beat + 1, seen_at = pg_catalog.clock_timestamp()",
    )


async def read_fleet(session: TargetConnection) -> FleetRecord:
    """Return all replicas, with or without their lock, and the owner of each source."""
    owners: dict[str, Owner] = {
        SourceLabel(row["database"], row["sid"]): Owner(row["pid"], row["holder"])
        for row in await session.fetch(_OWNERS_SQL, LOCK_CLASS)
    }
    mappings = [row["fingerprint"] for row in await session.fetch(_MAPPINGS_SQL)]
    return FleetRecord(await read_replicas(session), owners, mappings)


async def read_processes(session: Executor) -> list[str]:
    """Return the names of the processes that hold the lock of a replica or of a source."""
    rows = await session.fetch(_PROCESSES_SQL, REPLICA_CLASS, LOCK_CLASS)
    return [row["process"] for row in rows]


async def is_process_beginning(session: Executor) -> bool:
    """Whether a process that streams has just connected to the target."""
    rows = await session.fetch(_IS_STARTING_SQL, STARTING_SECONDS)
    return bool(rows[0]["exists"])


async def propose_mapping(session: TargetConnection, fingerprint: str, current: str | None) -> None:
    """Make *fingerprint* the newest mapping, unless the newest is no longer *current*."""
    await session.execute(_PROPOSE_SQL, fingerprint, current)


async def read_replicas(session: Executor) -> list[ReplicaRecord]:
    return await REPLICAS.read(session, "order by r.id", REPLICA_CLASS)


def find_newest_mapping(replicas: Iterable[ReplicaRecord]) -> ReplicaRecord | None:
    """Return a live replica with the newest mapping of all replicas. Pure."""
    ranked = [
        ((replica.mapping_revision, replica.number), replica)
        for replica in replicas
        if replica.is_alive and not replica.is_stopping and replica.mapping_revision is not None
    ]
    return max(ranked, key=lambda item: item[0])[1] if ranked else None


async def delete_replica(session: TargetConnection, number: int) -> None:
    """Delete a replica."""
    await REPLICAS.delete(session, "where id = $1", number)


async def end_sessions(session: TargetConnection, replica: ReplicaRecord) -> None:
    """End all sessions, and so all locks, of a replica that is no longer alive.

    Otherwise its transactions would hold locks on rows and tables as long as the replica is frozen.
    """
    await session.fetch(_END_SQL, replica.backend_pid, MEMBER_CLASS, replica.name)
    await delete_replica(session, replica.number)
