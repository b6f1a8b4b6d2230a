"""Reads definitions of tables from the catalogs, on either side.

Both drivers run the same SQL: it has one parameter, the OIDs of tables, and returns JSON as text.
The queries take no lock on the tables. ``pg_get_expr`` and ``pg_get_constraintdef`` need an empty
search_path to write the schemas of names.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from streamer.definitions.model import (
    ColumnDefinition,
    ConstraintDefinition,
    IndexDefinition,
    IndexKey,
    SequenceDefinition,
    TableDefinition,
)
from streamer.mapping.rules import RelationName

Fetch = Callable[[str, Sequence[int]], Awaitable[list[dict[str, Any]]]]
"""Runs SQL with the placeholder ``{oids}`` filled in, and returns rows by column."""

_COLUMNS: Final = """
select pg_catalog.json_agg(pg_catalog.json_build_object(
    'name', a.attname,
    'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
    'not_null', a.attnotnull,
    'default', case when a.attgenerated = '' then pg_catalog.pg_get_expr(d.adbin, d.adrelid) end,
    'identity', a.attidentity,
    'generated', a.attgenerated,
    'statistics', case when a.attstattarget >= 0 then a.attstattarget end,
    'comment', pg_catalog.col_description(c.oid, a.attnum),
    'collation', case when a.attcollation <> t.typcollation then
        (select pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname)
           from pg_catalog.pg_collation co
           join pg_catalog.pg_namespace cn on cn.oid = co.collnamespace
          where co.oid = a.attcollation) end,
    'sequence', (
        select pg_catalog.json_build_object(
            'namespace', sn.nspname, 'name', sc.relname,
            'type', pg_catalog.format_type(s.seqtypid, null),
            'options', pg_catalog.format(
                'increment by %%s minvalue %%s maxvalue %%s start with %%s cache %%s%%s',
                s.seqincrement, s.seqmin, s.seqmax, s.seqstart, s.seqcache,
                case when s.seqcycle then ' cycle' else '' end))
          from pg_catalog.pg_depend p
          join pg_catalog.pg_class sc on sc.oid = p.objid and sc.relkind = 'S'
          join pg_catalog.pg_namespace sn on sn.oid = sc.relnamespace
          join pg_catalog.pg_sequence s on s.seqrelid = sc.oid
         where p.classid = 'pg_catalog.pg_class'::regclass
           and p.refclassid = 'pg_catalog.pg_class'::regclass
           and p.refobjid = c.oid and p.refobjsubid = a.attnum and p.deptype in ('a', 'i')
         order by p.objid limit 1)
    ) order by a.attnum)
from pg_catalog.pg_attribute a
join pg_catalog.pg_type t on t.oid = a.atttypid
left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
"""

# Key columns have a dependency, too, unless a constraint has it for them: `uses` may name columns
# that no expression has.
_INDEXES: Final = """
select pg_catalog.json_agg(pg_catalog.json_build_object(
    'name', x.relname, 'method', m.amname, 'is_unique', i.indisunique,
    'is_primary', i.indisprimary, 'is_valid', i.indisvalid and i.indisready,
    'nulls_not_distinct', coalesce(pg_catalog.to_json(i) ->> 'indnullsnotdistinct', 'false')::bool,
    'predicate', pg_catalog.pg_get_expr(i.indpred, i.indrelid),
    'options', coalesce(pg_catalog.to_json(x.reloptions), '[]'),
    'constraint', k.conname,
    'comment', pg_catalog.obj_description(x.oid, 'pg_class'),
    'uses', (select coalesce(pg_catalog.json_agg(distinct u.attname), '[]')
               from pg_catalog.pg_depend p
               join pg_catalog.pg_attribute u
                 on u.attrelid = c.oid and u.attnum = p.refobjsubid and u.attnum > 0
              where p.refclassid = 'pg_catalog.pg_class'::regclass and p.refobjid = c.oid
                and (p.classid, p.objid) in (('pg_catalog.pg_class'::regclass, x.oid),
                                             ('pg_catalog.pg_constraint'::regclass, k.oid))),
    'included', (select coalesce(pg_catalog.json_agg(a.attname order by n.position), '[]')
                   from pg_catalog.unnest(i.indkey::int2[])
                          with ordinality as n (attnum, position)
                   join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = n.attnum
                  where n.position > i.indnkeyatts),
    'keys', (
        select pg_catalog.json_agg(pg_catalog.json_build_object(
            'column', a.attname,
            'expression', case when n.attnum = 0 then
                pg_catalog.pg_get_indexdef(x.oid, n.position::int4, false) end,
            'collation', case when i.indcollation[n.position - 1]
                                   not in (0, coalesce(a.attcollation, xt.typcollation)) then
                (select pg_catalog.quote_ident(cn.nspname) || '.'
                          || pg_catalog.quote_ident(co.collname)
                   from pg_catalog.pg_collation co
                   join pg_catalog.pg_namespace cn on cn.oid = co.collnamespace
                  where co.oid = i.indcollation[n.position - 1]) end,
            'opclass', case when not o.opcdefault
                                 or pg_catalog.cardinality(xa.attoptions) > 0 then
                pg_catalog.quote_ident(ns.nspname) || '.' || pg_catalog.quote_ident(o.opcname) end,
            'opclass_options', coalesce(pg_catalog.to_json(xa.attoptions), '[]'),
            'descending', i.indoption[n.position - 1] & 1 = 1,
            'nulls_first', i.indoption[n.position - 1] & 2 = 2,
            'operator', case when k.contype = 'x' or k.conexclop is not null then
                (select pg_catalog.format('operator(%%I.%%s)', e.nspname, q.oprname)
                   from pg_catalog.pg_operator q
                   join pg_catalog.pg_namespace e on e.oid = q.oprnamespace
                  where q.oid = k.conexclop[n.position]) end,
            'statistics', case when xa.attstattarget >= 0 then xa.attstattarget end
            ) order by n.position)
          from pg_catalog.unnest(i.indkey::int2[]) with ordinality as n (attnum, position)
          join pg_catalog.pg_attribute xa on xa.attrelid = x.oid and xa.attnum = n.position
          join pg_catalog.pg_type xt on xt.oid = xa.atttypid
          left join pg_catalog.pg_attribute a
            on a.attrelid = c.oid and a.attnum = n.attnum and n.attnum <> 0
          join pg_catalog.pg_opclass o on o.oid = i.indclass[n.position - 1]
          join pg_catalog.pg_namespace ns on ns.oid = o.opcnamespace
         where n.position <= i.indnkeyatts)
    ) order by x.oid)
from pg_catalog.pg_index i
join pg_catalog.pg_class x on x.oid = i.indexrelid
join pg_catalog.pg_am m on m.oid = x.relam
left join pg_catalog.pg_constraint k
  on k.conindid = x.oid and k.conrelid = c.oid and k.contype in ('p', 'u', 'x')
where i.indrelid = c.oid
"""

_CONSTRAINTS: Final = """
select pg_catalog.json_agg(pg_catalog.json_build_object(
    'name', k.conname, 'kind', k.contype,
    'definition', pg_catalog.pg_get_constraintdef(k.oid),
    'columns', (select coalesce(pg_catalog.json_agg(a.attname order by n.position), '[]')
                  from pg_catalog.unnest(k.conkey) with ordinality as n (attnum, position)
                  join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = n.attnum),
    'expression', pg_catalog.pg_get_expr(k.conbin, k.conrelid),
    'index', case when k.contype in ('p', 'u', 'x') then
        (select x.relname from pg_catalog.pg_class x where x.oid = k.conindid) end,
    'deferrable', k.condeferrable, 'deferred', k.condeferred, 'validated', k.convalidated,
    'enforced', coalesce(pg_catalog.to_json(k) ->> 'conenforced', 'true')::bool,
    'period', coalesce(pg_catalog.to_json(k) ->> 'conperiod', 'false')::bool,
    'no_inherit', k.contype = 'c' and k.connoinherit,
    'referenced', (select pg_catalog.json_build_array(fn.nspname, f.relname)
                     from pg_catalog.pg_class f
                     join pg_catalog.pg_namespace fn on fn.oid = f.relnamespace
                    where f.oid = k.confrelid),
    'referenced_columns', (
        select coalesce(pg_catalog.json_agg(a.attname order by n.position), '[]')
          from pg_catalog.unnest(k.confkey) with ordinality as n (attnum, position)
          join pg_catalog.pg_attribute a on a.attrelid = k.confrelid and a.attnum = n.attnum),
    'match', k.confmatchtype, 'on_update', k.confupdtype, 'on_delete', k.confdeltype,
    'on_delete_columns', (
        select coalesce(pg_catalog.json_agg(a.attname), '[]')
          from pg_catalog.json_array_elements_text(
                 case pg_catalog.json_typeof(pg_catalog.to_json(k) -> 'confdelsetcols')
                 when 'array' then pg_catalog.to_json(k) -> 'confdelsetcols' else '[]' end) n
          join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = n.value::int2),
    'comment', pg_catalog.obj_description(k.oid, 'pg_constraint')
    ) order by k.oid)
from pg_catalog.pg_constraint k
where k.conrelid = c.oid and k.contype in ('c', 'p', 'u', 'x', 'f')
"""

_DEFINITIONS_SQL: Final = f"""
select c.oid::int8 as oid, n.nspname as namespace, c.relname as name,
       pg_catalog.obj_description(c.oid, 'pg_class') as comment,
       ({_COLUMNS})::text as columns, ({_INDEXES})::text as indexes,
       ({_CONSTRAINTS})::text as constraints
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any ({{oids}})
"""  # noqa: S608


def definitions_sql(placeholder: str) -> str:
    """Return the query; *placeholder* is the driver's own, for an array of OIDs."""
    sql = _DEFINITIONS_SQL.replace("{oids}", placeholder)
    return sql if placeholder.startswith("%") else sql.replace("%%", "%")


def definition_of(row: dict[str, Any]) -> TableDefinition:
    """Return the definition in a *row* of that query."""
    return TableDefinition(
        name=RelationName(row["namespace"], row["name"]),
        columns=tuple(map(_column, json.loads(row["columns"] or "[]"))),
        indexes=tuple(map(_index, json.loads(row["indexes"] or "[]"))),
        constraints=tuple(map(_constraint, json.loads(row["constraints"] or "[]"))),
        comment=row["comment"],
    )


def _column(fields: dict[str, Any]) -> ColumnDefinition:
    found = fields.pop("sequence")
    sequence = None
    if found is not None:
        name = RelationName(found["namespace"], found["name"])
        sequence = SequenceDefinition(name, found["type"], found["options"])
    return ColumnDefinition(**fields, sequence=sequence)


def _index(fields: dict[str, Any]) -> IndexDefinition:
    keys = tuple(
        IndexKey(**{**key, "opclass_options": tuple(key["opclass_options"])})
        for key in fields.pop("keys")
    )
    return IndexDefinition(
        keys=keys,
        included=tuple(fields.pop("included")),
        options=tuple(fields.pop("options")),
        uses=frozenset(fields.pop("uses")),
        **fields,
    )


def _constraint(fields: dict[str, Any]) -> ConstraintDefinition:
    referenced = fields.pop("referenced")
    return ConstraintDefinition(
        columns=tuple(fields.pop("columns")),
        referenced=RelationName(*referenced) if referenced else None,
        referenced_columns=tuple(fields.pop("referenced_columns")),
        on_delete_columns=tuple(fields.pop("on_delete_columns")),
        **fields,
    )
