"""Reads the replica identities of tables and leaf partitions, which a source's guard compares.

The query reads only catalogs, and calls no function that opens a table. So a lock on a user's table
cannot delay the query.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.describing import NOT_NULL
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.source.connection import Connection, fetch_all
from streamer.source.replica_identity import KeyCandidates, RelationIdentity, TableIdentity

IDENTITIES_SQL: Final = f"""
with recursive wanted as (
    select c.oid, c.relkind
    from unnest(%s::text[], %s::text[]) w (namespace, name)
    cross join {NAMED_RELATION} c
    where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence in ('p', 'u')
), tree as (
    select c.oid as root, c.oid as relid, c.relkind, c.xmin::text || ',' as joins
    from wanted w join pg_catalog.pg_class c on c.oid = w.oid
    union all
    select t.root, i.inhrelid, c.relkind, t.joins || i.xmin::text || ','
    from tree t
    join pg_catalog.pg_inherits i on i.inhparent = t.relid
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where t.relkind = 'p'
)
select t.root::int8 as root, t.relid::int8 as relid, n.nspname as namespace, c.relname as name,
       c.relkind = 'p' as is_partitioned, c.relkind = 'f' as is_foreign,
       c.relpersistence = 'u' as is_unlogged,
       c.relreplident::text as kind, coalesce(k.names, '{{}}') as key,
       coalesce(k.has_generated, false) as has_generated_key,
       current_setting('server_version_num')::int4 >= 180000
         and exists (select from pg_catalog.pg_attribute a
                      where a.attrelid = c.oid and a.attnum > 0 and a.attgenerated <> ''
                        and not a.attisdropped) as refuses_full,
       exists (select from pg_catalog.pg_index i
                where i.indrelid = c.oid and i.indisprimary and not i.indimmediate)
         as has_deferrable_primary_key,
       case when k.names is null and c.relreplident <> 'f' then
         array(select i.indexrelid::int8 from pg_catalog.pg_index i
                where i.indrelid = c.oid and i.indisunique and i.indimmediate and i.indisvalid
                order by 1) end as unique_indexes,
       case when t.relid = t.root then
         (select pg_catalog.json_object_agg(a.attname, a.attnum order by a.attnum)
            from pg_catalog.pg_attribute a
           where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) end as columns,
       case when t.relid = t.root then
         array(select a.attname::text from pg_catalog.pg_attribute a
                where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                  and a.attgenerated <> '') end as generated,
       t.joins, c.reltoastrelid::int8 as toast, c.relfilenode::int8 as file
from tree t
join pg_catalog.pg_class c on c.oid = t.relid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
left join lateral (
    select pg_catalog.array_agg(a.attname::text order by p.position) as names,
           pg_catalog.bool_or(a.attgenerated <> '') as has_generated
      from pg_catalog.pg_index i,
           pg_catalog.unnest(i.indkey::int2[]) with ordinality as p (attnum, position),
           pg_catalog.pg_attribute a
     where i.indrelid = c.oid and i.indisvalid and i.indimmediate
       and (c.relreplident = 'd' and i.indisprimary or c.relreplident = 'i' and i.indisreplident)
       and p.position <= i.indnkeyatts
       and a.attrelid = c.oid and a.attnum = p.attnum) k on true
where t.relid = t.root or c.relkind in ('r', 'f')
order by t.root, t.relid
"""
"""Only the digest of a guard uses ``unique_indexes``, because the remedy of a table without a key
depends on its unique indexes. ``joins`` has the transactions that attached a partition and its
ancestors. Before these is the last transaction that wrote the root's row of pg_class, as ATTACH and
DETACH do. Transactions and files of a table tell the digest's readers that a gap is possible.
"""
# A replica identity needs a unique, immediate and complete index over plain NOT NULL columns.
# streamer also excludes generated columns.
_CANDIDATES_SQL: Final = """
select i.indrelid::int8 as relid, x.relname as name, i.indisprimary as is_primary, k.columns
  from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid,
       lateral (
         select pg_catalog.array_agg(a.attname::text order by k.position) as columns,
                pg_catalog.bool_and({not_null} and a.attgenerated = '') as fit
           from pg_catalog.unnest(i.indkey::int2[]) with ordinality as k (attnum, position)
           join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
          where k.position <= i.indnkeyatts) k
 where i.indrelid = any (%s) and i.indisunique and i.indimmediate and i.indisvalid
   and i.indpred is null and i.indexprs is null and k.fit
 order by i.indnkeyatts, x.relname
""".replace("{not_null}", NOT_NULL)


async def read_present_oids(connection: Connection, oids: Iterable[int]) -> set[int]:
    """Return the *oids* of existing tables."""
    rows = await fetch_all(
        connection,
        "select oid::int8 as oid from pg_catalog.pg_class where oid = any (%s::oid[])",
        list(oids),
    )
    return {row["oid"] for row in rows}


async def read_candidates(
    connection: Connection, identities: Iterable[RelationIdentity]
) -> dict[int, KeyCandidates]:
    """Return the possible keys of the tables of *identities* and their leaves, by OID."""
    tables = [table.oid for i in identities for table in (i.root, *i.leaves)]
    if not tables:
        return {}
    indexes: dict[int, dict[str, list[str]]] = {oid: {} for oid in tables}
    primary_keys: dict[int, list[str]] = {}
    for row in await fetch_all(connection, _CANDIDATES_SQL, tables):
        indexes[row["relid"]][row["name"]] = row["columns"]
        if row["is_primary"]:
            primary_keys[row["relid"]] = row["columns"]
    return {oid: KeyCandidates(indexes[oid], primary_keys.get(oid)) for oid in tables}


async def read_identities(
    connection: Connection, names: Iterable[RelationName]
) -> dict[RelationName, RelationIdentity]:
    """Return the replica identities of the existing tables among *names*."""
    listed = list(names)
    if not listed:
        return {}
    rows = await fetch_all(
        connection,
        IDENTITIES_SQL,
        [name.namespace for name in listed],
        [name.name for name in listed],
    )
    roots: dict[int, dict[str, Any]] = {}
    leaves: dict[int, list[TableIdentity]] = defaultdict(list)
    foreign: dict[int, list[RelationName]] = defaultdict(list)
    for row in rows:
        root, is_root = row["root"], row["relid"] == row["root"]
        if is_root:
            roots[root] = row
        elif row["is_foreign"]:
            foreign[root].append(RelationName(row["namespace"], row["name"]))
        else:
            leaves[root].append(_table(row))
    identities = {}
    for oid, row in roots.items():
        identity = RelationIdentity(
            _table(row),
            tuple(leaves[oid]),
            row["is_partitioned"],
            row["columns"] or {},
            frozenset(row["generated"]),
            tuple(foreign[oid]),
        )
        identities[identity.name] = identity
    return identities


def _table(row: dict[str, Any]) -> TableIdentity:
    return TableIdentity(
        oid=row["relid"],
        name=RelationName(row["namespace"], row["name"]),
        kind=row["kind"],
        key=tuple(row["key"]),
        has_generated_key=row["has_generated_key"],
        refuses_full=row["refuses_full"],
        has_deferrable_primary_key=row["has_deferrable_primary_key"],
        is_unlogged=row["is_unlogged"],
    )
