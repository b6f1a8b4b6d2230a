"""Plans the copies of a round under the round's snapshot.

1. the planner reads the definitions under that snapshot. A table that changed by then waits for
   the next round;
2. the planner defers indexes, cuts the tables into parts or chunks, and stores the parts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import psycopg
import structlog

from streamer.bookkeeping.deferred_indexes import defer_indexes, restore_indexes
from streamer.control.resync_options import RowScope
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_in_chunks import (
    OTHER_TARGET,
    RewrittenError,
    begin_chunks,
    choose_columns,
    cut_into_parts,
    find_change,
    find_chunk,
    size_of_chunk,
)
from streamer.copy.copy_query import copy_source, part_bytes
from streamer.copy.copy_queue import CopyQueue
from streamer.copy.copy_snapshot import (
    HeldSnapshot,
    TableSeen,
    is_same,
    read_table_seen,
    read_tables_seen,
)
from streamer.copy.finish_copies import Finisher
from streamer.copy.gap_reports import find_gaps, read_present_partitions, store_present_partitions
from streamer.copy.parts.ctid_ranges import cut, task_rate
from streamer.copy.parts.part_copier import CopyEnds
from streamer.copy.prepare_copy import TOGETHER, TableCopy, store_parts
from streamer.copy.reach_point import reach_with_snapshot
from streamer.copy.shared_copies import unguarded_error
from streamer.copy.staging_tables import create_stage
from streamer.copy.stalled_copies import CopyReports
from streamer.errors.error_classes import (
    Retry,
    SourceContentionError,
    StreamerError,
    SyncAgainError,
)
from streamer.mapping.relation_names import RelationName
from streamer.mapping.sid_and_history_columns import SID
from streamer.schema_changes.target_definitions import plan_definitions
from streamer.source.connection import Connection, first_line, login_of_source, translate
from streamer.source.server.wait_limits import reporting_blockers
from streamer.source.slot_and_publications.publication import (
    Publication,
    membership_fingerprint,
    read_publications,
)
from streamer.target.connection import TargetConnection, login_of_target
from streamer.util.failpoints import failpoint

log = structlog.get_logger()

DEFER_BYTES_MIN: Final = 4 * 1024 * 1024
"""The indexes of smaller tables stay, because to drop and build indexes takes longer than the
copy.
"""


def find_unfinished(queue: CopyQueue, copies: Sequence[TableCopy]) -> list[TableCopy]:
    """Return the *copies* that are not done.

    A table that lost changes meanwhile waits for an operator's resync. For a cancelled copy there
    is a later request.
    """
    for copy in copies:
        if not queue.is_copying(copy.mapped):
            copy.is_done = True
            queue.remove(copy.mapped)
    return [copy for copy in copies if not copy.is_done]


class CopyPlanner:
    """Plans the copies of one round, after its snapshot."""

    def __init__(
        self,
        context: CopyContext,
        queue: CopyQueue,
        reports: CopyReports,
        finisher: Finisher,
        snapshot: HeldSnapshot,
    ) -> None:
        self._context = context
        self._queue = queue
        self._reports = reports
        self._finisher = finisher
        self._snapshot = snapshot

    async def plan(self, copies: Sequence[TableCopy]) -> None:
        """Plan the *copies* that the snapshot allows; the other copies leave the round."""
        for copy in copies:
            copy.snapshot = self._snapshot
        await self._read_definitions(copies)
        failpoint("sync.guarded")
        await self._plan(find_unfinished(self._queue, copies))
        failpoint("sync.planned")

    async def _read_definitions(self, copies: Sequence[TableCopy]) -> None:
        """Read the definitions again, under the snapshot.

        No later change contains a column that a session added and filled before the snapshot. A
        table that the application keeps rewriting must not block the copies of other tables.
        """
        publications = await read_publications(
            self._snapshot.plain, self._context.source, self._context.server.version
        )
        seen = await self._read_many(copies)
        for copy in copies:
            if (table := seen.get(copy.relation.name)) is not None:
                await self._use_definition(copy, table, publications.values())
                continue
            plain = copy.plain
            await plain.execute("savepoint look")
            try:
                table = await reporting_blockers(
                    self._context.source,
                    self._context.server,
                    plain,
                    self._read_table(copy, plain),
                    partial(self._reports.show_sessions, [copy.mapped]),
                )
            except SourceContentionError as exc:
                await self._finisher.retry_later(copy, f'"{copy.name}" is locked: {exc.message}')
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._finisher.refuse_copy(copy, exc)
            else:
                await self._use_definition(copy, table, publications.values())
            if not plain.closed:  # release the locks taken since the savepoint
                await plain.execute("rollback to savepoint look")
        await self._reports.show_wait([copy.mapped for copy in copies], None)

    async def _read_many(self, copies: Sequence[TableCopy]) -> dict[RelationName, TableSeen]:
        """Read many ordinary tables at once; omitted tables need `_read_table`."""
        names = [
            copy.relation.name
            for copy in copies
            if copy.lock is None and not copy.relation.is_partitioned
        ]
        seen: dict[RelationName, TableSeen] = {}
        plain = self._snapshot.plain
        for first in range(0, len(names), TOGETHER):
            await plain.execute("savepoint look")
            seen |= await read_tables_seen(plain, names[first : first + TOGETHER])
            await plain.execute("rollback to savepoint look")
        return seen

    async def _use_definition(
        self, copy: TableCopy, table: TableSeen | None, publications: Iterable[Publication]
    ) -> None:
        """Use the definition of the snapshot for *copy*, if it equals the prepared definition."""
        if table is None or not is_same(copy.relation, table.relation):
            await self._finisher.retry_changed(copy, "when its copy began")
        elif not self._is_published(table, publications):
            reason = f'"{copy.name}" was not yet published when its copy began'
            await self._finisher.retry_later(copy, reason)
        else:
            copy.use_definition(table.relation)
            copy.seen = table

    def _is_published(self, table: TableSeen, publications: Iterable[Publication]) -> bool:
        """Whether the stream contains all changes after the snapshot.

        If a session drops and creates a table again, the guard publishes the new table a moment
        later. PostgreSQL 12 publishes the leaves of a partitioned table instead.
        """
        identity = table.relation.identity
        if identity.is_partitioned and self._context.server.version < 13_00_00:
            return True
        return membership_fingerprint(publications, identity) is not None

    async def _read_table(self, copy: TableCopy, plain: Connection) -> TableSeen | None:
        table = await read_table_seen(
            plain, copy.relation.name, is_partitioned=copy.relation.is_partitioned
        )
        # A copy of some rows may omit rows of an attached partition, so only a whole copy records
        # partitions. A chunk reads only rows after the border, so the first chunk records the
        # partitions.
        if table is not None and table.relation.is_partitioned and copy.scope.is_whole:
            if copy.scope.is_to_point:  # store these only after the copy, which may fail
                present = await read_present_partitions(plain, [copy.mapped])
                return replace(table, leaves=present.get(copy.mapped))
            await store_present_partitions(self._context.bookkeeping, plain, [copy.mapped])
        return table

    # ---- 4: parts ------------------------------------------------------------------------------

    async def _plan(self, copies: Sequence[TableCopy]) -> None:
        """Cut relations into parts, and store the parts of all, because tables can be many."""
        async with self._context.target() as target:
            planned: list[TableCopy] = []
            for copy in copies:
                try:
                    await self._plan_one(target, copy)
                    if not copy.is_done:
                        planned.append(copy)
                except SyncAgainError as exc:
                    await self._finisher.retry_later(copy, exc.message)
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
        """Store the definitions to create after the copy; a failure must not stop the copy."""
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
        await self._finisher.refuse_copy(copy, error)

    async def _plan_one(self, target: TargetConnection, copy: TableCopy) -> None:
        settings, relation = self._context.settings, copy.relation
        if copy.is_disjoint and copy.scope.is_to_point and copy.filled is None:
            await self._refuse_unguarded(copy)
        # Neither server can compute a hash, so a comparison needs staged rows.
        is_hashed = bool(copy.mapped.mapping.rule.hashes)
        if copy.scope.is_to_point and not copy.scope.resync.is_partial and not is_hashed:
            await self._find_differences(copy)
        source = copy_source(copy.query_input, self._context.server.version, target.server_version)
        copy.columns = source.names
        size = part_bytes(
            relation.size_bytes,
            relation.row_count_estimate,
            *settings.rates_of_task,
        )
        if await self._plan_chunk(target, copy, size):
            return
        copy.parts = cut(source, part_bytes=size)
        if copy.is_staged:
            await create_stage(target, copy.mapped.relation_id, copy.table, copy.columns)
        elif settings.defer_indexes and is_large(copy.seen):
            await _defer_indexes(target, copy)

    async def _refuse_unguarded(self, copy: TableCopy) -> None:
        """Refuse to compare rows by keys that the target has never checked.

        Raises SharedTableError.
        """
        context = self._context
        async with context.sources.connection(context.source) as source:
            gaps = await find_gaps(
                context.bookkeeping, source, [copy.mapped], checks_columns=not context.captures
            )
        if gaps.by_relation:
            raise unguarded_error(copy.mapped)

    async def _plan_chunk(self, target: TargetConnection, copy: TableCopy, size: int) -> bool:
        """Plan the next chunk of a large table; return False if the copy has no chunks.

        If the table has changed since the last chunk, the copy begins again in the next round.
        """
        copied = copy.mapped.state.chunks
        if copied is not None:
            if (reason := find_change(copy, copied)) is not None:
                self._queue.rewritten(copy.mapped, in_vain=True)
                forgets = reason == OTHER_TARGET and not copy.was_created
                copy.is_done = True
                await self._finisher.begin_again(copy.mapped, reason, forgets=forgets)
                return True
            await reach_with_snapshot(self._context.events, copy)
            failpoint("sync.at_point")
        else:
            limit = self._context.settings.resumable_above
            is_possible = not copy.is_staged and not copy.scope.is_to_point and copy.rows is None
            is_possible = is_possible and copy.filled is None and copy.seen.can_split
            if not is_possible or copy.seen.size_bytes <= limit:
                return False
            columns = await choose_columns(self._snapshot.plain, target, copy)
            may_cut = self._queue.may_cut(copy.mapped)
            if isinstance(columns, str) or not may_cut:
                return False
            if not self._context.events.may_copy_in_chunks(copy.mapped):
                return False
            # An earlier copy may have dropped more indexes.
            await restore_indexes(target, copy.target.name, copy.mapped.relation_id)
            may_defer = self._context.settings.defer_indexes and is_large(copy.seen)
            if may_defer and not self._context.captures:  # the stream may drop or rename an index
                await _defer_indexes(target, copy, is_streamed=True)
            copied = begin_chunks(copy, columns, limit)
        chunk_size = size_of_chunk(copy, copied.next_bytes, size)
        try:
            copy.chunk = await find_chunk(copy.plain, copy, copied, chunk_size)
        except psycopg.errors.LockNotAvailable as exc:
            await self._finisher.retry_later(copy, f'"{copy.name}" is locked: {first_line(exc)}')
            return True
        except psycopg.errors.InsufficientPrivilege as exc:
            raise translate(exc, self._context.label) from exc
        except (RewrittenError, psycopg.ProgrammingError, psycopg.DataError):
            # The statements name columns and types as of the snapshot.
            await self._finisher.retry_changed(copy, "when its chunk began")
            return True
        versions = self._context.server.version, target.server_version
        copy.parts = cut_into_parts(copy, copy.chunk, chunk_size, *versions)
        return True

    async def _find_differences(self, copy: TableCopy) -> None:
        """Compare the table at the consistent point, so that the copy reads only rows that
        differ.
        """
        self._context.launcher.prepare()  # Spark starts meanwhile
        await reach_with_snapshot(self._context.events, copy)
        context = self._context
        ends = await read_ends(context, [copy], self._snapshot, context.settings.jobs)
        differences = await context.find_differences(context, copy, ends)
        failpoint("sync.compared")
        if differences is not None:
            copy.differences = RowScope(differences=differences)


async def read_ends(
    context: CopyContext, copies: Sequence[TableCopy], snapshot: HeldSnapshot, task_count: int
) -> CopyEnds:
    """Return the facts that tasks need to connect to both servers and to read *copies*."""
    settings = context.settings
    return CopyEnds(
        source_url=await login_of_source(context.source),
        target_url=await login_of_target(settings.target_url),
        snapshot_name=snapshot.snapshot_name,
        application_name=context.task_name,
        server=context.server.identity,
        fence=context.fence.parameters,
        rows_per_second=task_rate(settings.rows_per_second, settings.jobs, task_count),
        total_rows_per_second=settings.total_rows_per_second,
        total_bytes_per_second=settings.total_bytes_per_second,
        hash_keys={
            hashed.check: hashed.key.reveal()
            for copy in copies
            for hashed in copy.mapped.mapping.rule.hashes
        },
    )


def is_large(seen: TableSeen) -> bool:
    """Whether a table is large enough to drop its indexes during the copy and build them
    afterwards. Pure.
    """
    return seen.size_bytes >= DEFER_BYTES_MIN


async def _defer_indexes(
    target: TargetConnection, copy: TableCopy, *, is_streamed: bool = False
) -> None:
    # These indexes serve rows of other sources.
    if not await target.fetch_value(f"select exists (select from {copy.target.rows})"):
        key = None
        if is_streamed:
            relation = copy.relation
            named = map(copy.mapped.mapping.target_column, relation.key + relation.primary_key)
            key = {SID, *(name for name in named if name is not None)}
        await defer_indexes(target, copy.target.name, key=key)
