"""Problems of a source's publications, judged as `run` judges them. Pure."""

from collections.abc import Iterable, Mapping

from streamer.bookkeeping.relation_records import RelationRecord
from streamer.commands.check.findings import (
    Finding,
    Fix,
    Place,
    at_source,
    error,
    from_error,
    in_words,
    info,
    some_of,
    warning,
)
from streamer.commands.check.rule_findings import resolve_each
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.control.table_state import Need
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier
from streamer.report.problems import Severity
from streamer.runtime.guards.publications import last_published
from streamer.runtime.guards.reconcile import (
    Case,
    Fate,
    MappedTable,
    MembersByFingerprint,
    PublicationPlan,
    SourceState,
    find_faults,
    foresee,
    members_by_fingerprint,
    oid_of,
    planned_changes,
    reconcile,
)
from streamer.source.catalog import SourceRelation
from streamer.source.slot_and_publications.column_lists import (
    LISTS_SINCE,
    ColumnLists,
    sent_columns,
)
from streamer.source.slot_and_publications.publication import (
    PublicationChanges,
    moves_to_updates,
)


def plan_publications(facts: SourceFacts, target: TargetFacts | None) -> PublicationPlan:
    """Return the plan with which `run` would begin. Raises UnpublishedError."""
    server = facts.server
    assert server is not None
    identities = {name: relation.identity for name, relation in facts.relations.items()}
    oids = {table.oid for table in facts.seen}
    state = SourceState(
        facts.publications,
        identities,
        oids,
        server.version,
        facts.captures,
        facts.candidates,
    )
    records = {} if target is None else target.records_of(facts.source)
    unmapped = records.keys() - {mapping.source for mapping in facts.mappings}
    # The plan does not depend on names in the target, so the namespace does not matter.
    mappings = [*facts.mappings, *resolve_each(facts.source, sorted(unmapped), "public")[0]]
    members = members_by_fingerprint(facts.publications.values())
    tables = [_stored(mapping, records.get(mapping.source), members) for mapping in mappings]
    return reconcile(state, tables, facts.source)


def _stored(
    mapping: RelationMapping, record: RelationRecord | None, members: MembersByFingerprint
) -> MappedTable:
    """Return the table state that `run` would build from the bookkeeping at its start."""
    if record is None:
        return MappedTable(mapping)
    is_in_sync = record.table_state.need not in (Need.ROWS, Need.REQUEST)
    last = last_published(record)
    return MappedTable(
        mapping,
        last,
        oid=oid_of(last, members, is_in_sync=is_in_sync),
        is_in_sync=is_in_sync,
        is_set_aside=record.table_state.is_lost,
        has_history=is_in_sync and mapping.rule.keeps_history,
        is_bare=record.is_bare and mapping.rule.pattern.is_pattern,
    )


def check_publications(
    facts: SourceFacts, target: TargetFacts | None, plan: PublicationPlan
) -> Iterable[Finding]:
    """Whether the source publishes the mapped tables, or streamer can publish them."""
    place, server = Place(facts.label), facts.server
    assert server is not None
    if server.version < 13_00_00:
        for mapping, relation in facts.mapped():
            if relation.is_partitioned:
                problem = "is partitioned, and PostgreSQL 12 cannot publish partitioned tables"
                fix = in_words("remove it from `tables`, or upgrade that server")
                yield error(Place(facts.label, str(mapping.source)), problem, fix)
    changes = planned_changes(plan, facts.source)
    if changes.needed:
        obstacles = _publishing_obstacles(facts, changes)
        if obstacles:
            problem = f'role "{server.role}" cannot publish the tables: {"; ".join(obstacles)}'
            yield error(place, problem, at_source(*changes.needed, words="as an administrator"))
        elif server.in_recovery:
            problem = "the tables are not published"
            yield error(place, problem, at_source(*changes.needed, words="on the primary"))
    yield from _check_surplus(facts, changes)
    later = foresee(plan, facts.source)
    yield from _check_faults(facts, plan, later.cases)
    yield from _check_all_tables(facts)
    yield from _check_excluded(facts, plan.wanted.lists)
    unfollowed = {} if target is None else target.unfollowed
    for name, case in later.cases.items():
        place = Place(facts.label, str(name))
        if (obstacle := unfollowed.get((facts.source.label, str(name)))) is not None:
            yield from_error(place, obstacle)
        elif case.fault is None or case.fault.relation is not None:
            yield from _check_case(place, case, is_planned=name in plan.cases)


def may_change_publications(facts: SourceFacts, plan: PublicationPlan) -> bool:
    """Whether `run` may change the publications, once the statements of `check` are run."""
    assert facts.server is not None
    is_able = all(publication.is_owned for publication in facts.publications.values())
    is_able = is_able and not facts.server.in_recovery
    return is_able and not _publishing_obstacles(facts, planned_changes(plan, facts.source))


def moving_sql(
    facts: SourceFacts, mapping: RelationMapping, relation: SourceRelation, *, may_publish: bool
) -> list[str]:
    """Return the statements that publish updates of a table once the identity allows that.

    Empty if `run` may run these statements. The statements of `check_publications` must run
    first.
    """
    # A column list depends on the identity, so only the next check can name the list.
    if (may_publish and relation.owned) or mapping.rule.column_list:
        return []
    return moves_to_updates(facts.source, relation.name, facts.publications)


def _publishing_obstacles(facts: SourceFacts, changes: PublicationChanges) -> list[str]:
    """Return the privileges that the role lacks for *changes*."""
    server, usage = facts.server, facts.usage
    assert server is not None
    assert usage is not None
    obstacles = []
    present = facts.publications
    names = (facts.source.publication, facts.source.publication_inserts)
    if not usage.may_create and any(name not in present for name in names):
        obstacles.append(f'it lacks CREATE on database "{server.database}"')
    for name, publication in present.items():
        altered = f"alter publication {quote_identifier(name)} "
        if not publication.is_owned and any(sql.startswith(altered) for sql in changes.needed):
            obstacles.append(f'it does not own publication "{name}"')
    published = {table for publication in present.values() for table in publication.members}
    planned = {table for later in changes.publications.values() for table in later.members}
    missing = planned - published
    tables = [facts.relations[name] for name in sorted(missing)]
    if foreign := [str(table.name) for table in tables if not table.owned]:
        obstacles.append(f"it does not own {some_of(foreign)}")
    namespaces = {table.name.namespace for table in tables if table.owned}
    if hidden := sorted(namespaces - facts.usable_namespaces):
        obstacles.append(f"it may not use schema {some_of(hidden)}")
    return obstacles


def _check_surplus(facts: SourceFacts, changes: PublicationChanges) -> Iterable[Finding]:
    """Find members that the mapping lacks and that `run` may not remove.

    Return no finding if a rule matches no table: a surplus member may be the table that the rule
    means.
    """
    if any(finding.severity is Severity.ERROR for finding in facts.mapping_findings):
        return
    if not changes.surplus or all(p.is_owned for p in facts.publications.values()):
        return
    yield warning(
        Place(facts.label),
        "its publications have tables that the mapping lacks: "
        f"{some_of(map(str, sorted(changes.strangers)))}",
        at_source(*changes.surplus, words="as an administrator"),
    )


def _check_faults(
    facts: SourceFacts, plan: PublicationPlan, later: Mapping[RelationName, Case]
) -> Iterable[Finding]:
    """Find publications of an administrator that omit columns or rows.

    *later*: the cases after the changes that streamer may make to publications.
    """
    for fault in find_faults(plan.state, plan.tables, plan.wanted.lists, facts.source):
        fix = at_source(*fault.sql)
        if fault.relation is None:
            publication = Place(facts.label, f'publication "{fault.publication}"')
            yield error(publication, fault.problem, fix)
        elif fault.relation not in later or later[fault.relation].fault is None:
            problem = f'publication "{fault.publication}" {fault.problem}'
            yield warning(Place(facts.label, str(fault.relation)), problem, fix)


def _check_excluded(facts: SourceFacts, lists: ColumnLists) -> Iterable[Finding]:
    """Whether the source sends excluded columns."""
    assert facts.server is not None
    for mapping, relation in facts.mapped():
        place, rule = Place(facts.label, str(mapping.source)), mapping.rule
        if (refused := lists.refused.get(mapping.source)) is not None:
            yield error(place, refused.message, in_words(refused.hint or ""))
            continue
        delivered = set(relation.column_names) - relation.identity.generated
        excluded = rule.exclude.intersection(delivered)
        if not excluded:
            continue
        sent = excluded & sent_columns(mapping, relation.identity)
        if rule.column_list and sent:
            problem = (
                f"{some_of(sorted(sent))} leaves the source although it is excluded, because "
                "`filter` or `set` uses it"
            )
            yield warning(place, problem)
        elif rule.column_list:
            yield info(place, f"{some_of(sorted(excluded))} does not leave the source")
        else:
            is_able = facts.server.version >= LISTS_SINCE
            more = "`column_list: true`" if is_able else "PostgreSQL 15"
            problem = f"excluded {some_of(sorted(excluded))} leaves the source, but is not written"
            yield info(place, f"{problem}; {more} can keep it at the source")


def _check_all_tables(facts: SourceFacts) -> Iterable[Finding]:
    """Find tables that a publication of all tables cannot exclude, and published tables that may
    become unlogged.
    """
    publication = facts.publications.get(facts.source.publication)
    if publication is None:
        return
    scope = "is FOR ALL TABLES" if publication.has_all_tables else "is FOR TABLES IN SCHEMA"
    if publication.has_all_tables or publication.namespaces:
        yield warning(
            Place(facts.label, f'publication "{publication.name}"'),
            f"{scope}, so PostgreSQL lets table owners run ALTER TABLE … SET UNLOGGED. "
            "Changes of an unlogged table are not in the WAL, so such a table needs a resync",
            in_words("re-create the publication with a list of tables"),
        )
    for identity in (relation.identity for relation in facts.relations.values()):
        if identity.is_usable or identity.name in publication.members:
            continue
        if publication.has(identity.name) and "update" in publication.publishes:
            yield warning(
                Place(facts.label, str(identity.name)),
                f'publication "{publication.name}" {scope} and publishes updates, so '
                "the application's own UPDATE and DELETE of this table fail",
                in_words("re-create the publication with a list of tables"),
            )


def _check_case(place: Place, case: Case, *, is_planned: bool) -> Iterable[Finding]:
    """Report the consequence of `run` for a table.

    *is_planned*: the case does not depend on changes of publications.
    """
    match case.fate:
        # Further checks judge identities, column lists and missing tables.
        case Fate.STOP | Fate.BLOCK if case.error and (is_planned or case.fault):
            fix = None if case.error.remedy is None else Fix.of(case.error.remedy)
            yield error(place, case.error.message, fix, case.error.code)
        case Fate.COPY | Fate.COPY_AT_POINT:
            yield warning(place, f"{case.reason}, so `run` copies the table again")
        case Fate.RENAMED:
            yield info(place, f"is {case.name} now, and `run` renames the target by the rules")
        case Fate.DROPPED:
            yield info(place, "was dropped from the source, and its rows stay in the target")
        case Fate.REPLACED:
            yield warning(
                place,
                "another table of the source has its name now; `run` applies "
                "`on_table_dropped` once the target has the last changes of the former table",
            )
