"""Indexes that are put off while a table is filled, and put back exactly as they were.

A definition is stored in the transaction that drops the index, and removed in the one that makes it
again, so a crash at any moment loses none. Only indexes that nothing hangs on are put off: not
those of constraints, of the replica identity, of a non-default tablespace, or with settings of
their own that a definition does not hold. Several sources may fill one table at once: the last to
finish puts its indexes back.
"""

from typing import Final

from streamer.apply.target import TargetConnection, transaction
from streamer.failpoints import failpoint
from streamer.route.mapping import RelationName
from streamer.sql import quote_qualified

_DROPPABLE_SQL: Final = """
select pg_catalog.pg_get_indexdef(i.indexrelid) as definition,
       pg_catalog.format('%I.%I', n.nspname, x.relname) as quoted,
       pg_catalog.obj_description(i.indexrelid, 'pg_class') as comment,
       i.indisclustered as is_clustered, x.relname as name
from pg_catalog.pg_index i
join pg_catalog.pg_class x on x.oid = i.indexrelid
join pg_catalog.pg_namespace n on n.oid = x.relnamespace
where i.indrelid = pg_catalog.to_regclass($1)
  and not i.indisprimary and not i.indisreplident and i.indisvalid and x.reltablespace = 0
  and not exists (select from pg_catalog.pg_constraint c where c.conindid = i.indexrelid)
  and not exists (select from pg_catalog.pg_attribute a
                   where a.attrelid = i.indexrelid and a.attstattarget > 0)
  and (select relkind from pg_catalog.pg_class where oid = i.indrelid) = 'r'
order by i.indexrelid
"""


async def _lock(connection: TargetConnection, target: RelationName) -> None:
    await connection.execute(
        "select pg_advisory_xact_lock(hashtextextended('streamer indexes ' || $1, 0))", str(target)
    )


async def defer_indexes(connection: TargetConnection, target: RelationName) -> int:
    """Drop the indexes of *target* that can be put off, storing how to make them; return how many."""
    quoted = quote_qualified(target.namespace, target.name)
    async with transaction(connection):
        await _lock(connection, target)
        rows = await connection.fetch(_DROPPABLE_SQL, quoted)
        count = 0
        for row in rows:
            statements = [row["definition"]]
            if row["comment"] is not None:
                comment = await connection.fetch_value(
                    "select quote_literal($1::text)", row["comment"]
                )
                statements.append(f"comment on index {row['quoted']} is {comment}")
            if row["is_clustered"]:
                name = await connection.fetch_value("select quote_ident($1)", row["name"])
                statements.append(f"alter table {quoted} cluster on {name}")
            await connection.execute(
                "insert into streamer.deferred_index (target, definition) values ($1, $2)",
                str(target),
                ";\n".join(statements),
            )
            await connection.execute(f"drop index {row['quoted']}")
            count += 1
    failpoint("sync.indexes_dropped")
    return count


_IS_FILLED_SQL: Final = """
select exists (
    select from streamer.relation r
    where r.target = $1 and r.state = 'copying'
      and (not exists (select from streamer.sync_partition p where p.relation_id = r.id)
           or exists (select from streamer.sync_partition p
                       where p.relation_id = r.id and p.finished_at is null)))
"""


async def restore_indexes(connection: TargetConnection, target: RelationName) -> int:
    """Make the indexes of *target* again unless a source still fills it; return how many.

    Raises TargetError when one cannot be made; its definition is kept.
    """
    count = 0
    while True:
        async with transaction(connection):
            await _lock(connection, target)
            if await connection.fetch_value(_IS_FILLED_SQL, str(target)):
                return count
            rows = await connection.fetch(
                "delete from streamer.deferred_index where id = (select min(id) from"
                " streamer.deferred_index where target = $1) returning definition",
                str(target),
            )
            if not rows:
                return count
            await connection.execute(rows[0]["definition"])
            count += 1
        failpoint("sync.index_restored")


async def read_deferred_targets(connection: TargetConnection) -> list[str]:
    """Return the targets that have indexes put off."""
    rows = await connection.fetch("select distinct target from streamer.deferred_index order by 1")
    return [row["target"] for row in rows]
