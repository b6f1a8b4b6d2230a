"""Reads, checks and changes streamer's publications at a source.

Each source has two publications. The first publishes all operations; the second publishes only
INSERT and TRUNCATE, of relations without a usable replica identity. In the first, such relations
would make the application's UPDATE and DELETE fail. streamer creates both at once, even while
empty: a publication that is younger than the slot's confirmed position makes decoding fail
(``publication … does not exist``, before PostgreSQL 18).

From PostgreSQL 15 on a publication can filter rows, so that less data travels. streamer publishes
the filters that cannot fail: see `publishable_filters`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import psycopg
import structlog

from streamer.errors.error_classes import (
    IdentityLostError,
    SourceContentionError,
    SourceRejectedError,
    UnpublishedError,
)
from streamer.errors.remedies import Remedy, at_source
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rule_options import Initial
from streamer.mapping.rules import RelationMapping, SourceMapping
from streamer.postgres.quoting import quote_columns, quote_identifier, quote_qualified
from streamer.source.capture.ddl_capture import message_table
from streamer.source.connection import Connection, fetch_all, fetch_one, first_line
from streamer.source.copy_grants import read_role_rights
from streamer.source.replica_identity import RelationIdentity
from streamer.source.server.primary_of_standby import primary_hint, writable
from streamer.source.slot_and_publications.column_lists import NO_LISTS, ColumnLists
from streamer.util.repeated_notices import end_notice, give_notice

log = structlog.get_logger()

FILTERS_SINCE: Final = 15_00_00
SCHEMAS_SINCE: Final = 15_00_00
EXCEPT_SINCE: Final = 19_00_00
LOCK_SECONDS: Final = 3
"""ALTER PUBLICATION locks the table against changes of its definition. The statement gives up soon,
so that no session queues behind the lock.
"""

_CHANGING: Final = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.UndefinedTable,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.DuplicateObject,
    psycopg.errors.UndefinedObject,
)
"""Errors about a table that a foreign session is altering, or has just renamed, dropped, published
or removed from the publication.
"""

Filters = Mapping[RelationName, str]
_NO_FILTERS: Final[Filters] = MappingProxyType({})
_UNFILTERED: Final = "row filter not published, filtering at the target"
_SURPLUS: Final = (
    "publications have members that streamer does not need, and the role may not remove them"
)


@dataclass(frozen=True, slots=True)
class Member:
    """A table that a publication names. ``fingerprint``: the OID in pg_publication_rel."""

    fingerprint: str
    is_filtered: bool = False
    """A row filter excludes some rows."""
    columns: frozenset[str] | None = None
    """The column list; None if the table sends all columns."""
    relid: int | None = None
    """The OID of the table."""


@dataclass(frozen=True, slots=True)
class PublishedSchema:
    """A schema whose tables a publication contains. ``moves``: the transactions that last moved
    tables to the schema, by the tables' OIDs. A table moved out of the schema and back has a new
    value.
    """

    fingerprint: str
    moves: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication in the catalogs. ``fingerprint`` changes with every ALTER PUBLICATION … SET."""

    name: str
    fingerprint: str
    is_owned: bool
    publishes: frozenset[str]
    via_root: bool
    sends_generated: bool = False
    """Whether the publication sends values of generated columns (PostgreSQL 18)."""
    has_all_tables: bool = False
    excepted: frozenset[RelationName] = frozenset()
    """The tables that FOR ALL TABLES EXCEPT leaves out, with their partitions (PostgreSQL 19)."""
    namespaces: Mapping[str, PublishedSchema] = field(default_factory=dict)
    """The schemas of FOR TABLES IN SCHEMA, by name."""
    members: Mapping[RelationName, Member] = field(default_factory=dict)

    def has(self, relation: RelationName) -> bool:
        """Whether *relation*, which is neither unlogged nor a partition, is published."""
        if relation in self.members or relation.namespace in self.namespaces:
            return True
        return self.has_all_tables and relation not in self.excepted

    def fingerprint_of(self, identity: RelationIdentity) -> str | None:
        """Return the publication's fingerprint of a relation, which changes with every interruption
        of its membership.
        """
        if (member := self.members.get(identity.name)) is not None:
            return f"{self.fingerprint}/{member.fingerprint}"
        if identity.is_unlogged or not self.has(identity.name):
            return None
        # Members by name would not show that a different table has the name now.
        oid = identity.root.oid
        if (namespace := self.namespaces.get(identity.name.namespace)) is None:
            return f"{self.fingerprint}/all/{oid}"
        return f"{self.fingerprint}/{namespace.fingerprint}/{oid}/{namespace.moves.get(str(oid))}"

    @property
    def oid(self) -> str:
        return self.fingerprint.partition(".")[0]


def is_of_scope(fingerprint: str | None) -> bool:
    """Whether `Publication.fingerprint_of` returned *fingerprint* for a publication that contains
    the table without its name: FOR ALL TABLES, or FOR TABLES IN SCHEMA. Pure.
    """
    return fingerprint is not None and fingerprint.count("/") > 1


def membership_fingerprint(
    publications: Iterable[Publication], identity: RelationIdentity | None
) -> str | None:
    """Return a fingerprint of a relation's membership in publications; None without a membership.

    The fingerprint changes if a session drops and re-creates the membership. The stream may lack
    changes made in between: from PostgreSQL 18 on the server only logs a warning. Pure.
    """
    if identity is None:
        return None
    fingerprints = (publication.fingerprint_of(identity) for publication in publications)
    return next((fingerprint for fingerprint in fingerprints if fingerprint is not None), None)


def interrupted_error(table: RelationName, statements: Sequence[str]) -> UnpublishedError:
    """Return the error for a table whose membership has a new fingerprint. *statements*: what an
    administrator must run before a copy.
    """
    return UnpublishedError(
        f'table "{table}" was unpublished for a time: a session changed its publication, or '
        "dropped and re-created it",
        hint=administrator_steps(statements) if statements else None,
    )


def find_refusal(publications: Iterable[Publication], identity: RelationIdentity) -> str | None:
    """Return the publication because of which the source refuses updates of a table. Pure."""
    if not identity.refuses_updates:
        return None
    holding = (p for p in publications if "update" in p.publishes and p.has(identity.name))
    return next((publication.name for publication in holding), None)


def identity_error(
    publications: Iterable[Publication],
    identity: RelationIdentity,
    remedy: Remedy | None = None,
) -> IdentityLostError:
    """Return the error of a table without a usable replica identity. Pure.

    A table that is no longer in the publication of updates has updates that the target lacks.
    """
    effect = "its updates and deletes are no longer published"
    if (name := find_refusal(publications, identity)) is not None:
        effect = (
            "the source refuses the application's UPDATE and DELETE while publication "
            f'"{name}" has the table'
        )
    return IdentityLostError(
        f'table "{identity.name}": {identity.obstacle}, so {effect}', hint=remedy
    )


def unlogged_error(identity: RelationIdentity) -> UnpublishedError | None:
    """Return the error of a table with unlogged partitions; None without any."""
    leaves = [leaf.name for leaf in identity.unlogged_leaves]
    if not leaves:
        return None
    tables = [quote_qualified(leaf.namespace, leaf.name) for leaf in leaves]
    more = f" and {len(leaves) - 1} more are" if len(leaves) > 1 else " is"
    return UnpublishedError(
        f'partition "{leaves[0]}"{more} unlogged, and changes of unlogged partitions of table '
        f'"{identity.name}" are not in the WAL',
        hint=Remedy.of(
            "run at the source: ", at_source(*(f"alter table {t} set logged" for t in tables))
        ),
    )


# ---- checking -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublicationFault:
    """The reason why a publication would omit changes of a table, or of all tables."""

    publication: str
    relation: RelationName | None
    """None for all tables."""
    problem: str
    sql: tuple[str, ...]
    only_partitioned: bool = False

    def error(self) -> UnpublishedError:
        """Return the error that stops a table because of this fault."""
        about, once = f" of {self.relation}", ""
        if self.relation is None:
            about, once = "", ", once for all tables of the publication"
        return UnpublishedError(
            f'publication "{self.publication}" {self.problem}{about}',
            hint=Remedy.of(f"have its owner run at the source{once}: ", at_source(*self.sql)),
        )


def published_operations(source: SourceMapping, name: str) -> tuple[str, ...]:
    """Return the operations that streamer's publication *name* must publish. Pure."""
    if name == source.publication:
        return ("insert", "update", "delete", "truncate")
    return ("insert", "truncate")


def publication_faults(
    source: SourceMapping,
    publications: Mapping[str, Publication],
    identities: Iterable[RelationIdentity],
    filtered: Collection[RelationName],
    version: int,
    lists: ColumnLists = NO_LISTS,
) -> list[PublicationFault]:
    """Return the faults of streamer's publications, for `run` and `check`. Pure.

    *filtered*: relations with a `filter` in the mapping, which sets the row filter. *lists*: the
    expected column lists.
    """
    present = list(identities)
    faults: list[PublicationFault] = []
    for publication in publications.values():
        published = [identity for identity in present if publication.has(identity.name)]
        quoted = quote_identifier(publication.name)
        faults += _option_faults(source, publication, present, version)
        for identity in published:
            member = publication.members.get(identity.name)
            if member is None or identity.name in lists.refused:
                continue
            listed = lists.columns.get(identity.name)
            if listed is not None and (member.columns is None or member.columns > listed):
                problem = "sends excluded columns"
            elif member.columns != listed:
                problem = "omits columns by a column list"
            elif member.is_filtered and identity.name not in filtered:
                problem = "omits rows by a row filter"
            else:
                continue
            sqls = (
                f"alter publication {quoted} drop table {_members([identity.name])}",
                f"alter publication {quoted} add table {_members([identity.name], lists=lists)}",
            )
            faults.append(PublicationFault(publication.name, identity.name, problem, sqls))
    return faults


def _option_faults(
    source: SourceMapping,
    publication: Publication,
    present: list[RelationIdentity],
    version: int,
) -> Iterator[PublicationFault]:
    """Yield the faults of the options of *publication*, whose remedy is a single statement.

    Each ALTER PUBLICATION stops all tables that stream, because the tables may have missed changes.
    """
    operations = published_operations(source, publication.name)
    publish = f"publish = '{', '.join(operations)}'"
    problems: list[tuple[str, str, bool]] = []
    if held := [name for name in operations if name not in publication.publishes]:
        problems.append((publish, f"does not publish {', '.join(held)}", False))
    if surplus := sorted(publication.publishes.difference(operations)):
        statements = "so these statements of applications fail in tables without a key"
        problem = f"publishes {', '.join(surplus)}, {statements}"
        problems.append((publish, problem, False))
    if publication.sends_generated:
        problem = "sends generated columns, which copies and the mapping leave out"
        problems.append(("publish_generated_columns = none", problem, False))
    is_partitioned = any(identity.is_partitioned for identity in present)
    if is_partitioned and not publication.via_root and version >= 13_00_00:
        problem = "publishes partitions by their own names, which the mapping lacks"
        problems.append(("publish_via_partition_root = true", problem, True))
    options = ", ".join(dict.fromkeys(option for option, _, _ in problems))
    sql = f"alter publication {quote_identifier(publication.name)} set ({options})"
    for _, problem, only_partitioned in problems:
        yield PublicationFault(publication.name, None, problem, (sql,), only_partitioned)


def concerns(fault: PublicationFault, publication: Publication, identity: RelationIdentity) -> bool:
    """Whether *fault* of *publication* omits changes of a relation. Pure."""
    if fault.publication != publication.name or not publication.has(identity.name):
        return False
    if fault.relation is not None:
        return fault.relation == identity.name
    return identity.is_partitioned or not fault.only_partitioned


# ---- reading -----------------------------------------------------------------------------------

_PUBLICATIONS_SQL: Final = """
select p.oid::text || '.' || p.xmin::text as mark, pg_catalog.to_jsonb(p) as publication,
       pg_catalog.pg_has_role(p.pubowner, 'usage') as owned,
       array(select pg_catalog.jsonb_build_array(n.nspname, c.relname, r.oid::text,
                    pg_catalog.to_jsonb(r) ->> 'prqual' is not null,
                    case when pg_catalog.to_jsonb(r) ->> 'prattrs' is not null then
                      array(select a.attname::text from pg_catalog.pg_attribute a
                             where a.attrelid = r.prrelid and a.attnum > 0
                               and pg_catalog.to_jsonb(r) -> 'prattrs'
                                   @> pg_catalog.to_jsonb(a.attnum)) end, r.prrelid::int8)
               from pg_catalog.pg_publication_rel r
               join pg_catalog.pg_class c on c.oid = r.prrelid
               join pg_catalog.pg_namespace n on n.oid = c.relnamespace
              where r.prpubid = p.oid and {is_member} order by r.oid) as members,
       {excepted} as excepted, {namespaces} as namespaces
from pg_catalog.pg_publication p where p.pubname = any (%s) order by p.pubname
"""
# EXCEPT with a partitioned table also excludes its partitions, which have no row in
# pg_publication_rel.
_EXCEPTED_SQL: Final = """
array(select pg_catalog.jsonb_build_array(n.nspname, c.relname)
        from pg_catalog.pg_publication_rel r
        join pg_catalog.pg_class c on c.oid = r.prrelid or c.oid in (
               select t.relid from pg_catalog.pg_partition_tree(r.prrelid) t)
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace
       where r.prpubid = p.oid and r.prexcept order by 1)"""
# Only SET SCHEMA writes the row of pg_depend that connects a table with its schema.
_NAMESPACES_SQL: Final = """
array(select pg_catalog.jsonb_build_array(n.nspname, r.oid::text, (
               select pg_catalog.jsonb_object_agg(d.objid::text, d.xmin::text)
                 from pg_catalog.pg_depend d
                where d.refclassid = 'pg_catalog.pg_namespace'::regclass and d.refobjid = n.oid
                  and d.classid = 'pg_catalog.pg_class'::regclass and d.objsubid = 0))
        from pg_catalog.pg_publication_namespace r
        join pg_catalog.pg_namespace n on n.oid = r.pnnspid
       where r.pnpubid = p.oid order by r.oid)"""


def publications_sql(version: int) -> str:
    """Return the query for publications by name. Pure."""
    namespaces = _NAMESPACES_SQL if version >= SCHEMAS_SINCE else "'{}'::jsonb[]"
    excepted = _EXCEPTED_SQL if version >= EXCEPT_SINCE else "'{}'::jsonb[]"
    is_member = "not r.prexcept" if version >= EXCEPT_SINCE else "true"
    return _PUBLICATIONS_SQL.format(namespaces=namespaces, excepted=excepted, is_member=is_member)


async def read_publications(
    connection: Connection, source: SourceMapping, version: int
) -> dict[str, Publication]:
    """Read streamer's existing publications, by name; the publication of all operations comes
    first.
    """
    names = [source.publication, source.publication_inserts]
    rows = await fetch_all(connection, publications_sql(version), names)
    return {row["publication"]["pubname"]: _publication(row) for row in rows}


def _publication(row: dict[str, Any]) -> Publication:
    stored: dict[str, Any] = row["publication"]
    return Publication(
        name=stored["pubname"],
        fingerprint=row["mark"],
        is_owned=row["owned"],
        publishes=frozenset(
            operation
            for operation in ("insert", "update", "delete", "truncate")
            if stored[f"pub{operation}"]
        ),
        via_root=stored.get("pubviaroot", False),
        sends_generated=stored.get("pubgencols", "n") != "n",
        has_all_tables=stored["puballtables"],
        excepted=frozenset(RelationName(*names) for names in row["excepted"]),
        namespaces={
            name: PublishedSchema(fingerprint, moves or {})
            for name, fingerprint, moves in row["namespaces"]
        },
        members={
            RelationName(namespace, name): Member(
                fingerprint, is_filtered, None if listed is None else frozenset(listed), relid
            )
            for namespace, name, fingerprint, is_filtered, listed, relid in row["members"]
        },
    )


_MAY_CREATE_SQL: Final = """
select pg_catalog.has_database_privilege(pg_catalog.current_database(), 'create')
       and not exists (select from pg_catalog.pg_class c
                        where c.oid = any (%s::oid[])
                          and not (pg_catalog.pg_has_role(c.relowner, 'usage')
                                   and pg_catalog.has_schema_privilege(c.relnamespace, 'usage')))
       as may_create
"""


async def may_create_publications(
    connection: Connection,
    source: SourceMapping,
    existing: Collection[str],
    identities: Iterable[RelationIdentity],
) -> bool:
    """Whether the role may create the missing publications with all tables of *identities*."""
    if {source.publication, source.publication_inserts}.issubset(existing):
        return True
    oids = [identity.root.oid for identity in identities]
    return bool((await fetch_one(connection, _MAY_CREATE_SQL, oids))["may_create"])


# ---- the wanted state ---------------------------------------------------------------------------


def publishable_filters(
    mappings: Iterable[RelationMapping], identities: Iterable[RelationIdentity], version: int
) -> Filters:
    """Return the filters that the publication may apply. Pure.

    The application's UPDATE or DELETE fails if the filter has columns outside the replica identity.
    A filter that fails on a row stops the decoding of all tables. Each partition has its own
    replica identity.
    """
    by_name = {identity.name: identity for identity in identities}
    filters = {}
    for mapping in mappings:
        condition, identity = mapping.rule.filter, by_name.get(mapping.source)
        if version < FILTERS_SINCE or condition is None or identity is None:
            continue
        used = frozenset(condition.names).intersection(identity.columns)
        is_safe = identity.covers(used) or not identity.is_usable  # then only inserts are published
        if condition.is_plain and is_safe and not identity.is_partitioned:
            filters[mapping.source] = condition.text
    return filters


def unpublished_filters(mappings: Iterable[RelationMapping], filters: Filters) -> set[RelationName]:
    """Return the relations whose filter the publication must not apply. Pure."""
    return {m.source for m in mappings if m.rule.filter is not None} - filters.keys()


@dataclass(frozen=True, slots=True)
class PublicationChanges:
    """Statements that give publications the planned members."""

    needed: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    """Statements that remove `surplus_members`."""
    surplus_members: set[RelationName] = field(default_factory=set)
    """Members that the mapping lacks, and members of the second publication that belong only to the
    first.
    """
    publications: dict[str, Publication] = field(default_factory=dict)
    """The publications after all statements. The fingerprints of new members are unknown."""

    @property
    def all(self) -> list[str]:
        return self.surplus + self.needed


@dataclass(frozen=True, slots=True)
class WantedMembers:
    """The planned tables of streamer's publications, and the allowed changes."""

    identities: Sequence[RelationIdentity] = ()
    mappings: Sequence[RelationMapping] = ()
    """The mappings of the tables, with their filters."""
    lists: ColumnLists = NO_LISTS
    fresh: frozenset[RelationName] = frozenset()
    """Members with a new copy, whose filter and column list may change or be dropped."""
    relisted: frozenset[RelationName] = frozenset()
    """Members in sync whose column list may change, too."""
    kept: frozenset[str] = frozenset()
    """The fingerprints of members that stay, whatever their names."""

    def with_settings_kept(self) -> "WantedMembers":
        """Return the same tables, but keep the filters and column lists of members."""
        return replace(self, fresh=frozenset(), relisted=frozenset())


def publication_changes(
    source: SourceMapping,
    membership: WantedMembers,
    existing: Mapping[str, Publication],
    version: int,
    filters: Filters = _NO_FILTERS,
    unfit: Collection[RelationName] = (),
) -> PublicationChanges:
    """Return the statements that give streamer's publications *membership*. Pure.

    *filters*: the filters of new members. *unfit*: members whose filter must be dropped.
    """
    lists = membership.lists
    tables_of: dict[str, set[RelationName]] = {
        source.publication: set(),
        source.publication_inserts: set(),
    }
    mapped = set()
    for identity in membership.identities:
        mapped.add(identity.name)
        name = source.publication if identity.is_usable else source.publication_inserts
        if identity.name not in lists.refused:
            tables_of[name].add(identity.name)
    changes = PublicationChanges()
    needed, surplus = changes.needed, changes.surplus
    for name, tables in tables_of.items():
        publication = existing.get(name) or _new_publication(source, name, version)
        members = publication.members
        unlike = {t for t, member in members.items() if member.columns != lists.columns.get(t)}
        narrowed = unlike | {table for table, member in members.items() if member.is_filtered}
        changing = narrowed.union(filters).intersection(membership.fresh) | narrowed.intersection(
            unfit
        )
        changing |= unlike.intersection(membership.relisted)
        changing &= tables & members.keys()
        planned = tables | {message_table(source)}
        unplanned = {
            table
            for table, member in members.items()
            if table not in planned
            and (
                table in mapped
                or f"{publication.fingerprint}/{member.fingerprint}" not in membership.kept
            )
        }
        # Updates of such a table would fail at the source. Two publications with different lists of
        # a table make decoding fail.
        harmed = unplanned & mapped
        if name != source.publication:
            harmed &= lists.columns.keys() | lists.refused.keys()
        missing = {table for table in tables if not publication.has(table)}
        alter = f"alter publication {quote_identifier(name)}"
        if unplanned - harmed:
            surplus.append(f"{alter} drop table {_members(unplanned - harmed)}")
            changes.surplus_members.update(unplanned - harmed)
        going, coming = harmed | changing, missing | changing
        if name not in existing:
            needed.append(_create_sql(source, name, tables, version, filters, lists))
        elif going:
            needed.append(f"{alter} drop table {_members(going)}")
        if coming and name in existing:
            needed.append(f"{alter} add table {_members(coming, filters, lists)}")
        staying = {table: members[table] for table in members.keys() - unplanned - going}
        new = {t: Member("", t in filters, lists.columns.get(t)) for t in coming}
        changes.publications[name] = replace(publication, members=staying | new)
    return changes


def member_sql(publication: Publication, table: RelationName) -> str:
    """Return the statement that adds *table*, which need not exist yet. Pure."""
    return f"alter publication {quote_identifier(publication.name)} add table {_members([table])}"


def moves_to_updates(
    source: SourceMapping, table: RelationName, existing: Mapping[str, Publication]
) -> list[str]:
    """Return the statements that move *table* to the publication of updates. Pure."""
    updates, inserts = existing[source.publication], existing[source.publication_inserts]
    moves = []
    if table in inserts.members:
        moves.append((inserts, "drop"))
    if not (updates.has(table) or updates.has_all_tables):
        moves.append((updates, "add"))
    return [
        f"alter publication {quote_identifier(publication.name)} {verb} table {_members([table])}"
        for publication, verb in moves
    ]


def _new_publication(source: SourceMapping, name: str, version: int) -> Publication:
    publishes = frozenset(published_operations(source, name))
    return Publication(name, "", is_owned=True, publishes=publishes, via_root=version >= 13_00_00)


def _create_sql(
    source: SourceMapping,
    name: str,
    tables: set[RelationName],
    version: int,
    filters: Filters,
    lists: ColumnLists,
) -> str:
    options = f"publish = '{', '.join(published_operations(source, name))}'"
    if version >= 13_00_00:
        options += ", publish_via_partition_root = true"
    members = f" for table {_members(tables, filters, lists)}" if tables else ""
    return f"create publication {quote_identifier(name)}{members} with ({options})"


def _members(
    tables: Iterable[RelationName], filters: Filters = _NO_FILTERS, lists: ColumnLists = NO_LISTS
) -> str:
    # ONLY, because streamer treats children by inheritance as separate tables. Partitions follow in
    # any case.
    return ", ".join(
        f"only {quote_qualified(t.namespace, t.name)}"
        + (f" ({quote_columns(sorted(lists.columns[t]))})" if t in lists.columns else "")
        + (f" where ({filters[t]})" if t in filters else "")
        for t in sorted(tables)
    )


# ---- changing ----------------------------------------------------------------------------


async def ensure_publications(
    connection: Connection, source: SourceMapping, membership: WantedMembers, version: int
) -> dict[RelationName, SourceRejectedError]:
    """Give streamer's publications the members of *membership*, unless they fit already.

    One transaction makes all changes, so that no change of a relation that moves between
    publications is lost. A publication gets a filter if the filter is safe and the server accepts
    it. Returns errors for the relations that the role may not publish. Surplus members stay if the
    role may not remove them. Raises UnpublishedError if the role may not create a publication,
    SourceRejectedError for a standby, SourceContentionError if a foreign session changes the
    definition of a table.
    """
    existing = await read_publications(connection, source, version)
    filters = publishable_filters(membership.mappings, membership.identities, version)
    unfit = unpublished_filters(membership.mappings, filters)
    attempts = []
    steady = replace(membership, fresh=frozenset())
    for wished, members in (
        (filters, membership),
        (_NO_FILTERS, membership),
        (_NO_FILTERS, steady),
    ):
        changes = publication_changes(source, members, existing, version, wished, unfit)
        if changes not in attempts:
            attempts.append(changes)
    for changes in attempts:
        try:
            await _execute(connection, source, changes.all)
        except _FORBIDDEN:
            break
        except _CHANGING as exc:
            raise _contention(source, exc) from exc
        except psycopg.Error as exc:
            if changes is attempts[-1] and isinstance(exc, psycopg.errors.UndefinedColumn):
                raise _contention(source, exc) from exc  # a session has just dropped the table
            if exc.sqlstate is None or changes is attempts[-1]:
                raise
            give_notice(log.info, _UNFILTERED, source.label, reason=first_line(exc))
        else:
            if changes is attempts[0]:
                end_notice(_UNFILTERED, source.label)
            end_notice(_SURPLUS, source.label)
            return {}
    return await _ensure_needed(connection, source, membership, existing, version)


async def _ensure_needed(
    connection: Connection,
    source: SourceMapping,
    membership: WantedMembers,
    existing: dict[str, Publication],
    version: int,
) -> dict[RelationName, SourceRejectedError]:
    """Run the permitted statements, relation by relation; return errors for the remaining
    statements.
    """
    membership = membership.with_settings_kept()
    changes = publication_changes(source, membership, existing, version)
    names = source.publication, source.publication_inserts
    if lacking := [name for name in names if name not in existing]:
        try:
            await _execute(connection, source, changes.all)
        except psycopg.errors.InsufficientPrivilege as exc:
            raise _uncreated(source, exc, lacking, changes.needed) from exc
        except psycopg.errors.ReadOnlySqlTransaction as exc:
            raise _rejected(source, exc, changes.needed) from exc
        return {}
    if not changes.surplus:
        end_notice(_SURPLUS, source.label)
    elif not changes.needed:
        give_notice(log.warning, _SURPLUS, source.label, remedy="; ".join(changes.surplus))
    refused: dict[RelationName, tuple[psycopg.Error, list[str]]] = {}
    for identity in membership.identities:
        members = WantedMembers([identity], lists=membership.lists)
        single = publication_changes(source, members, existing, version)
        try:
            await _execute(connection, source, single.needed)
        except _FORBIDDEN as exc:
            refused[identity.name] = exc, single.needed
        except _CHANGING as exc:
            raise _contention(source, exc) from exc
    grants = await _read_missing_grants(connection, membership, refused) if refused else {}
    return {
        table: _rejected(source, exc, [*statements, *grants.get(table, ())])
        for table, (exc, statements) in refused.items()
    }


async def _read_missing_grants(
    connection: Connection, membership: WantedMembers, refused: Collection[RelationName]
) -> Mapping[RelationName, list[str]]:
    """Return the GRANTs that the copies of *refused* tables need, so that an administrator gets all
    statements at once.
    """
    uncopied = {m.source for m in membership.mappings if m.rule.initial is Initial.NONE}
    identities = (i for i in membership.identities if i.name in refused and i.name not in uncopied)
    return (await read_role_rights(connection, [i.root.oid for i in identities])).grants


_FORBIDDEN: Final = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.ReadOnlySqlTransaction,  # a standby, and the url does not name the primary
)


async def _execute(connection: Connection, source: SourceMapping, statements: list[str]) -> None:
    if not statements:
        return
    async with writable(source, connection) as writing, writing.transaction():
        await writing.execute(f"set local lock_timeout = '{LOCK_SECONDS}s'".encode())
        for statement in statements:
            await writing.execute(statement.encode())


def _contention(source: SourceMapping, error: psycopg.Error) -> SourceContentionError:
    return SourceContentionError(
        f'source "{source.label}": publications cannot be changed yet: {first_line(error)}'
    )


def administrator_steps(statements: Iterable[str]) -> Remedy:
    """Return the remedy of a role that may not run *statements*. Pure."""
    return Remedy.of("have an administrator run at the source: ", at_source(*statements))


def _uncreated(
    source: SourceMapping, error: psycopg.Error, lacking: Sequence[str], statements: list[str]
) -> UnpublishedError:
    return UnpublishedError(
        f'source "{source.label}" has no {name_publications(lacking)}, and the role may not create '
        f"publications: {first_line(error)}",
        hint=administrator_steps(statements),
    )


def name_publications(names: Sequence[str]) -> str:
    """Return *names* of publications in words. Pure."""
    plural = "s" if len(names) > 1 else ""
    return f"publication{plural} " + " and ".join(f'"{name}"' for name in names)


def _rejected(
    source: SourceMapping, error: psycopg.Error, statements: list[str]
) -> SourceRejectedError:
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return SourceRejectedError(
            f'source "{source.label}" is a standby, and only its primary can change publications',
            hint=primary_hint(source, *statements),
        )
    return SourceRejectedError(
        f'source "{source.label}": {first_line(error)}',
        hint=administrator_steps(statements),
    )


async def drop_publications(connection: Connection, source: SourceMapping) -> None:
    """Drop both publications, if they exist."""
    async with writable(source, connection) as writing:
        for statement in drop_publications_sql(source):
            await writing.execute(statement.encode())


def drop_publications_sql(source: SourceMapping) -> list[str]:
    """Return the statements of `drop_publications`. Pure."""
    return [
        f"drop publication if exists {quote_identifier(name)}"
        for name in (source.publication, source.publication_inserts)
    ]
