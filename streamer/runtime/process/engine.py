"""The long-running process: services that all sources share, and a supervisor for each source.

The process stops in two phases. First the readers end and dispatched changes become durable; then
the pipelines acknowledge these changes, so that a restart does not repeat them. After a time limit
the process drops the remaining changes. No change is lost: only durable changes are acknowledged.
"""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from streamer.apply.lanes.hot_lanes import HotLanes, place_count
from streamer.apply.lanes.queue_budget import Budget
from streamer.apply.lanes.spool import SpoolDirectory
from streamer.apply.write.commit_pace import CommitPace
from streamer.apply.write.planner import Planner
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.worker import LOCK_SECONDS, Worker
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import migrate, read_installation
from streamer.bookkeeping.positions import AcknowledgedPositions
from streamer.bookkeeping.replicas import Fleet
from streamer.bookkeeping.requests import CHANNEL, WAITING, WAITING_FOR_TABLES
from streamer.bookkeeping.source_lock import LockSession
from streamer.bookkeeping.sources import SourceRecord, forget_source, read_source_records
from streamer.config.settings import Settings
from streamer.copy.copy_context import SyncSettings, end_tasks
from streamer.copy.source_turns import CopyTurns
from streamer.copy.spark.launcher import SparkLauncher
from streamer.drain.drainer import Drainer
from streamer.errors.error_classes import MappingError, Retry, SourceError, StreamerError
from streamer.indexes.index_builder import IndexBuilder
from streamer.indexes.index_restorer import IndexRestorer
from streamer.mapping.lost_mapping import MappingProblem, find_lost_mapping
from streamer.mapping.rules import Mapping, SourceMapping, find_source
from streamer.mapping.shared_targets import find_clashes
from streamer.observability.metrics import Metrics
from streamer.postgres.credentials import (
    password_generation,
    renew_password,
    replace_password,
)
from streamer.postgres.password_source import PasswordUnavailableError
from streamer.postgres.secret import Secret
from streamer.report.problems import Problem, of_mapping
from streamer.runtime.health.gauges import ScrapeFacts, count_problems, families, read_facts
from streamer.runtime.health.problem_log import ProblemLog
from streamer.runtime.health.readiness import Reason, find_problems, reason_of
from streamer.runtime.health.wait_log import report_waits
from streamer.runtime.installation_id import Installation
from streamer.runtime.process.planner_questions import SourceQuestions
from streamer.runtime.process.standing_verification import Verification, VerificationSettings
from streamer.runtime.replicas.mapping_follower import MappingFollower
from streamer.runtime.replicas.replica import Replica
from streamer.runtime.services import Health, Services
from streamer.runtime.session.supervisor import Supervisor
from streamer.runtime.slot_owner import SlotOwner
from streamer.runtime.start_limit import Starts
from streamer.runtime.tables.relations import resolve_at
from streamer.runtime.target_health import TargetHealth, TargetMonitor
from streamer.runtime.wal_retention.backlog_guard import BacklogGuard
from streamer.schema_changes.definition_builder import DefinitionBuilder
from streamer.source.connection import connection
from streamer.source.server.idle_connections import IdleConnections
from streamer.source.slot_and_publications.slot import drop_slot_sql
from streamer.source.slot_and_publications.source_teardown import teardown_source
from streamer.source.timeline_branches import KnownPlace
from streamer.target.connection import TargetAddress
from streamer.util.backoff import Backoff
from streamer.util.containment import enduring
from streamer.util.lsn import EVERYTHING, Lsn

if TYPE_CHECKING:
    from streamer.mapping.relation_names import RelationName

log = structlog.get_logger()

QUEUE_BYTES_MAX: Final = 32 * 1024 * 1024
STOP_SECONDS: Final = 9.0
KEPT_SECONDS: Final = 2.0
"""How long a source connection stays open for the next step of a start."""


@dataclass(frozen=True, slots=True)
class StopCondition:
    """The condition for stopping without a signal."""

    at_lsn: Lsn | None = None
    when_caught_up: bool = False

    @property
    def lsn(self) -> Lsn | None:
        return EVERYTHING if self.when_caught_up else self.at_lsn


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
        """*is_partial*: further processes run the rest of the target's sources. *take_over*: names
        of sources (``DATABASE`` or ``DATABASE:SID``) whose slots a different installation may have
        used. *max_sources*: how many sources this process may run; None for an even share.
        *launcher*: of a Spark process that starts already.
        """
        self._launcher = launcher
        self._take_over = take_over
        self.metrics = Metrics(settings.http.metrics_tables_max)
        self.metrics.table_detail.count_tables = self._count_tables
        self.supervisors: list[Supervisor] = []
        self.bookkeeping: Bookkeeping | None = None
        """The bookkeeping in the target; None before the migrations and after the end."""
        self._settings = settings
        self._mapping = mapping
        self._condition = condition
        self._is_partial = is_partial
        self._max_sources = max_sources
        self._replica: Replica | None = None
        """This process among the replicas; None if the process runs all sources up to a point."""
        self.following = MappingFollower(lambda: self._mapping, lambda: None)
        self._address = TargetAddress.parse(settings.target.url)
        self._installation = Installation(settings.spool.path, settings.target.url.reveal())
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._lost: MappingProblem | None = None
        self._stopping = asyncio.Event()
        self._applying = asyncio.Lock()
        self._appeared: set[str] = set()
        """Labels of sources with new tables under their patterns."""
        self._has_appeared = asyncio.Event()
        self._services: Services | None = None
        self._group: asyncio.TaskGroup | None = None
        self._running: dict[Supervisor, asyncio.Task[None]] = {}
        self._guards: dict[str, tuple[BacklogGuard, asyncio.Task[None]]] = {}
        self._problem_log = ProblemLog(self.problems)
        self._guarding: asyncio.TaskGroup | None = None
        self._target_monitor = TargetMonitor(
            self._address, CHANNEL, self._is_request, self._pass_request, self.metrics.count_error
        )
        self.metrics.collect_with(self._gauge_facts, families)

    @property
    def mapping_problem(self) -> MappingProblem | None:
        """Why no source streams although the target has sources; None with a mapping."""
        return None if self._mapping.sources else self._lost

    @property
    def target(self) -> TargetHealth:
        return self._target_monitor.health

    @property
    def fleet(self) -> Fleet:
        """The replicas that this process knows."""
        return Fleet() if self._replica is None else self._replica.fleet

    def stop(self) -> None:
        """Ask the process to stop in order."""
        self._stopping.set()

    async def run(self) -> None:
        """Run to the end. Raises StreamerError if the process must end; ExceptionGroup: defects."""
        _raise_file_limit()
        bookkeeping = Bookkeeping(self._address)
        spools = SpoolDirectory(self._settings.spool.path)
        sources = IdleConnections(KEPT_SECONDS)
        questions = SourceQuestions(self._source_of, sources)
        planner = Planner(
            self._address,
            questions.name_types,
            questions.describe_types,
            questions.describe_expressions,
            questions.read_relations,
            questions.read_present,
        )
        try:
            async with asyncio.TaskGroup() as guarding:
                self._guarding = guarding
                watching = [
                    guarding.create_task(
                        enduring("checking the target", self._target_monitor.run), name="target"
                    ),
                    guarding.create_task(
                        enduring(
                            "reporting waits",
                            partial(report_waits, bookkeeping, self.target, self._healths),
                        ),
                        name="waits",
                    ),
                    guarding.create_task(
                        enduring(
                            "reporting problems",
                            partial(self._problem_log.run, bookkeeping, self.target),
                        ),
                        name="problems",
                    ),
                ]
                for source in self._mapping.sources:
                    self._guard(source)  # also while the target is away
                await self._migrate(bookkeeping)
                self.bookkeeping = bookkeeping
                services = self._build_services(bookkeeping, sources, spools, planner)
                if not self._stopping.is_set():
                    await self._warn_of_forgotten(bookkeeping)
                    await self._run_tasks(services)
                for _, task in self._guards.values():
                    task.cancel()
                for task in watching:
                    task.cancel()
        finally:
            self.bookkeeping = None
            if self._services is not None:
                await self._services.locks.close()
            await planner.close()
            await sources.close()
            await bookkeeping.close()
            spools.close()

    def _healths(self) -> list[tuple[str, Health]]:
        return [(supervisor.source.label, supervisor.health) for supervisor in self.supervisors]

    def _source_of(self, database: str, sid: str | None) -> SourceMapping | None:
        return find_source((supervisor.source for supervisor in self.supervisors), database, sid)

    async def _migrate(self, bookkeeping: Bookkeeping) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                await migrate(bookkeeping)
                await self._installation.learn(await read_installation(bookkeeping))
                return
            except StreamerError as exc:
                if exc.retry is not Retry.TIMED:
                    raise
                self.metrics.count_error(exc)
                backoff.log(log, "waiting for the target", exc)
                await backoff.wait()

    def _build_services(
        self,
        bookkeeping: Bookkeeping,
        sources: IdleConnections,
        spools: SpoolDirectory,
        planner: Planner,
    ) -> Services:
        settings, metrics = self._settings, self.metrics
        budget = Budget(QUEUE_BYTES_MAX)
        locks = LockSession(self._address, self._holder)
        workers = self._build_workers(planner, budget)
        workers, hot_workers = workers[: settings.workers], workers[settings.workers :]
        launcher = self._launcher or SparkLauncher(
            settings.sync.spark_master,
            settings.sync.jobs,
            spools.path,
            settings.sync.spark_settings,
            allow_insecure=settings.sync.allow_insecure_spark,
        )
        launcher.directory = spools.path
        return Services(
            address=self._address,
            bookkeeping=bookkeeping,
            sources=sources,
            locks=locks,
            positions=AcknowledgedPositions(locks),
            workers=workers,
            hot_workers=hot_workers,
            drainer=Drainer(
                self._address, planner, metrics, conflicts_kept=settings.conflicts_kept
            ),
            launcher=launcher,
            spools=spools,
            budget=budget,
            metrics=metrics,
            sync=SyncSettings(
                target_url=settings.target.url,
                create_tables=settings.target.create_tables,
                defer_indexes=settings.sync.defer_indexes,
                jobs=settings.sync.jobs,
                rows_per_second=settings.sync.rows_per_second,
                resumable_above=settings.sync.resumable_above,
                target_namespace=settings.target.schema_,
            ),
            target_namespace=settings.target.schema_,
            by_transaction=settings.consistency == "transaction",
            heartbeat_interval=settings.heartbeat_interval,
            take_over={
                source.label
                for source in self._mapping.sources
                if not {source.database, source.label}.isdisjoint(self._take_over)
            },
            target=self.target,
            discovery_interval=0 if self._condition.lsn else settings.discovery_interval,
            tables_appeared=self._tables_appeared,
            conflicts_kept=settings.conflicts_kept,
            starts=Starts(),
            copy_turns=CopyTurns(settings.sync.sources_at_once),
            later_turns=CopyTurns(settings.sync.sources_at_once),
        )

    def _build_workers(self, planner: Planner, budget: Budget) -> list[Worker]:
        """Return the ordinary workers, followed by the workers for hot lanes."""
        settings, metrics, hot_lanes = self._settings, self.metrics, HotLanes()
        workers = [
            Worker(
                number,
                TargetTransaction(
                    self._address,
                    f"streamer worker {number}",
                    metrics,
                    lock_seconds=LOCK_SECONDS,
                    conflicts_kept=settings.conflicts_kept,
                ),
                planner,
                budget,
                metrics,
                CommitPace(settings.commit_interval_min, settings.commit_interval),
                hot_lanes,
            )
            for number in range(settings.workers + place_count(settings.workers))
        ]
        for worker in workers:
            label = metrics.queue_bytes.labels(str(worker.number))
            label.set_function(partial(getattr, worker, "queued_bytes"))
        for worker in workers[settings.workers :]:
            hot_lanes.add_place(worker)
        return workers

    async def _run_tasks(self, services: Services) -> None:
        async with asyncio.TaskGroup() as group:
            common = [
                group.create_task(enduring(name, run, self._fail_sources), name=name)
                for name, run in (
                    *((f"worker {worker.number}", worker.run) for worker in services.all_workers),
                    ("drainer", services.drainer.run),
                )
            ]
            common.append(
                group.create_task(enduring("launcher", services.launcher.run), name="launcher")
            )
            definitions = DefinitionBuilder(self._address, self._led_mapping, self.metrics)
            common.append(
                group.create_task(enduring("definitions", definitions.run), name="definitions")
            )
            restorer = IndexRestorer(self._address, self.metrics)
            common.append(group.create_task(enduring("restorer", restorer.run), name="restorer"))
            if self._settings.target.create_fk_indexes:
                builder = IndexBuilder(
                    self._address, self._led_mapping, services.target_namespace, self.metrics
                )
                common.append(group.create_task(enduring("indexes", builder.run), name="indexes"))
            self._services, self._group = services, group
            if self._condition.lsn is None:
                self._replica = Replica(
                    services.locks,
                    services.bookkeeping,
                    lambda: self.supervisors,
                    self.metrics.count_error,
                    self.following,
                    address=self._settings.http.listen or None,
                    max_sources=self._max_sources,
                )
            for source in sorted(self._mapping.sources, key=lambda each: -each.priority):
                self._add(source)
            if self._replica is not None:
                common.append(
                    group.create_task(enduring("replica", self._replica.run), name="replica")
                )
            common.append(
                group.create_task(enduring("new tables", self._join_tables), name="new tables")
            )
            verifying = group.create_task(
                enduring("verification", self._verification(services.bookkeeping).run),
                name="verification",
            )
            await self._wait_for_end()
            verifying.cancel()
            if self._replica is not None:
                await self._replica.stop()
            async with self._applying:
                await self._stop(self.supervisors)
            for task in common:
                task.cancel()
            if self._replica is not None:
                await self._replica.sign_off()

    def _led_mapping(self) -> Mapping:
        """Return the sources for which this process does the work that replicas share."""
        if (replica := self._replica) is None:
            return self._mapping
        return replace(
            self._mapping,
            sources=tuple(
                source for source in self._mapping.sources if replica.leads(source.label)
            ),
        )

    def _verification(self, bookkeeping: Bookkeeping) -> Verification:
        rates = (self._settings.sync.rows_per_second, self._settings.verify_rows_per_second)
        return Verification(
            VerificationSettings(
                self._settings.verify_interval,
                min(rate for rate in rates if rate is not None),
                self._settings.target.url,
            ),
            bookkeeping,
            lambda: self._mapping,
            self.supervisors,
        )

    async def _fail_sources(self, error: StreamerError) -> None:
        """Restart all sources, because work for any of them was lost.

        Returns when each current attempt has ended: later changes must not overtake the lost work.
        """
        self.metrics.count_error(error)
        attempts = [(runner, runner.pipeline) for runner in self.supervisors if runner.pipeline]
        for _, pipeline in attempts:
            pipeline.source_failed(error)
        for supervisor, pipeline in attempts:
            await supervisor.until_ended(pipeline)

    async def _wait_for_end(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            while not stopping.done():
                waiting = {task for task in self._running.values() if not task.done()}
                if not waiting and self._condition.lsn is not None:
                    return  # every source has reached its stop position
                await asyncio.wait(
                    {*waiting, stopping}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            stopping.cancel()

    async def _stop(self, supervisors: Sequence[Supervisor]) -> None:
        """Stop sources in order; cancel those that exceed the time limit."""
        for supervisor in supervisors:
            supervisor.request_stop()
        tasks = [self._running.pop(supervisor) for supervisor in supervisors]
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

    # ---- a new mapping ---------------------------------------------------------------------------

    async def apply(self, mapping: Mapping) -> None:
        """Switch to *mapping*: add, change and remove sources while the remaining sources continue.

        Tables that are new at a source and match a pattern join, too. Raises ConfigurationError for
        an invalid mapping, and then no source has changed; any later error concerns a single
        source.
        """
        async with self._applying:
            if self._stopping.is_set():
                return
            if self._services is None:  # the target does not answer yet
                self._mapping = mapping
                if self._guarding is None:  # `run` has not begun, and reads the mapping later
                    return
                for label in self._guards.keys() - {source.label for source in mapping.sources}:
                    self._guards.pop(label)[1].cancel()
                for source in mapping.sources:
                    self._guard(source).change(self._guarded(source))
                return
            await _check_resolves(mapping)
            running = {supervisor.source.label: supervisor for supervisor in self.supervisors}
            new_sources = {source.label: source for source in mapping.sources}
            removed = [running[label] for label in sorted(running.keys() - new_sources.keys())]
            installation = await self._read_installation(removed) if removed else ""
            errors: list[StreamerError] = []
            for supervisor in removed:
                try:
                    await self._remove(supervisor, installation)
                # the supervisor has stopped, so the next sources may write its rows
                except StreamerError as exc:
                    errors.append(exc)
            for label, source in new_sources.items():
                if label not in running:
                    self._add(source)
                    continue
                try:
                    await running[label].change(source)
                except StreamerError as exc:
                    errors.append(exc)
            self._mapping = mapping
            if errors:
                raise errors[0]

    def confirm_mapping(self) -> None:
        """Publish the mapping of this process to the replicas after an operator's change."""
        self.following.confirm()

    def _tables_appeared(self, label: str) -> None:
        self._appeared.add(label)
        self._has_appeared.set()

    async def _join_tables(self) -> None:
        """Add new tables that match a pattern of their source."""
        while True:
            await self._has_appeared.wait()
            self._has_appeared.clear()
            async with self._applying:
                if self._stopping.is_set():
                    return
                labels, self._appeared = self._appeared, set()
                try:
                    await _check_resolves(self._mapping)
                    for supervisor in self.supervisors:
                        if supervisor.source.label in labels:
                            await supervisor.change(supervisor.source)
                except StreamerError as exc:
                    log.error("new tables cannot join", error=str(exc), **exc.log_fields)

    async def renew_passwords(self, target: Secret) -> None:
        """Reconnect, in order, each source with a changed password; all sources for the target's.

        *target*: the target's url as configured now. Streams continue until their dispatched
        changes are durable; workers reconnect before their next transaction.
        """
        old = password_generation(self._address.url)
        replace_password(self._address.url, target)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew("the target", self._address.url), name="target password")
            renewing = [
                (
                    runner,
                    group.create_task(
                        self._renew(runner.source.label, runner.source.url),
                        name=f"password of {runner.source.label}",
                    ),
                )
                for runner in self.supervisors
            ]
        is_all = password_generation(self._address.url) != old
        for supervisor, renewed in renewing:
            if is_all or renewed.result():
                log.info("password changed, reconnecting", source=supervisor.source.label)
                supervisor.begin_anew()

    @staticmethod
    async def _renew(name: str, url: Secret) -> bool:
        try:
            return await renew_password(url)
        except PasswordUnavailableError as exc:
            log.error("password not renewed, keeping connections", of=name, error=str(exc))
            return False

    def _add(self, source: SourceMapping) -> None:
        assert self._services is not None
        assert self._group is not None
        guard = self._guard(source)
        guard.runner = supervisor = Supervisor(source, self._services, guard)
        supervisor.stop_lsn = self._condition.lsn
        if self._replica is not None:
            supervisor.unassign()  # until this process takes the source
            self._replica.wake()
        self.supervisors.append(supervisor)
        self._running[supervisor] = self._group.create_task(
            supervisor.run(), name=f"source {source.label}"
        )

    def _guard(self, source: SourceMapping) -> BacklogGuard:
        """Return the guard of a source; start a guard if the source lacks one."""
        assert self._guarding is not None
        if source.label not in self._guards:
            spool = self._settings.spool
            guard = BacklogGuard(
                self._guarded(source),
                spool.path,
                SlotOwner(self._installation),
                is_lasting=spool.directory is not None,
            )
            task = self._guarding.create_task(guard.run(), name=f"guard {source.label}")
            self._guards[source.label] = guard, task
        return self._guards[source.label][0]

    def _guarded(self, source: SourceMapping) -> SourceMapping:
        """Return *source*; without its WAL limit if the source only runs up to a point."""
        if self._condition.lsn is None:
            return source
        return replace(source, max_retained_wal_bytes=None)

    async def _read_installation(self, removed: Sequence[Supervisor]) -> str:
        """Return the id that marks objects of removed sources as this installation's.

        Raises MappingError without the target: the source would continue, while a different source
        may be about to write its rows.
        """
        assert self._services is not None
        try:
            return await read_installation(self._services.bookkeeping)
        except StreamerError as exc:
            labels = ", ".join(f'"{supervisor.source.label}"' for supervisor in removed)
            raise MappingError(
                f"the mapping is unchanged: to remove {labels}, streamer needs its target: "
                f"{exc.message}",
                hint="restore the target, then reload or apply again",
            ) from exc

    async def _remove(self, supervisor: Supervisor, installation: str) -> None:
        """Stop a source, and remove its objects and bookkeeping; the target keeps its rows.

        A slot without a reader would retain the source's WAL until its disk is full. If a second
        replica runs the source, that replica removes the objects.
        """
        assert self._services is not None
        source = supervisor.source
        is_elsewhere = not supervisor.is_assigned and source.label in self.fleet.holders
        await self._stop([supervisor])
        self.supervisors.remove(supervisor)
        guard, task = self._guards.pop(source.label)
        await guard.journaling.stop_writing()
        task.cancel()
        await asyncio.wait([task])
        if is_elsewhere:
            await guard.journaling.discard()
            return
        try:
            if await self._forget(source, installation):
                await guard.journaling.discard()
        finally:
            if self._replica is not None:
                await self._replica.release(source.label)

    async def _forget(self, source: SourceMapping, installation: str) -> bool:
        """Remove the objects at a source, and its bookkeeping; return whether the slot was ours."""
        assert self._services is not None
        records = await read_source_records(self._services.bookkeeping)
        record = find_source(records, source.database, source.sid)
        if record is not None:
            # A task that continues would commit rows of a removed tenant.
            await self._end_copies(record)
        place = KnownPlace() if record is None else record.known_place
        result = await teardown_source(source, installation, place)
        if result.error is not None:
            log.error(
                "the source is removed, but its cleanup failed",
                source=source.label,
                error=result.error,
                run_there="; ".join(result.left_sql),
            )
        if record is not None and not result.is_elsewhere:
            await forget_source(self._services.bookkeeping, record.source_id)
        log.info("source removed", source=source.label)
        return not result.is_taken

    async def _end_copies(self, record: SourceRecord) -> None:
        assert self._services is not None
        try:
            await end_tasks(self._services.bookkeeping, record.source_id)
        except TimeoutError:
            log.error("a copy of a removed source still runs at the target", source=record.label)

    async def _warn_of_forgotten(self, bookkeeping: Bookkeeping) -> None:
        """Log the sources of the target that the configuration lacks: their slots lack a reader."""
        if self._is_partial:
            return
        records = await read_source_records(bookkeeping)
        self._lost = find_lost_mapping(
            len(self._mapping.sources), [record.label for record in records]
        )
        if self._lost is not None:
            log.error("the mapping was lost", error=self._lost.error, hint=self._lost.hint)
            return
        for record in records:
            if find_source(self._mapping.sources, record.database, record.sid) is None:
                log.warning(
                    "the target holds a source that the configuration lacks; its slot keeps WAL."
                    " Add the source again, or, if you no longer want it, drop the slot",
                    source=record.label,
                    to_drop_run_there=drop_slot_sql(record.slot),
                )

    def _is_request(self, payload: str) -> bool:
        """Handle a notification; return whether an operator's request caused the notification."""
        if payload not in (WAITING, WAITING_FOR_TABLES):
            return True
        for supervisor in self.supervisors:
            supervisor.store_position(of_tables=payload == WAITING_FOR_TABLES)
        return False

    def _pass_request(self, was_asked: bool) -> None:
        for supervisor in self.supervisors:
            supervisor.wake_for_requests(was_asked=was_asked)

    # ---- operators' views -----------------------------------------------------------------------

    def problems(self) -> list[Problem]:
        """Return the problems of all objects that this process runs."""
        guards = [guard for guard, _ in self._guards.values()]
        stored = self._problem_log.stored
        return find_problems(self.target, guards, self.supervisors, stored)

    def other_problems(self) -> list[Reason]:
        """Return the problems that do not keep a source from being in sync."""
        return [reason_of(problem) for problem in self.problems() if not problem.blocks]

    def readiness(self) -> list[Reason]:
        """Return the reasons why a source is not in sync; empty if all sources are."""
        reasons = [reason_of(problem) for problem in self.problems() if problem.blocks]
        if not self.supervisors:
            is_starting = self._services is None or bool(self._mapping.sources)
            state = "starting" if is_starting else "no sources"
            if (problem := self.mapping_problem) is not None:
                reasons.append(reason_of(of_mapping(problem.report, state)))
            else:
                reasons.append({"state": state})
        return reasons

    def _gauge_facts(self) -> ScrapeFacts:
        guards = [guard for guard, _ in self._guards.values()]
        facts = read_facts(
            self.supervisors, guards, self.target, self.metrics.table_detail, self.fleet
        )
        facts.problems.update(count_problems(self.problems()))
        return facts

    def _count_tables(self) -> int:
        return sum(len(supervisor.health.table_states) for supervisor in self.supervisors)


async def _check_resolves(mapping: Mapping) -> None:
    """Check that the rules fit the sources that answer. Raises MappingError."""
    writers: dict[RelationName, list[tuple[str, str | None]]] = {}
    for source in mapping.sources:
        try:
            async with connection(source) as plain:
                mapped, _ = await resolve_at(plain, source, mapping.target_namespace)
            for table in mapped:
                writers.setdefault(table.target, []).append((source.label, source.sid))
        except SourceError as exc:
            log.warning(
                "cannot check the rules against the target", source=source.label, error=str(exc)
            )
    for target, several in writers.items():
        for clash in find_clashes(target, several):
            raise MappingError(clash.message, hint=clash.hint)


def _raise_file_limit() -> None:
    """Raise the limit of open files: every held lane opens a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
