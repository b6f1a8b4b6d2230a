"""Finds the text columns that a source orders by bytes. No update of a library changes this order.

The collation of such a column, or of its database, is C or POSIX, or of PostgreSQL 17's builtin
provider. The provider orders by code point, which is the order of the bytes in UTF-8. In a
different encoding the source sends converted bytes.
"""

from collections.abc import Sequence
from typing import Final

from streamer.source.connection import Connection, fetch_all

# `to_jsonb`, because PostgreSQL 14 and earlier have no providers of databases.
_BYTEWISE_SQL: Final = """
select a.attrelid::int8 as relid, a.attname::text as name
from pg_catalog.pg_attribute a
join pg_catalog.pg_collation c on c.oid = a.attcollation
join pg_catalog.pg_database d on d.datname = pg_catalog.current_database()
cross join lateral (
    select case when c.collprovider = 'd'
                then coalesce(pg_catalog.to_jsonb(d) ->> 'datlocprovider', 'c')
                else c.collprovider::text end as provider,
           case when c.collprovider = 'd' then d.datcollate::text
                else c.collcollate::text end as locale) l
where a.attrelid = any (%s::oid[]) and a.attnum > 0 and not a.attisdropped
  and pg_catalog.pg_encoding_to_char(d.encoding) = 'UTF8'
  and (l.provider = 'b' or l.provider = 'c' and l.locale in ('C', 'POSIX'))
"""


async def read_bytewise(connection: Connection, oids: Sequence[int]) -> dict[int, frozenset[str]]:
    """Return the names of columns ordered by bytes, by the OIDs of tables."""
    names_by_oid: dict[int, set[str]] = {oid: set() for oid in oids}
    for row in await fetch_all(connection, _BYTEWISE_SQL, list(oids)):
        names_by_oid[row["relid"]].add(row["name"])
    return {oid: frozenset(names) for oid, names in names_by_oid.items()}
