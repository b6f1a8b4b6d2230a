"""The use of types at the target, and former types that made room for new types with their names.

streamer gives a type that makes room a new name that ends with the type's OID, and drops the type
when no column uses it. The query ignores staging tables, because streamer creates new staging
tables for the current types of the target's columns.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_qualified
from streamer.schema.indexes_constraints_types import DefinedType, TypeUse
from streamer.target.connection import TargetConnection

# A type can be part of a second type, which has uses of its own.
_USES_SQL: Final = """
with recursive own (oid) as (
    select pg_catalog.to_regclass(pg_catalog.format('%I.%I', w.namespace, w.name))::oid
      from unnest($2::text[], $3::text[]) w (namespace, name)
), used (type, classid, objid, objsubid) as (
    select t.oid, d.classid, d.objid, d.objsubid
      from pg_catalog.pg_type t join pg_catalog.pg_depend d
        on d.refclassid = 'pg_catalog.pg_type'::regclass
       and d.refobjid in (t.oid, nullif(t.typarray, 0)) and d.deptype = 'n'
     where t.oid = any ($1::oid[])
), placed as (
    select u.*, c.relkind, c.relpersistence, coalesce(pg_catalog.pg_partition_root(c.oid), c.oid)
               as relation
      from used u left join pg_catalog.pg_class c on c.oid = case u.classid
          when 'pg_catalog.pg_class'::regclass then coalesce(
              (select i.indrelid from pg_catalog.pg_index i where i.indexrelid = u.objid), u.objid)
          when 'pg_catalog.pg_attrdef'::regclass then
              (select a.adrelid from pg_catalog.pg_attrdef a where a.oid = u.objid)
          when 'pg_catalog.pg_constraint'::regclass then
              (select k.conrelid from pg_catalog.pg_constraint k where k.oid = u.objid) end
)
select type::int8 as oid,
       coalesce(pg_catalog.array_agg(
           pg_catalog.pg_describe_object(classid, objid, objsubid) order by 1)
           filter (where relation not in (select oid from own where oid is not null)
                      and relkind <> 'c' and relpersistence <> 't'
                      or relation is null and classid <> 'pg_catalog.pg_type'::regclass), '{}')
           as "foreign"
  from placed group by type
"""

_FORMER_SQL: Final = """
select n.nspname as namespace, t.typname as name, array(
           select distinct pg_catalog.format('%I.%I', sn.nspname, s.relname)
             from pg_catalog.pg_depend d
             join pg_catalog.pg_class s on s.oid = d.objid
             join pg_catalog.pg_namespace sn on sn.oid = s.relnamespace
            where d.refclassid = 'pg_catalog.pg_type'::regclass
              and d.refobjid in (t.oid, nullif(t.typarray, 0)) and d.deptype = 'n') as stages
  from pg_catalog.pg_type t join pg_catalog.pg_namespace n on n.oid = t.typnamespace
 where t.typname like '%\\_former\\_' || t.oid
   and not exists (
       select from pg_catalog.pg_depend d
         left join pg_catalog.pg_class s on d.classid = 'pg_catalog.pg_class'::regclass
          and s.oid = d.objid and s.relpersistence = 't' and s.relname like 'streamer\\_stage\\_%'
          and pg_catalog.pg_get_userbyid(s.relowner) = current_user
        where d.refclassid = 'pg_catalog.pg_type'::regclass
          and d.refobjid in (t.oid, nullif(t.typarray, 0)) and d.deptype = 'n' and s.oid is null)
 order by t.typtype <> 'd', t.typtype <> 'c', t.oid desc
"""


async def read_uses(
    target: TargetConnection, types: Collection[DefinedType], own_tables: Sequence[RelationName]
) -> Mapping[int, TypeUse]:
    """Return the use of *types* of the target, by their OIDs. *own_tables*: see `TypeUse`."""
    rows = await target.fetch(
        _USES_SQL,
        [kind.oid for kind in types],
        [table.namespace for table in own_tables],
        [table.name for table in own_tables],
    )
    return {row["oid"]: TypeUse(is_used=True, foreign=tuple(row["foreign"])) for row in rows}


async def drop_former_types(target: TargetConnection) -> list[str]:
    """Drop the former types that no column uses; return the statements."""
    dropped: list[str] = []
    while rows := await target.fetch(_FORMER_SQL):
        for row in rows:
            for stage in row["stages"]:
                await target.execute(f"drop table if exists {stage}")
            statement = f"drop type {quote_qualified(row['namespace'], row['name'])}"
            await target.execute(statement)
            dropped.append(statement)
    return dropped
