"""Creates, migrates and removes the schema of the bookkeeping in the target."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.bookkeeping_table import Executor
from streamer.bookkeeping.requests import prune_requests
from streamer.bookkeeping.sources import read_source_labels
from streamer.errors.error_classes import MappingError, TargetError
from streamer.postgres import replication_origin
from streamer.target.connection import TargetAddress, TargetConnection
from streamer.util.migrations import read_migrations

REHEARSAL_LOCK_SECONDS: Final = 5
_MADE: Final = re.compile(r"^create (table|function) (streamer\.\w+)", re.MULTILINE)
_MIGRATION_LOCK: Final = 0x73747265616D  # "stream"
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
    """Migrate the bookkeeping schema. Raises TargetError if a newer version made the schema."""
    # One transaction, because readers of the bookkeeping must not find a half-created schema.
    async with bookkeeping.transaction() as connection:
        await _apply(connection)
        await prune_requests(connection)


async def rehearse(connection: TargetConnection) -> None:
    """Migrate the bookkeeping schema in a transaction that is rolled back.

    Raises the error of `migrate`, and TargetContentionError while a process creates the schema.
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
    """Whether the bookkeeping tables exist in this version's form."""
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
