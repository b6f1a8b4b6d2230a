"""Removing streamer's objects from a source."""

from dataclasses import dataclass

import psycopg

from streamer.errors import SourceError, SourceTakenError
from streamer.mapping.rules import SourceMapping
from streamer.source.connection import connection
from streamer.source.ddl_capture import drop_capture, drop_sql
from streamer.source.ownership import read_found
from streamer.source.publication import drop_publications, drop_publications_sql
from streamer.source.slot import drop_slot, drop_slot_sql, read_slot


@dataclass(frozen=True, slots=True)
class Teardown:
    """The result for a source. ``left_sql``: statements that an administrator has to run there."""

    label: str
    error: str | None = None
    left_sql: tuple[str, ...] = ()


async def teardown_source(source: SourceMapping, installation: str | None) -> Teardown:
    """Drop our slot and publications; missing ones are fine.

    Objects of another installation than *installation* stay.
    """
    try:
        async with connection(source) as plain:
            found = await read_found(plain, source)
            if others := [each for each in found.installations if each != installation]:
                raise SourceTakenError(
                    f'source "{source.label}": publication "{source.publication}" belongs to '
                    f"installation {others[0]}, so slot and publications stay"
                )
            slot = await read_slot(plain, source.slot)
            if slot is not None and slot.active_pid is not None:
                await plain.execute(
                    "select pg_catalog.pg_terminate_backend(%s)", (slot.active_pid,)
                )
            await drop_slot(plain, source.slot)
            try:
                await drop_publications(plain, source)
                await drop_capture(plain, source)
            except psycopg.errors.ReadOnlySqlTransaction:
                return Teardown(
                    source.label,
                    f'source "{source.label}" is a standby, and its slot is dropped; run the '
                    "statements on its primary, which has the rest",
                    (*drop_publications_sql(source), *drop_sql(source)),
                )
    except (SourceError, psycopg.Error) as exc:
        left = (drop_slot_sql(source.slot), *drop_publications_sql(source), *drop_sql(source))
        return Teardown(source.label, str(exc), left)
    return Teardown(source.label)
