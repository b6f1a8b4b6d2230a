"""``streamer teardown``: take away what streamer made on the sources, and its bookkeeping.

Rows in the target stay. Doing it twice is fine.
"""

from dataclasses import dataclass

import psycopg

from streamer.apply.target import TargetAddress, target_connection
from streamer.errors import MappingError, SourceError
from streamer.progress.store import Store
from streamer.route.mapping import Mapping, SourceMapping, parse_name
from streamer.source.connection import connection
from streamer.source.publication import drop_publications, drop_publications_sql
from streamer.source.slot import drop_slot, drop_slot_sql, read_slot
from streamer.sync.indexes import read_deferred_targets, restore_indexes


@dataclass(frozen=True, slots=True)
class Teardown:
    """What was done for a source. ``left_sql`` is what an administrator has to run there."""

    label: str
    error: str | None = None
    left_sql: tuple[str, ...] = ()


def choose(mapping: Mapping, database: str | None, sid: str | None) -> list[SourceMapping]:
    """Return the sources that are meant. Raises MappingError for none."""
    chosen = [
        source
        for source in mapping.sources
        if (database is None or source.database == database) and (sid is None or source.sid == sid)
    ]
    if not chosen:
        known = ", ".join(source.label for source in mapping.sources)
        raise MappingError("no such source", hint=f"there are: {known}")
    return chosen


async def teardown(address: TargetAddress, sources: list[SourceMapping]) -> list[Teardown]:
    """Drop slots, publications and bookkeeping of *sources*, and the schema when nothing is left
    in it.
    """
    results = [await _teardown_source(source) for source in sources]
    store = Store(address, "streamer teardown")
    try:
        if await store.exists():
            labels = {result.label for result in results}
            for record in await store.sources():
                if record.label in labels:
                    await store.forget_source(record.source_id)
            await _restore_indexes(address)
            await store.drop_if_empty()
    finally:
        await store.close()
    return results


async def _restore_indexes(address: TargetAddress) -> None:
    """Make again what an abandoned copy has put off: only the bookkeeping knows it."""
    async with target_connection(address, "streamer teardown") as target:
        for name in await read_deferred_targets(target):
            await restore_indexes(target, parse_name(name))


async def _teardown_source(source: SourceMapping) -> Teardown:
    try:
        async with connection(source) as plain:
            slot = await read_slot(plain, source.slot)
            if slot is not None and slot.active_pid is not None:
                await plain.execute(
                    "select pg_catalog.pg_terminate_backend(%s)", (slot.active_pid,)
                )
            await drop_slot(plain, source.slot)
            await drop_publications(plain, source)
    except (SourceError, psycopg.Error) as exc:
        left = (drop_slot_sql(source.slot), *drop_publications_sql(source))
        return Teardown(source.label, str(exc), left)
    return Teardown(source.label)
