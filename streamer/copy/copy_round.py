"""A round of copies: the waiting tables, under one snapshot.

1. the target tables exist and fit, and the round decides where rows go: into the table, or into a
   staging table (`streamer.copy.prepare_copy`, `streamer.copy.staging_tables`); ``copying`` is
   stored;
2. a snapshot: exported by the new main slot, or by a temporary slot. A session of the round holds
   the snapshot, and the temporary slot is dropped (`streamer.copy.copy_snapshot`);
3. under that snapshot, the round reads the definitions again, and plans parts
   (`streamer.copy.plan_copies`);
4. Spark copies the parts (`streamer.copy.parts.part_copier`). A table that the application rewrote
   in several rounds is copied under a lock (`streamer.copy.copy_under_lock`);
5. after a relation's last part, the round switches the relation to streaming
(`streamer.copy.finish_copies`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.bookkeeping.copied_parts import PartRecord, read_ended_parts
from streamer.control.table_state import TableState
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_queue import CopyQueue
from streamer.copy.copy_snapshot import HeldSnapshot
from streamer.copy.copy_under_lock import LockedTable
from streamer.copy.copy_waits import CopyWaits
from streamer.copy.finish_copies import Finisher
from streamer.copy.gap_reports import store_present_partitions
from streamer.copy.parallel_finish import Finishing
from streamer.copy.parts.ctid_ranges import CopyPart, group
from streamer.copy.plan_copies import CopyPlanner, find_unfinished, read_ends
from streamer.copy.prepare_copy import TOGETHER, Pair, Preparation, TableCopy
from streamer.copy.refused_values import remedy_for_refusal
from streamer.copy.stalled_copies import CopyReports
from streamer.errors.error_classes import (
    Retry,
    SnapshotExpiredError,
    SourceContentionError,
    SparkJobError,
    StreamerError,
    SyncError,
    TargetContentionError,
    TargetFencedError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.observability.spans import Facts, Spans
from streamer.postgres.credentials import passwords_renewed
from streamer.schema_changes.changes_during_copy import ChangedDefinitions
from streamer.source.catalog import SourceRelation, read_relations
from streamer.source.connection import (
    Connection,
    translating,
)
from streamer.source.server.timeline import check_same_server_by_query
from streamer.source.server.wait_limits import read_locked, reporting_blockers, set_lock_timeout
from streamer.source.slot_and_publications.slot import ExportedSnapshot, create_slot, sync_slot_name
from streamer.target.connection import TargetConnection
from streamer.util.backoff import Backoff
from streamer.util.failpoints import failpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable

log = structlog.get_logger()

POLL_SECONDS: Final = 0.5
PREPARE_LOCK_SECONDS: Final = 10
"""The time for which a copy waits for a lock at the target before the next copy gets a turn."""


class Round:
    """A round of copies. An object serves one round."""

    def __init__(
        self,
        context: CopyContext,
        queue: CopyQueue,
        reports: CopyReports,
        finisher: Finisher,
    ) -> None:
        self._context = context
        self._queue = queue
        self._reports = reports
        self._finisher = finisher
        self._preparation = Preparation(
            context.source,
            context.server,
            context.address,
            ChangedDefinitions(context.source, context.events) if context.captures else None,
            create_tables=context.settings.create_tables,
        )
        self._copies: list[TableCopy] = []
        self._waits = CopyWaits(context, queue, reports)
        self._finishing = Finishing(context, finisher)

    async def run(
        self,
        batch: list[MappedRelation],
        exported: ExportedSnapshot | None,
        running: Iterable[int] = (),
    ) -> None:
        """Copy *batch* under the snapshot of *exported*, or under a new snapshot. *running*: the
        numbers of concurrent rounds of this source.

        Raises StreamerError if all remaining relations must wait for the next round.
        """
        async with AsyncExitStack() as sessions:
            if exported is not None:
                sessions.push_async_callback(exported.close)
            reporting = asyncio.create_task(self._waits.run(), name="copy waits")
            sessions.push_async_callback(self._waits.end, reporting)
            await self._context.end_former_tasks(running)
            for mapped in batch:
                if mapped.state.chunks is not None:
                    self._context.events.step(mapped, TableState.chunk_begins)
            await sessions.enter_async_context(self._finishing)
            await self._prepare(batch)
            if self._copies:
                snapshot = await self._take_snapshot(sessions, exported)
                with translating(self._context.label):
                    await self._copy(snapshot)

    @property
    def _unfinished(self) -> list[TableCopy]:
        return find_unfinished(self._queue, self._copies)

    # ---- 1: the target -------------------------------------------------------------------------

    async def _prepare(self, batch: list[MappedRelation]) -> None:
        context = self._context
        async with context.sources.connection(context.source) as source:
            await check_same_server_by_query(source, context.server)
            await set_lock_timeout(source)
            await reporting_blockers(
                context.source,
                context.server,
                source,
                self._prepare_at(source, batch),
                partial(self._reports.show_sessions, batch),
            )
            await self._reports.show_wait(batch, None)

    async def _prepare_at(self, source: Connection, batch: list[MappedRelation]) -> None:
        """Create or check the target tables; a relation for which that fails is in error and leaves
        the batch.
        """
        relations = await read_relations(source, [mapped.mapping.source for mapped in batch])
        marked = [mapped for mapped in batch if mapped.state.is_to_mark_synced]
        await store_present_partitions(self._context.bookkeeping, source, marked)
        async with self._context.idle_target() as target:
            await target.set_up_origin()  # `prepare` may remove rows
            await target.execute(f"set lock_timeout = '{PREPARE_LOCK_SECONDS}s'")
            to_mark_synced: list[Pair] = []
            to_copy: list[Pair] = []
            for mapped in batch:
                relation = relations.get(mapped.mapping.source)
                if relation is not None and not self._is_other_table(mapped, relation):
                    pairs = to_mark_synced if mapped.state.is_to_mark_synced else to_copy
                    pairs.append((mapped, relation))
                    continue
                # The guard of the source decides whether the table was renamed or dropped.
                self._queue.give_up(mapped)
                self._context.events.table_missing(mapped)
            for pairs in (to_mark_synced, to_copy):
                for first in range(0, len(pairs), TOGETHER):
                    await self._prepare_together(source, target, pairs[first : first + TOGETHER])
        self._waits.preparing = []

    def _is_other_table(self, mapped: MappedRelation, relation: SourceRelation) -> bool:
        """Whether *relation* has the name of *mapped*, but is not the published table.

        Tables may swap names, and the publication identifies tables by OIDs.
        """
        return self._context.captures and mapped.relid not in (None, relation.oid)

    async def _prepare_together(
        self, source: Connection, target: TargetConnection, pairs: list[Pair]
    ) -> None:
        """Prepare tables that are either all to be copied or all to be marked as in sync.

        After a failure, prepare each half separately, down to the tables that fail.
        """
        self._waits.preparing = [mapped for mapped, _ in pairs]
        remaining: list[TableCopy] = []
        try:
            copies = await self._preparation.prepare(source, target, pairs)
            if pairs[0][0].state.is_to_mark_synced:
                await self._finisher.mark_synced(target, copies)
                return
            remaining = await self._preparation.begin(target, copies)
        except StreamerError as exc:
            if isinstance(exc, TargetFencedError) and pairs[0][0].state.chunks is not None:
                self._context.events.source_failed(exc)  # the next attempt reads the state
            is_contention = isinstance(exc, TargetContentionError)
            if exc.retry is Retry.TIMED and not is_contention:
                raise
            if half := len(pairs) // 2:
                await self._prepare_together(source, target, pairs[:half])
                await self._prepare_together(source, target, pairs[half:])
                return
            mapped = pairs[0][0]
            if is_contention:
                name = mapped.mapping.source
                self._finisher.removal.remove(
                    mapped, f'"{name}" waits at the target: {exc.message}'
                )
            else:
                await self._finisher.refuse(mapped, exc)
            return
        for copy in copies:
            if copy not in remaining:
                failpoint("sync.prepared")
                self._queue.began(copy.mapped, copy.method.attempt)
                self._copies.append(copy)
                self._waits.copies.append(copy)
        for copy in remaining:
            await self._prepare_together(source, target, [(copy.mapped, copy.relation)])

    # ---- 2: the snapshot -----------------------------------------------------------------------

    async def _take_snapshot(
        self, sessions: AsyncExitStack, exported: ExportedSnapshot | None
    ) -> HeldSnapshot:
        """Hold a snapshot, and lock the tables that only a lock keeps equal to the snapshot.

        *sessions* closes the opened sessions.
        """
        context = self._context
        for copy in self._copies:
            if self._queue.needs_lock(copy.mapped):
                copy.lock = await LockedTable.connect(context.source, context.server)
                sessions.push_async_callback(copy.lock.close)
        relations = [copy.mapped for copy in self._copies]
        for copy in self._unfinished:
            context.events.step(copy.mapped, TableState.snapshot_begins)
        if exported is None:
            exported = await create_slot(
                context.source,
                sync_slot_name(context.source.slot),
                context.server,
                temporary=True,
                report=partial(self._reports.show_sessions, relations),
                passed=partial(context.events.snapshot_passes, relations),
            )
            sessions.push_async_callback(exported.close)
        await self._lock(exported)  # at once, before the application rewrites the tables again
        await self._reports.show_wait(relations, None)
        failpoint("sync.slot_created")
        snapshot = await HeldSnapshot.take_over(
            context.sources, context.source, context.server, exported
        )
        sessions.push_async_callback(snapshot.close)
        if context.check_timeline is not None:
            await context.check_timeline()  # the snapshot may be past a fork
        return snapshot

    async def _lock(self, exported: ExportedSnapshot) -> None:
        for copy in self._copies:
            if copy.lock is None:
                continue
            try:
                await copy.lock.lock(exported.snapshot_name, copy)
            except SourceContentionError as exc:
                await self._finisher.retry_later(copy, f'"{copy.name}" is locked: {exc.message}')
            else:
                log.info(
                    "copying the table under a lock, because each attempt met a rewrite",
                    source=self._context.label,
                    table=copy.name,
                )

    # ---- 3: the parts --------------------------------------------------------------------------

    async def _copy(self, snapshot: HeldSnapshot) -> None:
        """Copy all tables that the snapshot allows."""
        copies = self._unfinished
        for copy in copies:
            self._context.events.copy_began(copy.mapped, snapshot.consistent_point)
        self._reports.begin_round(copy.mapped for copy in copies)
        planner = CopyPlanner(self._context, self._queue, self._reports, self._finisher, snapshot)
        await planner.plan(copies)
        if self._unfinished:
            await self._run_job(snapshot)
        await snapshot.release()

    async def _run_job(self, snapshot: HeldSnapshot) -> None:
        """Copy the parts with Spark; finish each complete relation."""
        backoff = Backoff(first=0.5)
        submitted: list[CopyPart] | None = None
        while True:
            remaining = await self._finish_complete()
            if not self._unfinished:
                await self._finishing.wait()
                return
            if not remaining:
                if not any(copy.awaits_orphans for copy in self._unfinished):
                    await snapshot.release()  # all further work is at the target
                await self._finishing.wait(POLL_SECONDS)
                continue
            if remaining == submitted:
                await self._wait_after_empty_job(remaining, backoff)
            submitted = remaining
            copying = asyncio.create_task(self._copy_parts(remaining, snapshot), name="parts")
            failpoint("sync.job_started")
            try:
                await self._monitor_parts(copying, snapshot)
                failures = copying.result()
            except SparkJobError as exc:
                await snapshot.check()
                # Copied parts stay copied; the snapshot is still valid.
                unfinished = [c.mapped for c in self._unfinished]
                await self._reports.show_error(unfinished, ErrorReport.of(exc))
                backoff.log(log, "the Spark job is started again", exc)
                await backoff.wait()
                submitted = None
                continue
            finally:
                copying.add_done_callback(_forget)
                copying.cancel()
            if await self._handle_failures(failures):
                await backoff.wait()
                submitted = None

    async def _copy_parts(
        self, parts: list[CopyPart], snapshot: HeldSnapshot
    ) -> list[dict[str, Any]]:
        """Copy parts, mostly with Spark; return the failed parts with reasons."""
        locked = {c.mapped.relation_id: c.lock for c in self._copies if c.lock is not None}
        ranks = {copy.mapped.relation_id: copy.rank for copy in self._copies if copy.parts}
        tasks = group([part for part in parts if part.relation_id not in locked], ranks)
        count = len(tasks) + len(locked)
        ends = await read_ends(self._context, self._copies, snapshot, count)
        work: list[Awaitable[list[dict[str, Any]]]] = []
        for relation_id, session in locked.items():
            if own_parts := [part for part in parts if part.relation_id == relation_id]:
                work.append(session.copy(own_parts, ends))
        if tasks:
            listed = [[part.to_json() for part in task] for task in tasks]
            work.append(self._context.launcher.submit({"tasks": listed, "ends": asdict(ends)}))
        # A failed task must not suppress the results of the other tasks.
        async with passwords_renewed(self._context.source.url, self._context.settings.target_url):
            results = await asyncio.gather(*work, return_exceptions=True)
        failures: list[dict[str, Any]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            failures += result
        return failures

    async def _handle_failures(self, failures: list[dict[str, Any]]) -> bool:
        """Handle the failed parts (`streamer.copy.parts.part_copier.NotCopiedError`); return
        whether any part waits for a lock.

        Raises SnapshotExpiredError, SparkJobError, TargetMovedError.
        """
        unfinished = {copy.mapped.relation_id: copy for copy in self._unfinished}
        is_busy = False
        for failure in failures:
            copy, error = unfinished.get(failure["relation_id"]), failure["error"]
            match failure["kind"]:
                case "snapshot":
                    raise SnapshotExpiredError(f"the snapshot of the copy was lost: {error}")
                case "elsewhere":
                    async with self._context.target():
                        pass  # the connection proves that this process reaches the same target
                    raise SparkJobError(
                        f"a Spark task reached another server than this process: {error}",
                        hint="check that the Spark workers reach the same source and target hosts",
                    )
                case "busy":
                    is_busy = True
                case _ if copy is None or copy.is_done:
                    pass
                case "lost":
                    reason = f'copying "{copy.name}" was interrupted: {error}'
                    await self._finisher.retry_later(copy, reason)
                case "changed":
                    await self._finisher.retry_changed(copy, "while it was copied")
                case "refused" | "not_null" as kind:
                    if (transient := await self._finisher.find_transient(copy)) is not None:
                        await self._finisher.retry_later(copy, f"{error}; {transient}")
                        continue
                    copy.is_done = True
                    refused = SyncError(f'copying "{copy.name}": {error}')
                    async with self._context.bookkeeping.connection() as target:
                        name = failure["constraint"]
                        names = (None, name) if kind == "not_null" else (name, None)
                        refused.remedy = await remedy_for_refusal(
                            target, copy.mapped, copy.relation, copy.target, *names
                        )
                    fail = partial(self._finisher.fail, copy.mapped, ErrorReport.of(refused))
                    self._finisher.removal.remove(copy.mapped, then=fail)
        return is_busy

    async def _wait_after_empty_job(self, parts: list[CopyPart], backoff: Backoff) -> None:
        """Wait before the next job: the last job reported no error, but copied no part."""
        source = self._context.source
        error = SparkJobError(
            f"Spark has run {len(parts)} parts and copied none",
            hint="check that the Spark workers reach the same source and target hosts",
        )
        self._context.metrics.count_error(error, source.database, source.sid)
        backoff.log(log, "the Spark job is started again", error)
        await backoff.wait()

    # ---- 5: while and after parts are copied ---------------------------------------------------

    async def _finish_complete(self) -> list[CopyPart]:
        """Finish the relations whose parts are all copied; return the remaining parts."""
        active = self._unfinished
        ended = await read_ended_parts(
            self._context.bookkeeping, [copy.mapped.relation_id for copy in active]
        )
        # The round may take hours, and a job reports failures only at its end.
        await self._handle_failures([asdict(part) for part in ended if part.kind is not None])
        active = [copy for copy in active if not copy.is_done]
        copied = {(part.relation_id, part.part): part for part in ended if part.kind is None}
        if (spans := self._context.metrics.spans) is not None:
            self._add_spans(spans, active, copied.values())
        await self._reports.show_progress(Counter(relation_id for relation_id, _ in copied))
        remaining: list[CopyPart] = []
        for copy in active:
            missing = [p for p in copy.parts if (p.relation_id, p.part) not in copied]
            copy.has_copied_parts = len(missing) < len(copy.parts)
            remaining += missing
            if not missing and time.monotonic() >= copy.not_before:
                done = [copied[p.relation_id, p.part] for p in copy.parts]
                self._finishing.begin(
                    copy,
                    sum(part.rows_copied or 0 for part in done),
                    sum(part.bytes_copied or 0 for part in done),
                )
        self._finishing.check()
        return remaining

    def _add_spans(
        self, spans: Spans, active: Iterable[TableCopy], parts: Iterable[PartRecord]
    ) -> None:
        copies = {copy.mapped.relation_id: copy for copy in active}
        for part in parts:
            copy = copies.get(part.relation_id)
            if copy is None or part.part in copy.parts_with_span:
                continue
            if part.started_at and part.finished_at:
                copy.parts_with_span.add(part.part)
                facts: Facts = {
                    "source": self._context.label,
                    "table": copy.name,
                    "part": part.part,
                    "rows": part.rows_copied or 0,
                    "bytes": part.bytes_copied or 0,
                }
                spans.add_part(part.started_at, part.finished_at, facts)

    async def _monitor_parts(self, copying: "asyncio.Task[Any]", snapshot: HeldSnapshot) -> None:
        while True:
            done, _ = await asyncio.wait([copying], timeout=POLL_SECONDS)
            await self._finish_complete()
            locked = {} if done else await read_locked(snapshot.plain, self._context.task_name)
            self._waits.source_locks = find_waiting(self._unfinished, locked)
            if done:
                return


def find_waiting(copies: list[TableCopy], locked: dict[int, str]) -> dict[TableCopy, str]:
    """Return the copies that read a locked table, with the sessions that hold the lock. Pure.

    *locked*: the sessions that hold a lock, by the OID of the table.
    """
    return {
        copy: locked[oid]
        for copy in copies
        for heap in copy.seen.heaps
        for oid, _ in heap.stores
        if oid in locked
    }


def _forget(task: "asyncio.Task[Any]") -> None:
    """Retrieve the outcome of *task*: asyncio logs failures that no task retrieves."""
    if not task.cancelled():
        task.exception()
