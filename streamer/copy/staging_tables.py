"""Staging tables, in which a copy gathers rows while the target table keeps the old rows, and the
transaction that swaps the rows.

A staging table is not unlogged, because a crash must not empty the table while the ledger keeps the
parts. A staging table exists from the beginning of a copy to the commit of the swap. The next
process drops the tables that a crash leaves.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from streamer.bookkeeping.copies import read_leftover_stages
from streamer.copy.swap_rows import RowSwap, WriteMode
from streamer.errors.error_classes import ConflictError, SyncAgainError, TargetRejectedError
from streamer.postgres.quoting import quote_columns, quote_identifier
from streamer.postgres.session_settings import memory_sql
from streamer.target.connection import TargetConnection

LOCK_SECONDS: Final = 5
"""Seconds that a swap waits for row locks of other sessions before it gives up and retries
later.
"""

# The comparison sorts and hashes whole tables. With the default of 4 MB the server would use the
# disk.
_ENOUGH_MEMORY_SQL: Final = memory_sql("work_mem", 128, is_local=True)


def stage_name(relation_id: int) -> str:
    """Return the staging table of a relation, quoted. Pure."""
    return ".".join(stage_place(relation_id))


def stage_place(relation_id: int) -> tuple[str, str]:
    """Return the schema and the name of a staging table. Pure."""
    return "streamer", f"copy_{relation_id}"


_OTHER_TYPES_SQL: Final = """
select s.attname::text from pg_catalog.pg_attribute s
join pg_catalog.pg_attribute t on t.attrelid = $2::text::regclass and t.attname = s.attname
where s.attrelid = $1::text::regclass and s.attnum > 0 and not t.attisdropped
  and (s.atttypid, s.atttypmod, s.attcollation) <> (t.atttypid, t.atttypmod, t.attcollation)
order by s.attnum limit 1
"""


async def create_stage(
    target: TargetConnection, relation_id: int, table: str, columns: tuple[str, ...]
) -> None:
    """Create the staging table: *columns* of *table*, with the exact types and collations."""
    await target.execute(
        f"create table {stage_name(relation_id)} with (autovacuum_enabled = false) as"
        f" select {quote_columns(columns)} from {table} with no data"
    )


async def drop_stages(target: TargetConnection, relation_ids: Sequence[int]) -> None:
    names = ", ".join(map(stage_name, relation_ids))
    await target.execute(f"drop table if exists {names}")


async def find_leftover_stages(target: TargetConnection, source_id: int | None = None) -> list[str]:
    """Return the names of staging tables of unknown relations, and of relations of a source."""
    return await read_leftover_stages(target, source_id)


async def drop_leftover_stages(target: TargetConnection, names: Iterable[str]) -> None:
    """Drop staging tables that `find_leftover_stages` found. No copy of the source may run."""
    for name in names:
        await target.execute(f"drop table if exists streamer.{quote_identifier(name)}")


async def rest_triggers(target: TargetConnection) -> bool:
    """Disable foreign keys and ordinary triggers in this transaction; return False without the
    privilege.
    """
    # Without the privilege, SET fails. The savepoint keeps the failure from aborting the
    # transaction.
    await target.execute("savepoint before_role")
    try:
        await target.execute("set local session_replication_role = replica")
    except TargetRejectedError:
        await target.execute("rollback to savepoint before_role")
        return False
    return True


async def swap_rows(
    target: TargetConnection, swap: RowSwap, mode: WriteMode, *, is_referenced: bool
) -> None:
    """Write the staged rows to the target table, in the transaction that has just begun.

    Raises TargetContentionError if a session writes or locks the same rows. Raises SyncAgainError
    if staged values may be rounded to the former type of a column.
    """
    # All statements need one snapshot, because a row must keep the ctid that an earlier statement
    # read.
    await target.execute("set transaction isolation level repeatable read")
    await target.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
    # Lock the table before the snapshot, so that the catalogs have the types of the swap.
    await target.execute(f"lock table {swap.rows} in access share mode")
    await target.fetch(_ENOUGH_MEMORY_SQL)
    column = await target.fetch_value(_OTHER_TYPES_SQL, swap.stage, swap.table)
    if column is not None:
        raise SyncAgainError(
            f'column "{column}" of target table {swap.table} got another type during the copy'
        )
    may_rest = await rest_triggers(target)
    await target.execute(f"analyze {swap.stage}")
    may_delete = may_rest or not is_referenced
    if mode is WriteMode.REPLACE and not may_delete:
        # Foreign keys would refuse the deletion, or delete or change referencing rows.
        mode = WriteMode.DIFFERENCE
    await target.execute("savepoint swap")
    try:
        await _run(target, swap.statements(mode))
    except ConflictError:
        if not may_delete:
            raise
        await target.execute("rollback to savepoint swap")
        await _run(target, swap.statements(mode, by_update=False))


async def _run(target: TargetConnection, statements: list[str]) -> None:
    for statement in statements:
        await target.execute(statement)
