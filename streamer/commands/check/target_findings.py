"""Problems of the target as a whole, and of sources that conflict there. Pure."""

from collections import defaultdict
from collections.abc import Iterable

from streamer.bookkeeping.schema_version import NEWER_HINT
from streamer.commands.check.disjoint_key_findings import KeyOfTable, check_key_ranges
from streamer.commands.check.findings import (
    TARGET,
    Finding,
    Fix,
    Place,
    at_target,
    error,
    from_error,
    in_words,
    info,
    warning,
)
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import (
    OUR_TABLES,
    BookkeepingFacts,
    TargetFacts,
    TargetServer,
    written_sid,
)
from streamer.copy.copy_obstacles import TargetDatabase, own_target_error
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.mapping.shared_targets import TableWriter, find_clashes
from streamer.mapping.sid_and_history_columns import SID
from streamer.postgres import replication_origin
from streamer.postgres.quoting import quote_identifier
from streamer.postgres.supported_versions import MAJOR_TESTED, VERSION_MIN
from streamer.source.catalog import SourceRelation
from streamer.target.missing_grants import Grants
from streamer.target.standby_target import standby_error


def check_target(
    facts: TargetFacts, sources: list[SourceFacts], *, create_tables: bool, connections: int
) -> Iterable[Finding]:
    """Judge the target except its tables. *connections*: the number of concurrent writers."""
    yield from check_server(facts.server)
    yield from check_origins(facts.server, connections)
    yield from check_bookkeeping(facts.server, facts.bookkeeping)
    if facts.refusal is not None:
        problem = f"the target refuses to create the schema: {facts.refusal.message}"
        remedy = facts.refusal.remedy
        fix = None if remedy is None else Fix.of(remedy)
        yield error(Place(None, 'schema "streamer"'), problem, fix)
    yield from check_namespaces(facts, sources, create_tables=create_tables)
    yield from check_collisions(facts, sources)
    yield from check_loops(facts, sources)


def check_server(server: TargetServer) -> Iterable[Finding]:
    """Check the version, the privileges of the role, and the durability of commits."""
    grants = Grants(server.role)
    if server.version < VERSION_MIN:
        problem = f"PostgreSQL {server.version_text} is too old"
        yield error(TARGET, problem, in_words("the oldest supported version is 12"))
    elif server.version // 10000 > MAJOR_TESTED:
        problem = (
            f"PostgreSQL {server.version_text} is newer than any version tested with this streamer"
        )
        yield warning(TARGET, problem, in_words("upgrade streamer if a newer version exists"))
    if server.in_recovery:
        yield from_error(TARGET, standby_error())
    if not server.may_use_temporary:
        grant = at_target(grants.on_database("temporary", server.database))
        problem = (
            f'role "{server.role}" may not create temporary tables, through which '
            "streamer applies changes"
        )
        yield error(TARGET, problem, grant)
    if not server.has_plpgsql:
        problem = "has no language plpgsql, which streamer needs to apply changes in order"
        yield error(TARGET, problem, at_target("create extension plpgsql"))
    elif not server.may_use_plpgsql:
        problem = f'role "{server.role}" may not use language plpgsql'
        yield error(TARGET, problem, at_target(grants.on_plpgsql()))
    if server.synchronous_commit in ("off", "local"):
        problem = (
            f"synchronous_commit is {server.synchronous_commit}; streamer sets it to on for its "
            "own sessions"
        )
        yield info(TARGET, problem)
    if server.fsync == "off":
        problem = "fsync is off: changes that the target loses in a crash are not sent again"
        fix = at_target("alter system set fsync = on", "select pg_reload_conf()")
        yield warning(TARGET, problem, fix)


def check_origins(server: TargetServer, connections: int) -> Iterable[Finding]:
    """Whether replication tools can distinguish streamer's writes from writes of users."""
    if not server.is_source:
        return
    effect = "if the target is also replicated, these writes may return to their source"
    if not server.may_set_origin:
        problem = (
            f'role "{server.role}" may not mark its writes with a replication origin: {effect}'
        )
        fix = in_words("before PostgreSQL 14 only superusers have this privilege")
        if server.version >= 14_00_00:
            fix = at_target(*replication_origin.grants_sql(quote_identifier(server.role)))
        yield warning(TARGET, problem, fix)
    elif server.free_origins < connections:
        setting = "max_replication_slots"
        if server.version >= 18_00_00:
            setting = "max_active_replication_origins"
        problem = (
            f"{max(0, server.free_origins)} replication origins are free, but up to "
            f"{connections} connections write, so some writes have no origin: {effect}"
        )
        needed = server.origins_max - server.free_origins + connections
        words = "then restart that server; or lower `workers` or `sync.jobs`"
        yield warning(
            TARGET, problem, at_target(f"alter system set {setting} = {needed}", words=words)
        )


def check_bookkeeping(server: TargetServer, bookkeeping: BookkeepingFacts) -> Iterable[Finding]:
    """Whether the role may create schema streamer, or owns and may use that schema."""
    grants = Grants(server.role)
    place = Place(None, 'schema "streamer"')
    if not server.may_create:
        # An existing schema needs the privilege, too: CREATE SCHEMA IF NOT EXISTS checks it first.
        problem = f'role "{server.role}" may not create schemas in database "{server.database}"'
        yield error(place, problem, at_target(grants.on_database("create", server.database)))
    if not bookkeeping.exists:
        return
    if not bookkeeping.may_use:
        grant = at_target(grants.on_bookkeeping())
        yield error(place, f'role "{server.role}" may not use it', grant)
    if our_tables := OUR_TABLES.intersection(bookkeeping.tables):
        if "migration" not in bookkeeping.tables:
            problem = f"does not belong to streamer, but has a table {min(our_tables)}"
            fix = at_target("alter schema streamer rename to streamer_other", is_choice=True)
            yield error(place, problem, fix)
        elif bookkeeping.forbidden_tables:
            grant = at_target(grants.on_bookkeeping_tables())
            problem = f'role "{server.role}" may not write its tables'
            yield error(place, problem, grant)
    if (version := bookkeeping.version) is not None and not version.is_usable:
        yield error(place, version.problem, in_words(NEWER_HINT))


def check_namespaces(
    facts: TargetFacts, sources: Iterable[SourceFacts], *, create_tables: bool
) -> Iterable[Finding]:
    """Whether the role may write and create tables in the schemas of the targets."""
    grants = Grants(facts.server.role)
    names = {mapping.target for source in sources for mapping in source.mappings}
    makes: set[str] = set()
    if create_tables:
        makes = {name.namespace for name in names if name not in facts.tables}
        makes |= set(_namespaces_of_types(facts, sources))
    for namespace in sorted({name.namespace for name in names} | makes):
        place = Place(None, f'schema "{namespace}"')
        existing = facts.namespaces.get(namespace)
        if existing is None:
            if namespace in makes and not facts.server.may_create:
                fix = at_target(grants.create_schema(namespace))
                yield error(place, "is missing, and streamer may not create it", fix)
            continue
        if not existing.may_use:
            grant = at_target(grants.on_schema("usage", namespace))
            yield error(place, f'role "{facts.server.role}" may not use it', grant)
        if namespace in makes and not existing.may_create:
            grant = at_target(grants.on_schema("create", namespace))
            problem = f'role "{facts.server.role}" may not create the missing tables there'
            yield error(place, problem, grant)


def _namespaces_of_types(facts: TargetFacts, sources: Iterable[SourceFacts]) -> Iterable[str]:
    """Return the schemas of the types that streamer creates along with tables."""
    for source in sources:
        for mapping in source.mappings:
            if mapping.target not in facts.tables:
                for kind in source.types.get(mapping.source, []):
                    if kind.can_be_created and kind.full_name not in facts.types:
                        yield kind.namespace


_Writer = tuple[SourceFacts, RelationMapping, SourceRelation]


def check_collisions(facts: TargetFacts, sources: Iterable[SourceFacts]) -> Iterable[Finding]:
    """Find sources that would write the same rows, or whose keys would collide."""
    writers: dict[RelationName, list[_Writer]] = defaultdict(list)
    for source in sources:
        for mapping, relation in source.mapped():
            writers[mapping.target].append((source, mapping, relation))
    for target, several in writers.items():
        yield from _check_writers(facts, target, several)


def _check_writers(
    facts: TargetFacts, target: RelationName, writers: list[_Writer]
) -> Iterable[Finding]:
    table = facts.tables.get(target)
    existing = table.relation if table is not None else None
    lacking = existing if existing is not None and not existing.has_sid else None
    names = {source.label: str(mapping.source) for source, mapping, _ in reversed(writers)}
    sids = {source.label: mapping.sid for source, mapping, _ in reversed(writers)}
    written = [
        TableWriter(
            source.label,
            mapping.sid if existing is None else written_sid(mapping, relation, existing),
            mapping.rule.is_disjoint,
        )
        for source, mapping, relation in writers
    ]
    with_sid = [mapping for _, mapping, _ in writers if mapping.rule.sid is not None]
    if lacking is not None and with_sid:
        first = with_sid[0]
        problem = f"`sid` distinguishes rows of target table {target}, which has no column sid"
        fix = at_target(*lacking.add_sid_sql(first.sid))
        yield error(Place(", ".join(names), str(first.source)), problem, fix)
        return
    for clash in find_clashes(target, written, lacks_sid=lacking is not None):
        fix = in_words(clash.hint)
        if lacking is not None and len({sids[label] for label in clash.labels}) > 1:
            words = "or give one of the tables another `target`"
            fix = at_target(*lacking.add_sid_sql(sids[clash.labels[0]]), words=words)
        yield error(Place(", ".join(clash.labels), names[clash.labels[0]]), clash.message, fix)
    ranges = [
        KeyOfTable(source.label, mapping.source, source.key_ranges[mapping.source])
        for source, mapping, _ in writers
        if mapping.source in source.key_ranges
    ]
    yield from check_key_ranges(target, ranges)
    labels, writer = ", ".join(names), next(iter(names.values()))
    row_sids = {mapping.sid for _, mapping, _ in writers}
    if existing is None and None in row_sids and len(row_sids) > 1:
        # The first source that creates the table decides whether the table has a column sid.
        problem = f"not all sources of target table {target} have a sid"
        yield error(Place(labels, writer), problem, in_words("give each of their urls a sid"))
    if existing is not None and existing.has_sid and len(writers) > 1:
        yield from _check_keys(facts, target, writers)


def _check_keys(
    facts: TargetFacts, target: RelationName, writers: list[_Writer]
) -> Iterable[Finding]:
    """Find a unique key that rows of two sources could share."""
    existing = facts.tables[target].relation
    assert existing is not None
    labels = ", ".join(dict.fromkeys(source.label for source, _, _ in writers))
    for key in existing.unique_keys:
        if SID in key:
            continue
        problem = (
            f"target table {target} has a unique key ({', '.join(key)}) without the sid: "
            "rows of two sources with the same key cannot coexist"
        )
        fix = in_words("add the sid to that key")
        if key == existing.primary_key:
            fix = at_target(*existing.key_with_sid_sql())
        yield warning(Place(labels, str(writers[0][1].source)), problem, fix)


def check_loops(facts: TargetFacts, sources: Iterable[SourceFacts]) -> Iterable[Finding]:
    """Find tables whose target is the table itself."""
    server = facts.server
    database = TargetDatabase(
        server.system_identifier, server.timeline, server.started, server.database
    )
    for source in sources:
        if source.server is None or not database.is_of(source.server):
            continue
        for mapping in source.mappings:
            if mapping.source == mapping.target:
                place = Place(source.label, str(mapping.source))
                yield from_error(place, own_target_error(mapping.source))
