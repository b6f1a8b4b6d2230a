"""Copies the relations of one source that need it, and hands each over to the stream.

Relations that need a copy are held (`streamer.apply.lane`): the stream goes on for all others, and
what it brings for these is kept on disk. A round copies all that wait:

1. the target tables are there, and hold nothing of this source that we did not write;
2. a snapshot: the one that the main slot exported when it was made, or that of a temporary slot;
3. ``copying`` is stored, indexes are put off, parts are planned and stored;
4. Spark copies parts. A guard transaction keeps every table from being rewritten meanwhile (a part
   is a range of pages), and the connection that exported the snapshot does nothing;
5. as each relation's last part is there: indexes back, ANALYZE, ``catching_up`` with the consistent
   point as its progress, and its lane may drain. What the stream held up to that point is dropped,
   the copy has it.

Dying anywhere leaves a state that says where to begin again (`streamer.sync.states`).
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import psycopg
import structlog

from streamer.apply.binary import binary_types
from streamer.apply.catalog import TargetRelation, read_relation
from streamer.apply.columns import add_columns
from streamer.apply.lane import MappedRelation
from streamer.apply.plan import SID, make_plan, missing_columns
from streamer.apply.target import TargetAddress, TargetConnection, target_connection, transaction
from streamer.backoff import Backoff
from streamer.errors import (
    Retry,
    SnapshotExpiredError,
    SourceConnectionError,
    SparkJobError,
    StreamerError,
    SyncError,
    TargetContentionError,
    TargetRejectedError,
    TargetSchemaError,
)
from streamer.failpoints import failpoint
from streamer.lsn import NOTHING, Lsn
from streamer.observability.metrics import Metrics
from streamer.progress.store import Store
from streamer.route.mapping import (
    OnColumnAdded,
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
from streamer.source.slot import ExportedSnapshot, create_slot
from streamer.source.types import read_types
from streamer.sql import quote_columns, quote_identifier, quote_literal, quote_qualified
from streamer.sync.indexes import defer_indexes, read_deferred_targets, restore_indexes
from streamer.sync.launcher import SparkLauncher
from streamer.sync.plan import CopyPart, CopySource, Heap, cut, group
from streamer.sync.tables import create_table, published_relation

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


@dataclass(eq=False, slots=True)
class _Copy:
    """One relation in a round."""

    mapped: MappedRelation
    relation: SourceRelation
    target: TargetRelation
    was_created: bool
    attempt: int = 0
    consistent_point: Lsn = NOTHING
    parts: list[CopyPart] = field(default_factory=list)
    is_done: bool = False

    @property
    def name(self) -> str:
        return str(self.mapped.mapping.source)


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
        self._waiting: dict[MappedRelation, None] = {}
        self._copying: set[MappedRelation] = set()
        """What was taken from `_waiting` and is neither handed over nor in error."""
        self._wanted = asyncio.Event()
        self._snapshot: ExportedSnapshot | None = None

    def request(self, mapped: MappedRelation) -> None:
        """Copy *mapped*, in the next round."""
        self._waiting[mapped] = None
        self._wanted.set()

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
        """Make indexes again that a process left put off when it died, where nobody copies any
        more.
        """
        async with target_connection(self._address, self._application_name) as target:
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

    async def _refuse(self, mapped: MappedRelation, error: StreamerError) -> None:
        """*mapped* cannot be copied; the others of its round can."""
        self._metrics.count_error(error, self._source.database, self._source.sid)
        await self._fail(mapped, str(error))

    async def _fail(self, mapped: MappedRelation, error: str) -> None:
        await self._store.fail_copy(mapped.relation_id, error)
        self._copying.discard(mapped)
        self._events.copy_failed(mapped, error)

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
                    name = f"{self._source.slot[:44]}_sync_{secrets.token_hex(4)}"
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

    async def _tell(self, copies: list[_Copy], what: str | None) -> None:
        """Show what copies wait for."""
        if what is not None:
            tables = [copy.name for copy in copies]
            log.warning("waiting", source=self._source.label, tables=tables, reason=what)
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

    async def _prepare(self, source: Connection, batch: list[MappedRelation]) -> list[_Copy]:
        """See to the target tables; relations for which that fails are in error and left out."""
        relations = await read_relations(source, [mapped.mapping.source for mapped in batch])
        copies = []
        async with target_connection(self._address, self._application_name) as target:
            await target.set_up_origin()  # rows may be removed
            for mapped in batch:
                relation = relations.get(mapped.mapping.source)
                try:
                    if relation is None:
                        raise SyncError(f'table "{mapped.mapping.source}" is not in the source')
                    copy = await self._prepare_one(source, target, mapped, relation)
                    if mapped.is_to_declare:
                        await self._hand_over(copy, mapped.end_lsn, 0, 0)
                    else:
                        copy.attempt = await self._begin_attempt(target, copy)
                        failpoint("sync.prepared")
                        copies.append(copy)
                except StreamerError as exc:
                    if exc.retry is Retry.TIMED:
                        raise
                    await self._refuse(mapped, exc)
        return copies

    async def _prepare_one(
        self,
        source: Connection,
        target: TargetConnection,
        mapped: MappedRelation,
        relation: SourceRelation,
    ) -> _Copy:
        if not mapped.is_to_declare:
            self._check_readable(relation)
        was_created = False
        there = await read_relation(target, mapped.mapping.target)
        if there is None and self._settings.create_tables:
            oids = {column.type_oid for column in relation.columns}
            types = await read_types(source, oids, self._server.version)
            was_created = await create_table(
                target, relation, mapped.mapping, mapped.source.sid, types
            )
            failpoint("sync.table_created")
            there = await read_relation(target, mapped.mapping.target)
        if there is None:
            raise TargetSchemaError(
                f'target table "{mapped.mapping.target}" does not exist',
                hint="create it, or set target.create_tables: true",
            )
        if not mapped.is_to_declare:
            there = await self._check_fits(target, mapped, relation, there)
        return _Copy(mapped, relation, there, was_created)

    async def _check_fits(
        self,
        target: TargetConnection,
        mapped: MappedRelation,
        relation: SourceRelation,
        there: TargetRelation,
    ) -> TargetRelation:
        """Refuse before anything is copied what the stream would refuse; add columns as it would.

        Returns what the target is then.
        """
        mapping, published = mapped.mapping, published_relation(relation)
        types = {column.name: column.type for column in relation.columns}
        missing = missing_columns(published, mapping, there)
        if missing and mapping.rule.on_column_added is OnColumnAdded.ADD:
            columns = [(name, types[source]) for source, name in missing]
            await add_columns(self._address, mapping.target, columns)
            there = await read_relation(target, mapping.target) or there
        make_plan(
            published,
            mapping,
            there,
            sid=mapped.source.sid,
            primary_key=mapped.source.primary_key,
            has_partial_key=mapped.source.has_partial_key,
            type_names=types,
        )
        return there

    def _check_readable(self, relation: SourceRelation) -> None:
        """Refuse what a copy could not read, or not all of."""
        if relation.row_security:
            raise SyncError(
                f'row level security would hide rows of "{relation.name}" from the copy',
                hint="run at the source: alter role … bypassrls, "
                "or make our role the table's owner",
            )
        if not relation.selectable:
            quoted = quote_qualified(relation.name.namespace, relation.name.name)
            raise SyncError(
                f'"{relation.name}" cannot be read by role "{self._server.role}"',
                hint=f"run at the source: grant select on {quoted} "
                f"to {quote_identifier(self._server.role)}",
            )

    async def _begin_attempt(self, target: TargetConnection, copy: _Copy) -> int:
        """Store ``copying`` and a new attempt, with nothing of this source left in the target
        table.

        A table with rows that we did not write is refused, unless the mapping lets us remove them.
        """
        mapped = copy.mapped
        async with transaction(target):
            rows = await target.fetch(
                "update streamer.relation set attempt = attempt + 1,"
                " state = case state when 'paused' then state else 'copying' end,"
                " error = null, snapshot_lsn = null, rows_total = null,"
                " rows_copied = 0, bytes_copied = 0,"
                " target_created = target_created or $2, changed_at = now()"
                " where id = $1 returning attempt, target_created",
                mapped.relation_id,
                copy.was_created,
            )
            attempt = int(rows[0]["attempt"])
            is_ours = bool(rows[0]["target_created"]) or attempt > 1
            if await self._has_rows(target, copy):
                rule = mapped.mapping.rule
                if not is_ours and not rule.truncate_target:
                    raise SyncError(
                        f'target table "{mapped.mapping.target}" already holds rows of this source',
                        hint="empty it, or set `truncate_target: true`, "
                        "or `initial: none` if it is in step with the source",
                    )
                await self._clear(target, copy)
            await target.execute(
                "delete from streamer.sync_partition where relation_id = $1", mapped.relation_id
            )
        return attempt

    def _own_rows(self, copy: _Copy) -> str:
        """Return the condition for rows that this source has written."""
        if not self._writes_sid(copy):
            return "true"
        assert self._source.sid is not None
        return f"{quote_identifier(SID)} = {quote_literal(self._source.sid)}"

    def _writes_sid(self, copy: _Copy) -> bool:
        own = {copy.mapped.mapping.target_column(name) for name in copy.relation.column_names}
        return copy.target.has_sid and SID not in own and self._source.sid is not None

    async def _has_rows(self, target: TargetConnection, copy: _Copy) -> bool:
        quoted = quote_qualified(copy.target.name.namespace, copy.target.name.name)
        exists = f"select exists (select from {quoted} where {self._own_rows(copy)})"
        return bool(await target.fetch_value(exists))

    async def _clear(self, target: TargetConnection, copy: _Copy) -> None:
        quoted = quote_qualified(copy.target.name.namespace, copy.target.name.name)
        condition = self._own_rows(copy)
        if condition == "true" and not copy.target.is_referenced:
            await target.execute(f"truncate {quoted}")
        else:
            # Refused to an ordinary role, and a refusal would take the whole transaction along.
            await target.execute("savepoint before_role")
            try:
                await target.execute("set local session_replication_role = replica")
            except TargetRejectedError:
                await target.execute("rollback to savepoint before_role")
            await target.execute(f"delete from {quoted} where {condition}")

    # ---- copying -------------------------------------------------------------------------------

    async def _copy(self, copies: list[_Copy], snapshot: ExportedSnapshot) -> None:
        for copy in copies:
            copy.consistent_point = snapshot.consistent_point
            self._events.copy_began(copy.mapped, snapshot.consistent_point)
        async with connection(self._source) as guard:
            copies, rewritten = await self._guard(guard, copies, snapshot)
            failpoint("sync.guarded")
            copies = await self._plan(guard, copies)
            failpoint("sync.planned")
            if copies:
                await self._run_job(copies, snapshot, guard)
        if rewritten:
            raise SnapshotExpiredError(f'table "{rewritten[0].name}" was rewritten meanwhile')

    async def _each(
        self, guard: Connection, copies: list[_Copy], do: Callable[[_Copy], Awaitable[None]]
    ) -> list[_Copy]:
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
        self, guard: Connection, copies: list[_Copy], snapshot: ExportedSnapshot
    ) -> tuple[list[_Copy], list[_Copy]]:
        """Lock the tables against rewriting for as long as *guard* lives; return those that could
        be, and apart from them those that had been rewritten.

        A table that was rewritten between snapshot and lock has other pages than the snapshot
        knows, or none: its copy must begin again with a new snapshot. The others need not: a table
        that is truncated all the time must not keep them from being copied.
        """
        await guard.execute("begin isolation level repeatable read read only")
        await guard.execute(f"set transaction snapshot '{snapshot.snapshot_name}'".encode())

        async def lock(copy: _Copy) -> None:
            name = copy.relation.name
            only = "" if copy.relation.is_partitioned else "only "
            table = quote_qualified(name.namespace, name.name)
            await guard.execute(f"lock table {only}{table} in access share mode".encode())

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

    async def _plan(self, guard: Connection, copies: list[_Copy]) -> list[_Copy]:
        """Cut relations into parts, and store what is planned; return those for which that went
        well.
        """
        async with target_connection(self._address, self._application_name) as target:

            async def plan(copy: _Copy) -> None:
                copy.parts = cut(await self._copy_source(guard, copy, target.server_version))
                if self._settings.defer_indexes and not await self._has_rows(target, copy):
                    await self._defer_indexes(target, copy)
                async with transaction(target):
                    await target.execute(
                        "update streamer.relation set rows_total = $2 where id = $1",
                        copy.mapped.relation_id,
                        copy.relation.row_count_estimate,
                    )
                    await target.execute(
                        "insert into streamer.sync_partition"
                        " (relation_id, part, attempt, description)"
                        " select $1, * from unnest($2::int4[], $3::int4[], $4::text[])",
                        copy.mapped.relation_id,
                        [part.part for part in copy.parts],
                        [part.attempt for part in copy.parts],
                        [part.description for part in copy.parts],
                    )

            return await self._each(guard, copies, plan)

    async def _defer_indexes(self, target: TargetConnection, copy: _Copy) -> None:
        name = copy.target.name
        quoted = quote_qualified(name.namespace, name.name)
        # Rows of others are served by these indexes.
        if not await target.fetch_value(f"select exists (select from {quoted})"):
            await defer_indexes(target, name)

    async def _copy_source(self, guard: Connection, copy: _Copy, target_version: int) -> CopySource:
        select: list[str] = []
        names: list[str] = []
        types = binary_types(self._server.version, target_version)
        is_binary = True
        if self._writes_sid(copy):
            assert self._source.sid is not None
            kind = copy.target.columns[SID].type
            is_binary = is_binary and kind == "text"
            select.append(f"{quote_literal(self._source.sid)}::text")
            names.append(SID)
        for column in copy.relation.columns:
            name = copy.mapped.mapping.target_column(column.name)
            if column.generated:
                continue  # not published either
            there = copy.target.columns.get(name) if name is not None else None
            if name is None or there is None or there.generated:
                continue
            select.append(quote_identifier(column.name))
            names.append(name)
            is_same = column.type_oid == there.type_oid
            is_binary = is_binary and is_same and column.type_oid in types
        if copy.mapped.mapping.type is TableType.HISTORY:
            select += [
                "'1900-01-01 00:00:00+00'::timestamptz",
                "'9999-01-01 00:00:00+00'::timestamptz",
            ]
            select.append("false")
            names += ["kvsz_start", "kvsz_end", "kvsz_deleted"]
            history = [copy.target.columns[name].type for name in names[-3:]]
            is_binary = is_binary and history == ["timestamp with time zone"] * 2 + ["boolean"]
        target_name = copy.target.name
        quoted = quote_qualified(target_name.namespace, target_name.name)
        columns = f" ({quote_columns(names)})" if names else ""
        heaps, can_split = await self._heaps(guard, copy.relation)
        return CopySource(
            relation_id=copy.mapped.relation_id,
            attempt=copy.attempt,
            select_list=", ".join(select),
            condition=copy.mapped.mapping.rule.filter,
            copy_in=f"copy {quoted}{columns} from stdin",
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
        self, copies: list[_Copy], snapshot: ExportedSnapshot, guard: Connection
    ) -> None:
        """Let Spark copy the parts, finishing relations as they are complete."""
        backoff = Backoff(first=0.5)
        submitted: list[CopyPart] | None = None
        while True:
            unfinished = await self._unfinished(copies)
            if not unfinished:
                return
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

    async def _unfinished(self, copies: list[_Copy]) -> list[CopyPart]:
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
            if not missing:
                done = [copied[p.relation_id, p.part] for p in copy.parts]
                copy.is_done = True
                await self._finish(
                    copy,
                    sum(row["rows_copied"] for row in done),
                    sum(row["bytes_copied"] for row in done),
                )
        return remaining

    async def _watch(
        self,
        copies: list[_Copy],
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
                "source_url": self._source.url.reveal(),
                "target_url": self._settings.target_url,
                "snapshot_name": snapshot.snapshot_name,
                "application_name": self._task_name,
                "rows_per_second": None if rate is None else rate / self._settings.jobs,
            },
        }

    async def _finish(self, copy: _Copy, rows: int, size: int) -> None:
        """A relation's parts are all there: make it whole and hand it over to the stream."""
        mapped = copy.mapped
        failpoint("sync.copied")
        name = copy.target.name
        async with target_connection(self._address, self._application_name) as target:
            try:
                await restore_indexes(target, name)
                with contextlib.suppress(TargetContentionError):
                    await target.execute(f"analyze {quote_qualified(name.namespace, name.name)}")
            except StreamerError as exc:
                if exc.retry is Retry.TIMED:
                    raise
                await self._fail(mapped, f'after copying "{copy.name}": {exc}')
                return
        self._metrics.count_copied(mapped, rows, size)
        log.info("table copied", source=self._source.label, table=copy.name, rows=rows)
        await self._hand_over(copy, copy.consistent_point, rows, size)

    async def _hand_over(self, copy: _Copy, lsn: Lsn, rows: int, size: int) -> None:
        """From *lsn* on the stream brings the changes of a relation."""
        async with self._store.connection() as store:
            await store.execute(
                # The copy has what was in quarantine, too.
                "with gone as (delete from streamer.quarantine where relation_id = $1)"
                " update streamer.relation set"
                " state = case state when 'paused' then state else 'catching_up' end,"
                " snapshot_lsn = $2::text::pg_lsn, end_lsn = $2::text::pg_lsn,"
                " rows_copied = $3, rows_total = $3, bytes_copied = $4,"
                " declared = declared or $5, filling = false, error = null, changed_at = now()"
                " where id = $1",
                copy.mapped.relation_id,
                str(lsn),
                rows,
                size,
                copy.mapped.is_to_declare,
            )
        failpoint("sync.catching_up")
        self._copying.discard(copy.mapped)
        self._events.copy_finished(copy.mapped, lsn)


def _snapshot_lost() -> SnapshotExpiredError:
    return SnapshotExpiredError("the connection that held the snapshot was lost")
