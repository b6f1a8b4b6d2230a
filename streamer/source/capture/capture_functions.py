"""SQL of the functions and event triggers that capture changes of definitions at a source.

The functions run inside commands of the application, and so in its sessions. Three rules make that
safe. The functions pin all settings that change a text or a plan. The functions send only facts
with positive evidence: catalog rows that this transaction wrote, and objects that PostgreSQL lists
as dropped. The functions do little work: a first function, small enough to compile at once, checks
whether a command concerns a table that streamer publishes. If not, the function sends a small
message. `streamer.source.capture.table_description` defines the functions that describe a table.
Pure.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Final

from streamer.decode.pgoutput import DDL_PREFIX
from streamer.mapping.rules import SourceMapping, source_object_name
from streamer.postgres.describing import USER_OIDS_BEGIN
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.postgres.session_settings import TEXT_FORMAT
from streamer.schema.definition_message import UNPUBLISHED
from streamer.source.capture.table_description import (
    describe_function,
    messages_function,
    state_function,
)
from streamer.source.catalog import CAPTURE_MARK

MESSAGES_MIN: Final = 14_00_00
"""The first version whose pgoutput sends logical messages."""
MESSAGE_TABLE: Final = "message"
"""The published table whose inserted rows replace the messages on older servers."""
SECRET: Final = "secret"
"""The materialized view with the token: no publication can publish a materialized view."""
PLACE: Final = "place"
"""An unlogged table, which no publication can publish."""
LOCK_TIMEOUT_MS: Final = 100
"""The maximum time in milliseconds that a command of the application waits for the lock of a table
to describe.
"""
_QUERY_MAX: Final = 10_000
_REINDEX_MIN: Final = 17_00_00
_VIA_ROOT_MIN: Final = 13_00_00
_SCHEMAS_MIN: Final = 15_00_00

_PLANS: Final = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "max_parallel_workers_per_gather": "0",
    # A cached plan stays while catalogs grow, even within a transaction, so it must use indexes.
    "enable_nestloop": "on",
    "enable_indexscan": "on",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "join_collapse_limit": "8",
    "from_collapse_limit": "8",
}
# The string literals of the functions depend on the first two settings.
_OTHERS: Final = {
    "standard_conforming_strings": "on",
    "escape_string_warning": "off",
    "lock_timeout": f"{LOCK_TIMEOUT_MS}ms",
}
# The client chooses the encoding, and the functions convert messages. The functions do not depend
# on the server's language, and read no time.
_NOT_PINNED: Final = frozenset(
    {
        "client_encoding",
        "lc_messages",
        "lc_time",
        "lc_numeric",
        "search_path",
        "timezone_abbreviations",
    }
)
PINNED: Final = {
    **_PLANS,
    **_OTHERS,
    **{n: v for n, v in TEXT_FORMAT.items() if n not in _NOT_PINNED},
}
"""Settings of the functions, in any session of the application."""


def _pins(settings: Mapping[str, str]) -> str:
    """Return the clauses that pin *settings*.

    With pg_temp at the end of the path, no domain of the session hides a built-in type. The check
    of such a domain would run as the function's owner.
    """
    return "\n".join([_PATH, *(f"set {name} = '{value}'" for name, value in settings.items())])


_PATH: Final = "set search_path = pg_catalog, pg_temp"


# The client's text may contain further statements, with values or passwords, or may call the
# function that runs the command. Then the message contains the command's tag instead of the text.
# If the text or the context may contain USING, the message contains USING after the tag, because
# USING may compute values. The context shows the command, unless the function's language is SQL.
_RAN_SQL: Final = r"""
case when pg_catalog.length(query) <= {query_max} and query !~ ';\s*\S'
          and query ~* ('^\s*' || pg_catalog.replace(tg_tag, ' ', '\s+') || '\y') then query
     else tg_tag || ' ...' || case
         when query || context ~* '\yusing\y' or context ~ '(^|\n)SQL function'
           or query || context !~* '\yalter\y' then ' USING ...' else '' end end
"""

_PUBLISHED_SQL: Final = """
exists (select from pg_catalog.pg_publication p
         where ({publications}) and (
             p.puballtables
             or exists (select from pg_catalog.pg_publication_rel m
                         where m.prpubid = p.oid and m.prrelid {is_member}){schemas}))
"""
_OF_SCHEMA_SQL: Final = """
             or exists (select from pg_catalog.pg_publication_namespace m
                         where m.pnpubid = p.oid and m.pnnspid = {namespace})"""

_CONCERNED: Final = "d.schema_name is distinct from 'pg_temp'"
# If the session's snapshot lacks a catalog row, a concurrent session created the table later.
_TABLES_SQL: Final = """
select pg_catalog.array_agg(distinct r.oid order by r.oid) into tables
  from (select case d.classid when 'pg_catalog.pg_class'::regclass
                    then coalesce(i.indrelid, p.refobjid, d.objid) else k.conrelid end as oid
          from pg_catalog.pg_event_trigger_ddl_commands() d
          left join pg_catalog.pg_index i
            on i.indexrelid = d.objid and d.classid = 'pg_catalog.pg_class'::regclass
          left join pg_catalog.pg_depend p
            on d.object_type = 'sequence' and p.classid = d.classid and p.objid = d.objid
           and p.refclassid = d.classid and p.deptype in ('a', 'i')
          left join pg_catalog.pg_constraint k
            on k.oid = d.objid and d.classid = 'pg_catalog.pg_constraint'::regclass
         where d.classid in ('pg_catalog.pg_class'::regclass, 'pg_catalog.pg_constraint'::regclass)
           and {concerned}) r
 where r.oid <> 0;
"""
# A command that changes a type concerns the tables with a column of that type, or of a type that
# contains the changed type. Each such table depends on the type.
_TABLES_OF_TYPES_SQL: Final = """
with recursive changed (oid) as (
    select case d.classid
             when 'pg_catalog.pg_type'::regclass then d.objid
             when 'pg_catalog.pg_class'::regclass then
                 (select r.reltype from pg_catalog.pg_class r
                   where r.oid = d.objid and r.relkind = 'c')
             when 'pg_catalog.pg_constraint'::regclass then
                 (select k.contypid from pg_catalog.pg_constraint k where k.oid = d.objid) end
      from pg_catalog.pg_event_trigger_ddl_commands() d
    union
    select coalesce(r.reltype, p.objid)
      from changed u join pg_catalog.pg_depend p
        on p.refclassid = 'pg_catalog.pg_type'::regclass and p.refobjid = u.oid
      left join pg_catalog.pg_class r
        on p.classid = 'pg_catalog.pg_class'::regclass and r.oid = p.objid and r.relkind = 'c'
     where u.oid >= {user_oids}
       and (r.oid is not null or p.classid = 'pg_catalog.pg_type'::regclass)
)
select pg_catalog.array_agg(distinct r.oid order by r.oid),
       of_command || pg_catalog.array_agg(distinct u.oid)
  into tables, of_command
  from changed u join pg_catalog.pg_depend p
    on p.refclassid = 'pg_catalog.pg_type'::regclass and p.refobjid = u.oid
   and p.classid = 'pg_catalog.pg_class'::regclass and p.objsubid > 0
  join pg_catalog.pg_class r on r.oid = p.objid and r.relkind in ('r', 'p')
 where u.oid >= {user_oids};
"""

# Decoding orders the changes of subtransactions by position. The position of a message is its end,
# where the next record begins (logicalmsg_decode in decode.c). The empty message separates both
# positions.
_EMIT_MESSAGE_SQL: Final = """
            perform pg_catalog.pg_logical_emit_message(true, {prefix}, content);
            perform pg_catalog.pg_logical_emit_message(true, '', '');
"""
# Decoding reads the row from the WAL, so the function deletes the row at once. The publication
# publishes inserts only.
_EMIT_ROW_SQL: Final = """
            insert into {schema}.message values (content) returning ctid into place;
            delete from {schema}.message where ctid = place;
"""
# The owner of the table may have added a trigger, a check or an index, which may fail. The lock
# keeps the table as streamer created it, so that an insert cannot make the command fail.
_LOCK_MESSAGES_SQL: Final = """
    if {content} is not null then
        begin
            lock table {schema}.message in row exclusive mode;
            if not exists (
                select from pg_catalog.pg_class c join pg_catalog.pg_attribute a
                    on a.attrelid = c.oid and a.attnum = 1 and a.atttypid = 'bytea'::regtype
                 where c.oid = {table}::pg_catalog.regclass and c.relkind = 'r' and c.relnatts = 1
                   and c.relreplident = 'f' and c.relchecks = 0 and not c.relispartition
                   and not (c.relhastriggers or c.relhasrules or c.relhasindex))
            then
                raise exception 'the table of messages is not as streamer made it';
            end if;
        exception when others then
            raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
            return false;
        end;
    end if;
"""

# A streamed message carries the xid of the whole transaction (pgoutput_message in pgoutput.c). So
# the message names its subtransaction; otherwise a rollback to a savepoint would not revoke the
# message. The xmin of a row in an unlogged table is that xid. No block with an EXCEPTION clause may
# write: each such block would use an additional xid, and shared memory has room for 64. So such a
# block only takes the lock. After that no session can drop the table, so the insert fails only if
# the command fails, too.
_LOCK_SQL: Final = "lock table {schema}.{place} in row exclusive mode;"
_BEGIN_SQL: Final = """
insert into {schema}.{place} default values returning xmin into last_xid;
        top_txid := pg_catalog.txid_current();
        first_xid := (top_txid % 4294967296)::text::xid;
"""
# Most commands of an application concern temporary objects, or tables that streamer does not
# publish. The first command of a session pays for each expression and query of this function.
# `altered` is the table of an object, or NULL if the full query must find the table. The value is
# NULL for partitions and for objects that name no table. The value is also NULL under an old
# snapshot, because the table may have joined the publication later.
_TRIGGER_SQL: Final = """
create or replace function {schema}.{name}() returns event_trigger
language plpgsql security definer {light_pins} as $function$
#variable_conflict use_variable
declare
    altered oid;
    is_published bool;
    place pg_lsn;
begin
    begin
        for altered in
            select {altered} from pg_catalog.pg_event_trigger_ddl_commands() d where {concerned}
        loop
            continue when altered is null;
            is_published := {published};
            exit when is_published;
        end loop;
        if not found then
            return;
        end if;
        if is_published is not false then -- a missing function fails here, and not below
            is_published := {follow}::regprocedure is not null;
        end if;
    exception when others then
        raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
        return;
    end;
    if is_published then
        is_published := {schema}.follow(tg_tag, altered);
    else
        {hint}
    end if;
end
$function$
"""
_READS_PRESENT: Final = "pg_catalog.current_setting('transaction_isolation') = 'read committed'"
_ALTERED_TABLE: Final = f"""
case when (d.object_type = 'table' or d.object_type = 'table column')
               and pg_catalog.pg_partition_root(d.objid) is null and {_READS_PRESENT}
          then d.objid end
"""
_ALTERED_INDEX: Final = f"""
case when {_READS_PRESENT} then (
                select i.indrelid from pg_catalog.pg_index i
                 where i.indexrelid = d.objid
                   and pg_catalog.pg_partition_root(i.indrelid) is null) end
"""
_HINT_SQL: Final = "place := pg_catalog.pg_logical_emit_message(true, {prefix}, {hint});"

# The first pass checks whether a table is published, and the second pass describes the tables.
# *published* is the table of the command, if known and published. Call `follow` by assignment:
# PERFORM would add a line to PG_CONTEXT. The calling function sets the settings and privileges.
_FOLLOW_SQL: Final = """
create or replace function {schema}.follow(tg_tag text, published oid) returns bool
language plpgsql as $function$
#variable_conflict use_variable
declare
    query text;
    context text;
    tables oid[] := array[published];
    altered oid;
    root oid;
    of_command oid[];
    is_renamed bool;
    first_xid xid;
    last_xid xid;
    top_txid int8;
    token text;
    content bytea;
    contents bytea[];
    place tid;
    is_published bool := published is not null;
    rewritten oid[];
begin
    for turn in 1 .. 2 loop
        begin
            if turn = 1 then
                select pg_catalog.array_agg(d.objid), pg_catalog.bool_or(d.objsubid > 0)
                  into of_command, is_renamed
                  from pg_catalog.pg_event_trigger_ddl_commands() d where {concerned};
                if tg_tag in ('ALTER TYPE', 'ALTER DOMAIN') then
                    {tables_of_types}
                elsif published is null then
                    {tables}
                end if;
                exit when tables is null;
            else
                query := coalesce(pg_catalog.current_query(), '');
                get diagnostics context = pg_context;
                token := (select t.token from {schema}.{secret} t);
                rewritten := pg_catalog.string_to_array(
                    nullif(pg_catalog.current_setting({setting}, true), ''), ',')::oid[];
            end if;
            foreach altered in array tables loop
                exit when turn = 1 and is_published;
                root := coalesce(pg_catalog.pg_partition_root(altered), altered);
                if published is null then
                    continue when exists (
                        select from pg_catalog.pg_class c
                         where c.oid = root
                           and (c.relkind not in ('r', 'p') or c.relpersistence <> 'p'));
                    is_published := {is_published};
                end if;
                continue when turn = 1;
                if is_published then
                    contents := contents || {schema}.messages(
                        root, altered, of_command, is_renamed, tg_tag, query, context, first_xid,
                        last_xid, top_txid, token, rewritten);
                else
                    contents := pg_catalog.array_append(contents, pg_catalog.convert_to(
                        '0 ' || token || ' ' || pg_catalog.jsonb_build_object(
                            'tag', tg_tag, 'query', '', 'relation', (
                                select pg_catalog.jsonb_build_object(
                                           'oid', c.oid::int8, 'namespace', n.nspname,
                                           'name', c.relname)
                                  from pg_catalog.pg_class c
                                  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                                 where c.oid = root))::text, 'UTF8'));
                end if;
            end loop;
            if turn = 1 and is_published then
                {lock}
            end if;
        exception when others then
            raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
            contents := null;
            exit;
        end;
        if turn = 1 and is_published then
            {begin}
        end if;
    end loop;
    {lock_messages}
    foreach content in array coalesce(contents, '{{}}') loop
        {emit}
    end loop;
    if pg_catalog.current_setting({setting}, true) <> '' then
        perform pg_catalog.set_config({setting}, '', true);
    end if;
    return is_published;
end
$function$
"""

# The catalogs no longer contain the table of a dropped index or partition, but streamer has stored
# that table.
_CUT_SQL: Final = """
create or replace function {schema}.cut() returns event_trigger
language plpgsql security definer {light_pins} as $function$
declare
    kinds text[];
    is_sent bool;
begin
    begin
        select pg_catalog.array_agg(d.object_type) into kinds
          from pg_catalog.pg_event_trigger_dropped_objects() d
         where not d.is_temporary and (
             {kinds} or d.object_type = 'type' and d.original);
        if kinds is null then
            return;
        end if;
        is_sent := {follow_drop}::regprocedure is not null;
    exception when others then
        raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
        return;
    end;
    is_sent := {schema}.follow_drop(tg_tag, kinds);
end
$function$
"""
_DROPPED_KINDS: Final = (
    "table",
    "index",
    "table constraint",
    "table column",
    "default value",
    "sequence",
)
_FOLLOW_DROP_SQL: Final = """
create or replace function {schema}.follow_drop(tg_tag text, kinds text[]) returns bool
language plpgsql as $function$
#variable_conflict use_variable
declare
    query text;
    context text;
    first_xid xid;
    last_xid xid;
    top_txid int8;
    dropped jsonb;
    defaults jsonb;
    content bytea;
    place tid;
begin
    begin
        if 'default value' = any (kinds) then
            select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(a.attrelid::int8, a.attnum))
              into defaults
              from pg_catalog.pg_event_trigger_dropped_objects() d
              join pg_catalog.pg_namespace n on n.nspname = d.address_names[1]
              join pg_catalog.pg_class c
                on c.relnamespace = n.oid and c.relname = d.address_names[2]
              join pg_catalog.pg_attribute a
                on a.attrelid = c.oid and a.attname = d.address_names[3] and not a.attisdropped
             where d.object_type = 'default value' and not d.is_temporary and a.attnum > 0;
            if defaults is null and 'default value' = all (kinds) then
                return false;
            end if;
        end if;
        query := coalesce(pg_catalog.current_query(), '');
        get diagnostics context = pg_context;
        select pg_catalog.convert_to(
                   ' ' || t.token || ' ' || pg_catalog.jsonb_build_object(
                       'tag', tg_tag, 'query', {ran}, 'dropped', pg_catalog.jsonb_build_object(
                           'defaults', defaults,
                           'objects', pg_catalog.jsonb_agg(d.objid::int8) filter (
                               where d.object_type in (
                                   'table', 'index', 'table constraint', 'sequence')),
                           'types', pg_catalog.jsonb_agg(d.objid::int8) filter (
                               where d.object_type = 'type' and d.original),
                           'indexes', pg_catalog.jsonb_agg(
                               pg_catalog.jsonb_build_array(d.schema_name, d.object_name)) filter (
                               where d.object_type = 'index'),
                           'columns', pg_catalog.jsonb_agg(
                               pg_catalog.jsonb_build_array(d.objid::int8, d.objsubid)) filter (
                               where d.object_type = 'table column')))::text, 'UTF8')
          into content
          from pg_catalog.pg_event_trigger_dropped_objects() d, {schema}.{secret} t
         where not d.is_temporary group by t.token;
        {lock}
    exception when others then
        raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
        return false;
    end;
    {lock_message}
    if content is not null then
        {begin}
        content := pg_catalog.convert_to(last_xid::text, 'UTF8') || content;
        {emit}
    end if;
    return content is not null;
end
$function$
"""
# ALTER COLUMN TYPE … USING may keep the type and compute all values. Then PostgreSQL rewrites the
# table with reason 4 (AT_REWRITE_COLUMN_REWRITE in event_trigger.h), and updates the row of
# pg_attribute, which identifies the column.
_REWRITE_SQL: Final = """
create or replace function {schema}.rewritten() returns event_trigger
language plpgsql security definer {path} as $function$
declare
    tables text;
begin
    if pg_catalog.pg_event_trigger_table_rewrite_reason() & 4 <> 0 then
        tables := pg_catalog.set_config({setting}, pg_catalog.concat_ws(',',
            nullif(pg_catalog.current_setting({setting}, true), ''),
            pg_catalog.pg_event_trigger_table_rewrite_oid()::int8), true);
    end if;
exception when others then
    raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
end
$function$
"""

_OF_TABLES: Final = ("ALTER TABLE", "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO")
_OF_INDEXES: Final = ("CREATE INDEX", "ALTER INDEX")
# The full query runs for these: CREATE SCHEMA may create several tables and partitions.
_OF_OTHERS: Final = (
    "CREATE SCHEMA",
    "CREATE SEQUENCE",
    "ALTER SEQUENCE",
    "ALTER TYPE",
    "ALTER DOMAIN",
)


def schema_of(source: SourceMapping) -> str:
    """Return the schema of streamer's objects."""
    return source_object_name(source.database, source.sid)


def create_sql(source: SourceMapping, role: str, version: int) -> list[str]:
    """Return the statements that create the capture; each may run again.

    *role*: streamer's role, which owns the published table and so can add the table to a
    publication.
    """
    schema, to_role = quote_identifier(schema_of(source)), f"to {quote_identifier(role)}"
    setting = quote_literal(f"{schema_of(source)}.rewritten")
    message = quote_literal(f"{schema}.{MESSAGE_TABLE}")
    emit, lock_messages = _EMIT_MESSAGE_SQL.format(prefix=quote_literal(DDL_PREFIX)), ""
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
        emit, lock_messages = _EMIT_ROW_SQL.format(schema=schema), _LOCK_MESSAGES_SQL
        statements += [
            f"create table if not exists {table} (content bytea not null)",
            # Any publication can then publish deletes of the table.
            f"alter table {table} replica identity full",
            f"alter table {table} owner {to_role}",
        ]
    begin = _BEGIN_SQL.format(schema=schema, place=PLACE).strip()
    lock = _LOCK_SQL.format(schema=schema, place=PLACE)
    ran = _RAN_SQL.format(query_max=_QUERY_MAX).strip()
    common = {
        "schema": schema,
        "secret": SECRET,
        "light_pins": _pins(_PLANS | _OTHERS),
        "path": _PATH,
        "setting": setting,
        "begin": begin,
        "lock": lock,
        "ran": ran,
        "emit": emit.strip(),
        "follow": quote_literal(f"{schema}.follow(text, oid)"),
        "follow_drop": quote_literal(f"{schema}.follow_drop(text, text[])"),
        **{
            f"lock_{name}": lock_messages.format(schema=schema, table=message, content=content)
            for name, content in (("message", "content"), ("messages", "contents"))
        },
    }
    front = partial(_front_function, source, version, common)
    statements += [
        state_function(schema, version),
        describe_function(schema, SECRET, _PATH),
        messages_function(schema, _pins(PINNED), ran, _QUERY_MAX),
        _follow_function(source, version, common),
        _FOLLOW_DROP_SQL.format(**common).strip(),
    ]
    indexes = [*_OF_INDEXES, *(["REINDEX"] if version >= _REINDEX_MIN else [])]
    kinds = " or ".join(f"d.object_type = '{kind}'" for kind in _DROPPED_KINDS)
    hint = _HINT_SQL.format(prefix=quote_literal(DDL_PREFIX), hint=quote_literal(UNPUBLISHED))
    for name, event, tags, create in (
        ("rewritten", "table_rewrite", (), _REWRITE_SQL.format(**common)),
        ("changed", "ddl_command_end", _OF_TABLES, front("changed", _ALTERED_TABLE, hint)),
        ("indexed", "ddl_command_end", indexes, front("indexed", _ALTERED_INDEX, "null;")),
        ("related", "ddl_command_end", _OF_OTHERS, front("related", "null", "null;")),
        ("cut", "sql_drop", (), _CUT_SQL.format(kinds=kinds, **common)),
    ):
        trigger = quote_identifier(_trigger_name(source, name))
        listed = ", ".join(map(quote_literal, tags))
        when = f" when tag in ({listed})" if tags else ""
        statements += [
            create.strip(),
            f"drop event trigger if exists {trigger}",
            f"create event trigger {trigger} on {event}{when} execute function {schema}.{name}()",
            # The trigger must also fire in sessions that set session_replication_role, as loading
            # tools do.
            f"alter event trigger {trigger} enable always",
        ]
    statements.append(f"comment on schema {schema} is {quote_literal(version_comment(statements))}")
    return statements


def _new_token(version: int) -> str:
    if version >= _VIA_ROOT_MIN:
        return "select pg_catalog.gen_random_uuid()::text as token"
    # PostgreSQL 12 has no gen_random_uuid. There the privilege to write to the message table proves
    # the origin of a message.
    return (
        "select pg_catalog.md5(pg_catalog.random()::text || pg_catalog.clock_timestamp()::text)"
        " as token"
    )


def _front_function(
    source: SourceMapping, version: int, common: dict[str, str], name: str, altered: str, hint: str
) -> str:
    return _TRIGGER_SQL.format(
        name=name,
        # Where rows replace messages, the trigger always runs the full query.
        altered="null" if version < MESSAGES_MIN else altered.strip(),
        concerned=_CONCERNED,
        published=_published(source, version, "= altered", "m.pnnspid"),
        hint=hint,
        **common,
    ).strip()


def _follow_function(source: SourceMapping, version: int, common: dict[str, str]) -> str:
    namespace = "(select c.relnamespace from pg_catalog.pg_class c where c.oid = root)"
    return _FOLLOW_SQL.format(
        tables=_TABLES_SQL.format(concerned=_CONCERNED).strip(),
        tables_of_types=_TABLES_OF_TYPES_SQL.format(user_oids=USER_OIDS_BEGIN).strip(),
        concerned=_CONCERNED,
        is_published=_published(source, version, "in (root, altered)", namespace),
        **common,
    ).strip()


def _published(source: SourceMapping, version: int, is_member: str, namespace: str) -> str:
    """Return the condition that a publication contains a table, or the *namespace*."""
    if version < _VIA_ROOT_MIN:
        return "true"
    names = (source.publication, source.publication_inserts)
    return _PUBLISHED_SQL.format(
        publications=" or ".join(f"p.pubname = {quote_literal(name)}" for name in names),
        is_member=is_member,
        schemas=_OF_SCHEMA_SQL.format(namespace=namespace) if version >= _SCHEMAS_MIN else "",
    ).strip()


def _trigger_name(source: SourceMapping, name: str) -> str:
    return source_object_name(source.database, source.sid, f"_{name}")


_NOT_MARKED: Final = ("grant ", "comment ", "alter table ")
"""The fingerprint omits these statements, which name the role or have no effect when repeated."""


def version_comment(statements: Sequence[str]) -> str:
    """Return the comment with the version of the capture."""
    text = "\n".join(statement for statement in statements if not statement.startswith(_NOT_MARKED))
    return CAPTURE_MARK + sha256(text.encode()).hexdigest()[:16]
