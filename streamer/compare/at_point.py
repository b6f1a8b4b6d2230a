"""Which rows differ at the point of a copy, by ranges or buckets of their keys.

The lane of the table has applied every change before the point and none behind it, and a snapshot
shows the source at the point. So each range is read once on each side, and equal sums mean equal
rows: no row is read twice. The servers compute the sums; this process sends statements and compares
numbers, `sync.jobs` ranges at a time.

Where both sides do not sort keys alike, statements read ranges of pages. Rows fall into buckets by
a hash of the key's text; without a key, by a hash of the whole row's. Rows outside the
buckets that differ have equal texts on both sides, each as often. So the exchange of the others
makes the tables equal, even if a type calls two texts of a key equal.

A session of another program that writes to the target meanwhile can hide a difference.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

import structlog

from streamer.compare.compared_tables import TableFacts, build_table
from streamer.compare.comparison import (
    agree_on_hash,
    choose_order,
    cut_table,
    estimate_rows,
)
from streamer.compare.ranges import (
    FETCH_ROWS,
    count_buckets,
    count_parts,
    join_buckets,
    split_range,
)
from streamer.compare.tables import ComparedTable, Pages, Sums, add, cut_pages
from streamer.errors import MappingError, TargetSchemaError
from streamer.mapping.resync import FoundRows
from streamer.postgres.key_ranges import KeyRange, join_ranges
from streamer.source.connection import Connection, fetch_all, translating
from streamer.sync.context import CopyContext
from streamer.sync.create_tables import published_relation
from streamer.sync.ctid_ranges import task_rate
from streamer.sync.prepare import TableCopy
from streamer.sync.snapshot import HeldSnapshot, import_snapshot, open_copy_session
from streamer.target.connection import TargetConnection

log = structlog.get_logger()

APPLICATION_NAME: Final = "streamer compare"
SPLITS_MAX: Final = 4
RANGES_MAX: Final = 1000
"""Beyond so many, ranges or buckets that differ are not split any more: statements name each."""
BUCKETS_MAX: Final = 16_384
"""This process holds the sums of all buckets of a table."""


async def find_differences(
    context: CopyContext, copy: TableCopy, snapshot: HeldSnapshot
) -> FoundRows | None:
    """Return the rows in which the target differs from *snapshot*.

    The target has the table at the snapshot's position. None if the copy has to bring all rows.
    Raises SourceError, TargetError.
    """
    async with AsyncExitStack() as sessions:
        rate = context.settings.rows_per_second
        jobs = context.settings.jobs
        share = task_rate(rate, jobs, jobs)
        reader = await _Reader.open(context, snapshot, sessions, share)
        with translating(context.label):
            rows = await estimate_rows(reader.source, copy.relation)
        table = await _build(context, copy, reader, min(count_buckets(rows), BUCKETS_MAX))
        if table is None:
            return None
        began = time.monotonic()
        ranges: list[KeyRange] = []
        parts: list[_Part] = []
        with translating(context.label):
            if table.is_ordered:
                ranges = await cut_table(reader.source, table, rows, share)
            else:
                parts = await reader.cut(table, rows)
        readers = [reader]
        while len(readers) < min(jobs, max(len(ranges), len(parts))):
            readers.append(await _Reader.open(context, snapshot, sessions, share))
        if table.is_ordered:
            count = len(ranges)
            with translating(context.label):
                joined = join_ranges(await _narrow(table, readers, ranges))
            differing = len(joined)
            found: FoundRows | None = FoundRows(
                table.ranges_condition(table.source, joined),
                table.ranges_condition(table.target, joined),
                by_index=True,
            )
        else:
            count = table.buckets
            with translating(context.label):
                numbers = await _differing_buckets(table, readers, parts)
            if numbers is None:
                return None
            differing = len(numbers)
            found = _of_buckets(table, numbers)
        log.info(
            "table compared at the point of its copy",
            source=context.label,
            table=copy.name,
            ranges=count,
            differing=differing,
            seconds=round(time.monotonic() - began, 1),
        )
        return found


def _of_buckets(table: ComparedTable, differing: set[int]) -> FoundRows | None:
    """Return the rows in the buckets that differ; None if these are all of several."""
    count, numbers = join_buckets(table.buckets, differing, RANGES_MAX)
    if numbers and len(numbers) == count:
        return None
    return FoundRows(
        table.buckets_condition(table.source, count, numbers),
        table.buckets_condition(table.target, count, numbers),
        by_index=False,
    )


async def _build(
    context: CopyContext, copy: TableCopy, reader: "_Reader", buckets: int
) -> ComparedTable | None:
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
        table = build_table(facts, kind, buckets)
        with translating(context.label):
            return await choose_order(reader.source, reader.target, facts, table)
    except (MappingError, TargetSchemaError):
        return None  # the copy compares all rows in the target, and the stream reports the rest


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

    await _run_together(map(read, readers))
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages of a table of one side, and the ``files`` of the table when it was cut."""

    of_source: bool
    pages: Pages
    files: str


async def _differing_buckets(
    table: ComparedTable, readers: Sequence["_Reader"], parts: list[_Part]
) -> set[int] | None:
    """Read *parts*, several at a time; return the buckets whose rows differ. None if a table was
    written anew meanwhile, because its rows are on other pages since.
    """
    waiting = sorted(parts, key=lambda part: part.pages.first, reverse=True)
    sums: dict[bool, Sums] = {True: {}, False: {}}

    async def read(reader: "_Reader") -> None:
        while waiting:
            part = waiting.pop()
            add(sums[part.of_source], await reader.sums(table, part))

    await _run_together(map(read, readers))
    for part in (parts[0], parts[-1]):
        if (await readers[0].size(table, of_source=part.of_source))["files"] != part.files:
            return None
    here, there = sums[True], sums[False]
    return {bucket for bucket in here.keys() | there if here.get(bucket) != there.get(bucket)}


async def _run_together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run *work* at a time, and end all of it with the first failure."""
    tasks = [asyncio.create_task(each, name=f"range reader {n}") for n, each in enumerate(work)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


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

    async def cut(self, table: ComparedTable, rows: int) -> list[_Part]:
        """Cut the pages of both sides; those of the source come first."""
        parts: list[_Part] = []
        for of_source in (True, False):
            size = await self.size(table, of_source=of_source)
            rate = self._rate if of_source else None
            pages = cut_pages(size["pages"], size["bytes"], size["version"], rows, rate)
            parts += [_Part(of_source, each, size["files"]) for each in pages]
        return parts

    async def size(self, table: ComparedTable, *, of_source: bool) -> Mapping[str, Any]:
        side = table.source if of_source else table.target
        (row,) = await self._fetch(table.size_sql(side), of_source=of_source)
        return row

    async def sums(self, table: ComparedTable, part: _Part) -> Sums:
        """Return the number of rows and two sums over their hashes, by bucket."""
        began = time.monotonic()
        side = table.source if part.of_source else table.target
        sql = table.digest_sql(side, KeyRange(), pages=part.pages)
        rows = await self._fetch(
            f"select d.* from ({sql}) d (b, n, h1, h2)", of_source=part.of_source
        )
        found = {row["b"]: (row["n"], int(row["h1"]), int(row["h2"])) for row in rows}
        if self._rate is not None and part.of_source:
            number = sum(n for n, _, _ in found.values())
            await asyncio.sleep(max(0.0, number / self._rate - (time.monotonic() - began)))
        return found

    async def _fetch(self, sql: str, *, of_source: bool) -> Sequence[Mapping[str, Any]]:
        if of_source:
            return await fetch_all(self.source, sql.encode())
        return await self.target.fetch(sql)

    async def _of_source(self, sql: str) -> tuple[int, str, str]:
        cursor = await self.source.execute(f"select d.* from ({sql}) d (b, n, h1, h2)".encode())
        row = await cursor.fetchone()
        return (0, "0", "0") if row is None else (row["n"], row["h1"], row["h2"])

    async def _of_target(self, sql: str) -> tuple[int, str, str]:
        rows = await self.target.fetch(f"select d.* from ({sql}) d (b, n, h1, h2)")
        return (rows[0]["n"], rows[0]["h1"], rows[0]["h2"]) if rows else (0, "0", "0")

    async def keys(self, sql: str, *, of_source: bool) -> list[tuple[str, ...]]:
        """Return the keys that *sql* finds."""
        return [tuple(row["k"]) for row in await self._fetch(sql, of_source=of_source)]
