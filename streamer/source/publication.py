"""Our publications on a source, and the SQL that makes them.

Two per source: one that publishes everything, and one that publishes inserts (and truncates) for
relations without a usable replica identity; in the first, such relations would make the
application's own UPDATE and DELETE fail. Both are made at once, even while empty: a publication
that is younger than the slot's confirmed position makes decoding fail (``publication … does not
exist``, before PostgreSQL 18).

From PostgreSQL 15 on a publication can filter rows, so that less travels. It is asked to where that
cannot hurt: see `publishable_filters`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import psycopg
import structlog

from streamer.errors import SourceRejectedError
from streamer.route.mapping import RelationMapping, RelationName, SourceMapping
from streamer.source.catalog import SourceRelation
from streamer.source.connection import Connection, fetch_all, first_line
from streamer.sql import quote_identifier, quote_qualified

log = structlog.get_logger()

FILTERS_SINCE: Final = 15_00_00

Filters = Mapping[RelationName, str]
_NO_FILTERS: Final[Filters] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as it is; ``relations`` is None for FOR ALL TABLES."""

    name: str
    relations: frozenset[RelationName] | None
    via_root: bool
    filtered: frozenset[RelationName]
    """Members of which some rows are held back."""
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
            "select n.nspname as namespace, c.relname as name, r.oid::text as mark,"
            " pg_catalog.to_jsonb(r) ->> 'prqual' is not null as is_filtered"
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
            frozenset(RelationName(m["namespace"], m["name"]) for m in members if m["is_filtered"]),
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


def publishable_filters(
    mappings: Iterable[RelationMapping], relations: Iterable[SourceRelation], version: int
) -> Filters:
    """Return the filters that the publication may apply. Pure.

    An UPDATE or DELETE of the application fails if the filter has columns beyond the replica
    identity, and a filter that fails on a row stops the decoding of all tables. Partitions have
    replica identities of their own.
    """
    by_name = {relation.name: relation for relation in relations}
    filters = {}
    for mapping in mappings:
        condition, relation = mapping.rule.filter, by_name.get(mapping.source)
        if version < FILTERS_SINCE or condition is None or relation is None:
            continue
        used = frozenset(condition.names).intersection(relation.column_names)
        identity = relation.identity
        is_safe = identity.covers(used) or not identity.is_usable  # then it publishes only inserts
        if condition.is_plain and is_safe and not relation.is_partitioned:
            filters[mapping.source] = condition.text
    return filters


def publication_sql(
    source: SourceMapping,
    relations: Iterable[SourceRelation],
    existing: dict[str, Publication],
    version: int,
    filters: Filters = _NO_FILTERS,
    fresh: Collection[RelationName] = (),
) -> list[str]:
    """Return the statements that make our publications publish exactly *relations*. Pure.

    *filters*: what new members are filtered by. *fresh*: members that are copied anew, so that
    their filter may become another one, or go.
    """
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
            everything = name == source.publication
            statements.append(_create_sql(name, tables, everything, version, filters))
        elif publication.relations is not None:
            changing = publication.filtered.union(filters).intersection(fresh)
            present = publication.relations
            statements += _alter_sql(name, tables, present, present & changing, filters)
    return statements


def _create_sql(
    name: str, tables: set[RelationName], everything: bool, version: int, filters: Filters
) -> str:
    publish = "insert, update, delete, truncate" if everything else "insert, truncate"
    options = f"publish = '{publish}'"
    if version >= 13_00_00:
        options += ", publish_via_partition_root = true"
    members = f" for table {_members(tables, filters)}" if tables else ""
    return f"create publication {quote_identifier(name)}{members} with ({options})"


def _alter_sql(
    name: str,
    wanted: set[RelationName],
    present: frozenset[RelationName],
    changing: frozenset[RelationName],
    filters: Filters,
) -> Iterable[str]:
    alter = f"alter publication {quote_identifier(name)}"
    if surplus := (present - wanted) | changing:
        yield f"{alter} drop table {_members(surplus)}"
    if missing := (wanted - present) | (wanted & changing):
        yield f"{alter} add table {_members(missing, filters)}"


def _members(tables: Iterable[RelationName], filters: Filters = _NO_FILTERS) -> str:
    # ONLY: children by inheritance are tables of their own here. Partitions come along all the
    # same.
    return ", ".join(
        f"only {quote_qualified(t.namespace, t.name)}"
        + (f" where ({filters[t]})" if t in filters else "")
        for t in sorted(tables)
    )


async def ensure_publications(
    connection: Connection,
    source: SourceMapping,
    relations: Iterable[SourceRelation],
    version: int,
    mappings: Iterable[RelationMapping] = (),
    fresh: Collection[RelationName] = (),
) -> None:
    """Make our publications publish exactly *relations*; what is there beforehand and fits is used.

    All at once, so that a relation that goes from one to the other misses nothing. Filters of
    *mappings* are published where that is safe and the server takes them. Raises
    SourceRejectedError with the SQL for an administrator when the role may not.
    """
    relations = list(relations)
    existing = await read_publications(connection, source, version)
    filters = publishable_filters(mappings, relations, version)
    statements = publication_sql(source, relations, existing, version)
    for attempt in (filters, _NO_FILTERS):
        wished = publication_sql(source, relations, existing, version, attempt, fresh)
        if wished == statements:
            continue
        try:
            async with connection.transaction():
                for statement in wished:
                    await connection.execute(statement.encode())
        except psycopg.Error as exc:
            if exc.sqlstate is None:
                raise
            log.info("a filter is left to the target", source=source.label, reason=first_line(exc))
        else:
            return
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
