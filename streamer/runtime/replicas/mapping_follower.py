"""The mapping of this process among its replicas: all run the newest revision.

An operator changes the mapping of one replica: by an apply in the mapping database, or by SIGHUP
after a change of the file. That replica adds a revision to the bookkeeping of the target. Peer
replicas see the fingerprint of the revision, and read their own configuration again. The target
holds no mapping.

A replica without the newest mapping takes no source. Its file may be older, and lack tables that
the fleet streams. A late start does not make a mapping new: a process that starts late may have the
oldest file. So its mapping becomes the newest only if an operator confirms the mapping
(SIGHUP), or if no replica runs the newest mapping any more.

The new file may reach a machine late, so a replica reads its file again at growing intervals.
Meanwhile log and status name the replica that differs.
"""

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from streamer.bookkeeping.replicas import MAPPING_HINT, FleetRecord, ReplicaRecord
from streamer.mapping.mapping_fingerprint import fingerprint
from streamer.mapping.rules import Mapping

log = structlog.get_logger()

FIRST_SECONDS: Final = 2.0
SECONDS_MAX: Final = 60.0
JOIN_SECONDS: Final = 3.0
"""A replica that joins waits this long before it takes sources or sets the mapping. After an outage
of the target, running replicas need this time to renew their sessions.
"""
DIFFERS: Final = (
    "this replica has a different mapping than the running replicas, so it runs no source"
)


def find_users(
    mapping: str, replicas: Sequence[ReplicaRecord], is_dead: Callable[[str], bool]
) -> list[ReplicaRecord]:
    """Return the replicas that run *mapping*, or that may return with *mapping*. Pure except for
    *is_dead*.

    A replica that shut down cleanly has no row. *is_dead*: whether the process of a name is known
    to have ended.
    """
    return [
        replica
        for replica in replicas
        if replica.mapping == mapping
        and not replica.is_stopping
        and (replica.is_alive or not is_dead(replica.name))
    ]


class MappingFollower:
    """Decides whether this process runs its mapping, waits, or reads its configuration again.

    *read_mapping* returns the mapping of this process. *reload* begins to read the configuration
    again, as SIGHUP does. *is_dead*: see `find_users`.
    """

    def __init__(
        self,
        read_mapping: Callable[[], Mapping],
        reload: Callable[[], None],
        is_dead: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.is_waiting = False
        """Whether this process waits because the replicas run a different mapping."""
        self._read_mapping = read_mapping
        self._reload = reload
        self._is_dead = is_dead
        self._mapping: Mapping | None = None
        self._fingerprint = ""
        self._is_confirmed = False
        self._awaited = ""
        """The fingerprint that this process tries to reach."""
        self._next_at = 0.0
        self._seconds = FIRST_SECONDS
        self._is_logged = False

    def confirm(self) -> None:
        """Make this process's mapping the newest after an operator's change or confirmation."""
        self._is_confirmed = True

    def report(self) -> str:
        """Return the fingerprint of the mapping of this process."""
        mapping = self._read_mapping()
        if mapping is not self._mapping:
            self._mapping = mapping
            self._fingerprint = fingerprint(mapping)
        return self._fingerprint

    def check(
        self, record: FleetRecord, number: int, now: float, joined_seconds: float
    ) -> str | None:
        """Return this process's fingerprint if its mapping must become the newest.

        Otherwise read the configuration again if the replicas run a different mapping. *number*:
        the number of this process. *joined_seconds*: the time for which the process has had this
        number.
        """
        current = record.mappings[0] if record.mappings else None
        if current == self._fingerprint:
            self._is_confirmed = self.is_waiting = self._is_logged = False
            self._awaited = ""
            return None
        if current is None or self._is_confirmed or self._is_alone(record, number, joined_seconds):
            self.is_waiting = False
            return self._fingerprint
        self.is_waiting = True
        self._follow(current, record.replicas, now)
        return None

    def _is_alone(self, record: FleetRecord, number: int, joined_seconds: float) -> bool:
        """Whether no replica runs the newest mapping or is about to run that mapping.

        A process with a former mapping also waits for dead replicas that ran the newest mapping, as
        long as the target stores their rows. A process that waited while such replicas died waits
        for them in the same way, because they may start again.
        """
        peers = [replica for replica in record.replicas if replica.number != number]
        is_gone = (lambda name: False) if self.is_waiting else self._is_dead
        users = find_users(record.mappings[0], peers, is_gone)
        if any(user.is_alive for user in users):
            return False
        if not users:
            return True
        return self._fingerprint not in record.mappings and joined_seconds >= JOIN_SECONDS

    def _follow(self, current: str, replicas: Sequence[ReplicaRecord], now: float) -> None:
        if current != self._awaited:
            self._awaited = current
            self._next_at, self._seconds = now, FIRST_SECONDS
        if now < self._next_at:
            return
        names = [
            replica.name for replica in replicas if replica.is_alive and replica.mapping == current
        ]
        if self._seconds > FIRST_SECONDS and not self._is_logged:  # no change at the second reading
            self._is_logged = True
            log.warning(DIFFERS, run_by=names, hint=MAPPING_HINT)
        elif not self._is_logged:
            log.info(
                "the replicas run a different mapping: reading the configuration", run_by=names
            )
        self._next_at = now + self._seconds
        self._seconds = min(2 * self._seconds, SECONDS_MAX)
        self._reload()
