"""Opens the services that all sources of a process share, and closes them in the reverse order."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

from streamer.apply.lanes.hot_lanes import HotLanes
from streamer.apply.lanes.queue_budget import Budget
from streamer.apply.lanes.spool import SpoolDirectory
from streamer.apply.write.commit_pace import CommitPace
from streamer.apply.write.planner import Planner
from streamer.apply.write.target_transaction import TargetTransaction
from streamer.apply.write.worker import LOCK_SECONDS, Worker
from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.positions import AcknowledgedPositions
from streamer.bookkeeping.source_lock import LockSession
from streamer.config.settings import Settings
from streamer.copy.copy_context import SyncSettings
from streamer.copy.source_turns import CopyTurns
from streamer.copy.spark.launcher import SparkLauncher
from streamer.drain.drainer import Drainer
from streamer.observability.metrics import Metrics
from streamer.runtime.process.source_queries import FindSource, SourceQueries
from streamer.runtime.services import Services
from streamer.runtime.start_limit import Starts
from streamer.runtime.target_health import TargetHealth
from streamer.source.server.idle_connections import IdleConnections
from streamer.target.connection import TargetAddress
from streamer.target.idle_sessions import IdleSessions
from streamer.target.session_counts import hot_worker_count

QUEUE_BYTES_MAX: Final = 32 * 1024 * 1024
IDLE_SECONDS: Final = 2.0
"""How long a source connection stays open for the next step of a start."""


@asynccontextmanager
async def opened_services(
    settings: Settings,
    address: TargetAddress,
    target: TargetHealth,
    metrics: Metrics,
    launcher: SparkLauncher | None,
    *,
    holder: str,
    find_source: FindSource,
    tables_appeared: Callable[[str], None],
    discovery_interval: float,
) -> AsyncIterator[Services]:
    """Yield the services. Connections open at the first use, so the services also start during an
    outage of the target.

    *launcher*: the launcher of a Spark process that is already starting. *holder*: host and pid of
    this process.
    """
    async with AsyncExitStack() as opened:
        spools = SpoolDirectory(settings.spool.path)
        opened.callback(spools.close)
        bookkeeping = Bookkeeping(address)
        opened.push_async_callback(bookkeeping.close)
        sources = IdleConnections(IDLE_SECONDS)
        opened.push_async_callback(sources.close)
        targets = IdleSessions(address)
        opened.push_async_callback(targets.close)
        planner = _make_planner(address, SourceQueries(find_source, sources))
        opened.push_async_callback(planner.close)
        locks = LockSession(address, holder)
        opened.push_async_callback(locks.close)
        budget = Budget(QUEUE_BYTES_MAX)
        workers = _make_workers(settings, address, metrics, planner, budget)
        launcher = launcher or SparkLauncher(
            settings.sync.spark_master,
            settings.sync.jobs,
            spools.path,
            settings.sync.spark_settings,
            allow_insecure=settings.sync.allow_insecure_spark,
        )
        launcher.directory = spools.path
        yield Services(
            address=address,
            bookkeeping=bookkeeping,
            sources=sources,
            targets=targets,
            locks=locks,
            positions=AcknowledgedPositions(locks),
            workers=workers[: settings.workers],
            hot_workers=workers[settings.workers :],
            drainer=Drainer(address, planner, metrics, conflicts_kept=settings.conflicts_kept),
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
                total_rows_per_second=settings.sync.total_rows_per_second,
                total_bytes_per_second=settings.sync.total_bytes_per_second,
                resumable_above=settings.sync.resumable_above,
                target_namespace=settings.target.schema_,
            ),
            target_namespace=settings.target.schema_,
            by_transaction=settings.consistency == "transaction",
            heartbeat_interval=settings.heartbeat_interval,
            target=target,
            discovery_interval=discovery_interval,
            tables_appeared=tables_appeared,
            conflicts_kept=settings.conflicts_kept,
            starts=Starts(),
            copy_turns=CopyTurns(settings.sync.sources_at_once, settings.sync.sources_per_server),
        )


def _make_planner(address: TargetAddress, queries: SourceQueries) -> Planner:
    return Planner(
        address,
        queries.name_types,
        queries.describe_types,
        queries.describe_expressions,
        queries.read_relations,
        queries.read_present,
    )


def _make_workers(
    settings: Settings,
    address: TargetAddress,
    metrics: Metrics,
    planner: Planner,
    budget: Budget,
) -> list[Worker]:
    """Return the ordinary workers, followed by the workers for hot lanes."""
    hot_lanes = HotLanes()
    workers = [
        Worker(
            number,
            TargetTransaction(
                address,
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
        for number in range(settings.workers + hot_worker_count(settings.workers))
    ]
    for worker in workers:
        label = metrics.queue_bytes.labels(str(worker.number))
        label.set_function(partial(getattr, worker, "queued_bytes"))
    for worker in workers[settings.workers :]:
        hot_lanes.add_worker(worker)
    return workers
