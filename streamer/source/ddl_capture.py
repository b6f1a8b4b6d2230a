"""Captures changes of definitions at a source: its objects there, and the SQL that makes them.

An event trigger runs after each command that changes a definition. Its function writes the state of
every affected table into the WAL, between the changes before and behind the command. That is a
transactional logical message, so it rolls back with its transaction (PostgreSQL documentation,
"pg_logical_emit_message"). On PostgreSQL 12 and 13, which do not send these, it is a row of a
published table (`streamer.decode.table_messages`). The function turns its errors into warnings: it
never makes a command of the application fail.

Everything is in one schema with the name of the slot. Every role may write logical messages. So
those of the capture have a token in front, which only its functions and streamer's role can read.
Only a superuser may create event triggers. Another role leaves that to an administrator, to whom
`streamer check` prints the statements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final

import psycopg
import structlog

from streamer.decode.pgoutput import DDL_PREFIX
from streamer.errors import SyncError
from streamer.mapping.definition import BASELINE, DefinitionMessage
from streamer.mapping.names import RelationName
from streamer.mapping.options import DdlCapture
from streamer.mapping.rules import SourceMapping, source_object_name
from streamer.postgres.describing import (
    CONSTRAINTS,
    INDEXES,
    MARKED_OBJECTS,
    PARTITIONS,
    SEQUENCE,
    USED_TYPES,
)
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.source.catalog import CAPTURE_MARK
from streamer.source.connection import (
    Connection,
    fetch_all,
    fetch_one,
    first_line,
    is_standby,
    names_several_hosts,
    translating,
)
from streamer.source.primary import writable

log = structlog.get_logger()

MESSAGES_MIN: Final = 14_00_00
"""pgoutput sends logical messages from here on."""
MESSAGE_TABLE: Final = "message"
"""On older servers its inserts are published, and stand for the messages."""
_QUERY_MAX: Final = 10_000
PATIENCE_MS: Final = 100
"""How long a command of the application waits at most for the lock of a table to describe."""

# A streamed message carries the xid of the whole transaction (pgoutput_message in pgoutput.c). So
# it names the subtransaction that wrote it; else a rollback to a savepoint would not take it back.
# A backend holds a lock on each xid that it has, and gives up that of a subtransaction at its end
# (CommitSubTransaction in xact.c). The newest one is that of the present subtransaction, because
# the command has written catalog rows.
_DESCRIBE_SQL: Final = r"""
select x.xid || ' ' || (select t.token from {schema}.token t) || ' ' ||
    pg_catalog.jsonb_build_object(
    'tag', tag, 'query', query,
    'relation', pg_catalog.jsonb_build_object(
        'oid', c.oid::int8, 'namespace', n.nspname, 'name', c.relname,
        'columns', coalesce((
            select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
                'number', a.attnum, 'name', a.attname,
                'type', pg_catalog.format_type(a.atttypid, a.atttypmod),
                'not_null', a.attnotnull,
                'default', pg_catalog.pg_get_expr(d.adbin, d.adrelid),
                'default_mark', pg_catalog.hashtextextended(d.adbin::text, 0)::text,
                'generated', a.attgenerated, 'identity', a.attidentity,
                'sequence', ({sequence}),
                'collation', case when a.attcollation <> t.typcollation then (
                    select pg_catalog.quote_ident(cn.nspname) || '.'
                        || pg_catalog.quote_ident(co.collname)
                      from pg_catalog.pg_collation co
                      join pg_catalog.pg_namespace cn on cn.oid = co.collnamespace
                     where co.oid = a.attcollation) end,
                'computed', x.is_rewritten and a.xmin::text = x.xid,
                'fill', case when a.atthasmissing
                    then (a.attmissingval::text::text[])[1] end))
              from pg_catalog.pg_attribute a
              join pg_catalog.pg_type t on t.oid = a.atttypid
              left join pg_catalog.pg_attrdef d
                on d.adrelid = a.attrelid and d.adnum = a.attnum
             where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped), '[]'),
        'objects', coalesce(({objects}), '[]'), 'types', coalesce(({types}), '[]'),
        'partitions', ({partitions}),
        'indexes', ({indexes}), 'constraints', ({constraints}))
    )::text
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 cross join lateral (
     select coalesce((select l.transactionid::text from pg_catalog.pg_locks l
                       where l.pid = pg_catalog.pg_backend_pid() and l.locktype = 'transactionid'
                         and l.mode = 'ExclusiveLock' and l.granted
                       order by pg_catalog.age(l.transactionid) limit 1), '0') as xid,
            query ~* '\yusing\y' and exists (
                select from pg_catalog.unnest(pg_catalog.string_to_array(
                    pg_catalog.current_setting({setting}, true), ',')::oid[]) r (oid)
                 where coalesce(pg_catalog.pg_partition_root(r.oid), r.oid) = c.oid)
                as is_rewritten) x
 where c.oid = relation and c.relkind in ('r', 'p') and c.relpersistence = 'p'
   and not c.relispartition and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
"""

_NEW_TOKEN_SQL: Final = "select pg_catalog.gen_random_uuid() where not exists"
# PostgreSQL 12 has no gen_random_uuid(). There the right to write to the table is the proof.
_NEW_TOKEN_12_SQL: Final = (
    "select pg_catalog.md5(pg_catalog.random()::text || pg_catalog.clock_timestamp()::text)"
    " where not exists"
)

# A command that changes a type concerns the tables with a column of it, or of a type that has it as
# a part.
_CHANGED_SQL: Final = """
with recursive command as materialized (
    select classid, objid from pg_catalog.pg_event_trigger_ddl_commands()
), changed (oid) as (
    select case d.classid
             when 'pg_catalog.pg_type'::regclass then d.objid
             when 'pg_catalog.pg_class'::regclass then
                 (select r.reltype from pg_catalog.pg_class r
                   where r.oid = d.objid and r.relkind = 'c')
             when 'pg_catalog.pg_constraint'::regclass then
                 (select k.contypid from pg_catalog.pg_constraint k where k.oid = d.objid) end
      from command d
    union
    select t.oid from changed u join pg_catalog.pg_type t
        on t.typtype = 'b' and t.typelem = u.oid and t.typcategory = 'A'
        or t.typtype = 'd' and t.typbasetype = u.oid
        or t.typtype = 'c' and exists (
            select from pg_catalog.pg_attribute a join pg_catalog.pg_class r on r.oid = a.attrelid
             where r.oid = t.typrelid and r.relkind = 'c' and a.atttypid = u.oid)
        or t.typtype = 'r' and exists (
            select from pg_catalog.pg_range r where r.rngtypid = t.oid and r.rngsubtype = u.oid)
     where u.oid >= 16384
)
select case d.classid
         when 'pg_catalog.pg_class'::regclass then coalesce(
             (select i.indrelid from pg_catalog.pg_index i where i.indexrelid = d.objid), d.objid)
         when 'pg_catalog.pg_constraint'::regclass then
             (select k.conrelid from pg_catalog.pg_constraint k where k.oid = d.objid) end as oid
  from command d
union
select a.attrelid from changed u join pg_catalog.pg_attribute a on a.atttypid = u.oid
 where u.oid >= 16384 and not a.attisdropped
"""
# The catalogs no longer know the table of a dropped index or partition. DROP holds a lock on that,
# as the rest of its transaction does; a table that has not changed makes no difference.
_CUT_SQL: Final = """
with dropped as materialized (
    select classid, objid, objsubid, object_type, address_names
      from pg_catalog.pg_event_trigger_dropped_objects()
     where classid in ('pg_catalog.pg_class'::regclass, 'pg_catalog.pg_constraint'::regclass)
)
select d.objid as oid from dropped d
 where d.classid = 'pg_catalog.pg_class'::regclass and d.objsubid > 0
union
select r.oid from dropped d
  join pg_catalog.pg_namespace n on n.nspname = d.address_names[1]
  join pg_catalog.pg_class r on r.relnamespace = n.oid and r.relname = d.address_names[2]
 where d.object_type = 'table constraint'
union
select l.relation from pg_catalog.pg_locks l
 where l.pid = pg_catalog.pg_backend_pid() and l.locktype = 'relation' and l.granted
   and l.mode in ('AccessExclusiveLock', 'ShareUpdateExclusiveLock')
   and tg_tag <> 'ALTER TABLE'
   and exists (select from dropped d where d.object_type in ('index', 'table'))
"""

# Decoding orders the changes of subtransactions by position, and that of a message is its end,
# where the next record begins (logicalmsg_decode in decode.c). The empty message keeps the two
# apart.
_EMIT_MESSAGE_SQL: Final = """
        perform pg_catalog.pg_logical_emit_message(true, {prefix}, content);
        perform pg_catalog.pg_logical_emit_message(true, '', '');
"""
# Decoding reads the row from the WAL, so it can go at once. The publication publishes inserts only.
_EMIT_ROW_SQL: Final = """
        begin
            insert into {schema}.message values (content);
            delete from {schema}.message;
        exception when others then
            raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
        end;
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
# A command that changes a table by inheritance names only the parent, and holds a lock on each
# child. Without that lock, to describe a child could wait for another session. A command that
# changes a type locks no table, so the wait for one is short. With pg_temp at the end of the path,
# no type of the session's own goes before that of PostgreSQL. The check of such a domain would run
# as the function's owner.
_TRIGGER_SQL: Final = """
create or replace function {schema}.{name}() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp
set lock_timeout = '{patience}ms' as $function$
declare
    query text := coalesce(pg_catalog.current_query(), '');
    context text;
    found_oid oid;
    content bytea;
    contents bytea[] := '{{}}';
begin
    begin
        get diagnostics context = pg_context;
        for found_oid in
            with recursive affected (oid) as (
                select coalesce(pg_catalog.pg_partition_root(f.oid), f.oid) from ({found}) f
                union
                select i.inhrelid from affected a
                  join pg_catalog.pg_inherits i on i.inhparent = a.oid
                  join pg_catalog.pg_class c on c.oid = i.inhrelid and not c.relispartition
                 where exists (select from pg_catalog.pg_locks l
                                where l.pid = pg_catalog.pg_backend_pid() and l.granted
                                  and l.locktype = 'relation' and l.relation = i.inhrelid)
            )
            select x.oid from affected x
        loop
            begin
                content := pg_catalog.convert_to(
                    {schema}.describe(found_oid, tg_tag, {ran}), 'UTF8');
                if content is not null then
                    contents := pg_catalog.array_append(contents, content);
                end if;
            exception when others then
                raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
            end;
        end loop;
    exception when others then
        raise warning 'streamer: a change of a definition was not captured: %', sqlerrm;
    end;
    foreach content in array contents loop
        {emit}
    end loop;
    {end}
end
$function$
"""
# ALTER COLUMN TYPE … USING may leave the type as it was, and compute all values. Then PostgreSQL
# rewrites the table with reason 4 (AT_REWRITE_COLUMN_REWRITE in event_trigger.h). It also writes
# the row of pg_attribute anew, which tells the column.
_REWRITE_SQL: Final = """
create or replace function {schema}.rewritten() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $function$
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
_END_SQL: Final = "perform pg_catalog.set_config({setting}, '', true);"


@dataclass(frozen=True, slots=True)
class Capture:
    """The state of the capture at a source.

    ``is_current``: the objects are those of this version. ``may_create``: the role may make them.
    ``token``: None if the role may not read it, or nothing is there. ``is_taken``: another program
    has a schema of that name.
    """

    is_there: bool
    is_current: bool
    may_create: bool
    token: str | None
    is_taken: bool = False


def schema_of(source: SourceMapping) -> str:
    """Return the schema of our objects."""
    return source_object_name(source.database, source.sid)


def uses_table(source: SourceMapping, version: int) -> bool:
    """Whether the messages of *source* travel as rows of a published table. Pure."""
    return source.ddl is DdlCapture.CAPTURE and version < MESSAGES_MIN


def message_table(source: SourceMapping) -> RelationName:
    """Return the name of the published table. Pure."""
    return RelationName(schema_of(source), MESSAGE_TABLE)


def create_sql(source: SourceMapping, role: str, version: int) -> list[str]:
    """Return the statements that create the capture; each may run again. Pure.

    *role* is streamer's. It owns the published table, so that it can add it to its publication.
    """
    schema, to_role = quote_identifier(schema_of(source)), f"to {quote_identifier(role)}"
    setting = quote_literal(f"{schema_of(source)}.rewritten")
    describe = _DESCRIBE_SQL.format(
        schema=schema,
        setting=setting,
        objects=MARKED_OBJECTS,
        types=USED_TYPES,
        partitions=PARTITIONS,
        sequence=SEQUENCE,
        indexes=INDEXES,
        constraints=CONSTRAINTS,
    )
    new_token = _NEW_TOKEN_SQL if version >= 13_00_00 else _NEW_TOKEN_12_SQL
    function = f"{schema}.describe(relation oid, tag text, query text) returns text"
    body = (
        "language sql stable set search_path = pg_catalog, pg_temp"
        f" as $function${describe}$function$"
    )
    ran = _RAN_SQL.format(query_max=_QUERY_MAX).strip()
    statements = [
        f"create schema if not exists {schema}",
        f"grant usage on schema {schema} {to_role}",
        f"create table if not exists {schema}.token (token text not null)",
        f"grant select on {schema}.token {to_role}",
        f"insert into {schema}.token {new_token} (select from {schema}.token)",
        f"create or replace function {function} {body}",
    ]
    emit = _EMIT_MESSAGE_SQL.format(prefix=quote_literal(DDL_PREFIX))
    if version < MESSAGES_MIN:
        table = f"{schema}.{MESSAGE_TABLE}"
        emit = _EMIT_ROW_SQL.format(schema=schema)
        statements += [
            f"create table if not exists {table} (content bytea not null)",
            # Any publication may then publish its deletes.
            f"alter table {table} replica identity full",
            f"alter table {table} owner {to_role}",
        ]
    emits = partial(
        _TRIGGER_SQL.format, schema=schema, emit=emit.strip(), ran=ran, patience=PATIENCE_MS
    )
    end = _END_SQL.format(setting=setting)
    for name, event, create in (
        ("rewritten", "table_rewrite", _REWRITE_SQL.format(schema=schema, setting=setting)),
        ("changed", "ddl_command_end", emits(name="changed", found=_CHANGED_SQL, end=end)),
        ("cut", "sql_drop", emits(name="cut", found=_CUT_SQL, end="")),
    ):
        trigger = quote_identifier(_trigger_name(source, name))
        statements += [
            create.strip(),
            f"drop event trigger if exists {trigger}",
            f"create event trigger {trigger} on {event} execute function {schema}.{name}()",
            # Also for a session that sets session_replication_role, as one that fills tables does.
            f"alter event trigger {trigger} enable always",
        ]
    statements.append(f"comment on schema {schema} is {quote_literal(_mark(statements))}")
    return statements


def drop_sql(source: SourceMapping) -> list[str]:
    """Return the statements that remove the capture; event triggers go with their functions."""
    return [f"drop schema if exists {quote_identifier(schema_of(source))} cascade"]


def _trigger_name(source: SourceMapping, name: str) -> str:
    return source_object_name(source.database, source.sid, f"_{name}")


_NOT_MARKED: Final = ("grant ", "comment ", "alter table ")
"""They name the role, or change nothing a second time."""


def _mark(statements: Sequence[str]) -> str:
    text = "\n".join(each for each in statements if not each.startswith(_NOT_MARKED))
    return CAPTURE_MARK + sha256(text.encode()).hexdigest()[:16]


# The owner of a schema may write its comment, and have objects in it. An event trigger runs for
# each role that changes a definition, so that owner has to be above them all, or be streamer.
_READ_SQL: Final = """
select coalesce(pg_catalog.obj_description(n.oid, 'pg_namespace'), '') as mark,
       exists (select from pg_catalog.pg_roles r
                where r.oid = n.nspowner and (r.rolsuper or r.rolname = current_user))
         or exists (select from pg_catalog.pg_event_trigger e
                      join pg_catalog.pg_proc p on p.oid = e.evtfoid
                     where p.pronamespace = n.oid and e.evtowner = n.nspowner) as is_trusted,
       (select count(*) from pg_catalog.pg_event_trigger e
          join pg_catalog.pg_proc p on p.oid = e.evtfoid
         where p.pronamespace = n.oid and e.evtenabled <> 'D') as triggers,
       pg_catalog.has_schema_privilege(n.oid, 'usage')
         and exists (select from pg_catalog.pg_class c
                      where c.relnamespace = n.oid and c.relname = 'token'
                        and pg_catalog.has_table_privilege(c.oid, 'select')) as is_readable
from pg_catalog.pg_namespace n where n.nspname = %s
"""
_TRIGGERS_MIN: Final = 2
"""Those that send messages; the third one came later, and only marks columns."""
_ROLE_SQL: Final = """
select rolname as name, rolsuper as is_superuser
from pg_catalog.pg_roles where rolname = current_user
"""


async def read_capture(plain: Connection, source: SourceMapping) -> Capture:
    """Read whether the capture is there."""
    schema = schema_of(source)
    role = await fetch_one(plain, _ROLE_SQL)
    # A standby has the roles of its primary, where streamer creates the capture.
    is_reachable = not is_standby(plain) or names_several_hosts(source)
    may_create = bool(role["is_superuser"]) and is_reachable
    rows = await fetch_all(plain, _READ_SQL, schema)
    if not rows:
        return Capture(is_there=False, is_current=False, may_create=may_create, token=None)
    (found,) = rows
    if not found["mark"].startswith(CAPTURE_MARK) or not found["is_trusted"]:
        return Capture(
            is_there=False, is_current=False, may_create=False, token=None, is_taken=True
        )
    is_whole = found["triggers"] >= _TRIGGERS_MIN and found["is_readable"]
    token = None
    if found["is_readable"]:
        tokens = await fetch_all(plain, f"select token from {quote_identifier(schema)}.token")
        token = tokens[0]["token"] if tokens else None
    statements = create_sql(source, role["name"], plain.info.server_version)
    is_current = found["mark"] == _mark(statements)
    return Capture(
        is_there=True,
        is_current=bool(is_whole and is_current and token),
        may_create=may_create,
        token=token if is_whole else None,
    )


async def ensure_capture(plain: Connection, source: SourceMapping) -> str | None:
    """Create the capture where the role may; return its token, or None if it is not there.

    Without it, streamer judges definitions by RELATION messages, as with `ddl: off`.
    """
    capture = await read_capture(plain, source)
    if capture.is_current:
        return capture.token
    if capture.is_taken:
        log.warning(
            "changes of definitions are not captured: another program has a schema of this name",
            source=source.label,
            schema=schema_of(source),
        )
        return None
    if not capture.may_create:
        log.warning(
            "changes of definitions are not captured as configured: only a superuser may create "
            "event triggers, and streamer check prints the statements",
            source=source.label,
        )
        return capture.token
    try:
        async with plain.transaction():
            for statement in create_sql(source, plain.info.user, plain.info.server_version):
                await plain.execute(statement.encode())
    except psycopg.Error as exc:
        log.warning(
            "changes of definitions are not captured as configured",
            source=source.label,
            error=first_line(exc),
        )
        return capture.token
    log.info("capture of definitions created", source=source.label, schema=schema_of(source))
    return (await read_capture(plain, source)).token


_PUBLISHED_SQL: Final = """
select exists (select from pg_catalog.pg_publication_tables t
                where t.pubname = any (%s) and t.schemaname = %s and t.tablename = %s) as found
"""


async def publish_messages(plain: Connection, source: SourceMapping) -> None:
    """Publish the table of the messages, which an older server has in place of these.

    Publications have to be there. Without the right to, definitions are not captured.
    """
    table, name = message_table(source), source.publication_inserts
    names = [source.publication, name]
    row = await fetch_one(plain, _PUBLISHED_SQL, names, table.namespace, table.name)
    if row["found"]:
        return
    quoted = quote_qualified(table.namespace, table.name)
    sql = f"alter publication {quote_identifier(name)} add table {quoted}"
    try:
        await plain.execute(sql.encode())
    except psycopg.Error as exc:
        log.warning(
            "changes of definitions are not captured: their table is not published",
            source=source.label,
            error=first_line(exc),
            remedy=sql,
        )


async def send_baseline(
    plain: Connection, source: SourceMapping, names: Sequence[RelationName]
) -> None:
    """Have the stream bring the present definitions of *names*, each at its place.

    A lock keeps the definition from changing until the message is committed. A table that stays
    locked is left for the next start.
    """
    schema = quote_identifier(schema_of(source))
    uses_rows = uses_table(source, plain.info.server_version)
    content = "pg_catalog.convert_to(d.content, 'UTF8')"
    emit = (
        f"insert into {schema}.{MESSAGE_TABLE} select {content}"
        if uses_rows
        else f"select pg_catalog.pg_logical_emit_message(true, '{DDL_PREFIX}', {content})"
    )
    emit += f" from {schema}.describe(%s::regclass, %s, '') d (content)"
    emit += " where d.content is not null"
    for name in names:
        table = quote_qualified(name.namespace, name.name)
        try:
            async with plain.transaction():
                await plain.execute(f"lock table {table} in access share mode".encode())
                await plain.execute(emit.encode(), (table, BASELINE))
                if uses_rows:
                    await plain.execute(f"delete from {schema}.{MESSAGE_TABLE}".encode())
        except psycopg.Error as exc:
            log.warning(
                "the definition of a table is not known yet, so its changes are not applied",
                source=source.label,
                table=str(name),
                error=first_line(exc),
            )


async def read_present(
    plain: Connection, source: SourceMapping, name: RelationName
) -> DefinitionMessage:
    """Return the message that a command on table *name* would send now.

    Its defaults have a text, for which it locks the table. Raises SyncError if there is none.
    """
    describe = f"{quote_identifier(schema_of(source))}.describe"
    table = quote_qualified(name.namespace, name.name)
    with translating(source.label):
        row = await fetch_one(
            plain, f"select {describe}(%s::regclass, %s, '') as content", table, BASELINE
        )
    found = None if row["content"] is None else DefinitionMessage.parse(row["content"].encode())
    if found is None:
        raise SyncError(f'table "{name}" is not in the source')
    return found


async def drop_capture(plain: Connection, source: SourceMapping) -> None:
    """Remove the capture, if it is there and ours. Raises psycopg.Error without the right to."""
    if (await read_capture(plain, source)).is_there:
        async with writable(source, plain) as writing:
            for statement in drop_sql(source):
                await writing.execute(statement.encode())
