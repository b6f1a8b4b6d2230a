"""The facts of the target for a check. The module neither judges nor writes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import (
    is_installed,
    read_installation,
    rehearse,
)
from streamer.bookkeeping.deferred_indexes import read_deferred_targets
from streamer.bookkeeping.purges import read_removed
from streamer.bookkeeping.relation_columns import read_source_columns
from streamer.bookkeeping.relation_records import RelationRecord, read_relation_records
from streamer.bookkeeping.schema_version import SchemaVersion, read_version
from streamer.bookkeeping.sources import SourceRecord, read_source_records
from streamer.bookkeeping.unmapped_relations import read_owned_rows
from streamer.commands.check.source_facts import CONNECTIONS_SQL, SourceFacts
from streamer.control.table_state import Need
from streamer.errors.error_classes import StreamerError, TargetContentionError, TargetSchemaError
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rename_targets import Obstacle, rename_error
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres import replication_origin
from streamer.postgres.named_relations import NAMED_RELATION, NAMED_TYPE
from streamer.postgres.supported_versions import VERSION_MIN
from streamer.runtime.guards.follow_renames import find_renamed, judge_renames
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.target_relation import TargetRelation
from streamer.schema_changes.read_definitions import read_target_types
from streamer.source.catalog import SourceRelation
from streamer.source.reached_server import STARTED_SQL, TIMELINE_SQL
from streamer.target.catalog import holds_rows, read_relation
from streamer.target.connection import TargetAddress, TargetConnection, may_replace_role
from streamer.target.missing_grants import HIDES_ROWS_SQL, MISSING_SQL
from streamer.target.target_partitions import find_crowded_default
from streamer.target.target_sequences import TargetSequence, find_sequences

OUR_TABLES: Final = frozenset(["source", "relation", "sync_partition", "deferred_index", "request"])
STATEMENT_SECONDS: Final = 20
"""The time limit of the search for rows, because a table may be large or locked."""


@dataclass(frozen=True, slots=True)
class TargetServer:
    """The target's server and database."""

    version: int
    version_text: str
    database: str
    encoding: str
    locale: str
    role: str
    is_superuser: bool
    may_create: bool
    may_use_temporary: bool
    may_use_plpgsql: bool
    has_plpgsql: bool
    may_replace_role: bool
    may_set_origin: bool
    origins_max: int
    free_origins: int
    is_source: bool
    in_recovery: bool
    system_identifier: str
    timeline: int
    started: int
    """When the server started, in the form of `SourceServer.started`."""
    synchronous_commit: str
    fsync: str
    max_connections: int
    connections_reserved: int
    connections_used: int
    """Sessions of programs other than streamer."""
    role_connections_max: int | None = None
    """The limit of connections of streamer's role; None without a limit that counts."""
    role_connections_used: int = 0
    database_connections_max: int | None = None
    database_connections_used: int = 0


@dataclass(frozen=True, slots=True)
class BookkeepingFacts:
    """Schema streamer. ``version``: None without the table of migrations."""

    exists: bool
    may_use: bool
    tables: tuple[str, ...]
    forbidden_tables: tuple[str, ...]
    version: SchemaVersion | None

    @property
    def is_readable(self) -> bool:
        """Whether the schema belongs to streamer, and this program runs on its version."""
        return self.version is not None and self.version.is_usable


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A relation of the target; ``relation`` is None unless it is a table."""

    kind: str
    missing_privileges: tuple[str, ...]
    row_security: bool
    is_owned: bool
    has_foreign_keys: bool
    triggers: tuple[str, ...]
    relation: TargetRelation | None


@dataclass(frozen=True, slots=True)
class Namespace:
    """An existing schema of the target."""

    may_use: bool
    may_create: bool


@dataclass(slots=True)
class TargetFacts:
    """The facts of the target."""

    server: TargetServer
    bookkeeping: BookkeepingFacts
    refusal: StreamerError | None = None
    """Why the target refuses the bookkeeping that `run` would create."""
    installation: str = ""
    """The id of this installation; empty before the first start."""
    sources: dict[str, SourceRecord] = field(default_factory=dict)
    relations: dict[tuple[str, str], RelationRecord] = field(default_factory=dict)
    filled: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    """The number of each source column as of the last copy of a table, by source and table."""
    removed: dict[tuple[str, str], bool] = field(default_factory=dict)
    """Tables of removed sources: see `read_removed`."""
    former_rows: frozenset[tuple[int, str, str, str | None]] = frozenset()
    """Unmapped relations whose rows streamer wrote: see `read_owned_rows`."""
    namespaces: dict[str, Namespace] = field(default_factory=dict)
    tables: dict[RelationName, TargetTable] = field(default_factory=dict)
    types: dict[RelationName, list[str]] = field(default_factory=dict)
    shared_types: dict[RelationName, list[DefinedType]] = field(default_factory=dict)
    """The types of columns, by table with rows of schemas."""
    collations: frozenset[str] = frozenset()
    """The collations of the target, in the form of `DefinedColumn.collation`."""
    extensions: dict[str, str] = field(default_factory=dict)
    available_extensions: frozenset[str] = frozenset()
    deferred: frozenset[str] = frozenset()
    """Targets whose indexes a copy deferred."""
    unfollowed: dict[tuple[str, str], StreamerError] = field(default_factory=dict)
    """Why relations cannot follow their renamed tables, by source and former name of the table."""
    crowded: dict[RelationName, RelationName] = field(default_factory=dict)
    """Default partitions with many rows, by the table with time partitions."""
    occupied: dict[tuple[str, RelationName], bool | str] = field(default_factory=dict)
    """Whether the target holds rows of a table, or why that is unknown; by source and table."""
    sequences: dict[tuple[str, RelationName], TargetSequence] = field(default_factory=dict)
    """The sequences of the target, by source and sequence of that source."""

    @property
    def are_records_readable(self) -> bool:
        """Whether the bookkeeping of `run` is readable or absent."""
        bookkeeping = self.bookkeeping
        if "migration" not in bookkeeping.tables:
            return bookkeeping.may_use
        return bookkeeping.is_readable and not bookkeeping.forbidden_tables

    def record(self, source: SourceMapping, mapping: RelationMapping) -> RelationRecord | None:
        return self.relations.get((source.label, str(mapping.source)))

    def owns_rows(self, source: SourceMapping, mapping: RelationMapping) -> bool:
        """Whether a copy of the relation may replace its rows in the target."""
        if (record := self.record(source, mapping)) is not None:
            return record.target_created or record.owns_rows
        if source.label not in self.sources:
            return False
        source_id = self.sources[source.label].source_id
        rows = source_id, str(mapping.source), str(mapping.target), mapping.sid
        return rows in self.former_rows

    def records_of(self, source: SourceMapping) -> dict[RelationName, RelationRecord]:
        """Return the records of the tables of *source*, by their names at the source."""
        return {
            parse_name(name): record
            for (label, name), record in self.relations.items()
            if label == source.label
        }

    def needs_copy(self, source: SourceMapping, mapping: RelationMapping) -> bool:
        """Whether the target still lacks all or some of the table's rows.

        The table is new, its copy was interrupted, or it waits for an operator's resync.
        """
        record = self.record(source, mapping)
        if record is None:
            return True
        return record.table_state.need not in (Need.NOTHING, Need.PART)

    def begins_copy(self, source: SourceMapping, mapping: RelationMapping) -> bool:
        """Whether `run` begins or continues a copy of this table, without a further request."""
        record = self.record(source, mapping)
        if record is None:
            return mapping.rule.initial is not Initial.NONE
        is_to_mark_synced = mapping.rule.initial is Initial.NONE and not record.declared
        is_refused = is_to_mark_synced or record.table_state.is_lost
        return self.needs_copy(source, mapping) and not is_refused


async def _judge_renames(
    bookkeeping: Bookkeeping, facts: TargetFacts, source: SourceFacts, target_namespace: str
) -> None:
    records = facts.records_of(source.source)
    moves = find_renamed(records, source.publications.values())
    verdicts = await judge_renames(bookkeeping, source.source, moves, records, target_namespace)
    facts.unfollowed |= {
        (source.source.label, str(move.former)): rename_error(move, verdict)
        for move, verdict in verdicts.items()
        if isinstance(verdict, Obstacle)
    }


def written_sid(
    mapping: RelationMapping, relation: SourceRelation, target: TargetRelation
) -> str | None:
    """Return the sid that *mapping* writes into *target*, if any."""
    target_names = {mapping.target_column(name) for name in relation.column_names}
    return mapping.sid if target.has_sid and SID not in target_names else None


async def read_server(connection: TargetConnection) -> TargetFacts:
    """Read the facts that do not depend on the mapping."""
    row = dict((await connection.fetch(_SERVER_SQL))[0])
    row["may_replace_role"] = await may_replace_role(connection)
    row |= dict((await connection.fetch(replication_origin.CAPACITY_SQL))[0])
    facts = TargetFacts(TargetServer(**row), await _read_bookkeeping(connection))
    if facts.server.version >= VERSION_MIN and _would_make(facts):
        try:
            await rehearse(connection)
        except TargetContentionError:
            pass  # a process is creating the schema
        except StreamerError as exc:
            if connection.is_closed:
                raise
            facts.refusal = exc
    return facts


def _would_make(facts: TargetFacts) -> bool:
    """Whether `run` would create or alter the bookkeeping, by the catalogs."""
    server, bookkeeping = facts.server, facts.bookkeeping
    if server.in_recovery or not (server.may_create and server.may_use_plpgsql):
        return False
    if bookkeeping.version is None:
        return bookkeeping.may_use and OUR_TABLES.isdisjoint(bookkeeping.tables)
    return not bookkeeping.version.is_complete and not bookkeeping.forbidden_tables


_SERVER_SQL: Final = f"""
select current_setting('server_version_num')::int4 as version,
       current_setting('server_version') as version_text,
       d.datname as database, pg_encoding_to_char(d.encoding) as encoding,
       pg_catalog.concat_ws(' ', pg_catalog.to_jsonb(d) ->> 'datlocprovider', d.datcollate,
                            d.datctype, coalesce(pg_catalog.to_jsonb(d) ->> 'datlocale',
                                                 pg_catalog.to_jsonb(d) ->> 'daticulocale'))
         as locale,
       current_user as role, r.rolsuper as is_superuser,
       has_database_privilege(d.oid, 'create') as may_create,
       has_database_privilege(d.oid, 'temporary') as may_use_temporary,
       exists (select from pg_language where lanname = 'plpgsql') as has_plpgsql,
       exists (select from pg_language where lanname = 'plpgsql'
                 and has_language_privilege(oid, 'usage')) as may_use_plpgsql,
       pg_is_in_recovery() as in_recovery,
       (select system_identifier::text from pg_control_system()) as system_identifier,
       {TIMELINE_SQL} as timeline, {STARTED_SQL} as started,
       (select reset_val from pg_settings where name = 'synchronous_commit') as synchronous_commit,
       current_setting('fsync') as fsync,
       case when not r.rolsuper then nullif(r.rolconnlimit, -1) end as role_connections_max,
       case when not r.rolsuper then nullif(d.datconnlimit, -1) end as database_connections_max,
       used.by_role as role_connections_used, used.in_database as database_connections_used,
       {CONNECTIONS_SQL}
from pg_roles r, pg_database d, lateral (
    select count(*) filter (where a.usesysid = r.oid)::int4 as by_role,
           count(*) filter (where a.datid = d.oid)::int4 as in_database
    from pg_stat_activity a
    where a.usesysid is not null
      and not starts_with(coalesce(a.application_name, ''), 'streamer')) used
where r.rolname = current_user and d.datname = current_database()
"""  # noqa: S608
_BOOKKEEPING_SQL: Final = """
select n.oid is not null as exists,
       coalesce(has_schema_privilege(n.oid, 'usage')
         and has_schema_privilege(n.oid, 'create'), true) as may_use,
       array(select c.relname::text from pg_class c
              where c.relnamespace = n.oid and c.relkind in ('r', 'p', 'v', 'm')
              order by 1) as tables,
       array(select c.relname::text from pg_class c
              where c.relnamespace = n.oid and c.relkind = 'r'
                and exists (select from unnest('{select,insert,update,delete}'::text[]) p
                             where not has_table_privilege(c.oid, p))
              order by 1) as forbidden_tables
from (select 1) one left join pg_namespace n on n.nspname = 'streamer'
"""


async def _read_bookkeeping(connection: TargetConnection) -> BookkeepingFacts:
    (row,) = await connection.fetch(_BOOKKEEPING_SQL)
    tables, forbidden = tuple(row["tables"]), tuple(row["forbidden_tables"])
    version = None
    if "migration" in tables and row["may_use"] and "migration" not in forbidden:
        try:
            version = await read_version(connection)
        except TargetSchemaError:
            version = None  # a table of that name that belongs to another program
    return BookkeepingFacts(row["exists"], row["may_use"], tables, forbidden, version)


async def read_records(
    address: TargetAddress,
    facts: TargetFacts,
    sources: Iterable[SourceFacts],
    target_namespace: str,
) -> None:
    """Read the bookkeeping, if streamer owns the schema and no newer version has written it."""
    bookkeeping = Bookkeeping(address, "streamer check")
    try:
        if await is_installed(bookkeeping):
            async with bookkeeping.connection() as connection:
                facts.deferred = frozenset(await read_deferred_targets(connection))
            facts.installation = await read_installation(bookkeeping)
            by_id = {record.source_id: record for record in await read_source_records(bookkeeping)}
            facts.sources = {record.label: record for record in by_id.values()}
            facts.relations = {
                (by_id[record.source_id].label, record.source): record
                for record in await read_relation_records(bookkeeping)
            }
            async with bookkeeping.connection() as connection:
                columns_by_relation = await read_source_columns(connection)
                facts.removed = await read_removed(connection)
                facts.former_rows = await read_owned_rows(connection)
            facts.filled = {
                key: columns_by_relation[record.relation_id]
                for key, record in facts.relations.items()
                if record.relation_id in columns_by_relation
            }
            for source in sources:
                if source.captures:
                    await _judge_renames(bookkeeping, facts, source, target_namespace)
    finally:
        await bookkeeping.close()


async def read_tables(
    connection: TargetConnection, facts: TargetFacts, sources: Iterable[SourceFacts]
) -> None:
    """Read all target tables, schemas and types that the sources need."""
    sources = list(sources)
    names = sorted({mapping.target for source in sources for mapping in source.mappings})
    kinds = [defined for source in sources for types in source.types.values() for defined in types]
    types = {kind.full_name for kind in kinds}
    namespaces = {name.namespace for name in (*names, *types)}
    for row in await connection.fetch(_NAMESPACES_SQL, list(namespaces)):
        facts.namespaces[row["name"]] = Namespace(row["may_use"], row["may_create"])
    for row in await connection.fetch(_TABLES_SQL, *_columns(names)):
        fields = dict(row)
        name = RelationName(fields.pop("namespace"), fields.pop("name"))
        for listed in ("missing_privileges", "triggers"):
            fields[listed] = tuple(fields[listed])
        facts.tables[name] = TargetTable(relation=await read_relation(connection, name), **fields)
    for name in {m.target for source in sources for m in source.mappings if m.rule.sid}:
        if (table := facts.tables.get(name)) is not None and table.relation is not None:
            facts.shared_types[name] = await read_target_types(connection, table.relation)
    for row in await connection.fetch(_TYPES_SQL, *_columns(sorted(types))):
        facts.types[RelationName(row["namespace"], row["name"])] = row["labels"]
    rows = await connection.fetch(_COLLATIONS_SQL)
    facts.collations = frozenset(row["name"] for row in rows)
    rows = await connection.fetch(_EXTENSIONS_SQL)
    facts.extensions = {row["name"]: row["namespace"] for row in rows if row["namespace"]}
    facts.available_extensions = frozenset(row["name"] for row in rows)
    for source in sources:
        if source.source.sequences:
            followers = await find_sequences(connection, source.sequence_places)
            facts.sequences |= {(source.label, name): s for name, s in followers.items()}
    await connection.execute(f"set statement_timeout = '{STATEMENT_SECONDS}s'")
    rules = [mapping for source in sources for mapping in source.mappings]
    for name in sorted({m.target for m in rules if m.rule.partition_by is not None}):
        await _read_crowded(connection, facts, name)
    if not facts.are_records_readable:
        return
    for source in sources:
        for mapping, relation in source.mapped():
            await _read_occupied(connection, facts, source.source, mapping, relation)


def _columns(names: Iterable[RelationName]) -> tuple[list[str], list[str]]:
    listed = list(names)
    return [name.namespace for name in listed], [name.name for name in listed]


_NAMESPACES_SQL: Final = """
select nspname as name, has_schema_privilege(oid, 'usage') as may_use,
       has_schema_privilege(oid, 'create') as may_create
from pg_namespace where nspname = any ($1::text[])
"""
_TABLES_SQL: Final = f"""
select w.namespace, w.name, c.relkind::text as kind,
       {MISSING_SQL} as missing_privileges,
       {HIDES_ROWS_SQL} as row_security,
       pg_has_role(c.relowner, 'usage') as is_owned,
       exists (select from pg_constraint k
                where k.contype = 'f' and c.oid in (k.conrelid, k.confrelid)) as has_foreign_keys,
       array(select t.tgname::text from pg_trigger t
              where t.tgrelid = c.oid and not t.tgisinternal and t.tgenabled = 'O' order by 1)
         as triggers
from unnest($1::text[], $2::text[]) w (namespace, name)
cross join {NAMED_RELATION} c
"""  # noqa: S608
_TYPES_SQL: Final = f"""
select w.namespace, w.name,
       array(select e.enumlabel::text from pg_enum e
              where e.enumtypid = t.oid order by e.enumsortorder) as labels
from unnest($1::text[], $2::text[]) w (namespace, name)
cross join {NAMED_TYPE} t
"""  # noqa: S608
_COLLATIONS_SQL: Final = """
select quote_ident(n.nspname) || '.' || quote_ident(c.collname) as name
from pg_collation c join pg_namespace n on n.oid = c.collnamespace
where c.collencoding in (-1, (select encoding from pg_database where datname = current_database()))
"""
_EXTENSIONS_SQL: Final = """
select name, (select n.nspname from pg_extension e join pg_namespace n on n.oid = e.extnamespace
               where e.extname = a.name) as namespace
from pg_available_extensions a
"""


async def _read_crowded(
    connection: TargetConnection, facts: TargetFacts, name: RelationName
) -> None:
    """Read whether the default partition of a table has many rows. `check` reports missing
    privileges.
    """
    table = facts.tables.get(name)
    if table is None or table.relation is None or not table.is_owned:
        return
    try:
        if (default := await find_crowded_default(connection, name)) is not None:
            facts.crowded[name] = default
    except StreamerError:
        if connection.is_closed:
            raise


async def _read_occupied(
    connection: TargetConnection,
    facts: TargetFacts,
    source: SourceMapping,
    mapping: RelationMapping,
    relation: SourceRelation,
) -> None:
    """Read whether the target contains rows that prevent a copy."""
    table, rule = facts.tables.get(mapping.target), mapping.rule
    if rule.initial is not Initial.COPY or rule.truncate_target or rule.is_disjoint:
        return
    if facts.owns_rows(source, mapping):
        return
    if table is None or table.relation is None or not facts.needs_copy(source, mapping):
        return
    namespace = facts.namespaces[mapping.target.namespace]
    if not namespace.may_use or "select" in table.missing_privileges or table.row_security:
        return
    sid = written_sid(mapping, relation, table.relation)
    key = (source.label, mapping.source)
    try:
        facts.occupied[key] = await holds_rows(connection, mapping.target, sid)
    except StreamerError as exc:
        if connection.is_closed:
            raise
        facts.occupied[key] = exc.message
