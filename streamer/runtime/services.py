"""The services that all pipelines of a process use, and the health that each pipeline reports."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from streamer.apply.lanes.queue_budget import Budget
from streamer.apply.lanes.spool import SpoolDirectory
from streamer.apply.write.worker import Worker
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.positions import AcknowledgedPositions
from streamer.bookkeeping.source_lock import LockSession
from streamer.bookkeeping.verifications import VerificationRecord
from streamer.copy.copy_context import SyncSettings
from streamer.copy.source_turns import CopyTurns
from streamer.copy.spark.launcher import SparkLauncher
from streamer.drain.drainer import Drainer
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.observability.metrics import Metrics
from streamer.runtime.check_pace import CheckPace
from streamer.runtime.start_limit import Starts
from streamer.runtime.target_health import TargetHealth
from streamer.source.server.idle_connections import IdleConnections
from streamer.target.connection import TargetAddress
from streamer.target.fencing_token import FencingToken
from streamer.target.idle_sessions import IdleSessions
from streamer.util.lsn import INVALID_LSN, Lsn

if TYPE_CHECKING:
    from streamer.runtime.heartbeat import ServerBeats
    from streamer.source.reached_server import ServerIdentity


@dataclass(frozen=True, slots=True)
class Services:
    """The services that all pipelines of a process use."""

    address: TargetAddress
    bookkeeping: Bookkeeping
    sources: IdleConnections
    targets: IdleSessions
    """Connections that the steps of a start and the queries of the planner share."""
    locks: LockSession
    positions: AcknowledgedPositions
    workers: list[Worker]
    hot_workers: list[Worker]
    """The workers reserved for hot lanes, see `streamer.apply.lanes.hot_lanes`."""
    drainer: Drainer
    launcher: SparkLauncher
    spools: SpoolDirectory
    budget: Budget
    metrics: Metrics
    sync: SyncSettings
    target_namespace: str
    by_transaction: bool
    heartbeat_interval: float
    target: TargetHealth
    starts: Starts
    copy_turns: CopyTurns
    conflicts_kept: int
    discovery_interval: float = 0
    """Seconds between two checks for new tables; 0 for none."""
    tables_appeared: Callable[[str], None] = lambda _: None
    """Called with the label of a source that has new tables under its patterns."""
    heartbeats: "dict[ServerIdentity, ServerBeats]" = field(default_factory=dict)
    """The heartbeats of each source server."""
    pace: CheckPace = field(default_factory=CheckPace)
    take_over: set[str] = field(default_factory=set)
    """Labels of sources whose slot and publications the next start takes over."""

    @property
    def all_workers(self) -> list[Worker]:
        return [*self.workers, *self.hot_workers]

    def under(self, fence: FencingToken) -> "Services":
        """Return services whose connections to the target must reach the server of *fence*."""
        address = replace(self.address, fence=fence)
        return replace(self, address=address, bookkeeping=self.bookkeeping.under(fence))


REMOVALS_MAX: Final = 100
SOURCE_STATES: Final = ("starting", "streaming", "waiting", "stopped", "error")
"""The states of a source, as stored in streamer.source."""


@dataclass(slots=True)
class Health:
    """The state of a running pipeline, for metrics and readiness."""

    state: str = "starting"
    error: ErrorReport | None = None
    waiting_for: str | None = None
    """The turn for which the start of the source waits."""
    holder: str | None = None
    """The process that runs this source, if that is another process."""
    wal_end_lsn: Lsn = INVALID_LSN
    restart_lsn: Lsn | None = None
    safe_wal_bytes: int | None = None
    table_states: dict[str, str] = field(default_factory=dict)
    table_errors: dict[str, ErrorReport] = field(default_factory=dict)
    table_waits: dict[str, TableWait] = field(default_factory=dict)
    """Waits that the state of a table does not show, such as the wait for a lock at the target."""
    quarantined: dict[str, int] = field(default_factory=dict)
    verifications: dict[str, VerificationRecord] = field(default_factory=dict)
    """The last comparison of each table."""
    removals: dict[str, ErrorReport] = field(default_factory=dict)
    """Why tables have left the stream, the last `REMOVALS_MAX` of them."""

    def add_removal(self, table: str, reason: ErrorReport) -> None:
        """Store the reason why *table* leaves the stream, for the events."""
        self.removals.pop(table, None)
        self.removals[table] = reason
        if len(self.removals) > REMOVALS_MAX:
            del self.removals[next(iter(self.removals))]
