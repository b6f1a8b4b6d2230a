"""Names the row that a source cannot send because a message may not exceed 1 GB.

The walsender's error names neither table nor row, so streamer searches for the largest row of the
mapped tables. The server knows the sizes of stored values without reading the values; a time limit
bounds the scans.
"""

from collections.abc import Iterable
from typing import Final

import psycopg

from streamer.control.resync_options import after_loss
from streamer.errors.error_classes import SourceError, SourceLimitError
from streamer.errors.remedies import EVERY_TABLE, Remedy, run
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.source.connection import Connection, connection

SCAN_SECONDS: Final = 30
LARGE_BYTES: Final = 256 * 1024 * 1024
"""Smaller rows cannot be the cause."""

_COLUMNS_SQL: Final = """
select a.attname as name, pg_catalog.format_type(a.atttypid, null) as type,
       a.attlen = -1 as is_long,
       coalesce(a.attnum = any (i.indkey::pg_catalog.int2[]), false) as is_key
from pg_catalog.pg_attribute a
left join pg_catalog.pg_index i on i.indrelid = a.attrelid and i.indisprimary
where a.attrelid = pg_catalog.to_regclass(%s) and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""
# For these types, the length of the stored value gives the length of the sent text.
_SIZES: Final = {
    "bytea": "2 * pg_catalog.octet_length({})",
    "text": "pg_catalog.octet_length({})",
    "character varying": "pg_catalog.octet_length({})",
}


async def name_large_row(
    source: SourceMapping, mappings: Iterable[RelationMapping], error: SourceLimitError
) -> SourceLimitError:
    """Return *error* with the table, key and size of the row that is probably at fault."""
    tables = list(mappings)
    options = after_loss(mapping.type for mapping in tables)
    error.remedy = Remedy.of(
        "make the row smaller at the source or exclude its column, then run: ",
        run("resync", EVERY_TABLE, *options, database=source.database, sid=source.sid),
        "; in binary transport a bytea takes half the space",
    )
    largest: tuple[int, str] | None = None
    try:
        async with connection(source) as plain:
            await plain.execute(f"set statement_timeout = {SCAN_SECONDS * 1000}")
            for mapping in tables:
                row = await _largest_row(plain, mapping)
                if row is not None and (largest is None or row > largest):
                    largest = row
    except (psycopg.Error, SourceError):
        pass  # The name only improves the message; the caller raises the error all the same.
    if largest is None or largest[0] < LARGE_BYTES:
        return error
    return SourceLimitError(f"{error.message}; the largest row is {largest[1]}", hint=error.remedy)


def _size_of(column: str, kind: str) -> str:
    size = _SIZES.get(kind, "pg_catalog.pg_column_size({})").format(quote_identifier(column))
    return f"coalesce(({size})::pg_catalog.int8, 0)"


async def _largest_row(plain: Connection, mapping: RelationMapping) -> tuple[int, str] | None:
    name = mapping.source
    table = quote_qualified(name.namespace, name.name)
    cursor = await plain.execute(_COLUMNS_SQL, [table])
    columns = await cursor.fetchall()
    sizes = [_size_of(c["name"], c["type"]) for c in columns if c["is_long"]]
    if not sizes:
        return None
    key = [c["name"] for c in columns if c["is_key"]]
    values = ", ".join(f"{quote_identifier(name)}::pg_catalog.text" for name in key or ["ctid"])
    cursor = await plain.execute(
        f"select array[{values}] as key, {' + '.join(sizes)} as size from {table}"
        " order by 2 desc limit 1".encode()
    )
    row = await cursor.fetchone()
    if row is None:
        return None
    shown = f"Key ({', '.join(key or ['ctid'])})=({', '.join(map(str, row['key']))})"
    return row["size"], f'about {row["size"]} bytes of table "{name}", {shown}'
