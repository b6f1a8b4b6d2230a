"""The source, the target and the settings that all steps of a copy need."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.control.chunked_copy import ChunkedCopy
from streamer.control.resync_options import DifferingRows
from streamer.control.table_state import TableState
from streamer.copy.parts.part_copier import CopyEnds
from streamer.copy.source_turns import CopyTurns
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import StreamerError, TargetContentionError
from streamer.errors.error_reports import ErrorReport, TableWait
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.observability.metrics import Metrics
from streamer.postgres.secret import Secret
from streamer.source.catalog import SourceServer
from streamer.source.server.idle_connections import IdleConnections
from streamer.target.connection import TargetAddress, TargetConnection, target_connection
from streamer.target.fencing_token import FencingToken
from streamer.target.idle_sessions import IdleSessions
from streamer.util.lsn import Lsn

if TYPE_CHECKING:
    from streamer.copy.prepare_copy import TableCopy

TERMINATE_SECONDS: Final = 10.0
_END_TASKS_SQL: Final = """
select count(pg_terminate_backend(pid)) from pg_stat_activity
where (application_name = $1 or starts_with(application_name, $1 || ' '))
  and application_name <> all ($2::text[]) and datname = current_database()
  and usename = current_user and pid <> pg_backend_pid()
"""


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The part of the configuration that copies need."""

    target_url: Secret
    create_tables: bool
    defer_indexes: bool
    jobs: int
    rows_per_second: float | None
    total_rows_per_second: float | None = None
    total_bytes_per_second: float | None = None
    resumable_above: int = 10 << 30
    """The size in bytes above which streamer copies a table with a suitable key in chunks."""
    target_namespace: str = "public"
    """The schema of target tables whose rule names no schema."""

    @property
    def rates_of_task(self) -> tuple[float | None, float | None]:
        """Rows and bytes per second that a task may pass on while `jobs` tasks run."""
        rows = [r for r in (self.rows_per_second, self.total_rows_per_second) if r is not None]
        size = self.total_bytes_per_second
        return min(rows) / self.jobs if rows else None, None if size is None else size / self.jobs

    def __repr__(self) -> str:
        return "SyncSettings(…)"


class SyncEvents(Protocol):
    """Callbacks of a copy into its pipeline."""

    def step(self, mapped: MappedRelation, event: Callable[[TableState], TableState]) -> None:
        """Give *mapped* the state that *event* returns, if a rule still maps the table."""
        ...

    def copy_began(self, mapped: MappedRelation, consistent_point: Lsn) -> None:
        """Discard held changes up to *consistent_point*, because the copy will contain them."""
        ...

    async def reach(self, mapped: MappedRelation, point: Lsn) -> None:
        """Apply the changes of *mapped* that commit before *point*.

        Returns when all these changes are durable. Once a snapshot begins, *point* is the
        consistent point, and the lane keeps later changes until `switched_to_stream` or
        `copy_failed`. *mapped* is held to a point. Raises SyncError if the point cannot be reached.
        """
        ...

    def find_mapping(self, name: RelationName) -> RelationMapping | None:
        """Return the mapping of a table of the source; None if the table is not replicated."""
        ...

    def is_behind(self, name: RelationName, lsn: Lsn) -> bool:
        """Whether the target lacks changes of a table that committed before *lsn*."""
        ...

    def has_delivered(self, lsn: Lsn) -> bool:
        """Whether the stream has delivered all changes that committed before *lsn*."""
        ...

    def snapshot_passes(self, relations: Sequence[MappedRelation], lsn: Lsn) -> None:
        """Announce that the next snapshot of *relations*, and all later snapshots, come after
        *lsn*.

        The next snapshot waits for sessions of the source. In synchronous mode, such a session may
        wait until the target has an earlier change.
        """
        ...

    def switched_to_stream(
        self, mapped: MappedRelation, chunks: ChunkedCopy | None, consistent_point: Lsn
    ) -> None:
        """Apply later changes of the copied rows of *mapped*: all rows, or the rows of *chunks*."""
        ...

    def may_copy_in_chunks(self, mapped: MappedRelation) -> bool:
        """Whether the drainer can apply changes of only some rows of *mapped*."""
        ...

    async def copy_begins_again(self, mapped: MappedRelation) -> None:
        """Hold all changes of *mapped* for a new copy, once no change is in flight."""
        ...

    def source_failed(self, error: StreamerError) -> None:
        """End the attempt to stream the source, because the target stores a different state of the
        source.
        """
        ...

    def copy_failed(self, mapped: MappedRelation, error: ErrorReport) -> None: ...
    def table_missing(self, mapped: MappedRelation) -> None:
        """Report that the source has no table of that name. A caller can request a copy once the
        table exists.
        """
        ...

    async def copies_wait(
        self, relations: Iterable[MappedRelation], wait: TableWait | None
    ) -> None:
        """Report that copies wait; None ends the wait."""
        ...


class FindDifferences(Protocol):
    """Finds the rows that differ between the target and the snapshot of *ends*."""

    async def __call__(
        self, context: "CopyContext", copy: "TableCopy", ends: CopyEnds
    ) -> DifferingRows | None: ...


@dataclass(frozen=True, slots=True)
class CopyContext:
    """The source, the target and the settings of copies."""

    source: SourceMapping
    source_id: int
    server: SourceServer
    address: TargetAddress
    bookkeeping: Bookkeeping
    sources: IdleConnections
    targets: IdleSessions
    launcher: SparkLauncher
    settings: SyncSettings
    events: SyncEvents
    metrics: Metrics
    find_differences: FindDifferences
    turns: CopyTurns
    round_number: int = 0
    """The number of the round; several rounds can run at a time."""
    captures: bool = False
    """The source reports changes of definitions in its stream."""
    check_timeline: Callable[[], Awaitable[None]] | None = None
    """Raises SourceConnectionError if the timeline of a standby has changed; None for a primary."""

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def application_name(self) -> str:
        """The name of the coordinator's sessions at the target."""
        return f"streamer sync {self.source_id}"

    @property
    def task_name(self) -> str:
        """The name of the sessions of the round's tasks, on both sides."""
        return task_name(self.source_id, self.round_number)

    @property
    def fence(self) -> FencingToken:
        assert self.address.fence is not None, "only the holder of the source's lock copies"
        return self.address.fence

    def target(self) -> AbstractAsyncContextManager[TargetConnection]:
        """Connect to the target during a block."""
        return target_connection(self.address, self.application_name)

    def idle_target(self) -> AbstractAsyncContextManager[TargetConnection]:
        """Provide a session at the target during a short block, which may change lock_timeout."""
        return self.targets.session(self.fence, self.application_name)

    async def end_former_tasks(self, running: Iterable[int]) -> None:
        """End the tasks that outlived a process or a round. *running*: the numbers of the rounds
        that continue.
        """
        await end_tasks(self.bookkeeping, self.source_id, running)


async def end_tasks(bookkeeping: Bookkeeping, source_id: int, running: Iterable[int] = ()) -> None:
    """End the backends of a source's tasks at the target, and wait for the end. *running*: the
    numbers of the rounds that continue. Raises TargetContentionError.
    """
    spared = [task_name(source_id, number) for number in running]
    prefix = task_name(source_id, None)
    ends_at: float | None = None
    while True:
        async with bookkeeping.connection() as target:
            if not await target.fetch_value(_END_TASKS_SQL, prefix, spared):
                return
        # The limit begins here, because many starting sources may use the connection first.
        now = time.monotonic()
        ends_at = now + TERMINATE_SECONDS if ends_at is None else ends_at
        if now >= ends_at:
            raise TargetContentionError(
                "the target has not ended the sessions of a former copy within"
                f" {TERMINATE_SECONDS:g} s"
            )
        await asyncio.sleep(0.1)


def task_name(source_id: int, round_number: int | None) -> str:
    """Return the name of the sessions of a round's tasks; with None, the source's prefix."""
    name = f"streamer copy {source_id}"
    return name if round_number is None else f"{name} round {round_number}"
