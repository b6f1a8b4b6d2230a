"""Copies the relations of one source that need it, and hands each over to the stream.

Relations that need a copy are held (`streamer.apply.lane`): the stream goes on for all others, and
what it brings for these is kept on disk. A round copies all that wait:

1. the target tables are there and fit, and it is decided which way rows go: straight into the
   table, or into a staging table (`streamer.sync.prepare`, `streamer.sync.stage`);
2. a snapshot: the one that the main slot exported when it was made, or that of a temporary slot;
3. ``copying`` is stored, indexes are put off, parts are planned and stored;
4. Spark copies parts. A guard transaction keeps every table from being rewritten meanwhile (a part
   is a range of pages), and the connection that exported the snapshot does nothing;
5. as each relation's last part is there: indexes back or rows exchanged, ``catching_up`` with the
   consistent point as its progress, and its lane may drain. What the stream held up to that point
   is dropped, the copy has it.

Dying anywhere leaves a state that says where to begin again (`streamer.sync.states`).
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
import structlog

from streamer.apply.binary import binary_types
from streamer.apply.lane import MappedRelation
from streamer.apply.plan import HISTORY_COLUMNS, SID, computed_cast
from streamer.apply.target import TargetAddress, TargetConnection, target_connection, transaction
from streamer.backoff import Backoff
from streamer.conninfo import with_password_of
from streamer.errors import (
    Retry,
    SnapshotExpiredError,
    SourceConnectionError,
    SparkJobError,
    StreamerError,
    SyncError,
    TargetContentionError,
    TargetFencedError,
)
from streamer.failpoints import failpoint
from streamer.lsn import Lsn
from streamer.observability.metrics import Metrics
from streamer.progress.copies import hand_over, is_handed_over, quarantined_count
from streamer.progress.store import Store
from streamer.route.mapping import (
    SourceMapping,
    TableType,
    parse_name,
)
from streamer.source.catalog import SourceRelation, SourceServer, read_relations
from streamer.source.connection import (
    Connection,
    connection,
    fetch_all,
    fetch_one,
    translating,
)
from streamer.source.slot import ExportedSnapshot, create_slot, sync_slot_name
from streamer.source.waits import Reported
from streamer.sql import quote_columns, quote_identifier, quote_literal, quote_qualified
from streamer.sync.indexes import defer_indexes, read_deferred_targets, restore_indexes
from streamer.sync.launcher import SparkLauncher
from streamer.sync.leaves import know_leaves
from streamer.sync.plan import CopyPart, CopySource, Heap, cut, group
from streamer.sync.prepare import Preparation, TableCopy, exchange_of
from streamer.sync.stage import (
    LOCK_SECONDS,
    create_stage,
    drop_leftover_stages,
    drop_stage,
    exchange_rows,
)

log = structlog.get_logger()

POLL_SECONDS: Final = 0.5
_SIZES_SQL: Final = (
    "pg_catalog.pg_table_size({0}::oid) as size_bytes, pg_catalog.pg_relation_size({0}::oid)"
    " / pg_catalog.current_setting('block_size')::int8 as page_count"
)
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
        return mapped in self._waiting or mapped in self._copying

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
                batch = list(self._waiting)
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
                    await backoff.wait()
                    for mapped in self._unfinished_of(batch):
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
        return [mapped for mapped in batch if mapped in self._copying]

    async def _refuse(
        self, mapped: MappedRelation, error: StreamerError, when: str | None = None
    ) -> None:
        """*mapped* cannot be copied; the others of its round can."""
        self._metrics.count_error(error, self._source.database, self._source.sid)
        await self._fail(mapped, str(error) if when is None else f"{when}: {error}")

    async def _fail(self, mapped: MappedRelation, error: str) -> None:
        await self._store.fail_copy(mapped.relation_id, error)
        self._copying.discard(mapped)
        self._events.copy_failed(mapped, error)
        # What cannot be dropped now is when the next copy begins.
        with contextlib.suppress(StreamerError):
            async with target_connection(self._address, self._application_name) as target:
                await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
                await drop_stage(target, mapped.relation_id)

    # ---- one round -----------------------------------------------------------------------------

    async def _round(self, batch: list[MappedRelation]) -> None:
        snapshot, self._snapshot = self._snapshot, None
        try:
            await self._end_former_tasks()
            async with connection(self._source) as source:
                copies = await self._prepare(source, batch)
                if not copies:
                    return
                if snapshot is None:
                    name = sync_slot_name(self._source.slot)
                    snapshot = await create_slot(
                        self._source,
                        name,
                        self._server.version,
                        temporary=True,
                        tell=lambda what: self._tell(copies, what),
                    )
                    await self._tell(copies, None)
                    failpoint("sync.slot_created")
            await self._copy(copies, snapshot)
        finally:
            if snapshot is not None:
                await snapshot.close()

    async def _tell(self, copies: list[TableCopy], what: str | None) -> None:
        """Show what copies wait for."""
        if what is not None and self._reported.is_new(what):
            tables = [copy.name for copy in copies]
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
    def _task_name(self) -> str:
        return f"streamer copy {self._source_id}"

    async def _prepare(self, source: Connection, batch: list[MappedRelation]) -> list[TableCopy]:
        """See to the target tables; relations for which that fails are in error and left out."""
        relations = await read_relations(source, [mapped.mapping.source for mapped in batch])
        declared = [mapped for mapped in batch if mapped.is_to_declare]
        await know_leaves(self._store, source, declared)
        copies = []
        async with target_connection(self._address, self._application_name) as target:
            await target.set_up_origin()  # rows may be removed
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
                except StreamerError as exc:
                    if exc.retry is Retry.TIMED:
                        raise
                    await self._refuse(mapped, exc)
        return copies

    async def _declare(self, target: TargetConnection, copy: TableCopy) -> None:
        """Take a relation to be in step, without a copy."""
        await hand_over(
            target,
            copy.mapped.relation_id,
            copy.mapped.end_lsn,
            attempt=None,
            rows=0,
            size=0,
            owns_rows=copy.was_created,
        )
        failpoint("sync.catching_up")
        await self._count_quarantined(target, copy)
        self._copying.discard(copy.mapped)
        self._events.copy_finished(copy.mapped, copy.mapped.end_lsn)

    # ---- copying -------------------------------------------------------------------------------

    async def _copy(self, copies: list[TableCopy], snapshot: ExportedSnapshot) -> None:
        for copy in copies:
            copy.consistent_point = snapshot.consistent_point
            self._events.copy_began(copy.mapped, snapshot.consistent_point)
        async with connection(self._source) as guard:
            copies, rewritten = await self._guard(guard, copies, snapshot)
            whole = [copy.mapped for copy in copies if copy.resync.where is None]
            await know_leaves(self._store, guard, whole)
            failpoint("sync.guarded")
            copies = await self._plan(guard, copies)
            failpoint("sync.planned")
            if copies:
                await self._run_job(copies, snapshot, guard)
        if rewritten:
            raise SnapshotExpiredError(f'table "{rewritten[0].name}" was rewritten meanwhile')

    async def _each(
        self, guard: Connection, copies: list[TableCopy], do: Callable[[TableCopy], Awaitable[None]]
    ) -> list[TableCopy]:
        """Do something for each of *copies*, in the transaction of *guard*; return those for which
        it went well. The others are in error.
        """
        done = []
        for copy in copies:
            await guard.execute("savepoint copy")
            try:
                with translating(self._source.label):
                    await do(copy)
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await guard.execute("rollback to savepoint copy")
                await self._refuse(copy.mapped, exc)
            else:
                done.append(copy)
            await guard.execute("release savepoint copy")
        return done

    async def _guard(
        self, guard: Connection, copies: list[TableCopy], snapshot: ExportedSnapshot
    ) -> tuple[list[TableCopy], list[TableCopy]]:
        """Lock the tables against rewriting for as long as *guard* lives; return those that could
        be, and apart from them those that had been rewritten.

        A table that was rewritten between snapshot and lock has other pages than the snapshot
        knows, or none: its copy must begin again with a new snapshot. The others need not: a table
        that is truncated all the time must not keep them from being copied.
        """
        await guard.execute("begin isolation level repeatable read read only")
        await guard.execute(f"set transaction snapshot '{snapshot.snapshot_name}'".encode())
        source_time = (await fetch_one(guard, "select pg_catalog.now()::text as now"))["now"]

        async def lock(copy: TableCopy) -> None:
            name = copy.relation.name
            only = "" if copy.relation.is_partitioned else "only "
            table = quote_qualified(name.namespace, name.name)
            await guard.execute(f"lock table {only}{table} in access share mode".encode())
            copy.source_time = source_time

        copies = await self._each(guard, copies, lock)
        rewritten = await fetch_all(
            guard,
            "select distinct r.oid from pg_catalog.unnest(%s::oid[]) r (oid),"
            " lateral (select r.oid union"
            " select relid from pg_catalog.pg_partition_tree(r.oid)) t (relid)"
            " join pg_catalog.pg_class c on c.oid = t.relid"
            " where c.relkind = 'r' and c.relfilenode <> pg_catalog.pg_relation_filenode(c.oid)",
            [copy.relation.oid for copy in copies],
        )
        oids = {row["oid"] for row in rewritten}
        return [copy for copy in copies if copy.relation.oid not in oids], [
            copy for copy in copies if copy.relation.oid in oids
        ]

    async def _plan(self, guard: Connection, copies: list[TableCopy]) -> list[TableCopy]:
        """Cut relations into parts, and store what is planned; return those for which that went
        well.
        """
        async with target_connection(self._address, self._application_name) as target:

            async def plan(copy: TableCopy) -> None:
                copy.parts = cut(await self._copy_source(guard, copy, target.server_version))
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

            return await self._each(guard, copies, plan)

    async def _defer_indexes(self, target: TargetConnection, copy: TableCopy) -> None:
        # Rows of others are served by these indexes.
        if not await target.fetch_value(f"select exists (select from {copy.table})"):
            await defer_indexes(target, copy.target.name)

    async def _copy_source(
        self, guard: Connection, copy: TableCopy, target_version: int
    ) -> CopySource:
        select: list[str] = []
        names: list[str] = []
        types = binary_types(self._server.version, target_version)
        is_binary = True
        if copy.sid is not None:
            kind = copy.target.columns[SID].type
            is_binary = is_binary and kind == "text"
            select.append(f"{quote_literal(copy.sid)}::text")
            names.append(SID)
        for column in copy.relation.columns:
            name = copy.mapped.mapping.target_column(column.name)
            if column.generated:
                continue  # not published either
            if name is not None and copy.mapped.mapping.is_computed(name):
                continue
            there = copy.target.columns.get(name) if name is not None else None
            if name is None or there is None or there.generated:
                continue
            select.append(quote_identifier(column.name))
            names.append(name)
            is_same = column.type_oid == there.type_oid
            is_binary = is_binary and is_same and column.type_oid in types
        rule = copy.mapped.mapping.rule
        for name, expression in rule.set:
            there = copy.target.columns[name]
            select.append(f"({expression}){computed_cast(there, of_target=False)}")
            names.append(name)
            is_same = there.base_oid == there.type_oid
            is_binary = is_binary and is_same and there.type_oid in types
        if copy.mapped.mapping.type is TableType.HISTORY:
            select += [
                "'1900-01-01 00:00:00+00'::timestamptz",
                "'9999-01-01 00:00:00+00'::timestamptz",
            ]
            select.append("false")
            names += HISTORY_COLUMNS
            history = [copy.target.columns[name].type for name in names[-3:]]
            is_binary = is_binary and history == ["timestamp with time zone"] * 2 + ["boolean"]
        copy.columns = tuple(names)
        heaps, can_split = await self._heaps(guard, copy.relation)
        return CopySource(
            relation_id=copy.mapped.relation_id,
            attempt=copy.attempt,
            select_list=", ".join(select),
            condition=None if rule.filter is None else rule.filter.text,
            into=(copy.destination, quote_columns(names)),
            binary=is_binary and bool(names),
            heaps=heaps,
            can_split=can_split and self._server.version >= 14_00_00,
        )

    async def _heaps(
        self, guard: Connection, relation: SourceRelation
    ) -> tuple[tuple[Heap, ...], bool]:
        """Return what of *relation* has storage, and whether it can be read by ranges of pages."""
        quoted = quote_qualified(relation.name.namespace, relation.name.name)
        if not relation.is_partitioned:
            sizes = await fetch_one(guard, f"select {_SIZES_SQL}".format("%s"), *[relation.oid] * 2)
            return (Heap(f"only {quoted}", **sizes),), True
        leaves = await fetch_all(
            guard,
            "select pg_catalog.format('%%I.%%I', n.nspname, c.relname) as quoted,"
            f" c.relkind = 'r' as is_table, {_SIZES_SQL.format('c.oid')},"
            " pg_catalog.has_table_privilege(c.oid, 'select') as selectable"
            " from pg_catalog.pg_partition_tree(%s::oid) t"
            " join pg_catalog.pg_class c on c.oid = t.relid"
            " join pg_catalog.pg_namespace n on n.oid = c.relnamespace where t.isleaf",
            relation.oid,
        )
        heaps = [
            Heap(f"only {leaf['quoted']}", leaf["size_bytes"], leaf["page_count"])
            for leaf in leaves
        ]
        if all(leaf["is_table"] and leaf["selectable"] for leaf in leaves):
            return tuple(heaps), True
        pages = max(1, sum(heap.page_count for heap in heaps))
        return (Heap(quoted, relation.size_bytes, pages),), False

    async def _run_job(
        self, copies: list[TableCopy], snapshot: ExportedSnapshot, guard: Connection
    ) -> None:
        """Let Spark copy the parts, finishing relations as they are complete."""
        backoff = Backoff(first=0.5)
        submitted: list[CopyPart] | None = None
        while True:
            unfinished = await self._unfinished(copies)
            if all(copy.is_done for copy in copies):
                return
            if not unfinished:
                await asyncio.sleep(POLL_SECONDS)
                continue
            if unfinished == submitted:
                await self._wait_for_reach(unfinished, backoff)
            submitted = unfinished
            submitting = asyncio.create_task(
                self._launcher.submit(self._job(unfinished, snapshot)), name="spark job"
            )
            failpoint("sync.job_started")
            try:
                await self._watch(copies, submitting, snapshot, guard)
                failures = submitting.result()
            except SparkJobError as exc:
                if not snapshot.is_alive:
                    raise _snapshot_lost() from exc
                # Parts that are copied stay so; the snapshot still stands.
                backoff.log(log, "the Spark job is started again", exc)
                await backoff.wait()
                submitted = None
                continue
            finally:
                submitting.add_done_callback(_forget)
                submitting.cancel()
            if failures and not snapshot.is_alive:
                raise _snapshot_lost()
            by_id = {copy.mapped.relation_id: copy for copy in copies}
            for failure in failures:
                copy = by_id[failure["relation_id"]]
                if not copy.is_done:
                    copy.is_done = True
                    await self._fail(copy.mapped, f'copying "{copy.name}": {failure["error"]}')

    async def _wait_for_reach(self, parts: list[CopyPart], backoff: Backoff) -> None:
        """A job ended well and has copied nothing: its tasks did not find what they were to do."""
        error = SparkJobError(
            f"Spark has run {len(parts)} parts and copied none",
            hint="do the urls of source and target mean the same servers where its workers run?",
        )
        self._metrics.count_error(error, self._source.database, self._source.sid)
        backoff.log(log, "the Spark job is started again", error)
        await backoff.wait()

    async def _unfinished(self, copies: list[TableCopy]) -> list[CopyPart]:
        """Finish relations all of whose parts are copied; return the parts still to copy."""
        active = [copy for copy in copies if not copy.is_done]
        async with self._store.connection() as store:
            rows = await store.fetch(
                "select relation_id, part, rows_copied, bytes_copied from streamer.sync_partition"
                " where relation_id = any ($1::int8[]) and finished_at is not null",
                [copy.mapped.relation_id for copy in active],
            )
        copied = {(row["relation_id"], row["part"]): row for row in rows}
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
        self,
        copies: list[TableCopy],
        submitting: "asyncio.Task[Any]",
        snapshot: ExportedSnapshot,
        guard: Connection,
    ) -> None:
        while True:
            done, _ = await asyncio.wait([submitting], timeout=POLL_SECONDS)
            await self._unfinished(copies)
            if done:
                return
            if not snapshot.is_alive or guard.closed or guard.broken:
                raise _snapshot_lost()
            try:
                await guard.execute("select 1")
            except psycopg.Error as exc:
                raise SourceConnectionError("the connection that guards the copy was lost") from exc

    def _job(self, parts: list[CopyPart], snapshot: ExportedSnapshot) -> dict[str, Any]:
        rate = self._settings.rows_per_second
        return {
            "tasks": [[part.to_json() for part in task] for task in group(parts)],
            "ends": {
                "source_url": with_password_of(os.environ, self._source.url.reveal()),
                "target_url": with_password_of(os.environ, self._settings.target_url),
                "snapshot_name": snapshot.snapshot_name,
                "application_name": self._task_name,
                "rows_per_second": None if rate is None else rate / self._settings.jobs,
            },
        }

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
                await self._count_quarantined(target, copy)
                copy.is_done = True
                self._copying.discard(copy.mapped)
                self._metrics.count_copied(copy.mapped, rows, size)
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
        )

    async def _count_quarantined(self, target: TargetConnection, copy: TableCopy) -> None:
        copy.mapped.quarantine.forget(await quarantined_count(target, copy.mapped.relation_id))

    async def _analyze(self, target: TargetConnection, copy: TableCopy) -> None:
        with contextlib.suppress(TargetContentionError):
            await target.execute(f"analyze {copy.table}")


def _forget(task: "asyncio.Task[Any]") -> None:
    """Look at how *task* ended, where nobody else did: asyncio logs failures that nobody saw."""
    if not task.cancelled():
        task.exception()


def _snapshot_lost() -> SnapshotExpiredError:
    return SnapshotExpiredError("the connection that held the snapshot was lost")
