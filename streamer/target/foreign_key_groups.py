"""Groups of target tables that foreign keys connect, where the role cannot suppress the keys.

Changes of such tables go to the target in a single transaction. Otherwise a referencing table could
wait for a row that arrives only in a later transaction.
"""

from collections.abc import Iterable
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.target.connection import TargetConnection, may_replace_role

_KEYS_SQL: Final = f"""
with wanted as (
    select c.oid, w.namespace, w.name
    from unnest($1::text[], $2::text[]) w (namespace, name)
    cross join {NAMED_RELATION} c
)
select distinct a.namespace, a.name, b.namespace as other_namespace, b.name as other_name
from pg_catalog.pg_constraint k
join wanted a on a.oid = k.conrelid
join wanted b on b.oid = k.confrelid
where k.contype = 'f' and k.conrelid <> k.confrelid
"""

Groups = dict[RelationName, RelationName]
"""For each table in a group, the first table of the group."""


async def read_groups(connection: TargetConnection, tables: Iterable[RelationName]) -> Groups:
    """Return the groups of *tables*; none if the role may set session_replication_role."""
    names = list(tables)
    rows = await connection.fetch(
        _KEYS_SQL, [name.namespace for name in names], [name.name for name in names]
    )
    if not rows or await may_replace_role(connection):
        return {}
    return connect(
        (
            RelationName(row["namespace"], row["name"]),
            RelationName(row["other_namespace"], row["other_name"]),
        )
        for row in rows
    )


def connect(pairs: Iterable[tuple[RelationName, RelationName]]) -> Groups:
    """Return the groups that *pairs* of connected tables form. Pure."""
    members: dict[RelationName, set[RelationName]] = {}
    for first, second in pairs:
        joined = members.get(first, {first}) | members.get(second, {second})
        for name in joined:
            members[name] = joined
    return {name: min(group, key=str) for name, group in members.items()}
