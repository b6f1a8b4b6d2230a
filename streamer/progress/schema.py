"""The schema of the bookkeeping in the target: made, brought up to date, and removed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from streamer.errors import MappingError, TargetError
from streamer.migrations import read_migrations
from streamer.postgres import origin
from streamer.progress.audit import prune_acts
from streamer.progress.bookkeeping import Bookkeeping
from streamer.progress.sources import read_source_labels
from streamer.progress.table import Executor
from streamer.target.connection import TargetAddress, TargetConnection

TABLES: Final = (
    "audit",
    "held",
    "sequence",
    "script",
    "cutover",
    "ddl",
    "definition",
    "request",
    "quarantine",
    "conflict",
    "purge",
    "deferred_index",
    "sync_partition",
    "compared_range",
    "comparison",
    "verification",
    "former_relation",
    "relation",
    "source",
    "replica",
    "mapping",
    "installation",
    "migration",
    "minute",
)
FUNCTIONS: Final = (
    "fits_plan",
    "name_values",
    "pass_creation_on",
    "require_facts",
    "set_progress",
)
"""All that is ours in the schema: `TABLES` and these."""

REHEARSAL_LOCK_SECONDS: Final = 5
_MIGRATION_LOCK: Final = 0x73747265616D  # "stream"
_DROP_SCHEMA_SQL: Final = """
do $$ begin
    drop schema streamer;
exception when dependent_objects_still_exist or insufficient_privilege then
    null;
end $$
"""


async def migrate(bookkeeping: Bookkeeping) -> None:
    """Bring the bookkeeping schema up to date. Raises TargetError for one that is newer than we
    are.
    """
    # All or none: other readers of the bookkeeping must not find it half created.
    async with bookkeeping.transaction() as connection:
        await _apply(connection)
        await prune_acts(connection)


async def rehearse(connection: TargetConnection) -> None:
    """Bring the bookkeeping schema up to date in a transaction that is rolled back.

    Raises the error that `migrate` would meet, and TargetContentionError while a process makes it.
    """
    await connection.execute("begin")
    try:
        await connection.execute(f"set local lock_timeout = '{REHEARSAL_LOCK_SECONDS}s'")
        await _apply(connection)
    finally:
        if not connection.is_closed:
            await connection.execute("rollback")


async def _apply(connection: TargetConnection) -> None:
    migrations = read_migrations("target")
    await connection.execute("select pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
    await connection.execute(
        "create schema if not exists streamer;"
        " create table if not exists streamer.migration (number integer primary key,"
        " name text not null, applied_at timestamptz not null default now())"
    )
    rows = await connection.fetch("select number from streamer.migration")
    applied = {int(row["number"]) for row in rows}
    if applied and max(applied) > migrations[-1].number:
        raise TargetError(
            "the bookkeeping in the target was made by a newer streamer "
            f"(migration {max(applied)})",
            hint="run that version or a later one",
        )
    for migration in migrations:
        if migration.number not in applied:
            await connection.execute(migration.sql)
            await connection.execute(
                "insert into streamer.migration (number, name) values ($1, $2)",
                migration.number,
                migration.name,
            )


SUMMARY_SQL: Final = "select number, name, applied_at from streamer.migration order by number"


async def read_version(session: Executor) -> int | None:
    """Return the number of the newest migration of the bookkeeping."""
    number: int | None = await session.fetch_value("select max(number) from streamer.migration")
    return number


async def is_installed(bookkeeping: Bookkeeping) -> bool:
    """Whether the bookkeeping tables are there, as this version makes them."""
    async with bookkeeping.connection() as connection:
        if await connection.fetch_value("select to_regclass('streamer.migration') is null"):
            return False
        newest = await read_version(connection)
        return bool(newest is not None and newest >= read_migrations("target")[-1].number)


async def require_installed(bookkeeping: Bookkeeping) -> None:
    """Raise MappingError unless `is_installed`."""
    if not await is_installed(bookkeeping):
        raise MappingError("nothing is set up yet", hint="start `streamer run` first")


@asynccontextmanager
async def installed(address: TargetAddress, application_name: str) -> AsyncIterator[Bookkeeping]:
    """Open the bookkeeping for a command. Raises MappingError before the first `run`."""
    bookkeeping = Bookkeeping(address, application_name)
    try:
        await require_installed(bookkeeping)
        yield bookkeeping
    finally:
        await bookkeeping.close()


async def read_installation(bookkeeping: Bookkeeping) -> str:
    """Return the id of this installation, which is that of its bookkeeping."""
    return str(await bookkeeping.fetch_value("select id from streamer.installation"))


async def drop_if_empty(bookkeeping: Bookkeeping) -> None:
    """Drop the bookkeeping and our replication origins if it has no sources left.

    The schema goes too, if it has no objects of other programs.
    """
    async with bookkeeping.transaction() as connection:
        if not await read_source_labels(connection):
            tables = ", ".join(f"streamer.{name}" for name in TABLES)
            await connection.execute(f"drop table if exists {tables}")
            functions = ", ".join(f"streamer.{name}" for name in FUNCTIONS)
            await connection.execute(f"drop function if exists {functions}")
            await connection.execute(_DROP_SCHEMA_SQL)
            await connection.execute(origin.DROP_SQL)
