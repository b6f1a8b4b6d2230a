"""Checks the database to which a source's url leads, because an operator may swap urls of a server.

System identifier, timeline and WAL belong to the server, so they do not identify a database.
streamer refuses a different database: rows from there must not replace rows of the target, and
streamer must not create a slot there.
Pure.
"""

from collections.abc import Mapping

from streamer.errors.error_classes import SourceDatabaseError
from streamer.mapping.rules import SourceMapping
from streamer.source.timeline_branches import KnownServer


def require_same_database(
    source: SourceMapping,
    stored: KnownServer,
    system_identifier: str,
    database_oid: int,
    names: Mapping[str, str],
) -> None:
    """Refuse a different database of the same server. Raises SourceDatabaseError.

    *names*: the names of the server's databases, by OID as text. A missing database was dropped
    together with its slot.
    """
    stored_oid = str(stored.database_oid)
    if system_identifier != stored.system_identifier or stored_oid not in names:
        return
    if database_oid != stored.database_oid:
        raise SourceDatabaseError(
            f"the url of {source.label} leads to database {names[str(database_oid)]} instead of "
            f"{names[stored_oid]}",
            hint="correct the url, and reload the mapping (SIGHUP or `streamer apply`)",
        )
