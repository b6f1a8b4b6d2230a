"""The mapping of this process among its replicas: it follows the one that changed last.

An operator changes the mapping of one replica: by an apply in the mapping database, or by SIGHUP
after a change of the file. The others see another fingerprint in the bookkeeping of the target, and
read their own configuration again. The target never holds a mapping.

A file may reach another machine later, so a replica tries again, ever more rarely. Meanwhile log
and status name the replicas that differ.
"""

from collections.abc import Callable, Sequence
from typing import Final

import structlog

from streamer.mapping.fingerprint import fingerprint
from streamer.mapping.rules import Mapping
from streamer.progress.replicas import ReplicaRecord, find_newest_mapping

log = structlog.get_logger()

FIRST_SECONDS: Final = 2.0
MOST_SECONDS: Final = 60.0


class MappingFollower:
    """See the module. *read_mapping* returns the whole mapping that this process has; *reload*
    begins to read the configuration again, as SIGHUP does.
    """

    def __init__(self, read_mapping: Callable[[], Mapping], reload: Callable[[], None]) -> None:
        self._read_mapping = read_mapping
        self._reload = reload
        self._mapping: Mapping | None = None
        self._fingerprint = ""
        self._since = 0.0
        self._awaited = ""
        """The fingerprint that this process tries to reach."""
        self._next_at = 0.0
        self._seconds = FIRST_SECONDS
        self._is_told = False

    def report(self, now: float) -> tuple[str, float]:
        """Return the fingerprint of the mapping of this process, and its age in seconds."""
        mapping = self._read_mapping()
        if mapping is not self._mapping:
            self._mapping = mapping
            found = fingerprint(mapping)
            if found != self._fingerprint:
                self._fingerprint, self._since = found, now
        return self._fingerprint, now - self._since

    def look(self, replicas: Sequence[ReplicaRecord], number: int, now: float) -> None:
        """Read the configuration again if the newest mapping of the live *replicas* is another one.

        *number*: that of this process.
        """
        newest = find_newest_mapping(replicas)
        if newest is None or newest.number == number or newest.mapping == self._fingerprint:
            self._awaited = ""
            self._is_told = False
            return
        if newest.mapping != self._awaited:
            self._awaited = newest.mapping or ""
            self._next_at, self._seconds = now, FIRST_SECONDS
        if now < self._next_at:
            return
        if self._seconds > FIRST_SECONDS and not self._is_told:  # it has read it once in vain
            self._is_told = True
            log.warning(
                "this replica runs another mapping than the one that changed last",
                newest=newest.name,
                hint="give both the same configuration; streamer reads it again from time to time",
            )
        elif not self._is_told:
            log.info("another replica has a newer mapping: reading it", newest=newest.name)
        self._next_at = now + self._seconds
        self._seconds = min(2 * self._seconds, MOST_SECONDS)
        self._reload()
