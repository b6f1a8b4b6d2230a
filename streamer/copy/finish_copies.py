"""The end of a table's copy: switched to streaming, or given up.

Completes a relation whose last part is in the target. A direct copy ends with the creation of
deferred indexes, a staged copy with a swap of the rows. The same transaction stores ``catching_up``
with the consistent point as progress. Then the lane may drain. A copy that fails leaves the target
unchanged.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.write.commit_counts import table_labels
from streamer.bookkeeping.copied_parts import add_parts
from streamer.bookkeeping.copies import (
    FinishedCopy,
    is_switched,
    switch_to_stream,
)
from streamer.bookkeeping.deferred_indexes import restore_indexes
from streamer.bookkeeping.relation_definitions import read_users
from streamer.bookkeeping.relation_states import (
    demand_again,
    demand_copy,
    fail_copy,
    forget_target,
    is_copy_due,
)
from streamer.control.resync_options import KeySet, RowScope
from streamer.control.table_state import CopyScope
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_in_chunks import OTHER_TARGET
from streamer.copy.copy_query import copy_source
from streamer.copy.copy_queue import CopyQueue
from streamer.copy.parts.ctid_ranges import CopyPart, cut
from streamer.copy.prepare_copy import TableCopy, swap_of
from streamer.copy.reach_point import reach_with_snapshot
from streamer.copy.refused_values import remedy_for_conflict
from streamer.copy.resync_scope import cut_keys, source_condition
from streamer.copy.round_removal import RoundRemoval
from streamer.copy.shared_copies import (
    advise_copy,
    begin_replacement,
    is_first_of_all,
    name_tables,
)
from streamer.copy.staging_tables import LOCK_SECONDS, drop_stages, swap_rows
from streamer.copy.swap_rows import WriteMode
from streamer.errors.error_classes import (
    ConflictError,
    Retry,
    SlotWaitError,
    SourceError,
    StreamerError,
    SyncAgainError,
    SyncError,
    TargetContentionError,
    TargetFencedError,
    TargetPrivilegeError,
)
from streamer.errors.error_reports import ErrorReport
from streamer.errors.remedies import Remedy, run
from streamer.schema_changes.changes_during_copy import alters_values
from streamer.schema_changes.target_definitions import make_before_switch
from streamer.source.catalog import read_relations
from streamer.target.connection import TargetConnection, transaction
from streamer.target.missing_grants import advise_grants
from streamer.target.persistent_connection import PersistentConnection
from streamer.util.failpoints import failpoint

log = structlog.get_logger()


class Finisher:
    """Ends copies of one source."""

    def __init__(
        self,
        context: CopyContext,
        queue: CopyQueue,
        request: Callable[[MappedRelation], None],
        removal: RoundRemoval,
    ) -> None:
        """*request* requests a new copy, or the next chunk."""
        self.removal = removal
        self._context = context
        self._queue = queue
        self._request = request

    async def retry_later(self, copy: TableCopy, reason: str) -> None:
        """Leave *copy* to the next round because of *reason*."""
        await self._end(copy)
        self.removal.remove(copy.mapped, reason)

    async def retry_changed(self, copy: TableCopy, when: str) -> None:
        self._queue.rewritten(copy.mapped)
        await self.retry_later(copy, f'"{copy.name}" was altered or rewritten {when}')

    async def refuse_copy(self, copy: TableCopy, error: StreamerError) -> None:
        await self._end(copy)
        await self.refuse(copy.mapped, error)

    async def _end(self, copy: TableCopy) -> None:
        copy.is_done = True
        lock, copy.lock = copy.lock, None
        if lock is not None:
            await lock.close()

    async def refuse(
        self, mapped: MappedRelation, error: StreamerError, when: str | None = None
    ) -> None:
        """Report that *mapped* cannot be copied; the round's remaining tables continue."""
        source = self._context.source
        self._context.metrics.count_error(error, source.database, source.sid)
        await self.advise(error, [mapped])
        report = ErrorReport.of(error)
        if when is not None:
            report = replace(report, text=f"{when}: {report.text}")
        await self.fail(mapped, report)

    async def advise(self, error: StreamerError, tables: Sequence[MappedRelation]) -> None:
        """Give *error* the statements that grant missing privileges on the targets of *tables*."""
        if isinstance(error, TargetPrivilegeError):
            async with self._context.bookkeeping.connection() as target:
                await advise_grants(error, target, [mapped.mapping for mapped in tables])

    async def fail(self, mapped: MappedRelation, error: ErrorReport) -> None:
        """Restore the target, then report the reason of the failure.

        The order matters: a table in state "error" has all its indexes, unless the server refuses
        to build an index. If an operator requested the copy again since its beginning, the next
        round tries again.

        A cancellation ends all rounds, and a removal would then begin in a closed task group.
        """
        try:
            error = await self._clear_up(mapped, error)
            await self._store_failure(mapped, error)
        except StreamerError:
            self.removal.remove(mapped)
            raise
        self.removal.remove(mapped)

    async def _clear_up(self, mapped: MappedRelation, error: ErrorReport) -> ErrorReport:
        try:
            async with self._context.target() as target:
                await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
                await drop_stages(target, [mapped.relation_id])
                await restore_indexes(target, mapped.mapping.target, mapped.relation_id)
        except StreamerError as exc:  # the next copy cleans up at its beginning
            log.warning(
                "streamer cannot clean up after a failed copy",
                error=str(exc),
                copy_error=error.text,
            )
            if exc.message not in error.text:
                text = f"{error.text}; streamer cannot clean up its target table: {exc.message}"
                return replace(error, text=text)
        return error

    async def _store_failure(self, mapped: MappedRelation, error: ErrorReport) -> None:
        """Record the failure, unless the bookkeeping has a newer request for a copy."""
        if (obstacle := mapped.state.chunks_obstacle) is not None:
            self._queue.copy_in_one_piece(mapped)
            await self.begin_again(mapped, obstacle)
            return
        scope, books = mapped.state.scope, self._context.bookkeeping
        error = await self._with_remedy(mapped, scope, error)
        if self._queue.is_requested_again(mapped):  # the new request has stored the state
            self._queue.failed(mapped)
        else:
            attempt = self._queue.attempt(mapped)
            is_stored = await fail_copy(books, mapped.relation_id, error, scope.need, attempt)
            is_requested_again = self._queue.failed(mapped)
            if not is_stored:
                return
            if not is_requested_again:
                self._context.events.copy_failed(mapped, error)
                return
            await demand_again(books, mapped.relation_id, scope.need, mapped.state.resync)
        log.warning(
            "a copy failed, and begins again because an operator requested a copy meanwhile",
            source=self._context.source.label,
            table=str(mapped.mapping.source),
            error=error.text,
        )

    async def _with_remedy(
        self, mapped: MappedRelation, scope: CopyScope, error: ErrorReport
    ) -> ErrorReport:
        """Return *error* with a remedy that starts a new copy of *scope*, unless streamer starts
        it.
        """
        if not scope.is_to_point:
            if error.remedy and (error.remedy.has("resume") or error.remedy.has("resync")):
                return error
            return _with_resume(mapped, error, "once you have removed the cause, run: ")
        if scope.resync.columns is not None:
            columns = ", ".join(scope.resync.columns)
            lack = f"the values of {columns} in existing rows are still missing"
        elif await is_copy_due(self._context.bookkeeping, mapped.relation_id):
            lack = "existing rows are unchanged"
        else:
            return error
        return _with_resume(
            mapped, error, f"{lack}: streamer tries again at its next start, or run: "
        )

    async def begin_again(
        self, mapped: MappedRelation, reason: str, *, forgets: bool = False
    ) -> None:
        """Give up the copied chunks of *mapped*, and copy all rows.

        *forgets*: discard the stored facts about the rows of the target.
        """
        log.warning(
            "a copy in chunks begins again",
            source=self._context.source.label,
            table=str(mapped.mapping.source),
            reason=reason,
        )
        if forgets:
            await forget_target(self._context.bookkeeping, mapped.relation_id)
        await demand_copy(self._context.bookkeeping, mapped.relation_id, mapped.state.resync)
        await self._context.events.copy_begins_again(mapped)
        self._queue.remove(mapped)
        self._request(mapped)

    async def mark_synced(self, target: TargetConnection, copies: Sequence[TableCopy]) -> None:
        """Mark relations as in sync, without a copy."""
        for copy in copies:
            copy.use_definition(copy.relation)
        async with transaction(target):
            finished = [
                FinishedCopy(
                    copy.mapped.relation_id,
                    copy.scope,
                    copy.mapped.end_lsn,
                    attempt=None,
                    rows=0,
                    size=0,
                    owns_rows=copy.was_created,
                    columns=copy.column_numbers,
                    definition=copy.relation.definition,
                )
                for copy in copies
            ]
            await switch_to_stream(target, finished)
        failpoint("sync.catching_up")
        for copy in copies:
            copy.mapped.quarantine.forget(0)
            self._queue.remove(copy.mapped)
            self._context.events.switched_to_stream(copy.mapped, None, copy.mapped.end_lsn)

    async def finish(
        self, copy: TableCopy, rows: int, size: int, session: PersistentConnection
    ) -> None:
        """Complete a relation whose parts are all copied, and switch the relation to streaming.

        If a session hinders the swap, the round tries again later, because all rows are in the
        target.
        """
        failpoint("sync.copied")
        try:
            if await self.has_other_types(copy):
                await self.retry_later(copy, f'a type of "{copy.name}" was altered during its copy')
                return
            if copy.scope.is_to_point:
                if copy.awaits_orphans:
                    await reach_with_snapshot(self._context.events, copy)
                else:
                    await self._context.events.reach(copy.mapped, copy.consistent_point)
                failpoint("sync.at_point")
            async with _using(session) as target:
                if await self._restart_on_other_target(target, copy):
                    return
                if copy.scope.is_to_point and await self._plan_orphans(target, copy):
                    return  # the switch waits for the parts with orphaned rows
                finished = _finished_copy(copy, rows, size)
                if not await is_switched(target, finished):  # an earlier commit may have succeeded
                    await self._switch_to_stream(target, copy, finished)
                self._switched(copy, finished)
                if copy.is_staged:
                    await _analyze(target, copy)
        except SyncAgainError as exc:
            await self.retry_later(copy, exc.message)
        except StreamerError as exc:
            if copy.is_done:
                return  # the connection was lost after the switch; other tasks report the loss
            if not self._queue.is_copying(copy.mapped):
                return  # a caller has given up this copy and requested a new copy
            if exc.retry is not Retry.TIMED:
                copy.is_done = True
                if isinstance(exc, ConflictError) and exc.remedy is None:
                    is_null = exc.kind == "not_null"
                    names = (None, exc.column) if is_null else (exc.constraint, None)
                    exc.remedy = remedy_for_conflict(copy.target, copy.mapped.mapping, *names)
                await self.refuse(copy.mapped, exc, f'after copying "{copy.name}"')
            elif _can_wait(copy, exc):
                copy.backoff.log(log, f'the switch of "{copy.name}" to streaming is delayed', exc)
                copy.not_before = time.monotonic() + copy.backoff.next_seconds()
            else:
                raise

    async def _restart_on_other_target(self, target: TargetConnection, copy: TableCopy) -> bool:
        """Begin *copy* again if by now a different table has the target's name; return whether.

        Parts address a table by name, so both tables may contain some of the rows.
        """
        present = await target.fetch_value("select pg_catalog.to_regclass($1)::oid", copy.table)
        if present == copy.target.oid:
            return False
        copy.is_done = True
        if copy.mapped.state.chunks is not None:
            await self.begin_again(copy.mapped, OTHER_TARGET, forgets=True)
            return True
        await forget_target(self._context.bookkeeping, copy.mapped.relation_id)
        await self.retry_later(copy, f'copying "{copy.name}": {OTHER_TARGET}')
        return True

    async def has_other_types(self, copy: TableCopy) -> bool:
        """Whether the copy may have read some values of the former type and some of the present
        type.

        PostgreSQL shows the present labels of enums and attributes, also under a snapshot.
        """
        former, name = copy.relation.definition, copy.relation.name
        if not former.types:
            return False
        context = self._context
        async with context.sources.connection(context.source) as source:
            now = (await read_relations(source, [name])).get(name)
        return now is not None and alters_values(former, now.definition)

    async def find_transient(self, copy: TableCopy) -> str | None:
        """Return the reason why the target may refuse values of *copy* only for now; None if there
        is none.
        """
        if await self.has_other_types(copy):
            return f'a type of "{copy.name}" was altered during its copy'
        context, types = self._context, copy.relation.definition.types
        if not context.captures or not types:
            return None
        async with context.bookkeeping.connection() as target:
            users = await read_users(target, copy.mapped.relation_id, [t.oid for t in types])
        for name in users:
            if name != copy.relation.name and context.events.is_behind(name, copy.consistent_point):
                return (
                    f'table "{name}", which has a column of the same type, must first apply '
                    "earlier changes"
                )
        return None

    async def _switch_to_stream(
        self, target: TargetConnection, copy: TableCopy, finished: FinishedCopy
    ) -> None:
        """Switch to the stream. Staged rows replace the old rows in the same transaction."""
        if copy.is_staged:
            await target.set_up_origin()
            mapped, mode = copy.mapped, copy.method.mode
            replaces_all = mode is WriteMode.INSERT and await is_first_of_all(target, mapped)
            try:
                async with transaction(target):
                    if replaces_all:
                        mode = await begin_replacement(target, mapped, copy.target.rows)
                    referenced = copy.target.is_referenced
                    await swap_rows(target, swap_of(copy), mode, is_referenced=referenced)
                    failpoint("sync.exchanged")
                    await switch_to_stream(target, [finished])
                    await drop_stages(target, [mapped.relation_id])
            except ConflictError as exc:
                if copy.is_disjoint:
                    await name_tables(target, mapped, exc)
                    advise_copy(mapped, exc)
                raise
            return
        if finished.is_end:
            await restore_indexes(target, copy.target.name, copy.mapped.relation_id)
            await make_before_switch(target, copy.mapped.relation_id)
            await _analyze(target, copy)
        await switch_to_stream(target, [finished])

    def _switched(self, copy: TableCopy, finished: FinishedCopy) -> None:
        """Switch the table to streaming."""
        mapped, after = copy.mapped, finished.scope.chunks
        failpoint("sync.catching_up" if after is None else "sync.chunk_stored")
        copy.is_done = True
        is_copying = self._queue.is_copying(mapped)
        if copy.scope.is_to_point and not is_copying:
            # A new request came after the commit: the lane stays held for the next copy.
            mapped.end_lsn = finished.lsn
            self._context.events.step(mapped, lambda state: state.copy_superseded(finished.lsn))
            return
        self._context.metrics.count_copied(table_labels(mapped), finished.rows, finished.size)
        chunk = {} if after is None else {"chunk": after.count, "chunks": f"about {after.total}"}
        log.info(
            "table copied" if after is None else "chunk of a table copied",
            source=self._context.label,
            table=copy.name,
            **chunk,
            lsn=str(finished.lsn),
            rows=finished.rows,
        )
        if after is not None and not is_copying:
            return  # an operator has requested a new copy
        if not finished.omits_quarantined and copy.scope.chunks is None:
            mapped.quarantine.forget(0)
        self._queue.copied(mapped, has_more=after is not None)
        self._context.events.switched_to_stream(mapped, after, finished.lsn)
        if after is not None and not mapped.state.is_paused:
            self._request(mapped)

    async def _plan_orphans(self, target: TargetConnection, copy: TableCopy) -> bool:
        """Add parts for rows of the target that moved out of the scope at the source, if any."""
        swap = swap_of(copy)
        if copy.scope.resync.is_partial and copy.mapped.quarantine.count:
            raise SyncError(
                f'rows of "{copy.name}" are in quarantine, and may be among the rows to copy',
                hint="retry or drop them with `streamer quarantine`, or resync the whole table",
            )
        if not copy.awaits_orphans:
            return False
        copy.includes_orphans = not swap.key
        if copy.includes_orphans:
            return False
        rows = await target.fetch(swap.orphan_keys_sql())
        keys = KeySet(
            tuple(name for name, _ in swap.key),
            tuple(copy.target.columns[name].type for name, _ in swap.key),
            tuple(tuple(row["k"]) for row in rows),
        )
        version = self._context.server.version
        parts: list[CopyPart] = []
        for batch in cut_keys(keys):
            condition = source_condition(RowScope(keys=(batch,)), copy.mapped.mapping, copy.names)
            query_input = replace(copy.query_input, scope=condition, can_split=False)
            parts += cut(copy_source(query_input, version, target.server_version))
        first = len(copy.parts)
        parts = [replace(part, part=first + number) for number, part in enumerate(parts)]
        await add_parts(target, parts)
        # After `add_parts`, so that the next attempt adds the parts if the connection was lost.
        copy.includes_orphans = True
        copy.parts += parts
        return bool(parts)


def _can_wait(copy: TableCopy, error: StreamerError) -> bool:
    """Whether the round can finish *copy* later, because all rows are in the target."""
    if isinstance(error, TargetFencedError):
        return False
    return copy.is_staged or copy.chunk is not None or isinstance(error, SourceError)


@contextlib.asynccontextmanager
async def _using(session: PersistentConnection) -> AsyncIterator[TargetConnection]:
    """Use a connection for a block; discard a connection whose state is unknown afterwards."""
    target = await session.get()
    try:
        yield target
    except BaseException:
        target.terminate()
        raise


def _finished_copy(copy: TableCopy, rows: int, size: int) -> FinishedCopy:
    """Return the facts of *copy*, whose parts contain *rows* and *size* bytes. Pure."""
    after = None if copy.chunk is None else copy.chunk.after
    return FinishedCopy(
        copy.mapped.relation_id,
        replace(copy.scope, chunks=after),
        copy.consistent_point,
        attempt=copy.method.attempt,
        rows=rows,
        size=size,
        owns_rows=copy.method.owns_rows,
        columns=copy.column_numbers,
        definition=copy.relation.definition,
        storage=copy.seen.storage,
        end_lsn=copy.mapped.end_lsn,
        leaves=copy.seen.leaves,
    )


async def _analyze(target: TargetConnection, copy: TableCopy) -> None:
    with contextlib.suppress(TargetContentionError):
        await target.execute(f"analyze {copy.table}")


def _with_resume(mapped: MappedRelation, error: ErrorReport, words: str) -> ErrorReport:
    """Return *error* with *words* and the command that lets streamer copy *mapped* again. Pure."""
    source = mapped.source
    table = str(mapped.mapping.source)
    resume = run("resume", table, database=source.database, sid=source.sid)
    again, remedy = Remedy.of(words, resume), error.remedy
    if remedy is not None and error.code == SlotWaitError.code and remedy.sql:
        remedy = Remedy.of("run: ", resume, "; ", remedy)  # the SQL ends the slot's wait
    else:
        remedy = again if remedy is None else Remedy.of(remedy, "; ", again)
    return replace(error, text=f"{error.text}; {again}", remedy=remedy)
