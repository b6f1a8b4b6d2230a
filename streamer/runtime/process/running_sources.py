"""The sources that a process runs: a supervisor and a task for each.

A source stops in two phases. First its reader ends and dispatched changes become durable; then the
pipeline acknowledges these changes, so that a restart does not repeat them. After a time limit the
process drops the remaining changes. No change is lost: only durable changes are acknowledged.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.replicas import Fleet
from streamer.bookkeeping.sources import SourceRecord, forget_source, read_source_records
from streamer.copy.copy_context import end_tasks
from streamer.errors.error_classes import StreamerError, TargetContentionError
from streamer.mapping.rules import SourceMapping, find_source
from streamer.runtime.replicas.replica import Replica
from streamer.runtime.services import Services
from streamer.runtime.session.supervisor import Supervisor
from streamer.runtime.shutdown import finishes_before
from streamer.runtime.wal_retention.backlog_guards import BacklogGuards
from streamer.source.slot_and_publications.source_teardown import teardown_source
from streamer.source.timeline_branches import KnownServer
from streamer.util.containment import EnduringTasks
from streamer.util.lsn import Lsn

log = structlog.get_logger()

STOP_SECONDS: Final = 9.0


class RunningSources:
    """Owns the supervisors and their tasks, in a single process or in a replica."""

    def __init__(
        self,
        supervisors: list[Supervisor],
        services: Services,
        guards: BacklogGuards,
        group: asyncio.TaskGroup,
        stop_lsn: Lsn | None,
    ) -> None:
        """*supervisors*: the list that page, status and metrics of the process read."""
        self.supervisors = supervisors
        self.services = services
        self._guards = guards
        self._group = group
        self._stop_lsn = stop_lsn
        self._tasks: dict[Supervisor, asyncio.Task[None]] = {}
        self._replica: Replica | None = None
        """The replica that this process is; None if the process runs all sources up to a point."""
        self._replicating: asyncio.Task[None] | None = None

    def follow(self, replica: Replica, tasks: EnduringTasks) -> None:
        """Leave the choice of the sources to *replica*."""
        self._replica = replica
        self._replicating = tasks.start("replica", replica.run)

    @property
    def fleet(self) -> Fleet:
        return Fleet() if self._replica is None else self._replica.fleet

    def leads(self, *labels: str) -> bool:
        """Whether this process does the work that replicas share for the sources *labels*; without
        labels, the work that concerns no source.
        """
        return self._replica is None or self._replica.leads(labels)

    @property
    def has_newest_mapping(self) -> bool:
        """Whether no replica runs a newer mapping."""
        return self._replica is None or self._replica.has_newest_mapping

    def add(self, source: SourceMapping) -> None:
        guard = self._guards.add(source)
        guard.runner = supervisor = Supervisor(source, self.services, guard)
        supervisor.stop_lsn = self._stop_lsn
        if self._replica is not None:
            supervisor.unassign()  # until this process takes the source
            self._replica.wake()
        self.supervisors.append(supervisor)
        self._tasks[supervisor] = self._group.create_task(
            supervisor.run(), name=f"source {source.label}"
        )

    async def remove(self, supervisor: Supervisor, installation: str) -> None:
        """Stop a source, and remove its objects and bookkeeping; the target keeps its rows.

        A slot without a reader would retain the source's WAL until its disk is full. If another
        replica runs the source, that replica removes the objects.
        """
        label = supervisor.source.label
        is_elsewhere = not supervisor.is_assigned and label in self.fleet.holders
        await self._stop([supervisor])
        self.supervisors.remove(supervisor)
        guard = await self._guards.remove(label)
        if is_elsewhere:
            await guard.journaling.discard()
            return
        try:
            if await _remove_objects(supervisor.source, self.services.bookkeeping, installation):
                await guard.journaling.discard()
        finally:
            if self._replica is not None:
                await self._replica.release(label)

    async def fail(self, error: StreamerError) -> None:
        """Restart all sources, because work for any of them was lost.

        Returns when each current attempt ends: later changes must not overtake the lost work.
        """
        self.services.metrics.count_error(error)
        attempts = [(runner, runner.pipeline) for runner in self.supervisors if runner.pipeline]
        for _, pipeline in attempts:
            pipeline.source_failed(error)
        for supervisor, pipeline in attempts:
            await supervisor.until_ended(pipeline)

    async def until_done(self, stop: asyncio.Event) -> None:
        """Wait for *stop*, or until every source reaches its stop position."""
        if self._stop_lsn is None:
            await stop.wait()
        else:
            await finishes_before(stop, self._until_all_ended())

    async def _until_all_ended(self) -> None:
        while waiting := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def end(self, changing: asyncio.Lock) -> None:
        """Stop all sources, once the change of the mapping that holds *changing* has ended."""
        if self._replica is not None:
            await self._replica.stop()
        async with changing:
            await self._stop(self.supervisors)
        if self._replica is not None and self._replicating is not None:
            self._replicating.cancel()
            await self._replica.sign_off()

    async def _stop(self, supervisors: Sequence[Supervisor]) -> None:
        """Stop sources in order; cancel sources that exceed the time limit."""
        for supervisor in supervisors:
            supervisor.request_stop()
        tasks = [self._tasks.pop(supervisor) for supervisor in supervisors]
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
        for task in late:
            log.warning(
                "drain timed out; unconfirmed changes will be re-read",
                task=task.get_name(),
            )
            task.cancel()
        if late:
            await asyncio.wait(late)


async def _remove_objects(
    source: SourceMapping, bookkeeping: Bookkeeping, installation: str
) -> bool:
    """Remove the objects at a source, and its bookkeeping; return whether the slot belonged to
    streamer.
    """
    records = await read_source_records(bookkeeping)
    record = find_source(records, source.database, source.sid)
    if record is not None:
        # A task that still runs would commit rows of a removed tenant.
        await _end_copies(record, bookkeeping)
    server = KnownServer() if record is None else record.known_server
    result = await teardown_source(source, installation, server)
    if result.error is not None:
        log.error(
            "the source is removed, but its cleanup failed",
            source=source.label,
            error=result.error,
            run_there="; ".join(result.left_sql),
        )
    if record is not None and not result.is_elsewhere:
        await forget_source(bookkeeping, record.source_id)
    log.info("source removed", source=source.label)
    return not result.is_taken


async def _end_copies(record: SourceRecord, bookkeeping: Bookkeeping) -> None:
    try:
        await end_tasks(bookkeeping, record.source_id)
    except TargetContentionError:
        log.error("a copy of a removed source still runs at the target", source=record.label)
