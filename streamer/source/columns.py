"""The columns of source tables by their numbers, and the values that ADD COLUMN gave to old rows.

The stream names columns. It shows neither a rename nor the values that ADD COLUMN … DEFAULT gave to
existing rows. The catalogs have both. The queries read catalogs only, so they wait for no lock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.mapping.names import RelationName
from streamer.source.connection import Connection, fetch_all

_COLUMNS_SQL: Final = """
select w.namespace, w.name, a.attname as column, a.attnum::int4 as number,
       case when a.atthasmissing then (a.attmissingval::text::text[])[1] end as fill,
       not a.atthasmissing and (a.atthasdef or a.attnotnull or a.attidentity <> '') as is_computed
from rows from (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) w (namespace, name)
join pg_catalog.pg_namespace n on n.nspname = w.namespace
join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name
join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
where c.relkind in ('r', 'p')
"""


@dataclass(frozen=True, slots=True)
class ColumnNow:
    """A column as the catalog has it.

    ``fill``: the text of the value that rows from before it have, where they have one and the same.
    ``is_computed``: they may have values of their own.
    """

    number: int
    fill: str | None
    is_computed: bool


async def read_columns(
    plain: Connection, names: Iterable[RelationName]
) -> dict[RelationName, dict[str, ColumnNow]]:
    """Return the columns of those of *names* that are there."""
    wanted = list(names)
    if not wanted:
        return {}
    rows = await fetch_all(
        plain, _COLUMNS_SQL, [name.namespace for name in wanted], [name.name for name in wanted]
    )
    found: dict[RelationName, dict[str, ColumnNow]] = {}
    for row in rows:
        columns = found.setdefault(RelationName(row["namespace"], row["name"]), {})
        columns[row["column"]] = ColumnNow(row["number"], row["fill"], row["is_computed"])
    return found
