"""The inputs of one attempt to stream a source."""

from collections.abc import Callable
from dataclasses import dataclass

from streamer.mapping.rules import SourceMapping
from streamer.runtime.heartbeat import Heartbeat
from streamer.runtime.services import Health, Services
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.target.fencing_token import FencingToken
from streamer.util.lsn import Lsn


@dataclass(frozen=True, slots=True)
class Attempt:
    """``services``: services of a process that holds the source's lock with the token ``fence``."""

    source: SourceMapping
    services: Services
    fence: FencingToken
    guard: BacklogGuard
    health: Health
    heartbeat: Heartbeat
    binary_obstacle: str | None
    """Why an earlier attempt gave up binary transport."""
    stop_lsn: Lsn | None
    unapplied: list[SourceMapping]
    """Changed rules that no attempt has applied, oldest first. Rules older than ``source``
    may leave out tables that ``source`` includes again.
    """
    release_permit: Callable[[], None]
    """Called when the opening of the session has a long wait ahead."""
