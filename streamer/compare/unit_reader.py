"""The engine of every comparison: from a range of keys to the differing keys.

1. *Digests.* Both servers add up the hashes of the rows of each part of a range.
2. *Cut.* The reader cuts a large differing part at keys, and repeats step 1.
3. *Fetch.* The reader fetches the hashes of rows of small differing parts and of differing
   buckets.
4. *Judge.* The reader reads differing keys on both sides until each key has a judgement
   (`streamer.compare.judge_keys`).

`UnitReader.find` takes steps 1 and 2, `UnitReader.judge` steps 3 and 4. Tasks of Spark
(`find_parts`, `judge_parts`) and the threads of a process run both
(`streamer.compare.local_program`). A comparison at the point of a copy needs only `find`
(`streamer.compare.differences_at_point`).

An executor on a remote machine gets only psycopg, this module and the imported modules of streamer,
which `streamer.copy.spark.job` ships.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeVar

import psycopg

from streamer.compare import cut_ranges
from streamer.compare.compared_table import differing_buckets
from streamer.compare.readings import (
    SOURCE,
    TARGET,
    ComparisonEnds,
    Judged,
    KeyJudging,
    RangeReader,
    Servers,
    TableError,
    Tables,
    Unit,
    batches,
    describe,
    fetch_rows,
    reading,
)
from streamer.compare.verdicts import Findings, KeyVerdict
from streamer.copy.parts.part_copier import TransientError

BUCKETS_ROWS: Final = 200_000
"""The number of rows of buckets that a query fetches, because each such query reads the whole
table.
"""

T = TypeVar("T")


class UnitReader:
    """Reads ranges in sequence, over separate connections. A context manager.

    *job*: see `streamer.compare.comparison.make_job`. *attempts*: the number of attempts of a
    reading before the failure ends the comparison.
    """

    def __init__(
        self, tables: Tables, ends: ComparisonEnds, job: dict[str, Any], attempts: int = 1
    ) -> None:
        self._job = job
        self._tables = tables
        self._ends = ends
        self._attempts = attempts
        self.findings = Findings(tables, job["keys_max"])
        self._connect()

    def _connect(self) -> None:
        job = self._job
        name = "streamer verify" if job.get("is_background") else "streamer compare"
        self._servers = Servers(self._ends, name)
        self._ranges = RangeReader(
            self._tables,
            self._servers,
            job["rows_per_second"],
            job["comparison_id"],
            job["page_readers"],
        )
        self._judging = KeyJudging(self._servers, seconds=job["seconds"], with_values=job["values"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.close()

    def cancel(self) -> None:
        """Cancel the running statement, without another attempt. For a separate thread."""
        self._attempts = 0
        self._servers.cancel()

    def _retry(self, work: Callable[[], T]) -> T:
        """Return the result of *work*, which uses new connections after each failure.

        Raises TransientError after all attempts, and TableError.
        """
        for attempt in itertools.count(1):
            try:
                return work()
            except (TransientError, psycopg.Error) as exc:
                self._reconnect(exc, attempt)
        raise AssertionError

    def _reconnect(self, error: TransientError | psycopg.Error, attempt: int) -> None:
        """Replace the connections; after the last attempt, raise TransientError."""
        if attempt >= self._attempts:
            text = str(error) if isinstance(error, TransientError) else describe(error)
            raise TransientError(text) from None
        self._servers.close()
        self._connect()

    # ---- ranges --------------------------------------------------------------------------------

    def find(self, unit: Unit, *, depth: int = 0) -> Iterator[Unit]:
        """Yield the differing small parts of *unit*, or its differing buckets, in groups."""
        table = self._tables[unit.relation_id]
        try:
            sums = self._retry(lambda: self._ranges.digest(unit, is_first=depth == 0))
        except TableError as exc:
            self.findings.fail(unit.relation_id, str(exc))
            return
        if depth == 0:
            finding = self.findings.get(unit.relation_id)
            finding.rows_source += sum(rows for rows, _, _ in sums[SOURCE].values())
            finding.rows_target += sum(rows for rows, _, _ in sums[TARGET].values())
        differing = differing_buckets(*sums, keeps_more=table.keeps_more)
        if not table.is_ordered:
            for buckets in _groups(differing):
                yield replace(unit, buckets=buckets)
            return
        parts = unit.parts()
        for number, numbers in differing.items():
            part = replace(unit, range=parts[number], cuts=())
            if max(numbers) > cut_ranges.FETCH_ROWS and depth < cut_ranges.CUTS_MAX - 1:
                side = SOURCE if numbers[SOURCE] == max(numbers) else TARGET
                part = self._retry(partial(self._ranges.cut, part, side, max(numbers)))
            if part.cuts:
                yield from self.find(part, depth=depth + 1)
            else:
                yield part

    # ---- keys ----------------------------------------------------------------------------------

    def judge(self, parts: Iterable[Unit]) -> Iterator[KeyVerdict]:
        """Yield and count the verdicts about keys of *parts* that are not equal."""
        for keys in batches(self._keys(parts), self._tables):
            for judged in self._retry(partial(self._judge, keys)):
                yield from self._show(judged)

    def _judge(self, keys: dict[int, list[str]]) -> list[Judged]:
        return self._judging.judge(self._tables, keys)

    def _show(self, judged: Judged) -> Iterator[KeyVerdict]:
        """Yield verdicts; after a failure, continue with the remaining verdicts."""
        for attempt in itertools.count(1):
            try:
                for verdict in self._judging.show(judged):
                    self.findings.add(verdict)
                    yield verdict
            except (TransientError, psycopg.Error) as exc:
                self._reconnect(exc, attempt)
            else:
                return

    def _keys(self, parts: Iterable[Unit]) -> Iterator[tuple[int, str]]:
        """Yield relation and key of the rows that differ between both sides."""
        for part in parts:
            try:
                keys = self._retry(partial(self._fetch, part))
            except TableError as exc:
                self.findings.fail(part.relation_id, str(exc))
                continue
            for key in keys:
                yield part.relation_id, key

    def _fetch(self, part: Unit) -> list[str]:
        """Return the keys of *part* whose rows differ between both sides."""
        table = self._tables[part.relation_id]
        with reading():
            surplus = Counter(fetch_rows(table, part, SOURCE, self._servers))
            surplus.subtract(fetch_rows(table, part, TARGET, self._servers))
        return sorted({key for (key, *_), number in surplus.items() if number})


def _groups(buckets: dict[int, tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Yield buckets in groups of a bounded number of rows. Pure."""
    group: list[int] = []
    rows = 0
    for bucket, numbers in buckets.items():
        if group and rows + max(numbers) > BUCKETS_ROWS:
            yield tuple(group)
            group, rows = [], 0
        group.append(bucket)
        rows += max(numbers)
    if group:
        yield tuple(group)


# ---- tasks of Spark ----------------------------------------------------------------------------


def find_parts(
    rows: Iterable[Any], tables: Tables, ends: dict[str, Any] | str, job: dict[str, Any]
) -> Iterator[Any]:
    """Yield the numbered parts of units that differ, and then the findings."""
    with UnitReader(tables, ComparisonEnds.read(ends), job) as reader:
        for unit in map(Unit.from_row, rows):
            for number, part in enumerate(reader.find(unit), unit.number):
                yield number, part.to_row()
        yield reader.findings.by_table


def judge_parts(
    rows: Iterable[Any], tables: Tables, ends: dict[str, Any] | str, job: dict[str, Any]
) -> Iterator[Any]:
    """Yield verdicts for the files of *job*, and then the findings."""
    with UnitReader(tables, ComparisonEnds.read(ends), job) as reader:
        for verdict in reader.judge(map(Unit.from_row, rows)):
            if job["report"] or job["sql"]:
                yield verdict
        yield reader.findings.by_table


def is_findings(row: Any) -> bool:
    return isinstance(row, dict)


def is_row(row: Any) -> bool:
    return isinstance(row, tuple)
