"""Defers the indexes (and autovacuum) of a table during its copy, and restores them exactly.

The transaction that drops an index stores its definition, and the transaction that re-creates the
index deletes the definition. So a crash at any moment loses no index. streamer defers only indexes
without dependents: plain indexes, and the primary key unless a foreign key, a view or a publication
needs it. Indexes of constraints, of the replica identity, in a non-default tablespace, or with
settings outside their definition stay. Indexes of tables that a different role owns stay, too.
Several sources can fill a table at the same time: the last source to finish restores the indexes.

During a copy in chunks the stream also writes to the table. Then the primary key, unique indexes
and indexes that begin with a column of the key stay, because the stream finds rows by these
indexes.
"""

from collections.abc import Collection
from typing import Final

from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.errors.error_classes import ConflictError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_qualified
from streamer.postgres.session_settings import INDEX_MEMORY_MB, memory_sql
from streamer.target.connection import TargetConnection, transaction
from streamer.util.failpoints import failpoint

# Autovacuum of a half-filled table is wasted work, and its lock delays the creation of indexes.
_AUTOVACUUM_SQL: Final = """
select pg_catalog.format('alter table %s reset (autovacuum_enabled)', $1::text) as make,
       pg_catalog.format('alter table %s set (autovacuum_enabled = false)', $1::text) as drop,
       null::text as comment, null::text as cluster
from pg_catalog.pg_class c
where c.oid = pg_catalog.to_regclass($1::text) and c.relkind = 'r'
  and pg_catalog.pg_has_role(c.relowner, 'usage')
  and not exists (select from pg_catalog.unnest(c.reloptions) o where o like 'autovacuum_enabled=%')
"""

_INDEXES_SQL: Final = """
select pg_catalog.pg_get_indexdef(x.oid) as make,
       pg_catalog.format('drop index %I.%I', n.nspname, x.relname) as drop,
       pg_catalog.format('comment on index %I.%I is %L', n.nspname, x.relname, d.description)
         as comment,
       case when i.indisclustered
            then pg_catalog.format('alter table %s cluster on %I', $1::text, x.relname) end
         as cluster
from pg_catalog.pg_index i
join pg_catalog.pg_class x on x.oid = i.indexrelid
join pg_catalog.pg_namespace n on n.oid = x.relnamespace
left join pg_catalog.pg_description d
       on d.objoid = x.oid and d.classoid = 'pg_catalog.pg_class'::regclass and d.objsubid = 0
where i.indrelid = pg_catalog.to_regclass($1::text)
  and not i.indisprimary and not i.indisreplident and i.indisvalid and x.reltablespace = 0
  and pg_catalog.pg_has_role(x.relowner, 'usage')
  and not exists (select from pg_catalog.pg_constraint c where c.conindid = x.oid)
  and not exists (select from pg_catalog.pg_attribute a
                   where a.attrelid = x.oid and a.attstattarget > 0)
  and (select relkind from pg_catalog.pg_class where oid = i.indrelid) = 'r'
order by x.oid
"""

_UNUSED_INDEXES_SQL: Final = _INDEXES_SQL.replace(
    "order by x.oid",
    """
  and not i.indisunique
  and not exists (select from pg_catalog.pg_attribute a
                   where a.attrelid = i.indrelid and a.attnum = i.indkey[0]
                     and a.attname = any ($2::text[]))
order by x.oid
""",
)

_PRIMARY_KEY_SQL: Final = """
select pg_catalog.format('alter table %s add constraint %I %s', $1::text, c.conname,
                         pg_catalog.pg_get_constraintdef(c.oid)) as make,
       pg_catalog.format('alter table %s drop constraint %I', $1::text, c.conname) as drop,
       pg_catalog.format('comment on constraint %I on %s is %L', c.conname, $1::text, d.description)
         as comment,
       case when i.indisclustered
            then pg_catalog.format('alter table %s cluster on %I', $1::text, x.relname) end
         as cluster
from pg_catalog.pg_constraint c
join pg_catalog.pg_index i on i.indexrelid = c.conindid
join pg_catalog.pg_class x on x.oid = i.indexrelid
left join pg_catalog.pg_description d
       on d.objoid = c.oid and d.classoid = 'pg_catalog.pg_constraint'::regclass
where c.conrelid = pg_catalog.to_regclass($1::text) and c.contype = 'p'
  and i.indisvalid and not i.indisreplident and x.reltablespace = 0 and x.reloptions is null
  and pg_catalog.pg_has_role(x.relowner, 'usage')
  and pg_catalog.obj_description(x.oid, 'pg_class') is null
  and not exists (select from pg_catalog.pg_constraint f where f.confrelid = c.conrelid)
  and not exists (select from pg_catalog.pg_depend p where p.refobjid = c.oid and p.deptype = 'n')
  and not exists (select from pg_catalog.pg_publication_rel p where p.prrelid = c.conrelid)
  and not exists (select from pg_catalog.pg_publication where puballtables)
  and not exists (select from pg_catalog.pg_inherits h where h.inhrelid = c.conrelid)
  and (select relkind from pg_catalog.pg_class where oid = c.conrelid) = 'r'
"""


async def _lock(connection: TargetConnection, target: RelationName) -> None:
    await connection.execute(
        "select pg_advisory_xact_lock(hashtextextended('streamer indexes ' || $1, 0))", str(target)
    )


async def defer_indexes(
    connection: TargetConnection, target: RelationName, *, key: Collection[str] | None = None
) -> int:
    """Drop the deferrable indexes of *target*, and store their definitions; return their number.

    *key*: the columns by which the stream finds rows, if the stream writes to the table during the
    copy.
    """
    quoted = quote_qualified(target.namespace, target.name)
    async with transaction(connection):
        await _lock(connection, target)
        if key is not None:
            put_off = await connection.fetch(_UNUSED_INDEXES_SQL, quoted, sorted(key))
        else:
            put_off = [
                row
                for sql in (_AUTOVACUUM_SQL, _PRIMARY_KEY_SQL, _INDEXES_SQL)
                for row in await connection.fetch(sql, quoted)
            ]
        for row in put_off:
            await connection.execute(
                "insert into streamer.deferred_index (target, definition) values ($1, $2)",
                str(target),
                ";\n".join(filter(None, (row["make"], row["comment"], row["cluster"]))),
            )
            await connection.execute(row["drop"])
    failpoint("sync.indexes_dropped")
    return len(put_off)


_IS_FILLED_SQL: Final = """
select exists (
    select from streamer.relation r
    where r.target = $1 and r.state = 'copying' and r.filling and r.id is distinct from $2
      and case when r.chunks is not null then $3 else
              not exists (select from streamer.sync_partition p where p.relation_id = r.id)
              or exists (select from streamer.sync_partition p
                          where p.relation_id = r.id and p.finished_at is null) end)
"""


_ENOUGH_MEMORY_SQL: Final = memory_sql("maintenance_work_mem", INDEX_MEMORY_MB, is_local=True)


async def restore_indexes(
    connection: TargetConnection,
    target: RelationName,
    ended_id: int | None = None,
    *,
    is_start: bool = False,
) -> int:
    """Restore the indexes of *target* unless a source still fills the table; return their number.

    *ended_id*: a relation whose copy has failed or written its last rows, so that it no longer
    fills the target. *is_start*: a copy in chunks counts as filling. Otherwise the stream of that
    copy could lack an index that a peer source has dropped. Raises TargetError if the server
    refuses an index; its definition stays stored.
    """
    count = 0
    while True:
        async with transaction(connection):
            await _lock(connection, target)
            if await connection.fetch_value(_IS_FILLED_SQL, str(target), ended_id, is_start):
                return count
            rows = await connection.fetch(
                "delete from streamer.deferred_index where id = (select min(id) from"
                " streamer.deferred_index where target = $1) returning id, definition",
                str(target),
            )
            if not rows:
                return count
            await connection.execute(_ENOUGH_MEMORY_SQL)
            try:
                await connection.execute(rows[0]["definition"])
            except ConflictError as exc:
                exc.remedy = _give_up(rows[0]["id"])
                raise
            count += 1
        failpoint("sync.index_restored")


def _give_up(index_id: int) -> Remedy:
    """Return the remedy for an index that the copied rows do not allow. Pure."""
    return Remedy.of(
        "remove the duplicates at the source; or, if only the target has that index, to continue "
        "without the index, run at the target: ",
        at_target(f"delete from streamer.deferred_index where id = {index_id}"),
    )


_HAS_KEY_SQL: Final = """
select exists (select from pg_catalog.pg_constraint
                where conrelid = pg_catalog.to_regclass($1) and contype = 'p')
    or exists (select from streamer.deferred_index
                where target = $2 and definition ~ ' PRIMARY KEY \\(')
"""


async def has_primary_key(connection: TargetConnection, target: RelationName) -> bool:
    """Return whether *target* has a primary key, or a deferred primary key."""
    quoted = quote_qualified(target.namespace, target.name)
    return bool(await connection.fetch_value(_HAS_KEY_SQL, quoted, str(target)))


_ABANDONED_SQL: Final = """
select distinct d.target from streamer.deferred_index d
where not exists (
    select from streamer.relation r where r.target = d.target and r.filling
      and (r.state = 'copying' or r.state = 'paused' and exists (
          select from streamer.sync_partition p
          where p.relation_id = r.id and p.attempt > 0 and p.finished_at is null)))
order by 1
"""


async def has_deferred(connection: Executor, target: str) -> bool:
    """Return whether *target* has deferred indexes."""
    return bool(
        await connection.fetch_value(
            "select exists (select from streamer.deferred_index where target = $1)", target
        )
    )


SUMMARY_SQL: Final = "select target, definition from streamer.deferred_index"


async def read_abandoned_targets(connection: TargetConnection) -> list[str]:
    """Return the targets with deferred indexes that no copy fills."""
    return [row["target"] for row in await connection.fetch(_ABANDONED_SQL)]


async def read_deferred_targets(connection: TargetConnection) -> list[str]:
    """Return the targets that have deferred indexes."""
    rows = await connection.fetch("select distinct target from streamer.deferred_index order by 1")
    return [row["target"] for row in rows]
