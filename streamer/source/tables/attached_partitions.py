"""Partitions that join a published table with existing rows.

ATTACH PARTITION moves no row, so decoding does not show the existing rows. The check finds existing
rows by xmin and cmin. Both are older than the transaction or command that wrote the partition's row
in pg_inherits. The check reads the first pages, which hold the oldest rows. If a single transaction
created, filled and attached the table, the check has no other evidence. A larger table from an
earlier transaction counts as filled, because the application may have deleted or changed its first
rows. The pg_attribute row of the system column ctid dates a table: PostgreSQL writes it only with
the table.

A row of a subtransaction has a later xmin than the transaction, like a row written after the
attachment. Subtransactions share the command ids of the transaction, so a lower cmin means that the
row is older. A row of a later transaction can have a lower cmin, too. So the check compares cmin
only for a table that ATTACH made a partition. A table that CREATE TABLE made a partition has no
older rows. ATTACH writes the pg_attribute rows of all columns with the row in pg_inherits. CREATE
TABLE writes the columns first.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psycopg

from streamer.mapping.relation_names import RelationName
from streamer.postgres.describing import IS_ATTACHED
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.postgres.quoting import quote_literal, quote_qualified
from streamer.source.connection import Connection, fetch_all

PAGES_MAX: Final = 16
"""The number of pages to check."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf partition, which stores rows."""

    oid: int
    name: RelationName
    joins: tuple[tuple[str, int, bool], ...]
    """For the leaf and each partition above: the transaction and command that attached it, and
    whether by ATTACH.
    """
    was_table: bool
    """Whether the leaf or a partition above existed before that transaction."""
    may_read: bool
    is_foreign: bool = False
    """Whether a remote server stores the rows and their changes."""

    @property
    def attached_by(self) -> str:
        """The transactions that attached the leaf and its ancestors; a new ATTACH changes the
        value.
        """
        return ",".join(xid for xid, _, _ in self.joins)


# The query reads catalogs, because functions about the tree do not use the transaction's snapshot.
_LEAVES_SQL: Final = f"""
with recursive tree as (
    select w.namespace, w.name, c.oid, c.relkind, false as was_table,
           '{{}}'::text[] as xids, '{{}}'::int8[] as commands, '{{}}'::bool[] as attached
    from unnest(%s::text[], %s::text[]) w (namespace, name)
    cross join {NAMED_RELATION} c
    where c.relkind = 'p'
    union all
    select t.namespace, t.name, c.oid, c.relkind, t.was_table or a.xmin <> i.xmin,
           t.xids || i.xmin::text, t.commands || i.cmin::text::int8,
           t.attached || (a.xmin <> i.xmin or not exists (
               select from pg_catalog.pg_attribute u
               where u.attrelid = c.oid and u.attnum > 0 and not u.attisdropped
                 and u.xmin = i.xmin and u.cmin::text::int8 < i.cmin::text::int8))
    from tree t
    join pg_catalog.pg_inherits i on i.inhparent = t.oid
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = -1
    where t.relkind = 'p' and {IS_ATTACHED}
)
select t.namespace, t.name, t.relkind = 'p' as is_root, t.oid::int8 as oid,
       n.nspname as leaf_namespace, c.relname as leaf_name, t.xids, t.commands, t.attached,
       t.was_table, t.relkind = 'f' as is_foreign,
       pg_catalog.has_table_privilege(t.oid, 'select')
         and pg_catalog.has_schema_privilege(n.oid, 'usage')
         and not pg_catalog.row_security_active(t.oid) as may_read
from tree t
join pg_catalog.pg_class c on c.oid = t.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where t.relkind in ('r', 'f') or t.xids = '{{}}'
"""

_OLD_ROWS_SQL: Final = f"""
select exists (
    select from {{relation}} r, (values {{joins}}) j (xid, command, attached)
    where r.ctid < '({PAGES_MAX},0)'
      and (pg_catalog.age(r.xmin) > pg_catalog.age(j.xid)
           or (r.xmin = j.xid or j.attached) and r.cmin::text::int8 < j.command)) as are_old,
    pg_catalog.to_regclass({{name}})::oid = {{oid}}::oid as is_it
"""

# The query opens the partition, so it waits for a lock on the partition.
_PAGES_SQL: Final = """
select coalesce(pg_catalog.pg_relation_size({oid}::oid), 0)
         / pg_catalog.current_setting('block_size')::int8 as pages
"""
_LOCK_TIMEOUT_SQL: Final = "set local lock_timeout = '100ms'"


async def read_leaves(
    connection: Connection, names: Iterable[RelationName]
) -> dict[RelationName, list[Leaf]]:
    """Return the partitions of the partitioned tables among *names*, as the transaction of
    *connection* sees the catalogs.

    A partitioned table without partitions gets an empty list, because its first partition may
    join with rows.
    """
    listed = list(names)
    if not listed:
        return {}
    rows = await fetch_all(
        connection,
        _LEAVES_SQL,
        [name.namespace for name in listed],
        [name.name for name in listed],
    )
    leaves: dict[RelationName, list[Leaf]] = defaultdict(list)
    for row in rows:
        root_leaves = leaves[RelationName(row["namespace"], row["name"])]
        if row["is_root"]:
            continue
        leaf = Leaf(
            row["oid"],
            RelationName(row["leaf_namespace"], row["leaf_name"]),
            tuple(zip(row["xids"], row["commands"], row["attached"], strict=True)),
            row["was_table"],
            row["may_read"],
            row["is_foreign"],
        )
        root_leaves.append(leaf)
    return leaves


async def _count_pages(connection: Connection, leaf: Leaf) -> int | None:
    """Return the number of pages of a partition: 0 after a DROP, None for a locked partition."""
    # One message, and so one transaction: parallel tasks use the connection between messages.
    sql = f"{_LOCK_TIMEOUT_SQL}; {_PAGES_SQL.format(oid=int(leaf.oid))}"
    try:
        cursor = await connection.execute(sql.encode())
    except psycopg.errors.LockNotAvailable:
        return None
    cursor.nextset()
    (row,) = await cursor.fetchall()
    return int(row["pages"])


async def had_rows(connection: Connection, leaf: Leaf) -> bool | None:
    """Return whether the partition held rows when ATTACH added the partition.

    Return None if the partition is locked, was renamed, or is dropped during the check. Return
    False for a dropped partition, which has no pages. In doubtful cases return True: a false alarm
    costs a comparison, and a miss costs data.
    """
    if (pages := await _count_pages(connection, leaf)) in (0, None):
        return None if pages is None else False
    if not any(attached for _, _, attached in leaf.joins):
        return False
    if not leaf.may_read or (leaf.was_table and pages > PAGES_MAX):
        return True
    joins = ", ".join(
        f"('{int(xid)}'::xid, {int(command)}, {bool(attached)})"
        for xid, command, attached in leaf.joins
    )
    relation = quote_qualified(leaf.name.namespace, leaf.name.name)
    # One message, and so one transaction: parallel tasks use the connection between messages.
    old_rows = _OLD_ROWS_SQL.format(
        relation=relation, joins=joins, name=quote_literal(relation), oid=int(leaf.oid)
    )
    sql = f"{_LOCK_TIMEOUT_SQL}; {old_rows}"
    try:
        cursor = await connection.execute(sql.encode())
        cursor.nextset()
        (row,) = await cursor.fetchall()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable):
        return None
    return bool(row["are_old"]) if row["is_it"] else None
