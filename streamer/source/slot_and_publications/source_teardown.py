"""Removes streamer's objects from a source."""

from dataclasses import dataclass

import psycopg

from streamer.errors.error_classes import SourceDatabaseError, SourceError
from streamer.mapping.rules import SourceMapping
from streamer.source.capture.ddl_capture import drop_capture, drop_sql
from streamer.source.catalog import check_same_database
from streamer.source.connection import Connection, connection, fetch_one
from streamer.source.slot_and_publications.ownership import read_source_objects
from streamer.source.slot_and_publications.publication import (
    drop_publications,
    drop_publications_sql,
)
from streamer.source.slot_and_publications.slot import Slot, drop_own_slot_sql, drop_slot, read_slot
from streamer.source.timeline_branches import KnownServer


@dataclass(frozen=True, slots=True)
class Teardown:
    """The result for a source. ``left_sql``: statements that an administrator must run there.
    ``is_taken``: the slot, and perhaps the journal, belongs to a foreign owner. ``is_elsewhere``:
    the url leads to a different database of the server, so no object was dropped.
    """

    label: str
    error: str | None = None
    left_sql: tuple[str, ...] = ()
    is_taken: bool = False
    is_elsewhere: bool = False


async def teardown_source(
    source: SourceMapping, installation: str | None, stored: KnownServer
) -> Teardown:
    """Drop streamer's slot and publications, if present. *stored*: the server from which streamer
    streamed.

    Objects of installations other than *installation* stay, as do slots of foreign programs and
    databases. Slots of all databases share a name space.
    """
    slot_error: str | None = None
    try:
        async with connection(source) as plain:
            await check_same_database(source, plain, stored)
            owners = await read_source_objects(plain, source)
            if strangers := [name for name in owners.installations if name != installation]:
                stays = (
                    f'source "{source.label}": publication "{source.publication}" belongs to '
                    f"installation {strangers[0]}, so slot and publications stay"
                )
                return Teardown(source.label, stays, is_taken=True)
            slot = await read_slot(plain, source.slot)
            misfit = None if slot is None else slot.misfit(await _database_of(plain))
            if misfit is not None:
                slot_error = (
                    f'source "{source.label}": replication slot "{source.slot}" {misfit.problem}; '
                    "the slot stays"
                )
            else:
                await _drop(plain, source, slot)
            try:
                await drop_publications(plain, source)
                await drop_capture(plain, source)
            except psycopg.errors.ReadOnlySqlTransaction:
                return Teardown(
                    source.label,
                    slot_error
                    or f'source "{source.label}" is a standby, and its slot is dropped; run the '
                    "statements on its primary to drop publications and capture",
                    (*drop_publications_sql(source), *drop_sql(source)),
                    slot_error is not None,
                )
    except SourceDatabaseError as exc:
        return Teardown(source.label, str(exc), is_taken=True, is_elsewhere=True)
    except (SourceError, psycopg.Error) as exc:
        drops = (drop_own_slot_sql(source.slot), *drop_publications_sql(source), *drop_sql(source))
        return Teardown(source.label, str(exc), drops)
    return Teardown(source.label, slot_error, is_taken=slot_error is not None)


async def _database_of(plain: Connection) -> str:
    row = await fetch_one(plain, "select pg_catalog.current_database()::text as name")
    return str(row["name"])


async def _drop(plain: Connection, source: SourceMapping, slot: Slot | None) -> None:
    if slot is not None and slot.active_pid is not None:
        await plain.execute("select pg_catalog.pg_terminate_backend(%s)", (slot.active_pid,))
    await drop_slot(plain, source.slot)
