"""A comparison without Spark: one process reads range by range, for `run`'s standing verification.

The readings are those of Spark's tasks (`streamer.compare.readings`). Spark distributes ranges and
joins rows that differ; here one loop does both. It has two connections, and memory for the rows of
one small range.

`streamer.compare.local_process` writes the job to standard input, as one line of JSON. The answer
is one line of JSON on standard output. The process ends with that input, so it never outlives its
parent. SIGTERM cancels the statement that runs.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import psycopg

from streamer.compare import ranges
from streamer.compare.ranges import SPLITS_MAX
from streamer.compare.readings import (
    ERROR,
    SOURCE,
    TARGET,
    ComparisonEnds,
    ElsewhereError,
    KeyJudging,
    RangeReader,
    Servers,
    Unit,
    Verdict,
    batches,
    describe,
    fetch_rows,
)
from streamer.compare.results import SAMPLE_ROWS, shown
from streamer.compare.tables import ComparedTable
from streamer.sync.parts import PassingError

APPLICATION_NAME: Final = "streamer verify"
BUCKETS_ROWS: Final = 100_000
"""The rows of buckets that one query fetches, because each such query reads the whole table."""
DIFFERING_MAX: Final = 10_000
"""With that many rows that differ, the rest of a table is not read: it needs a repair anyway."""
END_SECONDS: Final = 3.0


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
    sample: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_enough(self) -> bool:
        found = self.missing + self.extra + self.different
        return self.error is not None or found >= DIFFERING_MAX


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the tables of *job*; return a result for each, like the Spark program.

    Raises PassingError, after which the same comparison goes on with the ranges that are left.
    """
    with Servers(ComparisonEnds.read(job["ends"]), APPLICATION_NAME) as servers:
        return _LocalComparison(servers, job).run()


class _LocalComparison:
    def __init__(self, servers: Servers, job: dict[str, Any]) -> None:
        self._servers = servers
        self._tables = {row["relation_id"]: ComparedTable.from_json(row) for row in job["tables"]}
        self._units = [Unit.from_row(row) for row in job["units"]]
        self._reader = RangeReader(
            self._tables, servers, job["rows_per_second"], job["comparison_id"]
        )
        self._judging = KeyJudging(servers, seconds=job["seconds"], with_values=job["values"])
        self._counts = {relation_id: _Count() for relation_id in self._tables}

    def run(self) -> list[dict[str, Any]]:
        for keys in batches(self._keys()):
            for verdict in self._judging.judge(self._tables, keys):
                self._add(verdict)
        return [
            {"relation_id": relation_id} | {name: getattr(count, name) for name in _Count.__slots__}
            for relation_id, count in self._counts.items()
        ]

    def _add(self, verdict: Verdict) -> None:
        relation_id, key, kind, missing, extra, different, columns, source, target, _ = verdict
        count = self._counts[relation_id]
        if kind == ERROR:
            count.error = count.error or key
            return
        count.missing += missing
        count.extra += extra
        count.different += different
        count.undecided += kind == "undecided"
        if len(count.sample) < SAMPLE_ROWS:
            entry: dict[str, Any] = {"key": key, "kind": kind, "columns": columns}
            entry |= {"source": source, "target": target}
            count.sample.append(shown(self._tables[relation_id], entry))

    # ---- keys in question ----------------------------------------------------------------------

    def _keys(self) -> Iterator[tuple[int, str]]:
        """Yield relation and key of the rows that differ between two readings."""
        for unit in self._units:
            if not self._counts[unit.relation_id].is_enough:
                for key in self._keys_of(unit, depth=0):
                    yield unit.relation_id, key

    def _keys_of(self, unit: Unit, *, depth: int) -> Iterator[str]:
        table, count = self._tables[unit.relation_id], self._counts[unit.relation_id]
        rows: dict[int, list[int]] = {}
        digests: dict[int, list[tuple[str, str]]] = {}
        for *_, bucket, side, number, first, second, error in self._reader.digest(
            unit, is_first=depth == 0
        ):
            if error is not None:
                count.error = error
                return
            rows.setdefault(bucket, [0, 0])[side] = number
            digests.setdefault(bucket, [("0", "0"), ("0", "0")])[side] = first, second
        if depth == 0:
            count.rows_source += sum(numbers[SOURCE] for numbers in rows.values())
            count.rows_target += sum(numbers[TARGET] for numbers in rows.values())
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
        numbers = rows[0]
        if max(numbers) <= ranges.FETCH_ROWS or depth == SPLITS_MAX - 1:
            yield from self._differing_keys(table, unit, [])
            return
        larger = SOURCE if numbers[SOURCE] >= numbers[TARGET] else TARGET
        whole = Unit(unit.relation_id, unit.number, unit.range, max(numbers), larger)
        for part in self._reader.split(whole):
            yield from self._keys_of(part, depth=depth + 1)

    def _differing_keys(
        self, table: ComparedTable, unit: Unit, buckets: list[int]
    ) -> Iterator[str]:
        """Fetch the rows of a range, or of buckets, from both sides, and join them."""
        found: tuple[dict[str, Counter[bytes]], dict[str, Counter[bytes]]] = {}, {}
        try:
            for side in (SOURCE, TARGET):
                for _, _, key, row in fetch_rows(table, unit, buckets, side, self._servers):
                    digest = hashlib.blake2b(row.encode(), digest_size=16).digest()
                    found[side].setdefault(key, Counter())[digest] += 1
        except (psycopg.Error, ElsewhereError) as exc:
            self._counts[table.relation_id].error = describe(exc)
            return
        here, there = found
        yield from sorted(
            key for key in here.keys() | there.keys() if here.get(key) != there.get(key)
        )


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
    os.nice(10)  # the streams come first
    try:
        job = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_input, daemon=True).start()
        _answer({"result": run(job)})
    except KeyboardInterrupt:
        return 1
    except Exception as exc:  # noqa: BLE001  # reported to the process that started this one
        _answer(failure(exc))
        return 1
    return 0


def failure(exc: Exception) -> dict[str, Any]:
    """Return the answer about an error; one that no server has raised is a defect. Pure.

    The traceback has lines of code, and no values of rows.
    """
    text = str(exc) or type(exc).__name__
    if isinstance(exc, psycopg.Error | PassingError | ElsewhereError):
        return {"error": text}
    frames = "".join(traceback.format_tb(exc.__traceback__))
    return {"error": f"{type(exc).__name__}: {text}", "traceback": frames}


if __name__ == "__main__":
    sys.exit(main())
