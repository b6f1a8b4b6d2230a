"""Creates missing indexes for foreign keys at the target.

PostgreSQL creates no index on the referencing columns of a foreign key, but readers of the target
join on these columns. streamer considers foreign keys of target tables, and foreign keys of mapped
source tables under target names. A target table that streamer created may lack these constraints.
In a table of several sources, ``sid`` is the first column of an index for a source's foreign key.

PostgreSQL rejects CREATE INDEX CONCURRENTLY on a partitioned table. The partitions get indexes
first; then the table gets an index, which attaches the indexes of the partitions.

streamer builds indexes CONCURRENTLY, one by one, on tables whose sources are all ready and do not
lag. A build that fails or dies leaves an invalid index, which the next build recognizes by its name
and drops. A session lock of the backend marks a build in progress.

The choice of indexes and their SQL are pure; `find_missing_indexes` and `build` access the
databases.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import is_installed
from streamer.bookkeeping.deferred_indexes import read_deferred_targets
from streamer.bookkeeping.relation_records import read_relation_records
from streamer.bookkeeping.server_of_run import connection_of_run
from streamer.bookkeeping.sources import read_source_records
from streamer.errors.error_classes import Retry, StreamerError, TargetContentionError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping, SourceMapping, resolve
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_qualified
from streamer.postgres.session_settings import INDEX_MEMORY_MB, memory_sql
from streamer.schema.indexes_constraints_types import IndexDefinition
from streamer.schema.target_relation import TargetRelation
from streamer.source.catalog import read_flush_lsn, read_relation_names
from streamer.source.connection import fetch_all
from streamer.target.catalog import read_relation
from streamer.target.connection import TargetAddress, TargetConnection, target_connection
from streamer.util.backoff import Backoff
from streamer.util.failpoints import failpoint

PREFIX: Final = "streamer_fk_"
LAG_BYTES_MAX: Final = 16 * 1024 * 1024
"""If a source lags more, streamer builds no indexes on its tables."""
LOCK_SECONDS: Final = 30
"""The time for which a build waits for transactions that use its table, before streamer postpones
the build.
"""
QUEUED_SECONDS: Final = 2
ATTEMPTS: Final = 3

_NAME_BYTES_MAX: Final = 63
_BUILD_LOCK: Final = 0x666B5F696478  # "fk_idx"


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """The referencing side of a foreign key, in target names. ``label``: the name for operators."""

    target: RelationName
    columns: tuple[str, ...]
    label: str
    by_sid: bool = False


@dataclass(frozen=True, slots=True)
class MissingIndex:
    """An index to create, and the state of its creation.

    ``state``: missing (streamer can build the index now), waiting (because of ``reason``), built or
    failed.
    """

    target: RelationName
    columns: tuple[str, ...]
    foreign_keys: tuple[str, ...]
    partitions: tuple[RelationName, ...] | None = None
    state: str = "missing"
    reason: str | None = None

    @property
    def name(self) -> str:
        return index_name(self.target, self.columns)

    @property
    def statements(self) -> list[tuple[RelationName, str]]:
        """Return the statements that create the index, each with its table."""
        if self.partitions is None:
            return [(self.target, self._create(self.target, "concurrently "))]
        leaves = [(leaf, self._create(leaf, "concurrently ")) for leaf in self.partitions]
        return [*leaves, (self.target, self._create(self.target, ""))]

    def _create(self, table: RelationName, how: str) -> str:
        name = quote_identifier(index_name(table, self.columns))
        quoted = quote_qualified(table.namespace, table.name)
        return f"create index {how}{name} on {quoted} ({quote_columns(self.columns)})"

    @property
    def sql(self) -> str:
        return "; ".join(sql for _, sql in self.statements)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "columns": list(self.columns),
            "foreign_keys": list(self.foreign_keys),
            "index": self.name,
            "sql": self.sql,
            "state": self.state,
            "reason": self.reason,
        }


def index_name(target: RelationName, columns: tuple[str, ...]) -> str:
    """Return a readable name for the index, unique to table and columns."""
    identity = "\0".join((target.namespace, target.name, *columns)).encode()
    digest = f"_{hashlib.sha256(identity).hexdigest()[:12]}"
    room = _NAME_BYTES_MAX - len(PREFIX) - len(digest)
    words = "_".join((target.name, *columns)).encode()[:room].decode(errors="ignore")
    return f"{PREFIX}{words}{digest}"


def serves(index: IndexDefinition, columns: tuple[str, ...]) -> bool:
    """Whether *index* finds rows by equality of *columns*.

    The index begins with *columns*, in any order; a ``sid`` among its first columns is optional.
    """
    if not index.is_valid or index.is_partial or index.method not in ("btree", "hash"):
        return False
    without_sid = set(columns) - {SID}
    choices = [set(columns), without_sid | {SID}, without_sid]
    return any(choice and set(index.columns[: len(choice)]) == choice for choice in choices)


def find_missing(
    foreign_keys: Iterable[ForeignKey], indexes: dict[RelationName, list[IndexDefinition]]
) -> list[MissingIndex]:
    """Return the smallest set of indexes that serves all *foreign_keys*; a long index may serve
    short keys, too.
    """
    present = {target: list(existing) for target, existing in indexes.items()}
    labels: dict[tuple[RelationName, tuple[str, ...]], list[str]] = {}
    for key in sorted(foreign_keys, key=lambda k: (k.target, -len(k.columns), k.columns, k.label)):
        columns = (SID, *key.columns) if key.by_sid else key.columns
        planned = [names for target, names in labels if target == key.target]
        equal = next((names for names in planned if set(names) == set(columns)), None)
        if equal is not None:
            labels[key.target, equal].append(key.label)
        elif not any(serves(index, columns) for index in present.get(key.target, [])):
            labels[key.target, columns] = [key.label]
            new = IndexDefinition(0, "", columns=columns)
            present.setdefault(key.target, []).append(new)
    return [MissingIndex(*place, tuple(names)) for place, names in labels.items()]


# ---- facts of the databases -------------------------------------------------------------------

_FOREIGN_KEYS_SQL: Final = f"""
select w.namespace, w.name, k.conname as constraint,
       array(select a.attname::text
               from pg_catalog.unnest(k.conkey) with ordinality as u (attnum, position)
               join pg_catalog.pg_attribute a on a.attrelid = k.conrelid and a.attnum = u.attnum
              order by u.position) as columns
from unnest({{namespaces}}, {{names}}) w (namespace, name)
cross join {NAMED_RELATION} c
join pg_catalog.pg_constraint k on k.conrelid = c.oid
where k.contype = 'f' and k.conparentid = 0
"""


@dataclass(frozen=True, slots=True)
class ForeignKeyFacts:
    """The facts of a source: its mapped tables, their foreign keys, its lag."""

    label: str
    mappings: tuple[RelationMapping, ...]
    foreign_keys: tuple[tuple[RelationName, str, tuple[str, ...]], ...]
    lag_bytes: int | None


async def read_foreign_key_facts(
    source: SourceMapping, bookkeeping: Bookkeeping, target_namespace: str
) -> ForeignKeyFacts:
    """Read the facts of *source*, at the server of `run`. Raises SourceError, MappingError."""
    acknowledged = None
    if await is_installed(bookkeeping):
        records = {record.label: record for record in await read_source_records(bookkeeping)}
        if source.label in records:
            acknowledged = records[source.label].acknowledged_lsn
    async with connection_of_run(source, bookkeeping) as plain:
        names = await read_relation_names(plain, source)
        mappings = resolve(source, names, target_namespace)
        rows = await fetch_all(
            plain,
            _FOREIGN_KEYS_SQL.format(namespaces="%s::text[]", names="%s::text[]"),
            [mapping.source.namespace for mapping in mappings],
            [mapping.source.name for mapping in mappings],
        )
        end = await read_flush_lsn(plain)
    return ForeignKeyFacts(
        source.label,
        tuple(mappings),
        tuple(
            (RelationName(row["namespace"], row["name"]), row["constraint"], tuple(row["columns"]))
            for row in rows
        ),
        None if acknowledged is None else max(0, end - acknowledged),
    )


async def find_missing_indexes(
    address: TargetAddress, bookkeeping: Bookkeeping, sources: Iterable[ForeignKeyFacts]
) -> list[MissingIndex]:
    """Return the missing indexes of the target, with states that show whether a build can begin
    now.
    """
    sources = list(sources)
    async with target_connection(address, "streamer indexes") as target:
        tables: dict[RelationName, TargetRelation] = {}
        for name in sorted({m.target for source in sources for m in source.mappings}):
            relation = await read_relation(target, name)
            if relation is not None:
                tables[name] = relation
        indexes = {name: table.indexes for name, table in tables.items()}
        keys = await _target_keys(target, list(tables))
        for source in sources:
            keys += _source_keys(source, tables)
        missing = [
            replace(index, partitions=await _read_partitions(target, tables[index.target]))
            for index in find_missing(keys, indexes)
        ]
    obstacles = await _obstacles(address, bookkeeping, sources, tables)
    return [
        index
        if (reason := obstacles.get(index.target)) is None
        else replace(index, state="waiting", reason=reason)
        for index in missing
    ]


async def _read_partitions(
    target: TargetConnection, relation: TargetRelation
) -> tuple[RelationName, ...] | None:
    """Return the partitions that hold rows; None for a table that is not partitioned."""
    if not relation.is_partitioned:
        return None
    rows = await target.fetch(
        "select n.nspname as namespace, c.relname as name"
        " from pg_catalog.pg_partition_tree($1::int8::oid::regclass) t"
        " join pg_catalog.pg_class c on c.oid = t.relid"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
        " where t.isleaf and c.relkind = 'r' order by 1, 2",
        relation.oid,
    )
    return tuple(RelationName(row["namespace"], row["name"]) for row in rows)


async def _target_keys(target: TargetConnection, names: list[RelationName]) -> list[ForeignKey]:
    rows = await target.fetch(
        _FOREIGN_KEYS_SQL.format(namespaces="$1::text[]", names="$2::text[]"),
        [name.namespace for name in names],
        [name.name for name in names],
    )
    return [
        ForeignKey(
            RelationName(row["namespace"], row["name"]),
            tuple(row["columns"]),
            f"{row['constraint']} of the target",
        )
        for row in rows
    ]


def _source_keys(
    source: ForeignKeyFacts, tables: dict[RelationName, TargetRelation]
) -> list[ForeignKey]:
    """Return a source's foreign keys under target names, if the target has the columns."""
    by_name = {mapping.source: mapping for mapping in source.mappings}
    keys = []
    for name, constraint, source_columns in source.foreign_keys:
        mapping = by_name[name]
        table = tables.get(mapping.target)
        columns = [mapping.target_column(column) for column in source_columns]
        if table is None or any(c is None or c not in table.columns for c in columns):
            continue
        target_columns = tuple(column for column in columns if column is not None)
        by_sid = mapping.sid is not None and table.has_sid and SID not in target_columns
        keys.append(
            ForeignKey(table.name, target_columns, f"{constraint} of {source.label} {name}", by_sid)
        )
    return keys


async def _obstacles(
    address: TargetAddress,
    bookkeeping: Bookkeeping,
    sources: list[ForeignKeyFacts],
    tables: dict[RelationName, TargetRelation],
) -> dict[RelationName, str]:
    """Return the reason for each table that must not get an index now."""
    if not await is_installed(bookkeeping):
        return dict.fromkeys(tables, "no table is copied yet")
    states: dict[str, dict[str, str]] = {}
    labels = {record.source_id: record.label for record in await read_source_records(bookkeeping)}
    for relation in await read_relation_records(bookkeeping):
        label = labels.get(relation.source_id, "a source")
        states.setdefault(relation.target, {})[label] = relation.state
    async with target_connection(address, "streamer indexes") as target:
        deferred = set(await read_deferred_targets(target))
    lags = {source.label: source.lag_bytes for source in sources}
    obstacles = {}
    for name in tables:
        reason = "the table is not copied yet" if str(name) not in states else None
        for label, state in states.get(str(name), {}).items():
            lag = lags.get(label)
            if state != "ready":
                reason = f"the table of {label} is in state {state}"
            elif lag is not None and lag > LAG_BYTES_MAX:
                reason = f"{label} lags by {lag} bytes"
        if str(name) in deferred:
            reason = "the copy has not restored the indexes yet"
        if reason is not None:
            obstacles[name] = reason
    return obstacles


# ---- building ----------------------------------------------------------------------------------

_ENOUGH_MEMORY_SQL: Final = memory_sql("maintenance_work_mem", INDEX_MEMORY_MB, is_local=False)

_LEFTOVERS_SQL: Final = f"""
select pg_catalog.format('%I.%I', w.namespace, x.relname) as quoted
from unnest($1::text[], $2::text[]) w (namespace, name)
cross join {NAMED_RELATION} t
join pg_catalog.pg_index i on i.indrelid = t.oid
join pg_catalog.pg_class x on x.oid = i.indexrelid
where not (i.indisvalid and i.indisready) and pg_catalog.starts_with(x.relname, $3)
  and x.relkind = 'i' and pg_catalog.pg_has_role(x.relowner, 'usage')
"""


async def build(address: TargetAddress, missing: MissingIndex) -> None:
    """Create an index. Raises TargetError; the next attempt drops the remains of a failed attempt.

    A lock that is not available, or a deadlock with a session that waits for the build, leads to a
    few retries.
    """
    backoff = Backoff(first=1.0)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with target_connection(address, "streamer indexes") as target:
                await _build_once(target, missing)
            return
        except TargetContentionError:
            if attempt == ATTEMPTS:
                raise
        await backoff.wait()


async def _build_once(target: TargetConnection, missing: MissingIndex) -> None:
    await _begin(target)
    tables = [table for table, _ in missing.statements]
    await _drop_leftovers(target, tables)
    failpoint("indexes.before_build")
    remaining = missing.statements
    try:
        for number, (table, sql) in enumerate(missing.statements):
            remaining = missing.statements[number:]
            is_concurrent = table != missing.target or missing.partitions is None
            if is_concurrent and await _has_index(target, table, missing.columns):
                continue  # an earlier attempt created this index
            # While this session waits for a strong lock, later sessions queue behind it.
            seconds = LOCK_SECONDS if is_concurrent else QUEUED_SECONDS
            await target.execute(f"set lock_timeout = '{seconds}s'")
            await target.execute(sql)
    except StreamerError as exc:
        if not target.is_closed:
            with suppress(StreamerError):  # otherwise the next build drops the leftovers
                await _drop_leftovers(target, tables)
        if exc.retry is not Retry.TIMED:
            sqls = at_target(*(sql for _, sql in remaining))
            exc.remedy = Remedy.of("run at the target as the table's owner: ", sqls)
        raise


async def _begin(target: TargetConnection) -> None:
    # A session lock, because the backend may continue the build after its client dies.
    if not await target.fetch_value("select pg_catalog.pg_try_advisory_lock($1)", _BUILD_LOCK):
        raise TargetContentionError("target: another process builds indexes")
    await target.execute(f"set lock_timeout = '{LOCK_SECONDS}s'")
    await target.fetch(_ENOUGH_MEMORY_SQL)


async def _has_index(
    target: TargetConnection, table: RelationName, columns: tuple[str, ...]
) -> bool:
    relation = await read_relation(target, table)
    indexes = [] if relation is None else relation.indexes
    return any(index.columns == columns and index.finds_rows for index in indexes)


async def drop_leftovers(address: TargetAddress, names: Iterable[RelationName]) -> None:
    """Drop the remains of dead builds on tables. Raises TargetContentionError during a build."""
    async with target_connection(address, "streamer indexes") as target:
        await _begin(target)
        await _drop_leftovers(target, names)


async def _drop_leftovers(target: TargetConnection, names: Iterable[RelationName]) -> None:
    names = list(names)
    namespaces = [name.namespace for name in names]
    rows = await target.fetch(_LEFTOVERS_SQL, namespaces, [name.name for name in names], PREFIX)
    for row in rows:
        await target.execute(f"drop index concurrently if exists {row['quoted']}")
