"""The owner of the slot and the publications at a source.

The names of a slot and its publications come from the configuration. An installation with a copy of
the configuration would use the objects of the first installation. So each installation writes an id
into a comment on the publications. If the publications have no such
comment, streamer accepts an existing slot that no client has read from: an administrator created
the slot.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psycopg

from streamer.errors.error_classes import SourceTakenError
from streamer.errors.remedies import Remedy, at_source, run
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import SourceMapping
from streamer.postgres.quoting import quote_identifier, quote_literal
from streamer.source.connection import Connection, fetch_all
from streamer.source.server.primary_of_standby import writable

_MARK: Final = "streamer installation "

_PUBLICATIONS_SQL: Final = """
select p.pubname as name, pg_catalog.pg_has_role(p.pubowner, 'usage') as owned,
       pg_catalog.obj_description(p.oid, 'pg_publication') as comment
from pg_catalog.pg_publication p where p.pubname = any (%s) order by p.pubname
"""
_READER_SQL: Final = """
select s.active_pid as pid, a.usename as role, a.application_name as application,
       a.client_addr::text as address
from pg_catalog.pg_replication_slots s
left join pg_catalog.pg_stat_activity a on a.pid = s.active_pid
where s.slot_name = %s
"""
_USED_SQL: Final = """
select s.total_txns > 0 or s.stream_txns > 0 as is_used
from pg_catalog.pg_stat_replication_slots s where s.slot_name = %s
"""


@dataclass(frozen=True, slots=True)
class SourceObjects:
    """The objects at the source with streamer's names. ``is_used``: None if the server does not
    report the use.
    """

    has_slot: bool
    reader: str | None
    is_used: bool | None
    installations: tuple[str, ...]


async def read_source_objects(connection: Connection, source: SourceMapping) -> SourceObjects:
    """Read the owners of slot and publications."""
    names = [source.publication, source.publication_inserts]
    publications = await fetch_all(connection, _PUBLICATIONS_SQL, names)
    installations = {row["name"]: _installation(row["comment"]) for row in publications}
    readers = await fetch_all(connection, _READER_SQL, source.slot)
    is_used = None
    if readers and connection.info.server_version >= 14_00_00:
        rows = await fetch_all(connection, _USED_SQL, source.slot)
        is_used = bool(rows and rows[0]["is_used"])
    return SourceObjects(
        has_slot=bool(readers),
        reader=_reader(readers[0]) if readers and readers[0]["pid"] is not None else None,
        is_used=is_used,
        installations=tuple(sorted({mark for mark in installations.values() if mark is not None})),
    )


def _installation(comment: str | None) -> str | None:
    return comment.removeprefix(_MARK) if comment and comment.startswith(_MARK) else None


def _reader(row: dict[str, object]) -> str:
    where = f" at {row['address']}" if row["address"] else ""
    return f'process {row["pid"]} ("{row["application"]}", role "{row["role"]}"{where})'


def obstacle(
    owners: SourceObjects, source: SourceMapping, installation: str, *, has_position: bool
) -> str:
    """Return the reason why streamer may not use slot and publications, or an empty string. Pure.

    *has_position*: the target has a position of this slot, and a comparison of both positions shows
    whether a foreign client has advanced the slot.
    """
    foreign_ids = [owner_id for owner_id in owners.installations if owner_id != installation]
    if foreign_ids:
        return f'publication "{source.publication}" belongs to installation {foreign_ids[0]}' + (
            f", whose slot is read by {owners.reader}" if owners.reader else ""
        )
    if has_position or installation in owners.installations or not owners.has_slot:
        return ""
    if owners.reader is not None:
        return f'replication slot "{source.slot}" is read by {owners.reader}, not for this target'
    if owners.is_used is None:
        return f'replication slot "{source.slot}" exists, and this server cannot say who uses it'
    if owners.is_used:
        return f'replication slot "{source.slot}" was read, but not for this target'
    return ""


def unproven_rows(
    owners: SourceObjects,
    source: SourceMapping,
    installation: str,
    uncopied: Iterable[RelationName],
    *,
    has_position: bool,
) -> SourceTakenError | None:
    """Return an error if a different target may have read changes of *uncopied* tables.

    A table with `initial: none` gets no copy, so this target would lack these changes. Pure.
    """
    foreign_ids = [owner_id for owner_id in owners.installations if owner_id != installation]
    is_own = installation in owners.installations and owners.is_used is None
    is_fresh = not foreign_ids and (is_own or owners.is_used is False)
    tables = [str(name) for name in uncopied]
    # A slot that streamer creates now sends all later changes, whatever slot had the name before.
    if has_position or not tables or not owners.has_slot or is_fresh:
        return None
    drop = f"select pg_drop_replication_slot({quote_literal(source.slot)})"
    return SourceTakenError(
        f'replication slot "{source.slot}" is older than the bookkeeping of this target, so '
        f"tables with `initial: none` may lack rows: {', '.join(tables)}",
        hint=Remedy.of(
            "set `initial: copy` for these tables; if the target has all rows and no program "
            "writes at the source, run at the source: ",
            at_source(drop),
        ),
    )


def check_owner(
    owners: SourceObjects, source: SourceMapping, installation: str, *, has_position: bool
) -> None:
    """Refuse objects that a different installation may use. Raises SourceTakenError. Pure."""
    if problem := obstacle(owners, source, installation, has_position=has_position):
        raise SourceTakenError(
            f'source "{source.label}": {problem}',
            hint=takeover_remedy(source),
        )


def takeover_remedy(source: SourceMapping) -> Remedy:
    """Return the remedy for slot and publications of a different installation."""
    return Remedy.of(
        "rename this `database` in the configuration; or, if no other installation needs slot and "
        "publications, run once: ",
        run("run", None, "--take-over", source.label),
    )


async def mark_publications(
    connection: Connection, source: SourceMapping, installation: str
) -> None:
    """Mark the publications that streamer's role owns with *installation*."""
    names = [source.publication, source.publication_inserts]
    for row in await fetch_all(connection, _PUBLICATIONS_SQL, names):
        comment = f"{_MARK}{installation}"
        if not row["owned"] or row["comment"] == comment:
            continue
        if row["comment"] and _installation(row["comment"]) is None:
            continue  # an administrator wrote this comment
        sql = f"comment on publication {quote_identifier(row['name'])} is {quote_literal(comment)}"
        try:
            async with writable(source, connection) as writing:
                await writing.execute(sql.encode())
        except (psycopg.errors.ReadOnlySqlTransaction, psycopg.errors.InsufficientPrivilege):
            return  # a standby whose url does not name the primary
