"""Which ranges of keys differ at the point of a copy.

The lane of the table has applied every change before the point and none behind it, and a snapshot
shows the source at the point. So each range is read once on each side, and equal sums mean equal
rows: no row is read twice. The servers compute the sums; this process sends statements and compares
numbers, `sync.jobs` ranges at a time.

A session of another program that writes to the target meanwhile can hide a difference.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Self

import structlog

from streamer.compare.comparison import agree_on_hash, estimate_rows
from streamer.compare.definitions import TableFacts, build_table
from streamer.compare.ranges import FETCH_ROWS, count_parts, count_ranges, split_range
from streamer.compare.tables import ComparedTable
from streamer.errors import MappingError, TargetSchemaError
from streamer.mapping.resync import KeyRanges
from streamer.postgres.key_ranges import KeyRange, join_ranges
from streamer.source.connection import Connection, fetch_all, translating
from streamer.sync.context import CopyContext
from streamer.sync.plan import task_rate
from streamer.sync.prepare import TableCopy
from streamer.sync.snapshot import HeldSnapshot, import_snapshot, open_copy_session
from streamer.sync.tables import published_relation
from streamer.target.connection import TargetConnection

log = structlog.get_logger()

APPLICATION_NAME: Final = "streamer compare"
SAMPLED_PER_RANGE: Final = 50
SPLITS_MAX: Final = 4
RANGES_MAX: Final = 1000
"""Beyond so many, ranges that differ are not split any more: statements name each of them."""


async def find_differences(
    context: CopyContext, copy: TableCopy, snapshot: HeldSnapshot
) -> KeyRanges | None:
    """Return the ranges of keys in which the target's rows differ from those of *snapshot*.

    The target has the table at the snapshot's position. None if both sides do not sort its keys
    alike, or it has none. Raises SourceError, TargetError.
    """
    async with AsyncExitStack() as sessions:
        rate = context.settings.rows_per_second
        jobs = context.settings.jobs
        readers = [await _Reader.open(context, snapshot, sessions, task_rate(rate, jobs, jobs))]
        table = await _build(context, copy, readers[0])
        if table is None or not table.is_ordered:
            return None
        began = time.monotonic()
        ranges = await _plan(copy, table, readers[0], task_rate(rate, jobs, jobs))
        while len(readers) < min(jobs, len(ranges)):
            readers.append(
                await _Reader.open(context, snapshot, sessions, task_rate(rate, jobs, jobs))
            )
        count = len(ranges)
        with translating(context.label):
            found = await _narrow(table, readers, ranges)
        joined = join_ranges(found)
        log.info(
            "table compared at the point of its copy",
            source=context.label,
            table=copy.name,
            ranges=count,
            differing=len(joined),
            seconds=round(time.monotonic() - began, 1),
        )
        return KeyRanges(
            table.key_columns,
            table.key_types,
            tuple((unit.lower, unit.upper) for unit in joined),
        )


async def _build(context: CopyContext, copy: TableCopy, reader: "_Reader") -> ComparedTable | None:
    facts = TableFacts(
        relation_id=copy.mapped.relation_id,
        source_id=context.source_id,
        database=context.source.database,
        sid=context.source.sid,
        mapping=copy.mapped.mapping,
        relation=copy.relation,
        published=published_relation(copy.relation),
        target=copy.target,
    )
    with translating(context.label):
        kind = await agree_on_hash(reader.source, reader.target)
    try:
        return build_table(facts, kind, 1)
    except (MappingError, TargetSchemaError):
        return None  # the copy compares all rows in the target, and the stream reports the rest


async def _plan(
    copy: TableCopy, table: ComparedTable, reader: "_Reader", rate: float | None
) -> list[KeyRange]:
    """Cut the table at keys that a sample of the source has."""
    rows = await estimate_rows(reader.source, copy.relation)
    count = count_ranges(rows, rate)
    if count == 1:
        return [KeyRange()]
    percent = min(100.0, 100.0 * SAMPLED_PER_RANGE * count / rows)
    found = await fetch_all(reader.source, table.sample_sql(table.source, percent, count).encode())
    return split_range(KeyRange(), [tuple(row["k"]) for row in found])


async def _narrow(
    table: ComparedTable, readers: Sequence["_Reader"], ranges: list[KeyRange]
) -> list[KeyRange]:
    """Return the ranges that differ, split until they are small."""
    small: list[KeyRange] = []
    for step in range(SPLITS_MAX):
        differing = await _read_all(table, readers, ranges)
        last = step == SPLITS_MAX - 1 or len(differing) + len(small) > RANGES_MAX
        large = [] if last else [found for found in differing if found.rows > FETCH_ROWS]
        small += [found.unit for found in differing if found not in large]
        ranges = []
        for found in large:
            side = table.source if found.source_has_more else table.target
            sql = table.cut_sql(side, found.unit, count_parts(found.rows))
            keys = await readers[0].keys(sql, of_source=found.source_has_more)
            ranges += split_range(found.unit, keys)
        if not ranges:
            break
    return small


@dataclass(frozen=True, slots=True)
class _Differing:
    unit: KeyRange
    rows: int
    source_has_more: bool


async def _read_all(
    table: ComparedTable, readers: Sequence["_Reader"], ranges: list[KeyRange]
) -> list[_Differing]:
    """Read *ranges* on both sides, several at a time; return those that differ."""
    waiting = list(reversed(ranges))
    found: list[_Differing] = []

    async def read(reader: "_Reader") -> None:
        while waiting:
            unit = waiting.pop()
            here, there = await reader.digest(table, unit)
            if here != there:
                rows = max(here[0], there[0])
                found.append(_Differing(unit, rows, source_has_more=here[0] >= there[0]))

    tasks = [
        asyncio.create_task(read(reader), name=f"range reader {number}")
        for number, reader in enumerate(readers)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return found


class _Reader:
    """A session on each side."""

    def __init__(self, source: Connection, target: TargetConnection, rate: float | None) -> None:
        self.source = source
        self.target = target
        self._rate = rate

    @classmethod
    async def open(
        cls,
        context: CopyContext,
        snapshot: HeldSnapshot,
        sessions: AsyncExitStack,
        rate: float | None,
    ) -> Self:
        source = await open_copy_session(context.source, context.server, APPLICATION_NAME)
        sessions.push_async_callback(source.close)
        with translating(context.label):
            await source.execute("begin isolation level repeatable read read only")
            await import_snapshot(source, snapshot.snapshot_name)
        return cls(source, await sessions.enter_async_context(context.target()), rate)

    async def digest(
        self, table: ComparedTable, unit: KeyRange
    ) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
        """Return the number of rows and two sums over their hashes, for each side."""
        began = time.monotonic()
        here, there = await asyncio.gather(
            self._of_source(table.digest_sql(table.source, unit)),
            self._of_target(table.digest_sql(table.target, unit)),
        )
        if self._rate is not None:
            await asyncio.sleep(max(0.0, here[0] / self._rate - (time.monotonic() - began)))
        return here, there

    async def _of_source(self, sql: str) -> tuple[int, str, str]:
        cursor = await self.source.execute(f"select d.* from ({sql}) d (b, n, h1, h2)".encode())
        row = await cursor.fetchone()
        return (0, "0", "0") if row is None else (row["n"], row["h1"], row["h2"])

    async def _of_target(self, sql: str) -> tuple[int, str, str]:
        rows = await self.target.fetch(f"select d.* from ({sql}) d (b, n, h1, h2)")
        return (rows[0]["n"], rows[0]["h1"], rows[0]["h2"]) if rows else (0, "0", "0")

    async def keys(self, sql: str, *, of_source: bool) -> list[tuple[str, ...]]:
        """Return the keys that *sql* finds."""
        rows = await fetch_all(self.source, sql.encode()) if of_source else []
        found = rows if of_source else await self.target.fetch(sql)
        return [tuple(row["k"]) for row in found]
