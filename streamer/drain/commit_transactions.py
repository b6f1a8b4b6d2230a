"""Commits lane transactions, and reports skipped deletes and rows in quarantine."""

from collections.abc import Mapping

import structlog

from streamer.apply.lanes.lane import Lane, MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.quarantine.quarantine_writer import QuarantineWriter
from streamer.apply.write.commit_counts import table_labels
from streamer.apply.write.rejection_advice import advise
from streamer.errors.error_classes import StreamerError, TargetConnectionError, TargetMovedError
from streamer.mapping.rule_options import OnError
from streamer.observability.metrics import Metrics
from streamer.util.backoff import Backoff
from streamer.util.lsn import Lsn

log = structlog.get_logger()


def diverts(mapped: MappedRelation) -> bool:
    """Return whether rejected changes of *mapped* go into quarantine."""
    return mapped.mapping.rule.on_error is OnError.QUARANTINE


def may_divert(lane_transaction: LaneTransaction) -> bool:
    return any(diverts(mapped) for mapped, _ in lane_transaction.changes)


def add_context(error: StreamerError, lane_transaction: LaneTransaction) -> None:
    """Add the source transaction to *error*, and the table if the transaction has only one."""
    transaction = lane_transaction.transaction
    error.lsn = str(transaction.final_lsn)
    error.add_note(f"in transaction {transaction.xid}, committed at {transaction.final_lsn}")
    relations = {mapped for mapped, _ in lane_transaction.changes}
    if len(relations) == 1:  # with several tables, the refused table is unknown
        (mapped,) = relations
        advise(error, mapped, mapped.plan)


async def commit(
    writer: QuarantineWriter,
    progress: dict[MappedRelation, Lsn],
    skipped: Mapping[MappedRelation, int],
) -> None:
    """Commit *progress* and the number of *skipped* TRUNCATEs.

    If the connection is lost meanwhile, check whether the target committed. Raises
    TargetConnectionError if the target has not committed.
    """
    try:
        await writer.transaction.commit(progress, skipped)
    except TargetConnectionError:
        backoff = Backoff()
        while True:
            writer.disconnect()
            try:
                await writer.transaction.connect()
                if await writer.transaction.resolve_commit():
                    return
                break
            except TargetMovedError:
                raise
            except TargetConnectionError as exc:
                backoff.log(log, "waiting for the outcome of a commit", exc)
                await backoff.wait()
        raise


def release_delete_counts(lane: Lane, lane_transaction: LaneTransaction, metrics: Metrics) -> None:
    """Count and log the changes that were left out of *lane_transaction*, which is durable."""
    for mapped, left_out in lane.delete_limit.release(lane_transaction).items():
        table = table_labels(mapped)
        metrics.count_skipped(table, "delete", left_out.deleted_rows)
        metrics.count_skipped(table, "truncate", left_out.truncates)
        log.warning(
            "deletes of a transaction left out",
            source=lane.owner.source.label,
            table=str(mapped.mapping.source),
            transaction=str(left_out),
        )


def report_quarantine(lane: Lane, writer: QuarantineWriter) -> None:
    """Report to the owner of *lane* the relations whose number of rows in quarantine changed."""
    for mapped in writer.pop_changed():
        lane.owner.quarantine_changed(mapped)
