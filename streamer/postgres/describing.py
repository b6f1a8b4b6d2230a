"""SQL that describes a table: scalar subqueries that return JSON, for a query over ``pg_class c``.

Both drivers run these queries on both sides, and the capture of definitions runs them at a source.
An empty search_path makes names include their schemas. `USED_TYPES`, `PARTITIONS` and objects
without texts call no deparsers over tables (``pg_get_expr``, ``pg_get_constraintdef``), which would
lock the table. Pure.
"""

from typing import Final

from streamer.postgres.named_relations import NAMED_TYPE


# In a new session, each subquery of a plan costs a third of a millisecond, and a function costs a
# tenth of a millisecond.
def _name(catalog: str, oid: str, field: str = "identity") -> str:
    """Return the SQL of an object's name, quoted and with its schema."""
    return f"(pg_catalog.pg_identify_object('pg_catalog.{catalog}'::regclass, {oid}, 0)).{field}"


def _table(oid: str) -> str:
    """Return the SQL of an array: the schema and the name of a relation."""
    return f"pg_catalog.parse_ident({oid}::regclass::text)"


COLLATION: Final = f"""
case when a.attcollation <> t.typcollation then {_name("pg_collation", "a.attcollation")} end
""".strip()
"""The collation of column a, if different from the collation of its type t."""

SEQUENCE_OPTIONS: Final = """
pg_catalog.format(
    'increment by %s minvalue %s maxvalue %s start with %s cache %s%s',
    s.seqincrement, s.seqmin, s.seqmax, s.seqstart, s.seqcache,
    case when s.seqcycle then ' cycle' else '' end)
"""
"""The options of CREATE SEQUENCE, of ``pg_sequence s``."""

# The sequence that default d of column a uses, or that the column owns.
SEQUENCE: Final = f"""
select pg_catalog.json_build_object(
    'oid', s.seqrelid::int8, 'namespace', ({_table("s.seqrelid")})[1],
    'name', ({_table("s.seqrelid")})[2],
    'type', pg_catalog.format_type(s.seqtypid, null), 'options', {SEQUENCE_OPTIONS},
    'is_owned', pg_catalog.bool_or(p.classid = 'pg_catalog.pg_class'::regclass))
  from pg_catalog.pg_depend p
  join pg_catalog.pg_sequence s on s.seqrelid in (p.objid, p.refobjid)
 where p.refclassid = 'pg_catalog.pg_class'::regclass and (
     p.classid = 'pg_catalog.pg_class'::regclass
         and p.refobjid = a.attrelid and p.refobjsubid = a.attnum
         and p.deptype = case a.attidentity when '' then 'a' else 'i' end
     or p.classid = 'pg_catalog.pg_attrdef'::regclass and p.objid = d.oid and p.deptype = 'n')
 group by s.seqrelid, s.seqtypid, s.seqstart, s.seqincrement, s.seqmax, s.seqmin, s.seqcache,
          s.seqcycle
 order by pg_catalog.bool_and(p.classid = 'pg_catalog.pg_class'::regclass), s.seqrelid limit 1
"""  # noqa: S608

NOT_NULL: Final = """
(a.attnotnull and not exists (
    select from pg_catalog.pg_constraint v
     where v.conrelid = a.attrelid and v.contype = 'n' and v.conkey[1] = a.attnum
       and not v.convalidated))
""".strip()
"""Whether column a has no nulls. A constraint that is not valid (PostgreSQL 18) is no proof,
because the column may have old nulls.
"""

COLUMN: Final = {
    "number": "a.attnum",
    "name": "a.attname",
    "type": "pg_catalog.format_type(a.atttypid, a.atttypmod)",
    "not_null": NOT_NULL,
    "identity": "a.attidentity",
    "generated": "a.attgenerated",
    "collation": COLLATION,
    "sequence": f"({SEQUENCE})",
}
"""The SQL of the facts about column a of `FROM_COLUMNS` that need no deparser."""
FROM_COLUMNS: Final = """
pg_catalog.pg_attribute a
join pg_catalog.pg_type t on t.oid = a.atttypid
left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
""".strip()
COLUMNS: Final = f"""
select pg_catalog.json_agg(pg_catalog.json_build_object(
    {", ".join(f"'{name}', {sql}" for name, sql in COLUMN.items())},
    'default', pg_catalog.pg_get_expr(d.adbin, d.adrelid),
    'statistics', case when a.attstattarget >= 0 then a.attstattarget end,
    'comment', pg_catalog.col_description(c.oid, a.attnum)
    ) order by a.attnum)
from {FROM_COLUMNS}
where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
"""  # noqa: S608

_DEFAULT_COLLATION: Final = 100
"""PostgreSQL's DEFAULT_COLLATION_OID. Expressions name any different collation."""

_WITHOUT_TYPES: Final = '^(?:(?:"[^"]*")+|[^".]+)[.][^(]+'
"""The schema and the name in the identity of an operator."""

# The result contains the numbers of columns. The mark of an index stays equal when ALTER TYPE
# rebuilds the index, so the mark omits default operator classes and the collations of columns.
_INDEX: Final = """
    'oid', i.indexrelid::int8, 'name', i.relname, 'is_unique', i.indisunique,
    'is_valid', i.indisvalid and i.indisready, 'is_immediate', i.indimmediate,
    'is_partial', i.indpred is not null, 'method', i.amname,
    'columns', (i.indkey::int2[])[0:i.indnkeyatts - 1],
    'mark', pg_catalog.md5(pg_catalog.concat_ws('|', i.relam, i.indisunique, i.indkey,
        i.indnkeyatts, i.indoption, i.indexprs, i.indpred,
        pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct',
        array(select case when p.opcdefault then 0 else p.oid end
                from pg_catalog.unnest(i.indclass::oid[]) with ordinality as n (oid, position)
                join pg_catalog.pg_opclass p on p.oid = n.oid order by n.position),
        array(select case when n.oid = a.attcollation then 0 else n.oid end
                from unnest(i.indcollation::oid[], i.indkey::int2[])
                       with ordinality as n (oid, attnum, position)
                left join pg_catalog.pg_attribute a
                  on a.attrelid = c.oid and a.attnum = n.attnum and n.attnum > 0
               order by n.position)))"""

_CONSTRAINT: Final = """
    'oid', k.oid::int8, 'kind', k.contype, 'name', k.conname, 'is_valid', k.convalidated,
    'columns', k.conkey, 'deferrable', k.condeferrable, 'deferred', k.condeferred,
    'mark', pg_catalog.md5(pg_catalog.concat_ws('|', k.contype, k.conkey, k.confrelid, k.confkey,
        k.confupdtype, k.confdeltype, k.confmatchtype, k.condeferrable, k.condeferred,
        k.conexclop, k.conbin, pg_catalog.to_jsonb(k) ->> 'confdelsetcols',
        pg_catalog.to_jsonb(k) ->> 'conenforced', pg_catalog.to_jsonb(k) ->> 'conperiod'))"""

# pg_depend also lists the key columns of an index, unless the index belongs to a constraint. So
# `uses` may list columns outside expressions.
_INDEX_TEXTS: Final = f"""
    'nulls_not_distinct', coalesce(pg_catalog.to_json(i) ->> 'indnullsnotdistinct', 'false')::bool,
    'predicate', pg_catalog.pg_get_expr(i.indpred, i.indrelid),
    'options', coalesce(pg_catalog.to_json(i.reloptions), '[]'),
    'comment', pg_catalog.obj_description(i.indexrelid, 'pg_class'),
    'uses', (select pg_catalog.json_agg(distinct p.refobjsubid) from pg_catalog.pg_depend p
              where p.refclassid = 'pg_catalog.pg_class'::regclass and p.refobjid = c.oid
                and p.refobjsubid > 0
                and (p.classid, p.objid) in (('pg_catalog.pg_class'::regclass, i.indexrelid),
                                             ('pg_catalog.pg_constraint'::regclass, k.oid))),
    'included', (i.indkey::int2[])[i.indnkeyatts:],
    'keys', (
        select pg_catalog.json_agg(pg_catalog.json_build_object(
            'column', n.attnum,
            'expression', case when n.attnum = 0 then
                pg_catalog.pg_get_indexdef(i.indexrelid, n.position::int4, false) end,
            'collation', case when i.indcollation[n.position - 1]
                                   not in (0, coalesce(a.attcollation, {_DEFAULT_COLLATION})) then
                {_name("pg_collation", "i.indcollation[n.position - 1]")} end,
            'opclass', case when not o.opcdefault
                                 or pg_catalog.cardinality(xa.attoptions) > 0 then
                {_name("pg_opclass", "o.oid", "schema")} || '.'
                || pg_catalog.quote_ident(o.opcname) end,
            'opclass_options', coalesce(pg_catalog.to_json(xa.attoptions), '[]'),
            'descending', i.indoption[n.position - 1] & 1 = 1,
            'nulls_first', i.indoption[n.position - 1] & 2 = 2,
            'operator', case when k.contype = 'x' or k.conexclop is not null then
                pg_catalog.format('operator(%s)', pg_catalog.substring(
                    {_name("pg_operator", "k.conexclop[n.position]")}, '{_WITHOUT_TYPES}')) end,
            'statistics', case when xa.attstattarget >= 0 then xa.attstattarget end
            ) order by n.position)
          from pg_catalog.unnest(i.indkey::int2[]) with ordinality as n (attnum, position)
          join pg_catalog.pg_attribute xa on xa.attrelid = i.indexrelid and xa.attnum = n.position
          left join pg_catalog.pg_attribute a
            on a.attrelid = c.oid and a.attnum = n.attnum and n.attnum <> 0
          join pg_catalog.pg_opclass o on o.oid = i.indclass[n.position - 1]
         where n.position <= i.indnkeyatts)"""  # noqa: S608

_CONSTRAINT_TEXTS: Final = """
    'definition', pg_catalog.pg_get_constraintdef(k.oid),
    'expression', pg_catalog.pg_get_expr(k.conbin, k.conrelid),
    'enforced', coalesce(pg_catalog.to_json(k) ->> 'conenforced', 'true')::bool,
    'period', coalesce(pg_catalog.to_json(k) ->> 'conperiod', 'false')::bool,
    'no_inherit', k.contype = 'c' and k.connoinherit,
    'referenced', case when k.confrelid <> 0 then
        pg_catalog.parse_ident(k.confrelid::regclass::text) end,
    'referenced_columns', array(
        select a.attname::text
          from pg_catalog.unnest(k.confkey) with ordinality as n (attnum, position)
          join pg_catalog.pg_attribute a on a.attrelid = k.confrelid and a.attnum = n.attnum
         order by n.position),
    'match', k.confmatchtype, 'on_update', k.confupdtype, 'on_delete', k.confdeltype,
    'on_delete_columns', pg_catalog.to_json(k) -> 'confdelsetcols',
    'comment', pg_catalog.obj_description(k.oid, 'pg_constraint')"""


def objects_sql(*, with_texts: bool) -> str:
    """Return the query for the indexes and constraints of a table, in the order of their creation.

    The index of a constraint is a part of the constraint. Only texts need deparsers.
    """
    index, constraint = (_INDEX_TEXTS, _CONSTRAINT_TEXTS) if with_texts else ("", "")
    return f"""
select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
    'index', case when i.indexrelid is not null then pg_catalog.jsonb_build_object(
{",".join(filter(None, (_INDEX, index)))}) end,
    'constraint', case when k.oid is not null then pg_catalog.jsonb_build_object(
{",".join(filter(None, (_CONSTRAINT, constraint)))}) end)
    order by coalesce(k.oid, i.indexrelid))
from (select i.*, x.relname, x.relam, x.reloptions, m.amname
        from pg_catalog.pg_index i join pg_catalog.pg_class x on x.oid = i.indexrelid
        join pg_catalog.pg_am m on m.oid = x.relam
       where i.indrelid = c.oid) i
full join (select k.*, case when k.contype in ('p', 'u', 'x') then k.conindid end as own_index
             from pg_catalog.pg_constraint k
            where k.conrelid = c.oid and k.contype in ('c', 'p', 'u', 'x', 'f')) k
  on k.own_index = i.indexrelid
where i.indexrelid is not null or k.conparentid = 0
"""  # noqa: S608


STATISTICS: Final = """
select pg_catalog.json_agg(pg_catalog.json_build_object(
    'name', s.stxname, 'definition', pg_catalog.pg_get_statisticsobjdef(s.oid),
    'target', (select t.value from (
        select nullif(pg_catalog.to_json(s) ->> 'stxstattarget', '-1')::int4 as value) t),
    'comment', pg_catalog.obj_description(s.oid, 'pg_statistic_ext')) order by s.oid)
from pg_catalog.pg_statistic_ext s where s.stxrelid = c.oid
"""
"""Extended statistics; PostgreSQL 13 and later have a statistics target."""

IS_ATTACHED: Final = "not coalesce((pg_catalog.to_jsonb(i) ->> 'inhdetachpending')::bool, false)"
"""Whether row *i* of pg_inherits is in force. DETACH PARTITION CONCURRENTLY ends the publication
through the root in a first transaction, and deletes the row in a second one.
"""

# A bound has no columns, so pg_get_expr opens and locks no table.
PARTITIONS: Final = f"""
with recursive tree (oid, parent, depth) as (
    select c.oid, 0::oid, 0 where c.relkind = 'p'
    union all
    select i.inhrelid, case t.depth when 0 then 0 else t.oid end, t.depth + 1
      from tree t join pg_catalog.pg_inherits i on i.inhparent = t.oid
      join pg_catalog.pg_partitioned_table k on k.partrelid = t.oid
     where {IS_ATTACHED}
)
select coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
    'oid', p.oid::int8, 'parent', t.parent::int8, 'namespace', pn.nspname, 'name', p.relname,
    'bound', pg_catalog.pg_get_expr(p.relpartbound, 0),
    'key', case when p.relkind = 'p' then pg_catalog.pg_get_partkeydef(p.oid) end)
    order by t.depth, p.oid), '[]')
  from tree t join pg_catalog.pg_class p on p.oid = t.oid
  join pg_catalog.pg_namespace pn on pn.oid = p.relnamespace
"""  # noqa: S608
"""A partitioned table and its partitions, parents first."""

USER_OIDS_BEGIN: Final = 16384
"""PostgreSQL's FirstNormalObjectId. Every server has the types with lower OIDs."""

_EXTENSION: Final = """(
    select e.extname from pg_catalog.pg_depend d
      join pg_catalog.pg_extension e on e.oid = d.refobjid
     where d.classid = 'pg_catalog.pg_type'::regclass and d.objid = t.oid and d.deptype = 'e'
       and d.refclassid = 'pg_catalog.pg_extension'::regclass)"""
"""The extension that created type t."""
_OWN_KINDS: Final = f"""
t.typtype in ('e', 'd', 'c', 'r') and (t.typtype <> 'c' or r.relkind = 'c')
   and {_EXTENSION} is null
""".strip()


# typdefault is a text that depends on the session that created the domain, so do not compare it.
def _types(
    selected: str, *, fields: str = "", more: str = "", but: str = "", kinds: str = _OWN_KINDS
) -> str:
    """Return the query for the types of *selected* and their parts.

    *fields*: further fields of each type. *more*: SQL for further parts of type t. *but*: a
    condition for the parts of type t. *kinds*: a condition for the types to return.
    """
    return f"""
with recursive used (oid, depth) as (
    {selected}
    union
    select part.oid, u.depth + 1
      from used u join pg_catalog.pg_type t on t.oid = u.oid
      cross join lateral (
          select t.typelem as oid where t.typtype = 'b' and t.typcategory = 'A'
          union all select t.typbasetype where t.typtype = 'd'
          union all select r.rngsubtype from pg_catalog.pg_range r where r.rngtypid = t.oid
          {more}union all select a.atttypid from pg_catalog.pg_attribute a
                     where t.typtype = 'c' and a.attrelid = t.typrelid and a.attnum > 0
                       and not a.attisdropped) part
     where part.oid >= 16384 {but}
)
select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
    'oid', t.oid::int8, 'namespace', n.nspname, 'name', t.typname, 'kind', t.typtype,{fields}
    'labels', (select pg_catalog.jsonb_agg(
                          pg_catalog.jsonb_build_array(e.oid::int8, e.enumlabel)
                          order by e.enumsortorder)
                 from pg_catalog.pg_enum e where e.enumtypid = t.oid),
    'base', case when t.typtype = 'd' then pg_catalog.format_type(t.typbasetype, t.typtypmod)
                 when t.typtype = 'r' then pg_catalog.format_type(g.rngsubtype, null) end,
    'operator_class', case when not o.opcdefault then
        {_name("pg_opclass", "o.oid", "schema")} || '.' || pg_catalog.quote_ident(o.opcname) end,
    'multirange', (select m.typname from pg_catalog.pg_type m
                    where m.oid = (pg_catalog.to_jsonb(g) ->> 'rngmultitypid')::oid),
    'not_null', t.typnotnull, 'default', pg_catalog.pg_get_expr(t.typdefaultbin, 0),
    'checks', (select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(k.oid::int8, k.conname,
                          pg_catalog.pg_get_constraintdef(k.oid)) order by k.oid)
                 from pg_catalog.pg_constraint k where k.contypid = t.oid and k.contype = 'c'),
    'attributes', (select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(a.attnum, a.attname,
                              pg_catalog.format_type(a.atttypid, a.atttypmod)) order by a.attnum)
                     from pg_catalog.pg_attribute a
                    where t.typtype = 'c' and a.attrelid = t.typrelid and a.attnum > 0
                      and not a.attisdropped)
    ) order by u.depth desc, t.oid)
  from (select oid, max(depth) as depth from used group by oid) u
  join pg_catalog.pg_type t on t.oid = u.oid
  join pg_catalog.pg_namespace n on n.oid = t.typnamespace
  left join pg_catalog.pg_class r on r.oid = t.typrelid
  left join pg_catalog.pg_range g on g.rngtypid = t.oid
  left join pg_catalog.pg_opclass o on o.oid = g.rngsubopc
 where {kinds}
"""  # noqa: S608


USED_TYPES: Final = _types(
    """select a.atttypid, 0 from pg_catalog.pg_attribute a
     where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.atttypid >= 16384"""
)
"""The types of a table's columns, and their parts."""

NAMED_TYPES_SQL: Final = _types(
    f"""select t.oid, 0 from unnest($1::text[], $2::text[]) w (namespace, name)
      cross join {NAMED_TYPE} t"""  # noqa: S608
)
"""A query for types by schema and name; both parameters are arrays."""

_NEEDED: Final = _types(
    "select w.oid, 0 from pg_catalog.unnest({oids}) w (oid) where w.oid >= 16384",
    fields=f" 'extension', {_EXTENSION},",
    more="""union all select r.rngtypid from pg_catalog.pg_range r
                     where t.typtype = 'm'
                       and pg_catalog.to_jsonb(r) ->> 'rngmultitypid' = t.oid::text
          """,
    but=f"and {_EXTENSION} is null",
    kinds="(t.typtype in ('e', 'd', 'c', 'r') or t.typtype = 'b' and t.typcategory <> 'A')",
)
TYPES_SQL: Final = f"select ({_NEEDED}) as types"
"""A query for types by the OIDs of ``{oids}``, including types of extensions."""
