"""The snapshot of a round of copies, and the definitions of tables under the snapshot.

A slot exports a snapshot until the next command on the slot's connection, and retains WAL
meanwhile. So a session of the round imports the snapshot and exports it again. Then the slot is
dropped, so that it retains no WAL for the length of a copy. The session holds the snapshot, but no
lock between two reads of tables.

The round reads a table's definition under this snapshot and a lock, so a copy reads exactly the
columns of that definition. The lock ends at once. Each part checks, under a second lock, that the
table still has the same storage and the same columns (`streamer.copy.parts.part_copier`). So the
application's DDL waits for the parts in progress, not for the copy.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Final, Self

import psycopg
from psycopg.rows import DictRow

from streamer.copy.parts.ctid_ranges import Heap
from streamer.errors.error_classes import SnapshotExpiredError, SourceConnectionError
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_qualified
from streamer.postgres.sqlstate import LOCK_NOT_AVAILABLE
from streamer.source.catalog import SourceRelation, SourceServer, read_relations
from streamer.source.connection import (
    Connection,
    connect,
    fetch_all,
    fetch_one,
    first_line,
    translating,
)
from streamer.source.server.idle_connections import IdleConnections
from streamer.source.server.timeline import check_same_server_by_query
from streamer.source.server.wait_limits import set_lock_timeout
from streamer.source.slot_and_publications.slot import ExportedSnapshot
from streamer.source.tables.rewritten_tables import STORAGE_SQL, Storage

APPLICATION_NAME: Final = "streamer snapshot"


async def open_copy_session(
    source: SourceMapping, server: SourceServer, application_name: str
) -> Connection:
    """Return a session of a copy at *server*, which waits for no lock for long.

    Raises SourceConnectionError, also for another server.
    """
    plain = await connect(source)
    try:
        with translating(source.label):
            await check_same_server_by_query(plain, server)
            await set_lock_timeout(plain)
            await plain.execute(f"set application_name = '{application_name}'".encode())
    except BaseException:
        await plain.close()
        raise
    return plain


class HeldSnapshot:
    """A snapshot that tasks import, for as long as this object is open."""

    def __init__(
        self,
        plain: Connection,
        snapshot_name: str,
        exported: ExportedSnapshot,
        session: AsyncExitStack,
    ) -> None:
        """*session*: returns *plain* to its pool."""
        self.plain = plain
        self.snapshot_name = snapshot_name
        self.consistent_point = exported.consistent_point
        self.source_time = exported.source_time
        self.taken_at = time.monotonic()
        self._session = session
        self._is_held = True

    @classmethod
    async def take_over(
        cls,
        sources: IdleConnections,
        source: SourceMapping,
        server: SourceServer,
        exported: ExportedSnapshot,
    ) -> Self:
        """Hold the snapshot that a slot exported, and drop a temporary slot.

        The session of *sources* has just read the tables, so their catalogs are in its caches.
        Raises SnapshotExpiredError, SourceConnectionError.
        """
        async with AsyncExitStack() as session:
            plain = await session.enter_async_context(sources.connection(source))
            await check_same_server_by_query(plain, server)
            await set_lock_timeout(plain)
            await plain.execute("begin isolation level repeatable read read only")
            await import_snapshot(plain, exported.snapshot_name)
            await plain.execute(f"set local application_name = '{APPLICATION_NAME}'".encode())
            row = await fetch_one(plain, "select pg_catalog.pg_export_snapshot() as name")
            await exported.close()
            return cls(plain, row["name"], exported, session.pop_all())

    async def check(self) -> None:
        """Raise SourceConnectionError if the session, and so the snapshot, is lost."""
        try:
            await self.plain.execute("select 1")
        except psycopg.Error as exc:
            raise SourceConnectionError(
                "the connection that holds the snapshot of the copy was lost"
            ) from exc

    async def release(self) -> None:
        """End the snapshot after the last read, and leave the session to the next task."""
        if self._is_held:
            with suppress(psycopg.Error):  # the pool closes a lost connection
                await self.plain.rollback()
            self._is_held = False
            await self._session.aclose()

    async def close(self) -> None:
        """End a snapshot and its session at once, without an answer of the source."""
        if self._is_held:
            self._is_held = False
            await self.plain.close()
            await self._session.aclose()


async def import_snapshot(plain: Connection, name: str) -> None:
    """Import a snapshot into the transaction that has just begun. Raises SnapshotExpiredError."""
    try:
        await plain.execute(f"set transaction snapshot '{name}'".encode())
    except psycopg.Error as exc:
        if exc.sqlstate is None:
            raise
        raise SnapshotExpiredError(
            f"the snapshot of the copy cannot be used: {first_line(exc)}"
        ) from exc


# ---- tables under the snapshot -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableSeen:
    """A table under the snapshot, read under a lock."""

    relation: SourceRelation
    heaps: tuple[Heap, ...]
    can_split: bool
    storage: dict[int, Storage]
    leaves: dict[int, str] | None = None
    """The partitions to record after the copy of a table in sync."""

    @property
    def size_bytes(self) -> int:
        return sum(heap.size_bytes for heap in self.heaps)


def is_same(first: SourceRelation, second: SourceRelation) -> bool:
    """Whether two definitions of a table agree in all but the size. Pure."""
    sizes = {"row_count_estimate": 0, "size_bytes": 0}
    return replace(first, **sizes) == replace(second, **sizes)  # type: ignore[arg-type]


async def read_table_seen(
    plain: Connection, name: RelationName, *, is_partitioned: bool
) -> TableSeen | None:
    """Lock a table and read its definition. Return None if the table was dropped, or if its pages
    or columns differ from the snapshot's.

    The lock ends with the caller's savepoint. Raises SourceContentionError.
    """
    try:
        await plain.execute(lock_sql(name, is_partitioned=is_partitioned).encode())
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    relation = (await read_relations(plain, [name])).get(name)
    if relation is None or relation.is_partitioned != is_partitioned:
        return None
    trees = [relation.oid] if is_partitioned else []
    return _seen(relation, await fetch_all(plain, _HEAPS_SQL, [relation.oid], trees))


async def read_tables_seen(
    plain: Connection, names: Sequence[RelationName]
) -> dict[RelationName, TableSeen]:
    """Read many tables that are not partitioned, as `read_table_seen` does, with a few statements.

    Return no table if any was dropped or is locked, and omit tables that differ from the snapshot.
    The session does not wait for locks: a session that holds locks and waits for a further lock
    could deadlock with the application. The locks end with the caller's savepoint.
    """
    listed = ", ".join(f"only {quote_qualified(name.namespace, name.name)}" for name in names)
    try:
        await plain.execute(f"lock table {listed} in access share mode nowait".encode())
    except psycopg.OperationalError as exc:
        if exc.sqlstate != LOCK_NOT_AVAILABLE:
            raise
        return {}
    except psycopg.ProgrammingError:  # `read_table_seen` finds the table and the reason
        return {}
    relations = await read_relations(plain, list(names))
    by_root: dict[int, list[DictRow]] = {relation.oid: [] for relation in relations.values()}
    for row in await fetch_all(plain, _HEAPS_SQL, list(by_root), []):
        by_root[row["root"]].append(row)
    tables = {
        name: _seen(relation, by_root[relation.oid])
        for name, relation in relations.items()
        if not relation.is_partitioned
    }
    return {name: seen for name, seen in tables.items() if seen is not None}


def _seen(relation: SourceRelation, rows: list[DictRow]) -> TableSeen | None:
    if any(row["is_rewritten"] for row in rows):
        return None
    heaps, can_split = _heaps(relation, rows)
    storage = {row["oid"]: Storage.of(row["storage"]) for row in rows if row["is_table"]}
    return TableSeen(relation, heaps, can_split, storage)


def lock_sql(name: RelationName, *, is_partitioned: bool) -> str:
    """Return the statement that protects a table and its partitions from ALTER and rewrites.
    Pure.
    """
    only = "" if is_partitioned else "only "
    quoted = quote_qualified(name.namespace, name.name)
    return f"lock table {only}{quoted} in access share mode"


# pg_inherits shows the partition tree of the snapshot. Functions about partitions and sizes show
# the present state, which does not change under the lock.
_HEAPS_SQL: Final = f"""
with recursive tree (root, oid) as (
    select r.oid, r.oid from pg_catalog.unnest(%s::oid[]) r (oid)
    union all
    select t.root, i.inhrelid from tree t
    join pg_catalog.pg_inherits i on i.inhparent = t.oid
    where t.root = any (%s::oid[])
)
select t.root::int8 as root, c.oid::int8 as oid,
       pg_catalog.format('%%I.%%I', n.nspname, c.relname) as quoted,
       c.relkind = 'r' as is_table, c.relfilenode::int8 as filenode, {STORAGE_SQL} as storage,
       c.relkind = 'r'
         and c.relfilenode is distinct from pg_catalog.pg_relation_filenode(c.oid) as is_rewritten,
       coalesce(pg_catalog.pg_table_size(c.oid), 0) as size_bytes,
       coalesce(pg_catalog.pg_relation_size(c.oid), 0)
         / pg_catalog.current_setting('block_size')::int8 as page_count,
       case when c.relpages > 0 then greatest(c.reltuples, 0) / c.relpages else 0 end
         as rows_per_page,
       pg_catalog.has_table_privilege(c.oid, 'select') as selectable,
       array(select a.attnum::int4 from pg_catalog.pg_attribute a
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
              order by (select r.attnum from pg_catalog.pg_attribute r
                         where r.attrelid = t.root and r.attname = a.attname)) as numbers
from tree t
join pg_catalog.pg_class c on c.oid = t.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind <> 'p'
order by c.oid
"""


def _heaps(relation: SourceRelation, rows: list[DictRow]) -> tuple[tuple[Heap, ...], bool]:
    """Return the relations with storage under *relation*, and whether COPY can read ranges of
    pages.
    """
    tables = [row for row in rows if row["is_table"]]
    if len(tables) == len(rows) and all(row["selectable"] for row in rows):
        heaps = tuple(
            Heap(
                f"only {row['quoted']}",
                row["size_bytes"],
                row["page_count"],
                ((row["oid"], row["filenode"]),),
                tuple(row["numbers"]),
                int(row["rows_per_page"] * row["page_count"]),
                (row["quoted"], row["oid"]),
            )
            for row in rows
        )
        return heaps or (_whole(relation, tables),), True
    return (_whole(relation, tables),), False


def _whole(relation: SourceRelation, tables: list[DictRow]) -> Heap:
    """Return a partitioned table as a single heap, which the copy reads by the name of the root."""
    quoted = quote_qualified(relation.name.namespace, relation.name.name)
    return Heap(
        quoted,
        sum(row["size_bytes"] for row in tables),
        max(1, sum(row["page_count"] for row in tables)),
        tuple((row["oid"], row["filenode"]) for row in tables),
        tuple(column.number for column in relation.columns),
        named=(quoted, relation.oid),
    )
