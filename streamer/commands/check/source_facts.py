"""The facts of a source for a check. The module neither judges nor writes."""

import asyncio
import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from streamer.commands.check.disjoint_key_findings import IntegerKeys, read_key_range
from streamer.commands.check.findings import Finding
from streamer.commands.check.rule_findings import SeenTable, resolve_rules
from streamer.errors.error_classes import MappingError, SourceConnectionError, StreamerError
from streamer.mapping.expressions import ExpressionFacts
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import DdlCapture
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.mapping.sequence_places import SequencePlace, places
from streamer.postgres.describing import USER_OIDS_BEGIN
from streamer.postgres.quoting import quote_qualified
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.schema.table_definition import TableDefinition
from streamer.schema_changes.read_definitions import read_at_source
from streamer.source.capture.ddl_capture import Capture, read_capture
from streamer.source.catalog import (
    OF_EXTENSION_SQL,
    SourceRelation,
    SourceServer,
    read_relations,
    read_server,
    read_server_by_query,
)
from streamer.source.connection import Connection, connection, fetch_all, fetch_one
from streamer.source.guarded_identities import read_candidates
from streamer.source.replica_identity import KeyCandidates
from streamer.source.server.primaries_after_failover import Primary, prefer_newest
from streamer.source.slot_and_publications.ownership import SourceObjects, read_source_objects
from streamer.source.slot_and_publications.publication import Publication, read_publications
from streamer.source.slot_and_publications.slot import Slot, read_slot
from streamer.source.slot_and_publications.standbys import (
    StandbyState,
    read_replication_settings,
    read_standbys,
)
from streamer.source.synchronous_commit import LISTED_SQL
from streamer.source.tables.bytewise_columns import read_bytewise
from streamer.source.tables.distant_keys import find_distant
from streamer.source.tables.expression_check import describe_condition, describe_expressions
from streamer.source.tables.source_sequences import SourceSequence, read_sequences
from streamer.source.tables.user_defined_types import read_types
from streamer.source.timeline_branches import KnownServer
from streamer.target.foreign_functions import CALLS_SQL, ForeignCall, calls_parameters

READ_SECONDS: Final = 60.0
"""A query of the catalogs takes milliseconds; a slower query waits for a lock on a table."""
LONG_SECONDS: Final = 5.0
"""The check reports a transaction that has run for longer: a new slot would wait for its end."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a source's server, and facts that the role can read there."""

    encoding: str
    may_create: bool
    slots: int
    walsenders: int
    max_connections: int
    connections_reserved: int
    connections_used: int
    """Sessions of programs other than streamer, without walsenders."""
    large_objects: int
    is_target: bool
    locale: str = ""
    """Provider, collation and character types of the database."""
    may_write_heartbeats: bool = True
    """Whether streamer's role may commit heartbeats."""
    server_started: str = ""
    """The start time, because a server and a copy of it share the system identifier."""
    is_synchronous: bool = False
    """Whether commits wait until streamer confirms them."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction for which a new slot would wait. ``seconds``: its age; None if the role may not
    see the age.
    """

    pid: int
    user: str
    database: str
    seconds: int | None


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """A prepared transaction for which a new slot would wait."""

    gid: str
    database: str


@dataclass(slots=True)
class SourceFacts:
    """The facts of a source. ``error``: why facts are missing, unless ``is_complete``."""

    source: SourceMapping
    error: StreamerError | None = None
    server: SourceServer | None = None
    usage: Usage | None = None
    is_complete: bool = False
    slot: Slot | None = None
    replication: dict[str, str] = field(default_factory=dict)
    """Settings that decide about slots on standbys."""
    standbys: list[StandbyState] = field(default_factory=list)
    """The standby servers of the url, if the slot must survive a failover."""
    primaries: list[Primary] = field(default_factory=list)
    """The hosts of the url that accept writes, if the url lists several hosts."""
    objects: SourceObjects | None = None
    """The owners of the slot and publications."""
    seen: list[SeenTable] = field(default_factory=list)
    mappings: list[RelationMapping] = field(default_factory=list)
    mapping_findings: list[Finding] = field(default_factory=list)
    relations: dict[RelationName, SourceRelation] = field(default_factory=dict)
    candidates: dict[int, KeyCandidates] = field(default_factory=dict)
    """The possible replica identities of tables and partitions, by OID."""
    expressions: dict[RelationName, ExpressionFacts] = field(default_factory=dict)
    expression_errors: dict[RelationName, StreamerError] = field(default_factory=dict)
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rows and bytes of tables without statistics, by OID. `run` does not know these sizes."""
    with_large_values: frozenset[int] = frozenset()
    """The OIDs of tables whose rule has expressions, and whose TOAST table has values."""
    key_ranges: dict[RelationName, IntegerKeys] = field(default_factory=dict)
    """The keys of tables whose rule says `keys: disjoint`."""
    usable_namespaces: frozenset[str] = frozenset()
    bytewise: dict[int, frozenset[str]] = field(default_factory=dict)
    """Columns of text that sort by bytes, by the OIDs of the tables."""
    distant: frozenset[int] = frozenset()
    """The OIDs of large tables with neighbouring keys in distant pages."""
    capture: Capture | None = None
    sequences: list[SourceSequence] = field(default_factory=list)
    sequence_places: dict[RelationName, SequencePlace] = field(default_factory=dict)
    types: dict[RelationName, list[DefinedType]] = field(default_factory=dict)
    definitions: dict[RelationName, TableDefinition] = field(default_factory=dict)
    """The definitions of tables whose rule has a `create` beyond columns."""
    calls: list[ForeignCall] = field(default_factory=list)
    """Calls in expressions that the target will refuse, if names have the same meaning there."""
    publications: dict[str, Publication] = field(default_factory=dict)
    open_transactions: list[OpenTransaction] = field(default_factory=list)
    prepared_transactions: list[PreparedTransaction] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def role(self) -> str | None:
        """The role of the server: 'primary' or 'standby'; None without an answer."""
        if self.server is None:
            return None
        return "standby" if self.server.in_recovery else "primary"

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the source is unreachable or refuses streamer, so that the facts are unknown."""
        return self.server is None and self.error is not None and self.error.exit_code == 3

    @property
    def captures(self) -> bool:
        """Whether the source reports changes of definitions in its stream."""
        return self.capture is not None and self.capture.token is not None

    def size_of(self, relation: SourceRelation) -> tuple[int, int]:
        """Return the approximate number of rows, and of bytes."""
        estimate = relation.row_count_estimate, relation.size_bytes
        return self.sizes.get(relation.oid, estimate)

    def mapped(self) -> Iterable[tuple[RelationMapping, SourceRelation]]:
        """Yield the mapped relations with their definitions."""
        for mapping in self.mappings:
            relation = self.relations.get(mapping.source)
            if relation is not None:
                yield mapping, relation


async def read_source(source: SourceMapping, target_namespace: str) -> SourceFacts:
    """Read the facts for a check; an error becomes part of the facts."""
    facts = SourceFacts(source)
    try:
        async with asyncio.timeout(READ_SECONDS):
            await _read(facts, target_namespace)
    except TimeoutError:
        facts.error = SourceConnectionError(
            f"reading its catalogs took longer than {READ_SECONDS:g} s",
            hint="a session may hold a lock on a table: see pg_locks at the source",
        )
    except StreamerError as exc:
        facts.error = exc
    return facts


async def read_server_again(facts: SourceFacts) -> None:
    """Read the position of a source again; after an error, keep the earlier position."""
    with contextlib.suppress(StreamerError):
        async with connection(facts.source) as plain:
            facts.server = await read_server_by_query(plain)


async def _read(facts: SourceFacts, target_namespace: str) -> None:
    source = facts.source
    facts.primaries = await prefer_newest(source, KnownServer())
    async with connection(source) as plain:
        server = await read_server_by_query(plain)
        facts.usage = usage = Usage(**await fetch_one(plain, _USAGE_SQL))
        facts.server = server
        earlier = {} if server.in_recovery else await _read_transactions(plain)
        facts.slot = await read_slot(plain, source.slot)
        facts.objects = await read_source_objects(plain, source)
        facts.replication = await read_replication_settings(plain)
        if source.failover and not server.in_recovery:
            facts.standbys = await read_standbys(source)
        facts.seen = [SeenTable(**row) for row in await fetch_all(plain, _SEEN_SQL)]
        facts.mappings, facts.mapping_findings = resolve_rules(source, facts.seen, target_namespace)
        await _read_relations(plain, facts)
        facts.sequences = await read_sequences(plain)
        facts.sequence_places = places(facts.sequences, facts.mappings, target_namespace)
        if source.ddl is DdlCapture.CAPTURE:
            facts.capture = await read_capture(plain, source)
        facts.publications = await read_publications(plain, source, server.version)
        rows = await fetch_all(plain, "select gid, database from pg_catalog.pg_prepared_xacts")
        facts.prepared_transactions = [PreparedTransaction(**row) for row in rows]
        if earlier:
            later = await _read_transactions(plain)
            facts.open_transactions = [later[key] for key in later if key in earlier]
    facts.is_complete = True
    if server.role_may_replicate and usage.walsenders < server.max_wal_senders:
        # A proxy or firewall may accept ordinary connections and refuse replication.
        async with connection(source, replication=True) as replication:
            await read_server(replication)


CONNECTIONS_SQL: Final = """
       pg_catalog.current_setting('max_connections')::int4 as max_connections,
       pg_catalog.current_setting('superuser_reserved_connections')::int4
         + coalesce(pg_catalog.current_setting('reserved_connections', true)::int4, 0)
         as connections_reserved,
       (select pg_catalog.count(*)::int4 from pg_catalog.pg_stat_activity a
         where a.usesysid is not null
           and not pg_catalog.starts_with(coalesce(a.application_name, ''), 'streamer')
           and a.pid not in (select r.pid from pg_catalog.pg_stat_replication r
                              where r.pid is not null)) as connections_used"""
"""Columns of the limit on sessions, and of the sessions of programs other than streamer."""
_USAGE_SQL: Final = f"""
select pg_catalog.pg_postmaster_start_time()::text as server_started,
    pg_catalog.pg_encoding_to_char(d.encoding) as encoding,
       pg_catalog.concat_ws(' ', pg_catalog.to_jsonb(d) ->> 'datlocprovider', d.datcollate,
                            d.datctype, coalesce(pg_catalog.to_jsonb(d) ->> 'datlocale',
                                                 pg_catalog.to_jsonb(d) ->> 'daticulocale'))
         as locale,
       pg_catalog.has_database_privilege(d.oid, 'create') as may_create,
       (select pg_catalog.has_function_privilege(oid, 'execute') from pg_catalog.pg_proc
         where pronamespace = 'pg_catalog'::pg_catalog.regnamespace
           and proname = 'pg_logical_emit_message'
           and proargtypes[2] = 'text'::pg_catalog.regtype) as may_write_heartbeats,
       (select pg_catalog.count(*) from pg_catalog.pg_replication_slots) as slots,
       (select pg_catalog.count(*) from pg_catalog.pg_stat_replication) as walsenders,
       {CONNECTIONS_SQL},
       (select pg_catalog.count(*) from pg_catalog.pg_largeobject_metadata) as large_objects,
       exists (select from pg_catalog.pg_replication_origin
                where pg_catalog.starts_with(roname, 'streamer_' || d.oid || '_')) as is_target,
       {LISTED_SQL} as is_synchronous
from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()
"""  # noqa: S608

# Every relation that a rule could match, even if streamer cannot replicate the relation.
_SEEN_SQL: Final = f"""
select c.oid::int8 as oid, n.nspname as namespace, c.relname as name, c.relkind::text as kind,
       c.relpersistence::text as persistence,
       case when c.relispartition then
         (select array[rn.nspname::text, rc.relname::text]
            from pg_catalog.pg_class rc join pg_catalog.pg_namespace rn on rn.oid = rc.relnamespace
           where rc.oid = pg_catalog.pg_partition_root(c.oid)) end as root,
       array(select array[pn.nspname::text, pc.relname::text]
          from pg_catalog.pg_inherits i join pg_catalog.pg_class pc on pc.oid = i.inhparent
          join pg_catalog.pg_namespace pn on pn.oid = pc.relnamespace
         where i.inhrelid = c.oid and not c.relispartition order by i.inhseqno) as parents,
       {OF_EXTENSION_SQL} as extension
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'f') and n.nspname <> 'information_schema'
  and (n.nspname !~ '^pg_' or c.relpersistence = 't') and n.nspname !~ '^pg_toast'
  and coalesce(pg_catalog.obj_description(n.oid, 'pg_namespace'), '')
    not like 'streamer captures definitions%'
order by 2, 3
"""  # noqa: S608


async def _read_transactions(plain: Connection) -> dict[tuple[int, str], OpenTransaction]:
    """Read the sessions that changed data in a transaction that has been open for long.

    If the role may not see the start of a transaction, the list includes the transaction if
    the second read still finds it.
    """
    return {
        (row["pid"], row["virtual"]): OpenTransaction(
            row["pid"], row["username"], row["database"], row["seconds"]
        )
        for row in await fetch_all(plain, _TRANSACTIONS_SQL, LONG_SECONDS)
    }


# A session with a transaction id holds a lock on that id. A session without a user is a short
# background process.
_TRANSACTIONS_SQL: Final = """
select distinct l.pid, l.virtualtransaction as virtual, a.usename as username,
       a.datname as database,
       pg_catalog.date_part('epoch', pg_catalog.now() - a.xact_start)::int4 as seconds
from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted
  and l.pid <> pg_catalog.pg_backend_pid() and a.usename is not null
  and coalesce(a.xact_start <= pg_catalog.now() - pg_catalog.make_interval(secs => %s), true)
order by l.pid
"""


async def _read_relations(plain: Connection, facts: SourceFacts) -> None:
    assert facts.server is not None
    names = [mapping.source for mapping in facts.mappings]
    facts.relations = await read_relations(plain, names)
    facts.bytewise = await read_bytewise(plain, [r.oid for r in facts.relations.values()])
    facts.distant = await find_distant(plain, facts.relations.values())
    await _read_sizes(plain, facts)
    with_definitions = [
        relation.oid for mapping, relation in facts.mapped() if mapping.rule.includes_definitions
    ]
    definitions = await read_at_source(plain, with_definitions)
    facts.definitions = {definition.name: definition for definition in definitions.values()}
    identities = [relation.identity for relation in facts.relations.values()]
    facts.candidates = await read_candidates(plain, identities)
    rows = await fetch_all(
        plain,
        "select nspname as name from pg_catalog.pg_namespace"
        " where pg_catalog.has_schema_privilege(oid, 'usage')",
    )
    facts.usable_namespaces = frozenset(row["name"] for row in rows)
    for mapping, relation in facts.mapped():
        rule = mapping.rule
        if rule.is_disjoint and (keys := await read_key_range(plain, relation)) is not None:
            facts.key_ranges[mapping.source] = keys
        if rule.checked_expressions:
            try:
                described = await describe_expressions(plain, mapping, relation)
                facts.expressions[mapping.source] = described
                if rule.copy_where is not None:
                    where = rule.copy_where
                    await describe_condition(plain, mapping, relation, where, "copy_where")
            except MappingError as exc:
                facts.expression_errors[mapping.source] = exc
    with_expressions = [r.oid for mapping, r in facts.mapped() if mapping.rule.checked_expressions]
    rows = await fetch_all(plain, _LARGE_SQL, with_expressions)
    facts.with_large_values = frozenset(row["oid"] for row in rows)
    types: dict[RelationName, DefinedType] = {}
    for name, relation in facts.relations.items():
        used = {c.type_oid for c in relation.columns if c.type_oid >= USER_OIDS_BEGIN}
        if used:
            facts.types[name] = await read_types(plain, used)
            types |= {kind.full_name: kind for kind in facts.types[name]}
    # The server resolves no name in a schema that the role may not use.
    usable = [name for name in facts.relations if name.namespace in facts.usable_namespaces]
    tables_of_rules = [quote_qualified(name.namespace, name.name) for name in usable]
    parameters = calls_parameters(tables_of_rules, list(types))
    named = {f"p{number}": value for number, value in enumerate(parameters, 1)}
    cursor = await plain.execute(_CALLS_SQL, named)
    facts.calls = [ForeignCall(**row) for row in await cursor.fetchall()]


async def _read_sizes(plain: Connection, facts: SourceFacts) -> None:
    """Read the sizes of tables without statistics, unless a session has locked the table."""
    unknown = [r.oid for r in facts.relations.values() if not r.row_count_estimate]
    rows = await fetch_all(plain, _SIZES_SQL, unknown)
    facts.sizes = {row["oid"]: (row["rows"], row["bytes"]) for row in rows}


_LEAVES_SQL: Final = """
  from pg_catalog.unnest(%s::int8[]) t (oid),
       lateral (select t.oid::oid as relid union select relid
                  from pg_catalog.pg_partition_tree(t.oid::oid) where isleaf) l
"""
_SIZES_SQL: Final = f"""
select t.oid, pg_catalog.sum(pg_catalog.pg_table_size(l.relid))::int8 as bytes,
       pg_catalog.sum(pg_catalog.pg_stat_get_live_tuples(l.relid))::int8 as rows {_LEAVES_SQL}
 where not exists (select from pg_catalog.pg_locks k
                    where k.relation = l.relid and k.mode = 'AccessExclusiveLock' and k.granted)
 group by t.oid having pg_catalog.sum(pg_catalog.pg_table_size(l.relid)) is not null
"""  # noqa: S608
_LARGE_SQL: Final = f"""
select distinct t.oid {_LEAVES_SQL}
  join pg_catalog.pg_class c on c.oid = l.relid and c.reltoastrelid <> 0
 where pg_catalog.pg_relation_size(c.reltoastrelid) > 0
"""
_CALLS_SQL: Final = re.sub(r"\$(\d)", r"%(p\1)s", CALLS_SQL.replace("%", "%%")).encode()
"""The query with the parameters of psycopg."""
