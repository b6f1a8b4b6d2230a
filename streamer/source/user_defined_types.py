"""Types that a source's tables use and that PostgreSQL does not bring along."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamer.mapping.names import RelationName
from streamer.postgres.quoting import quote_identifier, quote_literal, quote_qualified
from streamer.source.connection import Connection, fetch_all

FIRST_USER_OID: Final = 16384
"""FirstNormalObjectId in access/transam.h: below it are the objects that every server has."""


@dataclass(frozen=True, slots=True)
class SourceType:
    """A user-defined type: its name, and the statement that creates it.

    ``create_sql`` is None for a type of an extension; ``extension`` then names it.
    """

    oid: int
    name: RelationName
    create_sql: str | None
    extension: str | None

    @property
    def quoted(self) -> str:
        return quote_qualified(self.name.namespace, self.name.name)


_NOT_VALID: Final = " NOT VALID"
"""CREATE DOMAIN takes no such check."""

_TYPES_SQL: Final = """
select t.oid::int8 as oid, n.nspname as namespace, t.typname as name, t.typtype as kind,
       t.typelem::int8 as element, t.typcategory = 'A' as is_array,
       (select e.extname
          from pg_catalog.pg_depend d join pg_catalog.pg_extension e on e.oid = d.refobjid
         where d.classid = 'pg_catalog.pg_type'::regclass and d.objid = t.oid and d.deptype = 'e'
           and d.refclassid = 'pg_catalog.pg_extension'::regclass limit 1) as extension,
       t.typbasetype::int8 as base,
       case when t.typtype = 'd' then pg_catalog.format_type(t.typbasetype, t.typtypmod) end
         as base_type,
       t.typnotnull as not_null,
       array(select e.enumlabel::text from pg_catalog.pg_enum e
              where e.enumtypid = t.oid order by e.enumsortorder) as labels,
       coalesce((select pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(a.attname,
                pg_catalog.format_type(a.atttypid, a.atttypmod), a.atttypid::int8)
                order by a.attnum)
          from pg_catalog.pg_attribute a
         where a.attrelid = t.typrelid and t.typtype = 'c' and a.attnum > 0
           and not a.attisdropped), '[]') as attributes,
       array(select pg_catalog.pg_get_constraintdef(c.oid) from pg_catalog.pg_constraint c
              where c.contypid = t.oid and c.contype = 'c' order by c.oid) as checks,
       r.rngsubtype::int8 as subtype, pg_catalog.format_type(r.rngsubtype, null) as subtype_name,
       (select pg_catalog.quote_ident(on_.nspname) || '.' || pg_catalog.quote_ident(o.opcname)
          from pg_catalog.pg_opclass o join pg_catalog.pg_namespace on_ on on_.oid = o.opcnamespace
         where o.oid = r.rngsubopc and not o.opcdefault) as operator_class
from pg_catalog.pg_type t
join pg_catalog.pg_namespace n on n.oid = t.typnamespace
left join pg_catalog.pg_range r on r.rngtypid = t.oid
where t.oid = any (%s)
"""
_MULTIRANGE_SQL: Final = """
select r.rngtypid::int8 as range, m.typname as name, r.rngmultitypid::int8 as oid
from pg_catalog.pg_range r join pg_catalog.pg_type m on m.oid = r.rngmultitypid
where r.rngmultitypid = any (%s) or r.rngtypid = any (%s)
"""


async def read_types(connection: Connection, oids: set[int], version: int) -> list[SourceType]:
    """Return the user-defined types among *oids* and all their parts, in order of creation."""
    rows: dict[int, dict[str, Any]] = {}
    wanted = {oid for oid in oids if oid >= FIRST_USER_OID}
    multiranges: dict[int, str] = {}
    while wanted:
        if version >= 14_00_00:
            for found in await fetch_all(connection, _MULTIRANGE_SQL, list(wanted), list(wanted)):
                multiranges[found["range"]] = found["name"]
                wanted.discard(found["oid"])
                wanted.add(found["range"])
        for row in await fetch_all(connection, _TYPES_SQL, list(wanted)):
            rows[row["oid"]] = row
        needed = {oid for row in rows.values() for oid in _parts(row)}
        wanted = {oid for oid in needed if oid >= FIRST_USER_OID and oid not in rows}
    ordered: list[SourceType] = []
    done: set[int] = set()

    def visit(oid: int) -> None:
        if oid in done or oid not in rows:
            return
        done.add(oid)
        row = rows[oid]
        if row["extension"] is None:
            for part in _parts(row):
                visit(part)
        if not row["is_array"]:
            name = RelationName(row["namespace"], row["name"])
            create = None if row["extension"] else _create_sql(row, name, multiranges.get(oid))
            ordered.append(SourceType(oid, name, create, row["extension"]))

    for oid in sorted(rows):
        visit(oid)
    return ordered


async def read_named_types(
    connection: Connection, names: Sequence[str], version: int
) -> list[SourceType]:
    """Return types by *names*, which ``format_type`` wrote, and all their parts."""
    rows = await fetch_all(
        connection,
        "select distinct pg_catalog.to_regtype(name)::oid::int8 as oid"
        " from unnest(%s::text[]) name where pg_catalog.to_regtype(name) is not null",
        list(names),
    )
    return await read_types(connection, {row["oid"] for row in rows}, version)


async def read_type_names(
    plain: Connection, keys: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """Return the names of types at the source, by OID and modifier, as far as they are there."""
    pairs = list(keys)
    rows = await fetch_all(
        plain,
        "select k.oid, k.modifier, pg_catalog.format_type(t.oid, k.modifier) as name"
        " from unnest(%s::int8[], %s::int4[]) k (oid, modifier)"
        " join pg_catalog.pg_type t on t.oid = k.oid::oid",
        [oid for oid, _ in pairs],
        [modifier for _, modifier in pairs],
    )
    return {(row["oid"], row["modifier"]): row["name"] for row in rows}


def _parts(row: dict[str, Any]) -> list[int]:
    attributes = [oid for _, _, oid in row["attributes"]]
    element = [row["element"]] if row["is_array"] else []
    return [oid for oid in [*attributes, *element, row["base"], row["subtype"]] if oid]


def _create_sql(row: dict[str, Any], name: RelationName, multirange: str | None) -> str | None:
    quoted = quote_qualified(name.namespace, name.name)
    match row["kind"]:
        case "e":
            labels = ", ".join(map(quote_literal, row["labels"]))
            return f"create type {quoted} as enum ({labels})"
        case "d":
            not_null = " not null" if row["not_null"] else ""
            checks = "".join(f" {c}" for c in row["checks"] if not c.endswith(_NOT_VALID))
            created = f"create domain {quoted} as {row['base_type']}{not_null}{checks}"
            later = [c for c in row["checks"] if c.endswith(_NOT_VALID)]
            return "; ".join([created, *(f"alter domain {quoted} add {c}" for c in later)])
        case "c":
            attributes = ", ".join(f"{quote_identifier(n)} {t}" for n, t, _ in row["attributes"])
            return f"create type {quoted} as ({attributes})"
        case "r":
            options = [f"subtype = {row['subtype_name']}"]
            if row["operator_class"]:
                options.append(f"subtype_opclass = {row['operator_class']}")
            if multirange is not None:
                options.append(
                    f"multirange_type_name = {quote_qualified(name.namespace, multirange)}"
                )
            return f"create type {quoted} as range ({', '.join(options)})"
        case _:
            return None
