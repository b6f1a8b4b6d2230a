"""Creates and removes the time partitions of a target table, for the rule's `partition_by`.

A partition begins as a table of its own, gets the rows of its interval from the default partition,
and is then attached. The attachment locks the default partition, and a removal locks the whole
table. No statement waits for a lock longer than `LOCK_SECONDS`, because sessions queue behind the
lock; the caller tries again later.

streamer removes a partition only if the partition has a name that streamer gives, and begins where
the name says. Bounds are compared as times.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from streamer.errors.error_classes import TargetSchemaError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName, free_name
from streamer.mapping.rule_options import OnExpired
from streamer.mapping.time_partitions import (
    PartitionBy,
    default_partition,
    format_bound,
    interval_partition,
    named_beginning,
)
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_qualified
from streamer.target.connection import TargetConnection, transaction

LOCK_SECONDS: Final = 2
ROWS_MAX: Final = 10_000
"""A statement deletes at most this number of rows of the default partition. With more rows, the
default partition counts as crowded.
"""

# Bounds have dates and times in ISO format, because sessions pin datestyle and timezone.
_PARTITIONS_SQL: Final = r"""
select p.namespace, p.name, p.oid, p.bound = 'DEFAULT' as is_default,
       coalesce(extract(epoch from p.ends[1]::timestamptz)::float8, '-infinity') as start,
       coalesce(extract(epoch from p.ends[2]::timestamptz)::float8, 'infinity') as stop
from (select n.nspname::text as namespace, c.relname::text as name, c.oid::int8 as oid, b.bound,
             pg_catalog.regexp_match(b.bound,
                 'FROM \((?:MINVALUE|''([^'']*)'')\) TO \((?:MAXVALUE|''([^'']*)'')\)') as ends
        from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace,
             pg_catalog.pg_get_expr(c.relpartbound, c.oid) as b (bound)
       where i.inhparent = pg_catalog.to_regclass($1)) p
order by 5, 2
"""
_NAMES_SQL: Final = """
select c.relname::text as name from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace where n.nspname = $1
"""
_COLUMNS_SQL: Final = """
select attname::text as name from pg_catalog.pg_attribute
where attrelid = pg_catalog.to_regclass($1) and attnum > 0 and not attisdropped
  and attgenerated = '' order by attnum
"""


@dataclass(frozen=True, slots=True)
class TimePartition:
    """A partition of the target. ``start`` and ``stop``: seconds since 1970, in UTC."""

    namespace: str
    name: str
    oid: int
    is_default: bool
    start: float
    stop: float

    @property
    def full_name(self) -> RelationName:
        return RelationName(self.namespace, self.name)

    @property
    def is_ours(self) -> bool:
        """Whether streamer has created the partition for an interval."""
        named = named_beginning(self.name)
        return not self.is_default and named is not None and named.timestamp() == self.start


async def create_partitions(
    connection: TargetConnection, table: RelationName, rule: PartitionBy, now: datetime
) -> list[RelationName]:
    """Create the partitions that the rule needs at *now* and whose names are free; return their
    names.

    Rows of the default partition move to the new partitions. Raises TargetContentionError if a
    session holds a lock.
    """
    created = []
    partitions = await _read_partitions(connection, table)
    used_names = await _read_names(connection, table.namespace)
    if _default(partitions) is None:
        if default_partition(table).name in used_names:
            return []
        async with _locked(connection, table, "share update exclusive") as partitions:
            if _default(partitions) is None:
                name = _quoted(default_partition(table))
                await connection.execute(
                    f"create table {name} partition of {_quoted(table)} default"
                )
    for partition, bounds in _missing(partitions, table, rule, now).items():
        if partition.name in used_names:
            continue
        # Another process may create the same partition.
        async with _locked(connection, table, "share update exclusive") as partitions:
            if partition in _missing(partitions, table, rule, now):
                default = _default(partitions)
                assert default is not None
                await _create(connection, table, partition, default, rule.column, bounds)
                created.append(partition)
    return created


async def refuse_taken_names(
    connection: TargetConnection, table: RelationName, rule: PartitionBy, now: datetime
) -> None:
    """Refuse a relation that has the name of a partition which the table lacks at *now*.

    A detached partition keeps its name. Raises TargetSchemaError.
    """
    partitions = await _read_partitions(connection, table)
    lacking = list(_missing(partitions, table, rule, now))
    if _default(partitions) is None:
        lacking.append(default_partition(table))
    used_names = await _read_names(connection, table.namespace) if lacking else set()
    statements = []
    for name in [name for name in lacking if name.name in used_names]:
        other = free_name(name.name, "_old", used_names)
        used_names.add(other)
        statements.append(f"alter table {_quoted(name)} rename to {quote_identifier(other)}")
    if statements:
        names = ", ".join(f'"{name}"' for name in lacking if name.name in used_names)
        raise TargetSchemaError(
            f'target table "{table}" needs partitions whose names other relations have: {names}',
            hint=Remedy.of("run at the target to rename these relations: ", at_target(*statements)),
        )


async def remove_expired(
    connection: TargetConnection, table: RelationName, rule: PartitionBy, now: datetime
) -> list[RelationName]:
    """Remove the partitions that the rule no longer keeps at *now*; return their names.

    Raises TargetContentionError if a session holds a lock.
    """
    removed: list[RelationName] = []
    if (since := rule.kept_since(now)) is None:
        return removed
    for partition in _expired(await _read_partitions(connection, table), since):
        async with _locked(connection, table, "access exclusive") as partitions:
            if partition in _expired(partitions, since):
                name = _quoted(partition.full_name)
                await connection.execute(
                    f"drop table {name}"
                    if rule.on_expired is OnExpired.DROP
                    else f"alter table {_quoted(table)} detach partition {name}"
                )
                removed.append(partition.full_name)
    if rule.on_expired is OnExpired.DROP:
        await _delete_expired(connection, table, rule.column, since)
    return removed


async def find_crowded_default(
    connection: TargetConnection, table: RelationName
) -> RelationName | None:
    """Return the default partition of a table, if the partition has more than `ROWS_MAX` rows."""
    default = _default(await _read_partitions(connection, table))
    if default is None:
        return None
    rows = f"select from only {_quoted(default)} limit {ROWS_MAX + 1}"
    count = await connection.fetch_value(f"select count(*) from ({rows}) r")
    return default if count > ROWS_MAX else None


def _missing(
    partitions: Sequence[TimePartition], table: RelationName, rule: PartitionBy, now: datetime
) -> dict[RelationName, tuple[datetime, datetime]]:
    """Return the intervals that lack a partition, by the names of the partitions to create."""
    ranges = [(p.start, p.stop) for p in partitions if not p.is_default]
    return {
        interval_partition(table, start): (start, stop)
        for start, stop in rule.bounds(now)
        if not any(a < stop.timestamp() and start.timestamp() < b for a, b in ranges)
    }


def _expired(partitions: Sequence[TimePartition], since: datetime) -> list[TimePartition]:
    return [p for p in partitions if p.is_ours and p.stop <= since.timestamp()]


async def _read_partitions(
    connection: TargetConnection, table: RelationName
) -> list[TimePartition]:
    rows = await connection.fetch(_PARTITIONS_SQL, _quoted(table))
    return [TimePartition(**row) for row in rows]


async def _read_names(connection: TargetConnection, namespace: str) -> set[str]:
    return {row["name"] for row in await connection.fetch(_NAMES_SQL, namespace)}


async def _create(
    connection: TargetConnection,
    table: RelationName,
    name: RelationName,
    default: RelationName,
    column: str,
    bounds: tuple[datetime, datetime],
) -> None:
    """Create a partition, with the rows of its interval in the default partition."""
    parent, partition = _quoted(table), _quoted(name)
    start, stop = map(format_bound, bounds)
    await connection.execute(
        f"create table {partition} (like {parent} including all excluding identity"
        " excluding indexes excluding statistics excluding comments)"
    )
    columns = quote_columns([row["name"] for row in await connection.fetch(_COLUMNS_SQL, parent)])
    time, source = quote_identifier(column), _quoted(default)
    # ATTACH takes this lock, too. A session that waits for a moved row would hold a lock on the
    # partition, and so block ATTACH.
    await connection.execute(f"lock table {source} in access exclusive mode")
    await connection.execute(
        f"with moved as (delete from only {source} where {time} >= {start} and {time} < {stop}"
        f" returning {columns}) insert into {partition} ({columns}) select {columns} from moved"
    )
    await connection.execute(
        f"alter table {parent} attach partition {partition} for values from ({start}) to ({stop})"
    )


async def _delete_expired(
    connection: TargetConnection, table: RelationName, column: str, since: datetime
) -> None:
    """Delete rows of the default partition that are older than *since*, except locked rows."""
    partition = _default(await _read_partitions(connection, table))
    if partition is None:
        return
    default = _quoted(partition)
    old = f"d.{quote_identifier(column)} < {format_bound(since)}"
    deleted = ROWS_MAX
    while deleted == ROWS_MAX:
        deleted = await connection.execute(
            f"delete from only {default} where ctid = any (array(select d.ctid from only {default}"
            f" d where {old} limit {ROWS_MAX} for update skip locked))"
        )


@asynccontextmanager
async def _locked(
    connection: TargetConnection, table: RelationName, mode: str
) -> AsyncIterator[list[TimePartition]]:
    """Lock the table without its partitions for a transaction; yield the partitions."""
    async with transaction(connection):
        await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
        await connection.execute(f"lock table only {_quoted(table)} in {mode} mode")
        yield await _read_partitions(connection, table)


def _default(partitions: Sequence[TimePartition]) -> RelationName | None:
    return next((p.full_name for p in partitions if p.is_default), None)


def _quoted(name: RelationName) -> str:
    return quote_qualified(name.namespace, name.name)
