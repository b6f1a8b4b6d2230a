"""Reads the facts about the target's relations on which applying changes depends."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.describing import PARTITIONS, objects_sql
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.postgres.quoting import quote_qualified
from streamer.schema.indexes_constraints_types import (
    object_of,
    primary_key_of,
    unique_keys_of,
)
from streamer.schema.partitions import Partition
from streamer.schema.target_relation import TargetColumn, TargetRelation

if TYPE_CHECKING:
    from streamer.target.connection import Record, TargetConnection


_FACTS_SQL: Final = """
pg_catalog.concat_ws(' ', c.relpersistence,
    exists (select from pg_catalog.pg_trigger t
             where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled in ('A', 'R')),
    exists (select from pg_catalog.pg_rewrite r
             where r.ev_class = c.oid and r.ev_enabled in ('A', 'R')),
    exists (select from pg_catalog.pg_constraint k
             where k.confrelid = c.oid and k.contype = 'f'
               and k.confdeltype in ('c', 'n', 'd')),
    array(select i.indexrelid from pg_catalog.pg_index i
           where i.indrelid = c.oid and i.indisunique and i.indimmediate and i.indisvalid
             and i.indpred is null and i.indexprs is null
           order by 1)::text)
"""
"""The facts about a table that ``streamer.require_facts`` compares, as text."""

_RELATION_SQL: Final = f"""
select w.namespace, w.name as relation, c.oid::int8 as oid,
       c.relkind = 'p' as is_partitioned,
       pg_catalog.pg_get_partkeydef(c.oid) as partition_key,
       exists (select from pg_catalog.pg_trigger t
                where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled in ('A', 'R'))
         or exists (select from pg_catalog.pg_rewrite r
                     where r.ev_class = c.oid and r.ev_enabled in ('A', 'R')) as has_row_triggers,
       exists (select from pg_catalog.pg_constraint k
                where k.confrelid = c.oid and k.contype = 'f') as is_referenced,
       exists (select from pg_catalog.pg_constraint k
                where k.confrelid = c.oid and k.contype = 'f'
                  and k.confdeltype in ('c', 'n', 'd')) as delete_acts,
       array(select distinct k.confrelid::int8 from pg_catalog.pg_constraint k
              where k.conrelid = c.oid and k.contype = 'f' and k.confrelid <> c.oid)
         as "references",
       array(select pg_catalog.format('%I.%I', m.nspname, s.relname)
               from pg_catalog.pg_depend d join pg_catalog.pg_class s on s.oid = d.objid
               join pg_catalog.pg_namespace m on m.oid = s.relnamespace
              where d.refobjid = c.oid and d.refobjsubid > 0 and d.deptype in ('a', 'i')
                and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
                and d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                and s.relkind = 'S' and pg_catalog.pg_has_role(s.relowner, 'usage')
              order by 1) as sequences,
       (select pg_catalog.json_object_agg(
                   a.attname, pg_catalog.format('%I.%I', m.nspname, s.relname))::text
          from pg_catalog.pg_attribute a
          join pg_catalog.pg_depend d on d.refobjid = a.attrelid and d.refobjsubid = a.attnum
           and d.deptype = 'i' and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
           and d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
          join pg_catalog.pg_sequence q on q.seqrelid = d.objid
          join pg_catalog.pg_class s on s.oid = d.objid
          join pg_catalog.pg_namespace m on m.oid = s.relnamespace
         where a.attrelid = c.oid and a.attidentity <> ''
           and a.atttypid = 'int8'::pg_catalog.regtype
           and q.seqincrement = 1 and not q.seqcycle
           and pg_catalog.has_sequence_privilege(s.oid, 'usage')) as numbering,
       array(select array[m.nspname::text, u.relname::text]
               from pg_catalog.pg_class u join pg_catalog.pg_namespace m on m.oid = u.relnamespace
              where u.relpersistence = 'u' and u.relkind = 'r'
                and (u.oid = c.oid or c.relkind = 'p' and u.oid in
                     (select p.relid from pg_catalog.pg_partition_tree(c.oid) p))
              order by 1) as unlogged,
       pg_catalog.has_table_privilege(c.oid, 'select')
         and pg_catalog.has_table_privilege(c.oid, 'insert')
         and pg_catalog.has_table_privilege(c.oid, 'update')
         and pg_catalog.has_table_privilege(c.oid, 'delete') as is_writable,
       ({objects_sql(with_texts=False)})::text as objects, {_FACTS_SQL} as facts
from unnest($1::text[], $2::text[]) as w (namespace, name)
cross join {NAMED_RELATION} c
where c.relkind in ('r', 'p')
"""

_COLUMNS_SQL: Final = """
with recursive base (attrelid, attnum, type_oid, modifier) as (
    select a.attrelid, a.attnum, a.atttypid, a.atttypmod
      from pg_catalog.unnest($1::int8[]) as wanted (oid)
      join pg_catalog.pg_attribute a on a.attrelid = wanted.oid::oid
     where a.attnum > 0 and not a.attisdropped
    union all
    select b.attrelid, b.attnum, t.typbasetype,
           case when t.typtypmod >= 0 then t.typtypmod else b.modifier end
      from base b join pg_catalog.pg_type t on t.oid = b.type_oid where t.typtype = 'd')
select a.attrelid::int8 as relid, a.attnum as number, a.attname as name,
       pg_catalog.format_type(a.atttypid, a.atttypmod) as type,
       pg_catalog.format_type(b.type_oid, b.modifier) as base_type,
       coalesce((select pg_catalog.format('operator(%I.%s)', n.nspname, o.oprname)
          from pg_catalog.pg_opclass c
          join pg_catalog.pg_amop m on m.amopfamily = c.opcfamily and m.amopstrategy = 3
            and m.amoplefttype = c.opcintype and m.amoprighttype = c.opcintype
          join pg_catalog.pg_operator o on o.oid = m.amopopr
          join pg_catalog.pg_namespace n on n.oid = o.oprnamespace
         where c.opcintype = b.type_oid and c.opcdefault
           and c.opcmethod = (select oid from pg_catalog.pg_am where amname = 'btree')), '=')
         as equality,
       a.atttypid::int8 as type_oid, b.type_oid::int8 as base_oid,
       pg_catalog.format_type(b.type_oid, -1) as plain_type,
       pg_catalog.concat_ws(' ', a.atttypid, a.atttypmod, a.attcollation) as type_facts,
       a.attnotnull as not_null,
       a.atthasdef or a.attidentity <> '' as has_default,
       a.attgenerated <> '' as generated, a.attidentity = 'a' as identity_always,
       coalesce((select pg_catalog.format('%I.%I', n.nspname, l.collname)
          from pg_catalog.pg_collation l join pg_catalog.pg_namespace n on n.oid = l.collnamespace
         where l.oid = a.attcollation and not l.collisdeterministic), '') as collation
from base b join pg_catalog.pg_attribute a on a.attrelid = b.attrelid and a.attnum = b.attnum
join pg_catalog.pg_type t on t.oid = b.type_oid
where t.typtype <> 'd'
order by a.attrelid, a.attnum
"""


async def read_kind(connection: "TargetConnection", name: RelationName) -> str | None:
    """Return the relkind of an object that is not a table; None if there is no such object."""
    quoted = quote_qualified(name.namespace, name.name)
    kind = await connection.fetch_value(
        "select relkind::text from pg_catalog.pg_class where oid = pg_catalog.to_regclass($1)"
        " and relkind not in ('r', 'p')",
        quoted,
    )
    return None if kind is None else str(kind)


async def read_relation(
    connection: "TargetConnection", name: RelationName
) -> TargetRelation | None:
    """Read the definition of *name*; None if there is no such table."""
    return (await read_relations(connection, [name])).get(name)


async def read_relations(
    connection: "TargetConnection", names: Sequence[RelationName]
) -> dict[RelationName, TargetRelation]:
    """Read the definitions of existing tables among *names*, where names may occur twice."""
    names = list(dict.fromkeys(names))
    if not names:
        return {}
    rows = await connection.fetch(
        _RELATION_SQL, [name.namespace for name in names], [name.name for name in names]
    )
    if not rows:
        return {}
    oids = [row["oid"] for row in rows]
    columns = _by_relation(await connection.fetch(_COLUMNS_SQL, oids))
    relations = (_relation(dict(row), columns[row["oid"]]) for row in rows)
    return {relation.name: relation for relation in relations}


def _by_relation(rows: "Iterable[Record]") -> dict[int, list[dict[str, Any]]]:
    """Group rows by ``relid``, and remove that field."""
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        fields = dict(row)
        groups[fields.pop("relid")].append(fields)
    return groups


def _relation(row: dict[str, Any], columns: list[dict[str, Any]]) -> TargetRelation:
    names = {column.pop("number"): column["name"] for column in columns}
    objects = tuple(
        object_of(description, names) for description in json.loads(row.pop("objects") or "[]")
    )
    key = primary_key_of(objects)
    indexes = [item.index for item in objects if item.index and item.index.finds_rows]
    return TargetRelation(
        name=RelationName(row.pop("namespace"), row.pop("relation")),
        columns={column["name"]: TargetColumn(**column) for column in columns},
        primary_key=key.columns if key is not None and key.index in indexes else (),
        unique_keys=unique_keys_of(objects),
        leading_index_columns=frozenset(name for i in indexes if (name := i.columns[0])),
        objects=objects,
        references=frozenset(row.pop("references")),
        sequences=tuple(row.pop("sequences")),
        numbering=json.loads(row.pop("numbering") or "{}"),
        unlogged=tuple(RelationName(*name) for name in row.pop("unlogged")),
        **row,
    )


Unlogged = Mapping[RelationName, tuple[RelationName, ...]]
"""Tables whose rows a crash of the server removes, by the name of the root table."""

_UNLOGGED_SQL: Final = """
select n.nspname as namespace, c.relname as relation,
       pg_catalog.array_agg(array[m.nspname::text, u.relname::text] order by u.oid) as unlogged
from pg_catalog.pg_class u join pg_catalog.pg_namespace m on m.oid = u.relnamespace
join pg_catalog.pg_class c on c.oid = coalesce(pg_catalog.pg_partition_root(u.oid), u.oid)
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where u.relpersistence = 'u' and u.relkind = 'r'
group by n.nspname, c.relname
"""


async def read_unlogged(connection: "TargetConnection") -> Unlogged:
    """Return the unlogged tables and partitions of the database."""
    return {
        RelationName(row["namespace"], row["relation"]): tuple(
            RelationName(*name) for name in row["unlogged"]
        )
        for row in await connection.fetch(_UNLOGGED_SQL)
    }


_PARTITIONS_SQL: Final = (
    f"select ({PARTITIONS})::text from pg_catalog.pg_class c where c.oid = $1::int8::oid"
)


_COLLATIONS_SQL: Final = """
select a.attname as name, pg_catalog.format(' collate %I.%I', n.nspname, c.collname) as clause
from pg_catalog.pg_attribute a join pg_catalog.pg_collation c on c.oid = a.attcollation
join pg_catalog.pg_namespace n on n.oid = c.collnamespace
where a.attrelid = $1::int8::oid and a.attname = any ($2::text[])
"""


async def read_partitions(
    connection: "TargetConnection", relation: TargetRelation
) -> tuple[Partition, ...]:
    """Return a partitioned table and its partitions, parents first; empty for a plain table."""
    if not relation.is_partitioned:
        return ()
    stored = await connection.fetch_value(_PARTITIONS_SQL, relation.oid)
    return tuple(Partition(**item) for item in json.loads(stored or "[]"))


async def read_collations(
    connection: "TargetConnection", relation: TargetRelation, columns: Sequence[str]
) -> dict[str, str]:
    """Return the clause COLLATE of each of *columns* whose type has collations."""
    rows = await connection.fetch(_COLLATIONS_SQL, relation.oid, columns)
    return {row["name"]: row["clause"] for row in rows}


async def holds_rows(connection: "TargetConnection", name: RelationName, sid: str | None) -> bool:
    """Whether a table has a row; with *sid*, whether the table has a row of that sid."""
    quoted = quote_qualified(name.namespace, name.name)
    if sid is None:
        return bool(await connection.fetch_value(f"select exists (select from {quoted})"))
    return bool(
        await connection.fetch_value(
            f'select exists (select from {quoted} where "sid"::text = $1)', sid
        )
    )
