"""The privileges at the source without which streamer's role cannot read a table for a copy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.source.connection import Connection, fetch_all, fetch_one

_PRIVILEGES_SQL: Final = """
select n.nspname as namespace, c.relname as name,
       pg_catalog.has_schema_privilege(n.oid, 'usage') as may_use,
       pg_catalog.has_table_privilege(c.oid, 'select') as may_select,
       pg_catalog.pg_has_role(c.relowner, 'usage') as is_owned
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where c.oid = any (%s::oid[])
"""


@dataclass(frozen=True, slots=True)
class RoleRights:
    """The rights of streamer's role in tables of a source.

    ``grants``: the statements that let the role read tables, by table; ``owned``: the tables that
    the role owns. An empty ``role``: the rights were not read.
    """

    role: str = ""
    grants: Mapping[RelationName, list[str]] = field(default_factory=dict)
    owned: frozenset[RelationName] = frozenset()


def usage_sql(namespace: str, role: str) -> str:
    """Return the statement that lets *role* use a schema. Pure."""
    return f"grant usage on schema {quote_identifier(namespace)} to {quote_identifier(role)}"


def select_sql(table: RelationName, role: str) -> str:
    """Return the statement that lets *role* read a table. Pure."""
    quoted = quote_qualified(table.namespace, table.name)
    return f"grant select on {quoted} to {quote_identifier(role)}"


async def read_role_rights(connection: Connection, oids: Iterable[int]) -> RoleRights:
    """Return the rights of the role of *connection* in the tables *oids*."""
    role = (await fetch_one(connection, "select current_user::text as role"))["role"]
    grants: dict[RelationName, list[str]] = {}
    owned = set()
    for row in await fetch_all(connection, _PRIVILEGES_SQL, list(oids)):
        name = RelationName(row["namespace"], row["name"])
        grants[name] = [
            *([] if row["may_use"] else [usage_sql(name.namespace, role)]),
            *([] if row["may_select"] else [select_sql(name, role)]),
        ]
        if row["is_owned"]:
            owned.add(name)
    return RoleRights(role, grants, frozenset(owned))
