"""A comparison without Spark: threads of one process read range by range.

The readings are those of Spark's tasks (`streamer.compare.readings`). Spark distributes ranges and
joins rows that differ; here each thread takes the next range and does both. It has two connections,
and memory for the rows of one small range.

`streamer.compare.local_launcher` writes the job to standard input, as one line of JSON. The answer
is one line of JSON on standard output. The process ends with that input, so it never outlives its
parent. SIGTERM cancels the statements that run.
"""

import itertools
import json
import os
import signal
import sqlite3
import sys
import threading
import time
import traceback
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import psycopg

from streamer.compare import ranges
from streamer.compare.files import write_report, write_statements
from streamer.compare.ranges import SPLITS_MAX
from streamer.compare.readings import (
    ERROR,
    SOURCE,
    TARGET,
    ComparisonEnds,
    DigestRow,
    ElsewhereError,
    Judged,
    KeyJudging,
    RangeReader,
    Servers,
    Tables,
    Unit,
    Verdict,
    batches,
    describe,
    fetch_rows,
)
from streamer.compare.results import SAMPLE_ROWS, shown
from streamer.compare.tables import ComparedTable
from streamer.sync.copy_parts import PassingError

BUCKETS_ROWS: Final = 100_000
"""The rows of buckets that one query fetches, because each such query reads the whole table."""
DIFFERING_MAX: Final = 10_000
"""With that many rows that differ, a verification does not read the rest of a table: it needs a
repair anyway.
"""
ATTEMPTS: Final = 4
"""How often a reading is made before its failure ends the comparison, as with Spark's tasks."""
END_SECONDS: Final = 3.0
CANCEL_SECONDS: Final = 1.0
"""How long ending statements may take. The parent kills this process after two seconds."""

T = TypeVar("T")
_Entry = tuple[tuple[str, str], dict[str, Any]]


@dataclass(slots=True)
class _Count:
    """The numbers of one table, as its result has them."""

    rows_source: int = 0
    rows_target: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    undecided: int = 0
    error: str | None = None
    sample: list[_Entry] = field(default_factory=list)
    """By kind and key."""
    keys: list[list[str]] | None = None
    """None if nobody wants them, or they are too many."""


class _Verdicts:
    """All verdicts for the files of a comparison, in a file without a name: SQLite removes it at
    once.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute("pragma journal_mode = off")
        self._database.execute(
            "create table verdict (relation, key, kind, columns, source, target, lsn)"
        )

    def add(self, verdict: Verdict) -> None:
        relation_id, key, kind, _, _, _, columns, source, target, lsn = verdict
        self._database.execute(
            "insert into verdict values (?, ?, ?, ?, ?, ?, ?)",
            (relation_id, key, kind, json.dumps(columns), source, target, lsn),
        )

    def in_order(self, *, with_undecided: bool) -> Iterator[dict[str, Any]]:
        """Yield verdicts by relation and key; with those that are undecided, by kind before key."""
        order = "relation, kind, key" if with_undecided else "relation, key"
        cursor = self._database.execute(f"select * from verdict order by {order}")
        names = [column[0] for column in cursor.description]
        for row in cursor:
            verdict = dict(zip(names, row, strict=True))
            if with_undecided or verdict["kind"] != "undecided":
                yield verdict | {"columns": json.loads(verdict["columns"])}

    def close(self) -> None:
        self._database.close()


class _Findings:
    """The result so far, of all threads."""

    def __init__(self, tables: Tables, job: dict[str, Any]) -> None:
        self._tables = tables
        self._job = job
        self._lock = threading.Lock()
        self._is_background = bool(job.get("is_background"))
        self._keys_max: int = job["keys_max"]
        self._verdicts = _Verdicts() if job["report"] or job["sql"] else None
        self._counts = {
            relation_id: _Count(
                keys=[] if self._keys_max and table.key and table.key_types else None
            )
            for relation_id, table in tables.items()
        }

    def add_rows(self, relation_id: int, source: int, target: int) -> None:
        with self._lock:
            self._counts[relation_id].rows_source += source
            self._counts[relation_id].rows_target += target

    def fail(self, relation_id: int, error: str) -> None:
        with self._lock:
            self._counts[relation_id].error = self._counts[relation_id].error or error

    def is_enough(self, relation_id: int) -> bool:
        """Return whether a verification need not read the rest of a table."""
        count = self._counts[relation_id]
        found = count.missing + count.extra + count.different
        return self._is_background and (count.error is not None or found >= DIFFERING_MAX)

    def add(self, verdict: Verdict) -> None:
        relation_id, key, kind, missing, extra, different, columns, source, target, _ = verdict
        if kind == ERROR:
            self.fail(relation_id, key)
            return
        count = self._counts[relation_id]
        with self._lock:
            count.missing += missing
            count.extra += extra
            count.different += different
            count.undecided += kind == "undecided"
            if count.keys is not None and kind != "undecided":
                count.keys.append(json.loads(key))
                if len(count.keys) > self._keys_max:
                    count.keys = None
            entry: dict[str, Any] = {"key": key, "kind": kind, "columns": columns}
            entry |= {"source": source, "target": target}
            insort(count.sample, ((kind, key), entry), key=lambda each: each[0])
            del count.sample[SAMPLE_ROWS:]
            if self._verdicts is not None:
                self._verdicts.add(verdict)

    def results(self) -> list[dict[str, Any]]:
        """Write the files, and return a result for each table. Raises OSError."""
        if self._verdicts is not None:
            if report := self._job["report"]:
                found = self._verdicts.in_order(with_undecided=True)
                write_report(Path(report), self._tables, found)
            if sql := self._job["sql"]:
                found = self._verdicts.in_order(with_undecided=False)
                write_statements(Path(sql), self._tables, found)
        results = []
        for relation_id, count in self._counts.items():
            result = {name: getattr(count, name) for name in _Count.__slots__}
            table = self._tables[relation_id]
            result["sample"] = [shown(table, entry) for _, entry in count.sample]
            results.append({"relation_id": relation_id} | result | {"keys": count.keys or None})
        return results

    def close(self) -> None:
        if self._verdicts is not None:
            self._verdicts.close()


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the tables of *job*; return a result for each, like the Spark program.

    Raises PassingError, after which the same comparison goes on with the ranges
    that are left; OSError for a file that cannot be written.
    """
    ends = ComparisonEnds.read(job["ends"])
    tables = {row["relation_id"]: ComparedTable.from_json(row) for row in job["tables"]}
    findings = _Findings(tables, job)
    units = _Units(job["units"], findings)
    count = max(1, min(job["jobs"], len(job["units"])))
    readers = [_UnitReader(job, tables, ends, findings, units) for _ in range(count)]
    pool = ThreadPoolExecutor(count)
    running = [pool.submit(reader.run) for reader in readers]
    try:
        for done in as_completed(running):
            done.result()
        return findings.results()
    except BaseException:
        units.stop()
        _end(readers, running)
        raise
    finally:
        pool.shutdown(wait=False)
        findings.close()


def _end(readers: "list[_UnitReader]", running: list[Future[None]]) -> None:
    """Cancel statements until all threads have ended; give up after a while."""
    deadline = time.monotonic() + CANCEL_SECONDS
    while not all(each.done() for each in running) and time.monotonic() < deadline:
        for reader in readers:
            reader.cancel()
        time.sleep(0.05)


class _Units:
    """The ranges that no thread has taken yet."""

    def __init__(self, rows: list[Any], findings: _Findings) -> None:
        self._left = (Unit.from_row(row) for row in rows)
        self._findings = findings
        self._lock = threading.Lock()
        self.is_stopped = False

    def take(self) -> Unit | None:
        """Return the next range to read; None at the end."""
        with self._lock:
            for unit in self._left:
                if self.is_stopped:
                    return None
                if not self._findings.is_enough(unit.relation_id):
                    return unit
        return None

    def stop(self) -> None:
        self.is_stopped = True


class _UnitReader:
    """One thread with a pair of connections."""

    def __init__(
        self,
        job: dict[str, Any],
        tables: Tables,
        ends: ComparisonEnds,
        findings: _Findings,
        units: _Units,
    ) -> None:
        self._job = job
        self._tables = tables
        self._ends = ends
        self._findings = findings
        self._units = units
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

    def run(self) -> None:
        try:
            for keys in batches(self._keys(), self._tables):
                for judged in self._again(partial(self._judge, keys)):
                    self._again(partial(self._show, judged))
        finally:
            self._servers.close()

    def cancel(self) -> None:
        """Cancel the statement that runs. Another thread calls this."""
        self._servers.cancel()

    def _again(self, work: Callable[[], T]) -> T:
        """Return the answer of *work*, which is done again over new connections if it fails.

        Raises PassingError.
        """
        for attempt in itertools.count(1):
            try:
                return work()
            except (PassingError, psycopg.Error) as exc:
                if self._units.is_stopped or attempt == ATTEMPTS:
                    text = str(exc) if isinstance(exc, PassingError) else describe(exc)
                    raise PassingError(text) from None
                self._servers.close()
                self._connect()
        raise AssertionError

    def _judge(self, keys: dict[int, list[str]]) -> list[Judged]:
        return self._judging.judge(self._tables, keys)

    def _show(self, judged: Judged) -> None:
        for verdict in self._judging.show(judged):
            self._findings.add(verdict)

    # ---- keys in question ----------------------------------------------------------------------

    def _keys(self) -> Iterator[tuple[int, str]]:
        """Yield relation and key of the rows that differ between two readings."""
        while (unit := self._units.take()) is not None:
            for key in self._keys_of(unit, depth=0):
                yield unit.relation_id, key

    def _digest(self, unit: Unit, *, is_first: bool) -> list[DigestRow]:
        return [*self._ranges.digest(unit, is_first=is_first)]

    def _keys_of(self, unit: Unit, *, depth: int) -> Iterator[str]:
        table = self._tables[unit.relation_id]
        rows: dict[int, list[int]] = {}
        digests: dict[int, list[tuple[str, str]]] = {}
        found = self._again(partial(self._digest, unit, is_first=depth == 0))
        for *_, bucket, side, number, first, second, error in found:
            if error is not None:
                self._findings.fail(unit.relation_id, error)
                return
            rows.setdefault(bucket, [0, 0])[side] = number
            digests.setdefault(bucket, [("0", "0"), ("0", "0")])[side] = first, second
        if depth == 0:
            numbers = (sum(both[side] for both in rows.values()) for side in (SOURCE, TARGET))
            self._findings.add_rows(unit.relation_id, *numbers)
        differing = {
            bucket: rows[bucket]
            for bucket, (here, there) in digests.items()
            if (here != there or rows[bucket][SOURCE] != rows[bucket][TARGET])
            and not (table.keeps_more and rows[bucket][SOURCE] == 0)
        }
        if not differing:
            return
        if not table.is_ordered:
            for buckets in _groups(differing):
                yield from self._differing_keys(table, unit, buckets)
            return
        larger = max(rows[0])
        if larger <= ranges.FETCH_ROWS or depth == SPLITS_MAX - 1:
            yield from self._differing_keys(table, unit, [])
            return
        side = SOURCE if rows[0][SOURCE] == larger else TARGET
        whole = Unit(unit.relation_id, unit.number, unit.range, larger, side)
        for part in self._again(partial(self._split, whole)):
            yield from self._keys_of(part, depth=depth + 1)

    def _differing_keys(
        self, table: ComparedTable, unit: Unit, buckets: list[int]
    ) -> Iterator[str]:
        """Yield the keys whose rows differ in a range, or in buckets."""
        found = self._again(partial(self._fetch, table, unit, buckets))
        if isinstance(found, str):
            self._findings.fail(table.relation_id, found)
            return
        yield from sorted({key for (key, _), surplus in found.items() if surplus})

    def _fetch(
        self, table: ComparedTable, unit: Unit, buckets: list[int]
    ) -> Counter[tuple[str, str]] | str:
        """Return how many rows more the source has than the target, by key and hash of the row; or
        an error of the table. Raises PassingError.
        """
        found: Counter[tuple[str, str]] = Counter()
        try:
            for side, step in ((SOURCE, 1), (TARGET, -1)):
                for _, _, key, row in fetch_rows(table, unit, buckets, side, self._servers):
                    found[key, row] += step
        except (psycopg.Error, ElsewhereError) as exc:
            return describe(exc)
        return found

    def _split(self, unit: Unit) -> list[Unit]:
        return [*self._ranges.split(unit)]


def _groups(buckets: dict[int, list[int]]) -> Iterator[list[int]]:
    """Yield buckets in groups of a bounded number of rows. Pure."""
    group: list[int] = []
    rows = 0
    for bucket, numbers in buckets.items():
        if group and rows + max(numbers) > BUCKETS_ROWS:
            yield group
            group, rows = [], 0
        group.append(bucket)
        rows += max(numbers)
    if group:
        yield group


# ---- the process -------------------------------------------------------------------------------


def _end_with_input() -> None:
    """End this process once its parent is gone."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(END_SECONDS)
    os._exit(1)


def _cancel(*_: object) -> NoReturn:
    """Let psycopg cancel the statement that runs."""
    raise KeyboardInterrupt


def _answer(fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run as a program."""
    signal.signal(signal.SIGTERM, _cancel)
    try:
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_input, daemon=True).start()
        if job.get("is_background"):
            os.nice(10)  # the streams come first
        _answer({"result": run(job)})
    except KeyboardInterrupt:
        return 1
    except Exception as exc:  # noqa: BLE001  # reported to the process that started this one
        _answer(failure(exc))
        return 1
    return 0


def failure(exc: Exception) -> dict[str, Any]:
    """Return the answer about an error; one of no server and no file is a defect. Pure.

    The traceback has lines of code, and no values of rows.
    """
    text = str(exc) or type(exc).__name__
    if isinstance(exc, PassingError | OSError):
        return {"error": text}
    frames = "".join(traceback.format_tb(exc.__traceback__))
    return {"error": f"{type(exc).__name__}: {text}", "traceback": frames}


if __name__ == "__main__":
    os._exit(main())  # a thread that cannot be cancelled holds nothing up
