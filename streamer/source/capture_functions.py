"""SQL that captures changes of definitions at a source: its functions and event triggers.

The functions run inside commands of the application, and so in its sessions. Three rules make that
safe. The functions pin all settings that change a text or a plan. They send facts with positive
evidence: catalog rows that this transaction wrote, and objects that PostgreSQL lists as dropped.
They do little: a command on a table that streamer does not publish costs one small message.

A catalog row is the transaction's own if its ``xmin`` is in progress and the row is visible. So
the snapshot of the transaction may be old, and transactions of other sessions may be open. Pure.
"""

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Final

from streamer.decode.pgoutput import DDL_PREFIX
from streamer.mapping.rules import SourceMapping, source_object_name
from streamer.postgres.describing import (
    CONSTRAINTS,
    INDEXES,
    MARKED_OBJECTS,
    PARTITIONS,
    SEQUENCE,
    USED_TYPES,
    USER_OIDS_BEGIN,
)
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.postgres.session import TEXT_FORMAT
from streamer.source.catalog import CAPTURE_MARK

MESSAGES_MIN: Final = 14_00_00
"""pgoutput sends logical messages from here on."""
MESSAGE_TABLE: Final = "message"
"""On older servers its inserts are published, and stand for the messages."""
SECRET: Final = "secret"
"""The materialized view with the token: no publication can publish one."""
PLACE: Final = "place"
"""An unlogged table, which no publication can publish, either."""
PATIENCE_MS: Final = 100
"""How long a command of the application waits at most for the lock of a table to describe."""
_QUERY_MAX: Final = 10_000
_REINDEX_MIN: Final = 17_00_00
_VIA_ROOT_MIN: Final = 13_00_00
_SCHEMAS_MIN: Final = 15_00_00

_PLANS: Final = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "max_parallel_workers_per_gather": "0",
    # A plan stays while catalogs grow, even within one transaction: it has to use their indexes.
    "enable_nestloop": "on",
    "enable_indexscan": "on",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "join_collapse_limit": "8",
    "from_collapse_limit": "8",
}
_OTHERS: Final = {"escape_string_warning": "off", "lock_timeout": f"{PATIENCE_MS}ms"}
# The client has an encoding of its own, and the functions convert messages. The server's language
# changes no text here.
_NOT_PINNED: Final = frozenset({"client_encoding", "lc_messages", "lc_time", "lc_numeric"})
PINNED: Final = {
    **{n: v for n, v in TEXT_FORMAT.items() if n not in (*_NOT_PINNED, "search_path")},
    **_PLANS,
    **_OTHERS,
}
"""Settings of the functions, in any session of the application."""

# With pg_temp at the end of the path, no type of the session's own goes before that of PostgreSQL.
# The check of such a domain would run as the function's owner.
_PATH: Final = "set search_path = pg_catalog, pg_temp"
_PINS: Final = "\n".join([_PATH, *(f"set {name} = '{value}'" for name, value in PINNED.items())])


def _own(xmin: str) -> str:
    """Return the condition that this transaction has written a visible row.

    The range leaves out old numbers, which count on from the other end: txid_status refuses those.
    """
    age = f"pg_catalog.age({xmin})"
    return (
        f"case when first_xid is null then true when {age} between pg_catalog.age(last_xid)"
        f" and pg_catalog.age(first_xid) then pg_catalog.txid_status(top_txid"
        f" + pg_catalog.age(first_xid) - {age}) = 'in progress' else false end"
    )


# Only own columns have a text of their default. Deparsing one locks the table, and this session has
# locked that of each row that it wrote.
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
    unproven int8[];
    own_proofs int8[];
begin
    select pg_catalog.jsonb_build_object(
               'oid', c.oid::int8, 'namespace', n.nspname, 'name', c.relname), c.relkind
      into result, kind
      from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.oid = of_table and c.relkind in ('r', 'p') and c.relpersistence = 'p'
       and not c.relispartition and n.nspname !~ '^pg_' and n.nspname <> 'information_schema';
    if result is null then
        return null;
    end if;
    select coalesce(
               pg_catalog.array_agg(k.conkey[1]::int8) filter (where not k.convalidated), '{{}}'),
           coalesce(pg_catalog.array_agg(k.conkey[1]::int8) filter (where {own_k}), '{{}}')
      into unproven, own_proofs
      from pg_catalog.pg_constraint k where k.conrelid = of_table and k.contype = 'n';
    select coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
               'number', a.attnum, 'name', a.attname,
               'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
               'not_null', a.attnotnull and a.attnum <> all (unproven),
               'default', case when a.is_own then
                   pg_catalog.pg_get_expr(a.adbin, a.attrelid) end,
               'default_mark', pg_catalog.hashtextextended(a.adbin::text, 0)::text,
               'generated', a.attgenerated, 'identity', a.attidentity,
               'sequence', a.sequence,
               'collation', case when a.attcollation <> a.typcollation then (
                   select pg_catalog.quote_ident(cn.nspname) || '.'
                       || pg_catalog.quote_ident(co.collname)
                     from pg_catalog.pg_collation co
                     join pg_catalog.pg_namespace cn on cn.oid = co.collnamespace
                    where co.oid = a.attcollation) end,
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
              from (select a.*, t.typcollation, d.adbin, a.xmin::text as xid,
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
    select ({objects}) into objects from (select of_table as oid) c;
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
    result := result || pg_catalog.jsonb_build_object(
        'columns', columns, 'objects', coalesce(objects, '[]'), 'types', coalesce(types, '[]'),
        'partitions', partitions);
    if has_objects then -- a constraint without its index would be a plan that cannot be made
        select result || pg_catalog.jsonb_build_object(
                   'indexes', ({indexes}), 'constraints', ({constraints}))
          into result from (select of_table as oid) c;
    end if;
    return result;
end
$function$
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

# The text that the client sent may hold other statements, with values or passwords. It may also
# call the function that runs the command. The context then shows the command, unless the function
# is one of language SQL. The word USING stays: it tells that a command may have computed values.
_RAN_SQL: Final = r"""
case when pg_catalog.length(query) <= {query_max} and query !~ ';\s*\S'
          and query ~* ('^\s*' || pg_catalog.replace(tg_tag, ' ', '\s+') || '\y') then query
     else tg_tag || ' ...' || case
         when query || context ~* '\yusing\y' or context ~ '(^|\n)SQL function'
           or query || context !~* '\yalter\y' then ' USING ...' else '' end end
"""

# The texts that have the command for sure, in which its columns occur; null if none has. A name may
# be written with escapes, and messages of the context may be in another language. The context names
# functions of language SQL without their text. One that the transaction has replaced may still run.
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

_PUBLISHED_SQL: Final = """
exists (select from pg_catalog.pg_publication p
         where p.pubname in ({publications}) and (
             p.puballtables
             or exists (select from pg_catalog.pg_publication_rel m
                         where m.prpubid = p.oid and m.prrelid in ({relation}, {leaf})){schemas}))
"""
_OF_SCHEMA_SQL: Final = """
             or exists (select from pg_catalog.pg_publication_namespace m
                         where m.pnpubid = p.oid and m.pnnspid = {namespace})"""

_CONCERNED: Final = "d.schema_name is distinct from 'pg_temp'"
# A row that the session's snapshot does not show belongs to a table that others have made since.
_COMMANDS_SQL: Final = """
select coalesce(pg_catalog.pg_partition_root(r.oid), r.oid) as oid, r.oid as altered,
       pg_catalog.array_agg(r.objid) as of_command, pg_catalog.bool_or(r.is_column) as is_renamed
  from (select case d.classid
                 when 'pg_catalog.pg_class'::regclass then coalesce(
                     (select i.indrelid from pg_catalog.pg_index i where i.indexrelid = d.objid),
                     (select p.refobjid from pg_catalog.pg_depend p
                       where p.classid = d.classid and p.objid = d.objid
                         and p.refclassid = d.classid and p.deptype in ('a', 'i')
                         and d.object_type = 'sequence' limit 1),
                     d.objid)
                 else (select k.conrelid from pg_catalog.pg_constraint k
                        where k.oid = d.objid) end as oid,
               d.objid, d.objsubid > 0 as is_column
          from pg_catalog.pg_event_trigger_ddl_commands() d
         where d.classid in ('pg_catalog.pg_class'::regclass, 'pg_catalog.pg_constraint'::regclass)
           and {concerned}) r
 where r.oid <> 0
 group by 1, 2 order by 2
"""
# A command that changes a type concerns the tables with a column of it, or of a type that has it as
# a part. Each of them depends on the type.
_TYPES_SQL: Final = """
with recursive changed (oid, objid) as (
    select case d.classid
             when 'pg_catalog.pg_type'::regclass then d.objid
             when 'pg_catalog.pg_class'::regclass then
                 (select r.reltype from pg_catalog.pg_class r
                   where r.oid = d.objid and r.relkind = 'c')
             when 'pg_catalog.pg_constraint'::regclass then
                 (select k.contypid from pg_catalog.pg_constraint k where k.oid = d.objid) end,
           d.objid
      from pg_catalog.pg_event_trigger_ddl_commands() d
    union
    select coalesce(r.reltype, p.objid), u.objid
      from changed u join pg_catalog.pg_depend p
        on p.refclassid = 'pg_catalog.pg_type'::regclass and p.refobjid = u.oid
      left join pg_catalog.pg_class r
        on p.classid = 'pg_catalog.pg_class'::regclass and r.oid = p.objid and r.relkind = 'c'
     where u.oid >= {user_oids}
       and (r.oid is not null or p.classid = 'pg_catalog.pg_type'::regclass)
)
select coalesce(pg_catalog.pg_partition_root(r.oid), r.oid) as oid, r.oid as altered,
       pg_catalog.array_agg(distinct u.oid)
           || pg_catalog.array_agg(distinct u.objid) as of_command, false as is_renamed
  from changed u join pg_catalog.pg_depend p
    on p.refclassid = 'pg_catalog.pg_type'::regclass and p.refobjid = u.oid
   and p.classid = 'pg_catalog.pg_class'::regclass and p.objsubid > 0
  join pg_catalog.pg_class r on r.oid = p.objid and r.relkind in ('r', 'p')
 where u.oid >= {user_oids}
 group by 1, 2 order by 2
"""

# Decoding orders the changes of subtransactions by position, and that of a message is its end,
# where the next record begins (logicalmsg_decode in decode.c). The empty message keeps the two
# apart.
_EMIT_MESSAGE_SQL: Final = """
            perform pg_catalog.pg_logical_emit_message(true, {prefix}, content);
            perform pg_catalog.pg_logical_emit_message(true, '', '');
"""
# Decoding reads the row from the WAL, so it can go at once. The publication publishes inserts only.
# The owner of the table may have added triggers, which may fail.
_EMIT_ROW_SQL: Final = """
            begin
                insert into {schema}.message values (content);
                delete from {schema}.message;
            exception when others then
                raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
            end;
"""

# A streamed message carries the xid of the whole transaction (pgoutput_message in pgoutput.c). So
# it names the subtransaction that wrote it; else a rollback to a savepoint would not take it back.
# A row of an unlogged table tells its number. No block with an EXCEPTION clause writes: each would
# have a number of its own, and a backend keeps 64 of them in shared memory. Such a block takes the
# lock. Nothing can take the table away after that, so that the row can fail only as the rows of the
# command itself can.
_LOCK_SQL: Final = "lock table {schema}.{place} in row exclusive mode;"
_BEGIN_SQL: Final = """
insert into {schema}.{place} default values returning xmin into last_xid;
        top_txid := pg_catalog.txid_current();
        first_xid := (top_txid % 4294967296)::text::xid;
"""

_MESSAGES_SQL: Final = """
create or replace function {schema}.messages(
    command_oid oid, altered oid, of_command oid[], is_renamed bool, tg_tag text, query text,
    context text, first_xid xid, last_xid xid, top_txid int8, token text, rewritten oid[])
    returns bytea[] language plpgsql stable as $function$
#variable_conflict use_variable
declare
    of_part oid;
    detached oid;
    member oid;
    relation jsonb;
    words text;
    contents bytea[] := '{{}}';
begin
    if rewritten is not null then
        words := {words};
    end if;
    if altered <> command_oid then
        of_part := altered;
    end if;
    if tg_tag = 'ALTER TABLE' and exists (
        select from pg_catalog.pg_class c where c.oid = altered and c.relkind = 'p')
    then
        select i.inhrelid into of_part from pg_catalog.pg_inherits i
         where i.inhparent = altered and {own_inherits}
         order by i.cmin::text::int8 desc limit 1;
        select c.oid into detached from pg_catalog.pg_class c
         where c.relkind in ('r', 'p') and not c.relispartition and {own_class}
         order by c.cmin::text::int8 desc limit 1;
    end if;
    for member in
        with recursive tree (oid, has_children) as (
            select command_oid, exists (
                select from pg_catalog.pg_class c
                 where c.oid = command_oid and c.relkind = 'r' and c.relhassubclass)
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
                        where k.conrelid = t.oid and {own_constraint})
    loop
        begin
            relation := {schema}.state(
                member, first_xid, last_xid, top_txid,
                coalesce(words ~ '\\yusing\\y', true) and exists (
                    select from pg_catalog.unnest(rewritten) r (oid)
                     where coalesce(pg_catalog.pg_partition_root(r.oid), r.oid) = member),
                words, of_part, of_command, is_renamed);
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

# The first turn finds out whether a table is published, and the second one describes the tables.
_TRIGGER_SQL: Final = """
create or replace function {schema}.{name}() returns event_trigger
language plpgsql security definer {pins} as $function$
#variable_conflict use_variable
declare
    query text;
    context text;
    command record;
    first_xid xid;
    last_xid xid;
    top_txid int8;
    token text;
    content bytea;
    contents bytea[] := '{{}}';
    is_published bool := false;
    rewritten oid[];
begin
    get diagnostics context = pg_context;
    for turn in 1 .. 2 loop
        begin
            exit when not exists (
                select from pg_catalog.pg_event_trigger_ddl_commands() d where {concerned});
            for command in {commands} loop
                continue when exists (
                    select from pg_catalog.pg_class c
                     where c.oid = command.oid
                       and (c.relkind not in ('r', 'p') or c.relpersistence <> 'p'));
                token := coalesce(token, (select t.token from {schema}.{secret} t));
                if {published} then
                    is_published := true;
                    exit when turn = 1;
                    query := coalesce(pg_catalog.current_query(), '');
                    rewritten := pg_catalog.string_to_array(
                        nullif(pg_catalog.current_setting({setting}, true), ''), ',')::oid[];
                    contents := contents || {schema}.messages(
                        command.oid, command.altered, command.of_command, command.is_renamed,
                        tg_tag, query, context, first_xid, last_xid, top_txid, token, rewritten);
                elsif turn = 2 then
                    contents := pg_catalog.array_append(contents, pg_catalog.convert_to(
                        '0 ' || token || ' ' || pg_catalog.jsonb_build_object(
                            'tag', tg_tag, 'query', '', 'relation', (
                                select pg_catalog.jsonb_build_object(
                                           'oid', c.oid::int8, 'namespace', n.nspname,
                                           'name', c.relname)
                                  from pg_catalog.pg_class c
                                  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                                 where c.oid = command.oid))::text, 'UTF8'));
                end if;
            end loop;
            if turn = 1 and is_published then
                {lock}
            end if;
        exception when others then
            raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
            contents := '{{}}';
            exit;
        end;
        if turn = 1 and is_published then
            {begin}
        end if;
    end loop;
    foreach content in array contents loop
        {emit}
    end loop;
    if pg_catalog.current_setting({setting}, true) <> '' then
        perform pg_catalog.set_config({setting}, '', true);
    end if;
end
$function$
"""

# The catalogs no longer know the table of a dropped index or partition. streamer does.
_CUT_SQL: Final = """
create or replace function {schema}.cut() returns event_trigger
language plpgsql security definer {pins} as $function$
#variable_conflict use_variable
declare
    query text := coalesce(pg_catalog.current_query(), '');
    context text;
    first_xid xid;
    last_xid xid;
    top_txid int8;
    dropped jsonb;
    content bytea;
begin
    get diagnostics context = pg_context;
    begin
        select pg_catalog.jsonb_build_object(
                   'objects', pg_catalog.jsonb_agg(d.objid::int8) filter (
                       where d.object_type in ('table', 'index', 'table constraint', 'sequence')),
                   'types', pg_catalog.jsonb_agg(d.objid::int8) filter (
                       where d.object_type = 'type'),
                   'indexes', pg_catalog.jsonb_agg(
                       pg_catalog.jsonb_build_array(d.schema_name, d.object_name)) filter (
                       where d.object_type = 'index'),
                   'columns', pg_catalog.jsonb_agg(
                       pg_catalog.jsonb_build_array(d.objid::int8, d.objsubid)) filter (
                       where d.object_type = 'table column'),
                   'defaults', pg_catalog.jsonb_agg(
                       pg_catalog.jsonb_build_array(a.attrelid::int8, a.attnum)) filter (
                       where a.attnum > 0))
          into dropped
          from pg_catalog.pg_event_trigger_dropped_objects() d
          left join pg_catalog.pg_namespace n
            on d.object_type = 'default value' and n.nspname = d.address_names[1]
          left join pg_catalog.pg_class c
            on c.relnamespace = n.oid and c.relname = d.address_names[2]
          left join pg_catalog.pg_attribute a
            on a.attrelid = c.oid and a.attname = d.address_names[3] and not a.attisdropped
         where not d.is_temporary and (d.object_type <> 'default value' or a.attnum > 0)
           and (d.object_type in (
                    'table', 'index', 'table constraint', 'table column', 'default value',
                    'sequence')
                or d.object_type = 'type' and d.original)
        having pg_catalog.count(*) > 0;
        if dropped is not null then
            content := pg_catalog.convert_to(
                ' ' || (select t.token from {schema}.{secret} t) || ' '
                || pg_catalog.jsonb_build_object(
                       'tag', tg_tag, 'query', {ran}, 'dropped', dropped)::text, 'UTF8');
            {lock}
        end if;
    exception when others then
        raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
        return;
    end;
    if content is not null then
        {begin}
        content := pg_catalog.convert_to(last_xid::text, 'UTF8') || content;
        {emit}
    end if;
end
$function$
"""
# ALTER COLUMN TYPE … USING may leave the type as it was, and compute all values. Then PostgreSQL
# rewrites the table with reason 4 (AT_REWRITE_COLUMN_REWRITE in event_trigger.h). It also writes
# the row of pg_attribute anew, which tells the column.
_REWRITE_SQL: Final = """
create or replace function {schema}.rewritten() returns event_trigger
language plpgsql security definer {path} as $function$
begin
    if pg_catalog.pg_event_trigger_table_rewrite_reason() & 4 <> 0 then
        perform pg_catalog.set_config({setting}, pg_catalog.concat_ws(',',
            nullif(pg_catalog.current_setting({setting}, true), ''),
            pg_catalog.pg_event_trigger_table_rewrite_oid()::int8), true);
    end if;
exception when others then
    raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
end
$function$
"""

_OF_TYPES: Final = ("ALTER TYPE", "ALTER DOMAIN")
_OF_TABLES: Final = (
    "ALTER TABLE",
    "CREATE TABLE",
    "CREATE TABLE AS",
    "SELECT INTO",
    "CREATE SCHEMA",
    "CREATE INDEX",
    "ALTER INDEX",
    "CREATE SEQUENCE",
    "ALTER SEQUENCE",
)


def schema_of(source: SourceMapping) -> str:
    """Return the schema of our objects."""
    return source_object_name(source.database, source.sid)


def create_sql(source: SourceMapping, role: str, version: int) -> list[str]:
    """Return the statements that create the capture; each may run again.

    *role* is streamer's. It owns the published table, so that it can add it to its publication.
    """
    schema, to_role = quote_identifier(schema_of(source)), f"to {quote_identifier(role)}"
    setting = quote_literal(f"{schema_of(source)}.rewritten")
    emit = _EMIT_MESSAGE_SQL.format(prefix=quote_literal(DDL_PREFIX))
    statements = [
        f"create schema if not exists {schema}",
        f"grant usage on schema {schema} {to_role}",
        f"create materialized view if not exists {schema}.{SECRET} as {_new_token(version)}",
        f"grant select on {schema}.{SECRET} {to_role}",
        f"create unlogged table if not exists {schema}.{PLACE} ()",
        f"grant delete on {schema}.{PLACE} {to_role}",
    ]
    if version < MESSAGES_MIN:
        table = f"{schema}.{MESSAGE_TABLE}"
        emit = _EMIT_ROW_SQL.format(schema=schema)
        statements += [
            f"create table if not exists {table} (content bytea not null)",
            # Any publication may then publish its deletes.
            f"alter table {table} replica identity full",
            f"alter table {table} owner {to_role}",
        ]
    begin = _BEGIN_SQL.format(schema=schema, place=PLACE).strip()
    lock = _LOCK_SQL.format(schema=schema, place=PLACE)
    ran = _RAN_SQL.format(query_max=_QUERY_MAX).strip()
    common = {
        "schema": schema,
        "secret": SECRET,
        "pins": _PINS,
        "path": _PATH,
        "setting": setting,
        "begin": begin,
        "lock": lock,
        "ran": ran,
        "emit": emit.strip(),
    }
    triggered = partial(_trigger_function, source, version, common)
    statements += [_state_function(schema), _DESCRIBE_SQL.format(**common).strip()]
    statements.append(_messages_function(schema, ran))
    tables = [*_OF_TABLES, *(["REINDEX"] if version >= _REINDEX_MIN else [])]
    for name, event, tags, create in (
        ("rewritten", "table_rewrite", (), _REWRITE_SQL.format(**common)),
        ("changed", "ddl_command_end", tables, triggered("changed", _COMMANDS_SQL)),
        ("typed", "ddl_command_end", _OF_TYPES, triggered("typed", _TYPES_SQL)),
        ("cut", "sql_drop", (), _CUT_SQL.format(**common)),
    ):
        trigger = quote_identifier(_trigger_name(source, name))
        listed = ", ".join(map(quote_literal, tags))
        when = f" when tag in ({listed})" if tags else ""
        statements += [
            create.strip(),
            f"drop event trigger if exists {trigger}",
            f"create event trigger {trigger} on {event}{when} execute function {schema}.{name}()",
            # Also for a session that sets session_replication_role, as one that fills tables does.
            f"alter event trigger {trigger} enable always",
        ]
    statements.append(f"comment on schema {schema} is {quote_literal(mark_of(statements))}")
    return statements


def _new_token(version: int) -> str:
    if version >= _VIA_ROOT_MIN:
        return "select pg_catalog.gen_random_uuid()::text as token"
    # PostgreSQL 12 has no such function. There the right to write to the table is the proof.
    return (
        "select pg_catalog.md5(pg_catalog.random()::text || pg_catalog.clock_timestamp()::text)"
        " as token"
    )


def _state_function(schema: str) -> str:
    return _STATE_SQL.format(
        schema=schema,
        user_oids=USER_OIDS_BEGIN,
        sequence=SEQUENCE,
        objects=MARKED_OBJECTS,
        types=USED_TYPES,
        partitions=PARTITIONS,
        indexes=INDEXES,
        constraints=CONSTRAINTS,
        **{f"own_{alias}": _own(f"{alias}.xmin") for alias in "adiket"},
    ).strip()


def _messages_function(schema: str, ran: str) -> str:
    return _MESSAGES_SQL.format(
        schema=schema,
        ran=ran,
        words=_WORDS_SQL.format(query_max=_QUERY_MAX, own=_own("p.xmin")).strip(),
        own_inherits=_own("i.xmin"),
        own_class=_own("c.xmin"),
        own_attribute=_own("a.xmin"),
        own_constraint=_own("k.xmin"),
    ).strip()


def _trigger_function(
    source: SourceMapping, version: int, common: dict[str, str], name: str, found: str
) -> str:
    names = (source.publication, source.publication_inserts)
    namespace = "(select c.relnamespace from pg_catalog.pg_class c where c.oid = command.oid)"
    published = _PUBLISHED_SQL.format(
        publications=", ".join(map(quote_literal, names)),
        relation="command.oid",
        leaf="command.altered",
        schemas=_OF_SCHEMA_SQL.format(namespace=namespace) if version >= _SCHEMAS_MIN else "",
    )
    return _TRIGGER_SQL.format(
        name=name,
        commands=found.format(user_oids=USER_OIDS_BEGIN, concerned=_CONCERNED).strip(),
        concerned=_CONCERNED,
        published=published.strip() if version >= _VIA_ROOT_MIN else "true",
        **common,
    ).strip()


def _trigger_name(source: SourceMapping, name: str) -> str:
    return source_object_name(source.database, source.sid, f"_{name}")


_NOT_MARKED: Final = ("grant ", "comment ", "alter table ")
"""They name the role, or change nothing a second time."""


def mark_of(statements: Sequence[str]) -> str:
    """Return the comment that tells the version of the capture."""
    text = "\n".join(each for each in statements if not each.startswith(_NOT_MARKED))
    return CAPTURE_MARK + sha256(text.encode()).hexdigest()[:16]
