"""Reads what the target's server is: version, size of the database, connections."""

from dataclasses import dataclass
from typing import Final

from streamer.target.connection import TargetConnection

# pg_stat_database counts sessions of all roles; pg_stat_activity hides those of other roles.
_FACTS_SQL: Final = """
select pg_catalog.current_setting('server_version') as version,
       pg_catalog.pg_database_size(pg_catalog.current_database()) as size_bytes,
       (select pg_catalog.sum(d.numbackends)::int4 from pg_catalog.pg_stat_database d)
           as connections,
       pg_catalog.current_setting('max_connections')::int4
           - pg_catalog.current_setting('superuser_reserved_connections')::int4
           - coalesce(pg_catalog.current_setting('reserved_connections', true), '0')::int4
           as connections_max,
       (select pg_catalog.count(*)::int4 from pg_catalog.pg_stat_activity a
        where a.usename = current_user and a.datname is not null) as role_connections,
       (select nullif(r.rolconnlimit, -1) from pg_catalog.pg_roles r
        where r.rolname = current_user) as role_connections_max
"""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server of the target. ``connections``: the connections of all roles.
    ``role_connections``: the connections of streamer's role, which may have a limit.
    """

    version: str
    size_bytes: int
    connections: int
    connections_max: int
    role_connections: int
    role_connections_max: int | None


async def read_server_facts(session: TargetConnection) -> ServerFacts:
    """Read the facts. For the size, the server reads the size of every file of the database.

    Raises TargetError.
    """
    (row,) = await session.fetch(_FACTS_SQL)
    return ServerFacts(**dict(row))
