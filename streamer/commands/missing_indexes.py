"""``streamer indexes --missing-fk``: lists and builds indexes that foreign keys lack at the
target.
"""

from contextlib import suppress
from dataclasses import replace

from streamer.bookkeeping.bookkeeping import Bookkeeping
from streamer.bookkeeping.requests import BUILD_INDEX, acting
from streamer.commands.table_requests import command_actor
from streamer.errors.error_classes import TargetContentionError, TargetError
from streamer.indexes.foreign_key_indexes import (
    MissingIndex,
    build,
    drop_leftovers,
    find_missing_indexes,
    read_foreign_key_facts,
)
from streamer.mapping.rules import Mapping
from streamer.target.connection import TargetAddress


async def missing_fk(
    address: TargetAddress, mapping: Mapping, target_namespace: str, *, apply: bool
) -> list[MissingIndex]:
    """Return the missing indexes; with *apply*, first build as many of these as possible.

    Raises SourceError, TargetConnectionError, TargetRejectedError.
    """
    bookkeeping = Bookkeeping(address, "streamer indexes")
    try:
        listed = await _find_missing(address, mapping, target_namespace, bookkeeping)
        if not apply:
            return listed
        with suppress(TargetContentionError):  # the next build drops the invalid index
            await drop_leftovers(address, {table for m in listed for table, _ in m.statements})
        results = []
        for missing in listed:
            # Building takes time, in which a further table may have begun to lag.
            now = await _find_missing(address, mapping, target_namespace, bookkeeping)
            current = next((m for m in now if m.name == missing.name), None)
            results.append(
                await _make(address, bookkeeping, current or replace(missing, state="built"))
            )
        return results
    finally:
        await bookkeeping.close()


async def _find_missing(
    address: TargetAddress, mapping: Mapping, target_namespace: str, bookkeeping: Bookkeeping
) -> list[MissingIndex]:
    sources = [
        await read_foreign_key_facts(source, bookkeeping, target_namespace)
        for source in mapping.sources
    ]
    return await find_missing_indexes(address, bookkeeping, sources)


async def _make(
    address: TargetAddress, bookkeeping: Bookkeeping, missing: MissingIndex
) -> MissingIndex:
    if missing.state != "missing":
        return missing
    options = {"index": missing.name, "sql": missing.sql}
    try:
        async with acting(bookkeeping, command_actor(), BUILD_INDEX, str(missing.target), options):
            await build(address, missing)
    except TargetError as exc:
        return replace(missing, state="failed", reason=str(exc))
    return replace(missing, state="built")
