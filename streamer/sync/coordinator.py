"""Copies the relations of one source that need it, and hands each over to the stream.

Relations that need a copy are held (`streamer.apply.lane`): the stream goes on for all others, and
what it brings for these is kept on disk. A round copies all that wait:

1. the target tables are there and fit, and it is decided which way rows go: straight into the
   table, or into a staging table (`streamer.sync.prepare`, `streamer.sync.stage`);
   ``copying`` is stored;
2. a snapshot: the one that the main slot exported when it was made, or that of a temporary slot. A
   session of the round's own holds it, and the temporary slot goes (`streamer.sync.snapshot`);
3. definitions are read again under that snapshot. A table that is another one by then is left to
   the next round;
4. indexes are put off, parts are planned and stored, and Spark copies them (`streamer.sync.parts`);
5. as each relation's last part is there: indexes back or rows exchanged, ``catching_up`` with the
   consistent point as its progress, and its lane may drain. What the stream held up to that point
   is dropped, the copy has it.

Dying anywhere leaves a state that says where to begin again (`streamer.sync.states`).
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Protocol

import structlog

from streamer.apply.counting import table_labels
from streamer.apply.lane import MappedRelation
from streamer.backoff import Backoff
from streamer.errors import (
    Retry,
    SnapshotExpiredError,
    SourceContentionError,
    SparkJobError,
    StreamerError,
    SyncAgainError,
    SyncError,
    TargetContentionError,
    TargetError,
    TargetFencedError,
)
from streamer.failpoints import failpoint
from streamer.lsn import Lsn
from streamer.mapping.rules import SourceMapping, parse_name
from streamer.observability.metrics import Metrics
from streamer.postgres.conninfo import with_password_of
from streamer.progress.copies import hand_over, is_handed_over, set_copy_error
from streamer.progress.store import Store
from streamer.source.catalog import SourceServer, read_relations
from streamer.source.connection import Connection, connection, translating
from streamer.source.slot import ExportedSnapshot, create_slot, sync_slot_name
from streamer.source.timeline import check_same_server_plainly
from streamer.source.waits import Reported, read_locked, set_lock_timeout, watched
from streamer.sync.copy_query import copy_source, part_bytes
from streamer.sync.launcher import SparkLauncher
from streamer.sync.leaves import know_leaves
from streamer.sync.locked_table import ROUNDS, LockedTable
from streamer.sync.parts import CopyEnds
from streamer.sync.plan import CopyPart, cut, group, task_rate
from streamer.sync.prepare import Preparation, TableCopy, exchange_of
from streamer.sync.snapshot import HeldSnapshot, TableSeen, is_same, look
from streamer.sync.stage import (
    LOCK_SECONDS,
    create_stage,
    drop_leftover_stages,
    drop_stage,
    exchange_rows,
)
from streamer.target.claim import Claim
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    target_connection,
    transaction,
)
from streamer.target.deferred_indexes import defer_indexes, read_deferred_targets, restore_indexes

log = structlog.get_logger()

POLL_SECONDS: Final = 0.5
PREPARE_LOCK_SECONDS: Final = 10
"""How long a copy waits for a lock at the target before others have their turn."""
TERMINATE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """What of the configuration the coordinator needs."""

    target_url: str
    create_tables: bool
    defer_indexes: bool
    jobs: int
    rows_per_second: float | None

    def __repr__(self) -> str:
        return "SyncSettings(…)"


class SyncEvents(Protocol):
    """Who wants to know how copies fare: the pipeline."""

    def copy_began(self, mapped: MappedRelation, consistent_point: Lsn) -> None:
        """Changes up to *consistent_point* need not be held any more: the copy will have them."""
        ...

    def copy_finished(self, mapped: MappedRelation, consistent_point: Lsn) -> None: ...
    def copy_failed(self, mapped: MappedRelation, error: str) -> None: ...
    def copy_delayed(self, mapped: MappedRelation, error: str | None) -> None:
        """A copy under way does not get on, for now; with None it does."""
        ...


class SyncCoordinator:
    """Copies relations of one source. `run` belongs to its pipeline; `request` is for everybody."""

    def __init__(
        self,
        source: SourceMapping,
        source_id: int,
        server: SourceServer,
        address: TargetAddress,
        store: Store,
        launcher: SparkLauncher,
        settings: SyncSettings,
        events: SyncEvents,
        metrics: Metrics,
    ) -> None:
        self._source = source
        self._source_id = source_id
        self._server = server
        self._address = address
        self._store = store
        self._launcher = launcher
        self._settings = settings
        self._events = events
        self._metrics = metrics
        self._preparation = Preparation(
            source, server, address, create_tables=settings.create_tables
        )
        self._waiting: dict[MappedRelation, None] = {}
        self._copying: set[MappedRelation] = set()
        """What was taken from `_waiting` and is neither handed over nor in error."""
        self._wanted = asyncio.Event()
        self._snapshot: ExportedSnapshot | None = None
        self._reported = Reported()
        self._delayed: dict[MappedRelation, int] = {}
        """Copies under way of which an error is shown, and how many parts they had by then."""
        self._part_counts: Counter[int] = Counter()
        self._rewrites: Counter[MappedRelation] = Counter()
        """How many rounds in a row a rewrite of the table has ended."""
        self._locked: dict[TableCopy, LockedTable] = {}
        """Tables of this round that are copied under one lock."""

    def request(self, mapped: MappedRelation) -> None:
        """Copy *mapped*, in the next round."""
        self._waiting[mapped] = None
        self._wanted.set()

    @property
    def is_copying(self) -> bool:
        """Whether any copy is wanted or under way."""
        return bool(self._waiting or self._copying)

    def is_at(self, mapped: MappedRelation) -> bool:
        """Whether a copy of *mapped* is wanted or under way."""
        is_here = mapped in self._waiting or mapped in self._copying
        return is_here and not mapped.is_set_aside

    def use_snapshot(self, snapshot: ExportedSnapshot) -> None:
        """Use *snapshot* for the next round; it is closed when that is over."""
        self._snapshot = snapshot

    async def run(self) -> None:
        """Copy what is requested until cancelled."""
        backoff = Backoff(first=0.5)
        try:
            await self._restore_leftovers()
            while True:
                await self._wanted.wait()
                batch = [mapped for mapped in self._waiting if not mapped.is_set_aside]
                self._waiting.clear()
                self._wanted.clear()
                self._copying.update(batch)
                try:
                    await self._round(batch)
                    backoff = Backoff(first=0.5)
                except StreamerError as exc:
                    self._metrics.count_error(exc, self._source.database, self._source.sid)
                    if exc.retry is not Retry.TIMED:
                        for mapped in self._unfinished_of(batch):
                            await self._fail(mapped, str(exc))
                        continue
                    backoff.log(log, f'copying from "{self._source.label}" begins again', exc)
                    unfinished = self._unfinished_of(batch)
                    if not isinstance(exc, TargetError):
                        await self._show(unfinished, str(exc))
                    await backoff.wait()
                    for mapped in unfinished:
                        self.request(mapped)
        finally:
            if self._snapshot is not None:
                await self._snapshot.close()

    async def _restore_leftovers(self) -> None:
        """Put in order what a process left when it died: indexes that are put off where nobody
        copies any more, and staging tables.
        """
        await self._end_former_tasks()
        async with target_connection(self._address, self._application_name) as target:
            await drop_leftover_stages(target, self._source_id)
            for name in await read_deferred_targets(target):
                try:
                    await restore_indexes(target, parse_name(name))
                except StreamerError as exc:
                    log.error("an index cannot be restored", target=name, error=str(exc))

    @property
    def _application_name(self) -> str:
        return f"streamer sync {self._source_id}"

    def _unfinished_of(self, batch: list[MappedRelation]) -> list[MappedRelation]:
        """Return what of *batch* is neither handed over nor in error: the others have moved on."""
        self._copying -= {mapped for mapped in batch if mapped.is_set_aside}
        return [mapped for mapped in batch if mapped in self._copying]

    def _unfinished_copies(self, copies: list[TableCopy]) -> list[TableCopy]:
        """Return which of *copies* are still to be made.

        A table that was set aside meanwhile misses changes: it waits for an operator's resync.
        """
        for copy in copies:
            if copy.mapped.is_set_aside:
                copy.is_done = True
                self._copying.discard(copy.mapped)
        return [copy for copy in copies if not copy.is_done]

    async def _refuse(
        self, mapped: MappedRelation, error: StreamerError, when: str | None = None
    ) -> None:
        """*mapped* cannot be copied; the others of its round can."""
        self._metrics.count_error(error, self._source.database, self._source.sid)
        await self._fail(mapped, str(error) if when is None else f"{when}: {error}")

    async def _fail(self, mapped: MappedRelation, error: str) -> None:
        """Leave the target as it was found, and say why the copy failed.

        In this order: a table that is in error has its own indexes, unless they cannot be made.
        """
        try:
            async with target_connection(self._address, self._application_name) as target:
                await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
                await drop_stage(target, mapped.relation_id)
                await restore_indexes(target, mapped.mapping.target, mapped.relation_id)
        except StreamerError as exc:  # what cannot be done now is done as the next copy begins
            log.warning("a failed copy is not cleared up", error=str(exc), copy_error=error)
            error = f"{error}; its target is not cleared up: {exc.message}"
        await self._store.fail_copy(mapped.relation_id, error)
        self._copying.discard(mapped)
        self._events.copy_failed(mapped, error)

    # ---- one round -----------------------------------------------------------------------------

    async def _round(self, batch: list[MappedRelation]) -> None:
        exported, self._snapshot = self._snapshot, None
        self._locked.clear()
        async with contextlib.AsyncExitStack() as sessions:
            try:
                await self._end_former_tasks()
                async with connection(self._source) as source:
                    await check_same_server_plainly(source, self._server)
                    await set_lock_timeout(source)
                    mapped = [mapped.relation_id for mapped in batch]
                    copies, again = await watched(
                        self._source,
                        source,
                        self._prepare(source, batch),
                        lambda awaited: self._store.set_waiting(mapped, awaited),
                    )
                    await self._store.set_waiting(mapped, None)
                if not copies:
                    self._begin_again(again)
                    return
                await self._connect_for_locks(copies, sessions)
                if exported is None:
                    exported = await create_slot(
                        self._source,
                        sync_slot_name(self._source.slot),
                        self._server,
                        temporary=True,
                        tell=lambda awaited: self._tell(copies, awaited),
                    )
                again += await self._lock(exported)
                await self._tell(copies, None)
                failpoint("sync.slot_created")
                snapshot = await HeldSnapshot.take_over(self._source, self._server, exported)
                sessions.push_async_callback(snapshot.close)
            finally:
                if exported is not None:
                    await exported.close()
            with translating(self._source.label):
                again += await self._copy(copies, snapshot)
        self._begin_again(again)

    async def _connect_for_locks(
        self, copies: list[TableCopy], sessions: contextlib.AsyncExitStack
    ) -> None:
        """Connect for the tables that only a lock keeps as the snapshot has them."""
        for copy in copies:
            if self._rewrites[copy.mapped] >= ROUNDS:
                locked = await LockedTable.connect(self._source, self._server)
                sessions.push_async_callback(locked.close)
                self._locked[copy] = locked

    async def _lock(self, exported: ExportedSnapshot) -> list[str]:
        """Lock these tables at once, before they are rewritten again; return which cannot be."""
        again = []
        for copy, locked in list(self._locked.items()):
            try:
                await locked.lock(exported.snapshot_name, copy)
            except SourceContentionError as exc:
                again.append(f'"{copy.name}" is locked: {exc.message}')
                await self._leave_to_next_round(copy)
            else:
                log.info(
                    "table is copied under a lock, because each round met a rewrite of it",
                    source=self._source.label,
                    table=copy.name,
                )
        return again

    async def _leave_to_next_round(self, copy: TableCopy, *, is_rewritten: bool = False) -> None:
        copy.is_done = True
        self._rewrites[copy.mapped] += is_rewritten
        await self._unlock(copy)

    async def _unlock(self, copy: TableCopy) -> None:
        """Let go of a table as soon as its copy needs the lock no more."""
        if copy in self._locked:
            await self._locked.pop(copy).close()

    def _begin_again(self, reasons: list[str]) -> None:
        """Raises SyncAgainError if copies are left to the next round."""
        if reasons:
            raise SyncAgainError("; ".join(sorted(reasons)))

    async def _tell(self, copies: list[TableCopy], what: str | None) -> None:
        """Show what copies wait for."""
        tables = [copy.name for copy in copies]
        if what is not None and self._reported.is_new(what, *tables):
            log.warning("copies wait", source=self._source.label, tables=tables, waiting_for=what)
        await self._store.set_waiting([copy.mapped.relation_id for copy in copies], what)

    async def _end_former_tasks(self) -> None:
        """End backends of tasks that outlived the process that wanted them, and wait until they are
        gone.
        """
        sql = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity"
            " where application_name = $1 and datname = current_database()"
            " and usename = current_user and pid <> pg_backend_pid()"
        )
        async with target_connection(self._address, "streamer") as target:
            async with asyncio.timeout(TERMINATE_SECONDS):
                while await target.fetch_value(sql, self._task_name):
                    await asyncio.sleep(0.1)

    @property
    def _claim(self) -> Claim:
        assert self._address.claim is not None, "only the holder of the source's lock copies"
        return self._address.claim

    @property
    def _task_name(self) -> str:
        return f"streamer copy {self._source_id}"

    async def _prepare(
        self, source: Connection, batch: list[MappedRelation]
    ) -> tuple[list[TableCopy], list[str]]:
        """See to the target tables; relations for which that fails are in error and left out.

        Also returns why others are left to the next round.
        """
        relations = await read_relations(source, [mapped.mapping.source for mapped in batch])
        declared = [mapped for mapped in batch if mapped.is_to_declare]
        await know_leaves(self._store, source, declared)
        copies, again = [], []
        async with target_connection(self._address, self._application_name) as target:
            await target.set_up_origin()  # rows may be removed
            await target.execute(f"set lock_timeout = '{PREPARE_LOCK_SECONDS}s'")
            for mapped in batch:
                relation = relations.get(mapped.mapping.source)
                try:
                    if relation is None:
                        raise SyncError(f'table "{mapped.mapping.source}" is not in the source')
                    copy = await self._preparation.prepare(source, target, mapped, relation)
                    if mapped.is_to_declare:
                        await self._declare(target, copy)
                    else:
                        await self._preparation.begin(target, copy)
                        failpoint("sync.prepared")
                        copies.append(copy)
                except TargetContentionError as exc:
                    again.append(f'"{mapped.mapping.source}" waits at the target: {exc.message}')
                except StreamerError as exc:
                    if exc.retry is Retry.TIMED:
                        raise
                    await self._refuse(mapped, exc)
        return copies, again

    async def _declare(self, target: TargetConnection, copy: TableCopy) -> None:
        """Take a relation to be in step, without a copy."""
        copy.reads(copy.relation)
        await hand_over(
            target,
            copy.mapped.relation_id,
            copy.mapped.end_lsn,
            attempt=None,
            rows=0,
            size=0,
            owns_rows=copy.was_created,
            columns=copy.column_numbers,
        )
        failpoint("sync.catching_up")
        copy.mapped.quarantine.forget(0)
        self._copying.discard(copy.mapped)
        self._events.copy_finished(copy.mapped, copy.mapped.end_lsn)

    # ---- copying -------------------------------------------------------------------------------

    async def _copy(self, copies: list[TableCopy], snapshot: HeldSnapshot) -> list[str]:
        """Copy what can be copied under *snapshot*; return why others have to begin again."""
        copies = self._unfinished_copies(copies)
        for copy in copies:
            copy.consistent_point = snapshot.consistent_point
            copy.source_time = snapshot.source_time
            self._events.copy_began(copy.mapped, snapshot.consistent_point)
        self._delayed = dict.fromkeys(self._delayed, 0)
        copies, again = await self._look(copies, snapshot)
        failpoint("sync.guarded")
        copies = await self._plan(copies)
        failpoint("sync.planned")
        if copies:
            again += await self._run_job(copies, snapshot)
        return again

    async def _look(
        self, copies: list[TableCopy], snapshot: HeldSnapshot
    ) -> tuple[list[TableCopy], list[str]]:
        """Read the definitions again, as the snapshot has them; return the copies to go on with,
        and why others have to begin again.

        A column that was added and filled before the snapshot was taken is in no later change. The
        others go on: a table that is rewritten all the time must not keep them from being copied.
        """
        fit: list[TableCopy] = []
        again: list[str] = []
        for copy in copies:
            locked = self._locked.get(copy)
            plain = snapshot.plain if locked is None else locked.plain
            await plain.execute("savepoint look")
            try:
                found = await watched(
                    self._source, plain, self._look_at(copy, plain), partial(self._tell, [copy])
                )
            except SourceContentionError as exc:
                again.append(f'"{copy.name}" is locked: {exc.message}')
                await self._leave_to_next_round(copy)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._unlock(copy)
                await self._refuse(copy.mapped, exc)
            else:
                if found is not None and is_same(copy.relation, found.relation):
                    copy.reads(found.relation)
                    copy.heaps, copy.can_split = found.heaps, found.can_split
                    fit.append(copy)
                else:
                    again.append(f'"{copy.name}" was altered or rewritten as its copy began')
                    await self._leave_to_next_round(copy, is_rewritten=True)
            if not plain.closed:  # what was locked since the savepoint is let go
                await plain.execute("rollback to savepoint look")
        await self._store.set_waiting([copy.mapped.relation_id for copy in copies], None)
        return fit, again

    async def _look_at(self, copy: TableCopy, plain: Connection) -> TableSeen | None:
        found = await look(plain, copy.relation.name, is_partitioned=copy.relation.is_partitioned)
        if found is not None and found.relation.is_partitioned:
            await know_leaves(self._store, plain, [copy.mapped])
        return found

    async def _plan(self, copies: list[TableCopy]) -> list[TableCopy]:
        """Cut relations into parts, and store what is planned; return those for which that went
        well.
        """
        planned = []
        async with target_connection(self._address, self._application_name) as target:
            for copy in copies:
                try:
                    await self._plan_one(target, copy)
                except StreamerError as exc:
                    if exc.retry is Retry.TIMED:
                        raise
                    await self._unlock(copy)
                    await self._refuse(copy.mapped, exc)
                else:
                    planned.append(copy)
        return planned

    async def _plan_one(self, target: TargetConnection, copy: TableCopy) -> None:
        rate = self._settings.rows_per_second
        copy.parts = cut(
            copy_source(copy, self._server.version, target.server_version),
            part_bytes=part_bytes(copy, None if rate is None else rate / self._settings.jobs),
        )
        if copy.is_staged:
            await create_stage(target, copy.mapped.relation_id, copy.table, copy.columns)
        elif self._settings.defer_indexes:
            await self._defer_indexes(target, copy)
        async with transaction(target):
            await target.execute(
                "update streamer.relation set rows_total = $2 where id = $1",
                copy.mapped.relation_id,
                copy.relation.row_count_estimate,
            )
            await target.execute(
                "insert into streamer.sync_partition"
                " (relation_id, part, attempt, description, size_bytes)"
                " select $1, * from unnest($2::int4[], $3::int4[], $4::text[], $5::int8[])",
                copy.mapped.relation_id,
                [part.part for part in copy.parts],
                [part.attempt for part in copy.parts],
                [part.description for part in copy.parts],
                [part.size_bytes for part in copy.parts],
            )

    async def _defer_indexes(self, target: TargetConnection, copy: TableCopy) -> None:
        # Rows of others are served by these indexes.
        if not await target.fetch_value(f"select exists (select from {copy.table})"):
            await defer_indexes(target, copy.target.name)

    async def _run_job(self, copies: list[TableCopy], snapshot: HeldSnapshot) -> list[str]:
        """Let Spark copy the parts, finishing relations as they are complete; return why some have
        to begin again.
        """
        backoff = Backoff(first=0.5)
        submitted: list[CopyPart] | None = None
        again: list[str] = []
        while True:
            unfinished = await self._unfinished(copies)
            if all(copy.is_done for copy in copies):
                return again
            if not unfinished:
                await asyncio.sleep(POLL_SECONDS)
                continue
            if unfinished == submitted:
                await self._wait_for_reach(unfinished, backoff)
            submitted = unfinished
            submitting = asyncio.create_task(
                self._copy_parts(copies, unfinished, snapshot), name="parts"
            )
            failpoint("sync.job_started")
            try:
                await self._watch(copies, submitting, snapshot)
                failures = submitting.result()
            except SparkJobError as exc:
                await snapshot.check()
                # Parts that are copied stay so; the snapshot still stands.
                await self._delay(copies, exc)
                backoff.log(log, "the Spark job is started again", exc)
                await backoff.wait()
                submitted = None
                continue
            finally:
                submitting.add_done_callback(_forget)
                submitting.cancel()
            reasons, is_busy = await self._settle(copies, failures)
            again += reasons
            if is_busy:
                await backoff.wait()
                submitted = None

    async def _settle(
        self, copies: list[TableCopy], failures: list[dict[str, Any]]
    ) -> tuple[list[str], bool]:
        """See to what a job has not copied (`streamer.sync.parts.NotCopiedError`); return why
        copies have to begin again, and whether parts wait for a lock.

        Raises SnapshotExpiredError, SparkJobError, TargetMovedError.
        """
        by_id = {copy.mapped.relation_id: copy for copy in copies}
        again, is_busy = [], False
        for failure in failures:
            copy, error = by_id[failure["relation_id"]], failure["error"]
            match failure["kind"]:
                case "snapshot":
                    raise SnapshotExpiredError(f"the snapshot of the copy is gone: {error}")
                case "elsewhere":
                    await self._check_claim()
                    raise SparkJobError(
                        f"a Spark task is not where this process is: {error}",
                        hint="check that the Spark workers reach the same source and target hosts",
                    )
                case "busy":
                    is_busy = True
                case "lost" if not copy.is_done:
                    await self._leave_to_next_round(copy)
                    again.append(f'copying "{copy.name}" was interrupted: {error}')
                case "changed" if not copy.is_done:
                    await self._leave_to_next_round(copy, is_rewritten=True)
                    again.append(f'"{copy.name}" was altered or rewritten while it was copied')
                case "refused" if not copy.is_done:
                    copy.is_done = True
                    await self._fail(copy.mapped, f'copying "{copy.name}": {error}')
        return again, is_busy

    async def _check_claim(self) -> None:
        """Raises TargetMovedError if this process cannot prove its claim any more either."""
        async with target_connection(self._address, self._application_name):
            pass

    async def _delay(self, copies: list[TableCopy], error: StreamerError) -> None:
        """Show why copies do not get on."""
        delayed = [copy.mapped for copy in copies if not copy.is_done]
        await self._show(delayed, str(error))

    async def _show(self, copying: list[MappedRelation], error: str | None) -> None:
        """Show why copies do not get on, or that they do again."""
        async with self._store.connection() as store:
            await set_copy_error(store, [mapped.relation_id for mapped in copying], error)
        for mapped in copying:
            self._events.copy_delayed(mapped, error)
            if error is not None:
                self._delayed[mapped] = self._part_counts[mapped.relation_id]
            else:
                self._delayed.pop(mapped, None)

    async def _wait_for_reach(self, parts: list[CopyPart], backoff: Backoff) -> None:
        """A job ended well and has copied nothing: its tasks did not find what they were to do."""
        error = SparkJobError(
            f"Spark has run {len(parts)} parts and copied none",
            hint="check that the Spark workers reach the same source and target hosts",
        )
        self._metrics.count_error(error, self._source.database, self._source.sid)
        backoff.log(log, "the Spark job is started again", error)
        await backoff.wait()

    async def _unfinished(self, copies: list[TableCopy]) -> list[CopyPart]:
        """Finish relations all of whose parts are copied; return the parts still to copy."""
        active = self._unfinished_copies(copies)
        async with self._store.connection() as store:
            rows = await store.fetch(
                "select relation_id, part, rows_copied, bytes_copied from streamer.sync_partition"
                " where relation_id = any ($1::int8[]) and finished_at is not null",
                [copy.mapped.relation_id for copy in active],
            )
        copied = {(row["relation_id"], row["part"]): row for row in rows}
        self._part_counts = Counter(relation_id for relation_id, _ in copied)
        if again := [m for m, n in self._delayed.items() if self._part_counts[m.relation_id] > n]:
            await self._show(again, None)
        remaining: list[CopyPart] = []
        for copy in active:
            missing = [p for p in copy.parts if (p.relation_id, p.part) not in copied]
            remaining += missing
            if not missing and time.monotonic() >= copy.not_before:
                done = [copied[p.relation_id, p.part] for p in copy.parts]
                await self._finish(
                    copy,
                    sum(row["rows_copied"] for row in done),
                    sum(row["bytes_copied"] for row in done),
                )
        return remaining

    async def _watch(
        self, copies: list[TableCopy], submitting: "asyncio.Task[Any]", snapshot: HeldSnapshot
    ) -> None:
        waiting: dict[TableCopy, str] = {}
        while True:
            done, _ = await asyncio.wait([submitting], timeout=POLL_SECONDS)
            await self._unfinished(copies)
            if done:
                await self._tell(list(waiting), None)
                return
            waiting = await self._show_waiting(copies, snapshot, waiting)

    async def _show_waiting(
        self, copies: list[TableCopy], snapshot: HeldSnapshot, before: dict[TableCopy, str]
    ) -> dict[TableCopy, str]:
        """Show which copies wait for a lock at the source, and for whom."""
        locked = await read_locked(snapshot.plain, self._task_name)
        now = {
            copy: locked[oid]
            for copy in copies
            for heap in copy.heaps
            for oid, _ in heap.stores
            if oid in locked and not copy.is_done
        }
        for copy, awaited in now.items():
            await self._tell([copy], awaited)
        if gone := [copy for copy in before if copy not in now]:
            await self._tell(gone, None)
        return now

    async def _copy_parts(
        self, copies: list[TableCopy], parts: list[CopyPart], snapshot: HeldSnapshot
    ) -> list[dict[str, Any]]:
        """Copy parts, most of them with Spark; return what could not be copied, and why."""
        locked = {copy.mapped.relation_id: self._locked.get(copy) for copy in copies}
        tasks = group([part for part in parts if locked[part.relation_id] is None])
        alone = [(session, key) for key, session in locked.items() if session is not None]
        ends = self._ends(snapshot, len(tasks) + len(alone))
        work: list[Awaitable[list[dict[str, Any]]]] = []
        for session, relation_id in alone:
            if mine := [part for part in parts if part.relation_id == relation_id]:
                work.append(session.copy(mine, ends))
        if tasks:
            listed = [[part.to_json() for part in task] for task in tasks]
            work.append(self._launcher.submit({"tasks": listed, "ends": asdict(ends)}))
        # One failure must not keep the others from telling what they did.
        results = await asyncio.gather(*work, return_exceptions=True)
        failures: list[dict[str, Any]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            failures += result
        return failures

    def _ends(self, snapshot: HeldSnapshot, task_count: int) -> CopyEnds:
        rate = self._settings.rows_per_second
        return CopyEnds(
            source_url=with_password_of(os.environ, self._source.url.reveal()),
            target_url=with_password_of(os.environ, self._settings.target_url),
            snapshot_name=snapshot.snapshot_name,
            application_name=self._task_name,
            place=self._server.place,
            claim=self._claim.proof,
            rows_per_second=task_rate(rate, self._settings.jobs, task_count),
        )

    async def _finish(self, copy: TableCopy, rows: int, size: int) -> None:
        """A relation's parts are all there: make it whole and hand it over to the stream.

        An exchange that others hinder is tried again later: what it needs is all in the target.
        """
        failpoint("sync.copied")
        try:
            async with target_connection(self._address, self._task_name) as target:
                if copy.is_staged:
                    await target.set_up_origin()
                    await self._exchange(target, copy, rows, size)
                else:
                    await restore_indexes(target, copy.target.name)
                    await self._analyze(target, copy)
                    await self._hand_over(target, copy, rows, size)
                failpoint("sync.catching_up")
                copy.mapped.quarantine.forget(0)
                copy.is_done = True
                self._copying.discard(copy.mapped)
                self._rewrites.pop(copy.mapped, None)
                self._metrics.count_copied(table_labels(copy.mapped), rows, size)
                log.info(
                    "table copied",
                    source=self._source.label,
                    table=copy.name,
                    lsn=str(copy.consistent_point),
                    rows=rows,
                )
                self._events.copy_finished(copy.mapped, copy.consistent_point)
                if copy.is_staged:
                    await self._analyze(target, copy)
        except StreamerError as exc:
            if copy.is_done:
                return  # the target was lost after all was done, and others will notice
            if exc.retry is not Retry.TIMED:
                copy.is_done = True
                await self._refuse(copy.mapped, exc, f'after copying "{copy.name}"')
            elif copy.is_staged and not isinstance(exc, TargetFencedError):
                copy.backoff.log(log, f'exchanging the rows of "{copy.name}" has to wait', exc)
                copy.not_before = time.monotonic() + copy.backoff.next_seconds()
            else:
                raise

    async def _exchange(
        self, target: TargetConnection, copy: TableCopy, rows: int, size: int
    ) -> None:
        """Put the staged rows in the place of the old ones, and hand over, all at once."""
        relation_id = copy.mapped.relation_id
        if await is_handed_over(target, relation_id, copy.consistent_point, attempt=copy.attempt):
            return  # the connection was lost in the commit
        async with transaction(target):
            await exchange_rows(
                target, exchange_of(copy), copy.way, is_referenced=copy.target.is_referenced
            )
            failpoint("sync.exchanged")
            await self._hand_over(target, copy, rows, size)
            await drop_stage(target, relation_id)

    async def _hand_over(
        self, target: TargetConnection, copy: TableCopy, rows: int, size: int
    ) -> None:
        await hand_over(
            target,
            copy.mapped.relation_id,
            copy.consistent_point,
            attempt=copy.attempt,
            rows=rows,
            size=size,
            owns_rows=copy.owns_rows,
            columns=copy.column_numbers,
        )

    async def _analyze(self, target: TargetConnection, copy: TableCopy) -> None:
        with contextlib.suppress(TargetContentionError):
            await target.execute(f"analyze {copy.table}")


def _forget(task: "asyncio.Task[Any]") -> None:
    """Look at how *task* ended, where nobody else did: asyncio logs failures that nobody saw."""
    if not task.cancelled():
        task.exception()
