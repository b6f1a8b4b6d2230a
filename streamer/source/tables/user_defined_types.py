"""Types of a source's tables that are not built into PostgreSQL."""

from collections.abc import Collection, Iterable, Sequence

from streamer.postgres.describing import TYPES_SQL
from streamer.schema.indexes_constraints_types import DefinedType
from streamer.source.connection import Connection, fetch_all, fetch_one


async def read_types(connection: Connection, oids: Collection[int]) -> list[DefinedType]:
    """Return the user-defined types among *oids* and all their parts, in order of creation."""
    row = await fetch_one(connection, TYPES_SQL.replace("{oids}", "%s::oid[]"), list(oids))
    return [DefinedType.of(entry) for entry in row["types"] or ()]


async def read_named_types(connection: Connection, names: Sequence[str]) -> list[DefinedType]:
    """Return the types called *names*, as ``format_type`` writes them, and all their parts."""
    rows = await fetch_all(
        connection,
        "select distinct pg_catalog.to_regtype(name)::oid::int8 as oid"
        " from unnest(%s::text[]) name where pg_catalog.to_regtype(name) is not null",
        list(names),
    )
    return await read_types(connection, [row["oid"] for row in rows])


async def read_type_names(
    plain: Connection, keys: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], str]:
    """Return the names of existing types at the source, by OID and modifier."""
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
