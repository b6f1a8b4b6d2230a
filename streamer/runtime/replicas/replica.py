"""This process among the replicas of its configuration: the sources that the process runs.

Every second the process reports a beat, and reads the owner of each lock from the target. From
these facts each process decides by itself which sources to take and to release, see
`streamer.runtime.replicas.shares`. The process locks a source before the supervisor begins. A
returned source stops cleanly and is unlocked last.

While the target does not answer, the process keeps its sources: their attempts wait, and take the
locks again. If another replica was faster, this process gives up the source.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.relation_records import read_unready_tables
from streamer.bookkeeping.replicas import (
    Fleet,
    FleetRecord,
    Presence,
    ReplicaRecord,
    beat,
    delete_replica,
    end_sessions,
    join,
    propose_mapping,
    read_fleet,
)
from streamer.bookkeeping.source_lock import LockSession
from streamer.bookkeeping.sources import read_source_records
from streamer.errors.error_classes import StreamerError
from streamer.errors.error_reports import ErrorReport
from streamer.mapping.rules import SourceMapping
from streamer.runtime.replicas.mapping_follower import JOIN_SECONDS, MappingFollower
from streamer.runtime.replicas.shares import Peer, decide, leads, make_plan
from streamer.target.connection import TargetConnection
from streamer.util.backoff import Backoff
from streamer.util.waiting import wait_for_event

log = structlog.get_logger()

CHECK_SECONDS: Final = 1.0
FROZEN_SECONDS: Final = 10.0
"""A replica without a new beat for this long has died, is frozen or is cut off."""
FROZEN_CHECKS: Final = 5
"""The number of checks without a beat before a replica counts as frozen: a slow target delays
checks, too.
"""
STABLE_SECONDS: Final = 3.0
"""A replica gives sources back once no replica has joined or ended for this long."""
RELEASED_AT_ONCE: Final = 4
"""The number of sources to release at a time."""
REFUSED_SECONDS: Final = 10.0
"""A replica that does not take an assigned source for this long loses the source."""
RETAKE_SECONDS: Final = 60.0
"""The time after which a replica that lost a source may take that source again."""
FOLLOW_SECONDS: Final = 5.0
"""Free sources wait this long for a replica that is about to read a new mapping."""
PROBE_SECONDS: Final = 10.0
"""The interval at which a replica tries to reach the sources that it gave up."""
REMOVED_SECONDS: Final = 60.0
"""How long a replica does not take a source that a peer removed: the replica may be about to
read the same configuration.
"""
SHOW_SECONDS: Final = 3.0
FOREIGN_OWNER: Final = -1
"""The owner of a lock that is not a replica, such as `run --stop-when-caught-up`."""


class Shared(Protocol):
    """The supervisor of a source that replicas share."""

    source: SourceMapping

    @property
    def is_assigned(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def has_journal(self) -> bool: ...

    @property
    def is_out_of_reach(self) -> bool: ...

    async def answers(self) -> bool: ...

    def assign(self) -> None: ...

    def unassign(self) -> None: ...

    def show(
        self,
        state: str,
        error: ErrorReport | None,
        holder: str | None,
        tables: dict[str, tuple[str, ErrorReport | None]],
    ) -> None: ...


@dataclass(slots=True)
class _Beats:
    """The beats of a replica that this process has seen."""

    beat: int
    since: float
    checks: int = 0


@dataclass(slots=True)
class _Free:
    """A free source, and the replica that is to take the source."""

    taker: int
    since: float


class Replica:
    """See the module. The owner runs `run` as a task."""

    def __init__(
        self,
        locks: LockSession,
        bookkeeping: Bookkeeping,
        read_sources: Callable[[], Sequence[Shared]],
        count_error: Callable[[StreamerError], None],
        following: MappingFollower,
        *,
        address: str | None = None,
        max_sources: int | None = None,
    ) -> None:
        """*address*: the address at which this process serves its page."""
        self.fleet = Fleet()
        self._locks = locks
        self._bookkeeping = bookkeeping
        self._read_sources = read_sources
        self._count_error = count_error
        self._following = following
        self._address = address
        self._max_sources = max_sources
        self._number = 0
        """The number of this replica; 0 before it has joined."""
        self._backend_pid = 0
        self._joined_at = 0.0
        self._members: list[Peer] = []
        self._beats: dict[int, _Beats] = {}
        self._behind: dict[int, float] = {}
        """Replicas without the newest mapping, each with the time at which this process first saw
        that.
        """
        self._changed_at = 0.0
        """When a replica last joined or ended."""
        self._free: dict[str, _Free] = {}
        self._refused: dict[tuple[int, str], float] = {}
        self._unreached: set[str] = set()
        """Sources that this process could not reach, and that other replicas run meanwhile."""
        self._probing: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        self._removed: dict[str, float] = {}
        """Sources that a peer removed from its mapping, and when."""
        self._shown_at = float("-inf")
        self._is_stopping = False
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Check now: the set of sources has changed."""
        self._woken.set()

    def leads(self, labels: Collection[str]) -> bool:
        """Whether this process does the common work at the target for the sources *labels*."""
        return leads(self._number, self._members, labels)

    @property
    def has_newest_mapping(self) -> bool:
        return not self._following.is_waiting

    async def run(self) -> None:
        """Lock and release sources until cancelled."""
        try:
            await self._run()
        finally:
            if self._probing is not None:
                self._probing.cancel()

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            self._woken.clear()
            try:
                await self._check()
                backoff = Backoff()
                seconds = CHECK_SECONDS
            except StreamerError as exc:
                self._count_error(exc)
                backoff.log(log, "sources cannot be shared now", exc)
                seconds = min(CHECK_SECONDS, backoff.next_seconds())
            await wait_for_event(self._woken, seconds)

    async def stop(self) -> None:
        """Release all sources to the remaining replicas, each as soon as its pipeline ends."""
        self._is_stopping = True
        try:
            await self._locks.use(self._report)
            for shared in self._read_sources():
                await self._locks.give_up(shared.source.label)
        except StreamerError as exc:
            _log_unreleased(exc)

    async def release(self, label: str) -> None:
        """Release the lock of a source that this process removed from its mapping."""
        try:
            await self._locks.use(self._report)  # first, so that no peer takes the source
            await self._locks.give_up(label)
        except StreamerError as exc:
            _log_unreleased(exc)

    async def sign_off(self) -> None:
        """Report to the replicas that this process shut down cleanly."""
        if self._number:
            try:
                async with asyncio.timeout(1.0):
                    await self._locks.use(partial(delete_replica, number=self._number))
            except (StreamerError, TimeoutError) as exc:
                _log_unreleased(exc)

    # ---- one check -----------------------------------------------------------------------------

    async def _check(self) -> None:
        record = await self._locks.use(self._report)
        if frozen := self._find_frozen(record.replicas):
            for replica in frozen:
                if replica.is_alive:
                    log.warning(
                        "a replica does not answer; ending its sessions", replica=replica.name
                    )
                await self._locks.use(partial(end_sessions, replica=replica))
            record = await self._locks.use(read_fleet)
        self._update_fleet(record)
        if self._is_stopping:
            return
        now = time.monotonic()
        newest = self._following.check(record, self._number, now, now - self._joined_at)
        if newest is not None:
            current = record.mappings[0] if record.mappings else None
            await self._locks.use(partial(propose_mapping, fingerprint=newest, current=current))
        sources = {shared.source.label: shared for shared in self._read_sources()}
        await self._renew_locks(sources, record)
        await self._share(sources, record)
        self._probe(sources)
        if time.monotonic() - self._shown_at >= SHOW_SECONDS:
            await self._show(sources)
            self._shown_at = time.monotonic()

    async def _report(self, session: TargetConnection) -> FleetRecord:
        """Join or count a beat; return the replicas and owners."""
        shared = self._read_sources()
        presence = Presence(
            [item.source.label for item in shared],
            self._max_sources,
            self._is_stopping,
            [item.source.label for item in shared if item.has_journal],
            self._find_unreached(shared),
            self._following.report(),
        )
        is_member = self._backend_pid == session.backend_pid and await beat(
            session, self._number, presence
        )
        if not is_member:
            if self._number:
                await delete_replica(session, self._number)
            self._number = await join(session, self._locks.holder, self._address)
            self._backend_pid = session.backend_pid
            self._joined_at = time.monotonic()
            await beat(session, self._number, presence)
        return await read_fleet(session)

    def _find_unreached(self, sources: Sequence[Shared]) -> list[str]:
        """Return the sources that this process could not reach in its last attempt."""
        self._unreached &= {shared.source.label for shared in sources}
        for shared in sources:
            if shared.is_assigned and shared.is_out_of_reach:
                self._unreached.add(shared.source.label)
            elif shared.is_assigned:
                self._unreached.discard(shared.source.label)
        return sorted(self._unreached)

    def _probe(self, sources: dict[str, Shared]) -> None:
        """Start to connect to the sources that this process gave up."""
        now = time.monotonic()
        is_running = self._probing is not None and not self._probing.done()
        unreached = [
            s for label, s in sources.items() if label in self._unreached and not s.is_assigned
        ]
        if unreached and not is_running and now >= self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            self._probing = asyncio.create_task(self._connect(unreached), name="probe of sources")

    async def _connect(self, sources: Sequence[Shared]) -> None:
        for shared in sources:
            if await shared.answers():
                self._unreached.discard(shared.source.label)

    def _find_frozen(self, replicas: Sequence[ReplicaRecord]) -> list[ReplicaRecord]:
        """Return the replicas whose beats no longer increase.

        A replica that lost its lock may be among them: frozen, with transactions that block
        sessions.
        """
        now = time.monotonic()
        seen = {}
        frozen = []
        for replica in replicas:
            beats = self._beats.get(replica.number)
            if beats is None or beats.beat != replica.beat:
                beats = _Beats(replica.beat, now)
            beats.checks += 1
            seen[replica.number] = beats
            is_silent = now - beats.since >= FROZEN_SECONDS and beats.checks > FROZEN_CHECKS
            if is_silent and replica.number != self._number:
                frozen.append(replica)
        self._beats = seen
        return frozen

    def _update_fleet(self, record: FleetRecord) -> None:
        now = time.monotonic()
        alive = [replica for replica in record.replicas if replica.is_alive]
        newest = record.mappings[0] if record.mappings else None
        self._behind = {
            replica.number: self._behind.get(replica.number, now)
            for replica in alive
            if newest is not None and replica.mapping not in (None, newest)
        }
        members = [
            Peer(
                replica.number,
                replica.sources,
                replica.max_sources,
                replica.is_stopping,
                replica.journals,
                replica.out_of_reach,
                replica.number not in self._behind,
            )
            for replica in alive
        ]
        if [peer.number for peer in members] != [peer.number for peer in self._members]:
            self._changed_at = now
            if self._members or len(alive) > 1:
                names = [replica.name for replica in alive]
                log.info("replicas have changed", replicas=names)
        former = {peer.number: peer.sources for peer in self._members}
        self._removed = {
            label: at for label, at in self._removed.items() if now - at < REMOVED_SECONDS
        }
        for member in members:
            if member.number == self._number or member.number not in former:
                continue
            for label in former[member.number] - member.sources:
                self._removed[label] = now
            for label in member.sources - former[member.number]:
                self._removed.pop(label, None)
        self._members = members
        self.fleet = Fleet.of(record)

    async def _renew_locks(self, sources: dict[str, Shared], record: FleetRecord) -> None:
        """Give up sources whose lock another process has; lock sources of this process again."""
        for label, shared in sources.items():
            owner = record.owners.get(label)
            if shared.is_assigned and (owner is None or owner.backend_pid != self._backend_pid):
                await self._begin(shared)

    async def _begin(self, shared: Shared) -> None:
        """Lock a source and run it; or leave the source to the process that holds the lock.

        A source with a journal on this disk stays assigned here: the process with the lock will
        release the source.
        """
        holder = await self._locks.reserve(shared.source)
        if holder is None and self._is_stopping:
            await self._locks.give_up(shared.source.label)
            return
        if holder is None:
            if not shared.is_assigned:
                shared.assign()
            return
        if shared.is_assigned and not shared.has_journal:
            log.warning("another replica runs this source", source=shared.source.label, by=holder)
            shared.unassign()

    async def _share(self, sources: dict[str, Shared], record: FleetRecord) -> None:
        now = time.monotonic()
        numbers = {peer.backend_pid: peer.number for peer in record.replicas if peer.is_alive}
        owners: dict[str, int | None] = {}
        refused = self._find_refused(now)
        for label in {label for member in self._members for label in member.sources}:
            owner = record.owners.get(label)
            pid = None if owner is None else owner.backend_pid
            owners[label] = None if pid is None else numbers.get(pid, FOREIGN_OWNER)
            shared = sources.get(label)
            if shared is None:
                continue
            if shared.is_assigned:
                owners[label] = self._number
            elif shared.is_draining or owners[label] == self._number:
                owners[label] = None  # the source will be free soon, and not for this process
                refused.add((self._number, label))
        owners = dict(sorted(owners.items()))
        plan = make_plan(self._members, owners, refused)
        takers = {label: t for label, t in plan.takers.items() if owners[label] is None}
        self._record_free(takers, now)
        busy = {label for label, shared in sources.items() if shared.is_busy}
        decision = decide(self._number, plan, self._members, owners, busy, refused)
        await self._give(sources, decision.give, now)
        if self._following.is_waiting:
            return
        for label in self._ordered(sources, decision.take, record, now):
            await self._begin(sources[label])

    def _find_refused(self, now: float) -> set[tuple[int, str]]:
        """Return pairs of a replica and a source that the replica will not take soon."""
        kept_back = {
            (member.number, label)
            for member in self._members
            if now - self._behind.get(member.number, now) >= FOLLOW_SECONDS
            for label in member.sources
        }
        return kept_back | {key for key, until in self._refused.items() if until > now}

    async def _give(self, sources: dict[str, Shared], give: Sequence[str], now: float) -> None:
        """Release the sources in *give*, a few at a time, once the set of replicas is stable."""
        if now - self._changed_at < STABLE_SECONDS:
            return
        draining = [label for label, shared in sources.items() if shared.is_draining]
        for label in give[: max(0, RELEASED_AT_ONCE - len(draining))]:
            log.info("releasing the source to another replica", source=label)
            sources[label].unassign()
            await self._locks.give_up(label)

    def _ordered(
        self, sources: dict[str, Shared], take: Sequence[str], record: FleetRecord, now: float
    ) -> list[str]:
        """Return the sources of *take* that may be taken now, those with priority first."""
        name = self._locks.holder
        if now - self._joined_at < JOIN_SECONDS and may_return(record.replicas, name):
            owners = record.owners
            take = [label for label in take if label in owners and owners[label].holder == name]
        take = [label for label in take if label not in self._removed]
        return sorted(take, key=lambda label: -sources[label].source.priority)

    def _record_free(self, takers: dict[str, int], now: float) -> None:
        """Record when each free source began to wait for the replica that is to take the source."""
        self._free = {
            label: entry
            if (entry := self._free.get(label)) is not None and entry.taker == taker
            else _Free(taker, now)
            for label, taker in takers.items()
        }
        for label, free in self._free.items():
            if now - free.since > REFUSED_SECONDS:
                self._refused[free.taker, label] = now + RETAKE_SECONDS
        self._refused = {key: until for key, until in self._refused.items() if until > now}

    async def _show(self, sources: dict[str, Shared]) -> None:
        """Show the stored states of sources that peer replicas run."""
        elsewhere = {label: shared for label, shared in sources.items() if not shared.is_assigned}
        if not elsewhere:
            return
        records = {record.label: record for record in await read_source_records(self._bookkeeping)}
        tables = await read_unready_tables(self._bookkeeping)
        for label, shared in elsewhere.items():
            record = records.get(label)
            holder = self.fleet.holders.get(label)
            if (vacancy := self.fleet.vacancy(label)) is not None:
                shared.show("waiting", vacancy, None, {})
            elif record is not None:
                shared.show(record.state, record.error, holder, tables.get(label, {}))


def _log_unreleased(error: Exception) -> None:
    """Log that the locks end with their session, because the target did not answer the release."""
    log.info("the locks of this process end with its session", reason=str(error) or "timeout")


def may_return(replicas: Sequence[ReplicaRecord], name: str) -> bool:
    """Whether a replica without its session may soon join again. *name* names this process."""
    return any(
        not replica.is_alive and replica.name != name and not is_known_dead(replica.name)
        for replica in replicas
    )


def is_known_dead(name: str) -> bool:
    """Whether *name* names a process of this machine that ended."""
    host, _, pid = name.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
