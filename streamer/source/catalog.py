"""A source's catalogs: version, settings and relations.

Queries use names qualified with pg_catalog, because sessions run with an empty search_path.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psycopg
from psycopg.rows import DictRow

from streamer.errors.error_classes import (
    SourceDivergedError,
    SourceError,
    SourceStandbyError,
    SourceUnreadyError,
)
from streamer.errors.remedies import Remedy, at_source
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.describing import (
    COLUMN,
    FROM_COLUMNS,
    PARTITIONS,
    USED_TYPES,
    USER_OIDS_BEGIN,
    objects_sql,
)
from streamer.postgres.supported_versions import VERSION_MIN
from streamer.schema.indexes_constraints_types import (
    DefinedObject,
    DefinedType,
    object_of,
    primary_key_of,
    unique_keys_of,
)
from streamer.schema.partitions import Partition
from streamer.schema.source_definition import DefinedColumn, SourceDefinition
from streamer.source.connection import Connection, fetch_all, fetch_one, is_standby
from streamer.source.guarded_identities import read_identities
from streamer.source.reached_server import STARTED_SQL, ServerIdentity
from streamer.source.replica_identity import RelationIdentity
from streamer.source.source_database import require_same_database
from streamer.source.timeline_branches import KnownServer
from streamer.source.wal_end import (
    COMMIT_LATER_SQL,
    COMMIT_SQL,
    FLUSH_LSN_SQL,
    INSERT_LSN_SQL,
    WRITER_POLL_SECONDS,
    WRITER_SECONDS,
)
from streamer.util.lsn import Lsn

CAPTURE_MARK: Final = "streamer captures definitions, version "
"""Begins the comment on the schema of a capture, whose tables are never replicated."""


@dataclass(frozen=True, slots=True)
class SourceServer:
    """The facts about a source's server on which replication depends. ``version``:
    server_version_num.
    """

    version: int
    version_text: str
    system_identifier: str
    timeline: int
    flush_lsn: Lsn
    database: str
    wal_level: str
    wal_sender_timeout_seconds: float
    role: str
    role_may_replicate: bool
    is_superuser: bool
    in_recovery: bool
    max_replication_slots: int
    max_wal_senders: int
    settings: dict[str, str]
    started: int = 0
    """The start time of the server in microseconds of the epoch; 0 if unknown."""
    database_oid: int = 0
    database_names: dict[str, str] = field(default_factory=dict)
    """The databases of the server, by OID as text."""

    @property
    def major(self) -> int:
        return self.version // 10000

    @property
    def identity(self) -> ServerIdentity:
        """The server and timeline that every connection to this source must reach."""
        return self.system_identifier, self.timeline, self.started


@dataclass(frozen=True, slots=True)
class SourceRelation:
    """A table or partitioned table of a source."""

    identity: RelationIdentity
    primary_key: tuple[str, ...]
    columns: tuple[DefinedColumn, ...]
    row_count_estimate: int
    size_bytes: int
    """The size at the last VACUUM or ANALYZE."""
    row_security: bool
    owned: bool
    selectable: bool
    in_usable_namespace: bool = True
    """Whether the role may use the schema of the table."""
    unique_keys: tuple[tuple[str, ...], ...] = ()
    """Column sets of the valid, complete unique indexes with an immediate check."""
    primary_key_timing: str = ""
    """The clause of a deferrable primary key: SQL to add to the constraint."""
    objects: tuple[DefinedObject, ...] = field(default=(), compare=False)
    """The indexes and constraints. Their changes do not end a copy, because rows do not depend on
    indexes and constraints.
    """
    types: tuple[DefinedType, ...] = field(default=(), compare=False)
    """The user-defined types of columns, and the parts of these types."""

    partitions: tuple[Partition, ...] = field(default=(), compare=False)
    """The table and its partitions, if partitioned."""

    @property
    def oid(self) -> int:
        return self.identity.root.oid

    @property
    def name(self) -> RelationName:
        return self.identity.name

    @property
    def is_partitioned(self) -> bool:
        return self.identity.is_partitioned

    @property
    def replica_identity(self) -> str:
        """pg_class.relreplident of the table, regardless of the partitions."""
        return self.identity.root.kind

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the replica identity; empty if the identity is FULL or not usable."""
        return self.identity.root.key

    @property
    def has_generated_key(self) -> bool:
        return self.identity.root.has_generated_key

    @property
    def has_usable_identity(self) -> bool:
        """Whether the source can publish UPDATE and DELETE without making statements fail."""
        return self.identity.is_usable

    @property
    def definition(self) -> SourceDefinition:
        return SourceDefinition.of_columns(
            self.columns, self.objects, self.types, self.partitions, self.oid
        )

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


_SERVER_SQL: Final = f"""
select current_setting('server_version_num')::int as version,
       current_setting('server_version') as version_text,
       pg_catalog.current_database() as database,
       (select oid::int8 from pg_catalog.pg_database where datname = pg_catalog.current_database())
         as database_oid,
       (select pg_catalog.jsonb_object_agg(oid, datname) from pg_catalog.pg_database)
         as database_names,
       current_setting('wal_level') as wal_level,
       (select setting::float8 / 1000 from pg_catalog.pg_settings
         where name = 'wal_sender_timeout') as wal_sender_timeout_seconds,
       current_user as role,
       r.rolreplication or r.rolsuper as role_may_replicate,
       r.rolsuper as is_superuser,
       pg_catalog.pg_is_in_recovery() as in_recovery,
       {STARTED_SQL} as started,
       current_setting('max_replication_slots')::int as max_replication_slots,
       current_setting('max_wal_senders')::int as max_wal_senders,
       (select pg_catalog.jsonb_object_agg(name, setting) from pg_catalog.pg_settings
         where name in ('wal_sender_timeout', 'max_slot_wal_keep_size',
                        'idle_replication_slot_timeout', 'logical_decoding_work_mem')) as settings
from pg_catalog.pg_roles r where r.rolname = current_user
"""


_IDENTITY_SQL: Final = f"""
select (select system_identifier from pg_catalog.pg_control_system()) as systemid,
       (select timeline_id from pg_catalog.pg_control_checkpoint()) as timeline,
       ({FLUSH_LSN_SQL})::text as xlogpos
"""


async def read_server(connection: Connection) -> SourceServer:
    """Read the settings that replication depends on; *connection* must be a replication connection.

    Raises SourceUnreadyError for a server that is too old.
    """
    return await _read_server(connection, "IDENTIFY_SYSTEM")


_DATABASE_SQL: Final = """
select c.system_identifier::text as system_identifier,
       (select oid::int8 from pg_catalog.pg_database where datname = pg_catalog.current_database())
         as database_oid,
       (select pg_catalog.jsonb_object_agg(oid, datname) from pg_catalog.pg_database) as names
from pg_catalog.pg_control_system() c
"""


async def check_same_database(
    source: SourceMapping, connection: Connection, stored: KnownServer
) -> None:
    """Refuse a different database of the same server, for a command. Raises SourceDatabaseError.

    Without the privilege to read the system identifier, this check accepts every database, and only
    the process that streams can refuse a database.
    """
    try:
        row = await fetch_one(connection, _DATABASE_SQL)
    except psycopg.errors.InsufficientPrivilege:
        return
    require_same_database(source, stored, **row)


async def read_server_by_query(connection: Connection) -> SourceServer:
    """Read the server over an ordinary connection, for a role without the replication attribute."""
    return await _read_server(connection, _IDENTITY_SQL)


async def _read_server(connection: Connection, identity_sql: str) -> SourceServer:
    if connection.info.server_version < VERSION_MIN:
        raise SourceUnreadyError(
            f"PostgreSQL {connection.info.server_version // 10000} is too old",
            hint="streamer needs PostgreSQL 12 or later",
        )
    identity = await fetch_one(connection, identity_sql)
    return SourceServer(
        system_identifier=str(identity["systemid"]),
        timeline=int(identity["timeline"]),
        flush_lsn=Lsn.parse(identity["xlogpos"]),
        **await fetch_one(connection, _SERVER_SQL),
    )


# Relations with storage. The queries read catalog tables and avoid functions such as pg_table_size
# and pg_partition_tree, which lock the tables: one locked table would delay all tables.
_LEAVES_SQL: Final = """
with recursive tree (oid, relkind) as (
    select c.oid, c.relkind
    union all
    select i.inhrelid, p.relkind
    from tree t
    join pg_catalog.pg_inherits i on i.inhparent = t.oid and t.relkind = 'p'
    join pg_catalog.pg_class p on p.oid = i.inhrelid
)
select p.reltuples, p.relpages::int8 + coalesce(o.relpages, 0) as pages
from tree t
join pg_catalog.pg_class p on p.oid = t.oid
left join pg_catalog.pg_class o on o.oid = p.reltoastrelid
where t.relkind <> 'p'
"""

_RELATIONS_SQL: Final = f"""
select c.oid::int8 as oid,
       ({objects_sql(with_texts=False)}) as objects,
       greatest(c.reltuples, 0)::int8 as row_count_estimate,
       (c.relpages::int8 + coalesce((select o.relpages from pg_catalog.pg_class o
                                      where o.oid = c.reltoastrelid), 0))
         * current_setting('block_size')::int8 as size_bytes,
       c.relrowsecurity and (c.relforcerowsecurity
            or not pg_catalog.pg_has_role(c.relowner, 'usage'))
         and not (select rolsuper or rolbypassrls from pg_catalog.pg_roles
                   where rolname = current_user) as row_security,
       pg_catalog.pg_has_role(c.relowner, 'usage') as owned,
       pg_catalog.has_table_privilege(c.oid, 'select') as selectable,
       pg_catalog.has_schema_privilege(c.relnamespace, 'usage') as in_usable_namespace
from pg_catalog.pg_class c
where c.oid = any (%s::oid[])
"""

_TREES_SQL: Final = f"""
select c.oid::int8 as oid, ({PARTITIONS}) as partitions, l.row_count_estimate,
       l.pages * current_setting('block_size')::int8 as size_bytes
from pg_catalog.pg_class c
cross join lateral (
    select coalesce(pg_catalog.sum(greatest(l.reltuples, 0)), 0)::int8 as row_count_estimate,
           coalesce(pg_catalog.sum(l.pages), 0)::int8 as pages
      from ({_LEAVES_SQL}) l) l
where c.oid = any (%s::oid[])
"""
"""Facts about partitioned tables, with sizes that replace the sizes of `_RELATIONS_SQL`."""

_TYPES_SQL: Final = f"""
select c.oid::int8 as oid, ({USED_TYPES}) as types
from pg_catalog.pg_class c where c.oid = any (%s::oid[])
"""

_COLUMNS_SQL: Final = f"""
select a.attrelid::int8 as relid, a.atttypid::int8 as type_oid,
       {", ".join(f'{sql} as "{name}"' for name, sql in COLUMN.items()).replace("%", "%%")},
       case when a.attgenerated <> '' then pg_catalog.pg_get_expr(d.adbin, d.adrelid) end
         as "default",
       pg_catalog.hashtextextended(d.adbin::text, 0)::text as default_mark,
       case when a.atthasmissing then (a.attmissingval::text::text[])[1] end as fill,
       t.typdefaultbin is not null as of_domain,
       a.attstorage in ('x', 'e') or (a.attstorage = 'm' and t.typstorage <> 'm')
         as may_be_toasted
from {FROM_COLUMNS}
where a.attrelid = any (%s) and a.attnum > 0 and not a.attisdropped
order by a.attrelid, a.attnum
"""


OF_EXTENSION_SQL: Final = """
(select e.extname::text
   from pg_catalog.pg_depend d join pg_catalog.pg_extension e on e.oid = d.refobjid
  where d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objid = c.oid
    and d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass and d.deptype = 'e')"""
"""The extension to which the table ``c`` belongs."""
_NAMES_SQL: Final = f"""
select n.nspname as namespace, c.relname as name, {OF_EXTENSION_SQL} is not null as of_extension
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence = 'p'
  and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
  and not starts_with(
        coalesce(pg_catalog.obj_description(n.oid, 'pg_namespace'), ''), '{CAPTURE_MARK}')
"""


async def read_relation_names(connection: Connection, source: SourceMapping) -> list[RelationName]:
    """Return every table and partitioned table that a rule of *source* could name.

    Only a rule with an exact name can name a table that belongs to an extension.
    """
    exact = source.exact_names
    tables = await _read_tables(connection)
    return [name for name, of_extension in tables.items() if not of_extension or name in exact]


async def read_extension_tables(connection: Connection) -> set[RelationName]:
    """Return the tables that belong to extensions."""
    tables = await _read_tables(connection)
    return {name for name, of_extension in tables.items() if of_extension}


async def _read_tables(connection: Connection) -> dict[RelationName, bool]:
    """Return the tables of users, and whether each belongs to an extension."""
    rows = await fetch_all(connection, _NAMES_SQL)
    return {RelationName(row["namespace"], row["name"]): row["of_extension"] for row in rows}


async def read_relations(
    connection: Connection, names: list[RelationName]
) -> dict[RelationName, SourceRelation]:
    """Read the definitions of *names*; leave out missing relations.

    A new session plans and fills its caches for each catalog that a statement names. So statements
    about partitions and user-defined types run only where a table uses these.
    """
    identities = {
        identity.root.oid: identity
        for name, identity in (await read_identities(connection, names)).items()
        if is_replicable(name)
    }
    if not identities:
        return {}
    oids = list(identities)
    rows = {row.pop("oid"): row for row in await fetch_all(connection, _RELATIONS_SQL, oids)}
    columns: dict[int, list[DefinedColumn]] = {oid: [] for oid in oids}
    for column in await fetch_all(connection, _COLUMNS_SQL, oids):
        columns[column.pop("relid")].append(DefinedColumn.of(column))
    trees = [oid for oid in rows if identities[oid].is_partitioned]
    typed = [oid for oid in rows if any(c.type_oid >= USER_OIDS_BEGIN for c in columns[oid])]
    for sql, some in ((_TREES_SQL, trees), (_TYPES_SQL, typed)):
        for row in await fetch_all(connection, sql, some) if some else ():
            rows[row.pop("oid")].update(row)
    # A table that was dropped between two statements is missing.
    return {
        identity.name: _relation(identity, rows[oid], columns[oid])
        for oid, identity in identities.items()
        if oid in rows
    }


def is_replicable(name: RelationName) -> bool:
    """Whether the schema belongs to users, and not to PostgreSQL. Pure."""
    return not name.namespace.startswith("pg_") and name.namespace != "information_schema"


def _relation(
    identity: RelationIdentity, row: DictRow, columns: list[DefinedColumn]
) -> SourceRelation:
    names = {column.number: column.name for column in columns}
    objects = tuple(object_of(fields, names) for fields in row.pop("objects") or ())
    key = primary_key_of(objects)
    # If the statement about columns did not return a column of the key, the rest is no key.
    finds_rows = key is not None and key.index is not None and key.index.finds_rows
    return SourceRelation(
        identity,
        columns=tuple(columns),
        primary_key=key.columns if key is not None and finds_rows else (),
        unique_keys=unique_keys_of(objects),
        primary_key_timing="" if key is None else key.timing,
        objects=objects,
        types=tuple(map(DefinedType.of, row.pop("types", None) or ())),
        partitions=tuple(Partition(**entry) for entry in row.pop("partitions", ())),
        **row,
    )


async def read_flush_lsn(connection: Connection) -> Lsn:
    """Return the end of the WAL that the source flushed."""
    row = await fetch_one(connection, f"select ({FLUSH_LSN_SQL})::text as lsn")
    return Lsn.parse(row["lsn"])


async def flush_wal(connection: Connection) -> Lsn:
    """Flush all transactions committed so far; return the end of the WAL.

    A commit with ``synchronous_commit = off`` reaches the disk, and so streamer's stream, a little
    later. The flush of an empty transaction includes all earlier commits. On a standby all WAL is
    flushed.
    """
    if not is_standby(connection):
        try:
            await connection.execute(COMMIT_SQL)
        except psycopg.errors.InsufficientPrivilege:
            await _await_wal_writer(connection)
    return await read_flush_lsn(connection)


async def _await_wal_writer(connection: Connection) -> None:
    await connection.execute(COMMIT_LATER_SQL)
    row = await fetch_one(connection, f"select ({INSERT_LSN_SQL})::text as lsn")
    inserted, until = Lsn.parse(row["lsn"]), time.monotonic() + WRITER_SECONDS
    while time.monotonic() < until:
        if await read_flush_lsn(connection) >= inserted:
            return
        await asyncio.sleep(WRITER_POLL_SECONDS)


def check_same_history(server: SourceServer, system_identifier: str | None, seen_lsn: Lsn) -> None:
    """Refuse a source with a different system identifier, or a source that went back in time.

    *seen_lsn*: the newest position of the source that the target stored.
    """
    if system_identifier is not None and server.system_identifier != system_identifier:
        raise SourceDivergedError(
            f"the source is a different server now: system identifier {server.system_identifier} "
            f"instead of {system_identifier}"
        )
    if server.flush_lsn < seen_lsn:
        raise SourceDivergedError(
            f"the source was restored to an earlier time: its WAL ends at {server.flush_lsn}, "
            f"before {seen_lsn}, which the target has"
        )


FAILOVER_SINCE: Final = 17_00_00
ON_STANDBY_SINCE: Final = 16_00_00
ON_DEMAND_SINCE: Final = 19_00_00
"""A server with wal_level = replica writes logical WAL while a logical slot exists."""


def find_unready(server: SourceServer, source: SourceMapping) -> Iterator[SourceError]:
    """Yield the reasons why a source is not set up for logical replication. Pure."""
    label = f'source "{source.label}"'
    if source.failover and server.version < FAILOVER_SINCE:
        yield SourceUnreadyError(
            f"{label}: failover: true is set, which PostgreSQL {server.major} lacks",
            hint="remove it from the configuration, or upgrade that server to 17 or later",
        )
    if server.in_recovery and server.version < ON_STANDBY_SINCE:
        yield SourceStandbyError(
            f"{label}: is a standby, which cannot decode its WAL",
            hint="connect to the primary, or upgrade to PostgreSQL 16",
        )
    if source.failover and server.in_recovery:
        yield SourceStandbyError(
            f"{label}: is a standby, and failover: true needs the primary",
            hint="list all hosts in its url, with target_session_attrs=read-write",
        )
    decodes_on_demand = server.version >= ON_DEMAND_SINCE and server.wal_level == "replica"
    if server.wal_level != "logical" and not decodes_on_demand:
        set_level = at_source("alter system set wal_level = 'logical'")
        yield SourceUnreadyError(
            f"{label}: wal_level is {server.wal_level}",
            hint=Remedy.of("run at the source: ", set_level, "; then restart that server"),
        )


def check_ready(server: SourceServer, source: SourceMapping) -> None:
    """Refuse a source that is not set up for logical replication."""
    for error in find_unready(server, source):
        raise error
