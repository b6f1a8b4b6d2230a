"""The long-running process, as a list of its parts.

`run` enters the parts in the order in which they start. The parts end in the reverse order:

    services          process/open_services.py        connections, spools, workers, drainer
    the target's state target_health.py               while the target is away, too
    reports           process/process_health.py       waits and problems
    backlog guards    wal_retention/backlog_guards.py  the WAL of each source, at all times
    shared work       `_stream`                       for all sources, once the target has answered
    sources           process/running_sources.py      a supervisor for each
    mapping           process/running_mapping.py      which sources those are
"""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from streamer.apply.write.worker import Worker
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate, read_installation
from streamer.bookkeeping.requests import CHANNEL, WAITING, WAITING_FOR_TABLES
from streamer.config.settings import Settings
from streamer.copy.spark.launcher import SparkLauncher
from streamer.errors.error_classes import Retry, StreamerError
from streamer.indexes.index_builder import IndexBuilder
from streamer.indexes.index_restorer import IndexRestorer
from streamer.mapping.lost_mapping import MappingProblem
from streamer.mapping.rules import Mapping, SourceMapping, find_source
from streamer.observability.metrics import Metrics
from streamer.observability.telemetry import open_telemetry
from streamer.postgres.secret import Secret
from streamer.runtime.health.readiness import Reason
from streamer.runtime.partition_keeper import PartitionKeeper
from streamer.runtime.process.open_services import opened_services
from streamer.runtime.process.password_renewal import renew_passwords
from streamer.runtime.process.process_health import ProcessHealth
from streamer.runtime.process.running_mapping import RunningMapping
from streamer.runtime.process.running_sources import RunningSources
from streamer.runtime.process.standing_verification import Verification, VerificationSettings
from streamer.runtime.replicas.mapping_follower import MappingFollower
from streamer.runtime.replicas.replica import Replica
from streamer.runtime.services import Services
from streamer.runtime.session_needs import address_of_target
from streamer.runtime.target_health import TargetHealth, TargetMonitor, refusal_of
from streamer.runtime.wal_retention.backlog_guards import BacklogGuards
from streamer.schema_changes.definition_builder import DefinitionBuilder
from streamer.util.backoff import Backoff
from streamer.util.containment import EnduringTasks
from streamer.util.lsn import LSN_MAX, Lsn
from streamer.util.repeated_notices import RepeatedNotices

if TYPE_CHECKING:
    from streamer.runtime.session.supervisor import Supervisor

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StopCondition:
    """The condition for stopping without a signal."""

    at_lsn: Lsn | None = None
    when_caught_up: bool = False

    @property
    def lsn(self) -> Lsn | None:
        return LSN_MAX if self.when_caught_up else self.at_lsn


class Engine:
    """Runs a mapping until `stop` is called or the stop condition is met."""

    def __init__(
        self,
        settings: Settings,
        mapping: Mapping,
        condition: StopCondition,
        *,
        is_partial: bool = False,
        take_over: Collection[str] = (),
        max_sources: int | None = None,
        launcher: SparkLauncher | None = None,
    ) -> None:
        """*is_partial*: other processes run the rest of the target's sources. *take_over*: names
        of sources (``DATABASE`` or ``DATABASE:SID``) whose slots another installation may have
        used. *max_sources*: how many sources this process may run; None for an even share.
        *launcher*: the launcher of a Spark process that is already starting.
        """
        self.metrics = Metrics(settings.http.metrics_tables_max)
        self.supervisors: list[Supervisor] = []
        """The supervisors of the running sources; empty until the target answers."""
        self._settings = settings
        self._stop_lsn = condition.lsn
        self._take_over = take_over
        self._launcher = launcher
        self._max_sources = max_sources
        self._address = address_of_target(settings)
        self._stopping = asyncio.Event()
        self._notices = RepeatedNotices()
        self._services: Services | None = None
        self._guards = BacklogGuards(settings, enforces_limits=condition.lsn is None)
        self._mapping = RunningMapping(mapping, self._guards, self._stopping, is_partial=is_partial)
        self.following = MappingFollower(lambda: self._mapping.now, lambda: None)
        self._target_monitor = TargetMonitor(
            self._address,
            CHANNEL,
            self._is_request,
            self._pass_request,
            self.metrics.count_error,
            lambda: refusal_of(s.condition for s in self.supervisors if s.is_assigned),
        )
        self._health = ProcessHealth(
            self.metrics,
            self.target,
            self._guards,
            self.supervisors,
            self._mapping,
            settings.statistics_interval,
        )
        self.adopt(settings)

    @property
    def target(self) -> TargetHealth:
        return self._target_monitor.health

    @property
    def bookkeeping(self) -> Bookkeeping | None:
        """The bookkeeping in the target; None before the migrations and after the end."""
        return None if self._services is None else self._services.bookkeeping

    @property
    def workers(self) -> list[Worker]:
        """The apply workers; empty before the migrations and after the end."""
        return [] if self._services is None else self._services.all_workers

    @property
    def mapping_problem(self) -> MappingProblem | None:
        """Why no source streams although the target has records of sources; None with a mapping."""
        return self._mapping.problem

    def readiness(self) -> list[Reason]:
        """Return the reasons why a source is not in sync; empty if all sources are in sync."""
        return self._health.readiness()

    def other_problems(self) -> list[Reason]:
        """Return the problems that leave every source in sync."""
        return self._health.other_problems()

    async def apply(self, mapping: Mapping) -> None:
        """Switch to *mapping*, see `RunningMapping.change`."""
        # A signal handler or a request has a context without the notices of this engine.
        self._notices.gather()
        await self._mapping.change(mapping)

    def adopt(self, settings: Settings) -> None:
        """Adopt the settings that change without a restart, apart from mapping and passwords."""
        self._health.notifier.adopt(settings.notify)

    def confirm_mapping(self) -> None:
        """Publish the mapping of this process to the replicas after an operator's change."""
        self.following.confirm()

    async def renew_passwords(self, target: Secret) -> None:
        """Adopt changed passwords; *target*: the target's url as configured now."""
        await renew_passwords(self._address.url, target, self.supervisors)

    def stop(self) -> None:
        """Ask the process to shut down cleanly."""
        self._stopping.set()

    async def run(self) -> None:
        """Run to the end. Raises StreamerError if the process must end; ExceptionGroup: defects."""
        _raise_file_limit()
        notices = self._notices
        notices.gather()
        async with contextlib.AsyncExitStack() as parts:
            services = await parts.enter_async_context(
                opened_services(
                    self._settings,
                    self._address,
                    self.target,
                    self.metrics,
                    self._launcher,
                    holder=f"{socket.gethostname()}:{os.getpid()}",
                    find_source=self._find_source,
                    tables_appeared=self._mapping.tables_appeared,
                    discovery_interval=0 if self._stop_lsn else self._settings.discovery_interval,
                )
            )
            tasks = await parts.enter_async_context(EnduringTasks())
            parts.callback(notices.flush)
            tasks.start("notices", notices.run)
            tasks.start("checking the target", self._target_monitor.run)
            await self._export_telemetry(parts, tasks)
            self._health.report(tasks, services.bookkeeping)
            await parts.enter_async_context(self._guards.running(self._mapping.now.sources))
            await self._migrate(services.bookkeeping)
            self._services = services
            parts.callback(self._forget_services)
            if not self._stopping.is_set():
                if not self._mapping.is_partial:
                    await self._mapping.warn_of_forgotten(services.bookkeeping)
                await self._stream(services)

    async def _export_telemetry(
        self, parts: contextlib.AsyncExitStack, tasks: EnduringTasks
    ) -> None:
        """Export metrics and spans, if configured. Raises SettingsError if the packages of
        OpenTelemetry are missing.
        """
        section = self._settings.opentelemetry
        if section.endpoint is not None:
            export = await asyncio.to_thread(
                open_telemetry, section.endpoint, section.headers, section.interval, self.metrics
            )
            self.metrics.spans = export if section.spans else None
            parts.push_async_callback(export.close)
            tasks.start("telemetry", export.run)

    async def _migrate(self, bookkeeping: Bookkeeping) -> None:
        """Wait for the target, and migrate the bookkeeping."""
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                await migrate(bookkeeping)
                await self._guards.installation.store(await read_installation(bookkeeping))
                return
            except StreamerError as exc:
                if exc.retry is not Retry.TIMED:
                    raise
                self.metrics.count_error(exc)
                backoff.log(log, "waiting for the target", exc)
                await backoff.wait()

    async def _stream(self, services: Services) -> None:
        """Run the sources, and the tasks that all sources need, to the end."""
        services.take_over.update(
            source.label
            for source in self._mapping.now.sources
            if not {source.database, source.label}.isdisjoint(self._take_over)
        )
        async with EnduringTasks() as tasks, asyncio.TaskGroup() as group:
            sources = RunningSources(
                self.supervisors, services, self._guards, group, self._stop_lsn
            )
            for worker in services.all_workers:
                tasks.start(f"worker {worker.number}", worker.run, sources.fail)
            tasks.start("drainer", services.drainer.run, sources.fail)
            tasks.start("launcher", services.launcher.run)
            self._start_target_work(tasks, services)
            if self._stop_lsn is None:
                sources.follow(self._make_replica(services), tasks)
            self._mapping.begin(sources)
            tasks.start("new tables", self._mapping.join_tables)
            verifying = tasks.start(
                "verification",
                Verification(
                    VerificationSettings.of(self._settings),
                    services.bookkeeping,
                    lambda: self._mapping.now,
                    self.supervisors,
                ).run,
            )
            await sources.until_done(self._stopping)
            self._stopping.set()  # prevents further changes of the mapping
            verifying.cancel()
            await sources.end(self._mapping.changing)

    def _start_target_work(self, tasks: EnduringTasks, services: Services) -> None:
        """Start the tasks that change definitions and indexes of the target beside the streams."""
        metrics, read_led = self.metrics, self._mapping.led
        definitions = DefinitionBuilder(self._address, services.bookkeeping, read_led, metrics)
        tasks.start("definitions", definitions.run)
        keeper = PartitionKeeper(self._address, services.bookkeeping, read_led, metrics)
        tasks.start("partitions", keeper.run)
        tasks.start("restorer", IndexRestorer(self._address, metrics).run)
        if self._settings.target.create_fk_indexes:
            namespace = services.target_namespace
            tasks.start("indexes", IndexBuilder(self._address, read_led, namespace, metrics).run)

    def _make_replica(self, services: Services) -> Replica:
        return Replica(
            services.locks,
            services.bookkeeping,
            lambda: self.supervisors,
            self.metrics.count_error,
            self.following,
            address=self._settings.http.listen or None,
            max_sources=self._max_sources,
        )

    def _forget_services(self) -> None:
        self._services = None

    def _find_source(self, database: str, sid: str | None) -> SourceMapping | None:
        return find_source((supervisor.source for supervisor in self.supervisors), database, sid)

    def _is_request(self, payload: str) -> bool:
        """Handle a notification; return whether an operator's request caused the notification."""
        if payload not in (WAITING, WAITING_FOR_TABLES):
            return True
        for supervisor in self.supervisors:
            supervisor.store_position(of_tables=payload == WAITING_FOR_TABLES)
        return False

    def _pass_request(self, was_requested: bool) -> None:
        for supervisor in self.supervisors:
            supervisor.wake_for_requests(was_requested=was_requested)


def _raise_file_limit() -> None:
    """Raise the limit of open files: every held lane opens a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
