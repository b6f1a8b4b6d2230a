"""``streamer tenants purge``: deletes the rows of a source that is no longer mapped, in chunks.

The purge holds the source's lock (`streamer.bookkeeping.source_lock`), which excludes a process
that streams the source. A chunk is a range of blocks of a table, or a number of rows where an index
finds the rows of a sid. The transaction that deletes a chunk checks the lock and stores the
position. A killed purge loses no work: the next purge continues at the stored position.
"""

import os
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_schema import require_installed
from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.copies import read_sharers
from streamer.bookkeeping.purges import (
    PurgeRecord,
    begin_purge,
    finish_purge,
    move_purge,
    read_purges,
    read_remaining_columns,
    read_tables_of_source,
    store_targets,
)
from streamer.bookkeeping.registered_relations import remove_relations
from streamer.bookkeeping.relation_records import (
    find_other_writer,
    find_relation_of_sid,
    read_labels,
    read_targets,
)
from streamer.bookkeeping.requests import PURGE, acting
from streamer.bookkeeping.source_lock import LockSession, purge_holder, purging_process
from streamer.bookkeeping.sources import holds_lock, remove_source
from streamer.bookkeeping.unmapped_relations import forget_former_of_sid
from streamer.errors.command_lines import command
from streamer.errors.error_classes import (
    MappingError,
    TargetError,
    TargetFencedError,
    TargetRejectedError,
)
from streamer.errors.remedies import Command, Remedy, run
from streamer.mapping.relation_names import RelationName, parse_name
from streamer.mapping.rules import Mapping, SourceLabel, SourceMapping, find_source
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.postgres.secret import Secret
from streamer.schema.target_relation import TargetRelation
from streamer.target.catalog import holds_rows, read_relations
from streamer.target.connection import (
    TargetAddress,
    TargetConnection,
    target_connection,
    transaction,
)
from streamer.target.fencing_token import FencingToken
from streamer.util.failpoints import failpoint

CHUNK_ROWS: Final = 5000
CHUNK_BLOCKS: Final = 500
"""Blocks of 8 KB that a transaction reads at most, where no index finds the rows of a sid."""

_LEAVES_SQL: Final = """
with recursive leaf (oid) as (
    select $1::int8::oid
    union all
    select i.inhrelid from leaf l join pg_catalog.pg_inherits i on i.inhparent = l.oid
)
select n.nspname as namespace, c.relname as name,
       coalesce(pg_catalog.pg_relation_size(c.oid)
                  / pg_catalog.current_setting('block_size')::int8, 0) as blocks
from leaf l join pg_catalog.pg_class c on c.oid = l.oid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.relkind = 'r' order by c.oid
"""

Report = Callable[[list[PurgeRecord]], None]
"""Shows the progress of the tables of a purge."""


@dataclass(frozen=True, slots=True)
class RemainingTable:
    """A target table without a column sid, in which a purge cannot find the rows of a source."""

    source: str
    target: str
    remedy: Remedy

    @property
    def problem(self) -> str:
        return (
            f'rows of "{self.source}" may remain in {self.target}, because the table has no column '
            "sid"
        )

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        texts = {"target": self.target, "problem": self.problem, "remedy": str(self.remedy)}
        return texts | {"steps": self.remedy.to_json()}


@dataclass(frozen=True, slots=True)
class PurgeOutcome:
    """The record of each purged table, and the tables that may still contain rows or columns."""

    records: list[PurgeRecord]
    remaining: list[RemainingTable]
    has_columns: bool = False
    """Whether a target table has a column that only removed sources had."""

    @property
    def rows_deleted(self) -> int:
        return sum(record.rows_deleted for record in self.records)

    def to_json(self) -> dict[str, Any]:
        return {
            "tables": [record.to_json() for record in self.records],
            "remaining": [table.to_json() for table in self.remaining],
        }


@dataclass(frozen=True, slots=True)
class PurgedLeaf:
    """A table that stores rows: the target table, or a partition."""

    name: RelationName
    blocks: int

    @property
    def sql(self) -> str:
        return quote_qualified(self.name.namespace, self.name.name)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk: the number of blocks of the whole table before its end, and its DELETE."""

    leaf: PurgedLeaf
    sql: str
    next_block: int
    repeats: bool = False
    """Whether to repeat the statement until it deletes no row."""


async def purge(
    address: TargetAddress,
    mapping: Mapping,
    database: str,
    sid: str,
    *,
    actor: str,
    report: Report = lambda records: None,
) -> PurgeOutcome:
    """Delete the rows of a source in all target tables with a column sid.

    Raises MappingError while the source is mapped or streams, or if another database writes rows
    with this sid to a target table.
    """
    label = SourceLabel(database, sid)
    if find_source(mapping.sources, database, sid) is not None:
        raise MappingError(
            f'source "{label}" is in the mapping, so its rows must stay',
            hint=f"run first: {command('tenants remove', database, '--yes', sid=sid)}",
        )
    bookkeeping = Bookkeeping(address, "streamer purge")
    source = SourceMapping(database, sid, Secret(""), ())
    locks = LockSession(address, purge_holder(f"{socket.gethostname()}:{os.getpid()}"))
    try:
        await require_installed(bookkeeping)
        await _check_known(bookkeeping, database, sid)
        async with bookkeeping.connection() as connection:
            await _refuse_mapped(connection, database, sid)
        if not isinstance(fence := await locks.acquire(source), FencingToken):
            raise _held_error(label, fence)
        async with (
            acting(bookkeeping, actor, PURGE, label),
            target_connection(address, "streamer purge") as target,
        ):
            await _write_as_workers_do(target)
            remaining = await read_remaining(target, database, sid)
            await _purge_all(bookkeeping, target, fence, database, sid, report)
            records = await _read_purges(bookkeeping, database, sid)
            async with _under(fence, target):
                await remove_source(target, fence.source_id)
            columns = await read_remaining_columns(target)
            purged = {record.target for record in records}
        return PurgeOutcome(records, remaining, any(c.target in purged for c in columns))
    finally:
        await locks.close()
        await bookkeeping.close()


def _held_error(label: str, holder: str) -> MappingError:
    """Return the error of a purge whose source is locked by *holder*. Pure."""
    if (purging := purging_process(holder)) is not None:
        return MappingError(
            f'another purge of "{label}" runs: {purging}',
            hint=f"wait for its end; `{command('tenants list')}` shows the progress",
        )
    return MappingError(
        f'source "{label}" is streaming: {holder} runs it',
        hint="remove it from the mapping of that process first",
    )


async def find_remaining(address: TargetAddress, database: str, sid: str) -> list[RemainingTable]:
    """Return the tables that may contain rows of a removed source after its purge."""
    async with target_connection(address, "streamer purge") as target:
        return await read_remaining(target, database, sid)


async def read_remaining(target: TargetConnection, database: str, sid: str) -> list[RemainingTable]:
    """Return the tables that may contain rows of a removed source after its purge."""
    names = await read_tables_of_source(target, database, sid)
    existing = await read_relations(target, [parse_name(name) for name in names])
    unmarked = sorted(str(name) for name, relation in existing.items() if not relation.has_sid)
    label = SourceLabel(database, sid)
    return [
        RemainingTable(label, name, await _advise_copies(target, [name], label))
        for name in unmarked
    ]


async def _refuse_mapped(session: Executor, database: str, sid: str) -> None:
    """Refuse a tenant of *database* that a source writes with the sid of its tables."""
    if (table := await find_relation_of_sid(session, database, sid)) is not None:
        raise MappingError(
            f'table "{table}" of "{database}" is in the mapping and has rows with sid "{sid}", so '
            "these rows must stay",
            hint="drop the table at the source, or remove it from `tables`, first",
        )


async def _check_known(bookkeeping: Bookkeeping, database: str, sid: str) -> None:
    """Refuse a database without known target tables, which may be a typing error."""
    async with bookkeeping.connection() as connection:
        targets = await read_targets(connection, database)
    if not targets and not await _read_purges(bookkeeping, database, sid):
        raise MappingError(
            f'the bookkeeping has no target table of "{SourceLabel(database, sid)}"',
            hint=f"`{command('tenants list')}` shows the known tenants",
        )


async def _read_purges(session: Executor, database: str, sid: str) -> list[PurgeRecord]:
    records = await read_purges(session)
    return [record for record in records if (record.database, record.sid) == (database, sid)]


async def _write_as_workers_do(target: TargetConnection) -> None:
    """Keep the deletes from firing foreign keys and triggers, if the role has the privilege."""
    try:
        await target.execute("set session_replication_role = replica")
    except TargetRejectedError:
        return


@asynccontextmanager
async def _under(fence: FencingToken, target: TargetConnection) -> AsyncIterator[None]:
    """Run a block in a transaction that only the holder of the source's lock may commit."""
    async with transaction(target):
        if not await holds_lock(target, fence):
            raise TargetFencedError("target: another process has the lock on this source")
        yield


async def _purge_all(
    bookkeeping: Bookkeeping,
    target: TargetConnection,
    fence: FencingToken,
    database: str,
    sid: str,
    report: Report,
) -> None:
    records = await _read_purges(bookkeeping, database, sid)
    names = {record.target for record in records} | await read_targets(target, database)
    existing = await read_relations(target, [parse_name(name) for name in names])
    relations = {str(name): relation for name, relation in existing.items() if relation.has_sid}
    if existing and not relations:
        raise MappingError(
            f'no target table of "{SourceLabel(database, sid)}" has a column sid, so its rows look '
            "like rows of other sources",
            hint=await _advise_copies(target, map(str, existing), SourceLabel(database, sid)),
        )
    writer = await find_other_writer(target, database, sid, list(relations))
    if writer is not None:
        raise MappingError(
            f'database "{writer[1]}" writes rows with sid "{sid}" to {writer[0]}, too',
            hint="delete the rows of the former source by hand",
        )
    async with _under(fence, target):
        await _begin(target, fence.source_id, database, sid, relations)
    with _to_continue(database, sid):
        for record in await _read_purges(bookkeeping, database, sid):
            if record.is_finished:
                continue
            await _purge_table(bookkeeping, target, fence, record, relations[record.target], report)


@contextmanager
def _to_continue(database: str, sid: str) -> Iterator[None]:
    """Name the command that continues the purge in an error of the target."""
    try:
        yield
    except TargetError as exc:
        again = command("tenants purge", database, "--yes", sid=sid)
        continues = f"a new purge continues at the stored position: {again}"
        exc.remedy = Remedy.of(exc.remedy, "; " if exc.remedy else None, continues)
        raise


async def _begin(
    target: TargetConnection, source_id: int, database: str, sid: str, relations: Collection[str]
) -> None:
    """Store the purge of *relations*, and remove the source's relations from the bookkeeping.

    From here on rows are missing, so the source needs a new copy if the mapping gets it back. An
    interrupted purge still finds the tables without a column sid by their records.
    """
    await store_targets(target, source_id)
    await begin_purge(target, database, sid, relations)
    await remove_relations(target, source_id)
    await forget_former_of_sid(target, database, sid)
    for record in await _read_purges(target, database, sid):
        if record.target not in relations:  # a session dropped the table, or it has no column sid
            await finish_purge(target, record)


async def _advise_copies(
    session: TargetConnection, targets: Iterable[str], removed: SourceLabel
) -> Remedy:
    """Return the remedy for rows of the source *removed* that look like rows of other sources.

    A copy of the tables that share a target by disjoint keys deletes rows that no source has.
    """
    parts: list[str | Command] = ["delete them by hand, by their keys"]
    for target in sorted(targets):
        sharers = {record.relation_id for record in await read_sharers(session, target)}
        remaining = [
            (label, table)
            for label, table in (await read_labels(session, sharers)).values()
            if label != removed
        ]
        for label, table in remaining[:1]:
            again = run("resync", table, database=label.database, sid=label.sid)
            parts += [f"; or, to copy the tables that still write to {target}, run: ", again]
    return Remedy.of(*parts)


async def _purge_table(
    bookkeeping: Bookkeeping,
    target: TargetConnection,
    fence: FencingToken,
    record: PurgeRecord,
    relation: TargetRelation,
    report: Report,
) -> None:
    first = record.next_block or 0
    is_whole = first == 0
    while True:
        count = 0
        leaves = await _read_leaves(target, relation)
        blocks = sum(leaf.blocks for leaf in leaves)
        for step in steps(leaves, relation, record.sid, first):
            while True:
                async with _under(fence, target):
                    deleted = await _delete(target, relation, step)
                    failpoint("purge.deleted")
                    is_last = not step.repeats or not deleted
                    position = step.next_block if is_last else first
                    await move_purge(target, record, deleted, position, blocks)
                    # A relation that is mapped after this check copies rows that the DELETE misses.
                    await _refuse_mapped(target, record.database, record.sid)
                count += deleted
                failpoint("purge.stored")
                report(await _read_purges(bookkeeping, record.database, record.sid))
                if is_last:
                    break
        async with _under(fence, target):
            # An UPDATE of a program may have moved a row to a finished block.
            if not await holds_rows(target, relation.name, record.sid):
                await finish_purge(target, record)
                break
        if is_whole and not count:
            raise MappingError(
                f'rows of sid "{record.sid}" in {record.target} cannot be deleted',
                hint="check row security, rules and triggers of the table",
            )
        first, is_whole = 0, True
    report(await _read_purges(bookkeeping, record.database, record.sid))


async def _read_leaves(target: TargetConnection, relation: TargetRelation) -> list[PurgedLeaf]:
    return [
        PurgedLeaf(RelationName(row["namespace"], row["name"]), row["blocks"])
        for row in await target.fetch(_LEAVES_SQL, relation.oid)
    ]


async def _delete(target: TargetConnection, relation: TargetRelation, step: Chunk) -> int:
    """Delete the rows of a chunk, unless its partition was detached or dropped.

    A session that detaches or drops a partition waits for the lock on the table, so the partition
    stays until the end of the transaction.
    """
    table = quote_qualified(relation.name.namespace, relation.name.name)
    await target.execute(f"lock table only {table} in row exclusive mode")
    names = {leaf.name for leaf in await _read_leaves(target, relation)}
    return await target.execute(step.sql) if step.leaf.name in names else 0


def steps(leaves: list[PurgedLeaf], relation: TargetRelation, sid: str, first: int) -> list[Chunk]:
    """Return the chunks of a table from block *first* on, counted over all partitions. Pure."""
    column = quote_identifier(SID)
    value = quote_literal(sid)
    chunks: list[Chunk] = []
    offset = 0
    for leaf in leaves:
        if SID in relation.leading_index_columns:
            if offset + leaf.blocks > first:
                sql = (
                    f"delete from {leaf.sql} "  # noqa: S608  # quoted names
                    f"where ctid = any (array(select ctid from {leaf.sql} "
                    f"where {column} = {value} limit {CHUNK_ROWS}))"
                )
                chunks.append(Chunk(leaf, sql, offset + leaf.blocks, repeats=True))
        else:
            begin = max(0, first - offset)
            for block in range(begin, leaf.blocks, CHUNK_BLOCKS):
                stop = min(block + CHUNK_BLOCKS, leaf.blocks)
                sql = (
                    f"delete from {leaf.sql} "  # noqa: S608  # quoted names
                    f"where ctid >= '({block},0)'::tid "
                    f"and ctid < '({stop},0)'::tid and {column} = {value}"
                )
                chunks.append(Chunk(leaf, sql, offset + stop))
        offset += leaf.blocks
    return chunks
