"""Problems of a source's publications, judged as `run` judges them. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

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
    warning,
)
from streamer.commands.check.identity_findings import TableMembership
from streamer.commands.check.rule_findings import resolve_each
from streamer.commands.check.source_facts import SourceFacts
from streamer.commands.check.target_facts import TargetFacts
from streamer.control.table_state import Need
from streamer.errors.command_lines import some_of
from streamer.mapping.relation_names import RelationName
from streamer.mapping.rules import RelationMapping
from streamer.postgres.quoting import quote_identifier
from streamer.report.problems import Severity
from streamer.runtime.guards.publication_plan import (
    Case,
    Fate,
    MappedTable,
    PublicationPlan,
    SourceState,
)
from streamer.runtime.guards.publications import last_published
from streamer.runtime.guards.reconcile import (
    MembersByFingerprint,
    find_faults,
    foresee,
    members_by_fingerprint,
    oid_of,
    planned_changes,
    reconcile,
)
from streamer.source.copy_grants import RoleRights
from streamer.source.identity_advice import advise_identity
from streamer.source.replica_identity import RelationIdentity
from streamer.source.slot_and_publications.column_lists import (
    LISTS_SINCE,
    ColumnLists,
    sent_columns,
)
from streamer.source.slot_and_publications.publication import (
    PublicationChanges,
    find_refusal,
    identity_error,
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
        rights=RoleRights(server.role),
    )
    records = {} if target is None else target.records_of(facts.source)
    unmapped = records.keys() - {mapping.source for mapping in facts.mappings}
    # The plan does not depend on names in the target, so the namespace does not matter.
    mappings = [*facts.mappings, *resolve_each(facts.source, sorted(unmapped), "public")[0]]
    members = members_by_fingerprint(facts.publications.values())
    tables = [_mapped_table(mapping, records.get(mapping.source), members) for mapping in mappings]
    return reconcile(state, tables, facts.source)


def _mapped_table(
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
    changes = remaining_changes(facts, plan)
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
            if case.has_lost_identity:
                case = plan.cases.get(name, case)  # the table is still in its publication
            yield from _check_case(place, case, is_planned=name in plan.cases)


def remaining_changes(facts: SourceFacts, plan: PublicationPlan) -> PublicationChanges:
    """Return the changes of *plan* that remain once the statements of `check_identity` are run.

    A published table that gets an identity again need not leave its publication.
    """
    identities = [
        identity.with_full() if _may_stay(facts, identity) else identity
        for identity in plan.wanted.identities
    ]
    members = replace(plan.wanted, identities=identities)
    return planned_changes(replace(plan, wanted=members), facts.source)


def _may_stay(facts: SourceFacts, identity: RelationIdentity) -> bool:
    """Whether a table without a usable identity may stay in the publication of updates.

    A column list depends on the identity.
    """
    publication = facts.publications.get(facts.source.publication)
    member = None if publication is None else publication.members.get(identity.name)
    if identity.is_usable or member is None or member.columns is not None:
        return False
    return advise_identity(identity, facts.candidates).is_complete


def find_memberships(
    facts: SourceFacts, plan: PublicationPlan
) -> Mapping[RelationName, TableMembership]:
    """Return the memberships of the tables without a usable identity.

    The statements of `check_publications` must run before the statements of the memberships.
    """
    server = facts.server
    assert server is not None
    changes, publications = remaining_changes(facts, plan), facts.publications.values()
    may_publish = all(publication.is_owned for publication in publications)
    may_publish = (
        may_publish and not server.in_recovery and not _publishing_obstacles(facts, changes)
    )
    memberships = {}
    for mapping, relation in facts.mapped():
        if relation.has_usable_identity:
            continue
        name, identity = relation.name, relation.identity
        moves: list[str] = []
        # A column list depends on the identity, so only the next check can name the list.
        if not (may_publish and relation.owned) and not mapping.rule.column_list:
            moves = moves_to_updates(facts.source, name, changes.publications)
        refusal = None
        if find_refusal(publications, identity) is not None:
            refusal = identity_error(publications, identity)
        is_member = any(name in publication.members for publication in publications)
        case = plan.cases.get(name)
        is_reported = case is not None and case.has_lost_identity
        memberships[name] = TableMembership(
            moves, refusal, is_member and not may_publish, is_reported
        )
    return memberships


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
    """Find surplus members that `run` may not remove.

    Return no finding if a rule matches no table: a surplus member may be the table that the rule
    means.
    """
    if any(finding.severity is Severity.ERROR for finding in facts.mapping_findings):
        return
    if not changes.surplus or all(p.is_owned for p in facts.publications.values()):
        return
    yield warning(
        Place(facts.label),
        "its publications have members that streamer does not need: "
        f"{some_of(sorted(changes.surplus_members))}",
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
            has_lists = facts.server.version >= LISTS_SINCE
            more = "`column_list: true`" if has_lists else "PostgreSQL 15"
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
