"""Counts the commits of workers and drainers, for the metrics."""

from collections.abc import Collection, Sequence
from itertools import chain

from streamer.apply.lanes.lane import MappedRelation
from streamer.apply.lanes.lane_transaction import LaneTransaction
from streamer.apply.lanes.lane_window import LaneWindow
from streamer.apply.rows.fold import Counts
from streamer.decode.pgoutput import TRUNCATE
from streamer.mapping.rules import SourceMapping
from streamer.observability.metrics import OPERATIONS, Metrics
from streamer.observability.table_metrics import TableLabels


def table_labels(mapped: MappedRelation) -> TableLabels:
    return (mapped.source.database, mapped.source.sid or "", str(mapped.mapping.source))


def count_changes(metrics: Metrics, table: TableLabels, counts: Counts) -> None:
    operations = {name: getattr(counts, name) for name in OPERATIONS}
    metrics.count_changes(table, operations)


def skipped_truncates(
    window: LaneWindow, transaction_count: int | None = None
) -> dict[MappedRelation, int]:
    """Return the number of ignored TRUNCATEs by table, in the first *transaction_count*
    transactions.
    """
    skipped: dict[MappedRelation, int] = {}
    for parts in window.parts[:transaction_count]:
        for mapped, changes, _ in parts:
            if mapped.mapping.rule.skip_truncate:
                number = sum(payload[0] == TRUNCATE for payload in changes.payloads)
                skipped[mapped] = skipped.get(mapped, 0) + number
    return {mapped: number for mapped, number in skipped.items() if number}


def count_drained(
    metrics: Metrics, tables: Collection[MappedRelation], label: str, number: int, seconds: float
) -> None:
    """Count a target transaction of a drainer, with *number* transactions of source *label*.

    Each of *tables* has an equal share of the time.
    """
    for mapped in tables:
        metrics.apply_seconds.add(seconds / len(tables), table_labels(mapped))
    if metrics.spans is not None:
        metrics.spans.add_window(
            "drainer", seconds, {"sources": label, "tables": len(tables), "transactions": number}
        )


def count_window(metrics: Metrics, window: LaneWindow, seconds: float) -> None:
    """Count a window that the target wrote in *seconds*."""
    for mapped, relation in window.relations.items():
        table = table_labels(mapped)
        metrics.apply_seconds.add(seconds / len(window.relations), table)
        if relation.is_foldable:
            for counts in relation.counts:
                count_changes(metrics, table, counts)
        else:
            counts = Counts()
            for parts in window.parts:
                for owner, changes, _ in parts:
                    if owner is mapped:
                        counts.count(changes.payloads)
            count_changes(metrics, table, counts)


def count_lane_transactions(
    metrics: Metrics, source: SourceMapping, transactions: Sequence[LaneTransaction]
) -> None:
    """Count source transactions with durable changes, each once."""
    commit_times = list(chain.from_iterable(item.led_times for item in transactions))
    metrics.count_transactions(source.database, source.sid, commit_times)
