"""The target transaction: changes and the progress they stand for, committed together.

An `Applier` owns one connection and knows nothing of queues. Whoever drives it (a worker, or a
drainer of a held lane) says begin, writes windows, and commits with the progress reached. Dying
anywhere before the commit leaves the target as it was; dying after it leaves progress rows that
make a restart skip what is there.

Progress rows are compared before they are set: if another process moved one meanwhile, this one has
been replaced and its transaction must not commit.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Final

from streamer.apply.advice import advise
from streamer.apply.counting import table_labels
from streamer.apply.fold import Fold
from streamer.apply.key_order import Removal, in_key_order, is_connected, removal_of
from streamer.apply.lane import LaneWindow, MappedRelation, RelationWindow
from streamer.apply.plan import ApplyPlan, Identity
from streamer.apply.sql.copydata import Picker, constant, encode_rows
from streamer.apply.sql.expressions import statements_for
from streamer.apply.sql.staged import OrderedRun, by_unchanged, staged_values
from streamer.apply.sql.statements import (
    OP_DELETE,
    OP_FIRST_MOVED,
    OP_FIRST_UPDATED,
    OP_INSERT,
    SEVERAL_ROWS,
    Statements,
)
from streamer.apply.sql.wide_rows import SplitStatements, statements_in_order
from streamer.decode.tuples import Row
from streamer.errors import (
    ConflictError,
    RowTooLargeError,
    StreamerError,
    TargetConnectionError,
    TargetError,
    TargetFencedError,
    TargetMovedError,
    TargetSchemaError,
    TextEncodingError,
)
from streamer.failpoints import failpoint
from streamer.lsn import Lsn
from streamer.mapping.rules import TableType
from streamer.observability.metrics import Metrics
from streamer.target.claim import Claim
from streamer.target.connection import TargetAddress, TargetConnection

STAGES_MAX: Final = 200
"""Staging tables kept per connection; the least recently used goes first."""

_PROGRESS_SQL: Final = """
update streamer.relation r set end_lsn = p.new_lsn::pg_lsn
from unnest($1::int8[], $2::text[], $3::text[]) p (id, old_lsn, new_lsn),
     unnest($4::int8[], $5::text[]) c (source_id, token), streamer.source s
where r.id = p.id and r.end_lsn = p.old_lsn::pg_lsn
  and s.id = r.source_id and c.source_id = s.id and c.token = s.lock_token
returning r.id
"""
_END_SESSION_SQL: Final = """
select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity
where pid = $1 and usename = current_user and application_name = pg_catalog.left($2, 63)
"""
_READ_PROGRESS_SQL: Final = """
select id, end_lsn::text as end_lsn from streamer.relation where id = any ($1::int8[]) for update
"""
_SAME_TYPES_SQL: Final = """
select bool_and(exists (select from pg_catalog.pg_attribute a
                         where a.attrelid = pg_catalog.to_regclass($1) and a.attname = c.name
                           and a.atttypid = c.type_oid::oid))
from unnest($2::text[], $3::int8[]) c (name, type_oid)
"""

HAS_DEFERRED_SQL: Final = """
select exists (select from streamer.deferred_index where target = $1)
"""


class Applier:
    """One connection to the target, and the transaction on it."""

    def __init__(
        self, address: TargetAddress, name: str, metrics: Metrics, *, lock_seconds: float
    ) -> None:
        self._address = address
        self._name = name
        self._metrics = metrics
        self._lock_seconds = lock_seconds
        self._connection: TargetConnection | None = None
        self._stages: OrderedDict[str, Statements] = OrderedDict()
        self._used_stages: set[str] = set()
        self._given_up: int | None = None
        self._claims: Collection[Claim] = ()
        self._committing: dict[MappedRelation, Lsn] = {}
        self._conflicts: list[tuple[MappedRelation, str, int]] = []

    @property
    def _target(self) -> TargetConnection:
        if self._connection is None:
            raise TargetConnectionError("target: not connected")
        return self._connection

    @property
    def is_broken(self) -> bool:
        return self._connection is None or self._connection.is_closed

    async def connect(self, claims: Collection[Claim] | None = None) -> None:
        """Connect unless connected, to the server where *claims* (those of before, if none are
        given) were taken.

        Raises TargetConnectionError, TargetRejectedError; TargetMovedError for claims that cannot
        be proven on a connection that was opened just now.
        """
        if claims is not None:
            self._claims = claims
        if not self.is_broken:
            try:
                await self._prove_claims()
            except TargetMovedError:
                self.disconnect()
            else:
                return
        await self._open()
        await self._prove_claims()

    async def _prove_claims(self) -> None:
        missing = []
        for claim in self._claims:
            try:
                await self._target.prove(claim)
            except TargetMovedError as exc:
                missing.append(claim)
                error = exc
        if missing:
            raise TargetMovedError(error.message, claims=missing)

    async def _open(self) -> None:
        self._forget_stages()
        connection = await TargetConnection.connect(self._address, self._name, applies=True)
        try:
            milliseconds = int(self._lock_seconds * 1000)
            await connection.fetch_value(
                "select set_config('lock_timeout', $1, false)", str(milliseconds)
            )
            if self._given_up is not None:
                # It may not know yet that we are gone, and hold what we are about to lock.
                await connection.execute(_END_SESSION_SQL, self._given_up, self._name)
                self._given_up = None
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection

    def disconnect(self) -> None:
        """Drop the connection; the server rolls back what was not committed."""
        if self._connection is not None:
            self._given_up = self._connection.backend_pid
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._committing = {}  # nobody who comes later has a part in that commit

    # ---- the transaction -----------------------------------------------------------------------

    async def begin(self) -> None:
        self._used_stages.clear()
        self._conflicts.clear()
        # A deferrable constraint is checked at the source's commit at the latest, not before.
        await self._target.execute("begin; set constraints all deferred")

    def _forget_stages(self) -> None:
        # Staging tables made in a transaction go with it; asking for them again is cheap.
        self._stages.clear()
        self._used_stages.clear()

    async def rollback(self) -> None:
        """Roll back; a connection that is lost has done so already."""
        self._forget_stages()
        if self._connection is None or self._connection.is_closed:
            self.disconnect()
            return
        try:
            await self._connection.execute("rollback")
        except TargetError:
            self.disconnect()

    async def savepoint(self) -> None:
        await self._target.execute("savepoint streamer")

    async def release_savepoint(self) -> None:
        await self._target.execute("release savepoint streamer")

    async def rollback_to_savepoint(self) -> None:
        self._forget_stages()
        await self._target.execute("rollback to savepoint streamer")

    async def check_constraints(self) -> None:
        """Make deferred constraints speak now."""
        await self._target.execute("set constraints all immediate; set constraints all deferred")

    async def commit(self, progress: dict[MappedRelation, Lsn]) -> None:
        """Store *progress* and commit. Raises TargetFencedError; the transaction is then rolled
        back.

        When the connection is lost here the outcome is unknown until `settle` has been asked.
        """
        moved = [(mapped, lsn) for mapped, lsn in progress.items() if lsn > mapped.end_lsn]
        failpoint("apply.before_progress")
        if moved:
            rows = await self._target.fetch(
                _PROGRESS_SQL,
                [mapped.relation_id for mapped, _ in moved],
                [str(mapped.end_lsn) for mapped, _ in moved],
                [str(lsn) for _, lsn in moved],
                [claim.source_id for claim in self._claims],
                [claim.token for claim in self._claims],
            )
            found = {row["id"] for row in rows}
            if fenced := [mapped for mapped, _ in moved if mapped.relation_id not in found]:
                await self.rollback()
                raise _fenced(fenced)
        failpoint("apply.before_commit")
        self._committing = dict(moved)
        # Cancelled here, we still learn whether the commit was made: what is durable must be known
        # so.
        committing = asyncio.ensure_future(self._target.commit())
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            with contextlib.suppress(StreamerError):
                await committing
                self._set_committed()
            raise
        except TargetConnectionError:
            raise
        except StreamerError:
            self._committing = {}
            raise
        failpoint("apply.after_commit")
        self._set_committed()

    def _set_committed(self) -> None:
        for mapped, lsn in self._committing.items():
            mapped.end_lsn = lsn
        self._committing = {}
        for mapped, kind, number in self._conflicts:
            self._metrics.count_conflict(table_labels(mapped), kind, number)
        self._conflicts.clear()

    def forget(self, relations: Collection[MappedRelation]) -> None:
        """The outcome of a commit no longer matters to *relations*: their source begins again."""
        for mapped in relations:
            self._committing.pop(mapped, None)

    async def settle(self) -> bool:
        """After a lost connection: whether the commit that was under way was made.

        Waits for the old backend, should it still be at it: it holds the progress rows.
        """
        if not self._committing:
            return False
        rows = await self._target.fetch(
            _READ_PROGRESS_SQL, [mapped.relation_id for mapped in self._committing]
        )
        stored = {row["id"]: Lsn.parse(row["end_lsn"]) for row in rows}
        done = [stored.get(mapped.relation_id) == lsn for mapped, lsn in self._committing.items()]
        if all(done):
            self._set_committed()
            return True
        fenced = [m for m in self._committing if stored.get(m.relation_id) != m.end_lsn]
        self._committing = {}
        if fenced:
            raise _fenced(fenced)
        return False

    # ---- writing -------------------------------------------------------------------------------

    async def write(self, window: LaneWindow) -> None:
        """Write a window as sets where that gives the same result, else in exact order.

        Of tables that foreign keys connect, rows that are referred to are written before those that
        refer to them, and removed after them.
        """
        if not self._orders_by_keys(window):
            for relation in window.relations.values():
                await self._write_relation(window, relation)
            return
        relations = in_key_order(window.relations.values())
        removals = [
            removal_of(r, keeps_keys=r.is_set and all(map(self._keeps_keys, r.folds)))
            for r in relations
        ]
        steps = list(zip(relations, removals, strict=True))
        await self._remove(step for step in reversed(steps) if step[1] is Removal.FIRST)
        for relation, removal in steps:
            if removal is Removal.WITHIN:
                await self._write_relation(window, relation)
            elif relation.folds[0].truncate and removal is Removal.LAST:
                await self._replace_rows(relation.mapped, relation.folds[0], removes=False)
            else:
                await self._write_fold(relation.mapped, relation.folds[0].additions())
        await self._remove(step for step in reversed(steps) if step[1] is Removal.LAST)

    def _orders_by_keys(self, window: LaneWindow) -> bool:
        return self._target.checks_foreign_keys and is_connected(window)

    async def _remove(self, steps: Iterable[tuple[RelationWindow, Removal]]) -> None:
        for relation, removal in steps:
            (fold,) = relation.folds
            if fold.truncate and removal is Removal.LAST:
                await self._replace_rows(relation.mapped, fold, adds=False)
            else:
                await self._write_fold(relation.mapped, fold.removals())

    async def _write_relation(self, window: LaneWindow, relation: RelationWindow) -> None:
        if relation.is_set:
            for fold in relation.folds:
                await self._write_fold(relation.mapped, fold)
        else:
            await self._write_ordered(window, relation.mapped, 0, len(window.shares))

    async def write_in_order(
        self, window: LaneWindow, start: int, stop: int, *, reverse: bool = False
    ) -> None:
        """Write the shares from number *start* to before *stop* of a window in exact order.

        The order is exact for each table. Of tables that foreign keys connect, those that others
        refer to come first; with *reverse* they come last. An error's ``share_number`` tells which
        share is at fault, where that is known.
        """
        relations = list(window.relations)
        if self._orders_by_keys(window):
            relations = [each.mapped for each in in_key_order(window.relations.values())]
        for mapped in reversed(relations) if reverse else relations:
            await self._write_ordered(window, mapped, start, stop)

    async def _stage(self, statements: Statements) -> None:
        """See to it that the staging table of *statements* is there and empty."""
        stage = statements.stage
        if stage not in self._stages:
            while len(self._stages) >= STAGES_MAX:
                _, oldest = self._stages.popitem(last=False)
                await self._target.execute(oldest.drop_stage)
            await self._target.execute(statements.create_stage)
            self._stages[stage] = statements
        self._stages.move_to_end(stage)
        if stage in self._used_stages:
            await self._target.execute(statements.truncate_stage)
        self._used_stages.add(stage)

    def _count_conflict(self, mapped: MappedRelation, kind: str, number: int) -> None:
        if number > 0:
            self._conflicts.append((mapped, kind, number))

    async def _write_fold(self, mapped: MappedRelation, fold: Fold) -> None:
        plan = fold.plan
        failpoint("apply.write")
        if fold.truncate and self._keeps_keys(fold):
            await self._replace_rows(mapped, fold)
            return
        if fold.truncate:
            await self._target.execute(Statements(plan).truncate)
        is_staged = plan.has_expressions  # rows that are only inserted too
        if fold.deletes or fold.updates or fold.moves or (is_staged and fold.inserts):
            statements = statements_for(plan)
            await self._stage(statements)
            async with self._planned_for(mapped, plan):
                await self._write_changes(mapped, fold, statements)
        if fold.inserts and not is_staged:
            await self._copy_inserts(fold)

    def _keeps_keys(self, fold: Fold) -> bool:
        """Whether a TRUNCATE must leave the rows alone whose keys are there again behind it.

        The table that refers to them may be ahead, and refer to the new ones already.
        """
        plan = fold.plan
        return (
            self._target.checks_foreign_keys
            and plan.target.is_referenced
            and plan.key_is_indexed
            and plan.identity is Identity.KEY
            and not plan.has_expressions
            and not (fold.deletes or fold.updates or fold.moves)
        )

    async def _replace_rows(
        self, mapped: MappedRelation, fold: Fold, *, adds: bool = True, removes: bool = True
    ) -> None:
        """Have the table hold the rows that were inserted after a TRUNCATE, and no others."""
        statements = statements_for(fold.plan)
        await self._stage(statements)
        async with self._planned_for(mapped, fold.plan):
            columns, pick = staged_values(fold.plan, statements, frozenset())
            rows = fold.inserts.values()
            await self._copy_stage(statements, columns, rows, OP_FIRST_UPDATED, pick)
            if adds:
                if (update := statements.update(OP_FIRST_UPDATED)) is not None:
                    await self._target.execute(update)
                await self._target.execute(statements.insert_missing(OP_FIRST_UPDATED))
            if removes:
                await self._target.execute(statements.delete_others(OP_FIRST_UPDATED))

    async def _write_changes(
        self, mapped: MappedRelation, fold: Fold, statements: Statements
    ) -> None:
        moves = await self._stage_moves(fold, statements)
        if fold.deletes:
            keys: Iterable[Any] = fold.deletes
            if len(fold.plan.key) == 1:
                keys = ([key] for key in keys)
            columns = [statements.new(column) for column in fold.plan.key]
            await self._copy_stage(statements, columns, keys, OP_DELETE)
            await self._check_unique(statements, OP_DELETE)
            deleted = await self._target.execute(statements.delete)
            _check_count(deleted, len(fold.deletes))
            if fold.plan.type is not TableType.APPEND and fold.plan.filter is None:
                self._count_conflict(mapped, "delete_missing", len(fold.deletes) - deleted)
        for op, (unchanged, rows) in enumerate(
            by_unchanged(fold.updates.values()), OP_FIRST_UPDATED
        ):
            missing = await self._write_updates(fold.plan, statements, op, unchanged, rows)
            if fold.plan.filter is None:  # else it has just been let in
                self._count_conflict(mapped, "update_missing", missing)
        for op in moves:
            await self._target.execute(statements.insert_moved(op))
        if fold.inserts and fold.plan.has_expressions:
            columns, pick = staged_values(fold.plan, statements, frozenset())
            await self._copy_stage(statements, columns, fold.inserts.values(), OP_INSERT, pick)
            await self._target.execute(statements.insert_moved(OP_INSERT))

    async def _stage_moves(self, fold: Fold, statements: Statements) -> list[int]:
        """Stage rows whose key changes, and complete them while they are where they were."""
        plan = fold.plan
        ops = []
        old = [statements.old(column) for column in plan.key]
        single = len(plan.key) == 1
        origins = {id(row): [origin] if single else origin for origin, row in fold.moves.values()}
        moved = (row for _, row in fold.moves.values())
        for op, (unchanged, rows) in enumerate(by_unchanged(moved), OP_FIRST_MOVED):
            present = [c for c in plan.columns if c.position not in unchanged]
            columns = old + [statements.new(column) for column in present]
            positions = [column.position for column in present]
            staged = ([*origins[id(row)], *(row[p] for p in positions)] for row in rows)
            await self._copy_stage(statements, columns, staged, op)
            filled = await self._target.execute(statements.fill_moved(op, unchanged))
            if filled != len(rows):
                raise ConflictError(
                    f'target table "{plan.mapping.target}": a row whose key changed is missing, '
                    "and its unchanged values with it",
                    kind="update_missing",
                )
            ops.append(op)
        return ops

    async def _write_updates(
        self,
        plan: ApplyPlan,
        statements: Statements,
        op: int,
        unchanged: frozenset[int],
        rows: list[Row],
    ) -> int:
        """Update rows; insert those that are missing, if they are whole, and return how many."""
        update = statements.update(op, unchanged)
        columns, pick = staged_values(plan, statements, unchanged)
        await self._copy_stage(statements, columns, rows, op, pick)
        await self._check_unique(statements, op)
        is_filtered = plan.filter is not None
        if (delete := statements.delete_filtered_out(op)) is not None:
            await self._target.execute(delete)
        if update is None and not is_filtered:
            return 0
        updated = await self._target.execute(update) if update is not None else 0
        _check_count(updated, len(rows))
        if updated == len(rows):
            return 0
        if unchanged:
            key = await self._target.fetch_value(statements.missing_key(op))
            if is_filtered and key is None:
                return 0
            raise ConflictError(
                f"the row to update is missing, and its unchanged values with it: Key {key}",
                kind="update_missing",
            )
        return await self._target.execute(statements.insert_missing(op))

    async def _check_unique(self, statements: Statements, op: int) -> None:
        """Refuse keys staged as *op* that several rows of the target have, unless an index of the
        target keeps them unique.
        """
        if statements.plan.key_is_indexed:
            return
        key = await self._target.fetch_value(statements.several(op))
        if key is not None:
            raise _several_rows(key)

    @asynccontextmanager
    async def _planned_for(self, mapped: MappedRelation, plan: ApplyPlan) -> AsyncIterator[None]:
        """Let the server plan statements of *plan* as its key asks for.

        Without an index on the key each row would take a scan of the whole table. A transaction or
        savepoint that is rolled back takes the setting back too.
        """
        if plan.key_is_indexed:
            yield
            return
        if plan.is_provisional and not await self._target.fetch_value(HAS_DEFERRED_SQL, plan.name):
            mapped.forget(plan)
        await self._target.execute("set local enable_hashjoin = on")
        yield
        await self._target.execute("set local enable_hashjoin = off")

    async def _copy_stage(
        self,
        statements: Statements,
        columns: list[str],
        rows: Iterable[Any],
        op: int,
        pick: Picker = None,
    ) -> None:
        binary = statements.plan.binary
        chunks = encode_rows(
            rows,
            pick=pick,
            prefix=[constant(op, binary=binary, int_size=2)],
            width=len(columns) + 1,
            binary=binary,
        )
        await self._target.copy_in(
            statements.stage,
            ["op", *columns],
            paced(chunks),
            namespace="pg_temp",
            binary=binary,
        )

    async def _copy_inserts(self, fold: Fold) -> None:
        plan = fold.plan
        columns = Statements(plan).insert_columns
        prefix = [] if plan.sid is None else [constant(plan.sid, binary=plan.binary)]
        chunks = encode_rows(
            fold.inserts.values(),
            pick=plan.pick,
            prefix=prefix,
            width=len(columns),
            binary=plan.binary,
        )
        await self._target.copy_in(
            plan.target.name.name,
            columns,
            paced(chunks),
            namespace=plan.target.name.namespace,
            binary=plan.binary,
        )
        if plan.binary:
            await self._check_types(plan)

    async def _check_types(self, plan: ApplyPlan) -> None:
        """Make sure that values were received as what they are.

        A text that does not fit is refused, but four bytes are an integer and a float alike. What
        COPY has locked cannot change any more before the transaction ends.
        """
        unchanged = await self._target.fetch_value(
            _SAME_TYPES_SQL,
            plan.table,
            [column.name for column in plan.columns],
            [column.target.type_oid for column in plan.columns],
        )
        if not unchanged:
            raise TargetSchemaError(f'target table "{plan.target.name}" was changed meanwhile')

    async def _write_ordered(
        self, window: LaneWindow, mapped: MappedRelation, start: int, stop: int
    ) -> None:
        """Write one relation's changes in exact order, a run for each definition of it."""
        runs: list[OrderedRun] = []
        for number in range(start, stop):
            commit_time = window.shares[number].transaction.commit_time
            for owner, changes, plan in window.parts[number]:
                if owner is mapped:
                    if not runs or runs[-1].plan is not plan:
                        runs.append(OrderedRun(plan))
                    runs[-1].parts.append((number, commit_time, changes.payloads))
        for run in runs:
            try:
                async with self._planned_for(mapped, run.plan):
                    await self._write_run(run)
            except StreamerError as exc:
                _name_column(exc, run.plan)
                advise(exc, mapped, run.plan)
                raise

    async def _write_run(self, run: "OrderedRun") -> None:
        statements = statements_in_order(run.plan)
        try:
            if isinstance(statements, SplitStatements):
                await self._write_split(run, statements)
                return
            await self._stage(statements)
            await self._copy_staged(statements, run.rows())
            await self._target.execute(statements.ordered(partial=run.is_partial))
        except StreamerError as exc:
            if exc.change_number is not None:
                exc.share_number = run.share_number(exc.change_number)
                if isinstance(exc, RowTooLargeError):
                    exc.message += f": {run.describe(exc.change_number)}"
                if isinstance(exc, TextEncodingError):
                    exc.column = exc.column or run.invalid_text(exc.change_number)
                exc.key = exc.key or run.key_of(exc.change_number)
            raise

    async def _write_split(self, run: "OrderedRun", statements: SplitStatements) -> None:
        rows = run.rows()
        done = 0
        while some := list(islice(rows, statements.rows_max)):
            await self._stage(statements)
            try:
                await self._copy_staged(statements, some)
            except StreamerError as exc:
                if exc.change_number is not None:  # of these
                    exc.change_number += done
                raise
            await self._target.execute(statements.ordered(partial=run.is_partial))
            done += len(some)

    async def _copy_staged(self, statements: Statements, rows: Iterable[Row]) -> None:
        """Stage changes for exact order; if that takes several parts, *rows* is a list."""
        plan = statements.plan
        if isinstance(statements, SplitStatements):
            assert isinstance(rows, list)
            for part in statements.parts:
                columns = list(part.columns)
                await self._copy_rows(part.table, columns, part.rows(rows), binary=plan.binary)
            return
        columns = ["seq", "op", "mask", "at", *(name for name, _ in statements.staged)]
        await self._copy_rows(statements.stage, columns, rows, binary=plan.binary)

    async def _copy_rows(
        self, table: str, columns: list[str], rows: Iterable[Row], *, binary: bool
    ) -> None:
        chunks = encode_rows(rows, pick=None, prefix=[], width=len(columns), binary=binary)
        await self._target.copy_in(
            table, columns, paced(chunks), namespace="pg_temp", binary=binary
        )


def _fenced(relations: list[MappedRelation]) -> TargetFencedError:
    names = ", ".join(sorted(str(mapped.mapping.source) for mapped in relations))
    return TargetFencedError(
        f"target: the stored progress of {names} is not where this process left it: another "
        "process streams this source, or the target lost commits",
        relations=relations,
    )


def _name_column(error: StreamerError, plan: ApplyPlan) -> None:
    number = error.staged_column
    if error.column is None and number is not None and number < len(plan.columns):
        error.column = plan.columns[number].name


def _check_count(touched: int, asked: int) -> None:
    """Refuse a statement that has touched more rows than it was asked for."""
    if touched > asked:
        raise _several_rows(None)


def _several_rows(key: str | None) -> ConflictError:
    which = f": Key {key}" if key is not None else ""
    return ConflictError(f"target: {SEVERAL_ROWS}{which}", kind="several_rows")


async def paced(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Let others run between chunks, so that a long COPY does not keep a reader from its socket."""
    since = time.monotonic()
    for chunk in chunks:
        yield chunk
        now = time.monotonic()
        if now - since > 0.005:
            await asyncio.sleep(0)
            since = now
