"""Partitions that join a published table and bring rows along.

ATTACH PARTITION moves no row, so decoding says nothing of those that are there already. Whether a
partition was made as one or attached later shows in who wrote its catalog rows: that of the system
column ctid in pg_attribute is written with the table and never again, that in pg_inherits with the
membership. CREATE TABLE … PARTITION OF does both in one transaction, three or four of its commands
apart (DefineRelation in tablecmds.c); a table made, filled and attached takes at least six.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.route.mapping import RelationName
from streamer.source.connection import Connection, fetch_all


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition that has rows of its own; ``brought_rows``: it had some before it was one."""

    oid: int
    name: RelationName
    brought_rows: bool


_LEAVES_SQL: Final = """
select w.namespace, w.name, l.oid::int8 as oid,
       ln.nspname as leaf_namespace, l.relname as leaf_name,
       pg_catalog.pg_relation_size(l.oid) > 0 and exists (
           select from pg_catalog.pg_partition_ancestors(l.oid) p
             join pg_catalog.pg_inherits i on i.inhrelid = p.relid
             join pg_catalog.pg_attribute a on a.attrelid = p.relid and a.attnum = -1
            where p.relid <> c.oid and (a.xmin <> i.xmin
               or i.cmin::text::int8 - a.cmin::text::int8 > 4)) as brought_rows
from unnest(%s::text[], %s::text[]) w (namespace, name)
join pg_catalog.pg_namespace n on n.nspname = w.namespace
join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name and c.relkind = 'p'
cross join lateral pg_catalog.pg_partition_tree(c.oid) t
join pg_catalog.pg_class l on l.oid = t.relid and t.isleaf and l.relkind = 'r'
join pg_catalog.pg_namespace ln on ln.oid = l.relnamespace
"""


async def read_leaves(
    connection: Connection, names: Iterable[RelationName]
) -> dict[RelationName, list[Leaf]]:
    """Return the partitions of those of *names* that have some."""
    wanted = list(names)
    rows = await fetch_all(
        connection,
        _LEAVES_SQL,
        [name.namespace for name in wanted],
        [name.name for name in wanted],
    )
    leaves: dict[RelationName, list[Leaf]] = defaultdict(list)
    for row in rows:
        leaf = RelationName(row["leaf_namespace"], row["leaf_name"])
        leaves[RelationName(row["namespace"], row["name"])].append(
            Leaf(row["oid"], leaf, row["brought_rows"])
        )
    return leaves
