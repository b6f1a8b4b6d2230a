"""One round of copies: the tables that wait, under one snapshot.

1. the target tables exist and fit, and the round decides where rows go: into the table, or into a
   staging table (`streamer.sync.prepare`, `streamer.sync.staging_tables`); ``copying`` is stored;
2. a snapshot: the one that the new main slot exported, or that of a temporary slot. A session of
   the round's own holds it, and the temporary slot goes (`streamer.sync.snapshot`);
3. the round reads the definitions again under that snapshot. A table that has changed by then waits
   for the next round;
4. the round defers indexes, plans and stores parts, and Spark copies them
   (`streamer.sync.copy_parts`). A table that the application rewrote in several rounds is copied
   under a lock (`streamer.sync.copy_under_lock`);
5. after a relation's last part, the round hands the relation over (`streamer.sync.hand_over`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psycopg
import structlog

from streamer.apply.lane import MappedRelation
from streamer.backoff import Backoff
from streamer.error_reports import ErrorReport
from streamer.errors import (
    Retry,
    SnapshotExpiredError,
    SourceContentionError,
    SparkJobError,
    StreamerError,
    SyncAgainError,
    SyncError,
    TargetContentionError,
    TargetFencedError,
)
from streamer.failpoints import failpoint
from streamer.mapping.names import RelationName
from streamer.mapping.resync import RowScope
from streamer.postgres.credentials import passwords_kept
from streamer.progress.copied_parts import read_ended_parts
from streamer.progress.deferred_indexes import defer_indexes, restore_indexes
from streamer.source.catalog import SourceRelation, read_relations
from streamer.source.connection import (
    Connection,
    first_line,
    login_of_source,
    translate,
    translating,
)
from streamer.source.publication import (
    Publication,
    membership_fingerprint,
    read_publications,
)
from streamer.source.slot import ExportedSnapshot, create_slot, sync_slot_name
from streamer.source.timeline import check_same_server_plainly
from streamer.source.wait_limits import read_locked, set_lock_timeout, watched
from streamer.sync.changed_definitions import ChangedDefinitions
from streamer.sync.chunks import (
    OTHER_TARGET,
    RewrittenError,
    begin_chunks,
    choose_columns,
    cut_into_parts,
    find_change,
    find_chunk,
    size_of_chunk,
)
from streamer.sync.context import CopyContext
from streamer.sync.copy_parts import CopyEnds
from streamer.sync.copy_query import copy_source, part_bytes
from streamer.sync.copy_queue import CopyQueue
from streamer.sync.copy_under_lock import LockedTable
from streamer.sync.copy_waits import CopyWaits
from streamer.sync.ctid_ranges import CopyPart, Heap, cut, group, task_rate
from streamer.sync.gap_reports import know_leaves, read_present
from streamer.sync.hand_over import Finisher
from streamer.sync.leave_round import Leaving
from streamer.sync.parallel_hand_over import Finishing
from streamer.sync.point import reach_with_snapshot
from streamer.sync.prepare import Pair, Preparation, TableCopy, store_parts
from streamer.sync.refused_values import way_for_values
from streamer.sync.snapshot import HeldSnapshot, TableSeen, is_same, look, look_together
from streamer.sync.staging_tables import create_stage
from streamer.sync.stalled_copies import CopyReports
from streamer.sync.target_definitions import plan_definitions
from streamer.target.connection import TargetConnection, login_of_target
from streamer.target.conventions import SID

if TYPE_CHECKING:
    from collections.abc import Awaitable

log = structlog.get_logger()

POLL_SECONDS: Final = 0.5
TOGETHER: Final = 50
"""How many tables are locked at a time while they are prepared, or their definitions read."""
DEFER_BYTES_MIN: Final = 4 * 1024 * 1024
"""The indexes of smaller tables stay: dropping and building them takes longer than the rows."""
PREPARE_LOCK_SECONDS: Final = 10
"""How long a copy waits for a lock at the target before others have their turn."""


class Round:
    """See the module. Used once."""

    def __init__(
        self,
        context: CopyContext,
        queue: CopyQueue,
        reports: CopyReports,
        finisher: Finisher,
        leaving: Leaving,
    ) -> None:
        self._context = context
        self._leaving = leaving
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
        self._locked: dict[TableCopy, LockedTable] = {}
        """Tables to copy under one lock."""
        self._snapshot: HeldSnapshot

    async def run(
        self,
        batch: list[MappedRelation],
        exported: ExportedSnapshot | None,
        running: Iterable[int] = (),
    ) -> None:
        """Copy *batch* under the snapshot of *exported*, or under a new one. *running*: the numbers
        of other rounds of this source.

        Raises StreamerError if all that are left have to wait for the next round.
        """
        async with AsyncExitStack() as sessions:
            if exported is not None:
                sessions.push_async_callback(exported.close)
            reporting = asyncio.create_task(self._waits.run(), name="copy waits")
            sessions.push_async_callback(self._waits.end, reporting)
            await self._context.end_former_tasks(running)
            for mapped in batch:
                if mapped.state.chunks is not None:
                    self._context.events.chunk_begins(mapped)
            await sessions.enter_async_context(self._finishing)
            await self._prepare(batch)
            if self._copies:
                await self._take_snapshot(sessions, exported)
                with translating(self._context.label):
                    await self._copy()

    @property
    def _unfinished(self) -> list[TableCopy]:
        """The copies still to be made.

        A table that was set aside meanwhile misses changes and waits for an operator's resync. A
        cancelled copy has its own later request.
        """
        self._drop_given_up()
        return [copy for copy in self._copies if not copy.is_done]

    def _drop_given_up(self) -> None:
        for copy in self._copies:
            if not self._queue.is_copying(copy.mapped):
                copy.is_done = True
                self._queue.remove(copy.mapped)

    async def _leave_to_next_round(self, copy: TableCopy, reason: str) -> None:
        copy.is_done = True
        await self._unlock(copy)
        self._leaving.leave(copy.mapped, reason)

    async def _leave_changed(self, copy: TableCopy, when: str) -> None:
        self._queue.rewritten(copy.mapped)
        await self._leave_to_next_round(copy, f'"{copy.name}" was altered or rewritten {when}')

    async def _refuse(self, copy: TableCopy, error: StreamerError) -> None:
        copy.is_done = True
        await self._unlock(copy)
        await self._finisher.refuse(copy.mapped, error)

    # ---- 1: the target -------------------------------------------------------------------------

    async def _prepare(self, batch: list[MappedRelation]) -> None:
        context = self._context
        async with context.sources.connection(context.source) as source:
            await check_same_server_plainly(source, context.server)
            await set_lock_timeout(source)
            await watched(
                context.source,
                context.server,
                source,
                self._prepare_at(source, batch),
                partial(self._reports.tell_sessions, batch),
            )
            await self._reports.tell_waiting(batch, None)

    async def _prepare_at(self, source: Connection, batch: list[MappedRelation]) -> None:
        """See to the target tables; a relation for which that fails is in error and left out."""
        relations = await read_relations(source, [mapped.mapping.source for mapped in batch])
        declared = [mapped for mapped in batch if mapped.state.is_to_declare]
        await know_leaves(self._context.bookkeeping, source, declared)
        async with self._context.target() as target:
            await target.set_up_origin()  # rows may be removed
            await target.execute(f"set lock_timeout = '{PREPARE_LOCK_SECONDS}s'")
            to_declare: list[Pair] = []
            to_copy: list[Pair] = []
            for mapped in batch:
                relation = relations.get(mapped.mapping.source)
                if relation is not None and not self._is_of_another(mapped, relation):
                    alike = to_declare if mapped.state.is_to_declare else to_copy
                    alike.append((mapped, relation))
                    continue
                # It may have another name now, or none: the guard of the source judges that.
                self._queue.give_up(mapped)
                self._context.events.table_missing(mapped)
            for alike in (to_declare, to_copy):
                for first in range(0, len(alike), TOGETHER):
                    await self._prepare_together(source, target, alike[first : first + TOGETHER])
        self._waits.preparing = []

    def _is_of_another(self, mapped: MappedRelation, relation: SourceRelation) -> bool:
        """Whether *relation* has the name of *mapped*, and is not the table that was published.

        Tables may exchange their names, and the publication knows them by their OIDs.
        """
        return self._context.captures and mapped.relid not in (None, relation.oid)

    async def _prepare_together(
        self, source: Connection, target: TargetConnection, pairs: list[Pair]
    ) -> None:
        """Prepare tables, which are all to be declared or all to be copied.

        If that fails, halves of them are tried, down to the tables that fail.
        """
        self._waits.preparing = [mapped for mapped, _ in pairs]
        left: list[TableCopy] = []
        try:
            copies = await self._preparation.prepare(source, target, pairs)
            if pairs[0][0].state.is_to_declare:
                await self._finisher.declare(target, copies)
                return
            left = await self._preparation.begin(target, copies)
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
                self._leaving.leave(mapped, f'"{name}" waits at the target: {exc.message}')
            else:
                await self._finisher.refuse(mapped, exc)
            return
        for copy in copies:
            if copy not in left:
                failpoint("sync.prepared")
                self._queue.began(copy.mapped, copy.attempt)
                self._copies.append(copy)
                self._waits.copies.append(copy)
        for copy in left:
            await self._prepare_together(source, target, [(copy.mapped, copy.relation)])

    # ---- 2: the snapshot -----------------------------------------------------------------------

    async def _take_snapshot(
        self, sessions: AsyncExitStack, exported: ExportedSnapshot | None
    ) -> None:
        """Hold a snapshot, and lock the tables that only a lock keeps equal to the snapshot.

        *sessions* closes the opened sessions.
        """
        context = self._context
        for copy in self._copies:
            if self._queue.needs_lock(copy.mapped):
                locked = await LockedTable.connect(context.source, context.server)
                sessions.push_async_callback(locked.close)
                self._locked[copy] = locked
        relations = [copy.mapped for copy in self._copies]
        for copy in self._unfinished:
            context.events.snapshot_begins(copy.mapped)
        if exported is None:
            exported = await create_slot(
                context.source,
                sync_slot_name(context.source.slot),
                context.server,
                temporary=True,
                tell=partial(self._reports.tell_sessions, relations),
                passed=partial(context.events.snapshot_passes, relations),
            )
            sessions.push_async_callback(exported.close)
        await self._lock(exported)  # at once, before the tables are rewritten again
        await self._reports.tell_waiting(relations, None)
        failpoint("sync.slot_created")
        self._snapshot = await HeldSnapshot.take_over(context.source, context.server, exported)
        sessions.push_async_callback(self._snapshot.close)
        if context.look is not None:
            await context.look()  # before a position behind a fork counts

    async def _lock(self, exported: ExportedSnapshot) -> None:
        for copy, locked in list(self._locked.items()):
            try:
                await locked.lock(exported.snapshot_name, copy)
            except SourceContentionError as exc:
                await self._leave_to_next_round(copy, f'"{copy.name}" is locked: {exc.message}')
            else:
                log.info(
                    "table is copied under a lock, because each round met a rewrite of it",
                    source=self._context.label,
                    table=copy.name,
                )

    async def _unlock(self, copy: TableCopy) -> None:
        """Let go of a table as soon as its copy needs the lock no more."""
        if copy in self._locked:
            await self._locked.pop(copy).close()

    # ---- 3: definitions ------------------------------------------------------------------------

    async def _copy(self) -> None:
        """Copy all tables that the snapshot allows."""
        for copy in self._unfinished:
            copy.consistent_point = self._snapshot.consistent_point
            copy.source_time = self._snapshot.source_time
            copy.snapshot_taken_at = self._snapshot.taken_at
            self._context.events.copy_began(copy.mapped, self._snapshot.consistent_point)
        self._reports.begin_round(copy.mapped for copy in self._unfinished)
        await self._look()
        failpoint("sync.guarded")
        await self._plan()
        failpoint("sync.planned")
        if self._unfinished:
            await self._run_job()

    async def _look(self) -> None:
        """Read the definitions again, as the snapshot has them.

        A column that a session added and filled before the snapshot is in no later change. The
        other tables continue: one that is rewritten all the time must not block their copies.
        """
        looked = self._unfinished
        publications = await read_publications(
            self._snapshot.plain, self._context.source, self._context.server.version
        )
        seen = await self._look_together(looked)
        for copy in looked:
            if (found := seen.get(copy.relation.name)) is not None:
                await self._take_definition(copy, found, publications.values())
                continue
            locked = self._locked.get(copy)
            plain = self._snapshot.plain if locked is None else locked.plain
            await plain.execute("savepoint look")
            try:
                found = await watched(
                    self._context.source,
                    self._context.server,
                    plain,
                    self._look_at(copy, plain),
                    partial(self._reports.tell_sessions, [copy.mapped]),
                )
            except SourceContentionError as exc:
                await self._leave_to_next_round(copy, f'"{copy.name}" is locked: {exc.message}')
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._refuse(copy, exc)
            else:
                await self._take_definition(copy, found, publications.values())
            if not plain.closed:  # the locks since the savepoint are let go
                await plain.execute("rollback to savepoint look")
        await self._reports.tell_waiting([copy.mapped for copy in looked], None)

    async def _look_together(self, copies: list[TableCopy]) -> dict[RelationName, TableSeen]:
        """Look at many ordinary tables at a time; those left out need a look of their own."""
        names = [
            copy.relation.name
            for copy in copies
            if copy not in self._locked and not copy.relation.is_partitioned
        ]
        seen: dict[RelationName, TableSeen] = {}
        plain = self._snapshot.plain
        for first in range(0, len(names), TOGETHER):
            await plain.execute("savepoint look")
            seen |= await look_together(plain, names[first : first + TOGETHER])
            await plain.execute("rollback to savepoint look")
        return seen

    async def _take_definition(
        self, copy: TableCopy, found: TableSeen | None, publications: Iterable[Publication]
    ) -> None:
        """Copy by the definition that was found, if the table is the one that was prepared."""
        if found is None or not is_same(copy.relation, found.relation):
            await self._leave_changed(copy, "as its copy began")
        elif not self._is_published(found, publications):
            reason = f'"{copy.name}" was not published yet as its copy began'
            await self._leave_to_next_round(copy, reason)
        else:
            copy.reads(found.relation)
            copy.heaps, copy.can_split, copy.storage = found.heaps, found.can_split, found.storage

    def _is_published(self, found: TableSeen, publications: Iterable[Publication]) -> bool:
        """Whether the stream brings all changes behind the snapshot.

        A table that was dropped and created again is published again by the guard, which needs a
        moment. PostgreSQL 12 publishes the leaves of a partitioned table instead.
        """
        identity = found.relation.identity
        if identity.is_partitioned and self._context.server.version < 13_00_00:
            return True
        return membership_fingerprint(publications, identity) is not None

    async def _look_at(self, copy: TableCopy, plain: Connection) -> TableSeen | None:
        found = await look(plain, copy.relation.name, is_partitioned=copy.relation.is_partitioned)
        # A copy of some rows may leave out those of a partition that came with rows. A chunk has
        # those behind its border only, so partitions are known as of the first chunk.
        if found is not None and found.relation.is_partitioned and copy.scope.is_whole:
            if copy.is_to_point:  # if it fails, the rows of a later partition are still missing
                copy.leaves = (await read_present(plain, [copy.mapped])).get(copy.mapped)
            else:
                await know_leaves(self._context.bookkeeping, plain, [copy.mapped])
        return found

    # ---- 4: parts ------------------------------------------------------------------------------

    async def _plan(self) -> None:
        """Cut relations into parts, and store them: together, because tables can be many."""
        async with self._context.target() as target:
            planned: list[TableCopy] = []
            for copy in self._unfinished:
                try:
                    await self._plan_one(target, copy)
                    if not copy.is_done:
                        planned.append(copy)
                except SyncAgainError as exc:
                    await self._leave_to_next_round(copy, exc.message)
                except StreamerError as exc:
                    await self._refuse_unless_timed(copy, exc)
            try:
                await store_parts(target, planned)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._store_one_by_one(target, planned)
            await self._plan_definitions(target, planned)

    async def _plan_definitions(self, target: TargetConnection, planned: list[TableCopy]) -> None:
        """Store the definitions to make after the copy; a failure must not stop that."""
        context, plain = self._context, self._snapshot.plain
        await plain.execute("savepoint definitions")
        try:
            await plan_definitions(
                context.source, context.settings.target_namespace, plain, target, planned
            )
        except (StreamerError, psycopg.Error) as exc:
            error = translate(exc, context.label) if isinstance(exc, psycopg.Error) else exc
            if error.retry is Retry.TIMED:
                raise error from exc
            log.error("definitions cannot be read", source=context.label, error=str(error))
        if not plain.closed:
            await plain.execute("rollback to savepoint definitions")

    async def _store_one_by_one(self, target: TargetConnection, planned: list[TableCopy]) -> None:
        """Find the table whose parts the target rejects."""
        for copy in planned:
            try:
                await store_parts(target, [copy])
            except StreamerError as exc:
                await self._refuse_unless_timed(copy, exc)

    async def _refuse_unless_timed(self, copy: TableCopy, error: StreamerError) -> None:
        if error.retry is Retry.TIMED:
            raise error
        await self._refuse(copy, error)

    async def _plan_one(self, target: TargetConnection, copy: TableCopy) -> None:
        settings, relation = self._context.settings, copy.relation
        # Neither server can compute a hash, so only staged rows show which ones differ.
        is_hashed = bool(copy.mapped.mapping.rule.hashes)
        if copy.is_to_point and not copy.resync.is_partial and not is_hashed:
            await self._find_differences(copy)
        rate = settings.rows_per_second
        source = copy_source(copy.order, self._context.server.version, target.server_version)
        copy.columns = source.names
        size = part_bytes(
            relation.size_bytes,
            relation.row_count_estimate,
            None if rate is None else rate / settings.jobs,
        )
        if await self._plan_chunk(target, copy, size):
            return
        copy.parts = cut(source, part_bytes=size)
        if copy.is_staged:
            await create_stage(target, copy.mapped.relation_id, copy.table, copy.columns)
        elif settings.defer_indexes and is_large(copy.heaps):
            await _defer_indexes(target, copy)

    async def _plan_chunk(self, target: TargetConnection, copy: TableCopy, size: int) -> bool:
        """Plan the next chunk of a large table; return False for a copy in one piece.

        If its table has changed since the chunk before, the copy begins again in the next round.
        """
        before = copy.mapped.state.chunks
        if before is not None:
            if (reason := find_change(copy, before)) is not None:
                self._queue.rewritten(copy.mapped, in_vain=True)
                copy.is_done = True
                forgets = reason == OTHER_TARGET and not copy.was_created
                await self._finisher.begin_again(copy.mapped, reason, forgets=forgets)
                return True
            await reach_with_snapshot(self._context.events, copy)
            failpoint("sync.at_point")
        else:
            limit = self._context.settings.resumable_above
            is_possible = not copy.is_staged and not copy.is_to_point and copy.rows is None
            is_possible = is_possible and copy.filled is None and copy.can_split
            if not is_possible or sum(heap.size_bytes for heap in copy.heaps) <= limit:
                return False
            columns = await choose_columns(self._snapshot.plain, target, copy)
            may_cut = self._queue.may_cut(copy.mapped)
            if isinstance(columns, str) or not may_cut:
                return False
            if not self._context.events.may_copy_in_chunks(copy.mapped):
                return False
            # An earlier copy may have dropped more.
            await restore_indexes(target, copy.target.name, copy.mapped.relation_id)
            may_defer = self._context.settings.defer_indexes and is_large(copy.heaps)
            if may_defer and not self._context.captures:  # the stream may drop or rename an index
                await _defer_indexes(target, copy, is_streamed=True)
            before = begin_chunks(copy, columns, limit)
        chunk_size = size_of_chunk(copy, before.next_bytes, size)
        locked = self._locked.get(copy)
        plain = self._snapshot.plain if locked is None else locked.plain
        try:
            copy.chunk = await find_chunk(plain, copy, before, chunk_size)
        except psycopg.errors.LockNotAvailable as exc:
            await self._leave_to_next_round(copy, f'"{copy.name}" is locked: {first_line(exc)}')
            return True
        except psycopg.errors.InsufficientPrivilege as exc:
            raise translate(exc, self._context.label) from exc
        except (RewrittenError, psycopg.ProgrammingError, psycopg.DataError):
            # The statements name its columns and their types as the snapshot has them.
            await self._leave_changed(copy, "as its chunk began")
            return True
        versions = self._context.server.version, target.server_version
        copy.parts = cut_into_parts(copy, copy.chunk, chunk_size, *versions)
        return True

    async def _find_differences(self, copy: TableCopy) -> None:
        """Compare the table at the consistent point, so that the copy brings what differs only."""
        self._context.launcher.prepare()  # Spark starts meanwhile
        await reach_with_snapshot(self._context.events, copy)
        ends = await self._ends(self._context.settings.jobs)
        found = await self._context.find_differences(self._context, copy, ends)
        failpoint("sync.compared")
        if found is not None:
            copy.found = RowScope(found=found)

    async def _run_job(self) -> None:
        """Let Spark copy the parts; finish each relation as it is complete."""
        backoff = Backoff(first=0.5)
        submitted: list[CopyPart] | None = None
        while True:
            remaining = await self._finish_complete()
            if not self._unfinished:
                await self._finishing.wait()
                return
            if not remaining:
                if not any(copy.awaits_strays for copy in self._unfinished):
                    await self._snapshot.close()  # what is left is work at the target
                await self._finishing.wait(POLL_SECONDS)
                continue
            if remaining == submitted:
                await self._wait_for_reach(remaining, backoff)
            submitted = remaining
            copying = asyncio.create_task(self._copy_parts(remaining), name="parts")
            failpoint("sync.job_started")
            try:
                await self._watch(copying)
                failures = copying.result()
            except SparkJobError as exc:
                await self._snapshot.check()
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
            if await self._settle(failures):
                await backoff.wait()
                submitted = None

    async def _copy_parts(self, parts: list[CopyPart]) -> list[dict[str, Any]]:
        """Copy parts, most of them with Spark; return the failed ones with their reasons."""
        alone = {copy.mapped.relation_id: session for copy, session in self._locked.items()}
        ranks = {copy.mapped.relation_id: copy.rank for copy in self._copies}
        tasks = group([part for part in parts if part.relation_id not in alone], ranks)
        ends = await self._ends(len(tasks) + len(alone))
        work: list[Awaitable[list[dict[str, Any]]]] = []
        for relation_id, session in alone.items():
            if mine := [part for part in parts if part.relation_id == relation_id]:
                work.append(session.copy(mine, ends))
        if tasks:
            listed = [[part.to_json() for part in task] for task in tasks]
            work.append(self._context.launcher.submit({"tasks": listed, "ends": asdict(ends)}))
        # One failure must not keep the others from reporting their results.
        async with passwords_kept(self._context.source.url, self._context.settings.target_url):
            results = await asyncio.gather(*work, return_exceptions=True)
        failures: list[dict[str, Any]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            failures += result
        return failures

    async def _ends(self, task_count: int) -> CopyEnds:
        context, settings = self._context, self._context.settings
        return CopyEnds(
            source_url=await login_of_source(context.source),
            target_url=await login_of_target(settings.target_url),
            snapshot_name=self._snapshot.snapshot_name,
            application_name=context.task_name,
            place=context.server.place,
            claim=context.claim.proof,
            rows_per_second=task_rate(settings.rows_per_second, settings.jobs, task_count),
            hash_keys={
                each.check: each.key.reveal()
                for copy in self._copies
                for each in copy.mapped.mapping.rule.hashes
            },
        )

    async def _settle(self, failures: list[dict[str, Any]]) -> bool:
        """Handle the failed parts (`streamer.sync.copy_parts.NotCopiedError`); tell whether some
        wait for a lock.

        Raises SnapshotExpiredError, SparkJobError, TargetMovedError.
        """
        self._drop_given_up()
        by_id = {copy.mapped.relation_id: copy for copy in self._copies}
        is_busy = False
        for failure in failures:
            copy, error = by_id[failure["relation_id"]], failure["error"]
            match failure["kind"]:
                case "snapshot":
                    raise SnapshotExpiredError(f"the snapshot of the copy is gone: {error}")
                case "elsewhere":
                    async with self._context.target():
                        pass  # proves that this process itself is where it was
                    raise SparkJobError(
                        f"a Spark task reached another server than this process: {error}",
                        hint="check that the Spark workers reach the same source and target hosts",
                    )
                case "busy":
                    is_busy = True
                case "lost" if not copy.is_done:
                    reason = f'copying "{copy.name}" was interrupted: {error}'
                    await self._leave_to_next_round(copy, reason)
                case "changed" if not copy.is_done:
                    await self._leave_changed(copy, "while it was copied")
                case "refused" if not copy.is_done:
                    if (transient := await self._finisher.find_transient(copy)) is not None:
                        await self._leave_to_next_round(copy, f"{error}; {transient}")
                        continue
                    copy.is_done = True
                    refused = SyncError(f'copying "{copy.name}": {error}')
                    async with self._context.bookkeeping.connection() as target:
                        refused.remedy = await way_for_values(
                            target, copy.mapped, copy.relation, copy.target
                        )
                    fail = partial(self._finisher.fail, copy.mapped, ErrorReport.of(refused))
                    self._leaving.leave(copy.mapped, then=fail)
        return is_busy

    async def _wait_for_reach(self, parts: list[CopyPart], backoff: Backoff) -> None:
        """A job ended well and copied nothing: its tasks did not find their parts."""
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
        """Finish relations without a part left to copy; return the parts of the others."""
        active = self._unfinished
        ended = await read_ended_parts(
            self._context.bookkeeping, [copy.mapped.relation_id for copy in active]
        )
        # Others of the round may take hours, and the failures of a job come at its end.
        await self._settle([asdict(part) for part in ended if part.kind is not None])
        active = [copy for copy in active if not copy.is_done]
        copied = {(part.relation_id, part.part): part for part in ended if part.kind is None}
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

    async def _watch(self, copying: "asyncio.Task[Any]") -> None:
        while True:
            done, _ = await asyncio.wait([copying], timeout=POLL_SECONDS)
            await self._finish_complete()
            locked = (
                {} if done else await read_locked(self._snapshot.plain, self._context.task_name)
            )
            self._waits.source_locks = find_waiting(self._unfinished, locked)
            if done:
                return


def is_large(heaps: Iterable[Heap]) -> bool:
    """Whether sorting the keys of a table once is worth dropping its indexes. Pure."""
    return sum(heap.size_bytes for heap in heaps) >= DEFER_BYTES_MIN


def find_waiting(copies: list[TableCopy], locked: dict[int, str]) -> dict[TableCopy, str]:
    """Return which copies read a table that another session has locked, with that. Pure.

    *locked*: the sessions that hold a lock, by the OID of its table.
    """
    return {
        copy: locked[oid]
        for copy in copies
        for heap in copy.heaps
        for oid, _ in heap.stores
        if oid in locked
    }


async def _defer_indexes(
    target: TargetConnection, copy: TableCopy, *, is_streamed: bool = False
) -> None:
    # Rows of others are served by these indexes.
    if not await target.fetch_value(f"select exists (select from {copy.target.rows})"):
        key = None
        if is_streamed:
            relation = copy.relation
            named = map(copy.mapped.mapping.target_column, relation.key + relation.primary_key)
            key = {SID, *(name for name in named if name is not None)}
        await defer_indexes(target, copy.target.name, key=key)


def _forget(task: "asyncio.Task[Any]") -> None:
    """Retrieve the outcome of *task*, if no other task did: asyncio logs unretrieved failures."""
    if not task.cancelled():
        task.exception()
