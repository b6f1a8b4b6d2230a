"""Captures changes of definitions at a source.

An event trigger runs after each command that changes a definition. Its function writes the state of
every affected table into the WAL, between the changes before and after the command. The state names
the parts that the transaction changed. A second function writes the objects that a command dropped.
The functions send transactional logical messages, which roll back with the transaction (PostgreSQL
documentation, "pg_logical_emit_message"). PostgreSQL 12 and 13 do not send such messages; there the
functions insert rows into a published table (`streamer.decode.table_messages`). A function turns
errors into warnings, so no command of the application fails.

All objects are in one schema with the name of the slot. Every role may write logical messages. So
each message of the capture begins with a token, which only the functions and streamer's role can
read. Only a superuser may create event triggers. For any other role, `streamer check` prints the
statements for an administrator.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psycopg
import structlog

from streamer.decode.pgoutput import DDL_PREFIX
from streamer.errors.error_classes import SyncError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlCapture
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.schema.definition_message import BASELINE, DefinitionMessage
from streamer.schema.source_definition import SourceDefinition
from streamer.source.capture.capture_functions import (
    MESSAGE_TABLE,
    MESSAGES_MIN,
    PLACE,
    SECRET,
    create_sql,
    schema_of,
    version_comment,
)
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
from streamer.source.server.primary_of_standby import writable
from streamer.util.repeated_notices import end_notice, give_notice

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Capture:
    """The state of the capture at a source.

    ``is_current``: the objects have this version. ``may_create``: the role may create the objects.
    ``token``: None without a capture, or if the role may not read the token. ``is_taken``: the
    schema of that name belongs to a foreign program.
    """

    exists: bool
    is_current: bool
    may_create: bool
    token: str | None
    is_taken: bool = False


def uses_table(source: SourceMapping, version: int) -> bool:
    """Whether the messages of *source* travel as rows of a published table. Pure."""
    return source.ddl is DdlCapture.CAPTURE and version < MESSAGES_MIN


def message_table(source: SourceMapping) -> RelationName:
    """Return the name of the published table. Pure."""
    return RelationName(schema_of(source), MESSAGE_TABLE)


def drop_sql(source: SourceMapping) -> list[str]:
    """Return the statements that drop the capture's schema, functions and event triggers."""
    return [f"drop schema if exists {quote_identifier(schema_of(source))} cascade"]


# The owner of a schema may write the comment and create objects there. An event trigger runs for
# each role that changes a definition, so the owner must be a superuser or streamer's role.
_READ_SQL: Final = f"""
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
                      where c.relnamespace = n.oid and c.relname = '{SECRET}'
                        and pg_catalog.has_table_privilege(c.oid, 'select')) as is_readable
from pg_catalog.pg_namespace n where n.nspname = %s
"""
_TRIGGERS: Final = 5
_TAKEN: Final = "changes of definitions are not captured: another program has a schema of this name"
_SUPERUSER: Final = (
    "changes of definitions are not captured as configured: only a superuser may create "
    "event triggers, and streamer check prints the statements"
)
_REFUSED: Final = "changes of definitions are not captured as configured"
_UNPUBLISHED: Final = (
    "changes of definitions are not captured: streamer's message table is not published"
)
_ROLE_SQL: Final = """
select rolname as name, rolsuper as is_superuser
from pg_catalog.pg_roles where rolname = current_user
"""


async def read_capture(plain: Connection, source: SourceMapping) -> Capture:
    """Read the state of the capture."""
    schema = schema_of(source)
    role = await fetch_one(plain, _ROLE_SQL)
    # A standby has the roles of its primary, where streamer creates the capture.
    is_reachable = not is_standby(plain) or names_several_hosts(source)
    may_create = bool(role["is_superuser"]) and is_reachable
    rows = await fetch_all(plain, _READ_SQL, schema)
    if not rows:
        return Capture(exists=False, is_current=False, may_create=may_create, token=None)
    (row,) = rows
    if not row["mark"].startswith(CAPTURE_MARK) or not row["is_trusted"]:
        return Capture(exists=False, is_current=False, may_create=False, token=None, is_taken=True)
    is_whole = row["triggers"] == _TRIGGERS and row["is_readable"]
    token = None
    if row["is_readable"]:
        tokens = await fetch_all(plain, f"select token from {quote_identifier(schema)}.{SECRET}")
        token = tokens[0]["token"] if tokens else None
    statements = create_sql(source, role["name"], plain.info.server_version)
    is_current = row["mark"] == version_comment(statements)
    return Capture(
        exists=True,
        is_current=bool(is_whole and is_current and token),
        may_create=may_create,
        token=token if is_whole else None,
    )


async def ensure_capture(plain: Connection, source: SourceMapping) -> str | None:
    """Create the capture if the role may; return the token, or None without a capture.

    Without a capture, streamer judges definitions by RELATION messages, as with `ddl: off`.
    """
    capture = await read_capture(plain, source)
    if capture.is_current:
        for event in (_TAKEN, _SUPERUSER, _REFUSED):
            end_notice(event, source.label)
        await plain.execute(f"delete from {quote_identifier(schema_of(source))}.{PLACE}".encode())
        return capture.token
    if capture.is_taken:
        give_notice(
            log.warning,
            _TAKEN,
            source.label,
            schema=schema_of(source),
        )
        return None
    if not capture.may_create:
        give_notice(
            log.warning,
            _SUPERUSER,
            source.label,
        )
        return capture.token
    try:
        async with plain.transaction():
            for statement in create_sql(source, plain.info.user, plain.info.server_version):
                await plain.execute(statement.encode())
    except psycopg.Error as exc:
        give_notice(
            log.warning,
            _REFUSED,
            source.label,
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
    """Publish the table whose rows replace messages on an older server.

    The publications must exist. Without the privilege to alter the publication, streamer does not
    capture definitions.
    """
    table, name = message_table(source), source.publication_inserts
    names = [source.publication, name]
    row = await fetch_one(plain, _PUBLISHED_SQL, names, table.namespace, table.name)
    if row["found"]:
        end_notice(_UNPUBLISHED, source.label)
        return
    quoted = quote_qualified(table.namespace, table.name)
    sql = f"alter publication {quote_identifier(name)} add table {quoted}"
    try:
        await plain.execute(sql.encode())
    except psycopg.Error as exc:
        give_notice(
            log.warning,
            _UNPUBLISHED,
            source.label,
            error=first_line(exc),
            remedy=sql,
        )


async def send_baseline(
    plain: Connection,
    source: SourceMapping,
    stored: Mapping[RelationName, SourceDefinition | None],
) -> set[RelationName]:
    """Send the present definitions of some tables through the stream, each at its position.

    A lock keeps the definition from changing until the message is committed. Returns the tables
    whose definition was not sent, such as locked tables. *stored*: the definitions in the
    bookkeeping, or None. Parts of a stored definition that are missing now were dropped at the
    source; other parts may be new.
    """
    schema = quote_identifier(schema_of(source))
    uses_rows = uses_table(source, plain.info.server_version)
    content = "pg_catalog.convert_to(d.content, 'UTF8')"
    emit = (
        f"insert into {schema}.{MESSAGE_TABLE} select {content}"
        if uses_rows
        else f"select pg_catalog.pg_logical_emit_message(true, '{DDL_PREFIX}', {content})"
    )
    emit += f" from {schema}.describe(%s::regclass, %s, '', %s::jsonb) d (content)"
    emit += " where d.content is not null"
    unsent = set(stored)
    for name, definition in stored.items():
        table = quote_qualified(name.namespace, name.name)
        seen = None if definition is None else json.dumps(definition.identities)
        try:
            async with plain.transaction():
                await plain.execute(f"lock table {table} in access share mode".encode())
                await plain.execute(emit.encode(), (table, BASELINE, seen))
                if uses_rows:
                    await plain.execute(f"delete from {schema}.{MESSAGE_TABLE}".encode())
            unsent.remove(name)
        except psycopg.Error as exc:
            log.warning(
                "the definition of a table was not read; "
                "changes of the definition are not applied yet",
                source=source.label,
                table=str(name),
                error=first_line(exc),
            )
    return unsent


async def read_present(
    plain: Connection, source: SourceMapping, name: RelationName
) -> DefinitionMessage:
    """Return the message that a command on table *name* would send now.

    Reading the text of defaults locks the table. Raises SyncError if the function returns no
    message.
    """
    describe = f"{quote_identifier(schema_of(source))}.describe"
    table = quote_qualified(name.namespace, name.name)
    with translating(source.label):
        row = await fetch_one(
            plain, f"select {describe}(%s::regclass, %s, '') as content", table, BASELINE
        )
    message = None if row["content"] is None else DefinitionMessage.parse(row["content"].encode())
    if message is None or message.definition is None:
        raise SyncError(f'table "{name}" does not exist at the source')
    return message


async def drop_capture(plain: Connection, source: SourceMapping) -> None:
    """Remove streamer's capture, if present. Raises psycopg.Error without the privilege."""
    if (await read_capture(plain, source)).exists:
        async with writable(source, plain) as writing:
            for statement in drop_sql(source):
                await writing.execute(statement.encode())
