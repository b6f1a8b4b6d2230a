"""Our publications on a source, and the SQL that makes them.

Two per source: one that publishes everything, and one that publishes inserts (and truncates) for
relations without a usable replica identity; in the first, such relations would make the
application's own UPDATE and DELETE fail. Both are made at once, even while empty: a publication
that is younger than the slot's confirmed position makes decoding fail (``publication … does not
exist``, before PostgreSQL 18).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from streamer.errors import SourceRejectedError
from streamer.route.mapping import RelationName, SourceMapping
from streamer.source.catalog import SourceRelation
from streamer.source.connection import Connection, fetch_all, first_line
from streamer.sql import quote_identifier, quote_qualified


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as it is; ``relations`` is None for FOR ALL TABLES."""

    name: str
    relations: frozenset[RelationName] | None
    via_root: bool
    marks: dict[RelationName, str]
    """What stays the same for a relation as long as it is published without a break."""
    mark: str
    """The same for the publication itself."""


async def read_publications(
    connection: Connection, source: SourceMapping, version: int
) -> dict[str, Publication]:
    """Read those of our two publications that exist, by name."""
    via_root = "pubviaroot" if version >= 13_00_00 else "false"
    rows = await fetch_all(
        connection,
        "select oid::int8 as oid, pubname as name, puballtables as everything,"
        f" {via_root} as via_root, oid || '.' || xmin as mark"
        " from pg_catalog.pg_publication where pubname = any (%s)",
        [source.publication, source.publication_inserts],
    )
    publications = {}
    for row in rows:
        members = await fetch_all(
            connection,
            "select n.nspname as namespace, c.relname as name, r.oid::text as mark"
            " from pg_catalog.pg_publication_rel r"
            " join pg_catalog.pg_class c on c.oid = r.prrelid"
            " join pg_catalog.pg_namespace n on n.oid = c.relnamespace where r.prpubid = %s",
            row["oid"],
        )
        marks = {RelationName(m["namespace"], m["name"]): m["mark"] for m in members}
        publications[row["name"]] = Publication(
            row["name"],
            None if row["everything"] else frozenset(marks),
            row["via_root"],
            marks,
            row["mark"],
        )
    return publications


def publication_mark(publications: Iterable[Publication], relation: RelationName) -> str | None:
    """Return what tells a relation's present membership from one made anew; None if it has none.

    Taken out and put in again, or in a publication that was altered or made anew, a relation may
    have missed changes: from PostgreSQL 18 on the server only warns, and goes on without them.
    Pure.
    """
    for publication in publications:
        if publication.relations is None:
            return publication.mark
        if relation in publication.relations:
            return f"{publication.mark}/{publication.marks[relation]}"
    return None


def publication_sql(
    source: SourceMapping,
    relations: Iterable[SourceRelation],
    existing: dict[str, Publication],
    version: int,
) -> list[str]:
    """Return the statements that make our publications publish exactly *relations*. Pure."""
    wanted: dict[str, set[RelationName]] = {
        source.publication: set(),
        source.publication_inserts: set(),
    }
    for relation in relations:
        usable = relation.has_usable_identity
        name = source.publication if usable else source.publication_inserts
        wanted[name].add(relation.name)
    statements = []
    for name, tables in wanted.items():
        publication = existing.get(name)
        if publication is None:
            statements.append(_create_sql(name, tables, name == source.publication, version))
        elif publication.relations is not None:
            statements += _alter_sql(name, tables, publication.relations)
    return statements


def _create_sql(name: str, tables: set[RelationName], everything: bool, version: int) -> str:
    publish = "insert, update, delete, truncate" if everything else "insert, truncate"
    options = f"publish = '{publish}'"
    if version >= 13_00_00:
        options += ", publish_via_partition_root = true"
    members = f" for table {_members(tables)}" if tables else ""
    return f"create publication {quote_identifier(name)}{members} with ({options})"


def _alter_sql(
    name: str, wanted: set[RelationName], present: frozenset[RelationName]
) -> Iterable[str]:
    alter = f"alter publication {quote_identifier(name)}"
    if surplus := present - wanted:
        yield f"{alter} drop table {_members(surplus)}"
    if missing := wanted - present:
        yield f"{alter} add table {_members(missing)}"


def _members(tables: Iterable[RelationName]) -> str:
    # ONLY: children by inheritance are tables of their own here. Partitions come along all the
    # same.
    return ", ".join(f"only {quote_qualified(t.namespace, t.name)}" for t in sorted(tables))


async def ensure_publications(
    connection: Connection,
    source: SourceMapping,
    relations: Iterable[SourceRelation],
    version: int,
) -> None:
    """Make our publications publish exactly *relations*; what is there beforehand and fits is used.

    All at once, so that a relation that goes from one to the other misses nothing. Raises
    SourceRejectedError with the SQL for an administrator when the role may not.
    """
    existing = await read_publications(connection, source, version)
    statements = publication_sql(source, relations, existing, version)
    try:
        async with connection.transaction():
            for statement in statements:
                await connection.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege as exc:
        raise SourceRejectedError(
            f'source "{source.label}": {first_line(exc)}',
            hint=f"have an administrator run there: {'; '.join(statements)}",
        ) from exc


async def drop_publications(connection: Connection, source: SourceMapping) -> None:
    """Drop both publications; those that are already gone are fine."""
    for statement in drop_publications_sql(source):
        await connection.execute(statement.encode())


def drop_publications_sql(source: SourceMapping) -> list[str]:
    """Return the statements of `drop_publications`. Pure."""
    return [
        f"drop publication if exists {quote_identifier(name)}"
        for name in (source.publication, source.publication_inserts)
    ]
