"""Creates, migrates and removes the schema of the bookkeeping in the target."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.replicas import read_processes
from streamer.bookkeeping.requests import prune_requests
from streamer.bookkeeping.schema_version import (
    SchemaVersion,
    lock_schema,
    read_usable_version,
)
from streamer.bookkeeping.sources import read_source_labels
from streamer.errors.error_classes import MappingError, TargetContentionError
from streamer.errors.remedies import CONTINUES
from streamer.postgres import replication_origin
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.util.migrations import Migration, read_migrations

LOCK_SECONDS: Final = 5
"""The longest wait of a migration for a table's lock, because writers of the table queue behind the
migration.
"""
_MADE: Final = re.compile(r"^create (table|function) (streamer\.\w+)", re.MULTILINE)
_MIGRATION_TABLE_SQL: Final = """
create schema if not exists streamer;
create table if not exists streamer.migration (
    number integer primary key,
    name text not null,
    -- The newest migration that a program must know to run on the migrated schema.
    needs integer not null,
    applied_at timestamptz not null default now()
)
"""
_DROP_SCHEMA_SQL: Final = """
do $$ begin
    drop schema streamer;
exception when dependent_objects_still_exist or insufficient_privilege then
    null;
end $$
"""


def read_objects() -> dict[str, list[str]]:
    """Return streamer's objects in the schema: names by kind, tables first."""
    made: dict[str, list[str]] = {"table": ["streamer.migration"], "function": []}
    for migration in read_migrations("target"):
        for kind, name in _MADE.findall(migration.sql):
            made[kind].append(name)
    return made


async def migrate(bookkeeping: Bookkeeping) -> None:
    """Migrate the bookkeeping schema.

    Raises TargetError if the schema needs a newer program, and TargetContentionError while older
    programs run that the migrated schema would break.
    """
    # One transaction, because readers of the bookkeeping must not find a half-created schema.
    async with bookkeeping.transaction() as connection:
        await _apply(connection)
        await prune_requests(connection)


async def rehearse(connection: TargetConnection) -> None:
    """Migrate the bookkeeping schema in a transaction that is rolled back.

    Raises the errors of `migrate`, and TargetContentionError while a process creates the schema.
    """
    await connection.execute("begin")
    try:
        await _apply(connection)
    finally:
        if not connection.is_closed:
            await connection.execute("rollback")


async def _apply(connection: TargetConnection) -> None:
    await connection.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'")
    await lock_schema(connection)
    await connection.execute(_MIGRATION_TABLE_SQL)
    version = await read_usable_version(connection)
    rows = await connection.fetch("select number from streamer.migration")
    applied = {int(row["number"]) for row in rows}
    pending = [m for m in read_migrations("target") if m.number not in applied]
    if version is not None:
        await _require_no_older_process(connection, version, pending)
    for migration in pending:
        await connection.execute(migration.sql)
        await connection.execute(
            "insert into streamer.migration (number, name, needs) values ($1, $2, $3)",
            migration.number,
            migration.name,
            migration.needs,
        )


async def _require_no_older_process(
    connection: TargetConnection, version: SchemaVersion, pending: list[Migration]
) -> None:
    """Raise TargetContentionError while a process runs that may be too old for *pending*.

    A running process certainly knows the migrations up to ``version.needs``, and perhaps no later
    migration.
    """
    if all(migration.needs <= version.needs for migration in pending):
        return
    if names := await read_processes(connection):
        raise TargetContentionError(
            f"migration {pending[-1].number} of the bookkeeping waits for the end of processes of"
            f" an earlier version: {', '.join(names)}",
            hint=f"stop these processes; {CONTINUES}",
        )


SUMMARY_SQL: Final = "select number, name, applied_at from streamer.migration order by number"


async def is_installed(bookkeeping: Bookkeeping) -> bool:
    """Whether the bookkeeping tables exist, with all migrations of this program.

    Raises TargetError if the tables need a newer program.
    """
    async with bookkeeping.connection() as connection:
        if await connection.fetch_value("select to_regclass('streamer.migration') is null"):
            return False
        version = await read_usable_version(connection)
        return version is not None and version.is_complete


async def require_installed(bookkeeping: Bookkeeping) -> None:
    """Raise MappingError unless `is_installed`. Raises TargetError, too."""
    if not await is_installed(bookkeeping):
        raise MappingError(
            "the bookkeeping in the target is missing, or from an earlier version",
            hint="start `streamer run` first",
        )


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
    """Return the id of this installation from its bookkeeping."""
    return str(await bookkeeping.fetch_value("select id from streamer.installation"))


async def drop_if_empty(bookkeeping: Bookkeeping) -> None:
    """Drop the bookkeeping and streamer's replication origins if no source remains.

    Also drop the schema, unless a foreign program has objects in it.
    """
    async with bookkeeping.transaction() as connection:
        if not await read_source_labels(connection):
            for kind, names in read_objects().items():
                await connection.execute(f"drop {kind} if exists {', '.join(names)}")
            await connection.execute(_DROP_SCHEMA_SQL)
            await connection.execute(replication_origin.DROP_SQL)
