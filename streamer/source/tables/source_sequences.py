"""Sequences of a source, and their current values.

Logical replication does not send sequences, so streamer reads the values. PostgreSQL documentation,
"pg_sequence" and "Sequence Manipulation Functions"; ``pg_sequence_last_value`` (sequence.c) returns
null until the sequence is used for the first time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from streamer.mapping.relation_names import RelationName
from streamer.postgres.describing import SEQUENCE_OPTIONS
from streamer.postgres.quoting import grants_on_sequence, quote_qualified
from streamer.source.connection import Connection, fetch_all, fetch_one


@dataclass(frozen=True, slots=True)
class SourceSequence:
    """A sequence of a source.

    ``owner``: the table and the column of an identity or a serial; None for a free sequence.
    ``last_value``: None before the first use, or without the privilege to read the sequence.
    ``grants``: the SQL that grants that privilege, if missing. ``options``: the definition in the
    syntax of CREATE SEQUENCE.
    """

    name: RelationName
    owner: tuple[RelationName, str] | None
    increment: int
    last_value: int | None
    grants: tuple[str, ...] = ()
    options: str = ""


# Leave out sequences of extensions and temporary sequences.
_SEQUENCES_SQL: Final = f"""
select n.nspname as namespace, c.relname as name, s.seqincrement as increment, r.is_readable,
       current_user as role, u.has_usage,
       pg_catalog.format_type(s.seqtypid, null) as type, {SEQUENCE_OPTIONS} as options,
       case when r.is_readable then pg_catalog.pg_sequence_last_value(c.oid) end as last_value,
       tn.nspname as table_namespace, t.relname as table_name, a.attname as column_name
from pg_catalog.pg_sequence s
join pg_catalog.pg_class c on c.oid = s.seqrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
cross join lateral (
    select pg_catalog.has_schema_privilege(n.oid, 'usage') as has_usage) u
cross join lateral (
    select u.has_usage and pg_catalog.has_sequence_privilege(c.oid, 'select') as is_readable) r
left join pg_catalog.pg_depend d
  on d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objid = c.oid
 and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.refobjsubid > 0
 and d.deptype in ('a', 'i')
left join pg_catalog.pg_class t on t.oid = d.refobjid
left join pg_catalog.pg_namespace tn on tn.oid = t.relnamespace
left join pg_catalog.pg_attribute a on a.attrelid = t.oid and a.attnum = d.refobjsubid
where c.relpersistence = 'p'
  and not exists (select from pg_catalog.pg_depend e
                   where e.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                     and e.objid = c.oid and e.deptype = 'e')
order by 1, 2
"""


def create_sql(sequence: SourceSequence, name: RelationName) -> str:
    """Return the SQL that creates a sequence *name* with the definition of *sequence*. Pure."""
    return f"create sequence {quote_qualified(name.namespace, name.name)} {sequence.options}"


async def read_exact(
    plain: Connection, names: Iterable[RelationName]
) -> dict[RelationName, tuple[int, bool]]:
    """Return the value of each sequence, and whether it was used. Raises psycopg.Error."""
    values = {}
    for name in names:
        table = quote_qualified(name.namespace, name.name)
        row = await fetch_one(plain, f"select last_value, is_called from {table}")
        values[name] = row["last_value"], row["is_called"]
    return values


async def read_sequences(plain: Connection) -> list[SourceSequence]:
    """Read every sequence of the database, in order of name.

    Raises psycopg.Error; LockNotAvailable while a session changes the definition of a sequence.
    """
    sequences = []
    for row in await fetch_all(plain, _SEQUENCES_SQL):
        owner = None
        if row["table_name"] is not None:
            table = RelationName(row["table_namespace"], row["table_name"])
            owner = table, row["column_name"]
        name = RelationName(row["namespace"], row["name"])
        grants: tuple[str, ...] = ()
        if not row["is_readable"]:
            where = name.namespace, name.name, row["role"]
            grants = grants_on_sequence("select", *where, has_usage=row["has_usage"])
        values = row["increment"], row["last_value"]
        sequences.append(
            SourceSequence(name, owner, *values, grants, f"as {row['type']} {row['options']}")
        )
    return sequences
