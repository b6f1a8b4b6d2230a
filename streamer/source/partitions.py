"""Partitions that join a published table and bring rows along.

ATTACH PARTITION moves no row, so decoding says nothing of those that are there already. They show
by what wrote them: before the transaction, or the command of it, that wrote the partition's row in
pg_inherits. Its first pages are looked at, where the oldest rows lie. Where they tell nothing, or
may not be read, the catalog has to: the row of the system column ctid in pg_attribute is written
with a table and never again, and CREATE TABLE … PARTITION OF writes that in pg_inherits in the same
transaction (DefineRelation in tablecmds.c).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psycopg

from streamer.route.mapping import RelationName
from streamer.source.connection import Connection, fetch_all, fetch_one
from streamer.sql import quote_qualified

PAGES: Final = 16
"""So many are looked at."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition that has rows of its own."""

    oid: int
    name: RelationName
    joins: tuple[tuple[str, int], ...]
    """Which transaction, and command of it, made it and each partition above it one."""
    was_table: bool
    """One of them was made before that transaction."""
    is_empty: bool
    may_read: bool


# Tables are read, not functions that walk the tree: those do not go by the transaction's snapshot.
_LEAVES_SQL: Final = """
with recursive tree as (
    select w.namespace, w.name, c.oid, c.relkind, false as was_table,
           '{}'::text[] as xids, '{}'::int8[] as commands
    from unnest(%s::text[], %s::text[]) w (namespace, name)
    join pg_catalog.pg_namespace n on n.nspname = w.namespace
    join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name
    where c.relkind = 'p'
    union all
    select t.namespace, t.name, c.oid, c.relkind, t.was_table or a.xmin <> i.xmin,
           t.xids || i.xmin::text, t.commands || i.cmin::text::int8
    from tree t
    join pg_catalog.pg_inherits i on i.inhparent = t.oid
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = -1
    where t.relkind = 'p'
)
select t.namespace, t.name, t.oid::int8 as oid, n.nspname as leaf_namespace,
       c.relname as leaf_name, t.xids, t.commands, t.was_table,
       pg_catalog.pg_relation_size(t.oid) = 0 as is_empty,
       pg_catalog.has_table_privilege(t.oid, 'select')
         and not pg_catalog.row_security_active(t.oid) as may_read
from tree t
join pg_catalog.pg_class c on c.oid = t.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where t.relkind = 'r'
"""

_OLD_ROWS_SQL: Final = """
select pg_catalog.bool_or(exists (
    select from unnest(%s::text[], %s::int8[]) j (xid, command)
    where pg_catalog.age(r.xmin) > pg_catalog.age(j.xid::xid)
       or r.xmin = j.xid::xid and r.cmin::text::int8 < j.command)) as are_old
from {relation} r where r.ctid < %s::tid
"""

_PATIENCE_SQL: Final = "set local lock_timeout = '100ms'"


async def read_leaves(
    connection: Connection, names: Iterable[RelationName]
) -> dict[RelationName, list[Leaf]]:
    """Return the partitions of those of *names* that have some, as the transaction of *connection*
    sees them.
    """
    wanted = list(names)
    rows = await fetch_all(
        connection,
        _LEAVES_SQL,
        [name.namespace for name in wanted],
        [name.name for name in wanted],
    )
    leaves: dict[RelationName, list[Leaf]] = defaultdict(list)
    for row in rows:
        leaf = Leaf(
            row["oid"],
            RelationName(row["leaf_namespace"], row["leaf_name"]),
            tuple(zip(row["xids"], row["commands"], strict=True)),
            row["was_table"],
            row["is_empty"],
            row["may_read"],
        )
        leaves[RelationName(row["namespace"], row["name"])].append(leaf)
    return leaves


async def brought_rows(connection: Connection, leaf: Leaf) -> bool | None:
    """Whether a partition had rows before it was one; None if that cannot be seen now, because it
    is locked or gone.
    """
    if leaf.is_empty:
        return False
    if not leaf.may_read:
        return leaf.was_table
    xids, commands = zip(*leaf.joins, strict=True)
    relation = quote_qualified(leaf.name.namespace, leaf.name.name).replace("%", "%%")
    try:
        async with connection.transaction():
            await connection.execute(_PATIENCE_SQL)
            row = await fetch_one(
                connection,
                _OLD_ROWS_SQL.format(relation=relation),
                list(xids),
                list(commands),
                f"({PAGES},0)",
            )
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable):
        return None
    return leaf.was_table if row["are_old"] is None else bool(row["are_old"])
