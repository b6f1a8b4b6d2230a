"""Operators' requests to retry or drop rows in quarantine.

A request stays in the bookkeeping until the transaction that fulfils it, so a crash loses no
request. The drainer fulfils a request between two windows of the lane. Later changes of the same
rows come after the request, or follow the rows into quarantine. Later changes never overtake the
request.
"""

from dataclasses import dataclass, field
from itertools import groupby

import structlog

from streamer.apply.lanes.blocked_keys import KeyColumns, values_of_stored
from streamer.apply.lanes.lane import Lane, MappedRelation, QuarantineRequest
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.quarantine.equal_keys import EqualKeys
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.apply.rows.apply_plan import ApplyPlan
from streamer.apply.rows.change_as_json import (
    Definition,
    EndedTransaction,
    from_json,
    payload,
)
from streamer.apply.write.planner import Planner
from streamer.bookkeeping.quarantined_changes import (
    QuarantinedChange,
    count_quarantined,
    read_quarantine_page,
    remove_quarantined,
    store_retry_error,
    store_retry_errors,
)
from streamer.bookkeeping.requests import end_request, lock_request
from streamer.decode.pgoutput import from_datetime
from streamer.decode.transactions import Changes, Transaction
from streamer.errors.error_classes import Retry, StreamerError
from streamer.errors.error_reports import ErrorReport

log = structlog.get_logger()


async def fulfil(
    request: QuarantineRequest, lane: Lane, writer: QuarantineWriter, planner: Planner
) -> None:
    """Fulfil *request*. Raises StreamerError.

    A retry raises only transient errors, and stores all other errors with the rows.
    """
    mapped = request.mapped
    if request.is_retry:
        attempt = _Attempt(request, lane, writer, planner)
        try:
            if await _begin(request, writer):
                await attempt.run()
                number = request.request_id
                await end_request(writer.target, number, attempt.rest, is_done=True)
                await writer.transaction.commit({})
        except StreamerError as exc:
            await writer.rollback()
            if exc.retry is Retry.TIMED:
                raise
            # No row is the cause: for example, the table is missing, or the role may not write.
            await _record_failure(request, writer, exc)
        else:
            log.info(
                "rows in quarantine were applied again",
                source=lane.owner.source.label,
                table=str(mapped.mapping.source),
                applied=attempt.applied_count,
                left=attempt.left_count,
            )
    else:
        dropped = 0
        if await _begin(request, writer):
            dropped = await remove_quarantined(writer.target, mapped.relation_id, request.ids)
            await end_request(writer.target, request.request_id)
            await writer.transaction.commit({})
        log.warning(
            "rows in quarantine were dropped",
            source=lane.owner.source.label,
            table=str(mapped.mapping.source),
            rows=dropped,
        )
    mapped.quarantine.forget(await count_quarantined(writer.target, mapped.relation_id))


async def _begin(request: QuarantineRequest, writer: QuarantineWriter) -> bool:
    """Begin the transaction that fulfils *request*; return False if the request is fulfilled
    already.

    Another process may have taken over and fulfilled the request, or the answer to an earlier
    COMMIT was lost. No progress row moves here, so the lock on the request's row admits a single
    process.
    """
    await writer.begin()
    if await lock_request(writer.target, request.request_id):
        return True
    await writer.rollback()
    return False


async def _record_failure(
    request: QuarantineRequest, writer: QuarantineWriter, error: StreamerError
) -> None:
    if await _begin(request, writer):
        await store_retry_error(writer.target, request.mapped.relation_id, request.ids, str(error))
        await end_request(writer.target, request.request_id, ErrorReport.of(error))
        await writer.transaction.commit({})
    log.error(
        "rows in quarantine cannot be applied",
        table=str(request.mapped.mapping.source),
        error=str(error),
    )


@dataclass(slots=True)
class _Attempt:
    """An attempt to apply rows again, in one transaction of the target."""

    request: QuarantineRequest
    lane: Lane
    writer: QuarantineWriter
    planner: Planner
    plans: dict[str, ApplyPlan] = field(default_factory=dict)
    applied_count: int = 0
    left_count: int = 0
    left_code: str | None = None

    @property
    def _mapped(self) -> MappedRelation:
        return self.request.mapped

    @property
    def rest(self) -> ErrorReport | None:
        """The error about changes that the target rejects again; None without such a change."""
        if not self.left_count:
            return None
        text = f"changes that the target rejects again stay in quarantine: {self.left_count}"
        return ErrorReport(text, self.left_code or StreamerError.code)

    async def run(self) -> None:
        ids = None
        if self.request.ids is not None:
            ids = await self._with_their_rows(set(self.request.ids))
        last = 0
        while rows := await read_quarantine_page(
            self.writer.target, self._mapped.relation_id, last, ids=ids
        ):
            last = rows[-1].id
            await self._apply(rows)

    async def _with_their_rows(self, ids: set[int]) -> list[int]:
        """Return *ids*, and the ids of all further quarantined changes of the rows of *ids*.

        After a rejected change, the later changes of its row stay in quarantine. So the changes of
        a row keep their order.
        """
        chains = _Chains()
        rows_in_chains: list[tuple[int, int]] = []
        equal_keys = EqualKeys(self.writer.transaction)
        last = 0
        while rows := await read_quarantine_page(
            self.writer.target, self._mapped.relation_id, last
        ):
            for columns, some in groupby([(await self._key_columns(r), r) for r in rows], _first):
                of_columns = [row for _, row in some]
                values = (
                    values_of_stored(columns.names, from_json(row.old), from_json(row.new))
                    for row in of_columns
                )
                keys = await equal_keys.keys(columns, values)
                for row, of_row in zip(of_columns, keys, strict=True):
                    rows_in_chains.append((row.id, chains.join(of_row)))
            last = rows[-1].id
        requested = {chains.find(chain) for row_id, chain in rows_in_chains if row_id in ids}
        return [row_id for row_id, chain in rows_in_chains if chains.find(chain) in requested]

    async def _apply(self, rows: list[QuarantinedChange]) -> None:
        window = LaneWindow(self.lane)
        for row in rows:
            plan = await self._plan(row.definition)
            values = from_json(row.old), from_json(row.new)
            message = payload(row.operation, plan.relation, *values)
            lsn = row.lsn
            transaction = Transaction(row.xid, lsn, from_datetime(row.commit_time))
            if row.ended_at is not None:
                transaction = EndedTransaction.of(transaction, row.ended_at)
            changes = Changes(plan.relation, [message])
            window.transactions.append(
                LaneTransaction(transaction, [(self._mapped, changes)], lsn, len(message))
            )
            window.parts.append([(self._mapped, changes, plan)])
        ids = [row.id for row in rows]
        await self.writer.savepoint()
        try:
            failures = await self._write(window, ids, immediate=False)
        except StreamerError as exc:
            if exc.retry is Retry.TIMED:
                raise
            # A deferred constraint fails only at the end, and does not name the row.
            await self.writer.rollback_to_savepoint()
            failures = await self._write(window, ids, immediate=True)
        await self.writer.transaction.release_savepoint()
        applied = set(ids) - {row_id for row_id, _, _ in failures}
        await remove_quarantined(self.writer.target, self._mapped.relation_id, list(applied))
        if failures:
            await store_retry_errors(self.writer.target, failures)
        self.applied_count += len(applied)
        self.left_count += len(failures)
        self.left_code = next((code for _, _, code in failures), self.left_code)

    async def _write(
        self, window: LaneWindow, ids: list[int], *, immediate: bool
    ) -> list[tuple[int, str, str | None]]:
        """Write rows again; return the rows that stay in quarantine, with the reasons."""
        failures = await self.writer.write_again(window, self._mapped, ids[0], immediate=immediate)
        await self.writer.transaction.check_constraints()
        return [(ids[change.place[0]], change.error, change.code) for change in failures]

    async def _key_columns(self, row: QuarantinedChange) -> KeyColumns:
        """Return the columns that identify the row of a change in quarantine."""
        key = from_json(row.key)
        plan = await self._plan(row.definition)
        return KeyColumns.of(plan, () if key is None else tuple(key))

    async def _plan(self, definition: str) -> ApplyPlan:
        plan = self.plans.get(definition)
        if plan is None:
            plan = await self.planner.plan_again(self._mapped, Definition.from_json(definition))
            self.plans[definition] = plan
        return plan


def _first(pair: tuple[KeyColumns, QuarantinedChange]) -> KeyColumns:
    return pair[0]


class _Chains:
    """Sets of keys; a change with two keys joins both sets."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._parents: list[int] = []

    def find(self, chain: int) -> int:
        """Return the number of the chain that now includes *chain*."""
        while (parent := self._parents[chain]) != chain:
            self._parents[chain] = self._parents[parent]
            chain = parent
        return chain

    def join(self, keys: tuple[bytes, ...]) -> int:
        """Return the chain of a change with *keys*; a new chain without keys."""
        if not keys:
            self._parents.append(len(self._parents))
            return len(self._parents) - 1
        roots = []
        for key in keys:
            if key not in self._numbers:
                self._numbers[key] = len(self._parents)
                self._parents.append(len(self._parents))
            roots.append(self.find(self._numbers[key]))
        for root in roots[1:]:
            self._parents[root] = roots[0]
        return roots[0]
