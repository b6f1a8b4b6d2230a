"""Finds keys whose neighbours are in distant pages, such as random UUIDs.

A read of a range of such keys touches a page for each row. So reads of many ranges would read a
large table many times, and streamer reads ranges of pages instead.
"""

from collections.abc import Iterable
from typing import Final

from streamer.source.catalog import SourceRelation
from streamer.source.connection import Connection, fetch_all

CORRELATION_MIN: Final = 0.5
"""The correlation of a key's first column, by ANALYZE, below which keys count as distant."""
INDEXED_BYTES_MAX: Final = 256 * 1024 * 1024
"""A smaller table stays in memory while streamer reads ranges of its key."""

_DISTANT_SQL: Final = """
select c.oid::int8 as oid
from unnest(%s::oid[], %s::text[]) w (oid, name)
join pg_catalog.pg_class c on c.oid = w.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_stats s
    on s.schemaname = n.nspname and s.tablename = c.relname and s.attname = w.name
group by c.oid having max(abs(s.correlation)) < %s
"""


async def find_distant(
    connection: Connection, relations: Iterable[SourceRelation]
) -> frozenset[int]:
    """Return the OIDs of the large tables with such a key. Without statistics, the result is
    empty.
    """
    firsts = {
        relation.oid: (relation.primary_key or relation.key)[0]
        for relation in relations
        if relation.size_bytes > INDEXED_BYTES_MAX and (relation.primary_key or relation.key)
    }
    if not firsts:
        return frozenset()
    rows = await fetch_all(
        connection, _DISTANT_SQL, list(firsts), list(firsts.values()), CORRELATION_MIN
    )
    return frozenset(row["oid"] for row in rows)
