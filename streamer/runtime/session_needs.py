"""The connections that `run` needs at the target."""

from dataclasses import dataclass
from typing import Final

from streamer.config.settings import Settings
from streamer.runtime.start_limit import STARTS_AT_ONCE
from streamer.target.connection import TargetAddress
from streamer.target.session_counts import (
    BOOKKEEPING_MAX,
    DRAINERS_MAX,
    FINISHING_MAX,
    hot_worker_count,
)

TARGET_FEW: Final = 7 + BOOKKEEPING_MAX
"""Sessions that a process opens at the target for any number of sources and tables: locks, plans,
notifications, liveness, definitions, indexes, scripts, bookkeeping.
"""


@dataclass(frozen=True, slots=True)
class Needs:
    """The number that streams need all the time, and the additional number for copies."""

    always: int
    copies: int

    @property
    def most(self) -> int:
        return self.always + self.copies


def target_needs(settings: Settings, source_count: int) -> Needs:
    """Return the connections that all processes open at the target."""
    copying = min(settings.sync.sources_at_once, source_count)
    always = settings.workers + hot_worker_count(settings.workers) + DRAINERS_MAX + TARGET_FEW
    return Needs(
        settings.processes * (always + min(STARTS_AT_ONCE, source_count)),
        settings.processes * (settings.sync.jobs + copying * (1 + FINISHING_MAX)),
    )


def address_of_target(settings: Settings) -> TargetAddress:
    """Return the target's address, with the connections that `run` needs for any number of
    sources. Raises SettingsError.
    """
    many = max(STARTS_AT_ONCE, settings.sync.sources_at_once)
    needs = f"up to {target_needs(settings, many).most} connections"
    return TargetAddress.parse(settings.target.url, needs)
