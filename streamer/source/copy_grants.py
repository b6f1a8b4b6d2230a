"""The privileges at the source without which streamer's role cannot read a table for a copy."""

from collections.abc import Iterable
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.source.connection import Connection, fetch_all

_PRIVILEGES_SQL: Final = """
select n.nspname as namespace, c.relname as name, current_user::text as role,
       pg_catalog.has_schema_privilege(n.oid, 'usage') as may_use,
       pg_catalog.has_table_privilege(c.oid, 'select') as may_select
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any (%s::oid[])
"""


def usage_sql(namespace: str, role: str) -> str:
    """Return the statement that lets *role* use a schema. Pure."""
    return f"grant usage on schema {quote_identifier(namespace)} to {quote_identifier(role)}"


def select_sql(table: RelationName, role: str) -> str:
    """Return the statement that lets *role* read a table. Pure."""
    quoted = quote_qualified(table.namespace, table.name)
    return f"grant select on {quoted} to {quote_identifier(role)}"


async def read_missing_grants(
    connection: Connection, oids: Iterable[int]
) -> dict[RelationName, list[str]]:
    """Return the statements that let streamer's role read the tables *oids*, by table."""
    grants: dict[RelationName, list[str]] = {}
    for row in await fetch_all(connection, _PRIVILEGES_SQL, list(oids)):
        name, role = RelationName(row["namespace"], row["name"]), row["role"]
        grants[name] = [
            *([] if row["may_use"] else [usage_sql(name.namespace, role)]),
            *([] if row["may_select"] else [select_sql(name, role)]),
        ]
    return grants
