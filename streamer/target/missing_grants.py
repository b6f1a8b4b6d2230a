"""The privileges that streamer's role lacks at the target, and the statements that grant them.

`streamer check` judges privileges before a start. At run time, the server refuses a statement and
names at most one object, without its schema. streamer then asks the catalogs for all privileges
that the role lacks, so that the error has the statements to run.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import structlog

from streamer.errors.error_classes import ConflictError, StreamerError, TargetPrivilegeError
from streamer.errors.remedies import Remedy, at_target
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import TableType
from streamer.mapping.rules import RelationMapping
from streamer.postgres.named_relations import NAMED_RELATION
from streamer.postgres.quoting import quote_identifier, quote_qualified
from streamer.target.connection import Record, TargetConnection

log = structlog.get_logger()

HIDES_ROWS_SQL: Final = """c.relrowsecurity
         and (c.relforcerowsecurity or not pg_catalog.pg_has_role(c.relowner, 'usage'))
         and not (select r.rolsuper or r.rolbypassrls from pg_catalog.pg_roles r
                   where r.rolname = current_user)"""
"""Whether row level security applies to streamer's role on the table ``c``."""
MISSING_SQL: Final = """array(
           select p from pg_catalog.unnest('{select,insert,update,delete,truncate}'::text[]) p
            where not pg_catalog.has_table_privilege(c.oid, p))"""
"""The privileges on the table ``c`` that streamer may need and that the role lacks."""


@dataclass(frozen=True, slots=True)
class Grants:
    """The statements that give *role* a privilege. Pure."""

    role: str

    @property
    def _to(self) -> str:
        return f"to {quote_identifier(self.role)}"

    def on_database(self, privilege: str, database: str) -> str:
        return f"grant {privilege} on database {quote_identifier(database)} {self._to}"

    def on_plpgsql(self) -> str:
        return f"grant usage on language plpgsql {self._to}"

    def on_schema(self, privileges: str, namespace: str) -> str:
        return f"grant {privileges} on schema {quote_identifier(namespace)} {self._to}"

    def create_schema(self, namespace: str) -> str:
        """Return the statement that creates a schema that the role owns."""
        role = quote_identifier(self.role)
        return f"create schema {quote_identifier(namespace)} authorization {role}"

    def on_bookkeeping(self) -> str:
        return f"grant usage, create on schema streamer {self._to}"

    def on_bookkeeping_tables(self) -> str:
        return f"grant all on all tables in schema streamer {self._to}"

    def on_table(self, privileges: Sequence[str], quoted: str) -> str:
        return f"grant {', '.join(privileges)} on {quoted} {self._to}"

    def on_object(self, kind: str, quoted: str) -> str:
        """Return the statement that grants USAGE on a sequence or type."""
        return f"grant usage on {kind} {quoted} {self._to}"

    def to_own(self, quoted: str) -> str:
        """Return the statement that makes the role the owner of a table."""
        return f"alter table {quoted} owner to {quote_identifier(self.role)}"

    def to_replace_role(self, version: int) -> str:
        """Return the statement after which the role may set session_replication_role.

        *version*: the server_version_num of the target.
        """
        if version < 15_00_00:
            return f"alter role {quote_identifier(self.role)} superuser"
        return f"grant set on parameter session_replication_role {self._to}"

    def of_all_rows(self) -> str:
        """Return the statement after which row level security hides no row."""
        return f"alter role {quote_identifier(self.role)} bypassrls"


def needed_on_table(kind: TableType, sid: str | None, *, is_referenced: bool) -> frozenset[str]:
    """Return the privileges that the stream of a table needs. TRUNCATE becomes a DELETE where rows
    of peer sources or foreign keys forbid TRUNCATE.
    """
    needed = {"select", "insert", "update", "delete"}
    if kind is TableType.CLONE and sid is None and not is_referenced:
        needed.add("truncate")
    return frozenset(needed)


_DATABASE_SQL: Final = """
select current_user::text as role, d.datname::text as database,
       pg_catalog.has_database_privilege(d.oid, 'create') as may_create,
       pg_catalog.has_database_privilege(d.oid, 'temporary') as may_use_temporary,
       coalesce((select pg_catalog.has_language_privilege(l.oid, 'usage')
                   from pg_catalog.pg_language l where l.lanname = 'plpgsql'), true)
         as may_use_plpgsql,
       coalesce(pg_catalog.has_schema_privilege(n.oid, 'usage')
                and pg_catalog.has_schema_privilege(n.oid, 'create'), true) as may_use_bookkeeping,
       not exists (
           select from pg_catalog.pg_class c
            where c.relnamespace = n.oid and c.relkind = 'r'
              and exists (
                  select from pg_catalog.unnest('{select,insert,update,delete}'::text[]) p
                   where not pg_catalog.has_table_privilege(c.oid, p))) as may_write_bookkeeping
from pg_catalog.pg_database d left join pg_catalog.pg_namespace n on n.nspname = 'streamer'
where d.datname = pg_catalog.current_database()
"""
_TABLES_SQL: Final = f"""
select w.number, w.namespace, w.name,
       pg_catalog.has_schema_privilege(c.relnamespace, 'usage') as may_use,
       pg_catalog.has_schema_privilege(c.relnamespace, 'create') as may_create,
       pg_catalog.pg_has_role(c.relowner, 'usage') as is_owned,
       {MISSING_SQL} as missing,
       {HIDES_ROWS_SQL} as hides_rows,
       exists (select from pg_catalog.pg_constraint k
                where k.confrelid = c.oid and k.contype = 'f') as is_referenced,
       array(select distinct array[m.nspname::text, s.relname::text]
               from pg_catalog.pg_attrdef a
               join pg_catalog.pg_depend d on d.objid = a.oid
                and d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
                and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
               join pg_catalog.pg_class s on s.oid = d.refobjid
               join pg_catalog.pg_namespace m on m.oid = s.relnamespace
              where a.adrelid = c.oid
                and case when s.relkind = 'S'  -- an error for a table, whatever the order
                         then not pg_catalog.has_sequence_privilege(s.oid, 'usage') end)
         as sequences,
       array(select distinct array[m.nspname::text, e.typname::text]
               from pg_catalog.pg_attribute a
               join pg_catalog.pg_type t on t.oid = a.atttypid
               join pg_catalog.pg_type e
                 on e.oid = case when t.typcategory = 'A' then t.typelem else t.oid end
               join pg_catalog.pg_namespace m on m.oid = e.typnamespace
              where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
                and not pg_catalog.has_type_privilege(e.oid, 'usage')) as types
from unnest($1::text[], $2::text[]) with ordinality as w (namespace, name, number)
cross join {NAMED_RELATION} c
where c.relkind in ('r', 'p')
order by w.number
"""
"""The privileges that streamer's role lacks on tables, on sequences of defaults, and on types."""


_ADMINISTRATOR: Final = "have an administrator run at the target: "


@dataclass(frozen=True, slots=True)
class MissingGrants:
    """The statements that grant the missing privileges."""

    statements: tuple[str, ...]

    @classmethod
    async def read(
        cls, connection: TargetConnection, mappings: Sequence[RelationMapping] = ()
    ) -> Self:
        """Read the privileges on database, bookkeeping, and the targets of *mappings*.

        Raises TargetError.
        """
        (facts,) = await connection.fetch(_DATABASE_SQL)
        grants = Grants(facts["role"])
        statements = list(_of_database(grants, facts))
        names = [mapping.target for mapping in mappings]
        rows = await connection.fetch(
            _TABLES_SQL, [name.namespace for name in names], [name.name for name in names]
        )
        for row in rows:
            statements += _of_table(grants, row, mappings[row["number"] - 1])
        return cls(tuple(dict.fromkeys(statements)))

    @property
    def remedy(self) -> Remedy | None:
        """The remedy with the statements; None if the role lacks no privilege."""
        if not self.statements:
            return None
        return Remedy.of(_ADMINISTRATOR, at_target(*self.statements))


def _of_database(grants: Grants, facts: Record) -> Iterator[str]:
    if not facts["may_create"]:
        yield grants.on_database("create", facts["database"])
    if not facts["may_use_temporary"]:
        yield grants.on_database("temporary", facts["database"])
    if not facts["may_use_plpgsql"]:
        yield grants.on_plpgsql()
    if not facts["may_use_bookkeeping"]:
        yield grants.on_bookkeeping()
    if not facts["may_write_bookkeeping"]:
        yield grants.on_bookkeeping_tables()


def _of_table(grants: Grants, row: Record, mapping: RelationMapping) -> Iterator[str]:
    if not row["may_use"]:
        yield grants.on_schema("usage", row["namespace"])
    needed = needed_on_table(mapping.type, mapping.sid, is_referenced=row["is_referenced"])
    if missing := [privilege for privilege in row["missing"] if privilege in needed]:
        yield grants.on_table(missing, quote_qualified(row["namespace"], row["name"]))
    if mapping.rule.partition_by is not None:
        if not row["is_owned"]:
            yield grants.to_own(quote_qualified(row["namespace"], row["name"]))
        if not row["may_create"]:
            yield grants.on_schema("create", row["namespace"])
    if row["hides_rows"]:
        yield grants.of_all_rows()
    yield from _of_objects(grants, "sequence", row["sequences"])
    yield from _of_objects(grants, "type", row["types"])


def _of_objects(grants: Grants, kind: str, names: Sequence[Any]) -> Iterator[str]:
    for name in sorted(RelationName(*name) for name in names):
        yield grants.on_object(kind, quote_qualified(name.namespace, name.name))


_NAMESPACES_SQL: Final = """
select current_user::text as role, n.nspname::text as namespace
from pg_catalog.pg_namespace n
where n.nspname = any ($1::text[]) and not pg_catalog.has_schema_privilege(n.oid, 'create')
order by 2
"""


async def missing_to_create(
    connection: TargetConnection, namespaces: Collection[str]
) -> tuple[str, ...]:
    """Return the statements that let the role create tables in existing schemas *namespaces*.

    Raises TargetError.
    """
    rows = await connection.fetch(_NAMESPACES_SQL, list(namespaces))
    return tuple(Grants(row["role"]).on_schema("create", row["namespace"]) for row in rows)


async def advise_grants(
    error: StreamerError, connection: TargetConnection, mappings: Sequence[RelationMapping] = ()
) -> None:
    """Give *error* the statements that grant the privileges which the role lacks, if any.

    The server checks foreign keys for a role that may not set session_replication_role. Errors of
    different kinds stay unchanged, and so does every error if the catalogs cannot be read.
    """
    if connection.is_closed:
        return
    try:
        if isinstance(error, TargetPrivilegeError):
            missing = await MissingGrants.read(connection, mappings)
            error.remedy = missing.remedy or error.remedy
        elif isinstance(error, ConflictError) and error.kind == "foreign_key":
            role = await connection.fetch_value("select current_user::text")
            grant = at_target(Grants(role).to_replace_role(connection.server_version))
            error.remedy = Remedy.of(_ADMINISTRATOR, grant, "; ", error.remedy)
    except StreamerError as exc:  # the caller raises the error of the server
        log.debug("missing privileges cannot be read", error=error.message, reason=str(exc))
