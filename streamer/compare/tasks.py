"""The tasks of a comparison: functions over the rows of one Spark partition.

An executor on another machine has only this module and its imports of streamer
(`streamer.sync.spark.job` ships them), besides psycopg.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import psycopg

from streamer.compare.readings import (
    ComparisonEnds,
    DigestRow,
    ElsewhereError,
    KeyJudging,
    RangeReader,
    Servers,
    Tables,
    Unit,
    Verdict,
    batches,
    describe,
    error_verdict,
    fetch_rows,
)

Ends = dict[str, Any] | str


def digest_units(
    rows: Iterable[Any],
    tables: Tables,
    ends: Ends,
    rows_per_second: float | None,
    comparison_id: int,
    page_readers: int,
    *,
    is_first: bool,
) -> Iterator[DigestRow]:
    with Servers(ComparisonEnds.read(ends)) as servers:
        reader = RangeReader(tables, servers, rows_per_second, comparison_id, page_readers)
        for row in rows:
            yield from reader.digest(Unit.from_row(row), is_first=is_first)


def units_of_rows(rows: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of a DataFrame as those of units."""
    for row in rows:
        bounds = row["lower"], row["upper"]
        yield row["relation"], row["number"], *bounds, row["rows"], row["larger_side"]


def split_units(rows: Iterable[Any], tables: Tables, ends: Ends) -> Iterator[Any]:
    with Servers(ComparisonEnds.read(ends)) as servers:
        reader = RangeReader(tables, servers, None, 0)
        for row in rows:
            for unit in reader.split(Unit.from_row(row)):
                yield unit.to_row()


def fetch(rows: Iterable[Any], tables: Tables, ends: Ends) -> Iterator[tuple[int, int, str, str]]:
    with Servers(ComparisonEnds.read(ends)) as servers:
        for relation_id, lower, upper, buckets, side in rows:
            unit = Unit.from_row((relation_id, 0, lower, upper, 0, side))
            table = tables[relation_id]
            try:
                yield from fetch_rows(table, unit, buckets, side, servers)
            except (psycopg.Error, ElsewhereError) as exc:
                yield relation_id, -1, describe(exc), ""


def judge_keys(
    rows: Iterable[tuple[int, str, bool]],
    tables: Tables,
    ends: Ends,
    seconds: float,
    *,
    with_values: bool,
) -> Iterator[Verdict]:
    errors: dict[int, str] = {}

    def good() -> Iterator[tuple[int, str]]:
        for relation_id, key, is_bad in rows:
            if is_bad:
                errors[relation_id] = key
            else:
                yield relation_id, key

    with Servers(ComparisonEnds.read(ends)) as servers:
        judging = KeyJudging(servers, seconds=seconds, with_values=with_values)
        for keys in batches(good(), tables):
            for judged in judging.judge(tables, keys):
                yield from judging.show(judged)
    for relation_id, message in errors.items():
        yield error_verdict(relation_id, message)
