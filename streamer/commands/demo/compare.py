"""Compares the warehouse with the shops.

Each server writes its rows as text, under settings that make equal values look equal. The
comparison uses a digest of the sorted rows, so that only digests travel. In a history table, the
open versions must equal the source's rows, and no two versions of a key may overlap.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from streamer.commands.demo.shop import DATABASE, TABLES, WAREHOUSE, Table
from streamer.commands.demo.stage import Stage
from streamer.mapping.rules import TableType
from streamer.postgres import session
from streamer.postgres.quoting import quote_columns, quote_literal

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

_OPEN: Final = "kvsz_end = '9999-01-01 00:00:00+00' and not kvsz_deleted"
_DIGEST_SQL: Final = """
select count(*), encode(sha256(coalesce(string_agg(digest, '' order by digest), '')), 'hex')
  from (select sha256(convert_to(content, 'UTF8')) as digest from ({rows}) r) d
"""
_COLUMNS_SQL: Final = """
select array_agg(attname::text order by attnum) from pg_attribute
 where attrelid = %s::regclass and attnum > 0 and not attisdropped
"""
_OVERLAPS_SQL: Final = """
select count(*) from (
  select kvsz_start, kvsz_end, lag(kvsz_end) over versions as before from {table}
  window versions as (partition by sid, {key} order by kvsz_start, kvsz_end, kvsz_id)) v
 where before > kvsz_start or kvsz_end < kvsz_start
"""
_DIFFERENCES_SHOWN_MAX: Final = 3
_DIFFERENCE_LENGTH_MAX: Final = 200


@dataclass(slots=True)
class Comparison:
    """How one table came out."""

    table: Table
    rows: dict[str, int] = field(default_factory=dict)
    versions: int | None = None
    differences: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.differences


async def compare(stage: Stage) -> list[Comparison]:
    """Compare every table of every shop with the warehouse's rows of it."""
    target = await _connect(stage.target.url(WAREHOUSE))
    comparisons = [Comparison(table) for table in TABLES]
    try:
        for sid, server in stage.sources.items():
            source = await _connect(server.url(DATABASE))
            try:
                for comparison in comparisons:
                    await _compare_table(comparison, sid, source, target)
            finally:
                await source.close()
        for comparison in comparisons:
            if comparison.table.type is TableType.HISTORY:
                await _check_versions(comparison, target)
    finally:
        await target.close()
    return comparisons


async def _connect(url: str) -> Connection:
    connection: Connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    await connection.execute(session.pin_sql().encode())
    return connection


async def _compare_table(
    comparison: Comparison, sid: str, source: Connection, target: Connection
) -> None:
    table = comparison.table
    (names,) = await _row(source, _COLUMNS_SQL, table.source)
    columns = quote_columns([name for name in names if name not in table.excluded])
    open_only = f" and {_OPEN}" if table.type is TableType.HISTORY else ""
    at_source = f"select row({columns})::text as content from {table.source}"  # noqa: S608
    at_target = (
        f"select row({columns})::text as content from {table.target}"  # noqa: S608
        f" where sid = {quote_literal(sid)}{open_only}"
    )
    (rows, digest), found = await asyncio.gather(
        _row(source, _DIGEST_SQL.format(rows=at_source)),
        _row(target, _DIGEST_SQL.format(rows=at_target)),
    )
    comparison.rows[sid] = rows
    if found != (rows, digest):
        comparison.differences.append(f"{sid}: {rows} rows at the source, {found[0]} at the target")
        comparison.differences += await _differences(source, at_source, target, at_target)


async def _differences(
    source: Connection, at_source: str, target: Connection, at_target: str
) -> list[str]:
    """Return the first rows that only one side has."""
    counts = []
    for connection, sql in ((source, at_source), (target, at_target)):
        cursor = await connection.execute(sql.encode())
        counts.append(Counter(row[0] for row in await cursor.fetchall()))
    sides = (("source", counts[0] - counts[1]), ("target", counts[1] - counts[0]))
    return [
        f"only at the {side}: {row[:_DIFFERENCE_LENGTH_MAX]}"
        for side, rows in sides
        for row in sorted(rows)[:_DIFFERENCES_SHOWN_MAX]
    ]


async def _check_versions(comparison: Comparison, target: Connection) -> None:
    table = comparison.table
    key = quote_columns(table.key)
    (comparison.versions,) = await _row(target, f"select count(*) from {table.target}")  # noqa: S608
    (overlaps,) = await _row(target, _OVERLAPS_SQL.format(key=key, table=table.target))
    if overlaps:
        comparison.differences.append(f"{overlaps} versions overlap the one before them")


async def _row(connection: Connection, sql: str, *parameters: Any) -> tuple[Any, ...]:
    cursor = await connection.execute(sql.encode(), parameters or None)
    (row,) = await cursor.fetchall()
    return row
