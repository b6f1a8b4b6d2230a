"""SQL that describes the tables of a command at a source, inside the session of the application.

This transaction wrote a catalog row if the row is visible and its ``xmin`` is in progress. This
test works even with an old snapshot and with concurrent transactions. Pure.
"""

from typing import Final

from streamer.postgres.describing import (
    COLLATION,
    PARTITIONS,
    SEQUENCE,
    USED_TYPES,
    USER_OIDS_BEGIN,
    objects_sql,
)

_PROOFS_MIN: Final = 18_00_00


def _own(xmin: str) -> str:
    """Return the condition that this transaction wrote a visible row; true without `first_xid`.

    The range excludes xids from before a wraparound, which txid_status refuses.
    """
    age = f"pg_catalog.age({xmin})"
    return (
        f"case when first_xid is null then true when {age} between pg_catalog.age(last_xid)"
        f" and pg_catalog.age(first_xid) then pg_catalog.txid_status(top_txid"
        f" + pg_catalog.age(first_xid) - {age}) = 'in progress' else false end"
    )


# Only columns that this transaction wrote get the text of a default. Deparsing a default locks the
# table, and this session already holds a lock on the table of each row that it wrote.
_STATE_SQL: Final = """
create or replace function {schema}.state(
    of_table oid, first_xid xid, last_xid xid, top_txid int8, is_rewritten bool, words text,
    of_part oid, of_command oid[], is_renamed bool) returns jsonb
language plpgsql stable as $function$
#variable_conflict use_variable
declare
    result jsonb;
    kind "char";
    columns jsonb;
    objects jsonb;
    types jsonb := '[]';
    partitions jsonb := '[]';
    has_types bool;
    own_columns int8[];
    own_objects int8[];
    own_types int8[];
    has_objects bool := is_renamed;
    unproven int8[] := '{{}}';
    own_proofs int8[] := '{{}}';
begin
    select pg_catalog.jsonb_build_object(
               'oid', c.oid::int8, 'namespace', n.nspname, 'name', c.relname), c.relkind
      into result, kind
      from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.oid = of_table and c.relkind in ('r', 'p') and c.relpersistence = 'p'
       and not c.relispartition and not pg_catalog.starts_with(n.nspname, 'pg_')
       and n.nspname <> 'information_schema';
    if result is null then
        return null;
    end if;
    {proofs}
    select coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
               'number', a.attnum, 'name', a.attname,
               'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
               'not_null', a.attnotnull and a.attnum <> all (unproven),
               'default', case when a.is_own then
                   pg_catalog.pg_get_expr(a.adbin, a.attrelid) end,
               'default_mark', pg_catalog.hashtextextended(a.adbin::text, 0)::text,
               'generated', a.attgenerated, 'identity', a.attidentity,
               'sequence', a.sequence,
               'collation', a.collation,
               'of_domain', a.is_own and a.has_default,
               'computed', is_rewritten and a.is_written and a.xid = a.newest_xid and (
                   words is null or case when a.attname ~ '^[a-z_][a-z0-9_$]*$'
                       then words ~ ('\\y' || pg_catalog.replace(a.attname, '$', '\\$') || '\\y')
                       else pg_catalog.strpos(words, pg_catalog.lower(
                           pg_catalog.replace(a.attname, '"', '""'))) > 0 end),
               'fill', case when a.is_own and a.atthasmissing
                   then (a.attmissingval::text::text[])[1] end)), '[]'),
           pg_catalog.array_agg(a.attnum::int8) filter (where a.is_own),
           pg_catalog.bool_or(a.atttypid >= {user_oids})
      into columns, own_columns, has_types
      from (select o.*, pg_catalog.first_value(o.xid) over (
                       order by o.is_written desc, o.command desc) as newest_xid,
                   o.is_written or coalesce(
                       (o.sequence ->> 'oid')::oid = any (of_command), false) as is_own
              from (select a.*, {collation} as collation, d.adbin, a.xmin::text as xid,
                           t.typdefaultbin is not null as has_default,
                           a.cmin::text::int8 as command,
                           ({sequence}) as sequence,
                           {own_a} or d.oid is not null and {own_d}
                               or a.attnum = any (own_proofs) as is_written
                      from pg_catalog.pg_attribute a
                      join pg_catalog.pg_type t on t.oid = a.atttypid
                      left join pg_catalog.pg_attrdef d
                        on d.adrelid = a.attrelid and d.adnum = a.attnum
                     where a.attrelid = of_table and a.attnum > 0 and not a.attisdropped) o) a
     cross join (select of_table as oid) c;
    if has_types then
        select ({types}) into types from (select of_table as oid) c;
    end if;
    if first_xid is null then
        if kind = 'p' then
            select ({partitions}) into partitions from (select of_table as oid, kind as relkind) c;
        end if;
        has_objects := true;
    else
        select pg_catalog.array_agg(o.oid), is_renamed or pg_catalog.count(*) > 0
          into own_objects, has_objects
          from (
            select i.indexrelid::int8 as oid
              from pg_catalog.pg_index i
             where i.indrelid = of_table and (i.indexrelid = any (of_command) or {own_i})
            union all
            select k.oid::int8 from pg_catalog.pg_constraint k
             where k.conrelid = of_table and (k.oid = any (of_command) or {own_k})) o;
        if types <> '[]' then
            select pg_catalog.array_agg(t.oid::int8) into own_types
              from pg_catalog.jsonb_array_elements(types) j
              join pg_catalog.pg_type t on t.oid = (j ->> 'oid')::oid
             where {own_t}
                or exists (select from pg_catalog.pg_enum e where e.enumtypid = t.oid and {own_e})
                or exists (select from pg_catalog.pg_constraint k
                            where k.contypid = t.oid and {own_k})
                or t.typtype = 'c' and exists (
                    select from pg_catalog.pg_attribute a
                     where a.attrelid = t.typrelid and {own_a})
                or t.oid = any (of_command);
        end if;
        if of_part is not null then
            with recursive tree (oid, parent, depth) as (
                select i.inhrelid, i.inhparent, 0 from pg_catalog.pg_inherits i
                 where i.inhrelid = of_part
                union all
                select i.inhrelid, t.oid, t.depth + 1
                  from tree t join pg_catalog.pg_inherits i on i.inhparent = t.oid
                 where not coalesce(
                     (pg_catalog.to_jsonb(i) ->> 'inhdetachpending')::bool, false)
            )
            select coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
                       'oid', p.oid::int8,
                       'parent', case t.parent when of_table then 0 else t.parent::int8 end,
                       'namespace', pn.nspname, 'name', p.relname,
                       'bound', pg_catalog.pg_get_expr(p.relpartbound, 0),
                       'key', case when p.relkind = 'p'
                                   then pg_catalog.pg_get_partkeydef(p.oid) end)
                       order by t.depth, p.oid), '[]')
              into partitions
              from tree t
             cross join lateral (select c.* from pg_catalog.pg_class c
                                  where c.oid = t.oid and c.relispartition offset 0) p
              join pg_catalog.pg_namespace pn on pn.oid = p.relnamespace;
        end if;
        result := result || pg_catalog.jsonb_build_object('own', pg_catalog.jsonb_build_object(
            'columns', coalesce(own_columns, '{{}}'), 'objects', coalesce(own_objects, '{{}}'),
            'types', coalesce(own_types, '{{}}'),
            'is_fresh', pg_catalog.current_setting('transaction_isolation') = 'read committed'));
    end if;
    if has_objects then
        select ({with_texts}) into objects from (select of_table as oid) c;
    else
        select ({without_texts}) into objects from (select of_table as oid) c;
    end if;
    return result || pg_catalog.jsonb_build_object(
        'columns', columns, 'objects', coalesce(objects, '[]'), 'types', coalesce(types, '[]'),
        'partitions', partitions);
end
$function$
"""

# From PostgreSQL 18 on, NOT NULL is a constraint, which may be invalid.
_PROOFS_SQL: Final = """
    select coalesce(
               pg_catalog.array_agg(k.conkey[1]::int8) filter (where not k.convalidated), '{{}}'),
           coalesce(pg_catalog.array_agg(k.conkey[1]::int8) filter (where {own_k}), '{{}}')
      into unproven, own_proofs
      from pg_catalog.pg_constraint k where k.conrelid = of_table and k.contype = 'n';
"""

_DESCRIBE_SQL: Final = """
create or replace function {schema}.describe(
    relation oid, tag text, query text, known jsonb default null) returns text
language sql stable {path} as $function$
select '0 ' || (select t.token from {schema}.{secret} t) || ' ' || pg_catalog.jsonb_build_object(
           'tag', tag, 'query', query, 'known', known, 'relation', s.state)::text
  from {schema}.state(relation, null, null, null, false, null, null, null, true) s (state)
 where s.state is not null
$function$
"""


# The text of the command and of the functions that ran the command; null if the text may lack a
# column of the command. A name may be written with escapes, and the context may be in any
# language. The context names functions of language SQL without their text. A function that the
# transaction replaced may still be running.
_WORDS_SQL: Final = r"""
(select case when pg_catalog.length(query) <= {query_max} and t.words ~ '\yalter\y'
                  and t.words !~ 'u&"'
                  and pg_catalog.current_setting('lc_messages') ~* '^(c|posix|en_|$)'
             then t.words end
   from (select pg_catalog.lower(query || context || coalesce(
                    pg_catalog.string_agg(b.text, ' '), '')) as words,
                pg_catalog.count(*) = pg_catalog.count(b.text) as has_all
           from pg_catalog.regexp_matches(
                    context, '(?:^|\n)SQL function (?:"([^\n]*)" statement)?', 'g') m (names)
           left join lateral (
               select pg_catalog.string_agg(p.prosrc, ' ') as text
                 from pg_catalog.pg_proc p
                 join pg_catalog.pg_language l on l.oid = p.prolang and l.lanname = 'sql'
                where p.proname = m.names[1]
               having not pg_catalog.bool_or({own})) b on true) t
  where t.has_all)
"""

_MESSAGES_SQL: Final = """
create or replace function {schema}.messages(
    command_oid oid, altered oid, of_command oid[], is_renamed bool, tg_tag text, query text,
    context text, first_xid xid, last_xid xid, top_txid int8, token text, rewritten oid[])
    returns bytea[] language plpgsql stable {pins} as $function$
#variable_conflict use_variable
declare
    of_part oid;
    detached oid;
    member oid;
    members oid[] := array[command_oid];
    relation jsonb;
    words text;
    is_rewritten bool := false;
    is_partitioned bool;
    has_children bool;
    contents bytea[] := '{{}}';
begin
    if rewritten is not null then
        words := {words};
    end if;
    if altered <> command_oid then
        of_part := altered;
    end if;
    select pg_catalog.bool_or(c.oid = altered and c.relkind = 'p'),
           pg_catalog.bool_or(c.oid = command_oid and c.relkind = 'r' and c.relhassubclass)
      into is_partitioned, has_children
      from pg_catalog.pg_class c where c.oid in (altered, command_oid);
    if is_partitioned and tg_tag = 'ALTER TABLE' then
        select i.inhrelid into of_part from pg_catalog.pg_inherits i
         where i.inhparent = altered and {own_inherits}
         order by i.cmin::text::int8 desc limit 1;
        select c.oid into detached from pg_catalog.pg_class c
         where c.relkind in ('r', 'p') and not c.relispartition and {own_class}
         order by c.cmin::text::int8 desc limit 1;
    end if;
    if has_children then
        members := array(
            with recursive tree (oid, has_children) as (
                select command_oid, true
                union
                select c.oid, c.relhassubclass
                  from tree t join pg_catalog.pg_inherits i on i.inhparent = t.oid
                  join pg_catalog.pg_class c on c.oid = i.inhrelid
                 where t.has_children
            )
            select t.oid from tree t
             where t.oid = command_oid
                or exists (select from pg_catalog.pg_attribute a
                            where a.attrelid = t.oid and {own_attribute})
                or exists (select from pg_catalog.pg_constraint k
                            where k.conrelid = t.oid and {own_constraint}));
    end if;
    foreach member in array members loop
        begin
            if rewritten is not null then
                is_rewritten := coalesce(words ~ '\\yusing\\y', true) and exists (
                    select from pg_catalog.unnest(rewritten) r (oid)
                     where coalesce(pg_catalog.pg_partition_root(r.oid), r.oid) = member);
            end if;
            relation := {schema}.state(
                member, first_xid, last_xid, top_txid, is_rewritten, words, of_part, of_command,
                is_renamed);
            relation := coalesce(relation, pg_catalog.jsonb_build_object('oid', member::int8));
            contents := pg_catalog.array_append(contents, pg_catalog.convert_to(
                last_xid || ' ' || token || ' ' || pg_catalog.jsonb_build_object(
                    'tag', tg_tag, 'query', {ran}, 'relation', relation,
                    'dropped', pg_catalog.jsonb_build_object(
                        'partitions', pg_catalog.jsonb_build_array(detached::int8)))::text,
                'UTF8'));
        exception when others then
            raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
        end;
    end loop;
    return contents;
end
$function$
"""


def state_function(schema: str, version: int) -> str:
    """Return the function that describes a table as JSON."""
    proofs = _PROOFS_SQL.format(own_k=_own("k.xmin")) if version >= _PROOFS_MIN else ""
    return _STATE_SQL.format(
        schema=schema,
        proofs=proofs.strip(),
        collation=COLLATION,
        user_oids=USER_OIDS_BEGIN,
        sequence=SEQUENCE,
        types=USED_TYPES,
        partitions=PARTITIONS,
        with_texts=objects_sql(with_texts=True),
        without_texts=objects_sql(with_texts=False),
        **{f"own_{alias}": _own(f"{alias}.xmin") for alias in "adiket"},
    ).strip()


def describe_function(schema: str, secret: str, path: str) -> str:
    """Return the function that describes a table for streamer's own session."""
    return _DESCRIBE_SQL.format(schema=schema, secret=secret, path=path).strip()


def messages_function(schema: str, pins: str, ran: str, query_max: int) -> str:
    """Return the function that describes a table and its children after a command."""
    return _MESSAGES_SQL.format(
        schema=schema,
        ran=ran,
        words=_WORDS_SQL.format(query_max=query_max, own=_own("p.xmin")).strip(),
        pins=pins,
        own_inherits=_own("i.xmin"),
        own_class=_own("c.xmin"),
        own_attribute=_own("a.xmin"),
        own_constraint=_own("k.xmin"),
    ).strip()
