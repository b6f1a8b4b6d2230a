"""The target transaction: changes and their progress, committed together.

A `TargetTransaction` owns a connection and knows neither queues nor changes. A worker or drainer
begins the transaction, lets a writer write windows, and commits with the new progress. A process
that dies before the commit leaves the target unchanged. If the process dies later, a restart skips
the applied changes by the progress rows.

A transaction compares progress rows before it updates these rows. A progress row that another
process has moved means that the process replaced this process, whose transaction must not commit.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import structlog

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.rows.copydata import Copy
from streamer.apply.sql.ordered_statements import Statements
from streamer.apply.sql.planned_facts import PlannedFacts
from streamer.apply.write.commit_counts import table_labels
from streamer.bookkeeping.positions import lock_positions, move_sql
from streamer.bookkeeping.relation_states import skipped_sql
from streamer.errors.error_classes import (
    StreamerError,
    TargetConnectionError,
    TargetError,
    TargetFencedError,
    TargetMovedError,
)
from streamer.mapping.rules import SourceLabel
from streamer.observability.metrics import Metrics
from streamer.postgres.blocking_sessions import END_OWN_SQL
from streamer.target.connection import TargetAddress, TargetConnection, copy_sql
from streamer.target.fencing_token import FencingToken
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn

log = structlog.get_logger()

_DEFER_SQL: Final = "set constraints all deferred"
"""The source checks a deferrable constraint at commit at the latest, so the target must defer the
check, too.
"""
_DEFER_TAG: Final = b"SET CONSTRAINTS"
NONE: Final[Mapping[MappedRelation, int]] = MappingProxyType({})
CONFLICTS_KEPT: Final = 1000
STAGES_MAX: Final = 200
"""Maximum number of staging tables of a connection, which drops the least recently used."""
FACTS_MAX: Final = 1000
"""Maximum number of prepared statements of a connection, which drops the least recently used."""
DELETED_ROWS_MAX: Final = 2000
"""TRUNCATE, instead of DELETE, empties a staging table with more rows, dead rows included.

TRUNCATE costs a new file and catalog rows. ON COMMIT DELETE ROWS would truncate all staging tables
of the session in every transaction that touches a temporary table.
"""


class TargetTransaction:
    """A connection to the target and its transaction.

    *on_committed*: called when COMMIT or `resolve_commit` confirms a commit.
    """

    def __init__(
        self,
        address: TargetAddress,
        name: str,
        metrics: Metrics,
        *,
        lock_seconds: float,
        conflicts_kept: int = CONFLICTS_KEPT,
        on_committed: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_committed = on_committed
        self._address = address
        self._name = name
        self._metrics = metrics
        self._lock_seconds = lock_seconds
        self.conflicts_kept = conflicts_kept
        """Maximum number of conflicts of a table in streamer.conflict."""
        self._connection: TargetConnection | None = None
        self._stages: OrderedDict[str, tuple[Statements, int]] = OrderedDict()
        """The session's staging tables by name, with the number of rows since TRUNCATE."""
        self._facts: OrderedDict[str, PlannedFacts] = OrderedDict()
        """The facts of plans for which the session has a prepared statement."""
        self._may_have_others = False
        """The session may have staging tables that `_stages` does not list, with any rows."""
        self._given_up: int | None = None
        self._fences: Collection[FencingToken] = ()
        self._committing: dict[MappedRelation, Lsn] = {}
        self._conflicts: list[tuple[MappedRelation, str, int]] = []
        self._skipped = NONE
        """TRUNCATEs that the committing transaction has ignored, by table."""

    @property
    def target(self) -> TargetConnection:
        """The connection. Raises TargetConnectionError if there is none."""
        if self._connection is None:
            raise TargetConnectionError("target: not connected")
        return self._connection

    @property
    def is_broken(self) -> bool:
        return self._connection is None or self._connection.is_closed

    async def connect(self, fences: Collection[FencingToken] | None = None) -> None:
        """Connect, unless connected, to the server of *fences*; with None, to the server of the
        previous tokens.

        Raises TargetConnectionError, TargetRejectedError; TargetMovedError for tokens that are
        invalid on a new connection.
        """
        if fences is not None:
            self._fences = fences
        if self._connection is not None and not self.is_broken and self._connection.is_outdated:
            await self.close()
        if not self.is_broken:
            try:
                await self._verify_fences()
            except TargetMovedError:
                self.disconnect()
            else:
                return
        await self._open()
        await self._verify_fences()

    async def _verify_fences(self) -> None:
        missing = []
        for fence in self._fences:
            if self.target.has_verified(fence):
                continue
            try:
                await self.target.verify_fence(fence)
            except TargetMovedError as exc:
                missing.append(fence)
                error = exc
        if missing:
            raise TargetMovedError(error.message, fences=missing)

    async def _open(self) -> None:
        self._forget_stages()
        self._may_have_others = False
        connection = await TargetConnection.connect(self._address, self._name, applies=True)
        try:
            milliseconds = int(self._lock_seconds * 1000)
            # Without the check, PL/pgSQL parses a statement of a block in exact order only when the
            # statement runs, and most statements never run.
            await connection.fetch_value(
                "select set_config('lock_timeout', $1, false),"
                " set_config('check_function_bodies', 'off', false)",
                str(milliseconds),
            )
            if self._given_up is not None:
                # The server may not have detected the disconnect yet, and hold locks that the next
                # attempt needs.
                await connection.execute(END_OWN_SQL, self._given_up, self._name)
                self._given_up = None
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection

    def disconnect(self) -> None:
        """Drop the connection; the server rolls back uncommitted changes."""
        if self._connection is not None:
            self._given_up = self._connection.backend_pid
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._committing = {}  # `resolve_commit` must not resolve this commit for later users

    # ---- the transaction -----------------------------------------------------------------------

    async def begin(self) -> None:
        self._conflicts.clear()
        self.target.begin(f"begin; {_DEFER_SQL}")

    def end_part(self) -> None:
        """End a part of a transaction in one message. The statement has no effect, but its tag in
        the server's answer marks the end of the part.
        """
        self.target.send_before_next(_DEFER_SQL)

    @property
    def failed_part(self) -> int:
        """The number of the part with the failed statement; -1 if the server ran no statement."""
        return self.target.ended_tags.count(_DEFER_TAG) - 1

    def _forget_stages(self) -> None:
        # A rollback removes the staging tables that its transaction made, and restores the rows of
        # older staging tables.
        self._stages.clear()
        self._facts.clear()  # the server may or may not have prepared a statement
        self._may_have_others = True

    async def rollback(self) -> None:
        """Roll back. If the connection is lost, the server rolls back."""
        self._forget_stages()
        if self._connection is None or self._connection.is_closed:
            self.disconnect()
            return
        try:
            await self._connection.rollback()
        except TargetError:
            self.disconnect()

    async def savepoint(self) -> None:
        await self.target.execute("savepoint streamer")

    async def release_savepoint(self) -> None:
        await self.target.execute("release savepoint streamer")

    async def rollback_to_savepoint(self, name: str = "streamer") -> None:
        self._forget_stages()
        await self.target.rollback(name)

    async def check_constraints(self) -> None:
        """Check deferred constraints now."""
        await self.target.execute("set constraints all immediate; set constraints all deferred")

    async def commit(
        self, progress: dict[MappedRelation, Lsn], skipped: Mapping[MappedRelation, int] = NONE
    ) -> None:
        """Store *progress* and commit. Raises TargetFencedError after a rollback.

        *skipped*: the number of TRUNCATEs that the transaction ignored, by table. After a lost
        connection, `resolve_commit` determines the outcome.
        """
        moved = [(mapped, lsn) for mapped, lsn in progress.items() if lsn > mapped.end_lsn]
        failpoint("apply.before_commit")
        self._committing, self._skipped = dict(moved), skipped
        positions = [(mapped.relation_id, mapped.end_lsn, lsn) for mapped, lsn in moved]
        last = "; ".join(
            [
                *self._empty_large_stages(),
                *(skipped_sql(mapped.relation_id, number) for mapped, number in skipped.items()),
                *([move_sql(positions, self._fences)] if moved else []),
            ]
        )
        outcome = self.target.send_commit(last)
        try:
            await outcome()
        except asyncio.CancelledError:
            # Wait for the COMMIT all the same, because the tracker needs its outcome.
            with contextlib.suppress(StreamerError):
                await outcome()
                self._set_committed()
            raise
        except TargetConnectionError:
            raise
        except TargetFencedError as exc:
            self._committing = {}
            await self.rollback()
            raise _fenced([m for m, _ in moved if m.relation_id in exc.relations]) from exc
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
        for mapped, number in self._skipped.items():
            self._metrics.count_skipped(table_labels(mapped), "truncate", number)
            log.warning(
                "TRUNCATE skipped",
                source=SourceLabel(mapped.source.database, mapped.source.sid),
                table=str(mapped.mapping.source),
                count=number,
            )
        self._skipped = NONE
        self._on_committed()

    def forget(self, relations: Collection[MappedRelation]) -> None:
        """Ignore the outcome of a commit for *relations*, whose source begins a new attempt."""
        for mapped in relations:
            self._committing.pop(mapped, None)

    async def resolve_commit(self) -> bool:
        """Return whether the COMMIT that a lost connection interrupted took effect.

        Waits for the old backend, which locks the progress rows until its COMMIT ends.
        """
        if not self._committing:
            return False
        ids = [mapped.relation_id for mapped in self._committing]
        stored = await lock_positions(self.target, ids)
        done = [stored.get(mapped.relation_id) == lsn for mapped, lsn in self._committing.items()]
        if all(done):
            self._set_committed()
            return True
        fenced = [m for m in self._committing if stored.get(m.relation_id) != m.end_lsn]
        self._committing = {}
        if fenced:
            raise _fenced(fenced)
        return False

    # ---- for writers ---------------------------------------------------------------------------

    def stage(self, statements: Statements, count: int | None = None) -> None:
        """Prepare an empty staging table of *statements* for *count* small rows, or for any number
        of rows.

        The server makes or empties the table with the next message.
        """
        target, stage = self.target, statements.stage
        self.require(statements.facts)
        existing = self._stages.pop(stage, None)
        rows = 0
        if existing is None:
            while len(self._stages) >= STAGES_MAX:
                _, (oldest, _) = self._stages.popitem(last=False)
                target.send_before_next(oldest.drop_stage)
            target.send_before_next(statements.create_stage)
            if self._may_have_others:
                target.send_before_next(statements.truncate_stage)
        elif existing[1] <= DELETED_ROWS_MAX:
            rows = existing[1]
            target.send_before_next(statements.delete_stage)
        else:
            target.send_before_next(statements.truncate_stage)
        self._stages[stage] = statements, rows + (DELETED_ROWS_MAX + 1 if count is None else count)

    def require(self, facts: PlannedFacts) -> None:
        """Make the server refuse the next message if *facts* no longer describe the target."""
        if facts.name in self._facts:
            self._facts.move_to_end(facts.name)
            self.target.send_before_next(facts.lock_sql)
            return
        while len(self._facts) >= FACTS_MAX:
            _, oldest = self._facts.popitem(last=False)
            self.target.send_before_next(oldest.deallocate)
        self._facts[facts.name] = facts
        self.target.send_before_next(facts.prepare)

    async def copy(self, rows: Copy, then: str = "") -> int:
        """COPY *rows*, and run the statement *then* in the same message.

        Returns the number of rows that the last statement touched.
        """
        try:
            return await self.target.copy_in(
                rows.table,
                rows.columns,
                _paced(rows.chunks),
                namespace=rows.namespace,
                binary=rows.binary,
                then=then,
            )
        except StreamerError as exc:
            if exc.change_number is not None:
                exc.change_number += rows.first
            raise

    def copy_before_commit(self, rows: Copy, then: str = "") -> None:
        """Send a COPY of few *rows*, and the statement *then*, in the message of the COMMIT."""
        copy = copy_sql(rows.table, rows.columns, namespace=rows.namespace, binary=rows.binary)
        self.target.copy_before_commit(copy, rows.chunks)
        if then:
            self.target.send_before_next(then)

    def _empty_large_stages(self) -> list[str]:
        """Return statements that free the space of large staging tables."""
        large = [item for item in self._stages.values() if item[1] > DELETED_ROWS_MAX]
        for statements, _ in large:
            self._stages[statements.stage] = statements, 0
        return [statements.truncate_stage for statements, _ in large]

    def count_conflict(self, mapped: MappedRelation, kind: str, number: int) -> None:
        """Count conflicts in the metrics after their commit."""
        if number > 0:
            self._conflicts.append((mapped, kind, number))


async def _paced(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Run socket readers between the chunks of a long COPY."""
    since = time.monotonic()
    for chunk in chunks:
        yield chunk
        now = time.monotonic()
        if now - since > 0.005:
            await asyncio.sleep(0)
            since = now


def _fenced(relations: list[MappedRelation]) -> TargetFencedError:
    names = ", ".join(sorted(str(mapped.mapping.source) for mapped in relations))
    return TargetFencedError(
        f"target: the stored progress of {names} is not where this process left it: another "
        "process streams this source, or the target lost commits",
        relations=relations,
    )
