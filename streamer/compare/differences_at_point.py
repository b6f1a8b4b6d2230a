"""Finds the rows that differ at the point of a copy, by ranges or buckets of keys.

The lane of the table has applied exactly the changes before the point, and a snapshot shows the
source at the point. So a single reading of each range suffices, and equal sums mean equal rows. The
readings are as in every comparison (`streamer.compare.unit_reader`), but without a judgement of
keys.

If the sides do not sort keys in the same order, statements read ranges of pages. A hash of the
key's text, or of the whole row's text without a key, assigns rows to buckets. Rows outside the
differing buckets have equal texts on both sides, in equal numbers. So a swap of the differing
buckets makes the tables equal, even if a type calls two texts of a key equal.

A foreign session that writes to the target meanwhile can hide a difference.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from streamer.compare.build_compared_table import TableFacts, build_table
from streamer.compare.compared_table import ComparedTable
from streamer.compare.comparison import (
    agree_on_hash,
    choose_order,
    cut_table,
    estimate_rows,
    make_job,
)
from streamer.compare.cut_ranges import CutRange, count_buckets, join_buckets
from streamer.compare.local_launcher import LocalProcess
from streamer.compare.readings import ComparisonEnds, Unit
from streamer.control.resync_options import DifferingRows
from streamer.copy.copy_context import CopyContext
from streamer.copy.copy_snapshot import import_snapshot, open_copy_session
from streamer.copy.parts.part_copier import CopyEnds
from streamer.copy.prepare_copy import TableCopy
from streamer.errors.error_classes import (
    ComparisonError,
    MappingError,
    SyncAgainError,
    TargetSchemaError,
)
from streamer.postgres.credentials import passwords_renewed
from streamer.postgres.key_ranges import join_ranges
from streamer.schema_changes.create_tables import published_relation
from streamer.source.connection import translating

log = structlog.get_logger()

APPLICATION_NAME: Final = "streamer compare"
RANGES_MAX: Final = 1000
"""The maximum number of differing ranges or buckets, because statements name each. Beyond that
number, streamer merges ranges.
"""
BUCKETS_MAX: Final = 16_384
"""The maximum number of buckets, because a process holds the sums of all buckets of a table."""


async def find_differences(
    context: CopyContext, copy: TableCopy, ends: CopyEnds
) -> DifferingRows | None:
    """Return the rows in which the target differs from the snapshot of *ends*.

    The target has the table at the snapshot's position. Return None if the copy must read all rows.
    Raises SourceError, TargetError; SyncAgainError if a reading has failed for now.
    """
    began = time.monotonic()
    plan = await _plan(context, copy, ends)
    if plan is None:
        return None
    table, ranges = plan
    parts = await _find_parts(context, table, ranges, ends)
    if parts is None:
        return None
    log.info(
        "table compared at the point of its copy",
        source=context.label,
        table=copy.name,
        ranges=len(ranges) if table.is_ordered else table.buckets,
        differing=len(parts),
        seconds=round(time.monotonic() - began, 1),
    )
    if table.is_ordered:
        return _of_ranges(table, ranges, parts)
    return _of_buckets(table, {bucket for part in parts for bucket in part.buckets})


async def _plan(
    context: CopyContext, copy: TableCopy, ends: CopyEnds
) -> tuple[ComparedTable, list[CutRange]] | None:
    """Return the table, and the ranges to read."""
    source = await open_copy_session(context.source, context.server, APPLICATION_NAME)
    async with source, context.target() as target:
        with translating(context.label):
            await source.execute("begin isolation level repeatable read read only")
            await import_snapshot(source, ends.snapshot_name)
            rows = await estimate_rows(source, copy.relation)
            facts = TableFacts(
                relation_id=copy.mapped.relation_id,
                source_id=context.source_id,
                database=context.source.database,
                sid=context.source.sid,
                mapping=copy.mapped.mapping,
                relation=copy.relation,
                published=published_relation(copy.relation),
                target=copy.target,
                kept=copy.kept_rows,
            )
            kind = await agree_on_hash(source, target)
            try:
                table = build_table(facts, kind, min(count_buckets(rows), BUCKETS_MAX))
                table = await choose_order(source, target, facts, table)
            except (MappingError, TargetSchemaError):
                return None  # the copy compares all rows; the stream reports faults
            return table, await cut_table(source, table, rows, ends.rows_per_second)


async def _find_parts(
    context: CopyContext, table: ComparedTable, ranges: Sequence[CutRange], ends: CopyEnds
) -> list[Unit] | None:
    """Return the parts that differ; None if a server refuses to read the table."""
    units = [Unit(table.relation_id, number, *cut) for number, cut in enumerate(ranges)]
    sources = {table.source_id: (ends.source_url, ends.server)}
    job = make_job(
        [table],
        units,
        ComparisonEnds(ends.target_url, sources, ends),
        context.settings.jobs,
        ends.rows_per_second,
        finds_only=True,
    )
    try:
        async with passwords_renewed(context.source.url, context.settings.target_url):
            (result,) = await LocalProcess().submit(job)
    except ComparisonError as exc:
        raise SyncAgainError(exc.message) from exc
    return None if result["error"] else [Unit.from_row(row) for row in result["parts"]]


def _of_ranges(
    table: ComparedTable, ranges: Sequence[CutRange], parts: Iterable[Unit]
) -> DifferingRows:
    """Return the rows in the differing ranges; whole ranges replace parts if there are too many
    parts.
    """
    joined = join_ranges(part.range for part in parts)
    if len(joined) > RANGES_MAX:
        joined = join_ranges(ranges[number].range for number in {part.number for part in parts})
    return DifferingRows(
        table.ranges_condition(table.source, joined),
        table.ranges_condition(table.target, joined),
        by_index=True,
    )


def _of_buckets(table: ComparedTable, differing: set[int]) -> DifferingRows | None:
    """Return the rows in the buckets that differ; None if all of several buckets differ."""
    count, numbers = join_buckets(table.buckets, differing, RANGES_MAX)
    if numbers and len(numbers) == count:
        return None
    return DifferingRows(
        table.buckets_condition(table.source, count, numbers),
        table.buckets_condition(table.target, count, numbers),
        by_index=False,
    )
