"""The target transaction: changes and the progress they stand for, committed together.

A `TargetTransaction` owns one connection and knows neither queues nor changes. A worker or drainer
begins it, has a writer write windows in it, and commits it with the progress reached. A process
that dies before the commit leaves the target as it was. One that dies after it leaves progress
rows, by which a restart skips the changes that are there.

A transaction compares progress rows before it sets them. If another process has moved one, that
process has replaced this one, whose transaction must not commit.
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
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.target.write_claim import Claim
from streamer.util.failpoints import failpoint
from streamer.util.lsn import Lsn

log = structlog.get_logger()

NONE: Final[Mapping[MappedRelation, int]] = MappingProxyType({})
CONFLICTS_KEPT: Final = 1000
STAGES_MAX: Final = 200
"""Staging tables kept per connection; the least recently used goes first."""
FACTS_MAX: Final = 1000
"""Prepared statements kept per connection, in the same way."""
DELETED_ROWS_MAX: Final = 2000
"""A staging table with more rows, dead ones included, is emptied by TRUNCATE instead of DELETE.

TRUNCATE costs a new file and catalog rows. ON COMMIT DELETE ROWS would truncate all staging tables
of the session in every transaction that touches a temporary table.
"""


class TargetTransaction:
    """One connection to the target, and the transaction on it.

    The transaction calls *on_committed* when it knows of the commit, by COMMIT or by `settle`.
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
        """How many rows of each table streamer.conflict keeps."""
        self._connection: TargetConnection | None = None
        self._stages: OrderedDict[str, tuple[Statements, int]] = OrderedDict()
        """The session's staging tables by name, each with the rows written since its TRUNCATE."""
        self._facts: OrderedDict[str, PlannedFacts] = OrderedDict()
        """The facts of plans that the session knows by a prepared statement."""
        self._may_have_others = False
        """The session may have staging tables that `_stages` lacks, with any rows in them."""
        self._given_up: int | None = None
        self._claims: Collection[Claim] = ()
        self._committing: dict[MappedRelation, Lsn] = {}
        self._conflicts: list[tuple[MappedRelation, str, int]] = []
        self._skipped = NONE
        """TRUNCATEs that the transaction being committed has ignored, by table."""

    @property
    def target(self) -> TargetConnection:
        """The connection. Raises TargetConnectionError if there is none."""
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
        if self._connection is not None and not self.is_broken and self._connection.is_outdated:
            await self.close()
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
                await self.target.prove(claim)
            except TargetMovedError as exc:
                missing.append(claim)
                error = exc
        if missing:
            raise TargetMovedError(error.message, claims=missing)

    async def _open(self) -> None:
        self._forget_stages()
        self._may_have_others = False
        connection = await TargetConnection.connect(self._address, self._name, applies=True)
        try:
            milliseconds = int(self._lock_seconds * 1000)
            # Without the check, PL/pgSQL parses a statement of a block in exact order when it runs,
            # and most of them never run.
            await connection.fetch_value(
                "select set_config('lock_timeout', $1, false),"
                " set_config('check_function_bodies', 'off', false)",
                str(milliseconds),
            )
            if self._given_up is not None:
                # The server may not have noticed yet that the client is gone, and hold locks that
                # the next attempt needs.
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
        self._committing = {}  # later callers have no part in that commit

    # ---- the transaction -----------------------------------------------------------------------

    async def begin(self) -> None:
        self._conflicts.clear()
        # A deferrable constraint is checked at the source's commit at the latest, not before.
        self.target.begin("begin; set constraints all deferred")

    def _forget_stages(self) -> None:
        # A rollback removes the staging tables that its transaction made, and gives others the rows
        # back that they held before.
        self._stages.clear()
        self._facts.clear()  # a statement was prepared or not, as far as its message went
        self._may_have_others = True

    async def rollback(self) -> None:
        """Roll back; a connection that is lost has done so already."""
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
        """Make deferred constraints speak now."""
        await self.target.execute("set constraints all immediate; set constraints all deferred")

    async def commit(
        self, progress: dict[MappedRelation, Lsn], skipped: Mapping[MappedRelation, int] = NONE
    ) -> None:
        """Store *progress* and commit. Raises TargetFencedError after a rollback.

        *skipped*: how many TRUNCATEs of each table the transaction has ignored.

        If the connection is lost here, the outcome is unknown until `settle` has been asked.
        """
        moved = [(mapped, lsn) for mapped, lsn in progress.items() if lsn > mapped.end_lsn]
        failpoint("apply.before_commit")
        self._committing, self._skipped = dict(moved), skipped
        positions = [(mapped.relation_id, mapped.end_lsn, lsn) for mapped, lsn in moved]
        last = "; ".join(
            [
                *self._empty_large_stages(),
                *(skipped_sql(mapped.relation_id, number) for mapped, number in skipped.items()),
                *([move_sql(positions, self._claims)] if moved else []),
            ]
        )
        # If cancelled, still wait for the COMMIT: the tracker must know whether it became durable.
        committing = asyncio.ensure_future(self.target.commit(last))
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            with contextlib.suppress(StreamerError):
                await committing
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
        """The outcome of a commit no longer matters to *relations*: their source begins again."""
        for mapped in relations:
            self._committing.pop(mapped, None)

    async def settle(self) -> bool:
        """After a lost connection: whether the interrupted COMMIT took effect.

        Waits for the old backend, should it still be at it: it holds the progress rows.
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
        """Have an empty staging table of *statements* for *count* small rows, or for any rows.

        The server makes or empties it together with the next message.
        """
        target, stage = self.target, statements.stage
        self.keep(statements.facts)
        known = self._stages.pop(stage, None)
        rows = 0
        if known is None:
            while len(self._stages) >= STAGES_MAX:
                _, (oldest, _) = self._stages.popitem(last=False)
                target.send_before_next(oldest.drop_stage)
            target.send_before_next(statements.create_stage)
            if self._may_have_others:
                target.send_before_next(statements.truncate_stage)
        elif known[1] <= DELETED_ROWS_MAX:
            rows = known[1]
            target.send_before_next(statements.delete_stage)
        else:
            target.send_before_next(statements.truncate_stage)
        self._stages[stage] = statements, rows + (DELETED_ROWS_MAX + 1 if count is None else count)

    def keep(self, facts: PlannedFacts) -> None:
        """Have the server refuse the next message if *facts* are not those of the target by now."""
        if facts.name in self._facts:
            self._facts.move_to_end(facts.name)
            self.target.send_before_next(facts.keep)
            return
        while len(self._facts) >= FACTS_MAX:
            _, oldest = self._facts.popitem(last=False)
            self.target.send_before_next(oldest.forget)
        self._facts[facts.name] = facts
        self.target.send_before_next(facts.prepare)

    async def copy(self, rows: Copy, then: str = "") -> int:
        """COPY *rows*, and run the statement *then* in the same message.

        Returns how many rows the last of them touched.
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

    def _empty_large_stages(self) -> list[str]:
        """Return statements that free the space of large staging tables."""
        large = [each for each in self._stages.values() if each[1] > DELETED_ROWS_MAX]
        for statements, _ in large:
            self._stages[statements.stage] = statements, 0
        return [statements.truncate_stage for statements, _ in large]

    def count_conflict(self, mapped: MappedRelation, kind: str, number: int) -> None:
        """Count conflicts in the metrics after their commit."""
        if number > 0:
            self._conflicts.append((mapped, kind, number))


async def _paced(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Let others run between chunks, so that a long COPY does not keep a reader from its socket."""
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
